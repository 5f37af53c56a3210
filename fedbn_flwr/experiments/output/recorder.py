"""The record of a run: a row after every round, a summary at the end."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from logging import INFO
from math import inf, nan
from statistics import fmean
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.data_and_model import absent_classes, normalization
from fedbn_flwr.experiments.method import Experiment
from fedbn_flwr.experiments.output.run_folder import RunFolder, read_rounds
from fedbn_flwr.experiments.output.scoring import Score, Scorer, SiteScorer, merit
from fedbn_flwr.experiments.output.sinks import Sink
from fedbn_flwr.server.site_names import with_names
from fedbn_flwr.strategies import BaseStrategy, DivergedError, NodeReply
from fedbn_flwr.traffic.counting_grid import CountingGrid, Traffic

#: the columns that clients report, in their order
REPORTED = ("batch-change", "local-distance", "window-variance")
STATISTICS = ("running_var", "running_mean")
#: called after every round with the round, the number of rounds, and the latest accuracy (or mean IoU) if there is one
Progress = Callable[[int, int, float | None], None]
Summary = dict[str, Any]
#: the attributes of a Journal that a run which is resumed must find as they were
_KEPT = ("_score", "_train_loss", "_round", "_best_merit", "_best_round", "stopped_by")
#: the kinds of traffic that are counted
_KINDS = ("training", "evaluation")


class DynamicsTable:
    """Joins what clients report of a round with how far the global statistics moved in it.

    - `global-change`: the L1 norm of the change of the layer's accumulated statistics on the server (figure 3 a, blue);
      null where the server has none.
    - `batch-change`, `local-distance` (figure 3 a), `window-variance` (b): means over the round's clients.
    - `loss`: the training loss, averaged over the samples (c).
    """

    def __init__(self) -> None:
        self._before: dict[str, np.ndarray[Any, Any]] = {}

    def begin(self, arrays: ArrayRecord) -> None:
        """Take the model that the first round, or the first one after a resumption, begins with."""
        self._before = _statistics(arrays)

    def rows(
        self, server_round: int, arrays: ArrayRecord, replies: Sequence[NodeReply], loss: float | None
    ) -> list[dict[str, Any]]:
        """Return the rows of a round, by layer, in the order of the model."""
        before, self._before = self._before, _statistics(arrays)
        reported = [key for key in (replies[0].metrics if replies else ()) if key.startswith(wire.DYNAMICS)]
        layers = [key for key in reported if all(isinstance(reply.metrics.get(key), list) for reply in replies)]
        return [
            {
                "round": server_round,
                "layer": key.removeprefix(wire.DYNAMICS),
                "global-change": self._change(key.removeprefix(wire.DYNAMICS), before),
                **{name: _mean(replies, key, column) for column, name in enumerate(REPORTED)},
                "loss": loss,
            }
            for key in layers
        ]

    def _change(self, layer: str, before: dict[str, np.ndarray[Any, Any]]) -> float:
        names = [f"{layer}.{name}" for name in STATISTICS]
        if not all(name in before and name in self._before for name in names):
            return nan
        return float(sum(np.abs(self._before[name] - before[name]).sum() for name in names))


def _statistics(arrays: ArrayRecord) -> dict[str, np.ndarray[Any, Any]]:
    names = [name for name in arrays if name.rpartition(".")[2] in STATISTICS]
    return {name: arrays[name].numpy().astype(np.float64) for name in names}


def _mean(replies: Sequence[NodeReply], key: str, column: int) -> float:
    """Return the mean over the clients that have the number; NaN if none has it yet."""
    values = [reply.metrics[key][column] for reply in replies]
    known = [value for value in values if value == value]
    return fmean(known) if known else nan


class Journal:
    """Scores and records rounds as Flower's `evaluate_fn`."""

    def __init__(
        self,
        files: RunFolder,
        strategy: BaseStrategy,
        grid: CountingGrid,
        scorer: Scorer | SiteScorer,
        config: Config,
        sinks: Sequence[Sink],
        progress: Progress | None = None,
    ) -> None:
        self._files, self._strategy, self._grid, self._scorer = files, strategy, grid, scorer
        self._config, self._sinks, self._progress = config, sinks, progress
        self._started = self._last = time.perf_counter()
        self._before = grid.training.copy()
        self._score: Score = {}
        self._train_loss: float | None = None
        self._round = 0
        self._best_merit, self._best_round = -inf, 0
        #: why the run ends before its last round; empty while it goes on
        self.stopped_by = ""
        self._dynamics = DynamicsTable()
        #: the model after the last finished round
        self.arrays: ArrayRecord | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what later rows and the summary depend on, beside the rows that are written."""
        return {
            **{name: getattr(self, name) for name in _KEPT},
            "sent": {name: vars(getattr(self._grid, name)) for name in _KINDS},
            "seconds": time.perf_counter() - self._started,
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: ArrayRecord) -> None:
        """Take up what `state_dict` returned after a round, and the round's model."""
        for name in _KEPT:
            setattr(self, name, state[name])
        for name in _KINDS:
            setattr(self._grid, name, Traffic(**state["sent"][name]))
        self._before = self._grid.training.copy()
        self._started -= state["seconds"]
        self.arrays = arrays

    def record(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Write a row about a round; score its arrays if the strategy evaluates this round."""
        if server_round == 0:
            self._dynamics.begin(arrays)
            self._last = time.perf_counter()
            return None
        self._round, self.arrays = server_round, arrays
        missing = self._missing()
        row = {"round": server_round, **self._training(missing), **self._traffic(), **self._strategy.training.measured}
        score = self._scored(server_round, arrays)
        self._files.round({**row, **score})
        for sink in self._sinks:
            sink({**row, **score})
        if self._config.record_dynamics:
            rows = self._dynamics.rows(server_round, arrays, self._strategy.training.replies, row["train-loss"])
            self._files.dynamics(rows)
        shown = {"train-loss": row["train-loss"], **score}
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float))
        place, absent = (server_round, self._config.rounds), self._absent(missing, row)
        log(INFO, "Round %d of %d: %s, %.3g s%s", *place, numbers, row["seconds"], absent)
        if self._progress:
            self._progress(server_round, self._config.rounds, self._score.get(self._scorer.metric))
        self._last = time.perf_counter()
        return MetricRecord({key: value for key, value in score.items() if isinstance(value, float)})

    def summary(self, experiment: Experiment, nodes: int) -> Summary:
        """Return the whole run in one record."""
        config, sent = experiment.config, self._grid.training
        rows = read_rounds(self._files.path)
        skipped = sum(not row["nodes"] for row in rows)
        left_out = Counter(node for row in rows for node in row.get("left-out", ()))
        return {
            "method": config.method,
            "strategy": experiment.strategy,
            "norm": config.norm,
            "model": str(config.model),
            "dataset": str(config.dataset),
            "partition": config.partition,
            "clients": nodes,
            "rounds": config.rounds,
            "seed": config.seed,
            "lr": config.lr,
            "batch-size": config.batch_size,
            **normalization(config),
            "metric": self._scorer.metric,
            **self._score,
            "train-loss": self._train_loss,
            "exchanges": sent.exchanges,
            "payload-bytes": sent.payload,
            "paper-bytes": sent.paper,
            "evaluation-payload-bytes": self._grid.evaluation.payload,
            "seconds": time.perf_counter() - self._started,
            **({"unseen": config.unseen} if config.unseen else {}),
            **(experiment.choice.summary() if experiment.choice else {}),
            **({"rounds-skipped": skipped} if skipped else {}),
            **({"left-out": left_out} if left_out else {}),
            **({"model-for-each-node": True} if self._strategy.personal else {}),
            **({"absent-classes": absent} if (absent := absent_classes(config)) else {}),
            **({"stopped-after": self._round, "stopped-by": self.stopped_by} if self.stopped_by else {}),
        }

    def summary_of_failure(self, experiment: Experiment, nodes: int, error: Exception) -> Summary:
        """Return the record of a run that could not go on, with the reason and the rounds that it has finished."""
        reason = with_names(" ".join(str(error).split()), self._grid.names) or type(error).__name__
        ended = {"rounds-done": self._round, "failed": reason}
        return {**self.summary(experiment, nodes), **ended, **diverged(error)}

    def _scored(self, server_round: int, arrays: ArrayRecord) -> Score:
        if not self._strategy.evaluates(server_round):
            return {}
        score = self._scorer.score(self._strategy, arrays)
        self._score = score or self._score
        if self._scorer.metric in score and server_round < self._config.rounds:
            self.stopped_by = self._enough(server_round, score[self._scorer.metric])
        return score

    def _enough(self, server_round: int, score: float) -> str:
        """Return why the run ends with this score; empty if it goes on."""
        config, metric = self._config, self._scorer.metric
        if (reached := merit(metric, score)) > self._best_merit:
            self._best_merit, self._best_round = reached, server_round
        if config.stop_at and reached >= merit(metric, config.stop_at):
            return f"stop-at={config.stop_at:g}"
        if config.stop_after and server_round - self._best_round >= config.stop_after:
            return f"stop-after={config.stop_after}: no better score since round {self._best_round}"
        return ""

    def _training(self, missing: Collection[int | str]) -> dict[str, Any]:
        replies = self._strategy.training.replies
        # a client of another package may report no loss
        losses = [(reply.metrics.get(wire.TRAIN_LOSS), reply.num_examples) for reply in replies]
        reported = [(loss, count) for loss, count in losses if isinstance(loss, float)]
        loss = sum(loss * count for loss, count in reported) / max(sum(count for _, count in reported), 1)
        self._train_loss = loss if reported else self._train_loss
        return {
            "nodes": sum(len(reply.nodes) for reply in replies),
            "train-loss": loss if reported else None,
            "seconds": time.perf_counter() - self._last,
            **({"left-out": [*missing]} if missing else {}),
        }

    def _missing(self) -> dict[int | str, str]:
        """Return who is missing in the training of a round, and why."""
        names, training = self._grid.names, self._strategy.training
        refused = {refusal.node for refusal in training.refused}
        # a robust rule refuses a round of few nodes as a whole, as node 0
        late = "was left out" if 0 in refused else f"did not answer in {self._config.timeout:g} s"
        silent = sorted({*training.nodes} - {node for reply in training.replies for node in reply.nodes})
        missing = {names.get(node, node): "was left out" if node in refused else late for node in silent}
        if names:
            connected = self._grid.get_node_ids() if self._config.fraction_train < 1 else ()
            here = {names.get(node) for node in (*training.nodes, *connected)}
            unfit, away = {names.get(node) for node in self._grid.unfit}, {*self._config.sites, *names.values()}
            for who in sorted(away - {*here, *missing}):
                missing[who] = "was refused" if who in unfit else "was away"
        return missing

    def _absent(self, missing: Mapping[int | str, str], row: Mapping[str, Any]) -> str:
        """Return in words who is missing, also in the evaluation; empty if nobody is."""
        names, reasons = self._grid.names, [f"{who} {why}" for who, why in missing.items()]
        of_all = names and self._config.fraction_train == 1
        total = max(row["nodes"] + len(missing), self._config.clients if of_all else 0)
        if unknown := total - row["nodes"] - len(missing):
            reasons.append(f"{unknown} never connected")
        text = f"; {row['nodes']} of {total} sites: {', '.join(reasons)}" if reasons else ""
        tested = self._strategy.evaluation
        silent = {*tested.nodes} - {node for reply in tested.replies for node in reply.nodes}
        if tested.number == row["round"] and (others := {names.get(node, node) for node in silent} - {*missing}):
            text += f"; {', '.join(sorted(map(str, others)))} did not evaluate"
        return text

    def _traffic(self) -> dict[str, int]:
        sent = self._grid.training - self._before
        self._before = self._grid.training.copy()
        return {
            "exchanges": sent.exchanges,
            "payload-bytes-down": sent.payload_down,
            "payload-bytes-up": sent.payload_up,
            "paper-bytes": sent.paper,
        }


def diverged(error: Exception) -> Summary:
    """Return what a summary holds if the run diverged: the round."""
    return {"diverged": error.server_round} if isinstance(error, DivergedError) else {}
