"""Carried corrections: against the equations, at their fixed points, and where nodes come and go. In float64."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode
from hypothesis import example, given
from hypothesis import strategies as st

from fedbn_flwr import norm, state, wire
from fedbn_flwr.layerwise.carried import CarriedValues, carried_corrections
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.node_contexts import FIRST_NODE_ID
from fedbn_flwr.state.records import payload_bytes
from fedbn_flwr.strategies import FedAvg, FedDNA, FedTAN, FedTANII
from fedbn_flwr.traffic.counting_grid import CountingGrid
from tests.helpers.carried_reference import Server, carried_run
from tests.helpers.faults import FAULTY, FaultyReply, too_large
from tests.helpers.harness import (
    INSTRUCTION,
    SIZES,
    Backwards,
    Federation,
    Traffic,
    assert_all_differ,
    distance,
    make_model,
    make_split,
)
from tests.helpers.references import make_nodes

#: BN layers of the harness's model, and their channels together
LAYERS, CHANNELS = 2, 8
#: bytes of the layers' names, one a line
NAMES = len("\n".join(norm.bn_layers(make_model())))
ROUNDS = 4


def run(strategy: FedAvg, rounds: int = ROUNDS, sizes: tuple[int, ...] = SIZES, **options: Any) -> state.State:
    return Federation(make_model(), sizes).run(strategy, rounds, **options)


#: whether a partition does not reply in a round
Silence = Callable[[int, int], bool]


class Drawn(FedTAN):
    """Notes which partitions are drawn."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        self.__dict__.setdefault("drawn", []).append([node - FIRST_NODE_ID for node in self.round.nodes])
        return result


def failing(fails: Silence) -> type[InProcessGrid]:
    class Grid(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            asked: Any = message.content[wire.CONFIG]
            partition = message.metadata.dst_node_id - FIRST_NODE_ID
            if message.metadata.message_type == "train" and fails(partition, asked["server-round"]):
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "failed"), reply_to=message)
            return super()._answer(message)

    return Grid


CASES: dict[str, tuple[Callable[[], FedAvg], dict[str, Any]]] = {
    "carried": (lambda: FedTAN(carry=True), {}),
    "the last values": (lambda: FedTAN(carry=True, memory=0.0), {"memory": 0.0}),
    "unbounded": (lambda: FedTAN(carry=True, trust=0.0), {"trust": 0.0}),
    "a narrow region": (lambda: FedTAN(carry=True, trust=1.1), {"trust": 1.1}),
    "statistics only": (lambda: FedDNA(carry=True), {"forward_only": True}),
}


def by_hand(drawn: list[list[int]], steps: int, silent: Silence = lambda *_: False, **options: Any) -> state.State:
    asked = replace(INSTRUCTION, local_steps=steps)
    return carried_run(make_model(), make_split(), make_nodes(), asked, drawn, Server(**options), silent).state_dict()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_what_the_equations_say(case: str, steps: int) -> None:
    make, options = CASES[case]
    found = run(make(), local_steps=steps)
    assert distance(found, by_hand([[0, 1, 2, 3]] * ROUNDS, steps, **options)) < 1e-10


def test_the_cases_differ() -> None:
    """All but the usual region, which cuts nothing here."""
    cases = [options for case, (_, options) in CASES.items() if case != "unbounded"]
    runs = [by_hand([[0, 1, 2, 3]] * ROUNDS, 1, **options) for options in cases]
    runs += [run(FedAvg(), local_steps=1), run(FedTAN(), local_steps=1)]
    assert_all_differ(runs, by=1e-6)


@pytest.mark.parametrize("options", [{"memory": 0.0, "oldest": 0}, {"memory": 0.5, "oldest": 1}, {}])
def test_with_half_of_the_nodes_the_pool_is_that_of_the_participants(options: dict[str, Any]) -> None:
    strategy: Any = Drawn(carry=True, fraction_train=0.5, **options)
    found = run(strategy, 48)
    # some meet for the first time, and some again; somebody's values are one round older than the default limit
    assert len({tuple(nodes) for nodes in strategy.drawn}) > 2
    rounds = [[number for number, nodes in enumerate(strategy.drawn) if node in nodes] for node in range(4)]
    assert 5 in {after - before for each in rounds for before, after in pairwise(each)}
    assert distance(found, by_hand(strategy.drawn, 3, **options)) < 1e-10


# ---- nodes that do not reply -----------------------------------------------------------------------------------------

SILENCES: dict[str, Silence] = {
    "for good": lambda node, number: node == 1 and number > 2,
    "for two rounds": lambda node, number: node == 2 and number in (3, 4),
    "in every other round": lambda node, number: node == 2 and number % 2 == 0,
    "two of them by turns": lambda node, number: node == number % 2,
}


@pytest.mark.parametrize(
    ("fraction", "rounds", "options"), [(1.0, 8, {}), (0.75, 8, {}), (0.5, 16, {"oldest": 1})], ids=str
)
@pytest.mark.parametrize("case", SILENCES)
def test_a_run_with_silent_nodes_is_what_the_equations_say(
    case: str, fraction: float, rounds: int, options: dict[str, Any]
) -> None:
    strategy: Any = Drawn(carry=True, fraction_train=fraction, fraction_evaluate=0.0, **options)
    found = Federation(make_model(), grid=failing(SILENCES[case])).run(strategy, rounds)
    assert distance(found, by_hand(strategy.drawn, 3, SILENCES[case], **options)) < 1e-10


def test_fewer_nodes_than_a_rule_needs_make_no_corrections() -> None:
    """In some rounds, only two of the three participants have taken part before."""
    nodes, strategy = Federation(make_model(), grid=Traffic), FedTAN(carry=True, robust="median", fraction_train=0.75)
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
        assert corrected == (len(drawn & heard) if len(drawn & heard) >= strategy.fewest_nodes else 0)
        counts.add(len(drawn & heard))
        heard |= drawn
    assert {2, 3} <= counts


#: for each round, the nodes that are drawn, and whether each of them replies
ROUNDS_OF_NODES = st.lists(
    st.dictionaries(st.integers(0, 4), st.booleans(), min_size=1).filter(lambda drawn: any(drawn.values())),
    min_size=2,
    max_size=12,
)


@given(rounds=ROUNDS_OF_NODES, seed=st.integers(0, 100))
@example(rounds=[dict.fromkeys(range(3), True), *[{0: False, 1: True, 2: True}] * 6], seed=0)
@example(
    rounds=[dict.fromkeys(range(3), True), *[{0: number % 2 == 0, 1: True, 2: True} for number in range(8)]], seed=0
)
def test_what_corrections_add_over_all_rounds_is_never_more_than_one_pool_can(
    rounds: list[dict[int, bool]], seed: int
) -> None:
    """One number in place of a gradient; each round's pool, and what it leaves over, by the definition."""
    generator, carried = np.random.default_rng(seed), CarriedValues(trust=3.0, limit=1.0)
    sizes, last, added, largest = [3.0, 7.0, 1.0, 12.0, 5.0], dict[int, float](), 0.0, 0.0
    for drawn in rounds:
        corrections = carried.corrections(drawn, lambda examples: list(examples.values()))
        assert corrections.keys() == drawn.keys() & last.keys()
        averaged = {node: sizes[node] for node, replies in drawn.items() if replies}
        alphas = {node: found["gradients"][0, 0] for node, found in corrections.items()}
        before, total = added, sum(averaged.values())
        added += sum(size * alphas.get(node, 0.0) for node, size in averaged.items()) / total
        corrected = averaged.keys() & alphas.keys()
        share, pool = sum(sizes[node] for node in corrected) / total, sum(sizes[node] for node in alphas)
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


def test_a_surplus_of_other_layers_is_not_taken_back() -> None:
    carried = CarriedValues(trust=3.0, limit=1.0)
    carried.surplus = np.ones((2, 3))
    for node, gradient in ((7, 1.0), (8, 5.0)):
        carried.hear(node, 10, values(0.0) | with_gradients(gradient, 0.0))
    found = carried.corrections([7, 8], lambda examples: list(examples.values()))
    assert [found[node]["gradients"].tolist() for node in (7, 8)] == [[[2.0], [0.0]], [[-2.0], [0.0]]]


def test_a_round_without_any_reply_leaves_the_values_as_they_are() -> None:
    strategy = FedTAN(carry=True)
    Federation(make_model(), grid=failing(lambda _, number: number == 3)).run(strategy, 3)
    assert len(strategy.carried.by_node) == len(SIZES)


# ---- fixed points ----------------------------------------------------------------------------------------------------


def test_clients_with_equal_data_are_fedavg_but_for_the_count_of_running_variances() -> None:
    def equal(strategy: FedAvg, rounds: int) -> state.State:
        nodes = Federation(make_model(), (6, 6, 6))
        nodes.parts = [nodes.parts[0]] * 3
        # whole data sets, so that all clients have equal mini-batches; their order does not matter
        return nodes.run(strategy, rounds, batch_size=6, local_steps=1)

    first, carried, plain = equal(FedAvg(), 1), equal(FedTAN(carry=True), 6), equal(FedAvg(), 6)
    variances = [name for name in carried if name.endswith("running_var")]
    others = [name for name in carried if name not in variances]
    assert distance({name: carried[name] for name in others}, {name: plain[name] for name in others}) < 1e-12
    # from round 2 on n / (n - 1) of 3 x 96 values in place of 96; what came before counts 0.9 ** 5
    ratio = (288 / 287) / (96 / 95)
    for name in variances:
        old = 0.9**5 * first[name]
        assert distance({name: carried[name] - old}, {name: ratio * (plain[name] - old)}) < 1e-12


WHOLE: dict[str, Any] = {"batch_size": 50, "local_steps": 1}


@pytest.mark.parametrize(("still", "exact"), [(2 * LAYERS, True), (2 * LAYERS - 1, False), (1, False)])
def test_a_model_that_stands_still_ends_with_fedtans_gradient(still: int, exact: bool) -> None:
    """With whole data sets as mini-batches: 2 L rounds without a rate, then one with a rate."""
    schedule: dict[str, Any] = {"lr_schedule": f"=0.5@{still}"}
    carry: dict[str, Any] = {"carry": True, "trust": 0.0, "memory": 0.0}
    carried, wanted = (run(FedTAN(**{**options, **schedule}), still + 1, lr=0.0, **WHOLE) for options in (carry, {}))
    parameters = [name for name in carried if "running" not in name and "tracked" not in name]
    start = make_model().state_dict()
    assert distance(start, wanted) > 1e-2
    gap = distance({name: carried[name] for name in parameters}, {name: wanted[name] for name in parameters})
    assert (gap < 1e-12) == exact


# ---- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "numbers"), [(FedTAN, 4), (FedDNA, 2)])
def test_a_message_carries_four_numbers_a_channel_more_each_way(
    make: type[FedTAN] | type[FedDNA], numbers: int
) -> None:
    def traffic(strategy: FedAvg) -> tuple[int, int, int]:
        nodes = Federation(make_model())
        grid = CountingGrid(nodes.grid)
        nodes.run(strategy, ROUNDS, grid=grid)
        return grid.training.exchanges, grid.training.payload_down, grid.training.payload_up

    (rounds, down, up), (_, plain_down, plain_up) = traffic(make(carry=True)), traffic(FedAvg())
    assert rounds == ROUNDS
    group = 8 * (numbers * CHANNELS + 3 * LAYERS) + NAMES
    assert up - plain_up == ROUNDS * len(SIZES) * group
    # in the first round the server knows nothing
    assert down - plain_down == (ROUNDS - 1) * len(SIZES) * group


def test_messages_are_ordinary_and_nodes_remember_nothing() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    nodes.run(FedTAN(carry=True, fraction_evaluate=0.0), 2)
    grid: Any = nodes.grid
    assert {message.metadata.message_type for message in grid.sent} == {"train"}
    assert all(not nodes.grid.context(node).state for node in nodes.grid.get_node_ids())
    (up,) = {sum(map(payload_bytes, message.content[wire.CARRIED].values())) for message in grid.replies}
    assert up == 8 * (4 * CHANNELS + 3 * LAYERS) + NAMES


def test_evaluations_bring_no_corrections() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    nodes.run(FedTAN(carry=True), 3)
    grid: Any = nodes.grid
    evaluations = [message for message in grid.sent if message.metadata.message_type == "evaluate"]
    assert evaluations
    assert all(wire.CARRIED not in message.content for message in evaluations)


def test_corrections_of_gradients_sum_to_zero_under_the_weights() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    strategy = FedTAN(carry=True, fraction_train=0.75, fraction_evaluate=0.0)
    nodes.run(strategy, 6)
    grid: Any = nodes.grid
    training = [message for message in grid.sent if message.metadata.message_type == "train"]
    last = [message for message in training if message.content[wire.CONFIG]["server-round"] == 6]
    assert len(last) == 3
    groups = [state.from_record(message.content[wire.CARRIED]) for message in last]
    sizes = [SIZES[strategy.partitions[message.metadata.dst_node_id]] for message in last]
    terms = torch.stack([size * group["gradients"] for size, group in zip(sizes, groups, strict=True)])
    assert float(terms.sum(0).abs().max()) < 1e-12
    # of every layer that has some
    for layer in terms.split([width for width in groups[0]["sizes"][2].tolist() if width], -1):
        assert float(layer.abs().max()) > 1e-4


# ---- what the server keeps -------------------------------------------------------------------------------------------


def values(mean: float, variance: float = 1.0, layers: int = 1) -> dict[str, np.ndarray]:
    return {
        "statistics": np.array([[mean], [variance]]).repeat(layers, axis=1),
        "layers": np.frombuffer("\n".join("abc"[:layers]).encode(), dtype=np.uint8),
        "sizes": np.array([[4], [1], [0]]).repeat(layers, axis=1),
    }


def with_gradients(of_mean: float, of_variance: float) -> dict[str, np.ndarray]:
    return {"gradients": np.array([[of_mean], [of_variance]]), "sizes": np.array([[4], [1], [1]])}


def test_corrections_by_hand() -> None:
    carried = CarriedValues(trust=3.0, limit=1.0)
    carried.hear(7, 10, values(0.0) | with_gradients(1.0, 4.0))
    carried.hear(8, 30, values(4.0) | with_gradients(5.0, 0.0))
    found = carried.corrections([6, 7, 8], lambda examples: [float(count) for count in examples.values()])
    # mean 3, variance 1 + (9 + 3) / 4 = 4; gradients 4 and 1
    assert found.keys() == {7, 8}
    np.testing.assert_allclose(found[7]["statistics"], [[3], [3]], rtol=1e-4)
    np.testing.assert_allclose(found[8]["statistics"], [[-1], [3]], rtol=1e-4)
    np.testing.assert_allclose(found[7]["gradients"], [[3], [-3]])
    np.testing.assert_allclose(found[8]["gradients"], [[-1], [1]])
    assert found[7]["sizes"].tolist() == [[8], [1], [1]]


def test_the_trust_region_by_hand() -> None:
    """Weights of 9 to 1; a client whose mean lies above, then below the other's, then one with more variance."""
    means, variances = torch.tensor([[0.0, 0.0, 0.0], [10.0, -10.0, 0.0]]), torch.tensor([[1.0] * 3, [1.0, 1.0, 99.0]])
    both = torch.stack([means, variances], 1)
    # the means are 1, -1 and 0, the variances 10, 10 and 10.8
    unbounded, bounded = (carried_corrections("statistics", both, [9, 1], trust) for trust in (0.0, 2.0))
    offsets, ratios = [[1.0, -1.0, 0.0], [-9.0, 9.0, 0.0]], [[10.0, 10.0, 10.8], [10.0, 10.0, 10.8 / 99]]
    torch.testing.assert_close(unbounded, torch.tensor([offsets, ratios]).movedim(0, 1), rtol=1e-4, atol=1e-4)
    offsets, ratios = [[1.0, -1.0, 0.0], [-2.0, 2.0, 0.0]], [[2.0, 2.0, 2.0], [2.0, 2.0, 0.5]]
    torch.testing.assert_close(bounded, torch.tensor([offsets, ratios]).movedim(0, 1), rtol=1e-4, atol=1e-4)
    # those of gradients are not cut
    gradients = carried_corrections("gradients", both * 1000, [9, 1], 2.0)
    assert gradients[:, 0, 0].tolist() == pytest.approx([1000.0, -9000.0])


def test_weights_need_not_be_whole_numbers() -> None:
    found = []
    for weights in ({7: 0.25, 8: 0.75}, {7: 1, 8: 3}):
        carried = CarriedValues(trust=0.0, limit=1.0)
        for node, mean in ((7, 0.0), (8, 4.0)):
            carried.hear(node, weights[node], values(mean))
        found.append(carried.corrections([7, 8], lambda examples: list(examples.values())))
    np.testing.assert_allclose(found[0][7]["statistics"], found[1][7]["statistics"])
    # the pooled mean is 3, and the node's deviation is 1
    assert found[0][7]["statistics"][0] == pytest.approx(3.0, rel=1e-4)


def test_the_oldest_values_are_forgotten() -> None:
    # a node's values are 2 + 3 + 1 numbers of 8 bytes, and a byte for the layer's name
    carried = CarriedValues(trust=3.0, limit=3 * 57 / 2**20)
    for node in (1, 2, 3, 1, 4):
        carried.hear(node, 10, values(0.0))
    assert list(carried.by_node) == [3, 1, 4]


def test_old_statistics_count_less_with_every_round() -> None:
    carried = CarriedValues(trust=3.0, limit=1.0, memory=0.5)
    for number, mean in ((1, 8.0), (2, 4.0), (5, 22.0)):
        carried.hear(7, 10, values(mean) | with_gradients(mean, 0.0), number)
    # (8 + 4) / 2 = 6, and after three rounds 6 / 8 + 22 * 7 / 8
    assert carried.by_node[7]["statistics"].tolist() == [[20.0], [1.0]]
    # gradients are the last ones
    assert carried.by_node[7]["gradients"].tolist() == [[22.0], [0.0]]
    # values of other layers are not averaged with them
    carried.hear(7, 10, values(3.0, layers=2), 6)
    assert carried.by_node[7]["statistics"].tolist() == [[3.0, 3.0], [1.0, 1.0]]


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
    "a layer without channels": {**values(0.0, layers=2), "sizes": np.array([[4, 4], [2, 0], [0, 0]])},
    "less than no gradients": {**values(0.0, layers=2), "sizes": np.array([[4, 4], [1, 1], [1, -1]])},
    "sizes that are not whole": {**values(0.0), "sizes": np.array([[4.0], [1.0], [0.0]])},
    "another shape": {**values(0.0), "statistics": np.ones((3, 1))},
    "more channels": {**values(0.0), "statistics": np.ones((2, 2))},
    "gradients without a size": {**values(0.0), "gradients": np.ones((2, 1))},
    "a size without gradients": {**values(0.0), "sizes": np.array([[4], [1], [1]])},
    "something more": {**values(0.0), "more": np.ones((2, 1))},
    "nothing": {},
}


@pytest.mark.parametrize("case", FAULTY_VALUES)
def test_faulty_values_are_not_kept(case: str) -> None:
    carried = CarriedValues(trust=3.0, limit=1.0)
    assert not carried.hear(7, 10, values(0.0))
    assert carried.hear(7, 10, FAULTY_VALUES[case])
    assert not carried.by_node


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_that_are_too_large_or_of_another_dtype_spoil_no_others(dtype: type[np.floating[Any]]) -> None:
    """In the federation's float32, or in a node's own float64, which can hold the square."""
    found = []
    for is_there in (True, False):
        carried = CarriedValues(trust=0.0, limit=1.0)
        for node, mean in enumerate((0.0, 1.0, 1e20, 2.0, 3.0)):
            if node != 2 or is_there:
                sent = values(mean)
                sent["statistics"] = sent["statistics"].astype(dtype if node == 2 else np.float32)
                carried.hear(node, 10, sent)
        found.append(carried.corrections(range(5), lambda examples: list(examples.values())))
    with_it, without = found
    assert with_it.keys() == without.keys() == {0, 1, 3, 4}
    assert all(np.array_equal(with_it[node]["statistics"], without[node]["statistics"]) for node in without)


def carries(change: Callable[[np.ndarray], np.ndarray] | None) -> type[InProcessGrid]:
    """Return a grid in which a node carries changed statistics, or no values, in its replies to training messages."""

    def fault(reply: Message) -> Message:
        values = dict(reply.content.array_records[wire.CARRIED])
        del reply.content[wire.CARRIED]
        if change is not None:
            values["statistics"] = Array(change(values["statistics"].numpy()))
            reply.content[wire.CARRIED] = ArrayRecord(values)
        return reply

    return type("Carries", (FaultyReply,), {"message_type": "train", "fault": staticmethod(fault)})


def test_a_node_whose_values_are_too_large_trains_on_without_them(caplog: pytest.LogCaptureFixture) -> None:
    spoiled, without = (
        Federation(make_model(), grid=carries(change)).run(FedTAN(carry=True, fraction_evaluate=0.0), ROUNDS)
        for change in (too_large, None)
    )
    assert all(torch.equal(spoiled[name], without[name]) for name in without)
    named = f"Node {FAULTY} goes without carried corrections: the statistics of its BN layers is too large"
    assert len([text for text in caplog.messages if text.startswith(named)]) == ROUNDS


def test_a_node_with_other_layers_goes_without_corrections() -> None:
    carried = CarriedValues(trust=3.0, limit=1.0)
    for node, layers in ((1, 2), (2, 1), (3, 1)):
        carried.hear(node, 10, values(float(node), layers=layers))
    assert carried.corrections([1, 2, 3], lambda examples: [1.0] * len(examples)).keys() == {2, 3}


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fraction_train": 0.5}])
def test_order_and_ids_of_nodes_do_not_matter(options: dict[str, Any]) -> None:
    one, other = (
        Federation(make_model(), grid=grid).run(FedTAN(carry=True, **options), ROUNDS)
        for grid in (InProcessGrid, Backwards)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_after_the_freeze_nothing_is_carried() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    strategy = FedTANII(carry=True, m=2, fraction_evaluate=0.0)
    nodes.run(strategy, 4)
    grid: Any = nodes.grid
    rounds = {message.content[wire.CONFIG]["server-round"] for message in grid.sent if wire.CARRIED in message.content}
    assert rounds == {2}
    assert distance(run(FedTANII(carry=True, m=4)), run(FedTAN(carry=True))) == 0


def test_less_than_a_megabyte_can_be_the_limit() -> None:
    assert FedTAN(carry_limit=0.5).carried.limit == 0.5
