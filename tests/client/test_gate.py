"""What a node refuses to a server that does not keep the rules: every message goes through a real app."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import wire
from fedbn_flwr.client.gate_memory import MINIMUM_VARIABLE, SITE_VARIABLE, SumMemory
from fedbn_flwr.client.node_memory import STATE_VARIABLE
from fedbn_flwr.clientapp.bn_client_app import NodeApp
from fedbn_flwr.secure import Participants, masks
from fedbn_flwr.secure.fixed_point import decode, sum_of
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.transports.message_records import SIDE_CHANNEL
from fedbn_flwr.wire import masked
from fedbn_flwr.wire.masked import Terms

NODES = (1, 2, 3, 4)


class RefusedError(Exception):
    """A node's error in place of a reply."""


@dataclass
class Server:
    """A server that can say whatever it likes, and its nodes."""

    nodes: dict[int, Context] = field(default_factory=dict)
    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    #: what was handed to a node's own code
    handled: list[Message] = field(default_factory=list)
    fails: Exception | None = None
    #: what happens while a node computes, once
    meanwhile: Callable[[], object] | None = None
    #: whether nodes reply with requests of a layer-wise step, and not with models
    requests: bool = False

    def __post_init__(self) -> None:
        InProcessGrid(ClientApp(), 1)  # Flower reads who makes a message
        self.app = NodeApp()
        for register in (self.app.train, self.app.evaluate):
            register()(self._handle)
        for name in ("layerwise", "gather", "default2"):
            self.app.train(name)(self._handle)
        self.app.evaluate("other")(self._handle)
        self.app.query("own")(self._handle)

    def _handle(self, message: Message, context: Context) -> Message:
        self.handled.append(message)
        if self.meanwhile:
            act, self.meanwhile = self.meanwhile, None
            act()
        if self.fails:
            raise self.fails
        numbers: dict[str, Any] = {wire.NUM_EXAMPLES: 10 * context.node_id, "train-loss": 0.5, "local-loss": 0.25}
        reply = RecordDict({wire.METRICS: MetricRecord(numbers), wire.REPORT: ConfigRecord({wire.OBEYED: ["freeze"]})})
        if self.requests:
            reply[wire.REPORT] = ConfigRecord({"kind": "mean", "count": 8})
            reply[masked.REQUEST] = ArrayRecord({"bn": Array(np.array([0.5]))})
        elif message.metadata.message_type != "evaluate":
            reply[wire.ARRAYS] = ArrayRecord({"w": Array(np.array([0.25 * context.node_id, -1.0]))})
        return Message(reply, reply_to=message)

    def meet(self, nodes: Sequence[int] = NODES) -> "Server":
        for node in nodes:
            self.nodes.setdefault(node, Context(1, node, {"partition-id": node}, RecordDict(), {}))
            self._note_key(node, self.send(node, masked.SECURE_QUERY, {masked.SECURE: ConfigRecord({"minimum": 3})}))
        return self

    def asked(self, nodes: Sequence[int] = NODES, **other: Any) -> dict[str, Any]:
        keys, signatures = zip(*(self.keys[node] for node in nodes), strict=True)
        names = {"nodes": list(nodes), "keys": list(keys), "signatures": list(signatures), "minimum": 3}
        return {**vars(Terms("examples")), **names, **other}

    def send(self, node: int, kind: str, content: Mapping[str, Any]) -> RecordDict:
        message = Message(RecordDict(dict(content)), node, kind)
        reply = self.app(message, self.nodes[node])
        if reply.has_error():
            raise RefusedError(reply.error.reason)
        return reply.content

    def train(
        self, node: int, asked: Mapping[str, Any], server_round: int, kind: str = "train", **records: Any
    ) -> RecordDict:
        config = ConfigRecord({"server-round": server_round, "lr": records.pop("lr", 0.1)})
        arrays = ArrayRecord({"w": Array(np.array([records.pop("w", 1.0), 2.0]))})
        content = {wire.CONFIG: config, wire.ARRAYS: arrays, masked.SECURE: ConfigRecord(dict(asked)), **records}
        reply = self.send(node, kind, content)
        if f"{masked.MASKED}-form" in reply:
            self._note_key(node, reply, f"{masked.MASKED}-form")
        return reply

    def begin_step(
        self, node: int, server_round: int, attempt: int, nodes: Sequence[int] = NODES, **records: Any
    ) -> RecordDict:
        position = ConfigRecord({"attempt": attempt, "index": 0})
        return self.train(
            node, self.asked(nodes), server_round, wire.LAYERWISE, **{masked.POSITION: position}, **records
        )

    def exchange(self, index: int, answer_for: Callable[[int], float]) -> float:
        """Take all nodes to an exchange, and return how many nodes the sum of their requests is of, if masks cancel."""
        asked, sums = self.asked(), []
        for node in NODES:
            position = ConfigRecord({"attempt": 1, "index": index})
            answers = ArrayRecord({str(index): Array(np.array([answer_for(node)]))})
            content = {wire.CONFIG: ConfigRecord({"server-round": 1}), masked.SECURE: ConfigRecord(asked)}
            reply = self.send(node, wire.LAYERWISE, {**content, masked.POSITION: position, "answers": answers})
            self._note_key(node, reply, f"{masked.MASKED}-form")
            sums.append(reply.array_records[masked.MASKED]["sum"].numpy())
        return float(decode(sum_of(sums))[0])

    def all_train(self, server_round: int, nodes: Sequence[int] = NODES, kind: str = "train") -> "Replies":
        asked = self.asked(nodes)
        return Replies(self, asked, {node: self.train(node, asked, server_round, kind) for node in nodes})

    def _note_key(self, node: int, reply: RecordDict, name: str = masked.MASKED) -> None:
        said: Any = reply[name]
        self.keys[node] = said["key"], said["signature"]


@dataclass
class Replies:
    """The replies to one sum."""

    server: Server
    asked: dict[str, Any]
    by_node: dict[int, RecordDict]

    def form(self, node: int) -> Any:
        return self.by_node[node][f"{masked.MASKED}-form"]

    def open(self, node: int, survivors: Sequence[int] = NODES) -> Any:
        place = self.asked["nodes"].index(node)
        sealed = [self.form(other)["shares"][place] for other in survivors]
        record = ConfigRecord({**self.asked, "survivors": list(survivors), "sealed": sealed})
        return self.server.send(node, masked.SECURE_QUERY, {masked.SECURE: record})[masked.MASKED]

    def opened(self) -> np.ndarray:
        """Return the sum of all, as the server finds it."""
        shares = {node: self.open(node)["shares"] for node in NODES}
        among, own = Participants(b"", NODES, tuple(self.asked["keys"])), []
        for place, owner in enumerate(NODES):
            given = {node: shares[node][place] for node in NODES}
            seed, wrong = masks.open_shares(given, self.form(owner)["commitments"], among)
            if seed is None or wrong:
                raise RefusedError(f"the mask of node {owner} cannot be opened: {wrong} give no share of it")
            own.append(seed)
        arrays: Any = [reply.array_records[masked.MASKED]["sum"].numpy() for reply in self.by_node.values()]
        return decode(masks.cancel(sum_of(arrays), among, own, {}))


def test_the_server_learns_the_sum_and_nothing_else() -> None:
    replies = Server().meet().all_train(1)
    for node, reply in replies.by_node.items():
        assert set(reply) == {masked.MASKED, f"{masked.MASKED}-form"}
        assert set(replies.form(node)) == {"form", "partition", "shares", "commitments", "key", "signature"}
    count, _, examples, *_ = replies.opened()
    assert (count, examples) == (4, 100)


PAST, OTHERS = "round 1 again, or for an earlier one", "of round 1 among other nodes than before"
LATEST = "not this node's last one, or that was opened before"
USED = "another key in the place of this node's, or one that was used"
UNLIKE = r"the mask of node 1 cannot be opened: \[2, 3, 4\] give no share of it"
THREE = (1, 2, 3)

#: sums that node 1 is asked for, one after another: the last is refused
SUMS: dict[str, tuple[str, list[tuple[Sequence[int], int, str]]]] = {
    "too few": ("a sum of 2 nodes would show too much of each: 3 at least", [((1, 2), 1, "train")]),
    "a list without me": ("node 1 is no participant", [((2, 3, 4), 1, "train")]),
    "one node twice": ("a node or its key is in the list of participants twice", [((*THREE, 3), 1, "train")]),
    "two that differ by a node": (PAST, [(NODES, 1, "train"), (THREE, 1, "train")]),
    "two by two handlers": (PAST, [(NODES, 1, "train"), (THREE, 1, "train.default2")]),
    "two evaluations in a round": (PAST, [(NODES, 1, "evaluate"), (NODES, 1, "evaluate.other")]),
    "two by another message type": (PAST, [(NODES, 1, "query.own"), (THREE, 1, "query.own")]),
    "an old round": (PAST, [(NODES, 2, "train"), (NODES, 1, "train")]),
    "to evaluate among others than trained": (OTHERS, [(THREE, 1, "train"), (NODES, 1, "evaluate")]),
    "to gather among others": (OTHERS, [(NODES, 1, wire.GATHER), (THREE, 1, wire.GATHER)]),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_node_refuses_a_sum(name: str) -> None:
    reason, sums = SUMS[name]
    server = Server().meet()
    for nodes, server_round, kind in sums[:-1]:
        server.train(1, server.asked(nodes), server_round, kind)
    nodes, server_round, kind = sums[-1]
    with pytest.raises(RefusedError, match=reason):
        server.train(1, server.asked(nodes), server_round, kind)


#: what the server says of a sum, in place of what it should
SAID: dict[str, tuple[str, dict[str, Any]]] = {
    "a number that is none": ("cannot be read", {"minimum": float("nan")}),
    "nodes that are texts": ("cannot be read", {"nodes": ["1", "2", "3", "4"]}),
    "a key too few": ("there are 3 keys of 4 nodes", {"keys": [b"1", b"2", b"3"]}),
    "a weight that others have not": (
        "nodes are not weighted by 'tally' and 'num-examples'",
        {"weighting": "tally", "tally": "num-examples"},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_node_refuses_what_is_said_of_a_sum(name: str) -> None:
    reason, said = SAID[name]
    server = Server().meet()
    with pytest.raises(RefusedError, match=reason):
        server.train(1, {**server.asked(), **said}, 1)


#: of nodes 1 to N, those that the server says count when node 1 is to open the sum
OPENED: dict[str, tuple[str, int, Sequence[int]]] = {
    "for too few": ("a sum of 3 of 4 nodes is not opened: 4 at least", 4, THREE),
    "for less than three quarters": ("a sum of 5 of 7 nodes is not opened: 6 at least", 7, range(1, 6)),
    "without the node itself": ("this node did not send its part, and it has", 9, range(2, 10)),
    "with a node named twice": ("the server names nodes that are no participants", 4, (1, 2, 2, 3)),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_node_does_not_open_a_sum(name: str) -> None:
    reason, count, survivors = OPENED[name]
    nodes = range(1, count + 1)
    replies = Server().meet(nodes).all_train(1, nodes)
    with pytest.raises(RefusedError, match=reason):
        replies.open(1, survivors)


ATTACKS: dict[str, tuple[Callable[[Server], Any], str]] = {}


def attack(reason: str) -> Callable[[Callable[[Server], Any]], Callable[[Server], Any]]:
    def register(act: Callable[[Server], Any]) -> Callable[[Server], Any]:
        ATTACKS[act.__name__] = act, reason
        return act

    return register


@attack(USED)
def a_key_of_its_own_for_me(server: Server) -> None:
    server.keys[1] = masks.public_key(masks.new_private_key()), b""
    server.train(1, server.asked(), 1)


@attack(USED)
def a_second_sum_with_one_key(server: Server) -> None:
    asked = server.asked()
    server.train(1, asked, 1)
    server.train(1, asked, 2)


@attack(PAST.replace("1", "0"))
def a_question_that_names_no_round(server: Server) -> None:
    server.train(1, server.asked(), 1)
    server.send(1, "evaluate", {masked.SECURE: ConfigRecord(server.asked()), wire.CONFIG: ConfigRecord()})


@attack(PAST)
def a_round_again_after_new_keys(server: Server) -> None:
    server.train(1, server.asked(), 1)
    server.meet().train(1, server.asked(THREE), 1)


@attack(PAST)
def a_side_channel_in_a_plain_message(server: Server) -> None:
    channel: dict[str, Any] = {SIDE_CHANNEL: ConfigRecord({"address": "x:1", "token": "t"})}
    server.train(1, server.asked(), 1, **channel)
    server.train(1, server.asked(THREE), 1, **channel)


@attack(PAST)
def a_step_by_exchanges_after_a_plain_one(server: Server) -> None:
    server.train(1, server.asked(), 1)
    server.begin_step(1, 1, 2, THREE)


@attack("a sum of 3 of 4 nodes is not opened: 4 at least")
def to_gather_twice_and_leave_one_out(server: Server) -> None:
    for nodes in (NODES, (1, 2, 4)):
        server.all_train(1, kind=wire.GATHER).open(1, nodes)


@attack(LATEST)
def to_open_a_sum_twice_and_ask_for_a_new_key(server: Server) -> None:
    replies = server.all_train(1)
    server.meet()
    replies.open(1)
    replies.open(1)


@attack(LATEST)
def to_open_an_old_sum(server: Server) -> None:
    replies = server.all_train(1)
    server.train(1, server.asked(), 2)
    replies.open(1)


@attack(UNLIKE)
def to_train_one_node_only(server: Server) -> None:
    asked = server.asked()
    replies = {node: server.train(node, asked, 1, lr=0.1 if node == 1 else 0.0) for node in NODES}
    Replies(server, asked, replies).opened()


@attack(UNLIKE)
def to_send_one_node_another_model(server: Server) -> None:
    asked = server.asked()
    replies = {node: server.train(node, asked, 1, w=float(node == 1)) for node in NODES}
    Replies(server, asked, replies).opened()


@attack("it failed, and its own log says why")
def to_read_the_texts_of_errors(server: Server) -> None:
    server.fails = OSError("normal/Jones_Mary_1961-03-02.png cannot be decoded")
    server.train(1, server.asked(), 1)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_node_names_what_the_server_does(name: str) -> None:
    act, reason = ATTACKS[name]
    with pytest.raises(RefusedError, match=reason):
        act(Server().meet())


def test_a_step_may_begin_again_among_fewer_nodes_until_a_model_has_left() -> None:
    server = Server(requests=True).meet()
    server.begin_step(1, 1, 1)
    with pytest.raises(RefusedError, match=PAST):
        server.begin_step(1, 1, 1)
    server.begin_step(1, 1, 2, (1, 2, 3))
    with pytest.raises(RefusedError, match=OTHERS):
        server.begin_step(1, 1, 3)
    server.requests = False
    server.begin_step(1, 1, 3, (1, 2, 3))
    with pytest.raises(RefusedError, match=PAST):
        server.begin_step(1, 1, 4, (1, 2, 3))


def rigged_answer(index: int, node: int) -> float:
    return float(node == index == 1)


def test_masks_of_a_step_depend_on_all_that_was_answered_before() -> None:
    server = Server(requests=True).meet()
    assert [server.exchange(index, lambda _: 0.5) for index in range(3)] == [4, 4, 4]
    server = Server(requests=True).meet()
    rigged = [server.exchange(index, partial(rigged_answer, index)) for index in range(4)]
    assert rigged[0] == 4
    assert 4 not in rigged[1:]


def test_a_step_that_begins_again_has_other_batches_also_from_another_model() -> None:
    """A model that differs by a little would show nearly the same statistics."""
    server = Server(requests=True).meet()
    server.begin_step(1, 1, 1, w=1.0)
    assert not SumMemory(server.nodes[1]).entered["secret"]
    server.begin_step(1, 1, 2, (1, 2, 3), w=1.0 + 1e-9)
    assert SumMemory(server.nodes[1]).entered["secret"]


def test_nodes_without_a_number_do_not_share_what_they_remember(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    one, other = (SumMemory(Context(7, node, {}, RecordDict(), {})) for node in (1, 2))
    one.update(ended="sum")
    assert SumMemory(Context(7, 1, {}, RecordDict(), {})).get("ended", "") == "sum"
    assert SumMemory(Context(7, 2, {}, RecordDict(), {})).get("ended", "") == other.get("ended", "") == ""


# ---- pinned keys ---------------------------------------------------------------------------------------------------


def pin(folder: Path, monkeypatch: pytest.MonkeyPatch, sites: int = 4) -> list[Ed25519PrivateKey]:
    """Pin keys of sites, of which this process has the first; return all."""
    keys = [Ed25519PrivateKey.generate() for _ in range(sites)]
    lines = [f"{key.public_key().public_bytes_raw().hex()} site-{number}\n" for number, key in enumerate(keys)]
    (folder / "sign.key").write_text(keys[0].private_bytes_raw().hex())
    (folder / "sites.txt").write_text("".join(lines))
    monkeypatch.setenv(SITE_VARIABLE, str(folder))
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "states"))
    return keys


def among_sites(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, list[Ed25519PrivateKey]]:
    """Return a server whose first node is the site of this process, and the keys of all sites."""
    keys = pin(folder, monkeypatch)
    server = Server().meet()
    for node, own in zip(NODES[1:], keys[1:], strict=True):
        server.keys[node] = server.keys[node][0], sign(own, server.keys[node][0])
    return server, keys


def sign(own: Ed25519PrivateKey, key: bytes) -> bytes:
    return own.sign(b"fedbn-flwr key of a sum " + key)


def test_what_was_used_stays_used_whatever_becomes_of_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = among_sites(tmp_path, monkeypatch)
    asked, context = server.asked(), server.nodes[1]
    server.train(1, asked, 1)
    server.nodes[1] = Context(1, 1, context.node_config, RecordDict(), {})  # as after a crash, or a resumed run's
    with pytest.raises(RefusedError, match=USED):
        server.train(1, asked, 1)


def test_a_second_sum_while_a_node_computes_the_first_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = among_sites(tmp_path, monkeypatch)
    asked, context = server.asked(), server.nodes[1]

    def in_another_process() -> None:
        server.nodes[1] = Context(1, 1, context.node_config, RecordDict(), {})
        server.train(1, asked, 1, lr=0.2)

    server.meanwhile = in_another_process
    with pytest.raises(RefusedError, match="another message has used the key of this one"):
        server.train(1, asked, 1)


def test_a_site_with_pinned_keys_needs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = among_sites(tmp_path, monkeypatch)
    monkeypatch.delenv(STATE_VARIABLE)
    with pytest.raises(RefusedError, match=f"needs a folder for what it remembers: {STATE_VARIABLE}"):
        server.train(1, server.asked(), 1)


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        ("own key", "a key that no site has signed: that of node 3"),
        ("another signature", "a key that no site has signed"),
        ("one site twice", "two keys of one site"),
        ("too few signatures", "3 signatures of 4 keys"),
    ],
)
def test_a_site_with_pinned_keys_refuses(
    cheat: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, keys = among_sites(tmp_path, monkeypatch)
    key, signature = server.keys[3]
    server.keys[3] = {
        "own key": (masks.public_key(masks.new_private_key()), signature),
        "another signature": (key, keys[2].sign(key)),
        "one site twice": (key, sign(keys[1], key)),
    }.get(cheat, (key, signature))
    asked = server.asked()
    if cheat == "too few signatures":
        asked["signatures"] = asked["signatures"][:3]
    with pytest.raises(RefusedError, match=reason):
        server.train(1, asked, 1)


HANDLERS = ("train", "evaluate", "train.default2", wire.GATHER)


@pytest.mark.parametrize("kind", [*HANDLERS, wire.LAYERWISE])
def test_a_site_with_pinned_keys_computes_nothing_for_the_clear(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = among_sites(tmp_path, monkeypatch)
    with pytest.raises(RefusedError, match="answers only under masks"):
        server.send(1, kind, {wire.CONFIG: ConfigRecord({"server-round": 1})})
    assert not server.handled


def test_a_site_may_ask_for_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MINIMUM_VARIABLE, "5")
    server = Server().meet()
    with pytest.raises(RefusedError, match="a sum of 4 nodes would show too much of each: 5 at least"):
        server.train(1, server.asked(), 1)
