"""Pictures of final numbers: bars by domain, accuracy by the round of the freeze, and the GN minus BN map."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedbn_flwr.experiments.method import parse
from fedbn_flwr.experiments.output.plots import Picture, bar_style, file_name, line_style
from fedbn_flwr.experiments.recipes.recipe import AVERAGE, QUANTITIES, Recipe
from fedbn_flwr.experiments.recipes.table import Key, Value
from fedbn_flwr.experiments.reports.sources import Source

#: settings of which a report draws bars
SETTINGS = 12


def bars(source: Source, values: Mapping[Key, Value]) -> Iterator[Picture]:
    """Draw what the final numbers allow."""
    if "domain-accuracy" in source.recipe.quantities:
        for setting in source.recipe.settings[:SETTINGS]:
            yield from _domains(source, setting.name, values)
    yield from _freeze_rounds(source, values)
    yield from maps(source, values)


def maps(source: Source, values: Mapping[Key, Value]) -> Iterator[Picture]:
    """Draw accuracy with GN minus that with BN over local steps and another axis, as in FixBN's Figure 2."""
    recipe, pair, axes = source.recipe, _normalizers(source.recipe), dict[str, dict[str, None]]()
    for setting in recipe.settings:
        for axis, label in setting.labels.items():
            axes.setdefault(axis, {})[label] = None
    labels = {axis: list(values) for axis, values in axes.items()}
    columns = labels.pop("local-steps", [])
    others = sorted(labels, key=lambda axis: -len(labels[axis]))
    if not pair or len(columns) < 2:
        return
    down, rest = (others[0] if others else ""), others[1:]
    rows = labels.get(down, [""])
    for fixed in dict.fromkeys(tuple(s.labels[axis] for axis in rest) for s in recipe.settings):
        table = np.full((len(rows), len(columns)), np.nan)
        for setting in recipe.settings:
            if tuple(setting.labels[axis] for axis in rest) == fixed:
                gn, bn = (values.get((setting.name, label, "accuracy")) for label in pair)
                if gn and bn:
                    at = rows.index(setting.labels.get(down, "")), columns.index(setting.labels["local-steps"])
                    table[at] = gn.mean - bn.mean
        if np.isfinite(table).any():
            where = f" in {', '.join(fixed)}" if fixed else ""
            yield _map(
                table, rows, columns, f"Accuracy with {pair[0]} minus {pair[1]}, in points{where}", "-".join(fixed)
            )


def _map(table: Any, rows: Sequence[str], columns: Sequence[str], caption: str, name: str) -> Picture:
    limit = max(np.nanmax(np.abs(table)), 0.1)

    def paint(axes: Any) -> None:
        # purple and orange differ for all kinds of colour vision, and the numbers say the same
        axes.imshow(np.ma.masked_invalid(table), cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                colour = "white" if abs(value) > 0.7 * limit else "black"
                axes.text(column, row, f"{value:+.1f}", ha="center", va="center", color=colour, fontsize=10)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows, fontsize=9)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    return Picture(file_name(f"gn-minus-bn-{name}"), caption, paint, height=1.2 + 0.42 * len(rows))


def _domains(source: Source, setting: str, values: Mapping[Key, Value]) -> Iterator[Picture]:
    methods = [label for label in source.recipe.methods if (setting, label, AVERAGE) in values]
    domains = dict.fromkeys(key[2] for key in values if key[0] == setting and (setting, key[1], AVERAGE) in values)
    order = [name for name in domains if name != AVERAGE and name not in QUANTITIES]
    if not methods or not order:
        return
    order = [name for name in [*order, AVERAGE] if all((setting, label, name) in values for label in methods)]

    def paint(axes: Any) -> None:
        _grouped(axes, {m: [values[setting, m, name] for name in order] for m in methods})
        axes.set_xticks(range(len(order)), order, rotation=20 if len(order) > 4 else 0)
        axes.set_ylabel("accuracy, %")

    caption = f"Accuracy by domain{f' in {setting}' if setting else ''}"
    if any(values[setting, label, name].seeds > 1 for label in methods for name in order):
        caption += "; whiskers: standard deviation of the runs"
    yield Picture(file_name(f"domains-{setting}"), caption, paint, setting=setting)


def _grouped(axes: Any, groups: Mapping[str, Sequence[Value]]) -> None:
    width = 0.84 / len(groups)
    for index, (label, numbers) in enumerate(groups.items()):
        at = np.arange(len(numbers)) + (index - (len(groups) - 1) / 2) * width
        deviations = [value.deviation for value in numbers] if any(value.deviation for value in numbers) else None
        means = [value.mean for value in numbers]
        axes.bar(at, means, width, yerr=deviations, label=label, error_kw={"elinewidth": 1}, **bar_style(index))
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def _freeze_rounds(source: Source, values: Mapping[Key, Value]) -> Iterator[Picture]:
    """Draw accuracy over the round of the freeze, as in FixBN's Figure 3 (d), where methods differ in it."""
    shares = dict[str, float]()
    for label, text in source.recipe.methods.items():
        with suppress(KeyError, ValueError):
            shares[label] = float(parse(text).options["freeze-round"])
    for setting in source.recipe.settings:
        points = {share: values.get((setting.name, label, "accuracy")) for label, share in shares.items()}
        known = sorted((share, value) for share, value in points.items() if value)
        if len(known) < 3:
            continue

        def paint(axes: Any, known: Sequence[tuple[float, Value]] = known) -> None:
            means, deviations = [value.mean for _, value in known], [value.deviation for _, value in known]
            axes.errorbar([share for share, _ in known], means, deviations, capsize=3, **line_style(0, 1))
            axes.set(xlabel="round of the freeze, as a share of all (or as given)", ylabel="accuracy, %")
            axes.grid(alpha=0.3)

        caption = f"Final accuracy over the round of the freeze{f' in {setting.name}' if setting.name else ''}"
        yield Picture(file_name(f"freeze-{setting.name}"), caption, paint, setting=setting.name)


def _normalizers(recipe: Recipe) -> tuple[str, str] | None:
    """Return the labels of FedAvg with GN and with BN; None if the matrix lacks one."""
    kinds = {}
    for label, text in recipe.methods.items():
        strategy, norm, options = parse(text)
        if strategy == "fedavg" and not options:
            kinds[norm or "bn"] = label
    return (kinds["gn"], kinds["bn"]) if {"gn", "bn"} <= kinds.keys() else None
