"""What a person sees of a diagnosis: tables and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedbn_flwr.diagnosis import Diagnosis, Measurement, overall
from fedbn_flwr.experiments.output.console import console

DISTANCES = {"mean": "means", "variance": "variances", "gradients": "gradients by them"}
#: what is shared -> what each client has of its own, and the method that does so
MISMATCHES = {
    "nothing": "statistics and their gradients (FedAvg with BN)",
    "gradients": "statistics",
    "statistics": "gradients by the statistics (FedDNA)",
    "both": "nothing (FedTAN)",
}
#: names of more layers than that do not fit below the picture
MOST_NAMES = 24


def show_diagnosis(diagnosis: Diagnosis, title: str, advice: str, folder: Path) -> None:
    """Distances by layer, errors by mismatch, and the suggestion."""
    found, shuffled = diagnosis.found, diagnosis.shuffled
    table = _table(f"{title}: clients' distance from the global values", "BN layer", *DISTANCES.values())
    for layer, alike in zip(found.layers, shuffled.layers, strict=True):
        cells = (_both(_overall(diagnosis, layer, what), _overall(diagnosis, alike, what)) for what in DISTANCES)
        table.add_row(layer.name, *cells)
    console.print(table)
    table = _table("the mean gradient, relative to its size", "what is each client's own", "error")
    for shared, own in MISMATCHES.items():
        table.add_row(own, _both(found.errors[shared], shuffled.errors[shared]))
    table.add_section()
    table.add_row(
        "gradient deviation B", _both(*(_relative(diagnosis, each, "deviation") for each in (found, shuffled)))
    )
    table.add_row(
        "heterogeneity V", _both(*(_relative(diagnosis, each, "heterogeneity") for each in (found, shuffled)))
    )
    console.print(table)
    console.print("In brackets: with the same samples dealt out at random, which is what chance alone does.")
    console.print(advice)
    console.print(f"Results: {folder.resolve()} (diagnosis.json, diagnosis.png)")


def plot_diagnosis(diagnosis: Diagnosis, path: Path, title: str) -> None:
    """Two panels: distances by layer, errors by mismatch; dotted and grey is what chance alone does."""
    import matplotlib  # takes a second to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    _plot_layers(left, diagnosis)
    _plot_errors(right, diagnosis)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plot_layers(panel: Any, diagnosis: Diagnosis) -> None:
    names = [layer.name for layer in diagnosis.found.layers]
    for what, label in DISTANCES.items():
        values = [_overall(diagnosis, layer, what) for layer in diagnosis.found.layers]
        (line,) = panel.plot(values, marker="o", markersize=4, label=label)
        chance = [_overall(diagnosis, layer, what) for layer in diagnosis.shuffled.layers]
        panel.plot(chance, color=line.get_color(), linestyle="dotted", alpha=0.7)
    panel.plot([], color="grey", linestyle="dotted", label="dealt at random")
    # linear near 0, where clients that are alike are
    panel.set_yscale("symlog", linthresh=0.1)
    panel.set_ylim(bottom=0)
    panel.set(ylabel="relative distance from the global values", xlabel="BN layer, in the order of the forward pass")
    if len(names) <= MOST_NAMES:
        panel.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    panel.grid(alpha=0.3)
    panel.legend()


def _plot_errors(panel: Any, diagnosis: Diagnosis) -> None:
    places = range(len(MISMATCHES))
    found = [diagnosis.found.errors[shared] for shared in MISMATCHES]
    chance = [diagnosis.shuffled.errors[shared] for shared in MISMATCHES]
    panel.bar([place - 0.2 for place in places], found, width=0.4, label="these clients")
    panel.bar([place + 0.2 for place in places], chance, width=0.4, label="dealt at random", color="lightgrey")
    panel.set_xticks(
        places, [own.replace(" (", "\n(").replace(" and", "\nand") for own in MISMATCHES.values()], fontsize=8
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


def _both(found: float, chance: float) -> str:
    return "-" if found != found else f"{found:.3f} ({chance:.3f})"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right")
    return table
