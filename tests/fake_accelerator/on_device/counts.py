"""What a step, a round and an evaluation ask of the device."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks.kernels import step_and_round
from fedbn_flwr import state
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.evaluation import evaluate, mean_loss
from fedbn_flwr.device import pins, total_memory
from fedbn_flwr.models import build
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.stacked.model import Stack
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedProx, FedTAN, FedWon, Scaffold
from tests.fake_accelerator.tally import KINDS, Tally, counting
from tests.helpers.engine_comparison import SIZES_APART, Stacked
from tests.helpers.harness import Federation, make_float32_model, make_split

#: of a round
STEPS = 3
#: clients with equal steps
SIZES = (8, 8)
#: a strategy, the normalizer of its model, options of its steps, and copies a round: to the device,
#: and back
CASES: dict[str, tuple[Callable[[], BaseStrategy], str, dict[str, Any], tuple[int, int]]] = {
    # the model in two dtypes and the batches' rows of the data on the way there; the model and the
    # loss on the way back
    "FedAvg": (FedAvg, "bn", {}, (3, 3)),
    "crop-flip": (FedAvg, "bn", {"augmentation": "crop-flip"}, (3, 3)),
    # the variates of the server and of the client; the client's new ones and their change
    "SCAFFOLD": (Scaffold, "bn", {}, (3 + 2, 3 + 2)),
    "kept momentum": (
        partial(FedAvg, momentum_state="local"),
        "bn",
        {"momentum": 0.9},
        (3 + 1, 3 + 1),
    ),
    "kept Adam": (
        partial(FedAvg, momentum_state="local"),
        "bn",
        {"optimizer": "adam", "lr": 0.01},
        (3 + 1, 3 + 1),
    ),
    "FedProx": (FedProx, "bn", {}, (3, 3)),
    # there are no counters
    "FedWon": (partial(FedWon, agc="off"), "wsconv", {}, (2, 2)),
    "FedWon, clipping": (partial(FedWon, agc="on"), "wsconv", {}, (2, 2)),
    # the clients' weights, and whether their values could be pooled; one after another, clients
    # exchange messages
    "FedTAN": (FedTAN, "bn", {}, (3 + 1, 3 + 1)),
}


def ask(case: str, grid: type[InProcessGrid], rounds: int, steps: int) -> Tally:
    """Return what a whole run asks of the device."""
    make, norm, options, _ = CASES[case]
    nodes = Federation(make_float32_model(norm), SIZES, grid=grid, device="fake")
    with counting() as tally:
        nodes.run(make(), rounds, local_steps=steps, **options)
    return tally


@cache
def measured(case: str, grid: type[InProcessGrid]) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by kind, what a step of a client or a stack asks, and what its round asks beside
    steps.
    """
    ask(case, grid, 1, 1)  # the first sends what stays on the device
    once, longer, more = (ask(case, grid, *run) for run in ((2, STEPS), (2, 2 * STEPS), (3, STEPS)))
    sides = 1 if grid is Stacked else len(SIZES)
    step = {kind: (longer.of(kind) - once.of(kind)) / (2 * STEPS * sides) for kind in KINDS}
    return step, {
        kind: (more.of(kind) - once.of(kind)) / sides - STEPS * step[kind] for kind in KINDS
    }


# kept Adam is not stacked
@pytest.mark.parametrize(
    ("case", "grid"),
    [
        pytest.param(case, grid, marks=pytest.mark.slow if grid is InProcessGrid else ())
        for case in CASES
        for grid in (InProcessGrid, Stacked)
        if (case, grid) != ("kept Adam", Stacked)
    ],
)
@pytest.mark.sampled(2)
def test_a_step_waits_for_nothing_and_a_round_has_few_copies(
    case: str, grid: type[InProcessGrid]
) -> None:
    step, a_round = measured(case, grid)
    # what is drawn for crops is sent in one copy, whose memory nobody waits for
    assert [step[kind] for kind in KINDS[1:]] == [float(case == "crop-flip"), 0, 0]
    assert a_round["wait"] == 0
    if (case, grid) != ("FedTAN", InProcessGrid):  # its messages are the CPU's
        assert (a_round["to device"], a_round["to host"]) == CASES[case][3]


class Added(StackedGrid):
    """Trains clients one after another, and adds up what they reply."""

    def __init__(self, client_app: ClientApp, num_nodes: int) -> None:
        super().__init__(client_app, num_nodes, chunk=1, average_by="examples")


def test_of_clients_one_after_another_the_model_comes_once_and_the_mean_goes_once() -> None:
    sizes = (8, 8, 8)

    def end(rounds: int, device: str = "fake") -> tuple[Tally, state.State]:
        nodes = Federation(make_float32_model(), sizes, grid=Added, device=device)
        with counting() as tally:
            found = nodes.run(FedAvg(), rounds, local_steps=STEPS)
        return tally, found

    end(1)
    (once, _), (more, found) = end(2), end(3)
    # the model in two dtypes, and each client's rows of the data; what of each is its loss, and
    # how large its numbers are
    assert more.of("to device") - once.of("to device") == 2 + len(sizes)
    assert more.of("to host") - once.of("to host") == 1 + 2 * len(sizes)
    _, wanted = end(3, "cpu")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_rows_of_clients_with_unlike_batches_stay_on_the_device() -> None:
    def sent(steps: int) -> float:
        nodes = Federation(make_float32_model(), SIZES_APART, grid=Stacked, device="fake")
        with counting() as tally:
            nodes.run(FedAvg(), 2, local_steps=steps)
        return tally.of("to device")

    sent(1)
    assert sent(2 * STEPS) == sent(STEPS)


@pytest.mark.parametrize("same", [True, False])
def test_a_model_is_loaded_by_few_kernels(same: bool) -> None:
    """However many entries it has, of two dtypes."""
    model = build("resnet20", 10, 3, 8).to("fake")
    given = [state.snapshot(model)] * 3
    if not same:
        given = [state.snapshot(model) for _ in given]
    stack = Stack(model, given)
    with counting() as tally:
        stack.load(given)
    # joined, where they are equal repeated, and split
    assert tally.of("kernel") == 2 * (2 + same)
    with counting() as tally:
        state.load(model, given[0])
    assert tally.of("kernel") == 2


def test_rules_launch_few_kernels() -> None:
    def kernels(case: str) -> float:
        return measured(case, Stacked)[0]["kernel"]

    # in the first of two rounds: in the second, they are in the graph
    assert kernels("SCAFFOLD") == kernels("FedProx") == kernels("FedAvg") + 2 / 2
    # for each of four parameters that are not the classifier's, two norms and a product with numbers
    # of another shape, and four kernels for all
    assert kernels("FedWon, clipping") == kernels("FedWon") + (4 * 3 + 4) / 2


@pytest.mark.slow
def test_a_run_of_the_command_asks_no_more() -> None:
    step, a_round = step_and_round("fedavg", "stacked", model="small-cnn")
    assert (step["wait"], a_round["to device"], a_round["to host"]) == (0, *CASES["FedAvg"][3])
    # inputs, targets, and the graph with the loss and the optimizer's step in it
    assert step["kernel"] == 3


def test_an_evaluation_waits_once_a_batch() -> None:
    model, split = make_float32_model().to("fake"), make_split()
    with counting() as tally:
        evaluate(model, split, 3, "fake", batch_size=10)
    assert (tally.of("wait"), tally.of("to host")) == (0, -(-len(split) // 10) + 1)
    with counting() as tally:
        mean_loss(model, split, torch.arange(len(split)).numpy(), "fake", batch_size=10)
    assert (tally.of("wait"), tally.of("to host")) == (0, 1)


def test_data_that_have_room_on_the_device_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, split = make_float32_model().to("fake"), make_split()

    def sent() -> int:
        with counting() as tally:
            evaluate(model, split, 3, "fake", batch_size=10)
        return tally.of("to device")

    # inputs and labels; what says which rows are a batch's
    assert [sent(), sent()] == [2 + 1, 1]
    size = split.inputs.nbytes + split.labels.nbytes
    for room, copies in ((size, 1), (size - 1, 2)):
        monkeypatch.setattr(
            "fedbn_flwr.data.splits.MOST_STAYING", room / total_memory(torch.device("fake"))
        )
        assert sent() == copies


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.sampled(1)
def test_a_device_without_pinned_memory_does_as_well(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS has none: torch gives its own memory in its place, and older versions raise."""
    empty = torch.empty

    def without(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and fails:
            raise RuntimeError("Need to provide pin_memory allocator to use pin memory.")
        return empty(*size, **options, device="fake") if pin_memory else empty(*size, **options)

    def ends() -> list[torch.Tensor]:
        runs = [
            Federation(make_float32_model(), SIZES, grid=grid, device="fake")
            for grid in (InProcessGrid, Stacked)
        ]
        return [
            value for nodes in runs for value in nodes.run(FedAvg(), 2, local_steps=STEPS).values()
        ]

    monkeypatch.setattr("fedbn_flwr.data.splits.MOST_STAYING", 0)
    wanted = ends()
    monkeypatch.setattr(torch, "empty", without)
    pins.cache_clear()
    assert all(map(torch.equal, wanted, ends()))
    pins.cache_clear()


def test_loading_a_model_is_one_copy_a_dtype() -> None:
    model = make_float32_model().to("fake")
    values = state.snapshot(model)
    with counting() as tally:
        state.load(model, values)
        state.load(model, dict(values))
    assert tally.of("to device") == 2 * len({value.dtype for value in values.values()})


def test_a_model_is_sent_to_the_device_once() -> None:
    model, split = make_float32_model(), make_split()
    with counting() as tally:
        clients = [BNClient(model, split, device=name) for name in ("fake", "fake:0", "fake")]
        assert {client.model for client in clients} == {model}
    assert tally.of("to device") == len(model.state_dict())
    with patch.object(
        nn.Module, "to", side_effect=AssertionError("to look at every tensor takes long")
    ):
        assert BNClient(model, split, device="fake").model is model
