"""The numbers of runs: what a run fills in, means over seeds, deviations, and differences that are paired by seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean, stdev

from fedbn_flwr.experiments.output.scoring import LOWER_IS_BETTER
from fedbn_flwr.experiments.results.rows import ADAPTED, Row, finished, metric_of, rounds_run
from fedbn_flwr.plugins import extra

#: setting, label of a method, column
Key = tuple[str, str, str]
#: column -> value; the rounds are those of a study at full size
Read = Callable[[Row, int], dict[str, float]]
AVERAGE = "Average"
#: columns that are counted and not measured, with their units: every printed digit says something
COUNTED = {"megabytes": "MiB a round", "gigabytes": "GiB in total", "extra-exchanges": "share of extra exchanges, %"}


def _plain(key: str) -> Read:
    return lambda row, _: {key: scale_of(key) * row[key]}


def _domains(row: Row, _: int) -> dict[str, float]:
    values = {name: 100 * value for name, value in row["domain-accuracy"].items()}
    return {**values, AVERAGE: fmean(values.values())}


def is_share(column: str) -> bool:
    """Whether files have a column's numbers as shares, which people read in percent."""
    return not {*column.split("-")} & {*LOWER_IS_BETTER}


def scale_of(column: str) -> float:
    """Return what a column's numbers are multiplied by to be read."""
    return 100.0 if is_share(column) else 1.0


def number_text(number: float, spread: float | None, digits: int = 2, sign: str = "") -> str:
    """Return a number with so many digits after the point, and its spread if it has one; what is 0 has no minus."""
    return f"{number:{sign}z.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


QUANTITIES: dict[str, Read] = {
    # by which methods are compared: accuracy, unless data or objective have another one
    "score": lambda row, _: {metric_of(row): scale_of(metric_of(row)) * row[metric_of(row)]},
    **{key: _plain(key) for key in ("accuracy", "mean-iou", "accuracy-personal", "accuracy-mean-bn")},
    **{key: _plain(key) for key in ADAPTED},
    # of every domain, and the mean over domains
    "domain-accuracy": _domains,
    **{key: _plain(key) for key in ("loss", "train-loss", "train-loss-global")},
    # as FedTAN's paper counts, in powers of 2^10: a round, and in as many rounds as the recipe has at full size
    "megabytes": lambda row, _: {"megabytes": row["paper-bytes"] / rounds_run(row) / 2**20},
    "gigabytes": lambda row, rounds: {"gigabytes": row["paper-bytes"] / rounds_run(row) * rounds / 2**30},
    # the share of the exchanges beyond one a round
    "extra-exchanges": lambda row, _: {"extra-exchanges": 100 * (1 - rounds_run(row) / row["exchanges"])},
}


def columns_of(row: Row, quantity: str, rounds: int) -> dict[str, float]:
    """Return the columns that a run fills in; none if it could not train or did not record the quantity."""
    try:
        columns = QUANTITIES.get(quantity, _plain(quantity))(row, rounds)
    except (KeyError, TypeError):  # files have null in place of a number that is not finite
        return {}
    return {column: value for column, value in columns.items() if isfinite(value)}


def heading_of(column: str) -> str:
    """Return a column's name with its unit."""
    return COUNTED.get(column) or column.replace("-", " ").replace("bn", "BN") + ", %" * is_share(column)


@dataclass(frozen=True)
class Value:
    """A number of one method over its seeds."""

    method: str
    mean: float
    deviation: float
    #: of runs
    number: int
    #: mean difference to the first method, paired by seed, half the width of its 95 % interval, and the number of pairs
    difference: float = nan
    half_width: float = 0.0
    pairs: int = 0
    #: half the width of the 95 % interval of the mean
    interval: float = 0.0

    def __str__(self) -> str:
        return number_text(self.mean, self.deviation if self.number > 1 else None)


def compared(numbers: Mapping[str, Mapping[int, float]]) -> dict[str, Value]:
    """Return the value of every method from its numbers by seed; differences are to the first method."""
    values, first = {}, next(iter(numbers.values()), {})
    for method, by_seed in numbers.items():
        pairs = [number - first[seed] for seed, number in by_seed.items() if seed in first]
        mean, deviation, interval = spread([*by_seed.values()])
        difference, _, half_width = spread(pairs)
        values[method] = Value(method, mean, deviation, len(by_seed), difference, half_width, len(pairs), interval)
    return values


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the standard deviation, and half the width of the mean's 95 % interval (Student's t)."""
    if len(values) < 2:
        return (values[0] if values else nan), 0.0, 0.0
    with extra("cli"):  # takes a second to import, and only tables need it
        from scipy.special import stdtrit

    deviation = stdev(values)
    return fmean(values), deviation, deviation / len(values) ** 0.5 * float(stdtrit(len(values) - 1, 0.975))


def values_of(rows: Sequence[Row], quantities: Sequence[str] = (), rounds: int = 1) -> dict[Key, Value]:
    """Return the values of the finished runs; by default of all that they have measured.

    `rounds` are those of the study at full size.
    """
    runs, numbers = finished(rows), dict[tuple[str, str], dict[str, dict[int, float]]]()
    for row in runs:
        for quantity in quantities or [name for name in QUANTITIES if name not in COUNTED]:
            for column, value in columns_of(row, quantity, rounds).items():
                numbers.setdefault((row["setting"], column), {}).setdefault(row["label"], {})[row["seed"]] = value
    return {
        (setting, label, column): value
        for (setting, column), by_method in numbers.items()
        for label, value in compared(by_method).items()
    }
