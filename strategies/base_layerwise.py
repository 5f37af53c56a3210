"""Base of the strategies whose clients share BN statistics, layer by layer, in their first local step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import take_step
from fedbn_flwr.server.averaging import Arrays
from fedbn_flwr.server.replies import Group, NodeReply, Pooled, Refusal, log_refused, read_each
from fedbn_flwr.transports import LayerwiseGrid, NodesFailedError, NodesTransport, Participant
from fedbn_flwr.transports.message_records import StepPosition
from fedbn_flwr.transports.message_server import MessageTransport
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg

#: attempts at a layer-wise step, each without the nodes that failed, before the round is skipped
MAX_ATTEMPTS = 3

Contents = Mapping[int, RecordDict]


class Layerwise(FedAvg):
    """FedAvg with BN whose mean and variance, in each client's first local step of a round, are those of all clients.

    Each BN layer stops the step of every client until the server has combined the requests of all clients, under the
    weights with which it will average their models (see `fedbn_flwr.layerwise.SharedBatchNorm`). After the last answer
    a client takes its remaining E - 1 local steps, and replies with its model. All of it happens in `configure_train`,
    so Flower has nothing to send, and `aggregate_train` averages the models that are there. Each exchange may take
    `exchange_timeout` seconds, the last one with the remaining local steps too.

    If a node fails in the middle of the step, or sends what cannot be combined, the step starts again from the
    received model, with the other nodes: MAX_ATTEMPTS times in all, then the round is skipped. A node that fails only
    in the last exchange is left out of the average; what it sent before stays in the statistics of the others.
    """

    pools: ClassVar[tuple[Group, ...]] = (Group("the statistics of layer-wise steps"),)
    needs: str = "bn"
    #: what is exchanged at a BN layer: one of `fedbn_flwr.wire.LAYERWISE_MODES`
    mode: str = "fused"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if (self.arrayrecord_key, self.configrecord_key) != (wire.ARRAYS, wire.CONFIG):
            raise ValueError(f"{type(self).__name__} sends messages of its own, with 'arrays' and 'config' in them")
        #: what the nodes said of their numbers of samples in the step
        self._expected_replies: list[NodeReply] = []
        #: what the nodes replied at the end of the step
        self._final: list[Message] = []

    def instruct(self, instruction: Instruction) -> Instruction:
        """Share statistics, unless they stand still."""
        instruction = super().instruct(instruction)
        if instruction.freeze in ("statistics", "both"):
            return instruction
        return replace(instruction, layerwise=self.mode)

    def waits_for_others(self, instruction: Instruction) -> bool:
        """Return whether clients wait for each other in this round."""
        return instruction.layerwise != "none"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the model, and take all nodes through their local steps; return no messages."""
        self._final = []
        messages = super().configure_train(server_round, arrays, config, grid)
        if not messages or not self.waits_for_others(self.instruction):
            return messages
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        self._final = self._train(grid, contents)
        return []

    def collect(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Return what nodes sent at the end of the step."""
        return super().collect(self._final if self.waits_for_others(self.instruction) else replies)

    def update(self, pooled: Pooled) -> Arrays:
        """Update; also compare the nodes' weights with those in the step."""
        if self.waits_for_others(self.instruction):
            self._compare_weights(self.train_replies)
        return super().update(pooled)

    def weigh_participants(self, participants: Sequence[Participant]) -> list[float]:
        """Return the weights of the nodes' models before there are models: p_i, up to a common factor."""
        said = ((each.node, each.num_examples) for each in participants)
        if refused := read_each(said, self.round.expected.count_of)[1]:
            log_refused(refused)
            raise NodesFailedError([refusal.node for refusal in refused], refused)
        self._expected_replies = [
            NodeReply(each.node, each.partition, each.num_examples, {}, {}, RecordDict()) for each in participants
        ]
        return self.weigh(self._expected_replies)

    def _compare_weights(self, replies: Sequence[NodeReply]) -> None:
        """Warn if a node's weight in the step is not its weight in the average of the models."""
        before = {reply.node: reply.num_examples for reply in self._expected_replies}
        if not replies or before.keys() != {reply.node for reply in replies}:
            return
        total, total_before = sum(reply.num_examples for reply in replies), sum(before.values())
        for reply in replies:
            if reply.num_examples * total_before != before[reply.node] * total:
                log(
                    WARNING,
                    "Round %d: node %d counted %d of %d samples in the layer-wise step, but %d of %d in the average of "
                    "the models: give its ClientApp `num_examples`",
                    *(self.server_round, reply.node, before[reply.node], total_before, reply.num_examples, total),
                )
                return

    def _train(self, grid: Grid, contents: Contents) -> list[Message]:
        """Return the replies of the nodes that do not fail; none after MAX_ATTEMPTS.

        A grid that takes the step by itself leaves the nodes as before where it fails. Unless the failure names nodes,
        the step is then taken by messages, which find out which node failed.
        """
        reasons, why_not_common = list[Refusal](), ""
        common = grid if isinstance(grid, LayerwiseGrid) else None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                if common:
                    try:
                        if (replies := self._take_on_grid(common, contents, attempt)) is not None:
                            return replies
                    except NodesFailedError:
                        raise
                    except Exception as error:
                        failed = "Round %d: the nodes' common step failed, it is taken by messages: %s"
                        log(INFO, failed, self.server_round, error)
                        why_not_common = str(error)
                    common = None
                replies = self._take_by_messages(grid, contents, attempt)
                if why_not_common:
                    log(WARNING, "Layer-wise steps go by messages, which are slower: %s", why_not_common)
                return replies
            except NodesFailedError as failure:
                contents = {node: content for node, content in contents.items() if node not in failure.nodes}
                few = self.refuse_few(len(contents))
                reasons = [*few, *failure.reasons]
                if few or not contents:
                    break
        log(WARNING, "Round %d is skipped, its layer-wise step failed %d times", self.server_round, attempt)
        self._refused += reasons
        return []

    def _take_on_grid(self, grid: LayerwiseGrid, contents: Contents, attempt: int) -> list[Message] | None:
        """Take an attempt without messages for exchanges; None if the grid, or one behind it, cannot do it."""
        position = StepPosition(attempt).pack()
        self._sent = [
            Message(RecordDict({**content, **position}), node, wire.LAYERWISE) for node, content in contents.items()
        ]
        transport = grid.open_step(self._sent)
        return None if transport is None else self._take_step(transport)

    def _take_by_messages(self, grid: Grid, contents: Contents, attempt: int) -> list[Message]:
        # only the last of a step's replies holds more than requests
        expected = replace(self.round.expected, binding=(), groups=(), weighted_by=wire.NUM_EXAMPLES)
        transport = MessageTransport(grid, contents, attempt, self.exchange_timeout, expected)
        replies = self._take_step(transport)
        self._sent = transport.sent
        return replies

    def _take_step(self, transport: NodesTransport) -> list[Message]:
        return take_step(transport, lambda: self.weigh_participants(transport.participants), combiner=self.combiner)
