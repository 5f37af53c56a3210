"""The server's end of a layer-wise step by messages: one message a node and exchange.

The nodes' end is in `message_client.py`, the records of the messages in `message_records.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Answer, Requests, Transport
from fedbn_flwr.layerwise.exchange import ExchangeError, check_requests, join_requests
from fedbn_flwr.server.grids import ask_nodes, passing
from fedbn_flwr.server.replies import (
    Expected,
    Refusal,
    log_left_out,
    log_refused,
    parse_replies,
    read_each,
)
from fedbn_flwr.transports import NodesFailedError, Participant
from fedbn_flwr.transports.message_records import (
    LACKS_ARRAYS,
    REQUEST,
    Content,
    StepPosition,
    pack_answers,
    read_request,
)

#: replies by node; a node that did not reply in time is absent
RepliesByNode = Mapping[int, Message]


@dataclass
class MessageTransport(Transport[Message]):
    """A `NodesTransport` over messages, in one attempt of a round, in which every node must take
    part until the end.

    `advance` raises NodesFailedError if nodes fail, are late, or send what cannot be combined. A
    node that fails only in the last exchange has no final reply, and the step ends without the
    node.
    """

    grid: Grid
    #: the content of a plain training message to each node
    contents: Mapping[int, RecordDict]
    attempt: int
    #: seconds that nodes have to reply, each time
    timeout: float
    expected: Expected
    #: the nodes in the order of their partitions, from the first requests on
    participants: list[Participant] = field(default_factory=list)
    #: the messages of the latest exchange
    sent: list[Message] = field(default_factory=list)
    _answers: list[Answer] = field(default_factory=list)
    _final: list[Message] = field(default_factory=list)

    def advance(self, answer: Answer | None = None) -> Requests | None:
        """Send every node the answer, and return the nodes' next requests."""
        if answer is not None:
            self._answers.append(answer)
        replies = self._ask()
        if _is_at_end(replies):
            self._final = self._final_replies(replies)
            return None
        return self._read_requests(replies)

    def replies(self) -> list[Message]:
        """Return the nodes' final replies."""
        self.abandon()
        return self._final

    def abandon(self) -> None:
        """End the attempt; the steps that wait on nodes end with the first message of the next
        one.
        """
        front = passing(self.grid)
        if front:
            front.end_attempt()

    def _ask(self) -> RepliesByNode:
        """Send the latest answer and wait for the replies.

        A node that lacks arrays is sent everything again.
        """
        number = len(self._answers)
        position = StepPosition(self.attempt, number)
        latest = {}
        if self._answers:
            latest = pack_answers({str(number - 1): self._answers[-1]})
        self.sent = self._messages(position, self.contents, latest, whole=number == 0)
        replies = ask_nodes(self.grid, self.sent, self.timeout)
        answers = {node: reply for node, reply in replies.items() if reply.has_content()}
        lacking = [
            node
            for node, reply in answers.items()
            if LACKS_ARRAYS in reply.content.get(wire.REPORT, {})
        ]
        if not lacking:
            return replies
        every = pack_answers({str(index): answer for index, answer in enumerate(self._answers)})
        again = self._messages(position, lacking, every, whole=True)
        completed = ask_nodes(self.grid, again, self.timeout)
        self.sent = [*self.sent, *again]
        return {
            **{node: reply for node, reply in replies.items() if node not in lacking},
            **completed,
        }

    def _messages(
        self, position: StepPosition, nodes: Iterable[int], answers: Content, whole: bool = False
    ) -> list[Message]:
        """Return the messages to nodes: the instruction and answers, with the arrays too if they
        are to be `whole`.
        """
        messages = []
        for node in nodes:
            content = self.contents[node]
            records = RecordDict(
                {**(content if whole else content.config_records), **position.pack(), **answers}
            )
            messages.append(Message(records, dst_node_id=node, message_type=wire.LAYERWISE))
        return messages

    def _read_requests(self, replies: RepliesByNode) -> Requests:
        """Return every node's request, in the order of `participants`.

        NodesFailedError names the nodes whose requests are missing, cannot be read, or cannot be
        combined with the others'.
        """
        reasons = [
            log_left_out(node, "it did not answer in time")
            for node in self.contents.keys() - replies.keys()
        ]
        usable, refused = parse_replies(replies.values(), self.sent, self.expected)
        requests, unread = read_each(
            ((reply.node, reply.content) for reply in usable), lambda _, it: read_request(it)
        )
        log_refused([*refused, *unread])
        missing = self.contents.keys() - requests.keys()
        if missing:
            raise NodesFailedError(missing, [*reasons, *refused, *unread])
        joined = _join(requests)
        if not self.participants:
            self.participants = [
                Participant(reply.partition, reply.node, reply.num_examples) for reply in usable
            ]
        return joined

    def _final_replies(self, replies: RepliesByNode) -> list[Message]:
        """Return the replies with models, and errors.

        A node without a model is left out, as in plain training.
        """
        for node in self.contents.keys() - replies.keys():
            log_left_out(node, "it did not answer in time")
        for node, reply in replies.items():
            if reply.has_content() and REQUEST in reply.content:
                log_left_out(node, "it is at a BN layer where the others are at their end")
        return [
            reply for reply in replies.values() if reply.has_error() or REQUEST not in reply.content
        ]


def _is_at_end(replies: RepliesByNode) -> bool:
    """Return whether most nodes have sent their models."""
    contents = [reply.content for reply in replies.values() if reply.has_content()]
    requesting = sum(REQUEST in content for content in contents)
    return len(contents) - requesting >= max(requesting, 1)


def _join(requests: Mapping[int, Requests]) -> Requests:
    """Return all nodes' requests as one batch; NodesFailedError names every node that is in the way
    of it.
    """
    sound = dict(requests)
    refused = list[Refusal]()
    while sound:
        try:
            joined = join_requests(list(sound.values()))
            check_requests(joined)
        except ExchangeError as error:
            node = list(sound)[error.client]
            refused.append(Refusal(node, error.reason, error.why))
            del sound[node]
        else:
            break
    if refused:
        log_refused(refused)
        raise NodesFailedError([refusal.node for refusal in refused], refused)
    return joined
