"""The command `fedbn-flwr tune freeze-round`: when to freeze, by FixBN's window rule and by a small search.

FixBN's appendix B.6 names both: a sliding window, here a run with `freeze-round=auto`, and cross-validation, here runs
that freeze after given shares of the rounds. All are scored on held-out training data, and never on the test data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedbn_flwr.experiments.comparison import VALIDATION_SHARE, Announce, Plan, metric_of
from fedbn_flwr.experiments.kept_run import KeptRun
from fedbn_flwr.experiments.method import Experiment, owners, parse
from fedbn_flwr.experiments.output.console import console, new_table, percent
from fedbn_flwr.experiments.output.plots import figure
from fedbn_flwr.experiments.output.recorder import outcome_of
from fedbn_flwr.experiments.output.run_folder import read_rounds, write_json
from fedbn_flwr.experiments.resources import check_simulation
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.lr_schedule import moment, round_of
from fedbn_flwr.strategies import BaseStrategy, CannotTrainError

#: shares of the rounds, or numbers of rounds, that are tried, unless others are given
GRID = "0.1,0.3,0.5,0.7,0.9"
AUTO, OPTION = "auto", "freeze-round"


@dataclass(frozen=True)
class Candidate:
    """One value of `freeze-round`: the rounds after which its runs froze, and their scores, by seed."""

    freeze_round: str
    #: None where the rule never fired: that run was FedAvg
    frozen_after: Sequence[int | None]
    scores: Sequence[float]
    #: how a run failed; empty if none did
    failure: str = ""

    @property
    def score(self) -> float:
        """The mean over the seeds; -inf if a run failed."""
        return float("-inf") if self.failure else fmean(self.scores)

    @property
    def after(self) -> float | None:
        """The median round of the freeze; None if some seed never froze."""
        known = [after for after in self.frozen_after if after is not None]
        return median(known) if known and len(known) == len(self.frozen_after) else None


def candidates(method: str, grid: str) -> dict[str, str]:
    """Return value of `freeze-round` -> method, the rule first; a UsageError if the method does not freeze so."""
    name, _, given = parse(method)
    if name not in owners(OPTION):
        raise UsageError(f"method {method!r} has no {OPTION} to tune; those that have: {', '.join(owners(OPTION))}")
    if OPTION in given:
        raise UsageError(f"method {method!r} sets {OPTION}, which is the option that is tuned")
    values = [value.strip() for value in grid.split(",") if value.strip()]
    try:
        list(map(moment, values))
    except ValueError as error:
        raise UsageError(f"--grid has shares of the rounds, as 0.3, or numbers of rounds, as 30: {error}") from None
    return {value: f"{method}:{OPTION}={value}" for value in [AUTO, *values]}


def check(plan: Plan) -> None:
    """Find every usage error before the first run."""
    for method in plan.methods:
        check_simulation(plan.experiment(method, 0, validation=VALIDATION_SHARE))


def runs_of(plan: Plan, method: str, folder: Path) -> list[KeptRun]:
    """Return the runs of one value, a seed each, with their folders."""
    return plan.runs(folder, method, validation=VALIDATION_SHARE)


def search(plan: Plan, values: Sequence[str], folder: Path, announce: Announce) -> Iterator[Candidate]:
    """Run every method of the plan, each with its value of `freeze-round`, with every seed; yield what became of it."""
    for value, method in zip(values, plan.methods, strict=True):
        results, failure = list[tuple[int | None, float]](), ""
        for run in runs_of(plan, method, folder):
            label = f"{method}, seed {run.experiment.config.seed}"
            summary = run.run_or_error(announce(label))
            if "error" in summary:
                console.print(f"{label}: {summary['error']}", style="yellow", soft_wrap=True)
                failure = failure or outcome_of(summary)
            else:
                after = frozen_after(run.experiment, summary, run.folder)
                results.append((after, float(summary[metric_of(summary)])))
        rounds, scores = [round_ for round_, _ in results], [score for _, score in results]
        yield Candidate(value, rounds, scores, failure)


def frozen_after(experiment: Experiment, summary: Mapping[str, Any], folder: Path) -> int | None:
    """Return the last round of a run with statistics of its own; None if that is the run's last one."""
    rounds = int(summary["rounds"])
    after = freeze_of(experiment.make_strategy(int(summary["clients"])), rounds, read_rounds(folder))
    return None if after is None or after >= rounds else after


def freeze_of(strategy: BaseStrategy, rounds: int, rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the round after which a run freezes its statistics, by its options or its rows; None if it never does."""
    freeze_at: float | None = getattr(strategy, "freeze_at", None)
    if freeze_at is not None:
        return round_of(freeze_at, rounds)
    return next((int(row["frozen-after"]) for row in rows if "frozen-after" in row), None)


def best(found: Sequence[Candidate]) -> Candidate:
    """Return the best by held-out data; of equals the one that freezes first, as statistics then cease to travel."""
    return max(found, key=lambda candidate: (candidate.score, -(candidate.after or float("inf"))))


def advice(found: Sequence[Candidate], method: str) -> str:
    """Return the recommendation in words."""
    chosen = best(found)
    if chosen.after is None:
        return "Recommended: no freeze. The best run on held-out data never froze."
    return f"Recommended: --method {method}:{OPTION}={chosen.after:.0f}, the best on held-out training data."


def write_tuning(found: Sequence[Candidate], method: str, folder: Path, title: str) -> None:
    """Write `tune.json` and `tune.png`, and print the table; raise CannotTrainError if no candidate came through."""
    rows = [
        {"freeze-round": c.freeze_round, "frozen-after": list(c.frozen_after), "scores": list(c.scores)}
        | ({"failed": c.failure} if c.failure else {})
        for c in found
    ]
    content = {"method": method, "candidates": rows, "recommended": best(found).after}
    write_json(folder / "tune.json", content)
    plot_tuning(found, folder / "tune.png", title)
    table = new_table(title, "freeze-round", numbers=("frozen after", "score on held-out data, %"))
    for c in found:
        spread = f" ({percent(min(c.scores))} to {percent(max(c.scores))})" if len(c.scores) > 1 else ""
        mark = " *" if c is best(found) else ""
        frozen = "" if c.failure else "never" if c.after is None else f"{c.after:g}"
        table.add_row(c.freeze_round, frozen, c.failure or f"{percent(c.score)}{spread}{mark}")
    console.print(table)
    if best(found).failure:
        raise CannotTrainError("a run of every candidate failed")
    console.print(advice(found, method), soft_wrap=True)
    console.print(f"Results: {folder.resolve()} (tune.json, tune.png, one folder a run)", soft_wrap=True)


def plot_tuning(found: Sequence[Candidate], path: Path, title: str) -> None:
    """Plot the score over the round of the freeze, as FixBN's Figure 3 (d), and where the window rule fires."""
    with figure(path, size=(6.5, 4)) as (_, panel):
        searched = sorted(
            (c for c in found if c.freeze_round != AUTO and c.after and not c.failure), key=lambda c: c.after or 0
        )
        places, scores = [c.after or 0 for c in searched], [c.score for c in searched]
        panel.fill_between(
            places, [min(c.scores) for c in searched], [max(c.scores) for c in searched], alpha=0.15, linewidth=0
        )
        panel.plot(places, scores, marker="o", label="frozen after a given round")
        for rule in (c for c in found if c.freeze_round == AUTO and not c.failure):
            if rule.after is None:
                panel.axhline(rule.score, color="C1", linestyle="dashed", label="auto never freezes")
            else:
                panel.axvline(rule.after, color="C1", linestyle="dotted")
                panel.plot([rule.after], [rule.score], "s", color="C1", label="where auto freezes")
        panel.set(xlabel="round of the freeze", ylabel="score on held-out training data", title=title)
        panel.grid(alpha=0.3)
        panel.legend()
