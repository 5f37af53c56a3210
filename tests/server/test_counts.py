"""How much a node's own number of examples can weigh: no node grows to more than all the others together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedbn_flwr import wire
from fedbn_flwr.data import load, partition
from fedbn_flwr.server.pooling import bound_counts, name_dominant, weights_by_node
from fedbn_flwr.server.replies import Expected, NodeReply
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import State
from fedbn_flwr.strategies import FedAvg, FedProx, FedTAN, Scaffold
from fedbn_flwr.transports import Participant
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.tellers import Watched, WatchedFedAvg, Words, describing, engine, run, telling

#: ten nodes with 80 examples; the second lies, and its id is 1001
SIZES, LIAR, HUGE = (8,) * 10, 1, 10**12
ENGINES = ("inprocess", "stacked", "workers")
NAMED = "Node 1001 has %.1f %% of all weights, and says that it has %g examples"


def said(node: int, count: float) -> NodeReply:
    return NodeReply(node, node, count, {}, {}, RecordDict())


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def reference(counts: dict[int, int], first: dict[int, float], share: Fraction) -> dict[int, int]:
    """Take examples away from a node, one after another, until it has said them at first, or is within its share."""
    believed = {}
    for node, count in counts.items():
        others = sum(other for each, other in counts.items() if each != node)
        while others and count > first.get(node, 0) and Fraction(count, count + others) > share:
            count -= 1
        believed[node] = count
    return believed


@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(3, 4), Fraction(1)])
def test_counts_are_bounded_as_by_the_reference(share: Fraction) -> None:
    generator, cut = np.random.default_rng(0), 0
    for _ in range(300):
        counts = {node: int(generator.integers(0, 60) ** 2 // 20) for node in range(generator.integers(1, 6))}
        first = {node: float(generator.choice([0, 20, 90, np.inf])) for node in counts if generator.random() < 0.7}
        expected = Expected((), {}, first_counts=first, max_share=float(share))
        found = {
            each.node: each.num_examples for each in bound_counts([said(*each) for each in counts.items()], expected)
        }
        assert found == reference(counts, first, share)
        cut += found != counts
    assert cut > 30 or share == 1


@pytest.mark.parametrize(
    ("counts", "named"), [((4, 2, 3), []), ((4, 2, 1), [1]), ((0, 0, 0), []), ((5, 6), []), ((5,), [])]
)
def test_who_has_more_than_all_others_together_is_named(
    counts: tuple[int, ...], named: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    replies = [said(node, count) for node, count in enumerate(counts, 1)]
    name_dominant(weights_by_node(replies, counts, "examples"), {})
    assert [text.split()[1] for text in caplog.messages] == [str(node) for node in named]


# ---- honest nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [True, False], ids=["said at once", "said when asked"])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize("kind", ENGINES)
def test_an_honest_run_has_the_same_bits_with_any_bound(
    kind: str, fraction: float, knows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Dirichlet 0.1; where nodes do not know their number when they describe themselves, the first reply says it."""
    parts = partition("dirichlet:0.1", load("digits"), 10, 3)
    split = tuple(len(part) // 10 + 2 for part in parts)
    unknown = describing(lambda reply: replace(reply, num_examples=-1))
    ends = []
    for share in (0.5, 1.0):
        strategy = FedAvg(fraction_train=fraction, min_train_nodes=2, max_share=share)
        nodes = Federation(make_model(), split)
        if not knows:
            nodes._wrap = lambda client, _: unknown(client, 0)
        with engine(kind, nodes) as grid:
            ends.append(nodes.run(strategy, 6, grid=grid, local_steps=1))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
    assert not [text for text in caplog.messages if "counts as" in text]


def test_most_from_the_start_is_named_in_every_round_and_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    strategy = WatchedFedAvg()
    run(strategy, {LIAR: lambda _: 800}, SIZES, 4)
    assert [shares[LIAR] for shares in strategy.shares] == [800 / 872] * 4
    assert caplog.messages.count(NAMED % (100 * 800 / 872, 800)) == 4
    assert not [text for text in caplog.messages if "counts as" in text]


def test_of_two_nodes_none_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run(FedAvg(), {}, (4, 12), 2)
    assert "of all weights" not in caplog.text


# ---- one node that grows --------------------------------------------------------------------------------------------

#: what the liar says from round to round, the growth that is allowed, and its shares; None where it is left out
GROWS: dict[str, tuple[Callable[[int], int | None], float, list[float | None]]] = {
    "by half": (lambda number: 8 if number < 3 else 12, 2.0, [0.1, 0.1, 12 / 84, 12 / 84]),
    "too much": (lambda number: 8 if number < 3 else HUGE, 2.0, [0.1, 0.1, None, None]),
    "as it likes": (lambda number: 8 if number < 3 else HUGE, float("inf"), [0.1, 0.1, 0.5, 0.5]),
    "from 0": (lambda number: 0 if number < 3 else HUGE, 2.0, [0.0, 0.0, None, None]),
    "from 0, as it likes": (lambda number: 0 if number < 3 else HUGE, float("inf"), [0.0, 0.0, 0.5, 0.5]),
    "from nothing": (lambda number: None if number < 3 else HUGE, 2.0, [None, None, 0.5, 0.5]),
    "from most": (lambda number: 100 if number < 3 else HUGE, float("inf"), [100 / 172] * 4),
}


@cache
def grown(name: str, kind: str) -> tuple[State, tuple[dict[int, float], ...]]:
    words, growth, _ = GROWS[name]
    strategy = WatchedFedAvg()
    strategy.count_growth = growth
    after = run(strategy, {LIAR: words}, SIZES, 4, kind)
    return after, strategy.shares


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", GROWS)
def test_no_node_grows_to_more_than_all_others(name: str, kind: str) -> None:
    """Whoever adds up: the same shares, and the same model to rounding."""
    after, shares = grown(name, kind)
    assert [each.get(LIAR) for each in shares] == pytest.approx(GROWS[name][2], abs=1e-15)
    one, wanted = grown(name, "inprocess")
    assert shares == wanted
    assert distance(after, one) < 1e-12


def test_whose_number_is_cut_is_named_with_the_option(caplog: pytest.LogCaptureFixture) -> None:
    run(FedAvg(max_share=0.75), {LIAR: GROWS["from nothing"][0]}, SIZES, 4)
    assert caplog.messages.count("Node 1001 counts as 216 of its 1e+12 examples: max-share is 0.75") == 2
    assert caplog.messages.count(NAMED % (75, 216)) == 2


def test_metrics_are_weighed_by_the_same_numbers() -> None:
    """A liar whose loss is as any other's must not be the mean."""
    losses = []
    for growth in (2.0, float("inf")):
        strategy, nodes = FedAvg(), Federation(make_model(), SIZES, telling({LIAR: GROWS["as it likes"][0]}))
        strategy.count_growth = growth
        nodes.run(strategy, 3, local_steps=1)
        replies = {reply.node: reply for reply in strategy.training.replies}
        values = {node: reply.metrics[wire.TRAIN_LOSS] for node, reply in replies.items()}
        mean = strategy.training.mean_metrics(strategy.train_metrics_aggr_fn, strategy.weighted_by_key)[wire.TRAIN_LOSS]
        weights = {node: 72 if node == 1001 else 8 for node in values}
        wanted = sum(values[node] * weight for node, weight in weights.items()) / sum(weights.values())
        losses.append(mean == pytest.approx(wanted, rel=1e-12))
    assert losses == [True, True]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_node_does_not_grow_while_others_are_silent(kind: str) -> None:
    """In rounds 3 and 4 only two others answer; in round 5 nobody else does, and there is nobody to outweigh."""
    words: dict[int, Any] = {LIAR: lambda number: 8 if number < 3 else HUGE}
    words |= {each: lambda number: None if number > 2 else 8 for each in range(4, 10)}
    words |= {each: lambda number: None if number > 4 else 8 for each in (0, 2, 3)}
    strategy = WatchedFedAvg()
    strategy.count_growth = float("inf")
    run(strategy, words, SIZES, 5, kind)
    assert [shares[LIAR] for shares in strategy.shares] == [0.1, 0.1, 0.5, 0.5, 1.0]


class NewId(InProcessGrid):
    """A grid in which the liar has another id from the third push on."""

    pushes = 0

    def push_messages(self, messages: Any) -> Any:
        ids = super().push_messages(messages)
        self.pushes += 1
        if self.pushes == 2:
            self._nodes = [5001 if node == 1001 else node for node in self._nodes]
        return ids


def test_a_new_id_is_no_new_start(caplog: pytest.LogCaptureFixture) -> None:
    strategy = WatchedFedAvg(fraction_evaluate=0.0)
    nodes = Federation(make_model(), SIZES, telling({LIAR: GROWS["as it likes"][0]}), grid=NewId)
    nodes.run(strategy, 5, local_steps=1)
    assert [max(shares.values()) for shares in strategy.shares] == [0.1, 0.1, 0.5, 0.5, 0.5]
    assert caplog.text.count("Node 5001 counts as 72 of its 1e+12 examples") == 3


def test_sums_of_workers_are_told_by_node_who_has_most(caplog: pytest.LogCaptureFixture) -> None:
    """Of two workers, one always has more than the other, and its first node is not to blame."""
    split = (3, 3, 3, 3, 30, 3)
    run(FedAvg(), {}, split, 2, "workers")
    assert (
        caplog.messages.count("Node 1004 has %.1f %% of all weights, and says that it has 30 examples" % (3000 / 45))
        == 2
    )
    caplog.clear()
    run(FedAvg(weighting="uniform"), {}, split, 2, "workers")
    run(FedAvg(), {}, (3, 3, 3, 3, 9, 3), 2, "workers")
    assert "of all weights" not in caplog.text


# ---- weights of exchanges, and of nodes that are absent -------------------------------------------------------------


class WatchedFedTAN(Watched, FedTAN):
    """FedTAN, which also keeps the weights of its exchanges."""

    exchanged: tuple[list[float], ...] = ()

    def _weigh_participants(self, participants: Sequence[Participant]) -> list[float]:
        weights = super()._weigh_participants(participants)
        self.exchanged += ([weight / sum(weights) for weight in weights],)
        return weights


@pytest.mark.parametrize("name", ["as it likes", "from nothing", "by half"])
def test_weights_of_exchanges_are_bounded_alike(name: str) -> None:
    words, growth, wanted = GROWS[name]
    strategy = WatchedFedTAN(exchange_timeout=5.0)
    strategy.count_growth = growth
    run(strategy, {LIAR: words}, SIZES, 4)
    assert [shares.get(LIAR) for shares in strategy.shares] == pytest.approx(wanted, abs=1e-15)
    last = strategy.exchanged[-1]
    assert last == pytest.approx([strategy.shares[-1][each] for each in range(10)], abs=1e-15)


@pytest.mark.parametrize("kind", ["stacked", "workers"])
def test_the_replies_of_a_common_step_are_bounded_too(kind: str) -> None:
    """The lie comes with the model, after exchanges in which the node weighed what it has."""
    words, growth, wanted = GROWS["as it likes"]
    strategy = WatchedFedTAN()
    strategy.count_growth = growth
    run(strategy, {LIAR: words}, SIZES, 4, kind)
    assert [shares[LIAR] for shares in strategy.shares] == wanted
    assert strategy.exchanged == ([0.1] * 10,) * 4


def test_carried_values_are_bounded_where_few_nodes_are_left() -> None:
    """In round 4 the liar is drawn with two others; what it said beside nine others must not weigh there."""
    words: Words = {LIAR: lambda number: None if number == 1 else HUGE}
    strategy = FedTAN(carry=True, fraction_evaluate=0.0)
    run(strategy, words, SIZES, 3)
    assert strategy._weigh_examples({1000: 8, 1001: 72, 1002: 8}) == [8, 16, 8]


class Absent(InProcessGrid):
    """A grid in which the liar connects in the second round, and describes itself only."""

    pushes = 0

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node != 1001 or self.pushes]

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        self.pushes += any(message.metadata.message_type == "train" for message in messages)
        return super().push_messages(messages)


def test_an_absent_node_does_not_outweigh_scaffolds_others() -> None:
    client = describing(lambda reply: replace(reply, num_examples=HUGE), LIAR)

    def wrap(inner: Any, index: int) -> Any:
        return telling({LIAR: lambda _: None})(client(inner, index), index)

    strategy = Scaffold()
    Federation(make_model(), SIZES, wrap, grid=Absent).run(strategy, 3, local_steps=1)
    assert strategy.state.total == 144


@pytest.mark.parametrize("strategy", [Scaffold, lambda **options: FedProx(mu=0.1, **options)])
def test_workers_know_the_weight_of_every_node(strategy: Callable[..., FedAvg]) -> None:
    """Other nodes in each round's sums: SCAFFOLD remembers what each of them weighs."""
    split, ends = (3, 9, 4, 5, 16, 3), []
    for kind in ("inprocess", "workers"):
        nodes = Federation(make_model(), split)
        with engine(kind, nodes) as grid:
            ends.append(nodes.run(strategy(fraction_train=0.5), 5, grid=grid, local_steps=2))
    assert distance(*ends) < 1e-12


# ---- evaluations ----------------------------------------------------------------------------------------------------


def test_counts_of_evaluations_are_bounded_and_kept() -> None:
    strategy = FedAvg()
    nodes = Federation(make_model(), SIZES, telling({LIAR: lambda _: 0}))
    nodes.run(strategy, 2, local_steps=1, evaluate_every=1)
    assert strategy.state.evaluate_counts == {1000 + each: 0 if each == LIAR else 8 for each in range(10)}
    again = FedAvg()
    again.load_state_dict(strategy.state_dict(), {each: 2000 + each for each in range(10)})
    assert again.state.evaluate_counts == {2000 + each: 0 if each == LIAR else 8 for each in range(10)}
    assert again.state.train_counts == again.state.evaluate_counts


def test_a_node_that_has_never_named_its_partition_is_not_kept() -> None:
    """A site has said its number before round 1, and was silent since."""
    strategy = FedAvg()
    strategy.state.train_counts, strategy.partitions = {1000: 8, 1001: 9}, {1000: 0}
    assert strategy.state_dict()["train_counts"] == {0: 8}
