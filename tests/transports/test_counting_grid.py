"""What is counted is what is really sent."""

from collections.abc import Mapping

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.run import Run
from numpy.typing import NDArray

from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import arrays_to_record
from fedbn_flwr.state.records import payload_bytes
from fedbn_flwr.transports.counting_grid import CountingGrid, Traffic, paper_bytes
from fedbn_flwr.wire import DESCRIBE, GATHER

Arrays = Mapping[str, NDArray[np.generic]]

#: 6 * 4 + 8 + 5 * 2 + 3 * 1 + 0 bytes
MIXED: Arrays = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "counter": np.asarray(7, dtype=np.int64),
    "half": np.arange(5, dtype=np.float16),
    "mask": np.array([True, False, True]),
    "nothing": np.zeros((0, 3), dtype=np.float32),
}
MIXED_BYTES = 45


def echo_app() -> ClientApp:
    """Sends everything back, with some metrics; fails where it is told to."""
    app = ClientApp()

    def answer(message: Message, _: Context) -> Message:
        content = message.content
        if content.config_records["config"].get("fail"):
            raise RuntimeError("told to")
        metrics = MetricRecord({"loss": 0.5, "num-examples": 12})
        return Message(RecordDict({**content.array_records, "metrics": metrics}), reply_to=message)

    app.train()(answer)
    app.train("gather")(answer)
    app.evaluate()(answer)
    app.query("describe")(answer)
    return app


def message(
    node: int, arrays: Arrays, kind: str = "train", **config: str | int | float | bool
) -> Message:
    record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    return Message(RecordDict({"arrays": record, "config": ConfigRecord(dict(config))}), node, kind)


def distinct(shapes: int = 5, seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return {f"layer.{index}": generator.random((index + 1, 3)) for index in range(shapes)}


@pytest.fixture
def grid() -> CountingGrid:
    return CountingGrid(InProcessGrid(echo_app(), num_nodes=2))


def test_payload_is_the_bytes_of_the_numbers(grid: CountingGrid) -> None:
    assert sum(payload_bytes(Array(np.asarray(value))) for value in MIXED.values()) == MIXED_BYTES
    grid.send_and_receive([message(node, MIXED) for node in grid.get_node_ids()])
    assert (grid.training.payload_down, grid.training.payload_up) == (
        2 * MIXED_BYTES,
        2 * MIXED_BYTES,
    )
    assert grid.training.payload == 4 * MIXED_BYTES


def test_papers_count_what_nodes_have_in_common_once_and_counters_never() -> None:
    common = {"shared": np.ones((2, 3), np.float32), "counter": np.array(7)}
    flat = [arrays_to_record({**common, "own": np.full(4, float(node))}) for node in (1, 2, 2)]
    plain = [
        ArrayRecord({name: Array(array.numpy()) for name, array in each.items()}) for each in flat
    ]
    model = arrays_to_record(common)
    for groups in (flat, plain):
        messages = [
            Message(RecordDict({"arrays": model, "carried": own}), 1, "train") for own in groups
        ]
        # the model, what the nodes' own groups have in common, and what two of them have alone
        assert paper_bytes(messages) == 2 * 3 * 4 + 2 * 3 * 4 + 2 * 4 * 8
    assert (
        paper_bytes([Message(RecordDict({"arrays": model, "carried": flat[0]}), 1, "train")])
        == 2 * 24 + 32
    )


def test_training_and_evaluation_are_counted_apart(grid: CountingGrid) -> None:
    node, _ = grid.get_node_ids()
    grid.send_and_receive([message(node, MIXED, kind="evaluate")])
    assert grid.training == Traffic()
    assert grid.evaluation.payload == 2 * MIXED_BYTES
    grid.send_and_receive([message(node, MIXED, kind=GATHER)])
    assert (grid.training.exchanges, grid.training.payload) == (1, 2 * MIXED_BYTES)
    assert (grid.evaluation.exchanges, grid.evaluation.payload) == (1, 2 * MIXED_BYTES)


def test_asking_who_nodes_are_is_not_counted(grid: CountingGrid) -> None:
    node, _ = grid.get_node_ids()
    grid.send_and_receive([message(node, MIXED, kind=DESCRIBE)])
    list(grid.pull_messages(grid.push_messages([message(node, MIXED, kind=DESCRIBE)])))
    assert grid.training == grid.evaluation == Traffic()


def test_pushing_and_pulling_counts_as_sending_and_receiving(grid: CountingGrid) -> None:
    nodes = list(grid.get_node_ids())
    ids = list(grid.push_messages(message(node, distinct()) for node in nodes))
    assert grid.training.payload_up == 0
    assert len(list(grid.pull_messages(ids))) == 2
    assert list(grid.pull_messages(ids)) == []
    other = CountingGrid(InProcessGrid(echo_app(), num_nodes=2))
    other.send_and_receive(message(node, distinct()) for node in nodes)
    assert grid.training == other.training
    assert grid.training.exchanges == 1
    grid.send_and_receive([])
    list(grid.push_messages([]))
    assert grid.training.exchanges == 1


def test_a_node_that_fails_sends_no_arrays(grid: CountingGrid) -> None:
    first, second = grid.get_node_ids()
    replies = grid.send_and_receive([message(first, MIXED), message(second, MIXED, fail=True)])
    assert [reply.has_error() for reply in replies] == [False, True]
    assert (grid.training.payload_down, grid.training.payload_up) == (2 * MIXED_BYTES, MIXED_BYTES)


def test_tallies_are_subtracted_number_by_number_and_copied() -> None:
    later, earlier = Traffic(5, 40, 30, 60), Traffic(1, 10, 20, 30)
    assert later - earlier == Traffic(4, 30, 10, 30)
    copy = later.copy()
    later.exchanges += 1
    assert copy == Traffic(5, 40, 30, 60)


def test_everything_else_is_the_grids_own(grid: CountingGrid) -> None:
    run = Run.create_empty(run_id=9)
    grid.set_run(run)
    assert grid.run is run
    node, *_ = grid.get_node_ids()
    created = grid.create_message(RecordDict(), "train", node, "group", 5.0)
    assert (created.metadata.dst_node_id, created.metadata.group_id, created.metadata.ttl) == (
        node,
        "group",
        5.0,
    )
