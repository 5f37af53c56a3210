"""Under masks, one node of six sends nonsense, of every kind: the run goes on, and the log names this node only."""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from logging import WARNING
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedBS, FedTAN, FixBN, Scaffold
from fedbn_flwr.transports.message_records import LACKS_ARRAYS, UNREACHABLE
from fedbn_flwr.wire import masked
from tests.helpers.harness import Federation
from tests.helpers.nonsense import BAD, PICKLE, BadNode, Change, bytes_of, npy, plain, record

FORM = f"{masked.MASKED}-form"


def hidden(make: Callable[[np.ndarray], Array]) -> Change:
    """Return a change of the numbers under masks."""

    def change(content: RecordDict) -> None:
        old = content.array_records[masked.MASKED]["sum"].numpy()
        content[masked.MASKED] = ArrayRecord({"sum": make(old)})

    return change


def added(place: int, amount: int) -> Change:
    """Return a change that adds a whole number to one of those under masks."""

    def make(old: np.ndarray) -> Array:
        new = old.copy()
        new[0, place if -1 <= place < old.shape[1] else -1] += np.uint64(amount % 2**64)
        return plain(new)

    return hidden(make)


def said(key: str, value: Any, name: str = FORM) -> Change:
    """Return a change of what is said beside the numbers, past Flower's own checks; a function changes what was said.

    None is nothing.
    """

    def change(content: RecordDict) -> None:
        values: Any = dict(content.config_records[name])
        if value is None:
            values.pop(key, None)
        elif key in values or not callable(value):  # an exchange has no shares
            values[key] = value(values[key]) if callable(value) else value
        changed = ConfigRecord()
        changed.__dict__["_data"].update(values)
        content[name] = changed

    return change


def form(key: str, value: Any) -> Change:
    """Return a change of the form; a function changes what was there, and None is nothing."""

    def change(text: str) -> str:
        values = json.loads(text)
        values[key] = value(values[key]) if callable(value) else value
        return json.dumps({name: each for name, each in values.items() if each is not None})

    return said("form", change)


def first_array(change: Callable[[list[Any]], list[Any]]) -> Change:
    """Return a change of group, name, shape and dtype of the form's first array, or of a metric where it has none."""
    return form("arrays", lambda arrays: [change(arrays[0]), *arrays[1:]] if arrays else [change(["", "", [], "f4"])])


def instead(*records: tuple[str, Any]) -> Change:
    """Return a change that puts records in the place of all others."""

    def change(content: RecordDict) -> None:
        content.clear()
        content.update(dict(records))

    return change


def sign(key: str, value: Any, *records: tuple[str, Any]) -> Change:
    """Return a change that puts a sign in the place of the reply, and records beside it."""
    numbers = MetricRecord({wire.NUM_EXAMPLES: 12, wire.PARTITION_ID: 1})
    return instead((wire.METRICS, numbers), (wire.REPORT, ConfigRecord({key: value})), *records)


def fails(reason: str) -> Change:
    """Return an error in the place of a reply."""
    return lambda _: Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)


#: a model, with names that no model of the tests has
MODEL = (wire.ARRAYS, ArrayRecord({"0.weight": plain(np.ones((3, 16), np.float32))}))
NUMBERS = (wire.METRICS, MetricRecord({wire.NUM_EXAMPLES: 10**6, wire.PARTITION_ID: 1, wire.TRAIN_LOSS: 0.0}))
#: a key with which nobody can agree on a secret
LOW_ORDER = bytes(32)
STRANGE = "\x1b[2J\nNode 7 has failed: %s %d {} " + "x" * 10**5

#: in the place of a masked reply
REPLIES: dict[str, Change] = {
    # numbers; whatever else no array is, is read by the same function as in the clear
    "garbage": hidden(lambda _: bytes_of(b"\x00\xff" * 50, "uint64", (2, 3))),
    "an array of objects": hidden(lambda old: npy("|O", old.shape, PICKLE)),
    "a pickle": hidden(lambda old: bytes_of(PICKLE, "uint64", old.shape)),
    "float64": hidden(lambda old: plain(old.astype(np.float64))),
    "signed numbers": hidden(lambda old: plain(old.astype(np.int64))),
    "one row": hidden(lambda old: plain(old[0])),
    "one number too few": hidden(lambda old: plain(old[:, 1:])),
    "one number too many": hidden(lambda old: plain(np.concatenate([old, old[:, :1]], axis=1))),
    "no numbers": hidden(lambda old: plain(old[:, :0])),
    "a single number": hidden(lambda _: plain(np.uint64(1))),
    # records
    "no records": instead(),
    "an empty record of numbers": record(masked.MASKED, ArrayRecord()),
    "numbers of another name": record(masked.MASKED, ArrayRecord({"x": plain(np.zeros((2, 3), np.uint64))})),
    "a configuration for numbers": record(masked.MASKED, ConfigRecord({"sum": b"1"})),
    "metrics for numbers": record(masked.MASKED, MetricRecord({"sum": 1.0})),
    "no form": record(FORM, None),
    "an empty form": record(FORM, ConfigRecord()),
    "arrays for a form": record(FORM, ArrayRecord({"form": plain(np.zeros(2))})),
    "metrics for a form": record(FORM, MetricRecord({"form": 1.0})),
    # without masks
    "a form without numbers": record(masked.MASKED, None),
    "a plain model": instead(MODEL, NUMBERS),
    "a plain model, obedient": instead(MODEL, NUMBERS, (wire.REPORT, ConfigRecord({wire.OBEYED: ["freeze", "later"]}))),
    "plain metrics": instead(NUMBERS),
    "arrays of objects": instead((wire.ARRAYS, ArrayRecord({"x": npy("|O", (1,), PICKLE)})), NUMBERS),
    "a plain request": instead(
        (masked.REQUEST, ArrayRecord({"1": plain(np.zeros((2, 3)))})),
        (wire.REPORT, ConfigRecord({"kind": "statistics", "count": 12})),
        NUMBERS,
    ),
    "the state is lost, every time": sign(wire.LACKS_STATE, True),
    "the state is lost, with a model": sign(wire.LACKS_STATE, True, MODEL),
    "arrays are lacking, every time": sign(LACKS_ARRAYS, True),
    "arrays are lacking, with a model": sign(LACKS_ARRAYS, True, MODEL),
    "a side channel out of reach": sign(UNREACHABLE, "no way"),
    "a description": sign(wire.PARAMETERS, ["0.weight"]),
    "arrays for a report": instead((wire.REPORT, ArrayRecord({"x": plain(np.zeros(2))})), NUMBERS),
    # forms
    "no text": said("form", None),
    "an empty text": said("form", ""),
    "bytes for a text": said("form", b"\xff\x00"),
    "a number for a text": said("form", 7),
    "a list of texts": said("form", ["{}"]),
    "no JSON": said("form", "{'arrays'"),
    "a list": said("form", "[]"),
    "nothing": said("form", "null"),
    "brackets in brackets": said("form", "[" * 10**5),
    "a number of 10^5 digits": said("form", "9" * 10**5),
    "no arrays": form("arrays", None),
    "a number for arrays": form("arrays", 5),
    "texts for arrays": form("arrays", ["abc"]),
    "10^12 entries": first_array(lambda it: [*it[:2], [10**6, 10**6], it[3]]),
    "10^400 entries": first_array(lambda it: [*it[:2], [10**400], it[3]]),
    "an infinite shape": first_array(lambda it: [*it[:2], [float("inf")], it[3]]),
    "a shape that is not a number": first_array(lambda it: [*it[:2], [float("nan")], it[3]]),
    "a negative shape": first_array(lambda it: [*it[:2], [-1, *(-side for side in it[2])], it[3]]),
    "a shape of texts": first_array(lambda it: [*it[:2], ["a"], it[3]]),
    "another shape": first_array(lambda it: [*it[:2], [*it[2], 1], it[3]]),
    "objects": first_array(lambda it: [*it[:3], "object"]),
    "a dtype that is none": first_array(lambda it: [*it[:3], "nonsense"]),
    "another dtype": first_array(lambda it: [*it[:3], "int8"]),
    "another name": first_array(lambda it: [it[0], "x", *it[2:]]),
    "a name that is no text": first_array(lambda it: [it[0], {"x": "\ud800"}, *it[2:]]),
    "another group": first_array(lambda it: ["personal", *it[1:]]),
    "10^5 arrays": form("arrays", lambda arrays: arrays * 10**5),
    "10^12 metrics": form("metrics", [["loss", 10**12]]),
    "a metric of -1 numbers": form("metrics", lambda metrics: [*metrics, ["more", -1], ["x", None]]),
    "metrics that are a text": form("metrics", "loss"),
    "a kind that is none": form("kind", "nonsense"),
    "keys that are a number": form("obeyed", 5),
    "keys that nobody asked for": form("obeyed", ["x" * 10**5]),
    # partitions, too
    "no partition": said("partition", None),
    "half a partition": said("partition", 1.5),
    # keys
    "no key": said("key", None),
    "a short key": said("key", bytes(31)),
    "a key of low order": said("key", LOW_ORDER),
    "a key as a text": said("key", "k" * 32),
    "a list of keys": said("key", [b"k" * 32] * 2),
    "no signature": said("signature", None),
    "a signature as a text": said("signature", "s"),
    # failures
    "a strange reason": fails(STRANGE),
    "no reason": fails(""),
    "a reason that a server knows": fails("a number is not finite"),
}

#: in sums that need to be opened; an exchange has no shares
SHARES: dict[str, Change] = {
    "one share too few": said("shares", lambda shares: shares[1:]),
    "one share too many": said("shares", lambda shares: [*shares, b""]),
    "no shares": said("shares", lambda _: None),
    "shares as texts": said("shares", lambda shares: ["share"] * len(shares)),
    "shares as bytes": said("shares", lambda shares: bytes(len(shares))),
    "a number for shares": said("shares", lambda _: 5),
    "one commitment too few": said("commitments", lambda shares: shares[1:]),
    "no commitments": said("commitments", lambda _: None),
    "commitments as texts": said("commitments", lambda shares: ["share"] * len(shares)),
}

#: in the place of a key
KEYS: dict[str, Change] = {
    name: said(key, value, masked.MASKED)
    for name, key, value in (
        ("no key", "key", None),
        ("a short key", "key", bytes(31)),
        ("a key of low order", "key", LOW_ORDER),
        ("a key as a text", "key", "k" * 32),
        ("a key as a number", "key", 5),
        ("a list of keys", "key", [b"k" * 32] * 2),
        ("a key of 10^6 bytes", "key", b"k" * 10**6),
        ("no signature", "signature", None),
        ("a list of signatures", "signature", [b"s"]),
    )
} | {
    "no records": instead(),
    "arrays for a key": record(masked.MASKED, ArrayRecord({"key": plain(np.zeros(2))})),
    "metrics for a key": record(masked.MASKED, MetricRecord({"key": 1.0})),
    "a plain model": instead(MODEL, NUMBERS),
    "a strange reason": fails(STRANGE),
}

#: in the place of shares, by a node that counts: the others open the sum without it
OPENINGS: dict[str, Change] = {
    name: said(key, value, masked.MASKED)
    for name, key, value in (
        ("no shares", "shares", None),
        ("one share too few", "shares", lambda shares: shares[1:]),
        ("one share too many", "shares", lambda shares: [*shares, b""]),
        ("shares as texts", "shares", lambda shares: ["share"] * len(shares)),
        ("a number for shares", "shares", 5),
        ("wrong shares", "shares", lambda shares: [bytes(17)] * len(shares)),
        ("two wrong shares", "shares", lambda shares: [*shares[:4], b"", b""]),
        ("shares of 10^5 bytes", "shares", lambda shares: [b"s" * 10**5] * len(shares)),
        ("empty shares", "shares", lambda shares: [b""] * len(shares)),
        ("shares in another order", "shares", lambda shares: shares[::-1]),
        ("one share, many times", "shares", lambda shares: shares[:1] * len(shares)),
        ("seeds that nobody asked for", "seeds", [b"s" * 32]),
        ("seeds that are a number", "seeds", 5),
    )
} | {
    "no records": instead(),
    "arrays for shares": record(masked.MASKED, ArrayRecord({"shares": plain(np.zeros(2))})),
    "a plain model": instead(MODEL, NUMBERS),
    "a strange reason": fails(STRANGE),
}

#: what makes a sum impossible, though the server can say whose fault it is
UNOPENABLE: dict[str, Change] = {
    "garbage for shares": said("shares", lambda shares: [b"garbage"] * len(shares)),
    "no bytes for shares": said("shares", lambda shares: [b""] * len(shares)),
    "shares of others": said("shares", lambda shares: shares[::-1]),
    "one share for all": said("shares", lambda shares: shares[:1] * len(shares)),
    "shares of 10^6 bytes": said("shares", lambda shares: [b"s" * 10**6] * len(shares)),
    "wrong commitments": said("commitments", lambda each: [b"garbage"] * len(each)),
    "commitments of others": said("commitments", lambda each: each[::-1]),
    "one commitment for all": said("commitments", lambda each: each[:1] * len(each)),
    "empty commitments": said("commitments", lambda each: [b""] * len(each)),
}

#: numbers under masks that may be anything: whose fault it is cannot be known
UNKNOWN: dict[str, Change] = {
    "numbers of zero": hidden(lambda old: plain(np.zeros_like(old))),
    "other numbers": hidden(lambda old: plain(old[:, ::-1])),
    "one bit more": hidden(lambda old: plain(old + np.eye(*old.shape, dtype=np.uint64))),
}


#: lies that fit under masks: whole numbers that are added to one of them, by its place (see `fedbn_flwr.wire.masked`)
LIES: dict[str, Change] = {
    f"{amount:.0e} {name}": added(place, amount)
    for name, place in (
        *(("nodes", 0), ("weight", 1), ("samples", 2), ("losses", 3), ("loss", 4), ("low losses", 6)),
        *(("in the first array", 7), ("in the middle", 30), ("at the end", -1)),
    )
    for amount in (-(10**6), 10**15, 2**61, -(2**61))
}


class MaskedBadNode(BadNode):
    """A grid in which one node answers with nonsense, from a round on, at one place of the protocol."""

    place, since = "reply", 1

    def is_spoiled(self, message: Message) -> bool:
        """Return whether the node answers a message with nonsense."""
        config: Any = message.content.config_records.get(wire.CONFIG, {})
        is_it = message.metadata.dst_node_id == BAD and place_of(message) == self.place
        return is_it and config.get("server-round", 0) >= self.since

    def spoiled(self, message: Message, reply: Message) -> Message:
        """Return nonsense in the place of a reply."""
        if not reply.has_content():
            return reply
        content = RecordDict(dict(reply.content))
        error = type(self).change(content)
        return Message(error if isinstance(error, Error) else content, reply_to=message)


def place_of(message: Message) -> str:
    """Return what a message asks a node for: `key`, `opening`, `reply`, or nothing that is of a sum."""
    if message.metadata.message_type == masked.SECURE_QUERY:
        return "opening" if "survivors" in message.content.config_records[masked.SECURE] else "key"
    return "" if masked.is_control(message) else "reply"


def sends_masked(change_of: Change, at: str = "reply", since_round: int = 1) -> type[MaskedBadNode]:
    """Return a grid in which one node sends nonsense at a place of the protocol."""

    class Grid(MaskedBadNode):
        change, place, since = staticmethod(change_of), at, since_round

    return Grid


#: five nodes are enough for sums of six; each has other mini-batches, if a step begins again
SIX = (7, 12, 20, 6, 9, 8)
ALL = {1000, 1001, 1002, 1003, 1004, 1005}
OPTIONS: dict[str, Any] = {"secure": True, "exchange_timeout": 0.1}
METHODS: dict[str, Callable[[], BaseStrategy]] = {
    "fedavg": partial(FedAvg, **OPTIONS),
    "fixbn": partial(FixBN, freeze_round=1, **OPTIONS),
    "fedbs": partial(FedBS, **OPTIONS),
    "fedtan": partial(FedTAN, **OPTIONS),
    "scaffold": partial(Scaffold, **OPTIONS),
}
#: all of them together take minutes
EACH = [pytest.param(name, marks=[] if name in ("fedavg", "fedtan") else pytest.mark.slow) for name in METHODS]


def run(method: str, grid: type[InProcessGrid] = InProcessGrid, rounds: int = 2) -> state.State:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nodes = Federation(nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)), SIX, grid=grid)
    return nodes.run(METHODS[method](), rounds, evaluate_every=1, local_steps=1)


@cache
def after(method: str, place: str = "", rounds: int = 2) -> state.State:
    """Return the model of a run in which the node fails at a place of the protocol, in every round."""
    return run(method, sends_masked(fails("absent"), place), rounds)


def named(log: pytest.LogCaptureFixture) -> set[int]:
    """Return the nodes in the log, but for those whose sum was not opened for another one's fault."""
    said = [record.getMessage() for record in log.records if record.levelno >= WARNING]
    texts = [text for text in said if "the sum that it is in was not opened" not in text]
    assert not [text for text in texts if str(BAD) in text and not text.isprintable()]
    return {int(node) for text in texts for node in re.findall(r"\b100\d\b", text)}


def same(one: state.State, other: state.State, method: str) -> bool:
    """Compare two models; after an exchange that failed, nodes draw mini-batches that only they know."""
    return method == "fedtan" or all(torch.equal(one[name], other[name]) for name in other)


#: place, kind, change, and the first round of it
CASES = [
    *(("reply", kind, change, 1) for kind, change in {**REPLIES, **SHARES}.items()),
    *(("key", kind, change, 1) for kind, change in KEYS.items()),
    *(("opening", kind, change, 1) for kind, change in OPENINGS.items()),
    *(("reply", kind, change, 3) for kind, change in {**UNOPENABLE, **UNKNOWN}.items()),
]
IDS = [f"{place}-{kind}" for place, kind, _, _ in CASES]


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize(("place", "kind", "change", "since"), CASES, ids=IDS)
def test_nonsense_is_refused_by_name(
    place: str, kind: str, change: Any, since: int, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The node is left out; who does not help to open a sum counts, and a sum that cannot be opened costs the round."""
    is_left_out = place != "opening" and since == 1
    wanted = after(method, place if is_left_out else "")
    caplog.clear()
    found = run(method, sends_masked(change, place, since), since + 1)
    assert named(caplog) == (ALL if kind in UNKNOWN else {BAD})
    assert same(found, wanted, method)


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "fedavg")]
)
@pytest.mark.parametrize("kind", LIES)
def test_no_lie_under_masks_ends_the_run(kind: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    found = run(method, sends_masked(LIES[kind], since_round=3), 4)
    assert named(caplog) in (set(), ALL)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("key", ["shares", "commitments"])
def test_where_one_share_is_wrong_its_owner_and_its_holder_are_named(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can know which of them lies; and the sum is opened by the others."""
    wanted = after("fedavg")
    caplog.clear()
    found = run("fedavg", sends_masked(said(key, lambda all_shares: [b"", *all_shares[1:]])))
    assert named(caplog) == {1000, BAD}
    assert same(found, wanted, "fedavg")


def test_of_two_nodes_with_one_key_the_second_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    keys = list[Any]()

    class Thief(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            for reply in filter(Message.has_content, replies):
                record: Any = reply.content.config_records.get(masked.MASKED, {})
                keys.append(record.get("key", b""))
                if reply.metadata.src_node_id == BAD and "key" in record:
                    reply.content[masked.MASKED] = ConfigRecord({**record, "key": keys[0]})
            return replies

    run("fedavg", Thief)
    assert "Node 1001 is left out of this round: it failed: its key is another node's, too" in caplog.messages


def test_a_node_whose_app_knows_no_masks_is_told_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    run("fedavg", sends_masked(KEYS["no records"], "key"))
    assert "its app knows no sums under masks: make it with fedbn_flwr.clientapp" in caplog.text
