"""Checkpoints of a run: all that the rounds after one depend on, in a folder that appears and
disappears as a whole.

`Saver` writes them during a run, and takes one up.
"""

import io
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from safetensors.torch import save
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.output.recorder import Standing
from fedbn_flwr.experiments.output.run_folder import PERSONAL
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.method_state import pack_state, unpack_state
from fedbn_flwr.server.round import Round
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, LocalGrid
from fedbn_flwr.state import Arrays, State, arrays_of, arrays_to_record, from_record
from fedbn_flwr.strategies import BaseStrategy
from fedbn_flwr.whole_files import sync, write_bytes
from fedbn_flwr.wire.history import CHECKPOINT, STATE_HISTORY, History

#: the `checkpoint-every` of a run that saves as often as it costs little
AUTOMATIC = -1
#: seconds of training for each second that the last of these checkpoints took
TRAINING_PER_SAVING = 30

PREFIX = "checkpoint-"
SERVER = "server.pt"
NODES = "nodes"
#: where the nodes of Flower's simulation keep their states
STATES = "states"
#: not yet, and no longer, checkpoints
PARTIAL = f"{PREFIX}partial"
OLD = f"{PREFIX}old"


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its rounds."""

    server_round: int
    #: the global model
    model: Arrays
    #: the strategy's state, and how far the run has come
    strategy: Mapping[str, Any]
    standing: Mapping[str, Any]
    #: the numbers of the runs that went on with each other, where nodes keep their states
    #: themselves
    history: str = ""
    #: the sizes of the files with nodes' states, by name; known once they are written
    nodes: Mapping[str, int] = field(default_factory=dict)


def write_checkpoint(
    run: Path, checkpoint: Checkpoint, save_states: Callable[[Path], None] | None
) -> None:
    """Write a checkpoint into a run's folder, then remove the one before.

    The folder gets its name when everything is on the disk. So a whole checkpoint is there wherever
    the process ends. `save_states` writes the nodes' states into a folder.
    """
    partial = run / PARTIAL
    path = run / f"{PREFIX}{checkpoint.server_round}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / NODES).mkdir(parents=True)
    if save_states:
        save_states(partial / NODES)
    content = {**vars(checkpoint), "nodes": _sizes(partial / NODES)}
    packed = io.BytesIO()  # torch's own errors would not say that a disk is full
    torch.save(_converted(content, _as_plain), packed)
    (partial / SERVER).write_bytes(packed.getbuffer())
    for part in (
        *(partial / NODES).iterdir(),
        partial / SERVER,
        partial / NODES,
        partial,
        run / "rounds.jsonl",
    ):
        sync(part)
    partial.rename(path)
    sync(run)
    remove_checkpoints(run, but=path)


def read_checkpoint(run: Path) -> Checkpoint:
    """Return a run's latest checkpoint; a UsageError says why there is none that can be used."""
    path = _latest(run)
    try:
        plain = torch.load(path / SERVER, weights_only=True)
        content = _converted(plain, lambda leaf: leaf.numpy() if isinstance(leaf, Tensor) else leaf)
        checkpoint = Checkpoint(**{item.name: content[item.name] for item in fields(Checkpoint)})
    except Exception as error:  # whatever torch finds in a file that is damaged or another one
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise UsageError(f"the checkpoint {path / SERVER} cannot be read: {reason}") from error
    sizes = _sizes(path / NODES)
    if sizes != checkpoint.nodes:
        name = min(
            name
            for name in {*sizes, *checkpoint.nodes}
            if sizes.get(name) != checkpoint.nodes.get(name)
        )
        raise UsageError(
            f"the checkpoint {path} is damaged: {NODES}/{name} should have "
            f"{checkpoint.nodes.get(name, 0)} bytes, and has {sizes.get(name, 0)}"
        )
    return checkpoint


def remove_checkpoints(run: Path, but: Path | None = None) -> None:
    """Remove a run's checkpoints, except one."""
    # half a checkpoint that an earlier process left goes first: its name is needed for the others
    for path in sorted(run.glob(f"{PREFIX}*"), key=lambda path: path.name != OLD):
        if path != but:
            if path.name != OLD:  # first the name: half a checkpoint must not look like one
                path = path.rename(run / OLD)
            shutil.rmtree(path)


def clear(run: Path) -> None:
    """Remove everything that a run is resumed with."""
    remove_checkpoints(run)
    shutil.rmtree(run / STATES, ignore_errors=True)


def refuse_other_model(run: Path, checkpoint: Checkpoint, model: Arrays) -> None:
    """Refuse a checkpoint whose arrays are not those of the model."""
    before = _forms(checkpoint.model)
    now = _forms(model)
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{run} cannot be resumed: its model's entry {name!r} is {before.get(name)}, not "
                f"{now.get(name)}"
            )


def _forms(arrays: Arrays) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(value.shape), str(value.dtype)) for name, value in arrays.items()}


def checkpoint_round(run: Path) -> int:
    """Return the round of a run's latest checkpoint; 0 if there is none."""
    numbers = [path.name.removeprefix(PREFIX) for path in run.glob(f"{PREFIX}*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _latest(run: Path) -> Path:
    latest = checkpoint_round(run)
    if not latest:
        reason = "`checkpoint-every` makes some"
        if (run / "summary.json").exists():
            reason = "the run is complete"
        raise UsageError(f"{run} cannot be resumed: it has no checkpoint ({reason})")
    return run / f"{PREFIX}{latest}"


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*"))}


def _as_plain(leaf: Any) -> Any:
    """Return tensors in place of arrays, which `torch.load` reads without running code of the
    file.
    """
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.array(leaf))
    if isinstance(leaf, np.generic):
        return leaf.item()
    if type(leaf) not in (type(None), bool, int, float, str, set):
        raise TypeError(f"a checkpoint cannot hold {type(leaf).__name__}: {leaf!r}")
    return leaf


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _converted(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_converted(item, convert) for item in value)
    return convert(value)


class Saver:
    """Gathers into a checkpoint what a run's strategy, record and nodes hold, and gives it back to
    them.

    Random streams are not among it: they are functions of seed, node and round.
    """

    def __init__(
        self, folder: Path, config: Config, grid: Grid, strategy: BaseStrategy, standing: Standing
    ) -> None:
        self._folder = folder
        self._config = config
        self._grid = grid
        self._strategy = strategy
        self._standing = standing
        #: where nodes keep their states themselves, None
        self._local = grid if isinstance(grid, LocalGrid) else None
        self._history = History((), str(grid.run.run_id))
        #: the round of the latest checkpoint
        self._last = 0
        #: when the latest checkpoint was complete, and the seconds that it took
        self._ended = monotonic()
        self._took = 0.0

    def facts(self) -> ConfigRecord:
        """Return what messages of the next round tell nodes that keep their states themselves."""
        options = self._config.results
        if self._local or not (options.checkpoint_every or options.resume):
            return ConfigRecord()
        return ConfigRecord({STATE_HISTORY: self._history.to_text(), CHECKPOINT: self._last})

    def is_due(self, server_round: int) -> bool:
        """Return whether it is time for a checkpoint."""
        every = self._config.results.checkpoint_every
        if every == AUTOMATIC:
            return monotonic() - self._ended >= TRAINING_PER_SAVING * self._took
        return every > 0 and server_round % every == 0

    def save(self, now: Round) -> None:
        """Write a checkpoint after a round."""
        begun = monotonic()
        content = arrays_of(now.after), self._strategy.state_dict(), pack_state(self._standing, {})
        checkpoint = Checkpoint(now.number, *content, self._history.to_text())
        write_checkpoint(self._folder, checkpoint, self._local.save_states if self._local else None)
        self._last = now.number
        self._ended = monotonic()
        self._took = self._ended - begun

    def restore(self, saved: Checkpoint) -> ArrayRecord:
        """Bring everything into the state of a checkpoint; return its model."""
        descriptions = self._strategy.describe(self._grid, sorted(self._grid.get_node_ids()))
        nodes = {description.partition: node for node, description in descriptions.items()}
        self._strategy.load_state_dict(saved.strategy, nodes)
        unpack_state(self._standing, saved.standing, {})
        self._history = History.parse(saved.history).then(saved.server_round, self._grid.run.run_id)
        self._last = saved.server_round
        if self._local:
            self._local.restore_states(_latest(self._folder) / NODES)
        return arrays_to_record(saved.model)

    def save_personal(self, arrays: ArrayRecord) -> None:
        """Write what nodes' own models have in place of the server's `arrays`.

        Nodes elsewhere keep theirs.
        """
        strategy = self._strategy
        grid = self._local
        folder = self._folder / PERSONAL
        if not (strategy.personal and grid):
            return
        own: dict[int, State] = {}
        if strategy.stays == "none":
            strategy.round.grid = grid  # there was no round if the run died after its last one
            packages = strategy.package(list(grid.get_node_ids()), arrays)
            own = {
                node: from_record(groups[strategy.arrayrecord_key])
                for node, groups in packages.items()
            }
        for context in grid.contexts():
            own[context.node_id] = {
                **own.get(context.node_id, {}),
                **Memory(context.state).recall(wire.STAYS),
            }
        folder.mkdir(exist_ok=True)
        for node, entries in filter(itemgetter(1), own.items()):
            write_bytes(folder / f"{node - FIRST_NODE_ID}.safetensors", save(dict(entries)))
