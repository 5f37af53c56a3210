"""The simulated device refuses what a GPU refuses, and counts what it is asked."""

import os

import pytest
import torch
import torch.nn.functional as F

from fedbn_flwr.client import BNClient
from fedbn_flwr.data import Split
from fedbn_flwr.device import pick_device, total_memory
from tests.fake_accelerator.tally import counting

HERE = torch.ones(4, device="fake")


def test_auto_takes_it() -> None:
    assert pick_device("auto").type == "fake"
    assert total_memory(pick_device("auto")) == 8 << 30
    with pytest.raises(
        ValueError, match=r"'fake:1' is not available here: 1 of the kind; known: auto, cpu, fake$"
    ):
        pick_device("fake:1")


def test_a_client_moves_a_model_whose_new_head_is_on_the_cpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).to("fake"), torch.nn.Linear(3, 2))
    client = BNClient(model, Split(torch.zeros(4, 3), torch.zeros(4).long()), device="fake")
    assert {value.device.type for value in client.model.parameters()} == {"fake"}


def test_it_refuses_what_a_gpu_refuses() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        HERE + torch.ones(4)
    with pytest.raises(TypeError, match="can't convert"):
        HERE.numpy()
    with pytest.raises(RuntimeError, match="'fake' device type for generator"):
        HERE.clone().bernoulli_(0.5, generator=torch.Generator())
    # a number is none of another device's
    assert (HERE + torch.tensor(1.0)).tolist() == [2.0] * 4


def test_it_refuses_to_go_on_in_a_fork() -> None:
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        return
    try:
        HERE + 1
    except RuntimeError as error:
        os._exit(3 if "forked" in str(error) else 1)
    os._exit(0)


def test_it_counts_kernels_copies_and_waits() -> None:
    with counting() as tally:
        F.relu(HERE).cpu()
        HERE.sum().item()
        torch.zeros(2).to("fake")
        torch._foreach_add_([HERE.clone(), HERE.clone()], 1)
    assert [tally.of(kind) for kind in ("kernel", "to device", "to host", "wait")] == [5, 1, 1, 1]


def test_memory_is_garbage_at_first() -> None:
    assert torch.empty(2, device="fake").isnan().all()


def test_a_graph_owns_only_what_it_has_made() -> None:
    """As on a GPU, where other numbers may be in the memory by then."""
    given = torch.ones(4, device="fake")
    part = given[1:3]
    result = torch.zeros(2, device="fake")
    graph = torch.get_device_module("fake").CUDAGraph()
    with torch.get_device_module("fake").graph(graph):
        made = part * 2
        result.copy_(made + part)
    given.fill_(5)
    graph.replay()
    assert result.tolist() == [15, 15]
    assert made.isnan().all()
    del given, part
    with pytest.raises(RuntimeError, match="has been freed"):
        graph.replay()
