"""Base of the strategies whose clients share BN statistics, layer by layer, in their first local
step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import take_step
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.server.pooling import Pooled, Sent, name_dominant
from fedbn_flwr.server.replies import Expected, NodeReply
from fedbn_flwr.state import Arrays
from fedbn_flwr.transports import (
    NodesFailedError,
    NodesTransport,
    Participant,
    is_unable,
    open_step,
)
from fedbn_flwr.transports.message_server import MessageTransport
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg

#: attempts at a layer-wise step, each without the nodes that failed, before the round is skipped
MAX_ATTEMPTS = 3


class Layerwise(FedAvg):
    """FedAvg with BN whose mean and variance, in each client's first local step of a round, are
    those of all clients.

    Each BN layer stops the step of every client until the server has combined the requests of all
    clients, under the weights with which it will average their models (see
    `fedbn_flwr.layerwise.SharedBatchNorm`). After the last answer a client takes its remaining E -
    1 local steps, and replies with its model. All of it happens in `ask`. Each exchange may take
    `exchange_timeout` seconds, the last one with the remaining local steps too.

    If a node fails in the middle of the step, or sends what cannot be combined, the step starts
    again from the received model, with the other nodes: MAX_ATTEMPTS times in all, then the round
    is skipped. A node that fails only in the last exchange is left out of the average; what it sent
    before stays in the statistics of the others.
    """

    sends: ClassVar[tuple[Sent, ...]] = (Sent("the statistics of layer-wise steps"),)
    needs: str = "bn"
    #: what is exchanged at a BN layer: one of `fedbn_flwr.wire.LAYERWISE_MODES`
    mode: str = "fused"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if (self.arrayrecord_key, self.configrecord_key) != (wire.ARRAYS, wire.CONFIG):
            raise ValueError(
                f"{type(self).__name__} sends messages of its own, with 'arrays' and 'config' in "
                "them"
            )

    def instruct(self, instruction: Instruction) -> Instruction:
        """Share statistics, unless they stand still."""
        instruction = super().instruct(instruction)
        if instruction.freeze in ("statistics", "both"):
            return instruction
        return replace(instruction, layerwise=self.mode)

    def ask(self, grid: Grid, messages: Sequence[Message], timeout: float) -> Iterable[Message]:
        """Take the nodes that wait for each other through their step, and return what they sent at
        its end.
        """
        if not self.round.instruction.waits_for_others:
            return super().ask(grid, messages, timeout)
        self.round.was_asked = True
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._take_step(grid, messages, attempt)
            except NodesFailedError as failure:
                messages = [
                    message
                    for message in messages
                    if message.metadata.dst_node_id not in failure.nodes
                ]
                few = self.averager.refuse_few(len(messages), self.round.number)
                reasons = [*few, *failure.reasons]
                if few or not messages:
                    break
        log(
            WARNING,
            "Round %d is skipped after attempt %d at its layer-wise step",
            self.round.number,
            attempt,
        )
        self.round.refused += reasons
        return []

    def _weigh_participants(self, participants: Sequence[Participant]) -> list[float]:
        """Return the weights of the nodes' models before there are models: p_i, up to a common
        factor.
        """
        replies = [
            NodeReply(each.node, each.partition, each.num_examples, {}, {}, RecordDict())
            for each in participants
        ]
        self.round.counted = {reply.node: reply.num_examples for reply in replies}
        weights = self.weigh(replies)
        name_dominant(dict(zip(self.round.counted, weights, strict=True)), "the layer-wise step")
        return weights

    def update(self, pooled: Pooled) -> Arrays:
        """Update; also compare the nodes' weights with those in the step."""
        if self.round.instruction.waits_for_others:
            self._compare_weights(pooled.replies)
        return super().update(pooled)

    def _compare_weights(self, replies: Sequence[NodeReply]) -> None:
        """Warn if a node's weight in the step is not its weight in the average of the models."""
        before = self.round.counted
        if not replies or before.keys() != {reply.node for reply in replies}:
            return
        total = sum(reply.num_examples for reply in replies)
        total_before = sum(before.values())
        for reply in replies:
            count = before[reply.node]
            # another node's new number changes every share
            if reply.num_examples != count and reply.num_examples * total_before != count * total:
                log(
                    WARNING,
                    "Round %d: node %d counted %d of %d samples in the layer-wise step, but %d of "
                    "%d in the average of the models: give its ClientApp `num_examples`",
                    self.round.number,
                    reply.node,
                    count,
                    total_before,
                    reply.num_examples,
                    total,
                )
                return

    def _take_step(self, grid: Grid, messages: Sequence[Message], attempt: int) -> list[Message]:
        """Take the nodes through the step, without messages for exchanges where the grid can.

        A grid that takes the step by itself leaves the nodes as before where it fails. Unless the
        failure names nodes, the step is then taken by messages, which find out which node failed,
        and so are later attempts. Where none did and the grid should have been able to take the
        step, the grid's failure ends the run.
        """
        failure: Exception | None = None
        if not self.round.by_messages:
            try:
                transport = open_step(grid, messages)
                if transport is not None:
                    self.round.messages = list(messages)
                    return self._answer(transport)
            except NodesFailedError:
                raise
            except Exception as error:
                failed = "Round %d: the nodes' common step failed, it is taken by messages: %s"
                log(INFO, failed, self.round.number, error)
                failure = error
        self.round.by_messages = True
        # only the last of a step's replies holds more than requests
        last = self.round.expected
        expected = Expected((), last.arrays, last.arrays_key)
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        by_messages = MessageTransport(grid, contents, attempt, self.exchange_timeout, expected)
        replies = self._answer(by_messages)
        self.round.messages = by_messages.sent
        if failure and not is_unable(failure):
            raise failure
        if failure:
            warn_once(f"Layer-wise steps go by messages, which are slower: {failure}")
        return replies

    def _answer(self, transport: NodesTransport) -> list[Message]:
        """Answer all exchanges of a step, and return the nodes' replies."""
        return take_step(
            transport,
            lambda: self._weigh_participants(transport.participants),
            combiner=self.averager.combiner,
        )
