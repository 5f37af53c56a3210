"""An attempt at a layer-wise step by messages: what nodes are sent, and what is wrong with their replies."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import NoReturn

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import ExchangeError, Requests, join
from fedbn_flwr.layerwise.exchange import check
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.replies import Expected, Refusal, parse_replies
from fedbn_flwr.wire import Record
from fedbn_flwr.wire.layerwise import REQUEST, Content, StepPosition, lacks_arrays, read_request
from fedbn_flwr.wire.layerwise_grid import Participant

#: replies by node; a node that did not reply in time is absent
Replies = Mapping[int, Message]

#: seconds that a node has to forget a step
_ABANDON_TIMEOUT = 10.0


class NodesFailedError(RuntimeError):
    """Nodes failed in the middle of a step."""

    def __init__(self, nodes: Collection[int], reasons: Iterable[Refusal]) -> None:
        self.nodes, self.reasons = frozenset(nodes), list(reasons)
        super().__init__("; ".join(map(str, self.reasons)))


@dataclass(frozen=True)
class Broadcast:
    """The messages to all nodes at one position of the step."""

    position: StepPosition
    #: what nodes get beside the instruction: what is new, and everything, for nodes that have nothing
    news: Content
    everything: Callable[[], Content]


@dataclass
class LayerwiseAttempt:
    """An attempt at a step, in which every node must take part until the step ends."""

    grid: Grid
    #: the content of a plain training message to each node
    contents: Mapping[int, RecordDict]
    attempt: int
    #: whether the round is skipped if this attempt fails
    is_last_attempt: bool
    #: seconds that nodes have to reply, each time
    timeout: float
    expected: Expected
    #: the nodes in the order of their partitions, from the first replies on
    participants: list[Participant] = field(default_factory=list)
    #: the messages of the last broadcast
    sent: list[Message] = field(default_factory=list)
    _answering: frozenset[int] = frozenset()
    _failed: frozenset[int] = frozenset()

    def ask(self, broadcast: Broadcast) -> Replies:
        """Send a broadcast and wait for the replies; a node that lacks arrays is sent everything again."""
        self.sent = self._messages(broadcast, self.contents, whole=broadcast.position.index == 0)
        replies = ask_nodes(self.grid, self.sent, self.timeout)
        self._answering = frozenset(node for node, reply in replies.items() if reply.has_content())
        lacking = [node for node in self._answering if lacks_arrays(replies[node].content)]
        if not lacking:
            return replies
        again = self._messages(broadcast, lacking, whole=True)
        completed = ask_nodes(self.grid, again, self.timeout)
        self.sent = [*self.sent, *again]
        return {**{node: reply for node, reply in replies.items() if node not in lacking}, **completed}

    def is_at_end(self, replies: Replies) -> bool:
        """Return whether most nodes have sent their models."""
        contents = [reply.content for reply in replies.values() if reply.has_content()]
        requesting = sum(REQUEST in content for content in contents)
        return len(contents) - requesting >= max(requesting, 1)

    def final_replies(self, replies: Replies) -> list[Message]:
        """Return the replies with models, and errors; a node without is left out, as in plain training."""
        for node in self.contents.keys() - replies.keys():
            leave_out(node, "it did not answer in time")
        for node, reply in replies.items():
            if reply.has_content() and REQUEST in reply.content:
                leave_out(node, "it is at a BN layer where the others are at their end")
        return [reply for reply in replies.values() if reply.has_error() or REQUEST not in reply.content]

    def read_requests(self, replies: Replies) -> Requests:
        """Return every node's request, in the order of `participants`.

        NodesFailedError names the nodes whose requests are missing, cannot be read, or cannot be combined with the
        others'.
        """
        reasons = [leave_out(node, "it did not answer in time") for node in self.contents.keys() - replies.keys()]
        usable, refused = parse_replies(replies.values(), self._nodes(), self.expected)
        requests: dict[int, Requests] = {}
        for reply in usable:
            try:
                requests[reply.node] = read_request(reply.content)
            except ValueError as error:
                reasons.append(leave_out(reply.node, str(error)))
        if missing := self.contents.keys() - requests.keys():
            self.fail(missing, [*reasons, *refused])
        try:
            joined = join_nodes(requests)
        except NodesFailedError as failure:
            self._failed = failure.nodes
            raise
        if not self.participants:
            self.participants = [Participant(reply.partition, reply.node, reply.num_examples) for reply in usable]
        return joined

    def abandon(self) -> None:
        """Let nodes forget the step; a node that is about to start again is spared the message."""
        nodes = self._answering if self.is_last_attempt else self._answering & self._failed
        position = StepPosition("abandon", self.attempt)
        if messages := [self._message(node, position, {}) for node in nodes]:
            ask_nodes(self.grid, messages, min(self.timeout, _ABANDON_TIMEOUT))

    def fail(self, nodes: Collection[int], reasons: Iterable[Refusal]) -> NoReturn:
        """Raise NodesFailedError."""
        self._failed = frozenset(nodes)
        raise NodesFailedError(nodes, reasons)

    def _messages(self, broadcast: Broadcast, nodes: Iterable[int], whole: bool = False) -> list[Message]:
        content = broadcast.everything() if whole else broadcast.news
        return [
            self._message(node, broadcast.position, {**self.contents[node], **content} if whole else content)
            for node in nodes
        ]

    def _message(self, node: int, position: StepPosition, content: Mapping[str, Record]) -> Message:
        record = RecordDict({**self.contents[node].config_records, **position.pack(), **content})
        return Message(record, dst_node_id=node, message_type=wire.LAYERWISE)

    def _nodes(self) -> dict[str, int]:
        return {message.metadata.message_id: message.metadata.dst_node_id for message in self.sent}


def join_nodes(requests: Mapping[int, Requests]) -> Requests:
    """Return all nodes' requests as one batch; NodesFailedError names all nodes that are in the way of it."""
    sound, reasons = dict(requests), list[Refusal]()
    while True:
        try:
            joined = join(list(sound.values()))
            check(joined)
            break
        except ExchangeError as error:
            node = list(sound)[error.client]
            reasons.append(leave_out(node, error.reason))
            del sound[node]
            if not sound:
                break
    if reasons:
        raise NodesFailedError([refusal.node for refusal in reasons], reasons)
    return joined


def leave_out(node: int, reason: str) -> Refusal:
    """Say in the log why a node is left out, and return it."""
    log(WARNING, "Node %d is left out of this round: %s", node, reason)
    return Refusal(node, reason)
