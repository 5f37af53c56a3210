"""A grid that packs arrays for the nodes that can unpack them: the same bits in fewer arrays."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp as FlowersApp

from fedbn_flwr import wire
from fedbn_flwr.server.packing_grid import PackingGrid
from fedbn_flwr.strategies import FedAvg, FedTAN, Scaffold
from fedbn_flwr.wire.packed import PACKED
from tests.helpers.harness import Federation, Traffic, make_model


def arrays_of(message: Message) -> int:
    return sum(map(len, message.content.array_records.values()))


@pytest.mark.parametrize("kind", [FedTAN, Scaffold])
def test_a_run_has_the_same_bits_in_fewer_arrays(kind: type[FedAvg]) -> None:
    bare, packed = (Federation(make_model(), grid=Traffic) for _ in range(2))
    wanted = bare.run(kind())
    found = packed.run(kind(), grid=PackingGrid(packed.grid))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    plain: Any = bare.grid
    seen: Any = packed.grid
    assert [message.metadata.message_type for message in seen.sent] == [
        each.metadata.message_type for each in plain.sent
    ]
    assert all(arrays_of(message) <= 4 for message in seen.sent[4:])
    assert all(arrays_of(reply) <= 4 for reply in seen.replies)


def test_a_node_whose_app_does_not_know_it_gets_arrays_as_they_are() -> None:
    app, nodes = FlowersApp(), Federation(make_model())

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    grid = PackingGrid(Traffic(app, 2))
    for _ in range(2):
        contents = {node: RecordDict({wire.ARRAYS: nodes.initial}) for node in grid.get_node_ids()}
        messages = [Message(content, node, "evaluate") for node, content in contents.items()]
        assert [arrays_of(reply) for reply in grid.send_and_receive(messages)] == [
            len(nodes.initial)
        ] * 2


def test_a_packed_reply_that_cannot_be_read_is_the_nodes_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaking(Traffic):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies[:1]:
                layouts: Any = reply.content[PACKED]
                layouts[wire.ARRAYS] = "[]"
            return replies

    nodes = Federation(make_model(), grid=Breaking)
    strategy = FedAvg(fraction_evaluate=0.0)
    nodes.run(strategy, 1, grid=PackingGrid(nodes.grid))
    assert len(strategy.training.replies) == 3
    assert "it sent packed arrays that do not fit their layout" in caplog.text
