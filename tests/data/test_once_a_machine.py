"""What is loaded once a machine: by one process of several, and again when that one has gone."""

import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fedbn_flwr import data
from fedbn_flwr.data import Data, Split
from fedbn_flwr.data.once_a_machine import once_a_machine
from fedbn_flwr.experiments import resources
from fedbn_flwr.experiments.config import Config

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memory without a name")

LARGE = (200, 1, 28, 28)


def sample(number: int) -> Data:
    inputs = torch.full(LARGE, number, dtype=torch.uint8)
    inputs[0, 0, 0, :2] = torch.tensor([0, 255])
    split = Split(inputs, torch.arange(200) % 10)
    return Data("sample", split, split, 10).standardized()


def ask(name: str, number: int) -> dict[str, Any]:
    """Return what this process has under a name; `number` says who made it."""
    shared = once_a_machine(name, lambda: sample(number))
    shared.share_normalized(f"{name} normalized")
    indices = torch.arange(200)
    shared.train.batch(indices)
    batch, _ = shared.train.batch(indices)
    return {
        "number": int(shared.train.inputs[1, 0, 0, 0]),
        "labels": shared.train.labels.tolist(),
        "batch": batch,
        "kept": shared_bytes(),
        "one tensor": shared.train.inputs.data_ptr() == shared.test.inputs.data_ptr(),
    }


def shared_bytes() -> int:
    """Return the bytes of this process's files in memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "memfd:fedbn-flwr" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@contextmanager
def process() -> Iterator[Callable[..., "Future[Any]"]]:
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        yield pool.submit


def test_the_first_process_makes_it_for_all_and_the_next_takes_its_place() -> None:
    name = secrets.token_hex()
    with process() as second:
        with process() as first:
            made = first(ask, name, 1).result()
            found = second(ask, name, 2).result()
        assert (made["number"], found["number"]) == (1, 1)
        assert made["labels"] == found["labels"] == [index % 10 for index in range(200)]
        assert made["one tensor"]
        assert found["one tensor"]
        # bytes, and normalized float32
        assert made["kept"] == found["kept"] >= 5 * 200 * 28 * 28
        assert torch.equal(made["batch"], sample(1).train.batch(torch.arange(200))[0])
        assert torch.equal(made["batch"], found["batch"])
        # the first process has ended
        assert ask(name, 3)["number"] == 3
        assert second(ask, name, 2).result()["number"] == 3


def write(name: str) -> int:
    shared: Tensor = once_a_machine(name, lambda: torch.zeros(2**16))
    shared += 1
    return int(shared[0])


def test_what_a_process_writes_it_has_for_itself() -> None:
    name = secrets.token_hex()
    tensor = torch.zeros(2**16)
    assert once_a_machine(name, lambda: tensor) is tensor
    with process() as other:
        assert other(write, name).result() == 1
    assert tensor.count_nonzero() == 0
    tensor += 2
    with process() as other:
        assert other(write, name).result() == 1


def refuse(name: str) -> int:
    return len(once_a_machine(name, lambda: [0]))


def test_what_cannot_be_shared_is_made_by_each_process() -> None:
    for kept in (lambda: None, torch.empty(2**16, device="meta")):
        name = secrets.token_hex()
        assert once_a_machine(name, lambda kept=kept: [kept, kept]) == [kept, kept]  # type: ignore[misc]
        with process() as other:
            assert other(refuse, name).result() == 1


def test_where_making_fails_the_next_process_tries() -> None:
    name = secrets.token_hex()
    with pytest.raises(OSError, match="no such data"):
        once_a_machine(name, fail)
    assert once_a_machine(name, lambda: 1) == 1


def fail() -> None:
    raise OSError("no such data")


def shared_by(family: str, config: Config) -> int:
    """Return the number of training samples that a process has without loading anything."""
    with mock.patch.object(data, "load", None):
        resources.share_data(config, family)
        return len(resources.load_data(config).train)


def test_workers_have_the_data_of_the_process_that_they_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_shared", {})
    config, family = Config(dataset="synthetic:n=2000", validation=0.1), secrets.token_hex()
    alone = resources.load_data(config)
    resources.share_data(config, family)
    assert resources.load_data(config) is alone
    with process() as worker:
        assert worker(shared_by, family, config).result() == len(alone.train) == 1800
    assert data.load(config.dataset) is not alone
