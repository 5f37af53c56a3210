"""Write the tables of README.md, results.md and other pages that follow from docs/measured: `make
docs`.

A table stands after a comment with its name. `runs.csv` has a row for every run: a cell is the mean
of its seeds, with the standard deviation. A difference is paired by seed, with its 95 % interval
(Student's t). A run that diverged is never left out of a mean: its cell says so.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from fedbn_flwr.doctor import findings as catalogue
from fedbn_flwr.experiments.results.values import number_text, spread

DOCS = Path(__file__).parent
PAGES = (
    DOCS / "results.md",
    DOCS.parent / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("appendix", "benchmarks", "choosing", "diagnose", "doctor", "fedtan")
    ),
)
#: a recipe and a setting
Place = tuple[str, str]
#: by the heading on a page, the label of a setting in runs.csv
LABELS = {name: name for name in ("one class", "two classes", "Dirichlet 0.1", "Dirichlet 0.3")} | {
    "IID": "i.i.d."
}
KINDS: dict[str, Place] = {heading: ("labels", label) for heading, label in LABELS.items()}
#: the same, with seeds that no choice has seen
FACTORIAL: dict[str, Place] = {heading: ("factorial", label) for heading, label in LABELS.items()}
UNSEEN = FACTORIAL["two classes"]
#: by the layers, the methods of the first screen and of the factorial
AS_THEY_ARE = ("FedAvg", "FixBN", "FedTAN carried", "FedTAN")
CHANGED = (
    "FedAvg+GN-WS",
    "FedAvg+BN-WS",
    "FedWon",
    "FixBN+BN-WS",
    "FedTAN carried+BN-WS",
    "FedTAN+BN-WS",
)
METHODS = AS_THEY_ARE + CHANGED
CENTRALIZED = ("Centralized", "Centralized+BN-WS")
#: points that a method in bold is below the best one at most, by the far end of the interval
CLOSE = 2.0
TWO = KINDS["two classes"]
MOMENTUM = ("momentum", "two classes")
SPEAKERS, FREEZE, FEDBS = ("speakers", ""), ("freeze", ""), ("fedbs", "")
FROZEN = ("frozen", "two classes")
#: what labels of FixBN end with at the default of `frozen-lr`
DEFAULT = ", default"
AT_DEFAULT = tuple(f"{name}{DEFAULT}" for name in ("FixBN", "FixBN+BN-WS"))
DOMAINS = ("domains", "")
CIFAR = ("cifar10", "two classes")
CIFAR_LONGER = ("cifar10-rounds", "two classes")
CIFAR_RESNET = ("cifar10-resnet", "")
CIFAR_MOMENTUM = ("cifar10-momentum", "two classes")
CIFAR_LABELS: dict[str, Place] = {
    name: ("cifar10-labels", name) for name in ("Dirichlet 0.1", "Dirichlet 0.3")
}
#: figures of FedTAN's paper at full size
FIGURE_6: dict[str, Place] = {
    "IID": ("fedtan/figure6", "i.i.d."),
    "two classes": ("fedtan/figure6", "Non-i.i.d."),
}
FIGURE_14 = ("fedtan/figure14", "")
#: by the heading on a page, where a network was already trained
PRETRAINED: dict[str, Place] = {
    name: ("pretrained", name)
    for name in ("two classes", "Dirichlet 0.1", "IID", "domains", "120 rounds", "Lite1")
}
#: another network, and other data
SECOND: dict[str, Place] = {
    name: ("pretrained", name) for name in ("MobileNetV2", "CIFAR-10", "emoji")
}
#: passes over 4,000 images in 40 rounds of five steps of 20 images on five clients
TRAINED = 5
#: methods that solve the head from sums, in one exchange and one pass over the data, however the
#: data are split
SOLVED = ("Fed3R", "FedNCM", "Fed3R personal")
#: the mean over the first half of the rounds
EARLY = ("curves", "two classes, rounds 10 to 50")
#: by what differs from five local steps of small-cnn on ten clients, all of which take part
SITUATIONS = {
    "one local step, 400 rounds": ("local-steps", "E = 1"),
    "twenty, 50 rounds": ("local-steps", "E = 20"),
    "ten of 100 clients take part": ("clients", ""),
    "the same on CIFAR-10, at a learning rate of 1": ("cifar10-clients", ""),
    "batches of two, 400 rounds": ("batches", "B = 2"),
    "ResNet-20": ("resnet", ""),
    "clients are different domains": DOMAINS,
}


class Difference(NamedTuple):
    """A mean difference that is paired by seed, half the width of its 95 % interval, and the number
    of pairs.
    """

    mean: float
    half: float
    pairs: int


@cache
def read(name: str) -> Any:
    """Return a file of docs/measured as a frame of texts."""
    return pd.read_csv(DOCS / "measured" / f"{name}.csv", dtype=str, keep_default_na=False)


#: by the label of a method in runs.csv, how pages call it
NAMES = dict(read("names").itertuples(index=False))
#: what tells a line of a table from others
KEY = ["recipe", "setting", "method"]


@cache
def runs() -> dict[tuple[str, str, str], Any]:
    """Return the accuracies by recipe, setting and method, and there by seed; NaN where training
    diverged.
    """
    made, curves = read("runs"), read("curves")
    made = made.assign(
        score=pd.to_numeric(made["accuracy, %"].where(made["state"] == ""), errors="coerce")
    )
    early = curves[(curves["setting"] == TWO[1]) & (curves["round"].astype(int) <= 50)]
    early = early.assign(
        recipe=EARLY[0], setting=EARLY[1], score=early["accuracy, %"].astype(float)
    )
    early = early.groupby([*KEY, "seed"], sort=False, as_index=False)["score"].agg(fmean)
    grouped = pd.concat([made, early]).groupby(KEY, sort=False)
    return {key: own.set_index(own["seed"].astype(int))["score"] for key, own in grouped}


def mean_text(scores: Sequence[float], deviation: bool = True) -> str:
    """Return the mean of some runs, with the standard deviation if there are several."""
    mean, deviated, _ = spread([*scores])
    return number_text(mean, deviated if deviation and len(scores) > 1 else None, 1)


def cell(place: Place, method: str, deviation: bool = True) -> str:
    """Return the mean over seeds, with the standard deviation; empty if there is no run."""
    scores = runs().get((*place, method), pd.Series())
    if diverged := scores.isna().sum():
        return f"{diverged} of {len(scores)} diverged"
    return mean_text(scores, deviation) if len(scores) else ""


def plain(place: Place, method: str) -> str:
    """Return a cell without the standard deviation."""
    return cell(place, method, deviation=False)


@cache
def rates() -> dict[tuple[str, str, str], dict[float, list[float]]]:
    """Return the held-out accuracies of each rate by recipe, setting and method; NaN where a run
    diverged.

    What the factorial did not choose again, has the rates of the same runs of `here/labels`.
    """
    long = read("rates").melt([*KEY, "seeds"], var_name="rate", value_name="score")
    long = (
        long[long["score"] != ""].replace("diverged", "nan").astype({"rate": float, "score": float})
    )
    tried = {
        key: own.groupby("rate")["score"].agg(list).to_dict() for key, own in long.groupby(KEY)
    }
    lacking = [key for key in runs() if key[0] == "factorial" and key not in tried]
    return tried | {key: tried["labels", *key[1:]] for key in lacking}


@cache
def rates_used() -> dict[tuple[str, str, str], float]:
    """Return the rate of the runs by recipe, setting and method."""
    used: dict[tuple[str, str, str], float] = (
        read("runs").set_index(KEY)["learning rate"].astype(float).to_dict()
    )
    return used


def best_rate(scores: dict[float, list[float]]) -> float:
    """Return the rate with the best mean, of those that were tried with most seeds and have not
    diverged.
    """
    sound = {
        rate: found for rate, found in scores.items() if all(score == score for score in found)
    }
    most = max(map(len, sound.values()))
    return max(
        (rate for rate in sound if len(sound[rate]) == most), key=lambda rate: fmean(sound[rate])
    )


def star(key: tuple[str, str, str]) -> str:
    """Return a star if a rate is the smallest or the largest that was tried."""
    tried = rates().get(key)
    return "*" if tried and rates_used().get(key) in (min(tried), max(tried)) else ""


def marked(place: Place, method: str) -> str:
    """Return a cell, with a star if a better rate may lie outside of those that were tried."""
    return cell(place, method) + star((*place, method))


def difference(
    place: Place, method: str, other: str, where: Place | None = None
) -> Difference | None:
    """Return the difference of a method to another one; None if it has no pairs, or diverged.

    `where` is the place of the other method, if it is another one.
    """
    mine, theirs = (
        runs().get(key, pd.Series()) for key in ((*place, method), (*(where or place), other))
    )
    gaps = [mine[seed] - theirs[seed] for seed in sorted({*mine.index} & {*theirs.index})]
    if not gaps or any(gap != gap for gap in gaps):
        return None
    mean, _, half = spread(gaps)
    return Difference(mean, half, len(gaps))


def told(gap: Difference | None) -> str:
    """Return a difference in words; empty if there is none."""
    if gap is None:
        return ""
    if gap.pairs == 1:
        return f"{number_text(gap.mean, None, 1, '+')} (one seed)"
    return number_text(gap.mean, gap.half, 1, "+")


def gain(place: Place, method: str, other: str = "FedAvg") -> str:
    """Return the difference to another method; empty for that method itself."""
    return "" if method == other else told(difference(place, method, other))


def verdict(gap: Difference, level: bool) -> str:
    """Return whether a claim holds: a difference within its interval decides nothing."""
    if gap.pairs < 2:
        return "one seed"
    if abs(gap.mean) <= gap.half:
        return "undecided"
    return "holds" if gap.mean > 0 and not level else "fails"


def by_mean(place: Place, methods: Sequence[str] = ()) -> list[str]:
    """Return the methods that were run, the best in a setting first.

    One that diverged counts as 0.
    """
    means = {
        name: fmean(found)
        for name in methods or NAMES
        if (found := runs().get((*place, name))) is not None
    }
    return sorted(means, key=lambda name: -means[name] if means[name] == means[name] else 0.0)


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_method(names: Sequence[str], columns: Mapping[str, Callable[[str], str]]) -> str:
    """Return a table with a line for each method.

    `columns` have by heading what makes a cell of a method.
    """
    lines = [
        [f"`{NAMES.get(name, name)}`", *(make(name) for make in columns.values())] for name in names
    ]
    return table(["method", *columns], lines)


def over(
    places: Mapping[str, Place], make: Callable[[Place, str], str] = cell
) -> dict[str, Callable[[str], str]]:
    """Return columns of `by_method`, by heading the place that a cell is of."""
    return {heading: partial(make, place) for heading, place in places.items()}


def longer() -> str:
    """Return what methods have after more rounds, the best after 500 first."""
    names = ("two classes, 500 rounds", "two classes, 1,000 rounds", "IID, 500 rounds")
    return by_method(
        by_mean(("rounds", names[0])), over({name: ("rounds", name) for name in names})
    )


def pretrained() -> str:
    """Return what methods have over the rounds with a network that was already trained, the best at
    the end first.
    """
    place, curves = PRETRAINED["two classes"], read("curves")
    curves = curves[curves["setting"] == ", ".join(place)].assign(
        score=lambda row: row["accuracy, %"].astype(float)
    )
    scores = curves.set_index(["method", "seed", curves["round"].astype(int)])["score"].unstack()
    means = (
        scores.groupby("method")
        .agg(lambda own: own.mean(skipna=False))
        .drop(columns=1, errors="ignore")
    )
    *early, last = means.columns
    trips = of_first_runs(place, "exchanges")
    sent = of_first_runs(place, "MB sent")
    columns: dict[str, Callable[[str], str]] = {
        **{
            f"{number}": lambda name, number=number: number_text(
                means.loc[name, number], None, 1
            ).replace("nan", "")
            for number in early
        },
        f"{last}": partial(cell, place),
        "gain over `fedavg`": partial(gain, place),
        "exchanges": lambda name: f"{int(trips[name]):,}",
        "MB sent": lambda name: f"{float(sent[name]):,.0f}",
        "passes over the data": passes,
    }
    return by_method(by_mean(place), columns)


def passes(name: str) -> str:
    """Return how often a run of two classes looks at each training image, on average."""
    if name in (*SOLVED, "Centralized"):
        return "1"
    if name.startswith("Fed3R, "):
        return str(TRAINED + 1)
    return str(TRAINED)


def second() -> str:
    """Return what methods have with another network that was already trained, and other data."""
    columns = {
        **{f"{heading}, accuracy": partial(cell, place) for heading, place in SECOND.items()},
        **{
            f"emoji, {heading}": partial(further, "emoji", score)
            for heading, score in (
                ("macro", "recall, %"),
                ("Google's", "google, %"),
                ("Twitter's", "twitter, %"),
                ("own vendor's", "personal, %"),
            )
        },
    }
    both = (by_mean(place) for place in SECOND.values())
    return by_method(list(dict.fromkeys(chain(*both))), columns)


def further(setting: str, score: str, name: str) -> str:
    """Return the mean over seeds of a further score of a run; empty if it has none."""
    rows = read("further").set_index(["setting", "method", "score"]).sort_index()
    if (setting, name, score) not in rows.index:
        return ""
    return mean_text(rows.loc[(setting, name, score), "value"].astype(float))


def pretrained_elsewhere() -> str:
    """Return what methods gain with a network that was already trained, where clients or the
    network are others.
    """

    def shown(place: Place, name: str) -> str:
        return gain(place, name) or cell(place, name)

    places = {
        heading: place for heading, place in PRETRAINED.items() if (*place, "FedAvg") in runs()
    }
    names = [
        name
        for name in by_mean(PRETRAINED["two classes"])
        if (*PRETRAINED["domains"], name) in runs()
    ]
    return by_method(names, over(places, shown))


def of_first_runs(place: Place, column: str) -> dict[str, str]:
    """Return a column of the methods' first runs at a place."""
    made = read("runs")
    here = made[(made["recipe"] == place[0]) & (made["setting"] == place[1])].drop_duplicates(
        "method"
    )
    return dict(zip(here["method"], here[column], strict=True))


def frozen_default() -> str:
    """Return what a lower rate after the freeze costs in the factorial, seed by seed."""
    lines = []
    for low in AT_DEFAULT:
        name = low.removesuffix(DEFAULT)
        lines.append(
            [
                f"`{NAMES[low]}`",
                gain(UNSEEN, name),
                told(difference(FROZEN, low, "FedAvg", UNSEEN)),
                told(difference(FROZEN, low, name, UNSEEN)),
            ]
        )
    return table(["method", "`frozen-lr=0.2`", "0.05, the default", "difference"], lines)


def weighed() -> str:
    """Return the accuracies of FedBS in its paper's setting, in parts of the run."""
    curves = read("curves").astype({"round": int, "accuracy, %": float})
    curves = curves[curves["setting"] == ", ".join(FEDBS)]
    lines = []
    for label, own in curves.groupby("method"):
        halves = [
            mean_text(half.groupby("seed")["accuracy, %"].agg(fmean))
            for half in (own[own["round"] <= 30], own[own["round"] > 30])
        ]
        seeds = str(own["seed"].nunique())
        lines.append([f"`{NAMES[label]}`", *halves, cell(FEDBS, label), seeds])
    return table(["method", "rounds 5 to 30", "35 to 60", "after 60", "seeds"], lines)


def freezes() -> str:
    """Return what is left after a freeze at different times."""
    lines = []
    for name, made, never in (
        ("FixBN", "fixbn:freeze-round=0.{0}", "FedAvg"),
        ("FedTAN-II", "fedtan-ii:m={0}0", "FedTAN"),
    ):
        labels = [made.format(tenths) for tenths in (1, 3, 5, 7)]
        cells = [cell(FREEZE, label if (*FREEZE, label) in runs() else name) for label in labels]
        lines.append([f"`{NAMES[name]}`", *cells, f"{cell(FREEZE, never)} (`{NAMES[never]}`)"])
    return table(["freeze after round", "10", "30", "50", "70", "never"], lines)


def rate(place: Place, name: str) -> str:
    """Return the rate of a method's runs, with a star if a better one may lie outside."""
    key = (*place, name)
    return f"{rates_used()[key]:g}{star(key)}"


def unseen_place(name: str) -> Place:
    """Return where a method was run with the factorial's seeds."""
    if name.endswith(DEFAULT):
        return FROZEN
    return UNSEEN


def unseen_gain(name: str) -> str:
    """Return a method's gain over FedAvg with the factorial's seeds."""
    if name == "FedAvg":
        return ""
    return told(difference(unseen_place(name), name, "FedAvg", UNSEEN))


def cifar() -> str:
    """Return what the first screen's methods have on CIFAR-10, and their gains there and on
    Fashion-MNIST, and those after more rounds and of a deeper network.
    """

    columns = {
        "learning rate": partial(rate, CIFAR),
        "accuracy": partial(cell, CIFAR),
        "gain over `fedavg`": partial(gain, CIFAR),
        "on Fashion-MNIST": unseen_gain,
        "after 500 rounds": partial(cell, CIFAR_LONGER),
        "ResNet-20": partial(cell, CIFAR_RESNET),
        "gain there": partial(gain, CIFAR_RESNET),
    }
    return by_method(by_mean(CIFAR), columns)


def cifar_labels() -> str:
    """Return what methods have on CIFAR-10 with labels that are skewed less."""
    columns: dict[str, Callable[[str], str]] = {}
    for label, place in CIFAR_LABELS.items():
        columns[label] = partial(cell, place)
        columns[f"gain, {label.removeprefix('Dirichlet ')}"] = partial(gain, place)
    return by_method(by_mean(CIFAR_LABELS["Dirichlet 0.1"]), columns)


def figure_14() -> str:
    """Return the accuracies and the exchanges of FedTAN-II's runs on MNIST."""
    exchanges = of_first_runs(FIGURE_14, "exchanges")
    columns: dict[str, Callable[[str], str]] = {
        "accuracy": partial(cell, FIGURE_14),
        "difference to `fedtan`": partial(gain, FIGURE_14, other="FedTAN"),
        "exchanges": lambda name: f"{int(exchanges[name]):,}",
    }
    return by_method(by_mean(FIGURE_14), columns)


def momentum() -> str:
    """Return what the factorial's methods have with momentum, which starts anew in each round, or
    stays on the node.
    """
    columns: dict[str, Callable[[str], str]] = {
        "momentum, weight decay": partial(marked, MOMENTUM),
        "kept by nodes": lambda name: cell(MOMENTUM, f"{name}, kept momentum"),
        "gain over `fedavg`": partial(gain, MOMENTUM),
        "CIFAR-10": partial(cell, CIFAR_MOMENTUM),
        "kept by nodes there": lambda name: cell(CIFAR_MOMENTUM, f"{name}, kept momentum"),
        "gain there": partial(gain, CIFAR_MOMENTUM),
    }
    return by_method(by_mean(MOMENTUM, METHODS), columns)


def changes(name: str) -> str:
    """Return what a method puts into the place of a network's layers."""
    if name in ("FedWon", "FedAvg+GN-WS"):
        return "normalizers and convolutions' weights"
    if name in CHANGED:
        return "convolutions' weights"
    return "no"


def first_screen() -> str:
    """Return the README's first table: methods at their defaults, here and on CIFAR-10, after 100
    and 500 rounds, and their exchanges.
    """
    exchanges = of_first_runs(UNSEEN, "exchanges")
    columns: dict[str, Callable[[str], str]] = {
        "after 100 rounds": lambda name: plain(unseen_place(name), name),
        "gain over `fedavg`": unseen_gain,
        "gain on CIFAR-10": partial(gain, CIFAR),
        "with ResNet-20 there": partial(gain, CIFAR_RESNET),
        "after 500 rounds": partial(plain, ("rounds", "two classes, 500 rounds")),
        "exchanges a round": lambda name: (
            f"{float(exchanges[name.removesuffix(DEFAULT)]) / float(exchanges['FedAvg']):g}"
        ),
        "changes the network?": lambda name: changes(name.removesuffix(DEFAULT)),
    }
    fixbn, fixbn_weights = AT_DEFAULT
    weights = (
        "FedAvg+GN-WS",
        "FedWon",
        "FedAvg+BN-WS",
        fixbn_weights,
        "FedTAN carried+BN-WS",
        "FedTAN+BN-WS",
    )
    return by_method(("FedAvg", fixbn, "FedTAN", *weights), columns)


def bold(place: Place, name: str) -> str:
    """Return a cell, bold if the method is the best one, or surely close to it: a wide interval is
    no merit.
    """
    best = by_mean(place, METHODS)[0]
    gap = difference(place, name, best)
    is_close = gap and gap.pairs > 1 and gap.mean - gap.half >= -CLOSE
    is_bold = name == best or (is_close and name not in CENTRALIZED)
    return f"**{plain(place, name)}**" if is_bold else plain(place, name)


def bold_and_gain(place: Place, name: str) -> str:
    """Return the mean of a cell, bold if it is close to the best one, and the gain over FedAvg."""
    gained = gain(place, name)
    return f"{bold(place, name)} ({gained})" if gained else bold(place, name)


def situations() -> str:
    """Return which methods are above FedAvg with BN in which situation, which below, and where that
    is undecided.
    """
    lines = []
    names = ("FedAvg+GN", "SCAFFOLD", "FedProx", *METHODS[1:], *AT_DEFAULT)
    for situation, place in SITUATIONS.items():
        parts: dict[str, list[str]] = {"above": [], "undecided": [], "below": []}
        for name in by_mean(place, names):
            if found := difference(place, name, "FedAvg"):
                is_open = found.pairs < 2 or abs(found.mean) <= found.half
                part = "undecided" if is_open else "above" if found.mean > 0 else "below"
                parts[part].append(f"`{NAMES[name]}` {told(found)}")
        lines.append([situation, plain(place, "FedAvg"), *map(", ".join, parts.values())])
    return table(
        ["", "`fedavg`", "above it", "undecided: within the interval, or one seed", "below it"],
        lines,
    )


def diagnosis(data: str, places: Mapping[str, Place], names: Sequence[str]) -> str:
    """Return what was suggested before training on some data, and what training then brought.

    `places` are by partition. Bold is the best.
    """
    lines = []
    made = read("diagnosis")
    for row in made[made["data"] == data].to_dict("records"):
        scores = [plain(places[row["partition"]], name) for name in names]
        best = max(scores, key=float)
        head = [f"`{row['partition']}`", f"{row['error']} ({row['chance']})", row["beyond chance"]]
        shown = [f"**{score}**" if score == best else score for score in scores]
        lines.append([*head, f"`{row['suggestion']}`", *shown])
    heads = [
        "partition",
        "error",
        "beyond chance",
        "suggestion",
        *(f"`{NAMES[name]}`" for name in names),
    ]
    return table(heads, lines)


def claims() -> str:
    """Return how many of the papers' claims hold here, and those that fail."""
    said, lines = read("claims"), []
    several = said["claim"].duplicated(keep=False)
    for row, is_one in zip(said.itertuples(), ~several, strict=True):
        if gap := difference((row.recipe, row.setting), row.method, row.other):
            where = "" if is_one else f" ({row.setting})"
            lines.append(
                [
                    row.claim + where,
                    row.source,
                    verdict(gap, " level with " in row.claim),
                    told(gap),
                ]
            )
    counts = Counter(line[2] for line in lines)
    text = (
        f"Of {len(lines)} claims, {counts['holds']} hold and {counts['fails']} fail; "
        f"{counts['undecided'] + counts['one seed']} are undecided."
    )
    failed = [[claim, source, gap] for claim, source, word, gap in lines if word == "fails"]
    return f"{table(['claim', 'source', 'difference in points'], failed)}\n\n{text}"


def older() -> str:
    """Return FedAvg's accuracies, and the differences of the methods that were run with older seeds
    only.
    """

    def shown(place: Place, name: str) -> str:
        return cell(place, name) if name == "FedAvg" else gain(place, name) + star((*place, name))

    names = [name for name in by_mean(TWO) if name not in (*METHODS, *CENTRALIZED)]
    wide = [name for name in names if sum((*place, name) in runs() for place in KINDS.values()) > 2]
    rest = ", ".join(f"`{NAMES[name]}` {shown(TWO, name)}" for name in names if name not in wide)
    return f"{by_method(['FedAvg', *wide], over(KINDS, shown))}\n\n{table(['others, with two classes'], [[rest]])}"


#: what is said of the statistics that a model is tested with, by the column `inputs` of unseen.csv
STATISTICS = {
    "none": "as it is",
    "none, mean BN": "mean of the nodes'",
    "20": "of 20",
    "all": "of all",
}


@cache
def unseen_scores(data: str, inputs: str, pseudo: int = 0) -> dict[str, Any]:
    """Return by method the accuracies on domains that nobody trained with, by seed, and their
    `mean`.
    """
    made = read("unseen")
    made = made[
        (made["data"] == data) & (made["inputs"] == inputs) & (made["pseudo"] == str(pseudo))
    ]
    scores = {}
    for method, own in made.astype({"accuracy, %": float}).groupby("method", sort=False):
        frame = own.pivot(index="seed", columns="domain", values="accuracy, %")[
            [*own["domain"].unique()]
        ]
        scores[method] = frame.assign(mean=[fmean(row) for _, row in frame.iterrows()])
    return scores


def unseen() -> str:
    """Return the means over the domains that were left out, with half their 95 % interval."""
    kinds = read("unseen")["data"].unique()

    def mean(data: str, inputs: str, method: str) -> str:
        found = unseen_scores(data, inputs).get(method)
        if found is None:
            return ""
        middle, _, half = spread([*found["mean"].dropna()])
        return number_text(middle, half if len(found) > 1 else None, 1)

    lines = [
        [f"`{method}`", words, *(mean(data, inputs, method) for data in kinds)]
        for method in unseen_scores(kinds[0], "none")
        for inputs, words in STATISTICS.items()
        if any(method in unseen_scores(data, inputs) for data in kinds)
    ]
    return table(["method", "statistics", *kinds], lines)


def without_bn() -> str:
    """Return the accuracies of networks that need no normalizer, beside group normalization."""
    names = ("FedWon", "FedAvg+GN-WS", "FedAvg+Fixup")
    skewed, same = (("normalizer-free", setting) for setting in ("two classes", "i.i.d."))
    columns = {
        "learning rate": partial(rate, skewed),
        "two classes": partial(cell, skewed),
        "IID": partial(cell, same),
    }
    return by_method(names, columns)


def mixtures() -> str:
    """Return, for few and skewed samples, means over the domains with the model's statistics as N
    samples.
    """
    lines = []
    for data in read("unseen")["data"].unique():
        for inputs in ("10", "two classes"):
            ways = [
                unseen_scores(data, "none"),
                *(unseen_scores(data, inputs, n) for n in (0, 16, 64, 256)),
            ]
            means = [f"{fmean(scores['fedavg']['mean']):.1f}" for scores in ways]
            lines.append(
                [data, "100 of two classes" if inputs == "two classes" else inputs, *means]
            )
    return table(["data", "samples", "as it is", "new only", "N = 16", "N = 64", "N = 256"], lines)


def both_statistics(setting: str) -> Iterator[tuple[str, str, Place, str, set[int]]]:
    """Yield methods with running and with exact statistics: name, word, place, label, and the seeds
    of both.
    """
    for method in AS_THEY_ARE:
        both = (
            ("running", ("factorial", setting), method),
            ("exact", ("statistics", setting), f"{method}, exact"),
        )
        seeds = [{*runs().get((*place, label), pd.Series()).index} for _, place, label in both]
        for word, place, label in both if all(seeds) else ():
            yield f"`{NAMES[method]}`", word, place, label, set.intersection(*map(set, seeds))


def evaluations(setting: str) -> str:
    """Return the accuracies over the rounds and at the end, with running and with exact
    statistics.
    """
    lines, shown = list[list[str]](), ["10", "30", "50"]
    curves = read("curves").astype({"accuracy, %": float, "seed": int})
    for name, word, place, label, seeds in both_statistics(setting):
        own = curves[
            (curves["setting"] == ", ".join(place))
            & (curves["method"] == label)
            & curves["seed"].isin(seeds)
        ]
        curve, ended = (
            own.groupby("round")["accuracy, %"].agg(fmean),
            runs()[(*place, label)][sorted(seeds)],
        )
        means = [f"{curve[at]:.1f}" for at in shown]
        lines.append([name, word, f"{rates_used()[(*place, label)]:g}", *means, mean_text(ended)])
    heads = ["after 10", "30", "50 rounds", "after 100"]
    return table(["method", "statistics", "rate", *heads], lines)


#: by the name of a table whose runs are not in runs.csv, the word in its corner
PRINTED = {
    "silent nodes": "nodes that do not reply",
    "carried, five clients": "method",
    "few of many clients": "clients",
}


def printed(name: str, corner: str) -> str:
    """Return a table whose runs are not in runs.csv: their accuracies by seed, or what they were on
    average.
    """
    own = read("printed")[read("printed")["table"] == name]
    cells = own.pivot(index="row", columns="column", values="cell")
    lines, heads = own["row"].unique(), own["column"].unique()
    return table([corner, *heads], [[line, *cells.loc[line, heads]] for line in lines])


def card() -> str:
    """Return the factorial's methods on a CPU and on a GPU, seed by seed."""
    place = ("card", "two classes")
    columns: dict[str, Callable[[str], str]] = {
        "CPU": partial(plain, UNSEEN),
        "H200": partial(plain, place),
        "difference": lambda name: f"{(runs()[*place, name] - runs()[*UNSEEN, name]).mean():+.2f}",
    }
    return by_method(by_mean(place), columns)


def findings() -> str:
    """Return what the doctor finds, with an anchor that it prints for each."""
    rows = [
        (
            f'<a id="{name}"></a>{kind.level}: `{name}`',
            # a detail inside the sentence is a number, or a list
            kind.saw.replace(" {detail}", " ...").format(layers="*layers*", detail=""),
            f"{kind.follows} {kind.fix}".strip(),
        )
        for name, kind in catalogue.KINDS.items()
    ]
    return table(["finding", "what was seen", "what follows, and what fixes it"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "differences": older,
    "more rounds": longer,
    "weighed": weighed,
    "freezes": freezes,
    "domains": lambda: by_method(
        by_mean(DOMAINS),
        {"accuracy": partial(cell, DOMAINS), "difference to `fedavg`": partial(gain, DOMAINS)},
    ),
    "speakers": lambda: by_method(
        by_mean(SPEAKERS), {"rate": partial(rate, SPEAKERS), "accuracy, %": partial(cell, SPEAKERS)}
    ),
    "without BN": without_bn,
    "momentum": momentum,
    "first screen": first_screen,
    "frozen default": frozen_default,
    "pretrained": pretrained,
    "pretrained elsewhere": pretrained_elsewhere,
    "pretrained second": second,
    "findings": findings,
    "card": card,
    "factorial": lambda: by_method(
        [*by_mean(UNSEEN, METHODS), *CENTRALIZED], over(FACTORIAL, bold_and_gain)
    ),
    "cifar10": cifar,
    "cifar10, labels": cifar_labels,
    "figure 6": lambda: by_method(by_mean(FIGURE_6["two classes"]), over(FIGURE_6)),
    "figure 14": figure_14,
    "situations": situations,
    "diagnosis": partial(
        diagnosis,
        "unseen seeds",
        {
            "classes:1": FACTORIAL["one class"],
            "classes:2": FACTORIAL["two classes"],
            "dirichlet:0.1": FACTORIAL["Dirichlet 0.1"],
            "dirichlet:0.3": FACTORIAL["Dirichlet 0.3"],
            "iid": FACTORIAL["IID"],
        },
        ("FedAvg", "FixBN", "FedTAN", "FedWon"),
    ),
    "diagnosis, CIFAR-10": partial(
        diagnosis,
        "cifar10",
        {
            "classes:2": CIFAR,
            "dirichlet:0.1": CIFAR_LABELS["Dirichlet 0.1"],
            "dirichlet:0.3": CIFAR_LABELS["Dirichlet 0.3"],
        },
        ("FedAvg", "FixBN, default", "FedTAN", "FedWon"),
    ),
    "claims": claims,
    "unseen": unseen,
    "mixtures": mixtures,
    "statistics, two classes": lambda: evaluations("two classes"),
    **{name: partial(printed, name, corner) for name, corner in PRINTED.items()},
}


def written(page: str) -> str:
    """Return a page's text with its tables as they follow from the runs."""

    def again(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}"

    return re.sub(r"(<!-- table: (.*?) -->)\n.*?(<!-- end -->)", again, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text()))
