"""Faults of a node in a layer-wise step, for every engine."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode

from fedbn_flwr import wire
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid
from fedbn_flwr.transports import message_records as layerwise_wire
from fedbn_flwr.transports.message_records import StepPosition

#: the node with partition 1, in one process
FAULTY = 1001

Fault = Callable[[Message], Message | None]


def silent(_: Message) -> None:
    return None


def _sent(reply: Message) -> tuple[str, ArrayRecord]:
    """Return the name of the arrays in a request, or in the reply at the end of a step, and
    them.
    """
    group = layerwise_wire.REQUEST if layerwise_wire.REQUEST in reply.content else wire.ARRAYS
    return group, reply.content.array_records[group]


def lies(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Return a fault that changes the first array that the node sends."""

    def fault(reply: Message) -> Message:
        group, record = _sent(reply)
        name = next(iter(record))
        reply.content[group] = ArrayRecord({**record, name: Array(change(record[name].numpy()))})
        return reply

    return fault


def too_large(values: np.ndarray) -> np.ndarray:
    """Return finite values whose squares overflow."""
    return np.full_like(values, np.finfo(values.dtype).max / 2)


def elsewhere(reply: Message) -> Message:
    """Name another layer, or another model, in the reply."""
    group, record = _sent(reply)
    reply.content[group] = ArrayRecord({f"another.{name}": array for name, array in record.items()})
    return reply


class Faulty(InProcessGrid):
    """A grid in which one node's reply has a fault, at one exchange of every attempt."""

    node, index = FAULTY, 0
    message_type: str = wire.LAYERWISE
    fault: Fault = staticmethod(silent)
    rounds: Iterable[int] = (1,)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            if self.is_spoiled(message):
                answer = self.spoiled(message, self._replies.pop(message_id))
                if answer is not None:
                    self._replies[message_id] = answer
        return ids

    def spoiled(self, message: Message, reply: Message) -> Message | None:
        """Return what the node sends in the place of its reply."""
        return type(self).fault(reply)

    def is_spoiled(self, message: Message) -> bool:
        """Return whether the reply to this message has the fault."""
        if message.metadata.message_type != self.message_type:
            return False
        turn, instruction = (
            StepPosition.of(message.content),
            message.content.config_records[wire.CONFIG],
        )
        if instruction["server-round"] not in tuple(self.rounds):
            return False
        return self.due(message.metadata.dst_node_id, turn)

    def due(self, node: int, turn: StepPosition) -> bool:
        """Return whether the fault belongs to this node and this exchange."""
        return (node, turn.index) == (self.node, self.index)


class FaultyReply(Faulty):
    """A grid in which one node's reply to every message of a type has a fault."""

    def is_spoiled(self, message: Message) -> bool:
        """Return whether the message is of the type, and goes to the node."""
        return (message.metadata.dst_node_id, message.metadata.message_type) == (
            self.node,
            self.message_type,
        )


#: changes a reply to a message
Spoil = Callable[[Message, Message], Message]


def infinite(_: Message, reply: Message) -> Message:
    if not reply.content.array_records:
        return reply  # to a message that ends a layer-wise step
    spoiled = lies(lambda values: values * np.nan)(reply)
    assert spoiled is not None
    return spoiled


def failed(message: Message, _: Message) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no power"), reply_to=message)


def spoiling(
    spoil: Spoil,
    spoils: Callable[[int, int], bool],
    kinds: Sequence[str] = ("train", wire.LAYERWISE),
    base: type[InProcessGrid] = InProcessGrid,
) -> type[InProcessGrid]:
    """A grid that spoils the replies of some partitions in some rounds, counted from 1, to messages
    of some kinds.
    """

    class Grid(base):  # type: ignore[valid-type, misc]
        def _answer(self, message: Message) -> Message:
            reply: Message = super()._answer(message)
            if message.metadata.message_type not in kinds:
                return reply
            asked: Any = message.content[wire.CONFIG]
            spoiled = spoils(message.metadata.dst_node_id - FIRST_NODE_ID, asked["server-round"])
            return spoil(message, reply) if spoiled else reply

    return Grid


class Without(InProcessGrid):
    """A grid to which one node never connects."""

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node != FAULTY]
