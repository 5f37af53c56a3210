"""Draws the pictures of docs/results.md from the tables in docs/measured.

python docs/draw_results.py

`runs.csv` has the last accuracy of every run of the recipes `here/...`, as their `summary.json` has it. `curves.csv` is
that of `fedbn-flwr report --format csv`. `seconds.csv` has the median seconds of a round.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedbn_flwr.experiments.results.plots import draw_runs, figure
from fedbn_flwr.experiments.results.rows import pd
from fedbn_flwr.experiments.results.values import spread

HERE = Path(__file__).parent
FOLDER = HERE / "measured"
SCORE = "accuracy, %"
#: methods of the pictures, in the order of their colours
DRAWN = (
    "FedAvg",
    "FedAvg+GN",
    "FixBN",
    "FedTAN",
    "FedTAN carried",
    "FedWon",
    "SCAFFOLD",
    "Centralized",
    "FedAvg+GN-WS",
    "FedTAN carried+BN-WS",
)
#: the same with other statistics, in the picture of long runs
EXACT = "FedTAN, exact"
LABELS = ("one class", "two classes", "Dirichlet 0.1", "Dirichlet 0.3", "i.i.d.")
#: methods of README's picture
FACTORIAL = ("FedAvg", "FedAvg+GN-WS", "FixBN", "FedWon", "FedTAN", "FedTAN+BN-WS", "FedTAN carried+BN-WS")
#: panels of the picture of other settings: what differs, and by the name of a place its recipe and setting
USUAL = ("labels", "two classes")
SETTINGS = {
    "local steps": {"1": ("local-steps", "E = 1"), "5": USUAL, "20": ("local-steps", "E = 20")},
    "clients and model": {"10": USUAL, "10 of 100": ("clients", ""), "ResNet-20": ("resnet", "")},
}
#: by method, the share of the rounds before the freeze
FREEZES = {
    "FixBN": {
        "fixbn:freeze-round=0.1": 0.1,
        "fixbn:freeze-round=0.3": 0.3,
        "FixBN": 0.5,
        "fixbn:freeze-round=0.7": 0.7,
    },
    "FedTAN-II": {f"fedtan-ii:m={rounds}": rounds / 100 for rounds in (10, 30, 50, 70)},
}
AXES = {
    "round": "round",
    "exchanges": "exchanges",
    "MB sent": "MB sent and received by all clients",
    "seconds": "seconds of a simulation on one core",
}
#: accuracies by recipe and setting, and by method
Found = dict[tuple[str, str], dict[str, list[float]]]
STYLES = ("solid", "dashed", "dashdot", "dotted")


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with (FOLDER / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def draw_curves(setting: str, axes: Sequence[str], path: Path) -> None:
    """Draw the accuracy of the methods that have all axes: round, exchanges, bytes or seconds."""
    seconds = {row["method"]: float(row["seconds a round"]) for row in read("seconds")}
    # some methods have no times
    names = [name for name in (*DRAWN, EXACT) if name in seconds or "seconds" not in axes]
    lines: dict[str, dict[str, list[dict[str, str]]]] = {name: defaultdict(list) for name in names}
    for row in read("curves"):
        if row["setting"] == setting and row["method"] in lines:
            row["seconds"] = str(int(row["round"]) * seconds.get(row["method"], 0.0))
            lines[row["method"]][row["seed"]].append(row)
    with figure(path, len(axes), (4.0 * len(axes), 5)) as (picture, panels):
        for panel, axis in zip(panels, axes, strict=True):
            for index, (method, seeds) in enumerate((name, seeds) for name, seeds in lines.items() if seeds):
                points = [
                    {"run": seed, "x": float(row[axis]), "y": float(row[SCORE])}
                    for seed, rows in seeds.items()
                    for row in rows
                ]
                draw_runs(
                    panel, pd.DataFrame(points), label=method, linestyle=STYLES[index % len(STYLES)], color=f"C{index}"
                )
            panel.set(xlabel=AXES[axis], ylabel=SCORE if axis == "round" else "")
            panel.grid(alpha=0.3)
            if axis in ("exchanges", "MB sent"):
                panel.set_xscale("log")
        shown = panels[0].get_legend_handles_labels()
        picture.legend(*shown, loc="outside lower center", ncols=2 * len(axes), frameon=False)


def draw_factorial(path: Path) -> None:
    """Draw the mean accuracy of ten seeds over rounds, exchanges and bytes, with its 95 % interval."""
    with figure(path, 3, (12, 4.5)) as (picture, panels):
        for method in FACTORIAL:
            seeds: dict[str, list[dict[str, str]]] = defaultdict(list)
            for row in read("curves"):
                if (row["setting"], row["method"]) == ("factorial, two classes", method):
                    seeds[row["seed"]].append(row)
            at = list(zip(*seeds.values(), strict=True))
            means, _, margins = zip(*(spread([float(row[SCORE]) for row in rows]) for rows in at), strict=True)
            ends = [[mean + sign * margin for mean, margin in zip(means, margins, strict=True)] for sign in (-1, 1)]
            for panel, axis in zip(panels, AXES, strict=False):
                x = [float(rows[0][axis]) for rows in at]
                (line,) = panel.plot(x, means, label=method)
                panel.fill_between(x, *ends, color=line.get_color(), alpha=0.15, linewidth=0)
                panel.set(xlabel=AXES[axis], ylabel=SCORE if axis == "round" else "")
                panel.grid(alpha=0.3)
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)


def accuracies() -> Found:
    """Return the accuracies of all runs that have ended well."""
    found: Found = defaultdict(lambda: defaultdict(list))
    for row in read("runs"):
        if row[SCORE]:
            found[row["recipe"], row["setting"]][row["method"]].append(float(row[SCORE]))
    return found


def draw_places(panel: Any, places: Mapping[str, Mapping[str, list[float]]], ordered: bool = True) -> None:
    """Draw the mean accuracy of each method at each place, and its standard deviation over seeds.

    Lines join the places if they are `ordered`.
    """
    for index, method in enumerate(DRAWN):
        runs = {place: values[method] for place, values in enumerate(places.values()) if values.get(method)}
        panel.errorbar(
            [place + 0.07 * (index - len(DRAWN) / 2) for place in runs],
            [fmean(values) for values in runs.values()],
            yerr=[stdev(values) if len(values) > 1 else 0.0 for values in runs.values()],
            label=method,
            color=f"C{index}",
            linestyle=STYLES[index % len(STYLES)] if ordered else "none",
            marker="o",
            linewidth=1,
            markersize=5,
        )
    panel.set_xticks(range(len(places)), list(places))
    panel.set(xlim=(-0.5, len(places) - 0.5))
    panel.grid(axis="y", alpha=0.3)


def draw_labels(found: Found, path: Path) -> None:
    """Draw the accuracies for labels that are skewed more and less."""
    with figure(path, 1, (10, 5)) as (picture, panel):
        draw_places(panel, {setting: found["labels", setting] for setting in LABELS})
        panel.set(ylabel=SCORE)
        picture.legend(loc="outside lower center", ncols=len(DRAWN) // 2, frameon=False)


def draw_others(found: Found, path: Path) -> None:
    """Draw the accuracies in other settings, and those over the time of the freeze."""
    with figure(path, len(SETTINGS) + 1, (16, 5)) as (picture, panels):
        for panel, (what, places) in zip(panels[:-1], SETTINGS.items(), strict=True):
            draw_places(panel, {name: found[place] for name, place in places.items()}, ordered=what == "local steps")
            panel.set(xlabel=what, ylabel=SCORE if panel is panels[0] else "")
        for method, times in FREEZES.items():
            runs = [found["freeze", ""][name] for name in times]
            color = "C2" if method == "FixBN" else "C3"
            panels[-1].errorbar(
                list(times.values()), list(map(fmean, runs)), yerr=list(map(stdev, runs)), fmt="o-", color=color
            )
            panels[-1].text(0.72, fmean(runs[-1]), method, color=color, va="center")
        for index, method in enumerate(("FedAvg", "FedTAN")):
            level = fmean(found["freeze", ""][method])
            panels[-1].axhline(level, color=f"C{3 * index}", linestyle="dashed")
            panels[-1].text(0.02, level, f"{method}, no freeze", color=f"C{3 * index}", va="bottom")
        panels[-1].set(xlabel="share of the rounds before the freeze", xlim=(0, 1))
        panels[-1].grid(alpha=0.3)
        picture.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN), frameon=False
        )


if __name__ == "__main__":
    draw_curves("two classes", [*AXES], HERE / "results-curves.png")
    draw_curves("two classes, 1,000 rounds", ["round", "exchanges"], HERE / "results-long.png")
    draw_factorial(HERE / "results-factorial.png")
    measured = accuracies()
    draw_labels(measured, HERE / "results-labels.png")
    draw_others(measured, HERE / "results-settings.png")
