"""What a SuperNode records of what it sends, and which apps its site allows: around Flower's own
two functions.
"""

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory

from fedbn_flwr.deployment.flower_internals import guard_internals
from fedbn_flwr.deployment.sent_log import SentLog, read_log, rows_of
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.wire import LAYERWISE
from fedbn_flwr.wire.packed import pack
from tests.helpers.processes import largest_file

MODULE = importlib.import_module("flwr.supernode.start_client_internal")
APP = b"an app"
HASH = hashlib.sha256(APP).hexdigest()


class SuperNode:
    """Flower's functions around a node state and an object store, guarded, without a network."""

    def __init__(self, log: Path | None, *allowed: str) -> None:
        objects = ObjectStoreFactory()
        self.store, self.state = (
            objects.store(),
            NodeStateFactory(objectstore_factory=objects).state(),
        )
        self.state.set_node_id(7)
        self.module = ModuleType("guarded")
        for name in ("_pull_and_store_message", "_push_messages", "_insert_message"):
            setattr(self.module, name, getattr(MODULE, name))
        self.log = SentLog(log)
        guard_internals(self.module, self.log, allowed)
        self.sent: list[Message] = []
        self.on_send: Callable[[], None] = lambda: None
        #: whether the server wants objects, and after how many it is killed; which it has, each
        #: with its session
        self.stores_objects, self.forgets_after = False, -1
        self.pushed: dict[str, str] = {}

    def receive(self, content: RecordDict, kind: str = "train") -> Message:
        message = Message(content, dst_node_id=7, message_type=kind)
        message.metadata.__dict__["_run_id"] = 5
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = {key: item.deflate() for key, item in get_all_nested_objects(message).items()}
        self.module._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda run_id: Run.create_empty(run_id),
            get_fab=lambda hash_text, run_id: Fab(HASH, APP, {}),
            pull_object=lambda run_id, object_id: objects[object_id],
            confirm_message_received=lambda run_id, object_id: None,
            trusted_entities=None,
        )
        return message

    def reply(self, message: Message, content: RecordDict) -> None:
        MODULE._insert_message(Message(content, reply_to=message), self.state, self.store)
        self.push()

    def push(self) -> None:
        self.module._push_messages(
            state=self.state,
            object_store=self.store,
            send=self._send,
            push_object=self._push_object,
        )

    def _send(self, message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        self.on_send()
        self.sent.append(message)
        wanted = (
            {part.object_id for part in iterate_object_tree(tree)} if self.stores_objects else set()
        )
        return wanted - set(self.pushed), f"session {len(self.sent)}"

    def _push_object(self, run_id: int, session: str, object_id: str, content: bytes) -> None:
        if len(self.pushed) == self.forgets_after and len(self.sent) == 1:
            raise ObjectPushError(object_id, run_id, session)
        self.pushed[object_id] = session


@pytest.fixture(autouse=True)
def a_process_of_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Flower reads the identity of a process when it creates a message
    InProcessGrid(ClientApp(), 0)
    monkeypatch.setattr(MODULE, "get_fused_config_from_fab", lambda content, run: {})


def model() -> RecordDict:
    config = ConfigRecord({"server-round": 4, "lr": 0.1})
    return RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros(3, np.float32))}), "config": config}
    )


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_says_what_left_for_which_round_and_app(packed: bool, tmp_path: Path) -> None:
    log, seen = tmp_path / "sent.jsonl", []
    node = SuperNode(log)
    node.on_send = lambda: seen.append(log.read_text().count("\n"))
    arrays = {
        "w": Array(np.zeros((2, 2), np.float32)),
        "b": Array(np.zeros(2, np.float32)),
        "bn.count": Array(np.array(5, np.int64)),
    }
    metrics: dict[str, Any] = {"num-examples": 12, "train-loss": 0.5}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    node.reply(node.receive(model()), pack(content) if packed else content)
    (row,) = read_log(log)
    assert {key: row[key] for key in ("run", "round", "message", "app")} == {
        "run": "5",
        "round": 4,
        "message": "train",
        "app": HASH,
    }
    named = row["arrays"]["arrays"]
    assert (named["names"], named["count"]) == (["w", "b", "bn.count"], 3)
    # Flower's arrays are files of NumPy, whose headers take 128 bytes
    assert named["bytes"] == (2 if packed else 3) * 128 + 6 * 4 + 8
    assert row["bytes"] > named["bytes"]
    assert row["metrics"] == metrics
    # the line is there before the message leaves
    assert seen == [1]


def test_what_is_not_a_layout_is_in_the_line(tmp_path: Path) -> None:
    log, more = tmp_path / "sent.jsonl", '[["w", "<f4", [3], "Jane Doe"]]'
    node, content = SuperNode(log), model()
    content["packed"] = ConfigRecord({"version": 1, "patient": "Jane Doe", "arrays": more})
    node.reply(node.receive(model()), content)
    (row,) = read_log(log)
    assert row["packed"] == {"version": 1, "patient": "Jane Doe", "arrays": more}
    assert row["arrays"]["arrays"]["names"] == ["w"]


def test_a_message_that_cannot_be_recorded_is_not_sent(tmp_path: Path) -> None:
    node = SuperNode(tmp_path / "no" / "folder" / "sent.jsonl")
    node.reply(node.receive(model()), RecordDict())
    assert node.sent == []


def test_a_full_disk_costs_no_line_but_the_one_that_has_no_room(tmp_path: Path) -> None:
    log = tmp_path / "sent.jsonl"
    node = SuperNode(log)
    node.reply(node.receive(model()), RecordDict())
    with largest_file(log.stat().st_size + 10):
        node.reply(node.receive(model()), RecordDict())
    node.reply(node.receive(model()), RecordDict())
    assert len(node.sent) == 2
    assert [row["message"] for row in read_log(log)] == ["train", "train"]


def test_lines_that_are_none_or_that_a_failure_of_power_cut_off_are_named(tmp_path: Path) -> None:
    log = tmp_path / "sent.jsonl"
    log.write_text('[1]\n{"message": "train"}\n{"time": "2026-11-26T0')
    node = SuperNode(log)
    for _ in range(2):
        node.reply(node.receive(model()), RecordDict())
    assert [line.split("  ")[2:4] for line in rows_of(read_log(log))] == [
        ["unreadable lines", "messages 3"],
        ["train", "messages 2"],
    ]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_message_is_sent_again_where_the_server_has_forgotten_its_objects(
    after: int, tmp_path: Path
) -> None:
    node = SuperNode(tmp_path / "sent.jsonl")
    node.stores_objects, node.forgets_after = True, after
    node.reply(node.receive(model()), model())
    assert len(node.sent) == 2
    tree = {part.object_id for part in iterate_object_tree(get_object_tree(node.sent[-1]))} | set(
        node.pushed
    )
    assert set(node.pushed) == tree
    # it has left once
    assert len(list(read_log(tmp_path / "sent.jsonl"))) == 1


def test_an_app_that_the_site_does_not_allow_never_runs(tmp_path: Path) -> None:
    log = tmp_path / "sent.jsonl"
    node = SuperNode(log, "0" * 64)
    node.receive(model())
    # nothing was stored that a process for apps could fetch
    assert node.state.get_run(5) is None
    node.push()
    (sent,) = node.sent
    assert sent.error.reason == f"this site does not allow the app {HASH}"
    (row,) = read_log(log)
    assert (row["app"], row["error"]) == (HASH, sent.error.reason)


def test_an_app_that_the_site_allows_runs_without_a_log_too() -> None:
    node = SuperNode(None, "0" * 64, HASH)
    node.reply(node.receive(model()), RecordDict())
    assert [message.has_error() for message in node.sent] == [False]


def test_the_side_channel_leaves_its_bytes_in_the_log_of_the_step_that_opened_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "sent.jsonl"
    node = SuperNode(log)
    node.receive(model(), "evaluate")
    step = node.receive(model(), LAYERWISE)
    node.log.record_stream("opened", 0)
    node.reply(step, RecordDict())
    # the connection may end after the reply has been recorded
    node.log.record_stream("closed", 70_000)
    rows = [row for row in read_log(log) if row["message"].startswith("side channel")]
    assert [(row["run"], row["round"], row["app"], row["bytes"]) for row in rows] == [
        ("5", 4, HASH, 0),
        ("5", 4, HASH, 70_000),
    ]
    line = (
        f"run 5  round 4  side channel  messages 2  arrays 0  bytes 70000  metrics none  app {HASH}"
    )
    assert line in rows_of(read_log(log))


def test_rounds_are_added_up(tmp_path: Path) -> None:
    log = tmp_path / "sent.jsonl"
    node = SuperNode(log)
    for kind in ("train", "evaluate"):
        content = RecordDict(
            {"arrays": ArrayRecord({"w": Array(np.zeros(1))}), "metrics": MetricRecord({kind: 1.0})}
        )
        node.reply(node.receive(model(), kind), content)
    node.reply(node.receive(model(), "train"), RecordDict())
    sizes = [row["bytes"] for row in read_log(log)]
    assert rows_of(read_log(log)) == [
        f"run 5  round 4  train  messages 2  arrays 1  bytes {sizes[0] + sizes[2]}  metrics train "
        f" app {HASH}",
        f"run 5  round 4  evaluate  messages 1  arrays 1  bytes {sizes[1]}  metrics evaluate  app "
        f"{HASH}",
    ]
