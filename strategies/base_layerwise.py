"""Base of the strategies whose clients share BN statistics, layer by layer, in their first local step."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from logging import WARNING
from typing import Annotated, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Answer, respond
from fedbn_flwr.server.layerwise_round import Conversation, Dialogue, NodesFailedError, Push
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire import layerwise as turns
from fedbn_flwr.wire.layerwise import Turn

from .fedavg import FedAvg


class Layerwise(FedAvg):
    """FedAvg with BN whose mean and variance, in each client's first local step of a round, are those of all clients.

    Each BN layer stops the step of every client until the server has combined what all of them say (see
    `fedbn_flwr.layerwise.SharedBatchNorm`) under the weights with which it will average their models. The first local
    step, then the remaining E - 1 plain ones; the last answer is delivered by Flower, so that the models come to
    `aggregate_train` as they do in FedAvg.

    If a node fails in the middle of the step, or says what cannot be combined, the step starts again from the
    received model, with the other nodes: `max_attempts` times in all, then the round is skipped. A node that fails
    only in the last exchange is left out of the average. With `fresh_optimizer`, the optimizer's state of the
    layer-wise step is not used in the steps after it. Between messages, nodes keep up to `replay_limit` megabytes of
    received arrays in Flower's `Context.state`, and ask for larger ones again where a process has lost its step.
    """

    #: what is exchanged at a BN layer: one of `fedbn_flwr.wire.LAYERWISE_MODES`
    mode: ClassVar[str] = "fused"

    def __init__(
        self,
        *,
        max_attempts: Annotated[
            int, "how often a layer-wise step is started, without the nodes that failed, before a round is skipped"
        ] = 3,
        fresh_optimizer: Annotated[
            bool, "use another optimizer for the layer-wise step than for the steps after it"
        ] = False,
        replay_limit: Annotated[float, "megabytes of arrays that a node keeps to replay a suspended step"] = 16.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if max_attempts < 1 or replay_limit < 0:
            raise ValueError(
                f"max_attempts must be at least 1 and replay_limit not negative, got {max_attempts} and {replay_limit}"
            )
        self.max_attempts, self.fresh_optimizer, self.replay_limit = max_attempts, fresh_optimizer, replay_limit
        self._conversation: Conversation | None = None
        self._final: list[Message] = []

    def instruct(self, instruction: Instruction) -> Instruction:
        """Share statistics, unless they stand still."""
        instruction = super().instruct(instruction)
        if instruction.freeze in ("statistics", "both"):
            return instruction
        return replace(
            instruction,
            layerwise=self.layerwise_mode(),
            fresh_optimizer=self.fresh_optimizer,
            replay_limit=self.replay_limit,
        )

    def layerwise_mode(self) -> str:
        """What is exchanged at a BN layer in this round."""
        return self.mode

    def converse(self, talk: Dialogue) -> Conversation:
        """One attempt, from the first message to the models."""
        return exchanges(talk)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Do all exchanges but the last, whose messages are returned."""
        messages = super().configure_train(server_round, arrays, config, grid)
        self._conversation, self._final = None, []
        if not messages or self.instruction.layerwise == "none":
            return messages
        self._conversation = self._attempts({message.metadata.dst_node_id: message.content for message in messages})
        return self._go_on(None)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the models; where there are no models yet, go on until there are."""
        if self.instruction.layerwise == "none":
            return super().aggregate_train(server_round, replies)
        while self._conversation is not None:
            messages = self._go_on(list(replies))
            assert self.grid is not None
            replies = self.grid.send_and_receive(messages, timeout=self.exchange_timeout) if messages else []
        return super().aggregate_train(server_round, self._final)

    def _go_on(self, replies: list[Message] | None) -> list[Message]:
        """The messages that are to be delivered next, none if the conversation is over."""
        assert self._conversation is not None
        try:
            return next(self._conversation) if replies is None else self._conversation.send(replies)
        except StopIteration as end:
            self._conversation, self._final = None, end.value
            return []

    def _attempts(self, start: Mapping[int, RecordDict]) -> Conversation:
        assert self.grid is not None
        if (replies := self._together(start)) is not None:
            return replies
        # only the last of a step's replies holds more than what is said of the layers
        expected = replace(self._expected, groups=())
        reasons: list[str] = []
        for attempt in range(1, self.max_attempts + 1):
            talk = Dialogue(self.grid, start, attempt, self.exchange_timeout, self.weigh, expected)
            try:
                final = yield from self.converse(talk)
                self._sent = talk.sent
                return final
            except NodesFailedError as failure:
                reasons = failure.reasons
                start = {node: content for node, content in start.items() if node not in failure.nodes}
                again = bool(start) and attempt < self.max_attempts
                # a step that starts again takes the place of the one before
                talk.abandon(talk.answered & failure.nodes if again else talk.answered)
                if not again:
                    break
        failed = "Round %d is skipped, its layer-wise step failed %d times: %s"
        log(WARNING, failed, self.server_round, attempt, "; ".join(reasons))
        self._refused += reasons
        return []

    def _together(self, start: Mapping[int, RecordDict]) -> list[Message] | None:
        """The final replies, where a grid takes all nodes from exchange to exchange without messages.

        If a node fails, nothing has happened: the step is then taken by messages, which find out who it was.
        """
        assert self.grid is not None
        open_step = getattr(self.grid, "open_step", None)
        if open_step is None or self.layerwise_mode() == "sweeps":
            return None
        turn = Turn("exchange", 1).pack()
        contents = {node: RecordDict({**content, **turn}) for node, content in start.items()}
        self._sent = [Message(content, node, wire.LAYERWISE) for node, content in contents.items()]
        step = open_step(self._sent)
        if step is None:
            return None
        speakers = list(zip(contents.items(), step.speakers, strict=True))
        entrants = [
            NodeReply(node, who.partition, who.num_examples, {}, {}, content) for (node, content), who in speakers
        ]
        # in the order in which replies to messages are combined
        order = sorted(range(len(entrants)), key=lambda place: (entrants[place].partition, entrants[place].node))
        weights = self.weigh([entrants[place] for place in order])
        try:
            said = step.advance()
            while said:
                said = step.advance(respond([said[place] for place in order], weights))
        except Exception as error:
            step.abandon()
            log(
                WARNING,
                "Round %d: the nodes' common step failed, it is taken by messages: %s",
                self.server_round,
                error,
            )
            return None
        replies: list[Message] = step.replies()
        return replies


def exchanges(talk: Dialogue) -> Conversation:
    """Answer request after request, each once for all nodes, until the models come."""
    known: dict[str, Answer] = {}
    answers = talk.ask(_push(talk, known))
    while not talk.at_end(answers):
        said = talk.said(answers)
        pooled = list(talk.pooled(said).values())
        if len(pooled) != 1:
            raise NodesFailedError(said, [f"the nodes speak of {len(pooled)} layers at once"])
        known[str(len(known))] = pooled[0]
        push = _push(talk, known)
        if all(turns.foresees_end(answer.content) for answer in answers.values()):
            answers = yield from talk.ask_through_flower(push)
        else:
            answers = talk.ask(push)
    return talk.models(answers)


def _push(talk: Dialogue, known: Mapping[str, Answer]) -> Push:
    """The last answer; what a node needs that has lost the others, is only packed if there is one."""
    latest = turns.pack_answers(turns.ANSWERS, dict([*known.items()][-1:])) if known else {}
    everything = partial(turns.pack_answers, turns.ANSWERS, known)
    return Push(Turn("exchange", talk.attempt, len(known)), lambda _: latest, lambda _: everything() if known else {})
