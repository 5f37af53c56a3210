"""Draws the pictures of docs/results.md from the tables in docs/measured.

python docs/draw_results.py

The tables are `runs.csv` and `curves.csv` of `fedbn-flwr report --format csv`, without runs that have not ended.
`seconds.csv` has the seconds of a round, which are the 5 % quantile over all rounds because the machine did other work.
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from fedbn_flwr.experiments.output.plots import draw_runs, figure

FOLDER = Path(__file__).parent / "measured"
SCORE = "accuracy, %"
#: methods of the curves, in the order of their colours
DRAWN = ("FedAvg", "FedAvg+GN", "FixBN", "FedTAN", "FedTAN carried", "FedWon", "SCAFFOLD", "Centralized")
AXES = {
    "round": "round",
    "exchanges": "exchanges",
    "MB sent": "MB sent and received by all clients",
    "seconds": "seconds of a simulation on one core",
}
STYLES = ("solid", "dashed", "dashdot", "dotted")


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with (FOLDER / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def draw_curves(setting: str, path: Path) -> None:
    """Draw the accuracy over rounds, exchanges, bytes and seconds."""
    seconds = {row["method"]: float(row["seconds a round"]) for row in read("seconds")}
    lines: dict[str, dict[str, list[dict[str, str]]]] = {method: defaultdict(list) for method in DRAWN}
    for row in read("labels-curves"):
        if row["setting"] == setting and row["method"] in lines:
            row["seconds"] = str(int(row["round"]) * seconds[row["method"]])
            lines[row["method"]][row["seed"]].append(row)
    with figure(path, len(AXES), (16, 5)) as (picture, panels):
        for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
            for index, (method, seeds) in enumerate(lines.items()):
                runs = [
                    ([float(row[axis]) for row in rows], [float(row[SCORE]) for row in rows]) for rows in seeds.values()
                ]
                draw_runs(panel, runs, label=method, linestyle=STYLES[index % len(STYLES)], color=f"C{index}")
            panel.set(xlabel=label, ylabel=SCORE if axis == "round" else "")
            panel.grid(alpha=0.3)
            if axis in ("exchanges", "MB sent"):
                panel.set_xscale("log")
        picture.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN), frameon=False
        )


def draw_settings(path: Path) -> None:
    """Draw the accuracy of each method in each setting, with the standard deviation over seeds."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read("labels-runs"):
        values[row["setting"]][row["method"]].append(float(row[SCORE]))
    methods = list(dict.fromkeys(method for by_method in values.values() for method in by_method))
    with figure(path, 1, (12, 4.3)) as (picture, panel):
        width = 0.85 / len(methods)
        for index, method in enumerate(methods):
            places = [
                n + (index - len(methods) / 2) * width for n, each in enumerate(values.values()) if method in each
            ]
            runs = [each[method] for each in values.values() if method in each]
            spread = [stdev(run) if len(run) > 1 else 0.0 for run in runs]
            panel.bar(
                places,
                list(map(fmean, runs)),
                width,
                yerr=spread,
                label=method,
                color=f"C{index % 10}",
                hatch="/" * (index // 10 * 3),
            )
        panel.set_xticks(range(len(values)), list(values))
        panel.set_xlim(-0.5, len(values) - 0.5)
        panel.set(ylabel=SCORE)
        panel.grid(axis="y", alpha=0.3)
        picture.legend(loc="outside lower center", ncols=7, frameon=False)


if __name__ == "__main__":
    draw_curves("two classes", FOLDER.parent / "results-curves.png")
    draw_settings(FOLDER.parent / "results-labels.png")
