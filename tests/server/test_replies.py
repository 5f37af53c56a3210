"""Reading replies: their order, who is unlike most, what the log says, and when lost rounds end a
run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import Why
from fedbn_flwr.server.grids import identify
from fedbn_flwr.server.method_state import FRUITLESS_ROUNDS, LostRounds
from fedbn_flwr.server.replies import (
    CannotTrainError,
    Expected,
    NodeReply,
    Refusal,
    log_refused,
    mean_metrics,
    parse_replies,
    read_metrics,
    whole,
)
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import arrays_to_record
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.wire.pooled import Summed
from tests.helpers.harness import Federation, make_model
from tests.helpers.tellers import telling

Arrays = Mapping[str, np.ndarray]
MODEL = {"w": np.zeros(2)}


def ask(*nodes: int) -> list[Message]:
    """Return a message to each node."""
    InProcessGrid(ClientApp(), 1)  # begins a run, to which messages belong
    messages = [Message(RecordDict(), node, "train") for node in nodes]
    for message in messages:
        identify(message)
    return messages


def answer(
    question: Message, groups: Mapping[str, Arrays], partition: int = 0, content: Any = None
) -> Message:
    content = RecordDict() if content is None else content
    for name, arrays in groups.items():
        content[name] = arrays_to_record(arrays)
    content[wire.METRICS] = MetricRecord({wire.NUM_EXAMPLES: 3, wire.PARTITION_ID: partition})
    return Message(content, reply_to=question)


def parse(replies: Sequence[Message], sent: Sequence[Message]) -> tuple[list[int], list[str]]:
    """Return the nodes of usable replies, and why others are not."""
    usable, refused = parse_replies(replies, sent, Expected((), MODEL))
    return [reply.node for reply in usable], [str(refusal) for refusal in refused]


def test_replies_of_one_partition_are_in_the_order_of_nodes() -> None:
    """Whatever order they come in; two nodes may claim the same partition."""
    sent = ask(5, 3, 4)
    replies = [
        answer(message, {wire.ARRAYS: MODEL}, partition=min(message.metadata.dst_node_id, 4))
        for message in sent
    ]
    for turn in (replies, replies[::-1]):
        assert parse(turn, sent) == ([3, 4, 5], [])


def test_an_error_is_of_the_node_that_was_asked() -> None:
    """Flower's own errors are of node 0, or of whoever says so."""
    (message,) = sent = ask(7)
    reply = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "gone"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 0
    assert parse([reply], sent) == ([], ["node 7: it failed: gone"])


def test_the_mean_of_several_nodes_has_as_many_votes() -> None:
    """Of entries: a worker's mean of three nodes' replies is not unlike most because two others
    are.
    """
    sent, shared = ask(1, 2, 3), {"w": np.zeros(2)}
    whole_state = {**MODEL, "b": np.zeros(1)}
    mean = Summed()
    mean.nodes = {1: 0, 4: 3, 5: 4}
    replies = [
        answer(sent[0], {wire.ARRAYS: shared}, 0, mean),
        *(answer(message, {wire.ARRAYS: whole_state}, 1) for message in sent[1:]),
    ]
    usable, refused = parse_replies(replies, sent, Expected((), whole_state))
    assert [reply.node for reply in usable] == [1]
    assert [str(refusal) for refusal in refused] == [
        f"node {n}: unlike most, entry 'b' in 'arrays'" for n in (2, 3)
    ]
    # every node of a mean that is not used is named
    mean.nodes = {1: 0, 4: 3}
    sent, single = ask(1, 2, 3, 5), {wire.ARRAYS: whole_state}
    replies = [
        answer(sent[0], {wire.ARRAYS: shared}, 0, mean),
        *(answer(message, single, 1) for message in sent[1:]),
    ]
    assert [
        refusal.node for refusal in parse_replies(replies, sent, Expected((), whole_state))[1]
    ] == [1, 4]


@pytest.mark.parametrize("group", [wire.MOMENTUM, wire.MOMENTS, wire.STAYS])
@pytest.mark.parametrize(
    "odd", [{}, {"w": np.zeros(2), "b": np.zeros(1)}, {"b": np.zeros(1)}], ids=str
)
def test_of_other_groups_a_reply_has_the_entries_of_most_or_nothing(
    group: str, odd: Arrays
) -> None:
    sent = ask(1, 2, 3)
    held = [{"w": np.ones(2)}, odd, {"w": np.ones(2)}]
    replies = [
        answer(message, {wire.ARRAYS: MODEL} | ({group: each} if each else {}), node)
        for node, (message, each) in enumerate(zip(sent, held, strict=True))
    ]
    usable, refused = parse_replies(replies, sent, Expected((), {**MODEL, "b": np.zeros(1)}))
    assert [reply.node for reply in usable] == ([1, 3] if odd else [1, 2, 3])
    assert [str(refusal) for refusal in refused] == [
        f"node 2: unlike most, entry 'b' in {group!r}"
    ] * bool(odd)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"w": np.zeros(3)}, r"its array 'w' has shape (3,), not (2,)"),
        ({"w": np.zeros(2, np.float32)}, "its array 'w' is float32, not float64"),
        ({"b": np.zeros(1)}, "its array 'b' is not part of the model"),
    ],
)
@pytest.mark.parametrize("group", [wire.ARRAYS, wire.STAYS])
def test_entries_of_the_model_have_its_forms(group: str, odd: Arrays, reason: str) -> None:
    """Those that nodes keep, too, also where all nodes agree on other ones."""
    sent = ask(1, 2)
    replies = [answer(message, {wire.ARRAYS: MODEL, group: odd}) for message in sent]
    assert parse(replies, sent) == ([], [f"node {node}: {reason}" for node in (1, 2)])


def test_a_reply_without_a_group_is_unlike_those_with_it_only_if_it_is_required() -> None:
    sent = ask(1, 2, 3)
    replies = [
        answer(message, {wire.ARRAYS: MODEL} if number else {})
        for number, message in enumerate(sent)
    ]
    assert parse(replies, sent) == ([2, 3], ["node 1: unlike most, entry 'w' in 'arrays'"])


# ---- metrics -------------------------------------------------------------------------------------


def test_without_any_weight_metrics_have_no_mean() -> None:
    replies = [NodeReply(1, 0, count, {"loss": 2.0}, {}, RecordDict()) for count in (0, 0)]
    assert mean_metrics(replies, ["loss"]) == MetricRecord()


@pytest.mark.parametrize(
    ("value", "is_id"), [(2**64, True), (-(2**64), True), (2**65, False), (float("inf"), False)]
)
def test_an_id_has_at_most_64_bits(value: float, is_id: bool) -> None:
    if is_id:
        assert whole({"id": value}, "id") == value
    else:
        with pytest.raises(ValueError, match="its 'id' is"):
            whole({"id": value}, "id")


def test_a_metric_that_is_read_and_not_averaged_is_no_list() -> None:
    """A list of the numbers that FixBN's rule reads one of a node."""
    content = RecordDict({wire.METRICS: MetricRecord({wire.STATISTICS_CHANGE: [0.1, 0.2]})})
    with pytest.raises(
        ValueError, match=rf"its metric '{wire.STATISTICS_CHANGE}' is \[0.1, 0.2\], no number"
    ):
        read_metrics(content)


# ---- the log -------------------------------------------------------------------------------------


def test_a_nodes_own_words_stay_on_their_line_and_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    """They may be made to look like a line of the log, or fill a disk."""
    log_refused([Refusal(1, f"it failed: no\nWARNING : all is well\x1b[2J{'x' * 10**6}")])
    (line,) = caplog.messages
    assert line.startswith(
        "Node 1 is left out of this round: it failed: no WARNING : all is well [2Jxxx"
    )
    assert len(line) == len("Node 1 is left out of this round: ") + 500
    words = dict.fromkeys((0, 1), lambda _: int("no\n\x1b[2J" + "x" * 10**6))
    with pytest.raises(CannotTrainError) as error:
        Federation(make_model(), (8, 8), telling(words)).run(FedAvg(), 1)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 600


def test_each_reason_is_said_once_with_all_its_nodes(caplog: pytest.LogCaptureFixture) -> None:
    log_refused([Refusal(1, "a"), Refusal(2, "b"), Refusal(3, "a")], "gone")
    assert caplog.messages == ["Nodes 1, 3 are gone: a", "Node 2 is gone: b"]


# ---- what speaks of divergence -------------------------------------------------------------------

CONTENTS: dict[str, tuple[Arrays, dict[str, float], Why]] = {
    "a number that is none": ({"w": np.array([0, np.nan])}, {}, Why.INFINITE),
    "a number that is too large": ({"w": np.array([0, 1e39])}, {}, Why.INFINITE),
    "a metric that is too large": (MODEL, {"loss": 1e39}, Why.INFINITE),
    "another shape": ({"w": np.zeros(3)}, {}, Why.OTHER),
    "no number of samples": (MODEL, {wire.NUM_EXAMPLES: -1}, Why.OTHER),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_numbers_that_are_not_finite_are_told_from_other_faults(case: str) -> None:
    arrays, metrics, why = CONTENTS[case]
    (message,) = sent = ask(7)
    reply = answer(message, {wire.ARRAYS: arrays})
    reply.content.metric_records[wire.METRICS].update(metrics)
    _, (refusal,) = parse_replies([reply], sent, Expected((), MODEL))
    assert (refusal.node, refusal.why) == (7, why)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("client 0: the mean of BN layer 'a' is not finite", Why.INFINITE),
        ("the variance is too large to be pooled in float16", Why.INFINITE),
        ("no power", Why.OTHER),
    ],
)
def test_a_client_may_say_in_words_that_its_numbers_are_not_finite(words: str, why: Why) -> None:
    (message,) = sent = ask(7)
    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, words), reply_to=message)
    _, (refusal,) = parse_replies([reply], sent, Expected((), MODEL))
    assert refusal.why is why


def test_a_client_that_does_not_obey_is_told_from_other_faults() -> None:
    (message,) = sent = ask(7)
    _, (refusal,) = parse_replies(
        [answer(message, {wire.ARRAYS: MODEL})], sent, Expected(("freeze",), MODEL)
    )
    assert refusal.why is Why.NOT_OBEYED


# ---- lost rounds ---------------------------------------------------------------------------------


def test_the_tenth_round_in_a_row_without_a_reply_ends_a_run() -> None:
    rounds = LostRounds()
    for number in range(1, FRUITLESS_ROUNDS):
        rounds.add(number, [], 4, "")
    with pytest.raises(
        CannotTrainError, match=r"^10 rounds in a row brought no usable reply: no node answered$"
    ):
        rounds.add(FRUITLESS_ROUNDS, [], 4, "")
