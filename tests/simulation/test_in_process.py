"""The in-process grid keeps what Flower's `Grid` promises."""

import logging

import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedbn_flwr.simulation.in_process import InProcessGrid, run_in_process
from tests.helpers.obedient_nodes import answers, counting_app, question


@pytest.fixture
def grid() -> InProcessGrid:
    return InProcessGrid(counting_app(), num_nodes=3, run_config={"lr": 0.5})


def test_it_is_a_grid_whose_nodes_are_there_at_once(grid: InProcessGrid) -> None:
    assert isinstance(grid, Grid)
    nodes = list(grid.get_node_ids())
    assert len(set(nodes)) == 3
    assert SUPERLINK_NODE_ID not in nodes
    assert [info.node_id for info in grid.get_nodes()] == nodes


def test_every_node_has_a_context_of_its_own(grid: InProcessGrid) -> None:
    contexts = [grid.context(node) for node in grid.get_node_ids()]
    assert [context.node_config for context in contexts] == [
        {"partition-id": index, "num-partitions": 3} for index in range(3)
    ]
    assert [context.node_id for context in contexts] == list(grid.get_node_ids())
    assert all(context.run_config == {"lr": 0.5} for context in contexts)
    assert len({id(context.state) for context in contexts}) == 3


def test_replies_come_to_the_messages_that_were_sent(grid: InProcessGrid) -> None:
    nodes = list(grid.get_node_ids())
    messages = [question(node, word) for node, word in zip(nodes, "abc", strict=True)]
    replies = list(grid.send_and_receive(iter(messages), timeout=1.0))
    assert answers(replies) == [(1, "a", 0), (1, "b", 1), (1, "c", 2)]
    for message, reply in zip(messages, replies, strict=True):
        assert reply.metadata.reply_to_message_id == message.metadata.message_id
        assert reply.metadata.src_node_id == message.metadata.dst_node_id
        assert reply.metadata.dst_node_id == SUPERLINK_NODE_ID
        assert reply.metadata.run_id == grid.run.run_id
        assert reply.metadata.message_type == "train"
        assert reply.metadata.message_id not in ("", message.metadata.message_id)


def test_pushed_messages_have_ids_by_which_replies_are_pulled_once(grid: InProcessGrid) -> None:
    nodes = list(grid.get_node_ids())
    ids = list(grid.push_messages(question(node, word) for node, word in zip(nodes, "abc", strict=True)))
    assert len(set(ids)) == 3
    assert answers(list(grid.pull_messages([ids[2], ids[0]]))) == [(1, "c", 2), (1, "a", 0)]
    assert answers(list(grid.pull_messages(ids))) == [(1, "b", 1)]
    assert list(grid.pull_messages(ids)) == []
    assert list(grid.pull_messages(["unheard-of"])) == []


def test_contexts_persist_from_message_to_message(grid: InProcessGrid) -> None:
    first, second, _ = grid.get_node_ids()
    for _ in range(2):
        grid.send_and_receive([question(first)])
    replies = list(grid.send_and_receive([question(first), question(second)]))
    assert [answer[0] for answer in answers(replies)] == [3, 1]
    other = InProcessGrid(counting_app(), num_nodes=3)
    assert answers(list(other.send_and_receive([question(first)])))[0][0] == 1


def test_an_exception_is_an_error_reply_and_concerns_one_node(
    grid: InProcessGrid, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = grid.get_node_ids()
    # Flower's logger does not pass on to the root logger
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    replies = list(grid.send_and_receive([question(first), question(second, "fail"), question(third)]))
    logger.removeHandler(caplog.handler)
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert replies[1].error.reason == "LookupError: I was told to"
    assert replies[1].metadata.src_node_id == second
    assert f"node {second} raised" in caplog.text
    assert "I was told to" in caplog.text


def test_a_node_goes_on_after_an_exception_from_where_it_was_before(grid: InProcessGrid) -> None:
    first, *_ = grid.get_node_ids()
    grid.send_and_receive([question(first)])
    grid.send_and_receive([question(first, "fail")])
    assert grid.context(first).state.metric_records["count"]["messages"] == 1
    assert answers(list(grid.send_and_receive([question(first)]))) == [(2, "hello", 0)]


def test_an_action_that_does_not_exist_is_an_error_reply(grid: InProcessGrid) -> None:
    first, *_ = grid.get_node_ids()
    (reply,) = grid.send_and_receive([question(first, kind="train.unheard_of")])
    assert reply.has_error()


def test_a_node_that_does_not_exist_is_an_error_reply(grid: InProcessGrid) -> None:
    (reply,) = grid.send_and_receive([question(5)])
    assert reply.has_error()


def test_nothing_sent_is_nothing_received(grid: InProcessGrid) -> None:
    assert list(grid.push_messages([])) == []
    assert list(grid.send_and_receive([])) == []


def test_messages_of_the_older_interface(grid: InProcessGrid) -> None:
    first, *_ = grid.get_node_ids()
    content = RecordDict({"config": ConfigRecord({"word": "old"})})
    message = grid.create_message(content, "train", first, "round 3", ttl=60.0)
    metadata = message.metadata
    assert (metadata.run_id, metadata.src_node_id, metadata.dst_node_id) == (grid.run.run_id, SUPERLINK_NODE_ID, first)
    assert (metadata.message_type, metadata.group_id, metadata.ttl) == ("train", "round 3", 60.0)
    (reply,) = grid.send_and_receive([message])
    assert answers([reply]) == [(1, "old", 0)]
    assert reply.metadata.group_id == "round 3"


def test_a_run_can_be_set(grid: InProcessGrid) -> None:
    run = Run.create_empty(run_id=7)
    grid.set_run(run)
    assert grid.run is run


def test_a_servers_main_runs_against_nodes_in_its_own_process() -> None:
    found = []

    def main(grid: Grid, context: Context) -> None:
        replies = grid.send_and_receive([question(node) for node in grid.get_node_ids()])
        found.append((answers(list(replies)), context.run_config, context.node_id))

    run_in_process(main, counting_app(), 2, {"lr": 0.5})
    assert found == [([(1, "hello", 0), (1, "hello", 1)], {"lr": 0.5}, SUPERLINK_NODE_ID)]
