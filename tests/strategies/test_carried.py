"""Carried corrections: against the equations, at their fixed points, and where nodes come and go.

In float64.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.data import Split
from fedbn_flwr.layerwise import Kind, Requests
from fedbn_flwr.layerwise.carried import (
    CarriedValues,
    CorrectedClients,
    correct,
    correction,
    pack_values,
    read_corrections,
)
from fedbn_flwr.server.grids import PassingGrid, identify
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedAvg, FedBN, FedDNA, FedTAN, FedTANII
from fedbn_flwr.transports.counting_grid import CountingGrid
from fedbn_flwr.wire import Instruction
from tests.helpers.faults import FAULTY, FaultyReply, failed, spoiling, too_large
from tests.helpers.harness import (
    INSTRUCTION,
    SIZES,
    Federation,
    Traffic,
    assert_all_differ,
    distance,
    make_model,
    make_split,
    participants,
)
from tests.helpers.references import Node, make_nodes, mini_batches, weighted_mean

#: added to variances that are divided by, or whose root divides
FLOOR = 1e-5


@dataclass
class Values:
    """A layer's local values: mean, variance, and the gradients by them."""

    m: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    n: int


@dataclass
class Correction:
    """What a layer adds to its local values."""

    o: Tensor
    q: Tensor
    alpha: Tensor
    beta: Tensor
    n: int


class CorrectedBatchNorm(nn.Module):
    """BN with mean m + o sqrt(v) and variance v q.

    A term alpha mean + beta variance of the loss adds to a and b.
    """

    def __init__(self, layer: nn.BatchNorm2d, correction: Correction | None) -> None:
        super().__init__()
        self.layer, self.c = layer, correction
        self.term: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        m, n = x.mean((0, 2, 3)), x.numel() // x.shape[1]
        self.m, self.v = m.detach(), (x - m.view(1, -1, 1, 1)).square().mean((0, 2, 3)).detach()
        used, variance, self.n = self.m, self.v, n
        if self.c is not None:
            used = self.m + self.c.o * (self.v + FLOOR).sqrt()
            variance = ((self.v + FLOOR) * self.c.q - FLOOR).clamp(min=0)
            self.n = self.c.n
        square = (x - used.view(1, -1, 1, 1)).square().mean((0, 2, 3))
        # the values of `used` and `variance`; they depend on x as the mean, and as the variance
        # around `used`
        self.mean, self.variance = used + m - m.detach(), variance + square - square.detach()
        self.mean.retain_grad()
        self.variance.retain_grad()
        if self.c is not None:
            self.term = (self.c.alpha * self.mean + self.c.beta * self.variance).sum()
        with torch.no_grad():
            layer, n = self.layer, self.n
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            layer.running_mean.copy_(0.9 * layer.running_mean + 0.1 * used)
            layer.running_var.copy_(0.9 * layer.running_var + 0.1 * variance * n / (n - 1))
            layer.num_batches_tracked += 1
        shape = (1, -1, 1, 1)
        y = (x - self.mean.view(shape)) / (self.variance + layer.eps).sqrt().view(shape)
        return y * layer.weight.view(shape) + layer.bias.view(shape)

    def values(self) -> Values:
        """Return the local values, after the backward pass."""
        assert self.mean.grad is not None
        assert self.variance.grad is not None
        a, b = self.mean.grad, self.variance.grad
        if self.c is not None:
            a, b = a - self.c.alpha, b - self.c.beta
        return Values(self.m, self.v, a.clone(), b.clone(), self.x.numel() // self.x.shape[1])


@dataclass
class Server:
    """The values of nodes, the corrections made of them, and what these have added to the mean
    gradients so far.
    """

    trust: float = 3.0
    memory: float = 0.5
    oldest: int = 4
    forward_only: bool = False
    known: dict[int, dict[str, Values]] = field(default_factory=dict)
    #: the round in which a node was last heard
    last: dict[int, int] = field(default_factory=dict)
    added: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)

    def corrections(
        self, shares: Mapping[int, float], number: int
    ) -> dict[int, dict[str, Correction]]:
        """Return the corrections of those participants that were heard, and not more than `oldest`
        rounds ago.
        """
        heard = {
            node: share
            for node, share in shares.items()
            if node in self.known and (not self.oldest or number - self.last[node] <= self.oldest)
        }
        total = sum(heard.values())
        found: dict[int, dict[str, Correction]] = {node: {} for node in heard}
        for layer in next(iter(self.known.values()), {}):
            each = {node: self.known[node][layer] for node in heard}
            if not each:
                continue
            p = {node: share / total for node, share in heard.items()}
            m = sum(p[node] * value.m for node, value in each.items())
            v = sum(p[node] * (value.v + (value.m - m) ** 2) for node, value in each.items())
            a = sum(p[node] * value.a for node, value in each.items())
            b = sum(p[node] * value.b for node, value in each.items())
            for node, value in each.items():
                o, q = (m - value.m) / (value.v + FLOOR).sqrt(), (v + FLOOR) / (value.v + FLOOR)
                o, q = o.clamp(-self.trust, self.trust), q.clamp(1 / self.trust, self.trust)
                gain = 0.0 if self.forward_only else 1.0
                n = sum(other.n for other in each.values())
                of_a, of_b = self.added.get(layer, (0.0, 0.0))
                found[node][layer] = Correction(
                    o, q, gain * (a - value.a - of_a), gain * (b - value.b - of_b), n
                )
        return found

    def hear(self, node: int, heard: dict[str, Values], number: int) -> None:
        """Average the statistics of a node, of which those of j rounds ago count `memory` to the
        power of j.
        """
        if node in self.known:
            kept = self.memory ** (number - self.last[node])
            for layer, new in heard.items():
                old = self.known[node][layer]
                m, v = (
                    kept * before + (1 - kept) * now
                    for before, now in ((old.m, new.m), (old.v, new.v))
                )
                heard[layer] = Values(m, v, new.a, new.b, new.n)
        self.known[node], self.last[node] = heard, number

    def settle(
        self, corrections: Mapping[int, dict[str, Correction]], shares: Mapping[int, float]
    ) -> None:
        """Add what the corrections of the nodes that reply sum to.

        `shares` are theirs, and sum to one.
        """
        for node, share in shares.items():
            for layer, c in corrections.get(node, {}).items():
                of_a, of_b = self.added.get(layer, (0.0, 0.0))
                self.added[layer] = of_a + share * c.alpha, of_b + share * c.beta


def carried_run(
    model: nn.Module,
    split: Split,
    nodes: Sequence[Node],
    instruction: Instruction,
    drawn: Sequence[Sequence[int]],
    server: Server,
    silent: Callable[[int, int], bool] = lambda _node, _round: False,
) -> nn.Module:
    """Train for as many rounds as node numbers are drawn for; plain SGD, weights by examples.

    `silent` says of a node and a round, counted from 1, whether the node does not reply.
    """
    model = copy.deepcopy(model)
    for number, chosen in enumerate(drawn, start=1):
        asked = replace(instruction, server_round=number)
        total = sum(len(nodes[node].samples) for node in chosen)
        shares = {node: len(nodes[node].samples) / total for node in chosen}
        corrections = server.corrections(shares, number)
        chosen = [node for node in chosen if not silent(node, number)]
        present = sum(shares[node] for node in chosen)
        replying = {node: shares[node] / present for node in chosen}
        server.settle(corrections, replying)
        for node in shares.keys() - replying.keys():
            server.known.pop(node, None)
        ends = list[dict[str, Tensor]]()
        for node in chosen:
            local = copy.deepcopy(model).train()
            heard = _train(
                local,
                mini_batches(split, nodes[node], asked, True),
                asked.lr,
                corrections.get(node, {}),
            )
            server.hear(node, heard, number)
            ends.append(local.state_dict())
        model.load_state_dict(weighted_mean(ends, list(replying.values())))
    return model


def _train(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    corrections: Mapping[str, Correction],
) -> dict[str, Values]:
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)
    }
    replaced = {
        name: CorrectedBatchNorm(layer, corrections.get(name)) for name, layer in layers.items()
    }
    values: dict[str, Values] = {}
    for step, (inputs, targets) in enumerate(data):
        for name, layer in layers.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer if step else replaced[name])
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        (loss if step else loss + sum(each.term for each in replaced.values())).backward()
        values = values or {name: layer.values() for name, layer in replaced.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return values


#: BN layers of the harness's model, and their channels together
LAYERS, CHANNELS = 2, 8
#: bytes of the layers' names, one a line
NAMES = len("\n".join(norm.bn_layers(make_model())))
ROUNDS = 4


def run(
    strategy: FedAvg, rounds: int = ROUNDS, sizes: tuple[int, ...] = SIZES, **options: Any
) -> state.State:
    return Federation(make_model(), sizes).run(strategy, rounds, **options)


#: whether a partition does not reply in a round
Silence = Callable[[int, int], bool]


CASES: dict[str, tuple[Callable[[], FedAvg], dict[str, Any]]] = {
    "carried": (lambda: FedTAN(carry=True), {}),
    "the last values": (lambda: FedTAN(carry=True, memory=0.0), {"memory": 0.0}),
    "a narrow region": (lambda: FedTAN(carry=True), {"trust": 1.1}),
    "statistics only": (lambda: FedDNA(carry=True), {"forward_only": True}),
}


def by_hand(
    drawn: list[list[int]], steps: int, silent: Silence = lambda *_: False, **options: Any
) -> state.State:
    asked = replace(INSTRUCTION, local_steps=steps)
    return carried_run(
        make_model(), make_split(), make_nodes(), asked, drawn, Server(**options), silent
    ).state_dict()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_what_the_equations_say(
    case: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options = CASES[case]
    monkeypatch.setattr("fedbn_flwr.layerwise.carried.TRUST", options.get("trust", 3.0))
    found = run(make(), local_steps=steps)
    assert distance(found, by_hand([[0, 1, 2, 3]] * ROUNDS, steps, **options)) < 1e-10


def test_the_cases_differ() -> None:
    runs = [by_hand([[0, 1, 2, 3]] * ROUNDS, 1, **options) for _, options in CASES.values()]
    runs += [run(FedAvg(), local_steps=1), run(FedTAN(), local_steps=1)]
    assert_all_differ(runs, by=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"memory": 0.0, "oldest": 0}, marks=pytest.mark.slow),
        {"memory": 0.5, "oldest": 1},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_with_half_of_the_nodes_the_pool_is_that_of_the_participants(
    options: dict[str, Any],
) -> None:
    strategy = FedTAN(carry=True, fraction_train=0.5, **options)
    drawn = participants(strategy)
    found = run(strategy, 48)
    # some meet for the first time, and some again; somebody's values are one round older than the
    # default limit
    assert len({tuple(nodes) for nodes in drawn}) > 2
    rounds = [[number for number, nodes in enumerate(drawn) if node in nodes] for node in range(4)]
    assert 5 in {after - before for each in rounds for before, after in pairwise(each)}
    assert distance(found, by_hand(drawn, 3, **options)) < 1e-10


# ---- nodes that do not reply ---------------------------------------------------------------------

SILENCES: dict[str, Silence] = {
    "for good": lambda node, number: node == 1 and number > 2,
    "for two rounds": lambda node, number: node == 2 and number in (3, 4),
    "in every other round": lambda node, number: node == 2 and number % 2 == 0,
    "two of them by turns": lambda node, number: node == number % 2,
}


@pytest.mark.parametrize(
    ("fraction", "rounds", "options"),
    [(1.0, 8, {}), (0.75, 8, {}), (0.5, 16, {"oldest": 1})],
    ids=str,
)
@pytest.mark.parametrize("case", SILENCES)
@pytest.mark.sampled(3)
def test_a_run_with_silent_nodes_is_what_the_equations_say(
    case: str, fraction: float, rounds: int, options: dict[str, Any]
) -> None:
    strategy = FedTAN(carry=True, fraction_train=fraction, fraction_evaluate=0.0, **options)
    drawn = participants(strategy)
    found = Federation(make_model(), grid=spoiling(failed, SILENCES[case])).run(strategy, rounds)
    assert distance(found, by_hand(drawn, 3, SILENCES[case], **options)) < 1e-10


def test_fewer_nodes_than_a_rule_needs_make_no_corrections() -> None:
    """In some rounds, only two of the three participants have taken part before."""
    nodes, strategy = (
        Federation(make_model(), grid=Traffic),
        FedTAN(carry=True, robust="median", fraction_train=0.75),
    )
    nodes.run(strategy, 6)
    asked: dict[int, list[Message]] = {}
    for message in cast(Traffic, nodes.grid).sent:
        if message.metadata.message_type == "train":
            config: Any = message.content[wire.CONFIG]
            asked.setdefault(config["server-round"], []).append(message)
    heard, counts = set[int](), set[int]()
    for messages in asked.values():
        drawn = {message.metadata.dst_node_id for message in messages}
        corrected = sum(wire.CARRIED in message.content for message in messages)
        assert corrected == (
            len(drawn & heard) if len(drawn & heard) >= strategy.averager.fewest_nodes else 0
        )
        counts.add(len(drawn & heard))
        heard |= drawn
    assert {2, 3} <= counts


#: for each round, the nodes that are drawn, and whether each of them replies
ROUNDS_OF_NODES = st.lists(
    st.dictionaries(st.integers(0, 4), st.booleans(), min_size=1).filter(
        lambda drawn: any(drawn.values())
    ),
    min_size=2,
    max_size=12,
)


@given(rounds=ROUNDS_OF_NODES, seed=st.integers(0, 100))
@example(rounds=[dict.fromkeys(range(3), True), *[{0: False, 1: True, 2: True}] * 6], seed=0)
@example(
    rounds=[
        dict.fromkeys(range(3), True),
        *[{0: number % 2 == 0, 1: True, 2: True} for number in range(8)],
    ],
    seed=0,
)
def test_what_corrections_add_over_all_rounds_is_never_more_than_one_pool_can(
    rounds: list[dict[int, bool]], seed: int
) -> None:
    """One number in place of a gradient.

    Each round's pool, and what it leaves over, by the definition.
    """
    generator, carried = np.random.default_rng(seed), CarriedValues()
    sizes, last, added, largest = [3.0, 7.0, 1.0, 12.0, 5.0], dict[int, float](), 0.0, 0.0
    for drawn in rounds:
        corrections = carried.corrections(drawn, lambda examples: list(examples.values()))
        assert corrections.keys() == drawn.keys() & last.keys()
        averaged = {node: sizes[node] for node, replies in drawn.items() if replies}
        alphas = {node: found["gradients"][0, 0] for node, found in corrections.items()}
        before, total = added, sum(averaged.values())
        added += sum(size * alphas.get(node, 0.0) for node, size in averaged.items()) / total
        corrected = averaged.keys() & alphas.keys()
        share, pool = (
            sum(sizes[node] for node in corrected) / total,
            sum(sizes[node] for node in alphas),
        )
        if corrected:
            pooled = sum(sizes[node] * last[node] for node in alphas) / pool
            left = sum(sizes[node] * (pooled - last[node]) for node in corrected) / (share * total)
            largest = max(largest, abs(left))
            assert added == pytest.approx((1 - share) * before + share * left, abs=1e-12)
        if averaged.keys() == alphas.keys():
            assert added == pytest.approx(0.0, abs=1e-12)
        assert abs(added) <= largest + 1e-12
        carried.settle(corrections, drawn.keys() - averaged.keys(), averaged)
        for node, replies in drawn.items():
            last.pop(node, None)
            if replies:
                last[node] = float(generator.normal())
                carried.hear(node, sizes[node], values(0.0) | with_gradients(last[node], 0.0))


def test_statistics_are_corrected_by_three_deviations_and_a_factor_of_three_at_most() -> None:
    carried = CarriedValues()
    for node, (mean, variance) in enumerate(((0.0, 1.0), (10.0, 1.0), (0.0, 1e4))):
        carried.hear(node, 10, values(mean, variance))
    found = carried.corrections(range(3), lambda examples: list(examples.values()))
    corrections = [found[node]["statistics"].ravel().tolist() for node in range(3)]
    assert corrections[0] == [3.0, 3.0]
    assert corrections[1] == [-3.0, 3.0]
    assert corrections[2] == pytest.approx([10 / 3 / 100, (1e4 + 2 * 1 + 200 / 3) / 3 / 1e4])


def test_a_surplus_of_other_layers_is_not_taken_back() -> None:
    carried = CarriedValues()
    carried.kept.surplus = np.ones((2, 3))
    for node, gradient in ((7, 1.0), (8, 5.0)):
        carried.hear(node, 10, values(0.0) | with_gradients(gradient, 0.0))
    found = carried.corrections([7, 8], lambda examples: list(examples.values()))
    assert [found[node]["gradients"].tolist() for node in (7, 8)] == [
        [[2.0], [0.0]],
        [[-2.0], [0.0]],
    ]


def test_a_round_without_any_reply_leaves_the_values_as_they_are() -> None:
    strategy = FedTAN(carry=True)
    Federation(make_model(), grid=spoiling(failed, lambda _, number: number == 3)).run(strategy, 3)
    assert len(strategy.carried.kept.by_node) == len(SIZES)


# ---- fixed points --------------------------------------------------------------------------------


WHOLE: dict[str, Any] = {"batch_size": 50, "local_steps": 1}


@pytest.mark.parametrize(
    ("still", "exact"), [(2 * LAYERS, True), (2 * LAYERS - 1, False), (1, False)]
)
def test_a_model_that_stands_still_ends_with_fedtans_gradient(still: int, exact: bool) -> None:
    """With whole data sets as mini-batches: 2 L rounds without a rate, then one with a rate."""
    schedule: dict[str, Any] = {"lr_schedule": f"=0.5@{still}"}
    carry: dict[str, Any] = {"carry": True, "memory": 0.0}
    carried, wanted = (
        run(FedTAN(**{**options, **schedule}), still + 1, lr=0.0, **WHOLE)
        for options in (carry, {})
    )
    parameters = [name for name in carried if "running" not in name and "tracked" not in name]
    start = make_model().state_dict()
    assert distance(start, wanted) > 1e-2
    gap = distance(
        {name: carried[name] for name in parameters}, {name: wanted[name] for name in parameters}
    )
    assert (gap < 1e-12) == exact


# ---- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "numbers"), [(FedTAN, 4), (FedDNA, 2)])
def test_a_message_carries_four_numbers_a_channel_more_each_way(
    make: type[FedTAN] | type[FedDNA], numbers: int
) -> None:
    def traffic(strategy: FedAvg) -> tuple[int, int, int]:
        nodes = Federation(make_model())
        grid = CountingGrid(nodes.grid)
        nodes.run(strategy, ROUNDS, grid=grid)
        # nodes remember nothing
        assert all(not nodes.grid.context(node).state for node in nodes.grid.get_node_ids())
        return grid.training.exchanges, grid.training.payload_down, grid.training.payload_up

    (rounds, down, up), (_, plain_down, plain_up) = traffic(make(carry=True)), traffic(FedAvg())
    assert rounds == ROUNDS
    group = 8 * (numbers * CHANNELS + 3 * LAYERS) + NAMES
    assert up - plain_up == ROUNDS * len(SIZES) * group
    # in the first round the server knows nothing
    assert down - plain_down == (ROUNDS - 1) * len(SIZES) * group


# ---- what the server keeps -----------------------------------------------------------------------


def values(mean: float, variance: float = 1.0, layers: int = 1) -> dict[str, np.ndarray]:
    return {
        "statistics": np.array([[mean], [variance]]).repeat(layers, axis=1),
        "layers": np.frombuffer("\n".join("abc"[:layers]).encode(), dtype=np.uint8),
        "sizes": np.array([[4], [1], [0]]).repeat(layers, axis=1),
    }


def with_gradients(of_mean: float, of_variance: float) -> dict[str, np.ndarray]:
    return {"gradients": np.array([[of_mean], [of_variance]]), "sizes": np.array([[4], [1], [1]])}


def test_the_oldest_values_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # a node's values are 2 + 3 + 1 numbers of 8 bytes, and a byte for the layer's name
    monkeypatch.setattr("fedbn_flwr.layerwise.carried.LIMIT", 3 * 57)
    carried = CarriedValues()
    for node in (1, 2, 3, 1, 4):
        carried.hear(node, 10, values(0.0))
    assert list(carried.kept.by_node) == [3, 1, 4]


FAULTY_VALUES: dict[str, dict[str, np.ndarray]] = {
    "a negative variance": values(0.0, -1.0),
    "not a number": values(float("nan")),
    "a gradient that is none": values(0.0) | with_gradients(float("inf"), 0.0),
    "a square that overflows": values(1e160),
    "a gradient that is too large": values(0.0) | with_gradients(1e308, 0.0),
    "whole numbers": {**values(0.0), "statistics": np.ones((2, 1), int)},
    "statistics without a second dimension": {**values(0.0), "statistics": np.ones(2)},
    "no sizes": {name: value for name, value in values(0.0).items() if name != "sizes"},
    "no layers": {name: value for name, value in values(0.0).items() if name != "layers"},
    "no statistics": {name: value for name, value in values(0.0).items() if name != "statistics"},
    "another number of layers": {**values(0.0, layers=2), "layers": values(0.0)["layers"]},
    "names that are numbers": {**values(0.0), "layers": np.ones(1)},
    "no count": {**values(0.0), "sizes": np.array([[0], [1], [0]])},
    "a layer without channels": {
        **values(0.0, layers=2),
        "sizes": np.array([[4, 4], [2, 0], [0, 0]]),
    },
    "less than no gradients": {
        **values(0.0, layers=2),
        "sizes": np.array([[4, 4], [1, 1], [1, -1]]),
    },
    "sizes that are not whole": {**values(0.0), "sizes": np.array([[4.0], [1.0], [0.0]])},
    # they would be added to the others' int64 as float64, which has no room for the sum
    "sizes without a sign": {**values(0.0), "sizes": np.array([[4], [1], [0]], np.uint64)},
    "sizes in few bits": {**values(0.0), "sizes": np.array([[4], [1], [0]], np.int8)},
    "a count whose sum with others overflows": {
        **values(0.0),
        "sizes": np.array([[2**53 + 1], [1], [0]]),
    },
    "another shape": {**values(0.0), "statistics": np.ones((3, 1))},
    "more channels": {**values(0.0), "statistics": np.ones((2, 2))},
    "gradients without a size": {**values(0.0), "gradients": np.ones((2, 1))},
    "a size without gradients": {**values(0.0), "sizes": np.array([[4], [1], [1]])},
    "something more": {**values(0.0), "more": np.ones((2, 1))},
    "nothing": {},
}


@pytest.mark.parametrize("case", FAULTY_VALUES)
def test_faulty_values_are_not_kept(case: str) -> None:
    carried = CarriedValues()
    assert not carried.hear(7, 10, values(0.0))
    assert carried.hear(7, 10, FAULTY_VALUES[case])
    assert not carried.kept.by_node


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_that_are_too_large_or_of_another_dtype_spoil_no_others(
    dtype: type[np.floating[Any]],
) -> None:
    """In the federation's float32, or in a node's own float64, which can hold the square."""
    found = []
    for is_there in (True, False):
        carried = CarriedValues()
        for node, mean in enumerate((0.0, 1.0, 1e20, 2.0, 3.0)):
            if node != 2 or is_there:
                sent = values(mean)
                sent["statistics"] = sent["statistics"].astype(dtype if node == 2 else np.float32)
                carried.hear(node, 10, sent)
        found.append(carried.corrections(range(5), lambda examples: list(examples.values())))
    with_it, without = found
    assert with_it.keys() == without.keys() == {0, 1, 3, 4}
    assert all(
        np.array_equal(with_it[node]["statistics"], without[node]["statistics"]) for node in without
    )


def carries(change: Callable[[np.ndarray], np.ndarray] | None) -> type[InProcessGrid]:
    """Return a grid in which a node carries changed statistics, or no values, in its replies to
    training messages.
    """

    def fault(reply: Message) -> Message:
        values = dict(reply.content.array_records[wire.CARRIED])
        del reply.content[wire.CARRIED]
        if change is not None:
            values["statistics"] = Array(change(values["statistics"].numpy()))
            reply.content[wire.CARRIED] = ArrayRecord(values)
        return reply

    return type("Carries", (FaultyReply,), {"message_type": "train", "fault": staticmethod(fault)})


def test_a_node_whose_values_are_too_large_trains_on_without_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoiled, without = (
        Federation(make_model(), grid=carries(change)).run(
            FedTAN(carry=True, fraction_evaluate=0.0), ROUNDS
        )
        for change in (too_large, None)
    )
    assert all(torch.equal(spoiled[name], without[name]) for name in without)
    named = (
        f"Node {FAULTY} goes without carried corrections: the statistics of its BN layers is "
        "too large"
    )
    assert len([text for text in caplog.messages if text.startswith(named)]) == ROUNDS


def test_a_node_with_other_layers_goes_without_corrections() -> None:
    carried = CarriedValues()
    for node, layers in ((1, 2), (2, 1), (3, 1)):
        carried.hear(node, 10, values(float(node), layers=layers))
    assert carried.corrections([1, 2, 3], lambda examples: [1.0] * len(examples)).keys() == {2, 3}


# ---- options -------------------------------------------------------------------------------------


def test_after_the_freeze_nothing_is_carried() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    strategy = FedTANII(carry=True, m=2, fraction_evaluate=0.0)
    nodes.run(strategy, 4)
    grid: Any = nodes.grid
    rounds = {
        message.content[wire.CONFIG]["server-round"]
        for message in grid.sent
        if wire.CARRIED in message.content
    }
    assert rounds == {2}
    assert distance(run(FedTANII(carry=True, m=4)), run(FedTAN(carry=True))) == 0


def test_a_node_that_has_lost_its_bn_gets_the_corrections_of_its_round_again() -> None:
    """Made of all drawn nodes, and not of those that are asked again."""

    class Both(FedBN, FedTAN):
        state: Any

    nodes, strategy = Federation(make_model()), Both(carry=True, fraction_evaluate=0.0)
    nodes.run(strategy, 2)
    strategy.configure_train(3, nodes.initial, INSTRUCTION.to_config(), nodes.grid)
    message = next(each for each in strategy.round.messages if wire.CARRIED in each.content)
    before = {
        name: array.numpy() for name, array in message.content.array_records[wire.CARRIED].items()
    }
    identify(message)
    lost = RecordDict({wire.REPORT: ConfigRecord({wire.LACKS_STATE: True})})

    class Forgetful(PassingGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            return [Message(lost, reply_to=message)]

    strategy.ask(Forgetful(nodes.grid), strategy.round.messages, 1.0)
    again = strategy.round.messages[-1]
    assert again.metadata.dst_node_id == message.metadata.dst_node_id
    assert set(again.content["arrays"]) == set(nodes.initial)
    after = again.content.array_records[wire.CARRIED]
    assert all(np.array_equal(after[name].numpy(), value) for name, value in before.items())


# ---- what a client makes of them -----------------------------------------------------------------


def test_names_that_are_no_text_are_those_of_no_layer() -> None:
    packed = pack_values(
        {
            "statistics": {"bn": Requests("statistics", "bn", torch.rand(1, 2, 3), (6,))},
            "gradients": {},
        }
    )
    found = read_corrections({**packed, "layers": torch.tensor([[255, 254]], dtype=torch.uint8)})
    assert list(found["statistics"]) == ["\ufffd\ufffd"]


def test_what_a_later_step_does_not_ask_is_not_sent_again() -> None:
    def ask(layer: str, *values: float) -> None:
        tensor = torch.tensor(values).view(2, 2, 1)
        clients(Requests("statistics", layer, tensor, (6, 6), eps=0.5))

    clients = CorrectedClients(2)
    for layers in (("a", "b"), ("a",)):
        clients.begin({})
        for layer in layers:
            ask(layer, 1.0, 2.0, 3.0, 4.0)
    sent = clients.local_values()
    assert sent["layers"].tolist() == [[ord("a")]] * 2
    assert sent["statistics"].tolist() == [[[1.0], [2.5]], [[3.0], [4.5]]]
    assert sent["sizes"].tolist() == [[[6], [1], [0]]] * 2


def test_a_step_with_corrections_by_other_clients_is_another_one() -> None:
    """Clients of other processes count, too, and how many there are is no number in a tensor."""
    clients = CorrectedClients(2)
    forms = set()
    for count in (6, 6, 8):
        request = Requests("statistics", "bn", torch.rand(2, 2, 3), (count, count))
        clients.begin(pack_values({"statistics": {"bn": request}, "gradients": {}}))
        forms.add(clients.form())
    assert len(forms) == 2


@pytest.mark.parametrize("kind", ["statistics", "gradients"])
def test_a_correction_takes_local_values_to_the_global_values(kind: Kind) -> None:
    # the third channel is constant at this client, the fourth everywhere: what is left is the
    # layer's eps
    local = torch.tensor([[[1.0, -2, 3, 0], [4, 0.5, 1e-3, 1e-3]]], dtype=torch.float64)
    pooled = torch.tensor([[2.0, 0, 5, 0], [1, 8, 2, 1e-3]], dtype=torch.float64)
    corrected = correct(kind, local, correction(kind, local, pooled))
    torch.testing.assert_close(corrected, pooled.unsqueeze(0), rtol=1e-12, atol=1e-12)
    assert kind == "gradients" or bool((corrected[:, 1] >= 0).all())


def test_a_correction_that_was_cut_makes_no_variance_negative() -> None:
    """Of a constant channel, and a global variance that is smaller than the client's own was."""
    local, cut = torch.tensor([[[3.0], [0.0]]]), torch.tensor([[[0.0], [0.3]]])
    assert correct("statistics", local, cut).tolist() == [[[3.0], [0.0]]]
