"""The numbers of runs: what each has measured.

Means over seeds, deviations, and differences paired by seed.
"""

from collections.abc import Sequence
from math import inf, nan
from statistics import fmean, stdev
from typing import Any

from fedbn_flwr.client.learning_task import LOWER_IS_BETTER
from fedbn_flwr.experiments.recipes.paper import COUNTED, FORMS, QUANTITIES
from fedbn_flwr.experiments.results.rows import Frame, column, finished, pd, score_of
from fedbn_flwr.plugins import extra

AVERAGE = "Average"
#: what stands for a method: the mean, deviation and number of its runs, half the width of the
#: mean's 95 % interval, and the mean difference to the first method, paired by seed, half the width
#: of its interval, and the number of pairs
STATISTICS = ("mean", "deviation", "number", "interval", "difference", "half_width", "pairs")


def is_share(name: str) -> bool:
    """Whether files have a column's numbers as shares, which people read in percent."""
    return not {*name.split("-")} & {*LOWER_IS_BETTER}


def scale_of(name: str) -> float:
    """Return what a column's numbers are multiplied by to be read."""
    return 100.0 if is_share(name) else 1.0


def heading_of(name: str) -> str:
    """Return a column's name with its unit."""
    if name in COUNTED:
        return COUNTED[name]
    heading = name.replace("-", " ").replace("bn", "BN").replace("iou", "IoU")
    return f"{heading}, %" if is_share(name) else heading


def capitalized(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def domains_of(runs: Frame) -> list[str]:
    """Return the names of the domains that runs have scores on."""
    scores = column(runs, f"domain-{score_of(runs)}").dropna()
    return [*dict.fromkeys(name for own in scores for name in own)]


def number_text(number: float, spread: float | None, digits: int = 2, sign: str = "") -> str:
    """Return a number with so many digits after the point, and its spread if it has one.

    What is 0 has no minus.
    """
    return f"{number:{sign}z.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def numbers_of(runs: Frame, quantities: Sequence[str] = (), rounds: int = 1) -> Frame:
    """Return the numbers that finished runs have measured, as people read them, by setting, label,
    seed and column.

    `rounds` are those of the study at full size. By default they are all that is measured and not
    counted.
    """
    ended = finished(runs)
    wide = dict[str, Any]()
    for quantity in quantities or _measured(runs):
        wide |= _columns(ended, quantity, rounds)
    frame = pd.DataFrame(wide, ended.index).astype(float).replace([inf, -inf], nan)
    long = (
        frame.stack(future_stack=True)
        .dropna()
        .rename("value")
        .rename_axis([None, "column"])
        .reset_index("column")
    )
    return ended[["setting", "label", "seed"]].join(long, how="inner")


def _measured(runs: Frame) -> list[str]:
    """Return what runs may have measured and not counted."""
    score = score_of(runs)
    names = [*QUANTITIES, *(f"{score}-{form}" for form in FORMS), f"domain-{score}"]
    return [name for name in dict.fromkeys(names) if name not in COUNTED]


def _columns(ended: Frame, quantity: str, rounds: int) -> dict[str, Any]:
    """Return the columns of a quantity; bytes as FedTAN's paper counts them, in powers of 2^10."""
    made = ended["rounds"]
    sent = column(ended, "paper-bytes")
    if quantity.startswith("domain-"):
        own = column(ended, quantity).dropna()
        if own.empty:
            return {}
        domains = scale_of(quantity) * pd.DataFrame([*own], own.index)
        return {**domains, AVERAGE: domains.mean(axis=1)}
    match quantity:
        # by which methods are compared: accuracy, unless data or objective have another one
        case "score":
            metrics = [*column(ended, "metric").dropna().unique()] or ["accuracy"]
            return {name: scaled(ended, name) for name in metrics}
        case "megabytes":
            return {quantity: sent / made / 2**20}
        case "gigabytes":
            return {quantity: sent / made * rounds / 2**30}
        case "extra-exchanges":  # the share of the exchanges beyond one a round
            return {quantity: 100 * (1 - made / column(ended, "exchanges"))}
    return {quantity: scaled(ended, quantity)}


def scaled(runs: Frame, name: str) -> Any:
    """Return the numbers of a column as people read them."""
    return scale_of(name) * pd.to_numeric(column(runs, name), errors="coerce")


def values_of(numbers: Frame) -> Frame:
    """Return `STATISTICS` of every method from its numbers, by setting, column and label.

    Differences are to the first method that has a number there.
    """
    place = ["setting", "column"]
    firsts = numbers[numbers["label"] == numbers.groupby(place)["label"].transform("first")]
    pairs = numbers.merge(
        firsts[[*place, "seed", "value"]], "left", [*place, "seed"], suffixes=("", " of first")
    )
    pairs["gap"] = pairs["value"] - pairs["value of first"]
    lines = []
    for key, own in pairs.groupby([*place, "label"], sort=False):
        mean, deviation, interval = spread([*own["value"]])
        gaps = [*own["gap"].dropna()]
        difference, _, half_width = spread(gaps)
        lines.append([*key, mean, deviation, len(own), interval, difference, half_width, len(gaps)])
    return pd.DataFrame(lines, columns=[*place, "label", *STATISTICS]).set_index([*place, "label"])


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the standard deviation, and half the width of the mean's 95 % interval
    (Student's t).
    """
    if len(values) < 2:
        return (values[0] if values else nan), 0.0, 0.0
    with extra("cli"):  # takes a second to import, and only tables need it
        from scipy.special import stdtrit

    deviation = stdev(values)
    return (
        fmean(values),
        deviation,
        deviation / len(values) ** 0.5 * float(stdtrit(len(values) - 1, 0.975)),
    )
