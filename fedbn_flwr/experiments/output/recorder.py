"""The record of a run: a row after every round, a summary at the end."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from math import inf, nan
from statistics import fmean
from typing import Any

import numpy as np
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.experiments.config import Config, ResultsOptions
from fedbn_flwr.experiments.experiment import Experiment
from fedbn_flwr.experiments.output.run_folder import RunFolder, read_rounds
from fedbn_flwr.experiments.output.scoring import Score, merit
from fedbn_flwr.experiments.output.sinks import Sink
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.server.round import Round
from fedbn_flwr.server.site_names import with_names
from fedbn_flwr.state import Arrays, arrays_of
from fedbn_flwr.strategies import BaseStrategy, DivergedError, NodeReply
from fedbn_flwr.transports.counting_grid import Traffic

#: options that a summary has
SUMMED_UP = (
    "method",
    "norm",
    "model",
    "dataset",
    "partition",
    "rounds",
    "seed",
    "lr",
    "batch-size",
)
#: the columns that clients report, in their order
REPORTED = ("batch-change", "local-distance", "window-variance")
STATISTICS = ("running_var", "running_mean")
#: called after every round with the round, the number of rounds, and the latest accuracy (or mean
#: IoU) if there is one
Progress = Callable[[int, int, float | None], None]
Summary = dict[str, Any]


@dataclass
class Standing:
    """How far a run has come: with its rows, all that its summary and its end depend on.

    A checkpoint holds it.
    """

    round: int = 0
    #: the latest of each
    score: Score = field(default_factory=dict)
    train_loss: float | None = None
    best_merit: float = -inf
    best_round: int = 0
    #: why the run ends before its last round; empty while it goes on
    stopped_by: str = ""
    #: what the method keeps as it is of BN, as the wire says it
    frozen: str = "none"
    seconds: float = 0.0
    training: Traffic = field(default_factory=Traffic)
    evaluation: Traffic = field(default_factory=Traffic)

    def take(
        self, server_round: int, score: Score, metric: str, options: ResultsOptions, is_last: bool
    ) -> None:
        """Take the scores of a round, if it has some, and see whether they are enough."""
        self.score = score or self.score
        if metric not in score or is_last:
            return
        reached = merit(metric, score[metric])
        if reached > self.best_merit:
            self.best_merit = reached
            self.best_round = server_round
        if options.stop_at and reached >= merit(metric, options.stop_at):
            self.stopped_by = f"stop-at={options.stop_at:g}"
        elif options.stop_after and server_round - self.best_round >= options.stop_after:
            self.stopped_by = (
                f"stop-after={options.stop_after}: no better score since round {self.best_round}"
            )


def dynamics_of(now: Round, loss: float | None) -> list[dict[str, Any]]:
    """Return what clients report of a round, joined with how far the global statistics moved in it:
    a row a BN layer.

    - `global-change`: the L1 norm of the change of the layer's accumulated statistics on the server
      (figure 3 a, blue); null where the server has none.
    - `batch-change`, `local-distance` (figure 3 a), `window-variance` (b): means over the round's
      clients.
    - `loss`: the training loss, averaged over the samples (c).
    """
    replies = now.replies
    after = arrays_of(now.after)
    if not replies:
        return []
    rows = []
    for key in replies[0].metrics:
        is_whole = all(isinstance(reply.metrics.get(key), list) for reply in replies)
        if not key.startswith(wire.DYNAMICS) or not is_whole:
            continue
        layer = key.removeprefix(wire.DYNAMICS)
        row: dict[str, Any] = {"round": now.number, "layer": layer}
        row["global-change"] = _change(layer, now.current, after)
        for column, name in enumerate(REPORTED):
            row[name] = _mean(replies, key, column)
        rows.append({**row, "loss": loss})
    return rows


def _change(layer: str, before: Arrays, after: Arrays) -> float:
    names = [f"{layer}.{name}" for name in STATISTICS]
    if not all(name in before and name in after for name in names):
        return nan
    return float(sum(np.abs(after[name].astype(np.float64) - before[name]).sum() for name in names))


def _mean(replies: Sequence[NodeReply], key: str, column: int) -> float:
    """Return the mean over the clients that have the number; NaN if none has it yet."""
    values = [reply.metrics[key][column] for reply in replies]
    known = [value for value in values if value == value]
    return fmean(known) if known else nan


@dataclass
class Journal:
    """Writes a row about every round, and makes a summary of them."""

    files: RunFolder
    strategy: BaseStrategy
    grid: PassingGrid
    config: Config
    sinks: Sequence[Sink]
    standing: Standing

    def __post_init__(self) -> None:
        self._last = time.perf_counter()
        self._before = self.standing.training.copy()

    def record(self, now: Round, score: Score) -> None:
        """Write the row of a round with these scores."""
        missing = self._missing(now)
        self.standing.frozen = now.instruction.freeze
        row: dict[str, Any] = {"round": now.number, "lr": now.instruction.lr}
        if now.instruction.freeze != "none":
            row["freeze"] = now.instruction.freeze
        row |= {**self._training(now, missing), **self._traffic(), **now.measured}
        self.files.round({**row, **score})
        for sink in self.sinks:
            sink({**row, **score})
        if self.config.results.record_dynamics:
            self.files.dynamics(dynamics_of(now, row["train-loss"]))
        shown = {"train-loss": row["train-loss"], **score}
        numbers = ", ".join(
            f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float)
        )
        place = (now.number, self.config.rounds)
        absent = self._absent(missing, row)
        log(INFO, "Round %d of %d: %s, %.3g s%s", *place, numbers, row["seconds"], absent)
        self._count_seconds()

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.standing.seconds += now - self._last
        self._last = now

    def summary(self, experiment: Experiment, about: Mapping[str, Any]) -> Summary:
        """Return the whole run in one record, with what is known `about` its nodes, data and
        metric.
        """
        self._count_seconds()
        config = experiment.config
        standing = self.standing
        options = experiment.config.to_mapping()
        sent = standing.training
        rows = read_rounds(self.files.path)
        skipped = sum(not row["nodes"] for row in rows)
        left_out = Counter(node for row in rows for node in row.get("left-out", ()))
        summary: dict[str, Any] = {"strategy": experiment.strategy}
        summary |= {key: options[key] for key in SUMMED_UP}
        summary |= {**about, **standing.score}
        summary["train-loss"] = standing.train_loss
        summary["exchanges"] = sent.exchanges
        summary["payload-bytes"] = sent.payload
        summary["paper-bytes"] = sent.paper
        summary["evaluation-payload-bytes"] = standing.evaluation.payload
        summary["seconds"] = standing.seconds
        if config.data.unseen:
            summary["unseen"] = config.data.unseen
        if experiment.choice:
            summary |= experiment.choice.summary()
        if skipped:
            summary["rounds-skipped"] = skipped
        if left_out:
            summary["left-out"] = left_out
        if standing.frozen != "none":
            summary["frozen"] = standing.frozen
        if self.strategy.personal:
            summary["model-for-each-node"] = True
        if standing.stopped_by:
            summary["stopped-after"] = standing.round
            summary["stopped-by"] = standing.stopped_by
        return summary

    def summary_of_failure(
        self, experiment: Experiment, about: Mapping[str, Any], error: Exception
    ) -> Summary:
        """Return the record of a run that could not go on, with the reason and the rounds that it
        has finished.
        """
        reason = with_names(" ".join(str(error).split()), self.grid.names) or type(error).__name__
        ended = {"rounds-done": self.standing.round, "failed": reason}
        return {**self.summary(experiment, about), **ended, **diverged(error)}

    def _training(self, now: Round, missing: Collection[int | str]) -> dict[str, Any]:
        # a client of another package may report no loss
        losses = [(reply.metrics.get(wire.TRAIN_LOSS), reply.num_examples) for reply in now.replies]
        reported = [(loss, count) for loss, count in losses if isinstance(loss, float)]
        loss = sum(loss * count for loss, count in reported) / max(
            sum(count for _, count in reported), 1
        )
        if reported:
            self.standing.train_loss = loss
        row: dict[str, Any] = {
            "nodes": sum(len(reply.nodes) for reply in now.replies),
            "train-loss": loss if reported else None,
            "seconds": now.seconds,
        }
        if missing:
            row["left-out"] = [*missing]
        return row

    def _missing(self, now: Round) -> dict[int | str, str]:
        """Return who is missing in the training of a round, and why."""
        names = self.grid.names
        refused = {refusal.node for refusal in now.refused}
        # a robust rule refuses a round of few nodes as a whole, as node 0
        if 0 in refused:
            late = "was left out"
        else:
            late = f"did not answer in {self.config.network.timeout:g} s"
        silent = sorted({*now.nodes} - now.answered)
        missing = {
            names.get(node, node): "was left out" if node in refused else late for node in silent
        }
        for node in sorted(self.grid.unfit):
            missing.setdefault(names.get(node, node), "was refused")
        if names:
            present = {*now.nodes}
            if self.config.fraction_train < 1:
                present |= {*self.grid.get_node_ids()}
            here = {names.get(node) for node in present}
            for who in sorted({*self.config.network.sites, *names.values()} - {*here, *missing}):
                missing[who] = "was away"
        return missing

    def _absent(self, missing: Mapping[int | str, str], row: Mapping[str, Any]) -> str:
        """Return in words who is missing, also in the evaluation; empty if nobody is."""
        names = self.grid.names
        reasons = [f"{who} {why}" for who, why in missing.items()]
        of_all = names and self.config.fraction_train == 1
        total = max(row["nodes"] + len(missing), self.config.clients if of_all else 0)
        unknown = total - row["nodes"] - len(missing)
        if unknown:
            reasons.append(f"{unknown} never connected")
        text = ""
        if reasons:
            text = f"; {row['nodes']} of {total} sites: {', '.join(reasons)}"
        tested = self.strategy.evaluation
        silent = {*tested.nodes} - tested.answered
        if tested.number == row["round"]:
            others = {names.get(node, node) for node in silent} - {*missing}
            if others:
                text += f"; {', '.join(sorted(map(str, others)))} did not evaluate"
        return text

    def _traffic(self) -> dict[str, int]:
        sent = self.standing.training - self._before
        self._before = self.standing.training.copy()
        return {
            "exchanges": sent.exchanges,
            "payload-bytes-down": sent.payload_down,
            "payload-bytes-up": sent.payload_up,
            "paper-bytes": sent.paper,
        }


def diverged(error: Exception) -> Summary:
    """Return what a summary holds if the run diverged: the round."""
    if isinstance(error, DivergedError):
        return {"diverged": error.server_round}
    return {}
