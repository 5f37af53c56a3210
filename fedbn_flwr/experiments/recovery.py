"""A run that can go on after its process has ended: writes checkpoints, and takes one up."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.experiments.checkpoint import (
    Checkpoint,
    nodes_folder,
    read_checkpoint,
    write_checkpoint,
)
from fedbn_flwr.experiments.identity import options_in, refuse_foreign
from fedbn_flwr.experiments.method import Experiment, resolve
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.experiments.output.run_folder import read_json
from fedbn_flwr.server.averaging import record, unpack
from fedbn_flwr.simulation.node_contexts import SavesStates
from fedbn_flwr.strategies import BaseStrategy
from fedbn_flwr.wire.history import CHECKPOINT, STATE_HISTORY, History

#: the `checkpoint-every` of a run that saves as often as it costs little
AUTOMATIC = -1
#: seconds of training for each second that the last of these checkpoints took
TRAINING_PER_SAVING = 30


def resume(given: Mapping[str, Any], engine: str | None) -> tuple[Experiment, str]:
    """Return the experiment and the engine of a run that is resumed; options that are given must be the run's own."""
    folder = Path(str(given["resume"])).expanduser()
    read_checkpoint(folder)  # says why there is none
    experiment = resolve({**options_in(folder), **given, "results-dir": str(folder)})
    engine = engine or str((read_json(folder / "config.json") or {}).get("engine", ""))
    refuse_foreign(folder, experiment, engine)
    return experiment, engine


class Recovery:
    """Gathers into a checkpoint what a run's strategy, record and nodes hold, and gives it back to them.

    Random streams are not among it: they are functions of seed, node and round.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        grid: Grid,
        strategy: BaseStrategy,
        journal: Journal,
    ) -> None:
        self._folder, self._experiment = folder, experiment
        self._grid, self._strategy, self._journal = grid, strategy, journal
        self._history, self._last = History((), str(grid.run.run_id)), 0
        #: when the latest checkpoint was complete, and the seconds that it took
        self._ended, self._took = monotonic(), 0.0
        #: the configurations of messages to nodes that keep their states themselves
        self._told: list[ConfigRecord] = []

    def tell(self, config: ConfigRecord) -> ConfigRecord:
        """Add to the configuration of messages what nodes must know that keep their states themselves."""
        asked = self._experiment.config
        if (asked.checkpoint_every or asked.resume) and not isinstance(self._grid, SavesStates):
            config.update({STATE_HISTORY: self._history.to_text(), CHECKPOINT: self._last})
            self._told.append(config)
        return config

    def record(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Record a round, then write a checkpoint if it is time for one (an `evaluate_fn`)."""
        metrics = self._journal.record(server_round, arrays)
        if server_round and self._is_due(server_round):
            begun = monotonic()
            content = unpack(arrays), self._strategy.state_dict(), self._journal.state_dict()
            checkpoint = Checkpoint(server_round, *content, self._history.to_text())
            save_states = self._grid.save_states if isinstance(self._grid, SavesStates) else None
            write_checkpoint(self._folder, checkpoint, save_states)
            for config in self._told:
                config[CHECKPOINT] = server_round
            self._ended = monotonic()
            self._took = self._ended - begun
        return metrics

    def _is_due(self, server_round: int) -> bool:
        every = self._experiment.config.checkpoint_every
        if every == AUTOMATIC:
            return monotonic() - self._ended >= TRAINING_PER_SAVING * self._took
        return every > 0 and server_round % every == 0

    def restore(self, saved: Checkpoint) -> ArrayRecord:
        """Bring everything into the state of a checkpoint; return its model."""
        arrays = record(saved.model)
        descriptions = self._strategy.describe(self._grid, sorted(self._grid.get_node_ids()))
        nodes = {description.partition: node for node, description in descriptions.items()}
        self._strategy.load_state_dict(saved.strategy, nodes)
        self._journal.load_state_dict(saved.journal, arrays)
        self._history = History.parse(saved.history).then(saved.server_round, self._grid.run.run_id)
        self._last = saved.server_round
        if isinstance(self._grid, SavesStates):
            self._grid.restore_states(nodes_folder(self._folder))
        return arrays
