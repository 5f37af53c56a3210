"""Replies in a file are those in memory, and go when nobody needs them."""

import gc
import os
import pickle
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr import state
from fedbn_flwr.experiments.engines import MakeGrid, cohort_grid, sequential_grid, spread_over, stacked_grid
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.server_side import run
from fedbn_flwr.server.averaging import average, not_finite
from fedbn_flwr.simulation import prepared as staged
from fedbn_flwr.simulation import spill
from fedbn_flwr.simulation.spill import DiskArrays, SpillBuffer
from fedbn_flwr.state.flat import FlatArrays, FlatState
from fedbn_flwr.state.records import flat_of
from tests.helpers.runs import OPTIONS
from tests.helpers.toys import random_state, toy_cnn

METHODS = ["fedavg", "fedbn", "scaffold", "fedbs", "fixbn:freeze-round=2", "fedtan"]


def open_files() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()}


def filed(values: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> FlatArrays:
    monkeypatch.setattr(spill, "MOST_HELD", 0)
    record = state.to_record(values)
    found = flat_of(SpillBuffer().store_record(record))
    assert type(flat_of(record)) is FlatArrays
    assert isinstance(found, DiskArrays)
    return found


def test_it_is_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_state(toy_cnn())
    found, wanted = filed(values, monkeypatch), {name: value.numpy() for name, value in values.items()}
    assert list(found) == list(found.keys()) == list(wanted)
    assert len(found) == len(wanted)
    assert next(iter(wanted)) in found
    assert "nothing" not in found
    copies: list[Any] = [dict(found), dict(found.items()), dict(found.copy()), dict(pickle.loads(pickle.dumps(found)))]
    copies.append({name: value.numpy() for name, value in found.tensors.items()})
    for copy in copies:
        for name, value in wanted.items():
            assert copy[name].dtype == value.dtype
            np.testing.assert_array_equal(copy[name], value, strict=True)
    for value, other in zip(found.values(), wanted.values(), strict=True):
        np.testing.assert_array_equal(value, other)


def test_what_is_read_is_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = filed({"weight": torch.ones(3)}, monkeypatch)
    found["weight"][:] = 2
    assert found["weight"].tolist() == [1, 1, 1]


def test_averages_and_checks_are_those_of_states_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.server.averaging._PORTION", 7)
    states = [random_state(toy_cnn(), seed) for seed in range(3)]
    in_memory = [FlatArrays.copy_of({name: value.numpy() for name, value in each.items()}) for each in states]
    in_files = [filed(each, monkeypatch) for each in states]
    wanted = average(in_memory, [1, 2, 3])
    for mixed in (in_files, [in_files[0], in_memory[1], in_files[2]], [in_memory[0], *in_files[1:]]):
        found = average(mixed, [1, 2, 3])
        assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())
    assert not_finite(in_files[0]) is None
    name = next(iter(states[0]))
    states[0][name].view(-1)[-1] = float("nan")
    assert not_finite(filed(states[0], monkeypatch)) == name


def test_the_first_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MOST_HELD", 100)
    buffer = SpillBuffer()
    records = [state.to_record({"weight": torch.ones(10)}) for _ in range(4)]
    kinds = [type(flat_of(buffer.store_record(record))) for record in records]
    assert kinds == [FlatArrays, FlatArrays, DiskArrays, DiskArrays]


def test_of_a_stack_all_stay_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MOST_HELD", 200)
    buffer = SpillBuffer()
    stacks = [FlatState.copies_of({"weight": torch.ones(4, 10)}, 4) for _ in range(2)]
    records = [state.to_record(own, copy=False) for stack in stacks for own in stack]
    kinds = [type(flat_of(buffer.store_record(record))) for record in records]
    assert kinds == [FlatArrays] * 4 + [DiskArrays] * 4


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


@pytest.mark.parametrize(
    ("engine", "method"),
    [*product(("sequential", "cohort"), METHODS), ("workers", "fedbn"), ("stacked workers", "fedtan")],
)
def test_a_run_has_the_same_bits(engine: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve({**OPTIONS, "method": method, "clients": "5", "way": "stacked", "workers": "1"})
    monkeypatch.setattr("fedbn_flwr.simulation.prepared.TOGETHER", 2)
    seen, real = list[DiskArrays](), SpillBuffer._on_disk

    def noting(self: SpillBuffer, flat: FlatArrays) -> DiskArrays:
        seen.append(real(self, flat))
        return seen[-1]

    monkeypatch.setattr(SpillBuffer, "_on_disk", noting)

    def trained(folder: Path) -> dict[str, torch.Tensor]:
        make_grid: MakeGrid = partial(sequential_grid, experiment, folder)
        if engine == "sequential":
            run(make_grid(range(5)), experiment, folder)
        elif engine == "cohort":
            with cohort_grid(experiment, folder) as grid:
                run(grid, experiment, folder)
        else:
            if engine == "stacked workers":
                make_grid = partial(stacked_grid, experiment, folder)
            with spread_over(2, make_grid, experiment.config) as grid:
                run(grid, experiment, folder)
        return load_file(folder / "model.safetensors")

    wanted = trained(tmp_path / "memory")
    assert not seen
    monkeypatch.setattr(spill, "MOST_HELD", 10_000)
    monkeypatch.setattr(staged, "MOST_UNPACKED", 10_000)
    found = trained(tmp_path / "file")
    assert seen
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
