"""How far runs have come, and the time that is left."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

from fedbn_flwr.experiments.reports.sources import Run, Source
from fedbn_flwr.experiments.reports.tables import counts


@dataclass(frozen=True)
class Progress:
    """The progress of one source."""

    #: whether nothing is left to run
    complete: bool
    #: share of the work that is done, by time
    share: float
    text: str

    @classmethod
    def of(cls, source: Source) -> "Progress":
        """Estimate the progress from the seconds of the rounds that have ended."""
        states = counts(source.runs)
        if _complete(source):
            return cls(True, 1.0, states)
        note = "" if source.running else "; not running now: the same command goes on where it stopped"
        open_runs = [run for run in source.runs if run.state in ("unfinished", "waiting")]
        spent, totals = sum(map(_spent, source.runs)), [_total(run, source.runs) for run in open_runs]
        if not spent or None in totals:
            return cls(False, 0.0, f"{states}; the time left is not known yet{note}")
        left = sum(max((total or 0.0) - _spent(run), 0.0) for run, total in zip(open_runs, totals, strict=True))
        share = spent / (spent + left) if left else 1.0
        workers = source.record.workers if source.record else 1
        time = timedelta(seconds=round(left / workers))
        text = f"{states}; about {time} left if it goes on with {workers} at a time{note}"
        return cls(False, share, text)


def _complete(source: Source) -> bool:
    """Whether every cell of a matrix has its result; other runs are as complete as they are."""
    if source.record is None:
        return not any(run.state in ("unfinished", "waiting") for run in source.runs)
    return all((setting.name, label) in source.results.runs for setting, label in source.recipe.cells())


def _spent(run: Run) -> float:
    return sum(float(row.get("seconds") or 0.0) for row in run.rows)


def _total(run: Run, others: Sequence[Run]) -> float | None:
    """Return the seconds of a whole run: by its own rounds, or as runs of its method or setting, or as any run."""
    if (own := _total_of_begun(run)) is not None:
        return own
    known = [(other, total) for other in others if (total := _total_of_begun(other)) is not None]
    for alike in (
        [total for other, total in known if other.label == run.label],
        [total for other, total in known if other.setting == run.setting],
        [total for _, total in known],
    ):
        if alike:
            return fmean(alike)
    return None


def _total_of_begun(run: Run) -> float | None:
    return _spent(run) / len(run.rows) * run.rounds if run.rows and run.rounds else None
