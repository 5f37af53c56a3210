"""Checkpoints of a run: all that the rounds after one depend on, in a folder that appears and disappears as a whole."""

import io
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.averaging import Arrays
from fedbn_flwr.state.record_files import sync

PREFIX, SERVER, NODES = "checkpoint-", "server.pt", "nodes"
#: where the nodes of Flower's simulation keep their states
STATES = "states"
#: not yet, and no longer, checkpoints
PARTIAL, OLD = f"{PREFIX}partial", f"{PREFIX}old"


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its rounds."""

    server_round: int
    #: the global model
    model: Arrays
    #: the strategy's and the record's `state_dict`
    strategy: Mapping[str, Any]
    journal: Mapping[str, Any]
    #: the numbers of the runs that went on with each other, where nodes keep their states themselves
    history: str = ""
    #: the sizes of the files with nodes' states, by name; known once they are written
    nodes: Mapping[str, int] = field(default_factory=dict)


def write_checkpoint(run: Path, checkpoint: Checkpoint, save_states: Callable[[Path], None] | None) -> None:
    """Write a checkpoint into a run's folder, then remove the one before.

    The folder gets its name when everything is on the disk. So a whole checkpoint is there wherever the process ends.
    `save_states` writes the nodes' states into a folder.
    """
    partial, path = run / PARTIAL, run / f"{PREFIX}{checkpoint.server_round}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / NODES).mkdir(parents=True)
    if save_states:
        save_states(partial / NODES)
    content = {**vars(checkpoint), "nodes": _sizes(partial / NODES)}
    packed = io.BytesIO()  # torch's own errors would not say that a disk is full
    torch.save(_pack(content), packed)
    (partial / SERVER).write_bytes(packed.getbuffer())
    for part in (*(partial / NODES).iterdir(), partial / SERVER, partial / NODES, partial, run / "rounds.jsonl"):
        sync(part)
    partial.rename(path)
    sync(run)
    remove_checkpoints(run, but=path)


def read_checkpoint(run: Path) -> Checkpoint:
    """Return a run's latest checkpoint; a UsageError says why there is none that can be used."""
    path = _latest(run)
    try:
        content = _unpack(torch.load(path / SERVER, weights_only=True))
        checkpoint = Checkpoint(**{item.name: content[item.name] for item in fields(Checkpoint)})
    except Exception as error:  # whatever torch finds in a file that is damaged or another one
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise UsageError(f"the checkpoint {path / SERVER} cannot be read: {reason}") from error
    if (sizes := _sizes(path / NODES)) != checkpoint.nodes:
        name = min(name for name in {*sizes, *checkpoint.nodes} if sizes.get(name) != checkpoint.nodes.get(name))
        raise UsageError(
            f"the checkpoint {path} is damaged: {NODES}/{name} should have {checkpoint.nodes.get(name, 0)} bytes, and "
            f"has {sizes.get(name, 0)}"
        )
    return checkpoint


def nodes_folder(run: Path) -> Path:
    """Return the folder of the nodes' states in a run's latest checkpoint."""
    return _latest(run) / NODES


def remove_checkpoints(run: Path, but: Path | None = None) -> None:
    """Remove a run's checkpoints, except one."""
    # half a checkpoint that an earlier process left goes first: its name is needed for the others
    for path in sorted(run.glob(f"{PREFIX}*"), key=lambda path: path.name != OLD):
        if path != but:
            # first the name: half a checkpoint must not look like one
            shutil.rmtree(path if path.name == OLD else path.rename(run / OLD))


def clear(run: Path) -> None:
    """Remove everything that a run is resumed with."""
    remove_checkpoints(run)
    shutil.rmtree(run / STATES, ignore_errors=True)


def refuse_other_model(run: Path, checkpoint: Checkpoint, model: Arrays) -> None:
    """Refuse a checkpoint whose arrays are not those of the model."""
    before, now = (
        {name: (tuple(value.shape), str(value.dtype)) for name, value in state.items()}
        for state in (checkpoint.model, model)
    )
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{run} cannot be resumed: its model's entry {name!r} is {before.get(name)}, not {now.get(name)}"
            )


def checkpoint_round(run: Path) -> int:
    """Return the round of a run's latest checkpoint; 0 if there is none."""
    numbers = [path.name.removeprefix(PREFIX) for path in run.glob(f"{PREFIX}*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _latest(run: Path) -> Path:
    if not (latest := checkpoint_round(run)):
        reason = "the run is complete" if (run / "summary.json").exists() else "`checkpoint-every` makes some"
        raise UsageError(f"{run} cannot be resumed: it has no checkpoint ({reason})")
    return run / f"{PREFIX}{latest}"


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*"))}


def _pack(value: Any) -> Any:
    """Return the same with tensors in place of arrays, which `torch.load` reads without running code of the file."""
    return _converted(value, _as_plain)


def _as_plain(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.array(leaf))
    if isinstance(leaf, np.generic):
        return leaf.item()
    if type(leaf) not in (type(None), bool, int, float, str, set):
        raise TypeError(f"a checkpoint cannot hold {type(leaf).__name__}: {leaf!r}")
    return leaf


def _unpack(value: Any) -> Any:
    """Return the same with arrays in place of tensors."""
    return _converted(value, lambda leaf: leaf.numpy() if isinstance(leaf, Tensor) else leaf)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _converted(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_converted(item, convert) for item in value)
    return convert(value)
