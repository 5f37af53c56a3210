"""Write the tables of results.md, README.md and other pages that follow from docs/measured: `make docs`.

A table stands after a comment with its name. `runs.csv` has a row for every run: a cell is the mean of its seeds, with
the standard deviation. A difference is paired by seed, with its 95 % interval (Student's t). A run that diverged is
never left out of a mean: its cell says so.
"""

import csv
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev

from fedbn_flwr.experiments.results.values import spread

DOCS = Path(__file__).parent
PAGES = (
    DOCS / "results.md",
    DOCS.parent / "README.md",
    *(DOCS / f"{name}.md" for name in ("choosing", "index", "diagnose", "fedtan", "methods")),
)
#: by the label of a method in runs.csv, how pages call it
NAMES = {
    "Centralized": "centralized",
    "FedAvg": "fedavg",
    "FedAvg+GN": "fedavg+gn",
    "FedAvg+GN-WS": "fedavg+gn-ws",
    "FedAvg+BN-WS": "fedavg+bn-ws",
    "FixBN": "fixbn",
    "FixBN+BN-WS": "fixbn+bn-ws",
    "FixBN, kept momentum": "fixbn:momentum-state=local",
    "FedTAN": "fedtan",
    "FedTAN carried": "fedtan:carry=true",
    "FedTAN carried+BN-WS": "fedtan+bn-ws:carry=true",
    "FedTAN carried, last values": "fedtan:carry=true:memory=0",
    "FedTAN-II": "fedtan-ii",
    "FedDNA": "feddna",
    "FedWon": "fedwon",
    "FedWon, normalized features": "fedwon:normalize-features=true",
    "FedWon without clipping": "fedwon:agc=off",
    "FedWon without standardized weights": "fedwon:wsconv=false",
    "SCAFFOLD": "scaffold",
    "FedProx": "fedprox",
    "FedBS": "fedbs",
    "HBN": "hbn",
    "HBN, own settings": "hbn:clip-norm=10, momentum 0.9",
    "FBN": "fbn",
    "FBN, own settings": "fbn:clip-norm=10, momentum 0.9",
    "HeteroFL": "heterofl",
    "FedAvg+LN": "fedavg+ln",
    "FedAvg+IN": "fedavg+in",
    "FedBN": "fedbn",
    "SiloBN": "silobn",
    "FedNorm": "fednorm",
    "MTFL": "mtfl",
    "Standalone": "standalone",
}
#: by the heading on a page, the label of a setting in runs.csv
LABELS = {
    "one class": "one class",
    "two classes": "two classes",
    "Dirichlet 0.1": "Dirichlet 0.1",
    "Dirichlet 0.3": "Dirichlet 0.3",
    "IID": "i.i.d.",
}
OTHER = {
    "E = 1": ("local-steps", "E = 1"),
    "E = 5, as above": ("labels", "two classes"),
    "E = 20": ("local-steps", "E = 20"),
    "ten of 100 clients": ("clients", ""),
    "ResNet-20": ("resnet", ""),
}
FIRST = (
    "FedAvg",
    "FedAvg+GN-WS",
    "FixBN",
    "FedTAN carried",
    "FedTAN carried+BN-WS",
    "FedTAN",
    "FedWon",
    "Centralized",
)
#: a recipe and a setting
Place = tuple[str, str]
SKEWED = [("labels", name) for name in ("one class", "two classes", "Dirichlet 0.1")]
TWO, IID, ONE_STEP, TWENTY = (
    ("labels", "two classes"),
    ("labels", "i.i.d."),
    ("local-steps", "E = 1"),
    ("local-steps", "E = 20"),
)
MOMENTUM = ("momentum", "two classes")
LONGEST = "two classes, 1,000 rounds"
DOMAINS, MANY, SMALL = ("domains", ""), ("clients", ""), ("batches", "B = 2")
#: the mean over the first half of the rounds
EARLY = ("curves", "two classes, rounds 10 to 50")
#: what is left as it is by a method, and what is not, in choosing.md
MAY_CHANGE = ("FedTAN carried+BN-WS", "FedWon", "FedWon, normalized features", "FixBN+BN-WS", "FedAvg+GN-WS")
MAY_NOT = ("FedTAN carried", "FixBN", "FedTAN", "FedAvg")
#: situations in choosing.md
SITUATIONS = {
    "one local step": ONE_STEP,
    "five": TWO,
    "twenty": TWENTY,
    "ten of 100 nodes take part": MANY,
    "batches of two": SMALL,
    "nodes are different domains": DOMAINS,
}
#: what a paper says, where, of which methods, and in which settings it is tried here; `level` means no difference
CLAIMS: Sequence[tuple[str, str, str, str, Sequence[Place]]] = (
    ("FixBN above BN, skewed labels", "FixBN, Table 5", "FixBN", "FedAvg", SKEWED),
    ("FixBN above BN, labels less skewed", "FixBN, Figure 4", "FixBN", "FedAvg", [("labels", "Dirichlet 0.3")]),
    ("FixBN above BN, one local step", "FixBN, Figure 5", "FixBN", "FedAvg", [ONE_STEP]),
    ("FixBN above BN, many local steps", "FixBN, Figure 5", "FixBN", "FedAvg", [TWENTY]),
    ("GN above BN, one local step", "FixBN, Figure 5", "FedAvg+GN", "FedAvg", [ONE_STEP]),
    ("GN above BN, skewed labels", "FixBN, Table 5", "FedAvg+GN", "FedAvg", SKEWED),
    ("GN with standardized weights above GN", "FixBN, Table 4", "FedAvg+GN-WS", "FedAvg+GN", SKEWED),
    ("FixBN above GN with standardized weights", "FixBN, Table 4", "FixBN", "FedAvg+GN-WS", SKEWED),
    ("FixBN with kept momentum above FixBN", "FixBN, Section 7", "FixBN, kept momentum", "FixBN", [MOMENTUM]),
    ("FixBN level with FedTAN", "FixBN, Table 5", "FixBN", "FedTAN", SKEWED),
    ("FixBN level with BN, IID", "FixBN, Table 5", "FixBN", "FedAvg", [IID]),
    ("FedTAN level with BN, IID", "FixBN, Table 5", "FedTAN", "FedAvg", [IID]),
    ("FedTAN above BN, skewed labels", "FedTAN, Table 1", "FedTAN", "FedAvg", SKEWED),
    ("FedTAN above its forward half", "FedTAN, Table 1", "FedTAN", "FedDNA", SKEWED),
    ("centralized training above FedTAN", "FedTAN, Table 1", "Centralized", "FedTAN", [TWO]),
    ("BN above GN, IID", "FedTAN, Tables 1 and 2", "FedAvg", "FedAvg+GN", [IID]),
    ("FedTAN-II level with FedTAN, if it stops late", "FedTAN, Section 6.6", "FedTAN-II", "FedTAN", SKEWED),
    ("FedWon above BN, skewed labels", "FedWon, Table 6", "FedWon", "FedAvg", SKEWED),
    ("FedWon above GN, skewed labels", "FedWon, Table 6", "FedWon", "FedAvg+GN", SKEWED),
    ("FedWon above BN, ten of 100 clients", "FedWon, Table 6", "FedWon", "FedAvg", [MANY]),
    ("FixBN level with BN, ten of 100 clients", "FedWon, Table 6", "FixBN", "FedAvg", [MANY]),
    ("FedBN above BN where domains differ", "FedWon, Table 1", "FedBN", "FedAvg", [DOMAINS]),
    ("FedWon above FedBN where domains differ", "FedWon, Table 1", "FedWon", "FedBN", [DOMAINS]),
    ("FedBN above SiloBN where domains differ", "FedWon, Table 1", "FedBN", "SiloBN", [DOMAINS]),
    ("GN above BN where domains differ", "FedWon, Table 1", "FedAvg+GN", "FedAvg", [DOMAINS]),
    ("FedBN above nodes alone where domains differ", "FedWon, Table 1", "FedBN", "Standalone", [DOMAINS]),
    ("FedWon above BN, batches of 2", "FedWon, Table 2", "FedWon", "FedAvg", [SMALL]),
    ("FedWon above GN, batches of 2", "FedWon, Table 2", "FedWon", "FedAvg+GN", [SMALL]),
    ("FedBS above BN, two classes", "FedBS, Section V", "FedBS", "FedAvg", [TWO]),
    ("FedBS above FedProx, two classes", "FedBS, Section V", "FedBS", "FedProx", [TWO]),
    ("FedBS above BN in the first half of the rounds", "FedBS, Section V", "FedBS", "FedAvg", [EARLY]),
)


@cache
def rows(name: str = "runs") -> list[dict[str, str]]:
    """Return the rows of a file of docs/measured."""
    with (DOCS / "measured" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def key_of(row: dict[str, str]) -> tuple[str, str, str]:
    """Return the recipe, the setting and the method of a row."""
    return row["recipe"], row["setting"], row["method"]


@cache
def runs() -> dict[tuple[str, str, str], dict[int, float]]:
    """Return the accuracies by recipe, setting and method, and there by seed; NaN where training diverged."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows():
        score = float(row["accuracy, %"]) if row["accuracy, %"] and not row["state"] else float("nan")
        found.setdefault(key_of(row), {})[int(row["seed"])] = score
    early: dict[tuple[str, int], list[float]] = {}
    for row in rows("curves"):
        if row["setting"] == TWO[1] and int(row["round"]) <= 50:
            early.setdefault((row["method"], int(row["seed"])), []).append(float(row["accuracy, %"]))
    for (method, seed), scores in early.items():
        found.setdefault((*EARLY, method), {})[seed] = fmean(scores)
    return found


def cell(place: Place, method: str, deviation: bool = True) -> str:
    """Return the mean over seeds, with the standard deviation; empty if there is no run."""
    scores = list(runs().get((*place, method), {}).values())
    sound = [score for score in scores if score == score]
    if len(sound) < len(scores):
        return f"{len(scores) - len(sound)} of {len(scores)} diverged"
    if not scores:
        return ""
    return f"{fmean(scores):.1f}" + (f" ± {stdev(scores):.1f}" if deviation and len(scores) > 1 else "")


@cache
def rates() -> dict[tuple[str, str, str], dict[float, list[float]]]:
    """Return the held-out accuracies of each rate by recipe, setting and method; NaN where a run diverged."""
    tried: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    for row in rows("rates"):
        scores = tried.setdefault(key_of(row), {})
        for rate, score in row.items():
            if score and rate[0].isdigit():
                scores.setdefault(float(rate), []).append(float("nan") if score == "diverged" else float(score))
    return tried


@cache
def rates_used() -> dict[tuple[str, str, str], float]:
    """Return the rate of the runs by recipe, setting and method."""
    return {key_of(row): float(row["learning rate"]) for row in rows()}


def best_rate(scores: dict[float, list[float]]) -> float:
    """Return the rate with the best mean, of those that were tried with most seeds and have not diverged."""
    sound = {rate: found for rate, found in scores.items() if all(score == score for score in found)}
    most = max(map(len, sound.values()))
    return max((rate for rate in sound if len(sound[rate]) == most), key=lambda rate: fmean(sound[rate]))


def star(key: tuple[str, str, str]) -> str:
    """Return a star if a rate is the smallest or the largest that was tried."""
    tried = rates().get(key)
    return "*" if tried and rates_used().get(key) in (min(tried), max(tried)) else ""


def marked(place: Place, method: str) -> str:
    """Return a cell, with a star if a better rate may lie outside of those that were tried."""
    return cell(place, method) + star((*place, method))


def difference(place: Place, method: str, other: str, where: Place | None = None) -> tuple[float, float, int] | None:
    """Return the difference, paired by seed, half the width of its interval, and the number of pairs.

    `where` is the place of the other method, if it is another one.
    """
    mine, theirs = runs().get((*place, method), {}), runs().get((*(where or place), other), {})
    pairs = [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]
    if not pairs or any(pair != pair for pair in pairs):
        return None
    mean, _, half = spread(pairs)
    return mean, half if len(pairs) > 1 else float("inf"), len(pairs)


def told(found: tuple[float, float, int] | None) -> str:
    """Return a difference in words; empty if there is none."""
    if found is None:
        return ""
    mean, half, pairs = found
    return f"{mean:+.1f}" + (f" ± {half:.1f}" if pairs > 1 else " (one seed)")


def verdict(found: tuple[float, float, int], level: bool) -> str:
    """Return whether a claim holds: a difference within its interval decides nothing."""
    mean, half, pairs = found
    if pairs < 2:
        return "one seed"
    if abs(mean) <= half:
        return "within the interval"
    return "holds" if mean > 0 and not level else "fails"


def by_mean(place: Place, methods: Sequence[str]) -> list[str]:
    """Return the methods that were run, the best in a setting first."""
    means = {name: fmean(found.values()) for name in methods if (found := runs().get((*place, name)))}
    return sorted(means, key=lambda name: -means[name] if means[name] == means[name] else 0.0)


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracies() -> str:
    """Return what each method has with each kind of labels."""
    places = [("labels", name) for name in LABELS.values()]
    lines = [[f"`{NAMES[name]}`", *(marked(place, name) for place in places)] for name in by_mean(TWO, [*NAMES])]
    return table(["method", *LABELS], lines)


def other_rates() -> str:
    """Return what methods have at a rate that held-out data did not choose."""
    keys = dict.fromkeys((row["setting"], row["method"]) for row in rows() if row["recipe"] == "other-rates")
    lines = []
    for label, name in keys:
        used = ((recipe, label, name) for recipe in ("labels", "other-rates"))
        cells = (f"{cell(key[:2], name)} (at {rates_used()[key]:g})" for key in used)
        lines.append([f"`{NAMES[name]}`", label, *cells])
    return table(["method", "labels", "chosen", "not chosen"], lines)


def differences() -> str:
    """Return each method's difference to FedAvg."""
    names = [name for name in by_mean(TWO, [*NAMES]) if name != "FedAvg"]
    places = [("labels", name) for name in LABELS.values()]
    lines = [[f"`{NAMES[name]}`", *(told(difference(place, name, "FedAvg")) for place in places)] for name in names]
    return table(["method", *LABELS], lines)


def other_settings() -> str:
    """Return what methods have with two classes a client in other settings."""
    shown = [name for name in NAMES if any((*place, name) in runs() for key, place in OTHER.items() if place != TWO)]
    return table(
        ["method", *OTHER], [[f"`{NAMES[name]}`", *(marked(p, name) for p in OTHER.values())] for name in shown]
    )


def longer() -> str:
    """Return what methods have after more rounds, the best after most rounds first."""
    half, most, even = (("rounds", name) for name in ("two classes, 500 rounds", LONGEST, "IID, 500 rounds"))
    places = [TWO, half, most, IID, even]
    lines = [[f"`{NAMES[name]}`", *(cell(place, name) for place in places)] for name in by_mean(most, [*NAMES])]
    heads = ["two classes, 100 rounds", "500 rounds", "1,000 rounds", "IID, 100 rounds", "500 rounds"]
    return table(["method", *heads], lines)


def costs() -> str:
    """Return what each method sends with two classes a client, and the time of its rounds."""
    seconds = {row["method"]: f"{float(row['seconds a round']):.2f}" for row in rows("seconds")}
    sent = {
        row["method"]: [row["exchanges"], f"{float(row['MB sent']):.0f}"]
        for row in rows()
        if (row["recipe"], row["setting"]) == TWO
    }
    shown = [name for name in by_mean(TWO, [*NAMES]) if name in seconds]
    return table(
        ["method", "exchanges", "MB", "s per round"],
        [[f"`{NAMES[name]}`", *sent[name], seconds[name]] for name in shown],
    )


def freezes() -> str:
    """Return what is left after a freeze at different times."""
    place, lines = ("freeze", ""), []
    for name, made, never in (
        ("FixBN", "fixbn:freeze-round={0:g}", "FedAvg"),
        ("FedTAN-II", "fedtan-ii:m={1}", "FedTAN"),
    ):
        labels = [made.format(after / 100, after) for after in (10, 30, 50, 70)]
        cells = [cell(place, label if (*place, label) in runs() else name) for label in labels]
        lines.append([f"`{NAMES[name]}`", *cells, f"{cell(place, never)} (`{NAMES[never]}`)"])
    return table(["freeze after round", "10", "30", "50", "70", "never"], lines)


def frozen_rates() -> str:
    """Return what FixBN has at two rates after its freeze."""
    lines = [
        [text, *(cell((recipe, label), name) for label in LABELS.values())]
        for text, recipe, name in (
            ("the default rates", "labels", "FixBN"),
            ("1.0, then at most 0.03", "frozen-rate", "FixBN, at most 0.03"),
            ("for comparison: `fedavg`", "labels", "FedAvg"),
        )
    ]
    return table(["`fixbn`", *LABELS], lines)


def domains() -> str:
    """Return the accuracy on each of four domains, the best method first."""
    names = ("real", "photos", "inverted", "sheared")
    lines = []
    for method in by_mean(DOMAINS, [*NAMES]):
        each = [row for row in rows("domains") if row["method"] == method]
        means = [f"{fmean(float(row[name]) for row in each):.1f}" for name in names]
        gain = "" if method == "FedAvg" else told(difference(DOMAINS, method, "FedAvg"))
        lines.append([f"`{NAMES[method]}`", *means, cell(DOMAINS, method), gain])
    return table(["method", *names, "mean", "difference to `fedavg`"], lines)


def liars() -> str:
    """Return what rules in place of means have, with nobody lying and with one liar."""
    methods, settings = ("FedAvg", "FixBN", "FedTAN", "FedTAN carried"), {"honest": "nobody lies", "liar": "one lies"}
    lines = [["", *(word for _ in methods for word in settings)]]
    for rule in ("none", "multi-krum:1", "norm:1", "trimmed:0.2", "median"):
        labels = [name if rule == "none" else f"{name}, {rule}" for name in methods]
        lines.append([f"`{rule}`", *(cell(("liar", each), label) for label in labels for each in settings.values())])
    return table(["`robust`", *(head for name in methods for head in (f"`{NAMES[name]}`", ""))], lines)


def speech() -> str:
    """Return what methods have where a site is a speaker."""
    place = ("speakers", "")
    lines = [
        [f"`{NAMES[name]}`", f"{rates_used()[*place, name]:g}{star((*place, name))}", cell(place, name)]
        for name in by_mean(place, [*NAMES])
    ]
    return table(["method", "rate", "accuracy, %"], lines)


def fedbs_figures() -> str:
    """Return the accuracy of FedBS and FedAvg over the first rounds of FedBS' figures."""
    numbers = sorted({int(row["round"]) for row in rows("fedbs")})
    found = {(row["figure"], row["method"], int(row["round"])): row["accuracy, %"] for row in rows("fedbs")}
    lines = [
        [f"Figure {figure}, `{method}`", *(found.get((figure, method, number), "") for number in numbers)]
        for figure in "45"
        for method in ("fedbs", "fedavg")
    ]
    return table(["round", *map(str, numbers)], lines)


def digits() -> str:
    """Return what layer-wise methods have on small digits."""
    place = ("digits", "two classes")
    lines = []
    for row in rows():
        if (row["recipe"], row["setting"], row["seed"]) == (*place, "0"):
            name = row["method"]
            gain = "" if name == "fedavg" else told(difference(place, name, "fedavg"))
            lines.append([f"`{name}`", cell(place, name), gain, row["MB sent"], f"{int(row['exchanges']):,}"])
    return table(["method", "accuracy, %", "difference to `fedavg`", "MB", "exchanges"], lines)


def momentum() -> str:
    """Return what momentum and weight decay change, and momentum that nodes keep between rounds."""
    lines = [[f"`{NAMES[name]}`", cell(TWO, name), marked(MOMENTUM, name)] for name in by_mean(MOMENTUM, [*NAMES])]
    return table(["method", "as above", "momentum 0.9, weight decay 1e-4"], lines)


def running() -> str:
    """Return what a faster average of the running statistics changes."""
    names = ["FedAvg", "FixBN", "FedTAN carried", "FedTAN"]
    place, faster = ("bn-momentum", "two classes"), "{}, BN momentum 0.5"
    lines = [
        [f"`{NAMES[name]}`", cell(place, faster.format(name)), told(difference(place, faster.format(name), name, TWO))]
        for name in names
    ]
    return table(["method", "0.5", "difference to 0.1"], lines)


def first_screen() -> str:
    """Return the README's table: bold for all whose difference to the best lies within its interval."""
    lines = []
    for heading, label in LABELS.items():
        place = ("labels", label)
        best = by_mean(place, FIRST[:-1])[0]
        row = [heading]
        for name in FIRST[:-1]:
            found = None if name == best else difference(place, name, best)
            among = name == best or (found is not None and abs(found[0]) <= found[1])
            row.append(f"**{cell(place, name)}**" if among else cell(place, name))
        lines.append([*row, cell(TWO, "Centralized")])
    lines.append(["exchanges per round", *("7" if name == "FedTAN" else "1" for name in FIRST)])
    return table(["labels", *(f"`{NAMES[name]}`" for name in FIRST)], lines)


def choices() -> str:
    """Return what methods have that may change the model's layers, and what those have that may not."""
    places = [*(("labels", LABELS[name]) for name in ("one class", "two classes", "Dirichlet 0.1", "IID"))]
    lines = [
        [may, f"`{NAMES[name]}`", *(cell(place, name, deviation=False) for place in (*places, ("rounds", LONGEST)))]
        for may, names in (("may change", MAY_CHANGE), ("stay", MAY_NOT))
        for name in names
    ]
    return table(["layers", "method", "one class", "two classes", "Dirichlet 0.1", "IID", LONGEST], lines)


def situations() -> str:
    """Return which methods are above FedAvg with BN in which situation, and which are not."""
    lines = []
    for situation, place in SITUATIONS.items():
        names = by_mean(place, ["FedAvg", "FedAvg+GN", "SCAFFOLD", "FedProx", *FIRST[1:-1]])
        above = [name for name in names if (found := difference(place, name, "FedAvg")) and found[0] > 0]
        shown = [
            ", ".join(
                f"`{NAMES[name]}` {cell(place, name, deviation=False)}" for name in names if (name in above) is well
            )
            for well in (True, False)
        ]
        lines.append([situation, *shown])
    return table(["", "above `fedavg`, best first", "`fedavg`, and below"], lines)


def own_models() -> str:
    """Return what methods have on four domains, the best first."""
    names = by_mean(DOMAINS, [*NAMES])
    return table([f"`{NAMES[name]}`" for name in names], [[cell(DOMAINS, name, deviation=False) for name in names]])


def diagnosis(data: str) -> str:
    """Return what was suggested before training, and what training then brought; bold is the best."""
    kinds = dict(zip(("classes:1", "classes:2", "dirichlet:0.1", "dirichlet:0.3", "iid"), LABELS.values(), strict=True))
    names = ["FedAvg", "FixBN", "FedTAN", *(["FedWon"] if data == "fashion-mnist" else []), "FedAvg+GN"]
    lines = []
    for row in rows("diagnosis"):
        if row["data"] == data:
            place = ("labels", kinds[row["partition"]])
            scores = [row.get(NAMES[name]) or cell(place, name, deviation=False) for name in names]
            best = max(scores, key=float)
            head = [f"`{row['partition']}`", f"{row['error']} ({row['chance']})", row["beyond chance"]]
            shown = [f"**{score}**" if score == best else score for score in scores]
            lines.append([*head, f"`{row['suggestion']}`", *shown])
    heads = ["partition", "error", "beyond chance", "suggestion", *(f"`{NAMES[name]}`" for name in names)]
    return table(heads, lines)


def standardized() -> str:
    """Return what standardized weights gain under BN, and how that compares with other methods."""
    new = "FedTAN carried+BN-WS"
    others = ("FedAvg+BN-WS", "FedTAN carried", "FedTAN", "FedWon", "FedAvg+GN-WS")
    lines, pairs = [], [("FedAvg+BN-WS", "FedAvg"), ("FixBN+BN-WS", "FixBN"), *((new, other) for other in others)]
    for one, other in pairs:
        found = [told(difference(("labels", label), one, other)) for label in LABELS.values()]
        lines.append([f"`{NAMES[one]}`", f"`{NAMES[other]}`", *found])
    return table(["method", "less", *LABELS], lines)


def claims() -> str:
    """Return what papers say, and what follows from the runs."""
    lines, counts = [], dict[str, int]()
    for text, source, method, other, places in CLAIMS:
        for place in places:
            found = difference(place, method, other)
            if found is None:
                continue
            said = verdict(found, " level with " in text)
            counts[said] = counts.get(said, 0) + 1
            where = f" ({place[1]})" if len(places) > 1 else ""
            lines.append([text + where, source, said, told(found)])
    decided = (
        f"{counts['holds']} hold, {counts['fails']} fail, and {counts['within the interval']} are within the interval"
    )
    text = f"Of {len(lines)} rows, {decided}. {counts['one seed']} have one seed."
    return f"{table(['claim', 'source', 'here', 'difference in points'], lines)}\n\n{text}"


#: by the name of a table whose runs are not in runs.csv, the word in its corner
PRINTED = {
    "silent nodes": "nodes that do not reply",
    "carried, five clients": "method",
    "carried, a quarter of 20 clients": "method",
    "error of the gradient": "",
    "averages over rounds": "variant",
    "few of many clients": "clients",
    "SCAFFOLD's rates": "rate",
}


def printed(name: str, corner: str) -> str:
    """Return a table whose runs are not in runs.csv: their accuracies by seed, or what they were on average."""
    cells = {(row["row"], row["column"]): row["cell"] for row in rows("printed") if row["table"] == name}
    heads = [*dict.fromkeys(column for _, column in cells)]
    lines = [[line, *(cells[line, column] for column in heads)] for line in dict.fromkeys(line for line, _ in cells)]
    return table([corner, *heads], lines)


TABLES: dict[str, Callable[[], str]] = {
    "accuracies": accuracies,
    "differences": differences,
    "other rates": other_rates,
    "other settings": other_settings,
    "more rounds": longer,
    "costs": costs,
    "freezes": freezes,
    "frozen rate": frozen_rates,
    "domains": domains,
    "liars": liars,
    "speakers": speech,
    "FedBS' figures": fedbs_figures,
    "digits": digits,
    "momentum": momentum,
    "BN's momentum": running,
    "first screen": first_screen,
    "choices": choices,
    "situations": situations,
    "own models": own_models,
    "diagnosis of digits": lambda: diagnosis("digits"),
    "diagnosis of Fashion-MNIST": lambda: diagnosis("fashion-mnist"),
    "standardized": standardized,
    "claims": claims,
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
