"""What Flower's `Grid` promises, in one process and in several."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedbn_flwr.simulation.in_process import InProcessGrid, run_in_process
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from tests.helpers.obedient_nodes import answers, counting_app, obeying, question, send


@pytest.fixture(params=["one process", "this process and a worker"])
def grid(request: pytest.FixtureRequest) -> Iterator[InProcessGrid | WorkersGrid]:
    if request.param == "one process":
        yield obeying(5, range(5))
        return
    with WorkersGrid(partial(obeying, 5), 5, 2, here=True) as workers:
        yield workers


def test_it_is_a_grid_whose_nodes_are_there_at_once_with_contexts_of_their_own(
    grid: InProcessGrid | WorkersGrid,
) -> None:
    assert isinstance(grid, Grid)
    nodes = list(grid.get_node_ids())
    assert len(set(nodes)) == 5
    assert SUPERLINK_NODE_ID not in nodes
    assert [info.node_id for info in grid.get_nodes()] == nodes
    contexts = [grid.context(node) for node in nodes]
    assert [context.node_id for context in contexts] == nodes
    assert [context.node_config for context in contexts] == [
        {"partition-id": index, "num-partitions": 5} for index in range(5)
    ]
    for context in contexts:
        assert (context.run_id, context.run_config, dict(context.state)) == (
            grid.run.run_id,
            {"lr": 0.5},
            {},
        )


def test_replies_come_in_the_order_of_the_messages(grid: InProcessGrid | WorkersGrid) -> None:
    nodes = list(grid.get_node_ids())
    messages = [question(node, word) for node, word in zip(nodes[::-1], "abcde", strict=True)]
    replies = list(grid.send_and_receive(iter(messages), timeout=1.0))
    assert answers(replies) == [(1, word, 4 - index) for index, word in enumerate("abcde")]
    for message, reply in zip(messages, replies, strict=True):
        assert message.metadata.message_id != ""
        assert reply.metadata.reply_to_message_id == message.metadata.message_id
        assert reply.metadata.src_node_id == message.metadata.dst_node_id
        assert reply.metadata.dst_node_id == SUPERLINK_NODE_ID
        assert reply.metadata.run_id == grid.run.run_id
        assert reply.metadata.message_type == "train"
        assert reply.metadata.message_id not in ("", message.metadata.message_id)
    assert answers(send(grid, "again")) == [(2, "again", 0)]


def test_pushed_messages_have_ids_by_which_replies_are_pulled_once(
    grid: InProcessGrid | WorkersGrid,
) -> None:
    nodes = list(grid.get_node_ids())
    ids = list(
        grid.push_messages(question(node, word) for node, word in zip(nodes, "abcde", strict=True))
    )
    assert len(set(ids)) == 5
    assert answers(list(grid.pull_messages([ids[2], ids[0]]))) == [(1, "c", 2), (1, "a", 0)]
    assert len(list(grid.pull_messages(ids))) == 3
    assert list(grid.pull_messages(ids)) == []
    assert list(grid.pull_messages(["unheard-of"])) == []
    assert list(grid.push_messages([])) == []
    assert list(grid.send_and_receive([])) == []


def test_an_exception_is_an_error_reply_and_concerns_one_node(
    grid: InProcessGrid | WorkersGrid, flower_log: pytest.LogCaptureFixture
) -> None:
    replies = send(grid, "hello", "fail", "hello")
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert replies[1].error.reason == "LookupError: I was told to"
    assert replies[1].metadata.src_node_id == 1001
    # what a failed message had stored is lost
    assert answers(send(grid, "hello", "hello")) == [(2, "hello", 0), (1, "hello", 1)]
    # each process writes a log of its own
    if isinstance(grid, InProcessGrid):
        assert "node 1001 raised" in flower_log.text
        assert "I was told to" in flower_log.text


def test_what_does_not_exist_is_an_error_reply(grid: InProcessGrid | WorkersGrid) -> None:
    asked = [question(1000, kind="train.unheard_of"), question(5)]
    replies, alone = (list(each.send_and_receive(asked)) for each in (grid, obeying(5, range(5))))
    assert replies[1].metadata.src_node_id == 5
    for found, wanted in zip(replies, alone, strict=True):
        assert (found.error.code, found.error.reason) == (wanted.error.code, wanted.error.reason)


def test_what_a_mod_makes_of_a_reply_is_the_answer_to_the_message() -> None:
    def refusing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return Message(Error(0, "not so"), reply_to=call_next(message, context))

    def renewing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return Message(call_next(message, context).content, dst_node_id=7, message_type="train")

    for mod in (refusing, renewing):
        app = ClientApp(mods=[mod])
        app.train()(lambda message, _: Message(RecordDict(), reply_to=message))
        grid = InProcessGrid(app, 2)
        ids = list(grid.push_messages([question(node) for node in grid.get_node_ids()]))
        places = [reply.metadata for reply in grid.pull_messages(ids)]
        assert [(place.src_node_id, place.reply_to_message_id) for place in places] == [
            (1000, ids[0]),
            (1001, ids[1]),
        ]


def test_a_handler_without_a_reply_is_an_error_reply() -> None:
    app = ClientApp()
    app.train()(lambda message, context: None)  # type: ignore[arg-type, return-value]
    (reply,) = send(InProcessGrid(app, 1), "hello")
    assert reply.error.reason == "TypeError: a ClientApp must return a Message, not NoneType"


def test_messages_of_the_older_interface_and_runs(grid: InProcessGrid | WorkersGrid) -> None:
    content = RecordDict({"config": ConfigRecord({"word": "old"})})
    message = grid.create_message(content, "train", 1001, "round 3", ttl=60.0)
    metadata = message.metadata
    assert (metadata.run_id, metadata.src_node_id, metadata.dst_node_id) == (
        grid.run.run_id,
        SUPERLINK_NODE_ID,
        1001,
    )
    assert (metadata.message_type, metadata.group_id, metadata.ttl) == ("train", "round 3", 60.0)
    (reply,) = grid.send_and_receive([message])
    assert answers([reply]) == [(1, "old", 1)]
    assert reply.metadata.group_id == "round 3"
    run = Run.create_empty(run_id=7)
    grid.set_run(run)
    assert grid.run is run


def test_states_are_saved_and_restored_by_the_processes_that_have_them(
    grid: InProcessGrid | WorkersGrid, tmp_path: Path
) -> None:
    send(grid, *"abcd")
    before = [dict(grid.context(node).state) for node in grid.get_node_ids()]
    assert list(map(len, before)) == [1, 1, 1, 1, 0]
    grid.save_states(tmp_path)
    send(grid, *"vwxyz")
    # a folder of states is the same, whatever grid has written it
    others = obeying(5, range(5))
    for restored in (grid, others):
        restored.restore_states(tmp_path)
        assert [dict(restored.context(node).state) for node in restored.get_node_ids()] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{partition}.records" for partition in range(4)
    ]


def test_a_servers_main_runs_against_nodes_in_its_own_process() -> None:
    found = []

    def main(grid: Grid, context: Context) -> None:
        replies = grid.send_and_receive([question(node) for node in grid.get_node_ids()])
        found.append((answers(list(replies)), context.run_config, context.node_id))

    run_in_process(main, counting_app(), 2, {"lr": 0.5})
    assert found == [([(1, "hello", 0), (1, "hello", 1)], {"lr": 0.5}, SUPERLINK_NODE_ID)]
