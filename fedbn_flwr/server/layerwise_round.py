"""One attempt at a layer-wise step: the messages to its nodes, and what is wrong with their answers."""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Answer, ExchangeError, Report, pool
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.replies import Expected, NodeReply, parse_replies
from fedbn_flwr.wire import Record
from fedbn_flwr.wire import layerwise as turns
from fedbn_flwr.wire.layerwise import Content, Turn

Answers = Mapping[int, Message]
#: yields the messages that Flower shall deliver, is sent the answers, and returns the nodes' final replies
Conversation = Generator[list[Message], Iterable[Message], list[Message]]

#: seconds that a node has to forget a step
_ABANDON_TIMEOUT = 10.0


class NodesFailedError(RuntimeError):
    """Nodes failed in the middle of a step."""

    def __init__(self, nodes: Collection[int], reasons: Iterable[str]) -> None:
        self.nodes, self.reasons = frozenset(nodes), list(reasons)
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True)
class Push:
    """What all nodes get at one point of the step."""

    turn: Turn
    #: what one node gets beside the instruction, and what a node that must be told everything
    news: Callable[[int], Content]
    everything: Callable[[int], Content]


@dataclass
class Dialogue:
    """The messages and answers of one attempt, in which every node must take part until the models come."""

    grid: Grid
    #: the content of a plain training message to each node
    start: Mapping[int, RecordDict]
    attempt: int
    timeout: float
    weigh: Callable[[Sequence[NodeReply]], list[float]]
    expected: Expected
    #: each node's weight, from its first answer on
    weights: dict[int, float] = field(default_factory=dict)
    #: the messages of the last push, and the nodes that gave an answer to it
    sent: list[Message] = field(default_factory=list)
    answered: frozenset[int] = frozenset()

    def ask(self, push: Push) -> Answers:
        """Send, wait, and return the answers by node."""
        self.sent = self._messages(push, self.start, whole=push.turn.index == 0)
        return self._completed(push, ask_nodes(self.grid, self.sent, self.timeout))

    def ask_through_flower(self, push: Push) -> Generator[list[Message], Iterable[Message], Answers]:
        """The same, delivered by Flower."""
        self.sent = self._messages(push, self.start)
        replies = yield self.sent
        return self._completed(push, {self._nodes()[reply.metadata.reply_to_message_id]: reply for reply in replies})

    def at_end(self, answers: Answers) -> bool:
        """Whether most nodes have sent their models."""
        contents = [answer.content for answer in answers.values() if answer.has_content()]
        requests = sum(turns.SAID in content for content in contents)
        return len(contents) - requests >= max(requests, 1)

    def models(self, answers: Answers) -> list[Message]:
        """The final replies; a node that has none is left out, as in plain training."""
        for node in self.start.keys() - answers.keys():
            _leave_out(node, "it did not answer in time")
        for node, answer in answers.items():
            if answer.has_content() and turns.SAID in answer.content:
                _leave_out(node, "it is at a BN layer where the others are at their end")
        return [answer for answer in answers.values() if answer.has_error() or turns.SAID not in answer.content]

    def said(self, answers: Answers) -> dict[int, Report]:
        """What every node says, in the order of the partitions; an error names those from which it is missing."""
        reasons = [_leave_out(node, "it did not answer in time") for node in self.start.keys() - answers.keys()]
        replies, refused = parse_replies(answers.values(), self._nodes(), self.expected)
        said = {}
        for reply in replies:
            try:
                said[reply.node] = turns.read_said(reply.content)
            except ValueError as error:
                reasons.append(_leave_out(reply.node, str(error)))
        if failed := self.start.keys() - said.keys():
            raise NodesFailedError(failed, [*reasons, *refused])
        if not self.weights:
            self.weights = dict(zip(said, self.weigh(replies), strict=True))
        return said

    def pooled(self, said: Mapping[int, Report]) -> dict[str, Answer]:
        """The answer to every layer; nodes whose words cannot be combined with those of the others have failed."""
        sound, reasons = dict(said), {}
        while sound:
            try:
                answers = pool(list(sound.values()), [self.weights[node] for node in sound])
            except ExchangeError as error:
                node = list(sound)[error.client]
                reasons[node] = _leave_out(node, str(error).partition(": ")[2])
                del sound[node]
            else:
                break
        if reasons:
            raise NodesFailedError(reasons, reasons.values())
        return answers

    def abandon(self, nodes: Iterable[int]) -> None:
        """Let nodes forget the step."""
        turn = Turn("abandon", self.attempt)
        messages = [self._message(node, turn, {}) for node in nodes]
        if messages:
            ask_nodes(self.grid, messages, min(self.timeout, _ABANDON_TIMEOUT))

    def _messages(self, push: Push, nodes: Iterable[int], whole: bool = False) -> list[Message]:
        return [
            self._message(node, push.turn, {**self.start[node], **push.everything(node)} if whole else push.news(node))
            for node in nodes
        ]

    def _message(self, node: int, turn: Turn, content: Mapping[str, Record]) -> Message:
        record = RecordDict({**self.start[node].config_records, **turn.pack(), **content})
        return Message(record, dst_node_id=node, message_type=wire.LAYERWISE)

    def _completed(self, push: Push, answers: Answers) -> Answers:
        """Tell everything to the nodes that have lost what they were told, and take their answers to that."""
        self.answered = frozenset(node for node, answer in answers.items() if answer.has_content())
        lost = [node for node in self.answered if turns.lacks_arrays(answers[node].content)]
        if not lost:
            return answers
        again = self._messages(push, lost, whole=True)
        told = ask_nodes(self.grid, again, self.timeout)
        self.sent = [*self.sent, *again]
        return {**{node: answer for node, answer in answers.items() if node not in lost}, **told}

    def _nodes(self) -> dict[str, int]:
        return {message.metadata.message_id: message.metadata.dst_node_id for message in self.sent}


def _leave_out(node: int, reason: str) -> str:
    log(WARNING, "Node %d is left out of this round: %s", node, reason)
    return f"node {node}: {reason}"
