"""Tables and a picture of a diagnosis."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

from fedbn_flwr.diagnosis import Diagnosis, Measurement, overall
from fedbn_flwr.experiments.output.console import console, new_table
from fedbn_flwr.experiments.output.plots import figure

DISTANCES = {"mean": "means", "variance": "variances", "gradients": "gradients by them"}
#: by what clients share: the values that are each client's own, and the method
MISMATCHES = {
    "nothing": "statistics and their gradients (FedAvg with BN)",
    "gradients": "statistics",
    "statistics": "gradients by the statistics (FedDNA)",
    "both": "nothing (FedTAN)",
}
#: rows of the second table, from what a measurement has for each client
SPREADS = {"gradient deviation B": "deviation", "heterogeneity V": "heterogeneity"}
#: largest number of layer names that fit below the picture
MOST_NAMES = 24


def show_diagnosis(diagnosis: Diagnosis, title: str, advice: str, folder: Path) -> None:
    """Print distances by layer, errors by mismatch, and the suggestion."""
    actual, shuffled = diagnosis.actual, diagnosis.shuffled
    table = new_table(f"{title}: clients' distance from the global values", "BN layer", numbers=[*DISTANCES.values()])
    for layer, by_chance in zip(actual.layers, shuffled.layers, strict=True):
        cells = (_both(_overall(diagnosis, layer, what), _overall(diagnosis, by_chance, what)) for what in DISTANCES)
        table.add_row(layer.name, *cells)
    console.print(table)
    table = new_table("the mean gradient, relative to its size", "what is each client's own", numbers=["error"])
    for shared, unshared in MISMATCHES.items():
        table.add_row(unshared, _both(actual.errors[shared], shuffled.errors[shared]))
    table.add_section()
    for label, what in SPREADS.items():
        table.add_row(label, _both(_relative(diagnosis, actual, what), _relative(diagnosis, shuffled, what)))
    console.print(table)
    console.print("In brackets: with the same samples dealt out at random, which is what chance alone does.")
    console.print(advice)
    console.print(f"Results: {folder.resolve()} (diagnosis.json, diagnosis.png)")


def plot_diagnosis(diagnosis: Diagnosis, path: Path, title: str) -> None:
    """Draw two panels, distances by layer and errors by mismatch; what chance alone does is dotted or grey."""
    with figure(path, 2, (12, 4.8)) as (picture, (left, right)):
        _plot_layers(left, diagnosis)
        _plot_errors(right, diagnosis)
        picture.suptitle(title)


def _plot_layers(panel: Any, diagnosis: Diagnosis) -> None:
    names = [layer.name for layer in diagnosis.actual.layers]
    for what, label in DISTANCES.items():
        values = [_overall(diagnosis, layer, what) for layer in diagnosis.actual.layers]
        (line,) = panel.plot(values, marker="o", markersize=4, label=label)
        chance = [_overall(diagnosis, layer, what) for layer in diagnosis.shuffled.layers]
        panel.plot(chance, color=line.get_color(), linestyle="dotted", alpha=0.7)
    panel.plot([], color="grey", linestyle="dotted", label="dealt at random")
    # linear near 0, where the distances of i.i.d. clients are
    panel.set_yscale("symlog", linthresh=0.1)
    panel.set_ylim(bottom=0)
    panel.set(ylabel="relative distance from the global values", xlabel="BN layer, in the order of the forward pass")
    if len(names) <= MOST_NAMES:
        panel.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    panel.grid(alpha=0.3)
    panel.legend()


def _plot_errors(panel: Any, diagnosis: Diagnosis) -> None:
    places = range(len(MISMATCHES))
    actual = [diagnosis.actual.errors[shared] for shared in MISMATCHES]
    chance = [diagnosis.shuffled.errors[shared] for shared in MISMATCHES]
    panel.bar([place - 0.2 for place in places], actual, width=0.4, label="these clients")
    panel.bar([place + 0.2 for place in places], chance, width=0.4, label="dealt at random", color="lightgrey")
    panel.set_xticks(
        places, [text.replace(" (", "\n(").replace(" and", "\nand") for text in MISMATCHES.values()], fontsize=8
    )
    panel.set(xlabel="what is each client's own", ylabel="relative error of the mean gradient")
    panel.grid(alpha=0.3, axis="y")
    panel.legend()


def _overall(diagnosis: Diagnosis, layer: Any, what: str) -> float:
    values: Sequence[float] = getattr(layer, what)
    return overall(diagnosis.weights, values) if values else float("nan")


def _relative(diagnosis: Diagnosis, measurement: Measurement, what: str) -> float:
    value = overall(diagnosis.weights, getattr(measurement, what))
    return value / measurement.gradient_norm if measurement.gradient_norm else float("nan")


def _both(actual: float, chance: float) -> str:
    return "-" if isnan(actual) else f"{actual:.3f} ({chance:.3f})"
