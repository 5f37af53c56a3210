"""What a node refuses to a server that does not keep the rules of sums under masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import wire
from fedbn_flwr.client import masking
from fedbn_flwr.client.masked_carried import for_pool, keep_values
from fedbn_flwr.client.masked_memory import MINIMUM_VARIABLE, SITE_VARIABLE, fresh_seed
from fedbn_flwr.client.masking import answer_query, leave_masked
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.secure import ProtocolError, masks
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.wire import masked
from fedbn_flwr.wire.masked import Terms

NODES = (1, 2, 3, 4)


@dataclass
class Server:
    """A server that can say whatever it likes, and its nodes."""

    nodes: dict[int, Context] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)
    signatures: dict[int, bytes] = field(default_factory=dict)
    session: str = "a"

    def meet(self, nodes: Sequence[int] = NODES) -> "Server":
        InProcessGrid(ClientApp(), 1)  # Flower reads who makes a message
        for node in nodes:
            self.nodes.setdefault(node, Context(1, node, {}, RecordDict(), {}))
            said: Any = self.query(node, {"session": self.session})
            self.keys[node], self.signatures[node] = said["key"], said["signature"]
        return self

    def query(self, node: int, asked: dict[str, Any]) -> Any:
        message = Message(RecordDict({masked.SECURE: ConfigRecord(asked)}), node, masked.SECURE_QUERY)
        return answer_query(message, self.nodes[node])[masked.MASKED]

    def asked(self, number: int, nodes: Sequence[int] = NODES, **other: Any) -> dict[str, Any]:
        names = {
            "session": self.session,
            "number": number,
            **vars(Terms("examples")),
            "minimum": 3,
            "nodes": list(nodes),
        }
        keys = {"keys": [self.keys[node] for node in nodes], "signatures": [self.signatures[node] for node in nodes]}
        return {**names, **vars(Terms("examples")), **keys, **other}

    def train(self, node: int, asked: dict[str, Any] | None, server_round: int, kind: str = "train") -> RecordDict:
        config = ConfigRecord({"server-round": server_round})
        content = RecordDict({wire.CONFIG: config, **({masked.SECURE: ConfigRecord(asked)} if asked else {})})
        reply = RecordDict(
            {
                wire.ARRAYS: ArrayRecord({"w": Array(np.array([0.25 * node, -1.0]))}),
                wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: 10 * node, "train-loss": 0.5}),
                wire.REPORT: ConfigRecord({wire.OBEYED: ["freeze"]}),
            }
        )
        return leave_masked(reply, Message(content, node, kind), self.nodes[node])

    def give_values(self, node: int, server_round: int, secure: bool = True) -> RecordDict:
        context = self.nodes[node]
        sizes = np.array([[4], [1], [0]])
        values: dict[str, np.ndarray] = {"statistics": np.ones((2, 1)), "layers": np.frombuffer(b"bn", np.uint8)}
        if not list(Memory(context.state).kept(wire.CARRIED)):
            arrays = ArrayRecord({name: Array(value) for name, value in {**values, "sizes": sizes}.items()})
            reply = RecordDict({wire.CARRIED: arrays, wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: 5})})
            keep_values(reply, context)
        config = ConfigRecord({"server-round": server_round})
        asked = {masked.SECURE: ConfigRecord(self.asked(server_round))} if secure else {}
        return for_pool(Message(RecordDict({wire.CONFIG: config, **asked}), node, masked.CARRIED_QUERY), context)

    def open(self, node: int, asked: dict[str, Any], survivors: Sequence[int], replies: dict[int, RecordDict]) -> Any:
        place = asked["nodes"].index(node)
        forms: Any = {other: replies[other][f"{masked.MASKED}-form"] for other in survivors}
        sealed = [forms[other]["shares"][place] for other in survivors]
        return self.query(node, {**asked, "survivors": list(survivors), "sealed": sealed})


def test_the_server_learns_the_sum_and_nothing_else() -> None:
    server = Server().meet()
    asked = server.asked(1)
    replies = {node: server.train(node, asked, 1) for node in NODES}
    for reply in replies.values():
        assert set(reply) == {masked.MASKED, f"{masked.MASKED}-form"}
        assert set(reply[f"{masked.MASKED}-form"]) == {"form", "partition", "shares", "commitments"}
    opened = [server.open(node, asked, NODES, replies) for node in NODES]
    assert all("seeds" not in each and len(each["shares"]) == len(NODES) for each in opened)


ATTACKS: dict[str, tuple[Callable[[Server], Any], str]] = {}


def attack(reason: str) -> Callable[[Callable[[Server], Any]], Callable[[Server], Any]]:
    def register(act: Callable[[Server], Any]) -> Callable[[Server], Any]:
        ATTACKS[act.__name__] = act, reason
        return act

    return register


@attack("a sum of 2 nodes would show too much of each: 3 at least")
def too_few(server: Server) -> None:
    server.train(1, server.asked(1, (1, 2)), 1)


@attack("put another key in the place")
def a_key_of_its_own_for_me(server: Server) -> None:
    server.keys[1] = masks.public_key(masks.new_private_key())
    server.train(1, server.asked(1), 1)


@attack("node 1 is no participant")
def a_list_without_me(server: Server) -> None:
    server.train(1, server.asked(1, (2, 3, 4)), 1)


@attack("in before, or for an earlier one")
def a_sum_again(server: Server) -> None:
    server.train(1, server.asked(1), 1)
    server.train(1, server.asked(1), 2)


@attack("round 1 again, or for an earlier one")
def two_sums_of_a_round_that_differ_by_a_node(server: Server) -> None:
    server.train(1, server.asked(1), 1)
    server.train(1, server.asked(2, (1, 2, 3)), 1)


@attack("round 1 again, or for an earlier one")
def an_old_round(server: Server) -> None:
    server.train(1, server.asked(1), 2)
    server.train(1, server.asked(2), 1)


@attack("statistics of this round")
def to_gather_among_others_in_a_round(server: Server) -> None:
    server.train(1, server.asked(1), 1, wire.GATHER)
    server.train(1, server.asked(2), 1, wire.GATHER)
    server.train(1, server.asked(3, (1, 2, 3)), 1, wire.GATHER)


@attack("values that were in a pool before")
def the_same_carried_values_in_two_pools(server: Server) -> None:
    server.give_values(1, 1)
    server.give_values(1, 2)


@attack("leave a node under masks only")
def carried_values_in_the_clear(server: Server) -> None:
    server.give_values(1, 1, secure=False)


@attack("no key for")
def another_session(server: Server) -> None:
    server.train(1, server.asked(1, session="b"), 1)


@attack("round 1 again, or for an earlier one")
def a_round_again_in_a_new_session(server: Server) -> None:
    server.train(1, server.asked(1), 1)
    server.session = "b"
    server.meet()
    server.train(1, server.asked(1, (1, 2, 3)), 1)


@attack("asks again for the key")
def the_key_again_to_begin_anew(server: Server) -> None:
    server.train(1, server.asked(1), 1)
    server.meet()


@attack("this node did not send its part, and it has")
def to_say_that_a_node_dropped_out(server: Server) -> None:
    replies = {node: server.train(node, server.asked(1), 1) for node in NODES}
    server.open(1, server.asked(1), (2, 3, 4), replies)


@attack("not this node's last one, or that was opened before")
def to_open_a_sum_twice(server: Server) -> None:
    replies = {node: server.train(node, server.asked(1), 1) for node in NODES}
    server.open(1, server.asked(1), NODES, replies)
    server.open(1, server.asked(1), (1, 2, 3), replies)


@attack("not this node's last one, or that was opened before")
def to_open_an_old_sum(server: Server) -> None:
    replies = {node: server.train(node, server.asked(1), 1) for node in NODES}
    server.train(1, server.asked(2), 2)
    server.open(1, server.asked(1), NODES, replies)


@attack("a sum of 2 of 4 nodes is not opened: 3 at least")
def to_open_for_too_few(server: Server) -> None:
    replies = {node: server.train(node, server.asked(1), 1) for node in NODES}
    server.open(1, server.asked(1), (1, 2), replies)


@attack("cannot be opened: the server has named other participants")
def other_participants_to_two_nodes(server: Server) -> None:
    replies = {node: server.train(node, server.asked(1, NODES if node < 4 else (4, 1, 2)), 1) for node in NODES}
    form: Any = replies[4][f"{masked.MASKED}-form"]
    form["shares"] = [*form["shares"], form["shares"][0]]
    server.open(1, server.asked(1), NODES, replies)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_node_names_what_the_server_does(name: str) -> None:
    act, reason = ATTACKS[name]
    with pytest.raises(ProtocolError, match=reason):
        act(Server().meet())


def test_later_attempts_draw_batches_that_only_the_node_knows() -> None:
    server = Server().meet()
    content = RecordDict({masked.SECURE: ConfigRecord(server.asked(1))})
    assert fresh_seed(5, 1, content, server.nodes[1]) == 5
    assert fresh_seed(5, 2, RecordDict(), server.nodes[1]) == 5
    seeds = [fresh_seed(5, attempt, content, server.nodes[node]) for attempt in (2, 3) for node in (1, 2)]
    assert len({5, *seeds}) == 5
    assert seeds[0] == fresh_seed(5, 2, content, server.nodes[1])


def pin(folder: Path, monkeypatch: pytest.MonkeyPatch, sites: int = 4) -> list[Ed25519PrivateKey]:
    """Pin keys of sites, of which this process has the first; return all."""
    keys = [Ed25519PrivateKey.generate() for _ in range(sites)]
    lines = [f"{key.public_key().public_bytes_raw().hex()} site-{number}\n" for number, key in enumerate(keys)]
    (folder / "sign.key").write_text(keys[0].private_bytes_raw().hex())
    (folder / "sites.txt").write_text("".join(lines))
    monkeypatch.setenv(SITE_VARIABLE, str(folder))
    return keys


def signed(server: Server, keys: list[Ed25519PrivateKey]) -> Server:
    """Sign every node's key by a site's."""
    for key, node in zip(keys, NODES, strict=True):
        server.signatures[node] = key.sign(masking._signed(server.session, server.keys[node]))
    return server


def test_a_site_with_pinned_keys_takes_part_among_signed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = pin(tmp_path, monkeypatch)
    server = signed(Server().meet(), keys)
    assert masked.MASKED in server.train(1, server.asked(1), 1)


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        ("own key", "a key that no site has signed"),
        ("signature of another session", "a key that no site has signed"),
        ("one site twice", "two keys of one site"),
        ("in the clear", "answers only under masks"),
    ],
)
def test_a_site_with_pinned_keys_refuses(
    cheat: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = pin(tmp_path, monkeypatch)
    server = signed(Server().meet(), keys)
    if cheat == "own key":
        server.keys[3] = masks.public_key(masks.new_private_key())
    elif cheat == "signature of another session":
        server.signatures[3] = keys[2].sign(masking._signed("b", server.keys[3]))
    elif cheat == "one site twice":
        server.signatures[3] = keys[1].sign(masking._signed("a", server.keys[3]))
    with pytest.raises(ProtocolError, match=reason):
        server.train(1, None if cheat == "in the clear" else server.asked(1), 1)


def test_a_site_may_ask_for_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MINIMUM_VARIABLE, "5")
    server = Server().meet()
    with pytest.raises(ProtocolError, match="a sum of 4 nodes would show too much of each: 5 at least"):
        server.train(1, server.asked(1), 1)
