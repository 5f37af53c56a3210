"""SCAFFOLD: the algorithm of its paper, and the optimum of quadratic clients, reached for any participation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.data import Split
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import BaseStrategy, FedBN, Scaffold
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, distance, make_model, make_split, participants
from tests.helpers.references import make_nodes, scaffold

Float = NDArray[np.float64]


class Point(nn.Module):
    """A model that is one number, whatever it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs))


@dataclass(frozen=True)
class Quadratics:
    """Curvatures a_j and minima b_j of all samples, and the number of samples of each client.

    Sample j has f_j(w) = (a_j / 2) (w - b_j)^2. A client's objective is the mean over its samples, so it is a quadratic
    again, with curvature mean(a_j) and its minimum at sum(a_j b_j) / sum(a_j).
    """

    curvatures: Float
    minima: Float
    sizes: tuple[int, ...]

    @classmethod
    def draw(cls, sizes: Sequence[int], seed: int = 0) -> "Quadratics":
        """Every sample of a client is the same, so that mini-batches bring no noise."""
        generator = np.random.default_rng(seed)
        curvatures, minima = generator.uniform(0.5, 2.0, len(sizes)), generator.normal(3.0, 4.0, len(sizes))
        return cls(np.repeat(curvatures, sizes), np.repeat(minima, sizes), tuple(sizes))

    def clients(self) -> list[tuple[float, float]]:
        """Each client's curvature A_i and minimum B_i: F_i(w) = (A_i / 2) (w - B_i)^2 + constant."""
        ends = np.cumsum(self.sizes)
        spans = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        return [
            (float(self.curvatures[span].mean()), float(np.average(self.minima[span], weights=self.curvatures[span])))
            for span in spans
        ]

    def optimum(self, shares: Sequence[float]) -> float:
        """Where sum_i shares_i F_i is smallest."""
        weights = [share * curvature for share, (curvature, _) in zip(shares, self.clients(), strict=True)]
        return float(np.average([minimum for _, minimum in self.clients()], weights=weights))

    def settle(self, strategy: BaseStrategy, rounds: int, **instruction: Any) -> Float:
        """Run the strategy through its messages, on full batches; return the global w after every round."""
        asked = replace(Instruction(local_steps=5, batch_size=max(self.sizes), lr=0.05, seed=5), **instruction)
        seen: list[float] = []

        def note(_: int, arrays: ArrayRecord) -> None:
            seen.append(float(state.from_record(arrays)["w"]))

        strategy.start(
            InProcessGrid(client_app(self.client), len(self.sizes)),
            state.to_record(Point().state_dict()),
            rounds,
            train_config=asked.to_config(),
            evaluate_config=ConfigRecord({"seed": asked.seed}),
            evaluate_fn=note,
        )
        return np.array(seen)

    def client(self, context: Context) -> BNClient:
        index = int(context.node_config["partition-id"])
        curvatures, minima = torch.from_numpy(self.curvatures), torch.from_numpy(self.minima)
        labels = torch.arange(len(curvatures))
        return BNClient(
            Point(),
            Split(torch.zeros(len(labels), 1, 1, 1), labels),
            indices=np.arange(sum(self.sizes[:index]), sum(self.sizes[: index + 1])),
            partition_id=index,
            memory=context.state,
            device="cpu",
            loss_function=lambda w, sample: (curvatures[sample] / 2 * (w - minima[sample]) ** 2).mean(),
        )


ALONE: Any = {"fraction_evaluate": 0.0, "min_train_nodes": 1}
EXAMPLES = [size / sum(SIZES) for size in SIZES]
UNIFORM = [1 / len(SIZES)] * len(SIZES)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("weighting", "shares"), [("examples", EXAMPLES), ("uniform", UNIFORM)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_is_the_papers_algorithm(fraction: float, weighting: Any, shares: list[float], momentum: float) -> None:
    strategy = Scaffold(fraction_train=fraction, weighting=weighting)
    drawn = participants(strategy)
    got = Federation(make_model()).run(strategy, 6, momentum=momentum, lr=0.05)
    assert {len(each) for each in drawn} == {int(fraction * len(SIZES))}
    asked = replace(INSTRUCTION, momentum=momentum, lr=0.05)
    assert distance(got, scaffold(make_model(), make_split(), make_nodes(), drawn, asked, shares)) < 1e-12


@pytest.mark.parametrize(("fraction", "rounds", "close"), [(0.1, 150, 1e-3), (0.2, 100, 1e-5)])
def test_reaches_the_optimum_of_all_examples_with_few_clients_a_round(
    fraction: float, rounds: int, close: float
) -> None:
    sizes = list(range(1, 21))
    clients = Quadratics.draw(sizes)
    optimum = clients.optimum([size / sum(sizes) for size in sizes])
    assert abs(optimum - clients.optimum([1 / 20] * 20)) > 0.1
    ends = clients.settle(Scaffold(fraction_train=fraction, **ALONE), rounds)
    assert ends[-1] == pytest.approx(optimum, abs=close)


@pytest.mark.parametrize(("kept", "steps"), [("none", 12), ("local", 5), ("global", 5)])
def test_momentum_leaves_the_optimum_where_it_is(kept: Any, steps: int) -> None:
    clients = Quadratics.draw([4] * 5)
    strategy = Scaffold(fraction_evaluate=0.0, momentum_state=kept)
    ends = clients.settle(strategy, 50, lr=0.02, momentum=0.9, local_steps=steps)
    assert ends[-1] == pytest.approx(clients.optimum([0.2] * 5), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"local_steps": 1}, {"momentum": 0.9}, {"optimizer": "adam"}, {"weight_decay": 0.1}]
)
def test_a_clients_variate_is_its_gradient_where_that_is_constant(options: dict[str, Any]) -> None:
    """Clients with next to no curvature: F_i(w) = -a b w with a tiny a."""
    clients = Quadratics(np.full(3, 1e-9), np.array([1e9, 2e9, -6e9]), (1, 1, 1))
    strategy = Scaffold(fraction_evaluate=0.0)
    clients.settle(strategy, 1, lr=0.1, **options)
    sent = [reply.records[wire.CONTROL_VARIATES]["w"] for reply in strategy.training.replies]
    assert np.concatenate(sent) == pytest.approx([-1.0, -2.0, 6.0], rel=1e-6)


def test_variates_are_sent_in_the_models_own_numbers() -> None:
    nodes, strategy = Federation(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), Scaffold()
    nodes.run(strategy, 2)
    sent = strategy.package([1000], nodes.initial)[1000][wire.CONTROL_VARIATES]
    assert {array.dtype for array in sent.values()} == {"float32"}


def test_entries_that_stay_on_a_node_are_not_corrected() -> None:
    class Both(Scaffold, FedBN):
        state: Any

    nodes, strategy = Federation(make_model()), Both()
    nodes.run(strategy, 2)
    local = {name for name in nodes.model.state_dict() if name.split(".")[1] in ("1", "4")}
    assert local
    assert not local & strategy.training.replies[0].records[wire.CONTROL_VARIATES].keys()
    assert nodes.kept(0, wire.CONTROL_VARIATES).keys() == dict(make_model().named_parameters()).keys() - local


def assert_mean_of_variates(strategy: Scaffold, nodes: Federation, shares: Sequence[float]) -> None:
    """Check the server's variate against those that nodes keep; one that never replied has none."""
    kept = [nodes.kept(partition, wire.CONTROL_VARIATES) for partition in range(len(SIZES))]
    for name, value in strategy.package([1001], nodes.initial)[1001][wire.CONTROL_VARIATES].items():
        mean = sum(share * own[name].numpy() for share, own in zip(shares, kept, strict=True) if own)
        np.testing.assert_allclose(value.numpy(), mean, atol=1e-14)


class Silent(InProcessGrid):
    """A grid whose first node is connected, and answers from some round on."""

    returns: float = inf
    round = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        kinds = [message.metadata.message_type for message in messages]
        self.round += "train" in kinds
        self.asked = [*getattr(self, "asked", []), *kinds]
        lost = [message.metadata.dst_node_id == 1000 and self.round < self.returns for message in messages]
        ids = iter(super().push_messages(message for message, gone in zip(messages, lost, strict=True) if not gone))
        return ["lost" if gone else next(ids) for gone in lost]


@pytest.mark.parametrize(("weighting", "shares"), [("examples", EXAMPLES), ("uniform", UNIFORM)])
@pytest.mark.parametrize("returns", [2, inf])
def test_a_node_that_is_silent_counts_like_the_others_until_it_replies(
    weighting: Any, shares: list[float], returns: float
) -> None:
    nodes, strategy = Federation(make_model(), grid=Silent), Scaffold(weighting=weighting, exchange_timeout=0.05)
    grid = cast(Silent, nodes.grid)
    grid.returns = returns
    nodes.run(strategy, 3)
    assert grid.asked.count("query.describe") == (weighting == "examples")
    total = 1.0 if returns == 2 else 4 / 3 * sum(shares[1:])
    assert_mean_of_variates(strategy, nodes, [share / total for share in shares])


def test_a_weight_that_only_replies_say_is_of_all_clients_once_all_have_replied() -> None:
    strategy, nodes = Scaffold(fraction_train=0.5, weighted_by_key="own-weight"), Federation(make_model(), wrap=weighs)
    drawn = participants(strategy)
    nodes.run(strategy, 8)
    assert {partition for each in drawn for partition in each} == set(range(len(SIZES)))
    assert_mean_of_variates(strategy, nodes, EXAMPLES)


def weighs(client: BNClient, index: int) -> BNClient:
    """Let a client say its number of samples by another name."""
    reply = client.reply

    def named(metrics: Any, *more: Any) -> Any:
        return reply({**metrics, "own-weight": SIZES[index]}, *more)

    cast(Any, client).reply = named
    return client
