"""Pictures of final numbers: bars by domain, accuracy by the round of the freeze, and the GN minus BN map."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedbn_flwr.experiments.method import parse
from fedbn_flwr.experiments.results.pictures import Picture, bar_style, file_name, line_style
from fedbn_flwr.experiments.results.rows import Row
from fedbn_flwr.experiments.results.values import AVERAGE, QUANTITIES, Key, Value

#: settings of which a report draws bars
SETTINGS = 12


def bars(rows: Sequence[Row], values: Mapping[Key, Value]) -> Iterator[Picture]:
    """Draw what the final numbers of runs allow."""
    settings = {row["setting"]: row["labels"] for row in rows}
    methods = {row["label"]: row["method"] for row in rows}
    for setting in [*settings][:SETTINGS]:
        yield from _domains(setting, methods, values)
    for setting in settings:
        yield from _freeze_rounds(setting, methods, values)
    yield from maps(settings, methods, values)


def maps(
    settings: Mapping[str, Mapping[str, str]], methods: Mapping[str, str], values: Mapping[Key, Value]
) -> Iterator[Picture]:
    """Draw accuracy with GN minus that with BN over local steps and another axis, as in FixBN's Figure 2.

    `settings` has the label on each axis, `methods` what a label stands for.
    """
    pair, axes = _normalizers(methods), dict[str, dict[str, None]]()
    for labels in settings.values():
        for axis, label in labels.items():
            axes.setdefault(axis, {})[label] = None
    columns = list(axes.pop("local-steps", []))
    down, *rest = sorted(axes, key=lambda axis: -len(axes[axis])) or [""]
    lines = list(axes.get(down, [""]))
    if not pair or len(columns) < 2:
        return
    for fixed in dict.fromkeys(tuple(labels[axis] for axis in rest) for labels in settings.values()):
        table = np.full((len(lines), len(columns)), np.nan)
        for name, labels in settings.items():
            gn, bn = (values.get((name, label, "accuracy")) for label in pair)
            if gn and bn and tuple(labels[axis] for axis in rest) == fixed:
                table[lines.index(labels.get(down, "")), columns.index(labels["local-steps"])] = gn.mean - bn.mean
        if np.isfinite(table).any():
            where = f" in {', '.join(fixed)}" if fixed else ""
            caption = f"Accuracy with {pair[0]} minus {pair[1]}, in points{where}"
            yield _map(table, lines, columns, caption, "-".join(fixed))


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


def _domains(setting: str, labels: Iterable[str], values: Mapping[Key, Value]) -> Iterator[Picture]:
    methods = [label for label in labels if (setting, label, AVERAGE) in values]
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
    if any(values[setting, label, name].number > 1 for label in methods for name in order):
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


def _freeze_rounds(setting: str, methods: Mapping[str, str], values: Mapping[Key, Value]) -> Iterator[Picture]:
    """Draw accuracy over the round of the freeze, as in FixBN's Figure 3 (d), where methods differ in it."""
    points = dict[float, Value]()
    for label, text in methods.items():
        value = values.get((setting, label, "accuracy"))
        with suppress(KeyError, ValueError):
            points |= {float(parse(text).options["freeze-round"]): value} if value else {}
    if len(points) < 3:
        return
    known = sorted(points.items())

    def paint(axes: Any) -> None:
        means, deviations = [value.mean for _, value in known], [value.deviation for _, value in known]
        axes.errorbar([share for share, _ in known], means, deviations, capsize=3, **line_style(0, 1))
        axes.set(xlabel="round of the freeze, as a share of all (or as given)", ylabel="accuracy, %")
        axes.grid(alpha=0.3)

    caption = f"Final accuracy over the round of the freeze{f' in {setting}' if setting else ''}"
    yield Picture(file_name(f"freeze-{setting}"), caption, paint, setting=setting)


def _normalizers(methods: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the labels of FedAvg with GN and with BN; None if one is not there."""
    kinds = dict[str, str]()
    for label, text in methods.items():
        with suppress(ValueError):  # a plug-in that is not there
            strategy, norm, options = parse(text)
            kinds |= {norm or "bn": label} if strategy == "fedavg" and not options else {}
    return (kinds["gn"], kinds["bn"]) if {"gn", "bn"} <= kinds.keys() else None
