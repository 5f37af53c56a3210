"""Clients that train stage by stage: a reply that cannot be packed, and two messages to one
node.
"""

from collections.abc import Mapping

import pytest
import torch
from flwr.app import Message, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.layerwise import Exchange
from fedbn_flwr.simulation.in_process import OneByOneGrid
from fedbn_flwr.state import State
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import INSTRUCTION, Federation, make_model
from tests.strategies.test_contract import becomes


class Unspeakable(BNClient):
    """Stores something, and says what no message can hold."""

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        reply = super().train(received, instruction, exchange)
        self.memory.store("stored", {"value": torch.ones(1)})
        reply.metrics["unspeakable"] = object()  # type: ignore[assignment]
        return reply


def test_a_reply_that_cannot_be_packed_is_an_error_of_its_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = Federation(make_model(), wrap=becomes(Unspeakable, 1), grid=OneByOneGrid)
    nodes.run(FedAvg(fraction_evaluate=0.0), 1)
    assert any("Node 1001 is left out" in text for text in caplog.messages)
    assert not nodes.grid.context(1001).state


class Remembering(BNClient):
    """Counts how often it trained."""

    def train(
        self,
        received: Mapping[str, State],
        instruction: Instruction,
        exchange: Exchange | None = None,
    ) -> Reply:
        count = self.memory.recall("count").get("count", torch.zeros(1)) + 1
        self.memory.store("count", {"count": count})
        reply = super().train(received, instruction, exchange)
        reply.metrics["count"] = float(count)
        return reply


def test_a_nodes_second_message_finds_what_the_first_left() -> None:
    nodes = Federation(make_model(), wrap=becomes(Remembering), grid=OneByOneGrid)
    content = RecordDict({wire.ARRAYS: nodes.initial, wire.CONFIG: INSTRUCTION.to_config()})
    messages = [Message(content, node, "train") for node in (1000, 1001, 1000)]
    replies = {
        reply.metadata.reply_to_message_id: reply for reply in nodes.grid.send_and_receive(messages)
    }
    said = [
        replies[message.metadata.message_id].content.metric_records[wire.METRICS]
        for message in messages
    ]
    assert [metrics["count"] for metrics in said] == [1, 1, 2]
