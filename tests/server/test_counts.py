"""Nodes that outweigh the others by the number of examples that they say are named, wherever the
number counts.
"""

from dataclasses import replace
from typing import Any

import pytest

from fedbn_flwr.data import PARTITIONS, load, partition
from fedbn_flwr.server.pooling import name_dominant
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import FedAvg, FedTAN, Scaffold
from tests.helpers.harness import Federation, make_model
from tests.helpers.tellers import Words, describing, run

#: ten nodes with 80 examples; the second lies, and its id is 1001
SIZES, LIAR, HUGE = (8,) * 10, 1, 10**12
ENGINES = ("inprocess", "stacked", "workers")


def named(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return who is said to outweigh the others, and in what."""
    texts = [text for text in log.messages if "outweighs" in text]
    return [(text.split()[1], text.split(" in ")[1].split(":")[0]) for text in texts]


# ---- who is named --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "nodes"),
    [
        ((8, 8, 80, 8, 8), []),
        ((8, 8, 81, 8, 8), [3]),  # above 10 x 8, and above 4 x 8
        ((8,) * 11 + (88,), []),
        ((8,) * 11 + (89,), [12]),  # above 11 x 8
        ((8, 8, 8, HUGE, HUGE + 1), [4, 5]),
        ((8, 8, 8, 100, HUGE), [4, 5]),
        ((0, 0, 0), []),
        ((0, 0, 0, 0, 5), []),
        ((5, HUGE), []),
        ((5,), []),
        ((), []),
    ],
)
def test_who_outweighs_the_others_is_named(
    counts: tuple[int, ...], nodes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    name_dominant(dict(enumerate(counts, 1)), "a test")
    assert named(caplog) == [(str(node), "a test") for node in nodes]


#: of each kind of partition, one that is far from equal sizes, its data and its number of clients
HONEST = {
    "iid": ("iid", "digits", 10),
    "dirichlet": ("dirichlet:0.1", "digits", 10),
    "label-mix": ("label-mix:0.1", "digits", 10),
    "classes": ("classes:2", "digits", 5),
    "shards": ("shards:2", "digits", 10),
    "shards-unbalanced": ("shards-unbalanced", "digits", 10),
    "domain": ("domain:3:10", "digits-domains", 15),
    "city": ("city", "digits-domains", 5),
    "union": ("union", "digits", 1),
}


def test_every_kind_of_partition_is_here() -> None:
    ours = [
        name
        for name, kind in PARTITIONS.items()
        if kind.share.__module__ == "fedbn_flwr.data.partition"
    ]
    assert ours == list(HONEST)


@pytest.mark.parametrize("kind", HONEST)
def test_no_honest_node_of_a_partition_is_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec, data, clients = HONEST[kind]
    for seed in range(10):
        name_dominant(
            {
                node: len(part)
                for node, part in enumerate(partition(spec, load(data), clients, seed))
            },
            spec,
        )
    assert named(caplog) == []


# ---- where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES)
def test_two_late_nodes_do_not_hide_each_other(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever adds up, in training and in evaluation; with uniform weights they do not count more
    than others.
    """
    words: Words = {node: lambda number: None if number == 1 else HUGE for node in (LIAR, 2)}
    run(FedAvg(), words, SIZES, 2, kind)
    assert sorted(named(caplog)) == [
        (node, where) for node in ("1001", "1002") for where in ("evaluation", "training")
    ]
    caplog.clear()
    run(FedAvg(weighting="uniform", fraction_evaluate=0.0), words, SIZES, 2, kind)
    assert named(caplog) == []


def test_a_step_names_the_liar_and_blames_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """The stacked liar says its number in the reply only, after a step in which it counted what it
    has.
    """
    strategy = FedTAN(fraction_evaluate=0.0, exchange_timeout=5.0)
    run(strategy, {LIAR: lambda _: HUGE}, SIZES, 1)
    assert named(caplog) == [("1001", "the layer-wise step"), ("1001", "training")]
    assert "give its ClientApp" not in caplog.text
    caplog.clear()
    run(FedTAN(fraction_evaluate=0.0), {LIAR: lambda _: HUGE}, SIZES, 1, "stacked")
    assert named(caplog) == [("1001", "training")]
    blamed = [text for text in caplog.messages if "give its ClientApp" in text]
    assert [text.split(" samples")[0] for text in blamed] == ["Round 1: node 1001 counted 8 of 80"]


def test_carried_values_name_the_liar(caplog: pytest.LogCaptureFixture) -> None:
    run(FedTAN(carry=True, fraction_evaluate=0.0), {LIAR: lambda _: HUGE}, SIZES, 2)
    assert named(caplog) == [
        ("1001", "training"),
        ("1001", "the layer-wise step"),
        ("1001", "training"),
    ]


class Absent(InProcessGrid):
    """A grid in which the liar connects when others have been asked to train."""

    pushes = 0

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node != 1001 or self.pushes]

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        self.pushes += any(message.metadata.message_type == "train" for message in messages)
        return super().push_messages(messages)


def test_an_absent_node_that_outweighs_scaffolds_others_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrap = describing(lambda reply: replace(reply, num_examples=HUGE), LIAR)
    Federation(make_model(), SIZES, wrap, grid=Absent).run(Scaffold(fraction_evaluate=0.0), 1)
    assert named(caplog) == [("1001", "the control variates")]
