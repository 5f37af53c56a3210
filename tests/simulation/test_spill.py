"""Replies in a file are those in memory, and go when nobody needs them."""

import gc
import os
from errno import ENOSPC
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from safetensors.torch import load_file

from fedbn_flwr import state
from fedbn_flwr.experiments.engines import MakeGrid, node_grid, open_grid, spread_over
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.server.averaging import average
from fedbn_flwr.simulation import in_process, spill
from fedbn_flwr.simulation.spill import SpillBuffer, is_on_disk
from fedbn_flwr.state.flat import FlatArrays
from fedbn_flwr.state.records import flat_of
from tests.helpers.runs import OPTIONS
from tests.helpers.toys import assert_same_state


def open_files() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()}


def filed(values: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> FlatArrays:
    monkeypatch.setattr(spill, "MOST_HELD", 0)
    record = state.to_record(values)
    stored = kept(SpillBuffer().store_record(record))
    assert not is_on_disk(kept(record))
    assert is_on_disk(stored)
    return stored


def kept(record: ArrayRecord) -> FlatArrays:
    flat = flat_of(record)
    assert flat is not None
    return flat


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_replies_on_disk_take_no_memory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the file are the kernel's to drop: what must not grow is the process's own memory."""
    monkeypatch.setattr(spill, "MOST_HELD", 2**22)
    buffer, records, before = SpillBuffer(), list[ArrayRecord](), own_memory()
    for _ in range(64):
        records.append(buffer.store_record(state.to_record({"weight": torch.ones(2**18)})))
    averaged = average([kept(record) for record in records], [1.0] * 64)
    assert averaged["weight"].min() == averaged["weight"].max() == 1
    assert sum(is_on_disk(kept(record)) for record in records) == 60
    assert own_memory() - before < 32 * 2**20


def own_memory() -> int:
    """Bytes of this process that are not pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def of_every_kind(size: int) -> dict[str, torch.Tensor]:
    whole, half, none = torch.arange(size) + size, torch.full((size, 3), 0.5), torch.zeros(0, 3, dtype=torch.float64)
    return {"whole": whole, "half": half, "none": none, "true": whole > 0}


def test_files_are_filled_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With arrays of any length and dtype, one of them longer than a file."""
    monkeypatch.setattr(spill, "MOST_HELD", 0)
    monkeypatch.setattr(spill, "FILE_SIZE", 300)
    buffer, states = SpillBuffer(), [of_every_kind(size) for size in (3, 1, 5, 60, 7)]
    records = [buffer.store_record(state.to_record(each)) for each in states]
    for record, wanted in zip(records, states, strict=True):
        assert is_on_disk(kept(record))
        assert all(buffer.flags.aligned for buffer in kept(record).buffers.values())
        assert_same_state(state.from_record(record), wanted)


class FullDisk(FileIO):
    """A file of any length to which nothing can be written: what is mapped then ends the process when it is touched."""

    def write(self, _: Any) -> int:
        raise OSError(ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MOST_HELD", 0)
    monkeypatch.setattr(spill, "TemporaryFile", lambda **_: FullDisk(tmp_path / "file", "x+"))
    with pytest.raises(OSError, match="No space left"):
        SpillBuffer().store_record(state.to_record({"weight": torch.ones(3)}))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_file_goes_with_the_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    one, other = (filed({"weight": torch.ones(3)}, monkeypatch) for _ in range(2))
    assert len(open_files() - before) == 2
    del one
    gc.collect()
    assert len(open_files() - before) == 1
    assert other["weight"].sum() == 3
    del other
    gc.collect()
    assert open_files() == before


@pytest.mark.usefixtures("only_composed")
@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("sequential", "fedbn"),
        ("stacked", "scaffold"),
        ("stacked", "fedtan"),
        ("workers", "fedbn"),
        ("stacked workers", "fedtan"),
    ],
)
def test_a_run_has_the_same_bits(engine: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve({**OPTIONS, "method": method, "clients": "5", "workers": "1"})
    monkeypatch.setattr(in_process, "PORTION", 2)
    written, real = list[int](), SpillBuffer._write

    def noting(self: SpillBuffer, buffer: np.ndarray) -> np.ndarray:
        written.append(buffer.nbytes)
        return real(self, buffer)

    monkeypatch.setattr(SpillBuffer, "_write", noting)

    def trained(folder: Path) -> dict[str, torch.Tensor]:
        make_grid: MakeGrid = partial(node_grid, experiment, folder, "inprocess")
        if engine == "sequential":
            run(make_grid(range(5)), experiment, folder)
        elif engine == "stacked":
            with open_grid(experiment, folder, "stacked") as grid:
                run(grid, experiment, folder)
        else:
            if engine == "stacked workers":
                make_grid = partial(node_grid, experiment, folder, "stacked")
            with spread_over(2, make_grid, experiment.config) as grid:
                run(grid, experiment, folder)
        return load_file(folder / "model.safetensors")

    wanted = trained(tmp_path / "memory")
    assert not written
    monkeypatch.setattr(spill, "MOST_HELD", 10_000)
    monkeypatch.setattr(in_process, "MOST_UNPACKED", 10_000)
    found = trained(tmp_path / "file")
    assert written
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
