"""The rounds in which a method changes how it trains: the freeze, drops of the learning rate, FedBS' second stage."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.reports.sources import Run
from fedbn_flwr.experiments.tune import freeze_of
from fedbn_flwr.plugins.options import UsageError

STAGE = "stage 2"


class Mark(NamedTuple):
    """What changes after a round."""

    text: str
    after: int


def marks_of(run: Run) -> list[Mark]:
    """Return what changes in a run; nothing where its options are not known, as of a plug-in that is not there."""
    try:
        strategy, rounds = resolve({**run.options, "resume": ""}).make_strategy(1), int(run.rounds or 0)
    except UsageError:
        return []
    frozen = freeze_of(strategy, rounds, run.rows)
    drops = [change.start(rounds, frozen) for change in strategy.schedule.changes]
    stage = next((row["round"] - 1 for row in run.rows if row.get("fedbs-stage") == 2), None)
    rounds_of = [("freeze", frozen), *(("learning rate", after) for after in drops), (STAGE, stage)]
    return [Mark(text, after) for text, after in rounds_of if after and after < rounds]


def draw_marks(axes: Any, marks: Mapping[str, Sequence[Mark]], colours: Mapping[str, str]) -> None:
    """Draw a line at every mark inside the axes, in the colour of the method if only one has it, else in grey."""
    labels: dict[Mark, list[str]] = {}
    for label, each in marks.items():
        for mark in dict.fromkeys(each):
            labels.setdefault(mark, []).append(label)
    first, last = axes.get_xlim()
    for after in sorted({mark.after for mark in labels if first < mark.after + 0.5 < last}):
        here = {mark.text: names for mark, names in labels.items() if mark.after == after}
        owners = {name for names in here.values() for name in names}
        colour = colours[owners.pop()] if len(owners) == 1 else "#555555"
        axes.axvline(after + 0.5, color=colour, linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
        said = axes.annotate(", ".join(here), (after + 0.5, 0.99), color=colour, fontsize=8, **place)
        said.set_in_layout(False)
