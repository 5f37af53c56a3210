"""The server's end of sums under masks: strategies see one reply in place of all, the mean of the nodes that count.

The nodes' end is `fedbn_flwr/client/gate.py`, the protocol is in `fedbn_flwr/secure`, the messages are described in
`fedbn_flwr/wire/masked.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.secure import Participants, decode
from fedbn_flwr.secure.fixed_point import Limbs, sum_of
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.passing_grid import PassingGrid
from fedbn_flwr.wire import masked
from fedbn_flwr.wire.masked import Form, Summed, Terms


class SumFailedError(RuntimeError):
    """A sum that needs all nodes has not come about; `reasons` are by node."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"node {node}: {reason}" for node, reason in reasons.items()))
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class _MaskedReply:
    """What a node has sent for a sum."""

    form: Form
    partition: int
    hidden: Limbs
    sealed: Sequence[bytes]
    commitments: Sequence[bytes]


class SecureGrid(PassingGrid):
    """A grid in front of another one, which lets the server see nothing but sums over at least `minimum` nodes.

    `terms` says how the replies of a push are summed. Whoever asks several nodes gets one reply, to
    the message of the first of them, with the mean; and errors of the nodes that do not count.
    """

    def __init__(self, grid: Grid, terms: Callable[[], Terms], minimum: int, timeout: float) -> None:
        super().__init__(grid)
        self._terms, self._minimum, self._timeout = terms, minimum, timeout
        #: by node, the public key for its next sum, and the signature
        self._keys: dict[int, tuple[bytes, bytes]] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the mean of the nodes' replies, and errors."""
        return list(self.ask(list(messages), self._timeout if timeout is None else timeout).values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: what is pulled later would be replies of single nodes."""
        raise RuntimeError("with secure=true, nodes are asked by `send_and_receive`, which returns a mean of replies")

    def open_step(self, messages: Sequence[Message]) -> "MaskedStep | None":
        """Open a layer-wise step without messages, of which the server sees sums; None where the grid has none."""
        if not self.masks_steps:
            return None
        sent = {message.metadata.dst_node_id: message for message in messages}
        if self._meet(sent, self._timeout):
            return None  # the step by messages names the nodes
        asked = self._begin_sum(sent, tuple(sent))
        grid: Any = self._grid
        step = grid.open_step(messages)

        def opened(replies: Sequence[Message]) -> list[Message]:
            by_node = {ids[reply.metadata.reply_to_message_id]: reply for reply in replies}
            return list(self._sum(sent, tuple(sent), asked, by_node, {}, self._timeout).values())

        ids = {message.metadata.message_id: node for node, message in sent.items()}
        return None if step is None else MaskedStep(step, opened)

    def ask(self, messages: Sequence[Message], timeout: float) -> dict[int, Message]:
        """Return the mean of the nodes' replies, by the first of the nodes, and errors by node.

        SumFailedError names the nodes that are missing in a sum that needs all of them.
        """
        if not messages:
            return {}
        if masked.is_control(messages[0]):
            for message in messages:
                message.content[masked.SECURE] = ConfigRecord({"minimum": self._minimum})
            return ask_nodes(self._grid, messages, timeout)
        sent = {message.metadata.dst_node_id: message for message in messages}
        refused = self._meet(sent, timeout)
        nodes = tuple(node for node in sent if node not in refused)
        if not nodes:
            return self._errors(sent, refused)
        asked = self._begin_sum(sent, nodes)
        replies = ask_nodes(self._grid, [sent[node] for node in nodes], timeout)
        return self._sum(sent, nodes, asked, replies, refused, timeout)

    def _sum(
        self,
        sent: Mapping[int, Message],
        nodes: tuple[int, ...],
        asked: Mapping[str, Any],
        replies: Mapping[int, Message],
        refused: dict[int, str],
        timeout: float,
    ) -> dict[int, Message]:
        """Return the mean of the replies that count, and errors."""
        parts, others = dict[int, _MaskedReply](), dict[int, Message]()
        for node, reply in replies.items():
            if reply.has_error():
                refused[node] = reply.error.reason or "it failed"
            elif masked.MASKED not in reply.content:
                others[node] = reply  # a sign, such as that of a node that lacks arrays
            else:
                try:
                    parts[node] = _read(reply.content, len(nodes))
                    self._keys[node] = _key_in(reply.content.config_records[f"{masked.MASKED}-form"])
                except Exception as error:  # what a node sends may be anything
                    parts.pop(node, None)
                    refused[node] = f"its masked reply cannot be read: {type(error).__name__}: {error}"
        parts = _of_one_form(parts, refused)
        is_exchange = any(part.form.kind for part in parts.values())
        silent = {node: "it did not answer in time" for node in nodes if node not in replies}
        if is_exchange and len(parts) < len(nodes) and not others:
            raise SumFailedError(refused | silent)
        if not parts or (others and is_exchange):
            return others | self._errors(sent, refused)
        participants = Participants(b"", tuple(asked["nodes"]), tuple(asked["keys"]))
        total = sum_of(part.hidden for part in parts.values())
        form = next(iter(parts.values())).form
        try:
            if not is_exchange:
                total = self._unmask(total, parts, participants, asked, sent, timeout)
            content = _mean(form, total, {node: part.partition for node, part in parts.items()})
        except SumFailedError as failure:
            log(WARNING, "A sum was not opened: %s", failure)
            return others | self._errors(sent, refused | failure.reasons)
        first = next(iter(parts))
        return {first: Message(content, reply_to=sent[first])} | others | self._errors(sent, refused)

    def _meet(self, sent: Mapping[int, Message], timeout: float) -> dict[int, str]:
        """Ask the nodes for their public keys that were not asked yet; return why nodes have none."""
        new = [node for node in sent if node not in self._keys]
        refused: dict[int, str] = {}
        if new:
            question = {masked.SECURE: ConfigRecord({"minimum": self._minimum})}
            questions = [Message(_of_round(sent[node], question), node, masked.SECURE_QUERY) for node in new]
            answers = ask_nodes(self._grid, questions, timeout)
            for node in new:
                answer = answers.get(node)
                if answer is None or answer.has_error():
                    refused[node] = (
                        "it did not answer in time" if answer is None else answer.error.reason or "it failed"
                    )
                    continue
                try:
                    self._keys[node] = _key_in(answer.content.config_records.get(masked.MASKED, {}))
                except (KeyError, ValueError):
                    refused[node] = "its app knows no sums under masks: make it with fedbn_flwr.clientapp"
            log(INFO, "%d nodes have keys for sums under masks", len(self._keys))
        known = [node for node in sent if node in self._keys]
        if len(known) < self._minimum:
            few = f"a sum of {len(known)} nodes would show too much of each: {self._minimum} at least"
            refused |= dict.fromkeys(known, few)
        return refused

    def _begin_sum(self, sent: Mapping[int, Message], nodes: Sequence[int]) -> dict[str, Any]:
        """Let the messages ask for a new sum, and return what they say of it."""
        keys = [self._keys.pop(node) for node in nodes]
        asked: dict[str, Any] = {
            **vars(self._terms()),
            "minimum": self._minimum,
            "nodes": list(nodes),
            "keys": [key for key, _ in keys],
            "signatures": [signature for _, signature in keys],
        }
        for node in nodes:
            sent[node].content[masked.SECURE] = ConfigRecord(dict(asked))
        return asked

    def _unmask(
        self,
        total: Limbs,
        parts: Mapping[int, _MaskedReply],
        participants: Participants,
        asked: Mapping[str, Any],
        sent: Mapping[int, Message],
        timeout: float,
    ) -> Limbs:
        """Take away the masks that do not cancel; SumFailedError if too few nodes help."""
        # cryptography takes a while to import, and every ClientApp's process imports strategies
        from fedbn_flwr.secure import masks

        survivors, place = list(parts), {node: index for index, node in enumerate(participants.nodes)}
        absent = [node for node in participants.nodes if node not in parts]
        needed = max(self._minimum, masks.threshold(len(place)))
        if len(survivors) < needed:
            reason = f"replies of {len(survivors)} of {len(place)} nodes came, and a sum needs {needed}"
            raise SumFailedError(dict.fromkeys(survivors, reason))
        questions = []
        for node in survivors:
            sealed = [parts[sender].sealed[place[node]] for sender in survivors]
            question = {masked.SECURE: ConfigRecord({**asked, "survivors": survivors, "sealed": sealed})}
            questions.append(Message(_of_round(sent[node], question), node, masked.SECURE_QUERY))
        shares: dict[int, Sequence[bytes]] = {}
        seeds: dict[tuple[int, int], bytes] = {}
        why: dict[int, str] = {}
        answers = ask_nodes(self._grid, questions, timeout)
        for node in survivors:
            answer = answers.get(node)
            if answer is None or answer.has_error():
                said_why = "no answer in time" if answer is None else answer.error.reason
                why[node] = f"it did not help to open the sum: {said_why}"
                continue
            said: Any = answer.content.config_records.get(masked.MASKED, {})
            given, known = said.get("shares", []), said.get("seeds", [])
            if not _are_bytes(given, len(survivors)) or not _are_bytes(known, len(absent)):
                why[node] = "it did not help to open the sum: its answer is of another sum"
                continue
            shares[node] = given
            seeds |= {(node, other): seed for other, seed in zip(absent, known, strict=True)}
        for node, reason in why.items():
            log(WARNING, "Node %d: %s", node, reason)
        if absent and why:
            raise SumFailedError(
                {node: f"{reason}; without it, masks with nodes {absent} do not cancel" for node, reason in why.items()}
            )
        own = []
        for index, owner in enumerate(survivors):
            commitments = parts[owner].commitments
            seed, wrong = masks.open_shares(
                {node: given[index] for node, given in shares.items()}, commitments, participants
            )
            for node in wrong if len(wrong) == 1 else [owner] if wrong else []:
                # one share may be wrong by its holder, or by its owner, who said what it is
                why[node] = f"the shares of node {owner}'s mask at nodes {wrong} are not those that it announced"
                log(WARNING, "Node %d: %s", node, why[node])
            if seed is None:
                raise SumFailedError(why or dict.fromkeys(survivors, f"too few shares of node {owner}'s mask"))
            own.append(seed)
        return masks.cancel(total, participants, own, seeds)

    def _errors(self, sent: Mapping[int, Message], reasons: Mapping[int, str]) -> dict[int, Message]:
        """Return errors in place of replies."""
        return {
            node: Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=sent[node])
            for node, reason in reasons.items()
        }


class MaskedStep:
    """A layer-wise step of another grid, whose exchanges are sums; `opened` makes one reply of all."""

    def __init__(self, step: Any, opened: Callable[[Sequence[Message]], list[Message]]) -> None:
        self._step, self._opened = step, opened
        self.advance, self.abandon = step.advance, step.abandon

    @property
    def participants(self) -> Any:
        """The participants: one, in the place of all."""
        return self._step.participants

    def replies(self) -> list[Message]:
        """Return the mean of the nodes' replies, and errors."""
        return self._opened(self._step.replies())


def sum_exchange(requests: Mapping[int, Any]) -> Summed:
    """Return the mean of requests under masks, given by node with `form`, `partition` and `hidden`.

    SumFailedError names the nodes whose requests do not fit.
    """
    refused, parts = dict[int, str](), dict[int, _MaskedReply]()
    for node, each in requests.items():
        try:
            parts[node] = _MaskedReply(_fitting(each.form, each.hidden), each.partition, each.hidden, (), ())
        except ValueError as error:
            refused[node] = str(error)
    _of_one_form(parts, refused)
    if refused:
        raise SumFailedError(refused)
    total = sum_of(part.hidden for part in parts.values())
    form = next(iter(parts.values())).form
    return _mean(form, total, {node: part.partition for node, part in parts.items()})


def _of_round(message: Message, records: Mapping[str, Any]) -> RecordDict:
    """Return records beside what a message says of its round and run, by which nodes find what they have kept."""
    config = message.content.get(wire.CONFIG)
    return RecordDict({**records, **({} if config is None else {wire.CONFIG: config})})


def _read(content: RecordDict, nodes: int) -> _MaskedReply:
    """Return a node's masked reply among so many nodes; an error if it is none."""
    said: Any = content.config_records[f"{masked.MASKED}-form"]
    hidden = content.array_records[masked.MASKED]["sum"].numpy()
    form, shares, commitments = _fitting(said["form"], hidden), said.get("shares", []), said.get("commitments", [])
    if not all(_are_bytes(values, 0 if form.kind else nodes) for values in (shares, commitments)):
        raise ValueError(f"it does not hold {nodes} shares")
    return _MaskedReply(form, int(said["partition"]), hidden, shares, commitments)


def _are_bytes(values: object, count: int) -> bool:
    """Return whether a node has sent so many strings of bytes."""
    return isinstance(values, list) and len(values) == count and all(isinstance(value, bytes) for value in values)


def _key_in(said: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return a node's next public key with its signature; an error if there is none."""
    # cryptography takes a while to import, and every ClientApp's process imports strategies
    from fedbn_flwr.secure import masks

    key, signature = said["key"], said["signature"]
    if not isinstance(key, bytes) or not masks.is_key(key) or not isinstance(signature, bytes):
        raise ValueError(f"its key is {key!r}")
    return key, signature


def _fitting(text: str, hidden: Limbs) -> Form:
    """Return the form of masked numbers; ValueError if they are not of it."""
    form = Form.read(text)
    if hidden.dtype != np.uint64 or hidden.shape != (2, form.size):
        raise ValueError(f"{hidden.dtype} of the shape {hidden.shape} where uint64 of {(2, form.size)} is due")
    return form


def _of_one_form(parts: dict[int, _MaskedReply], refused: dict[int, str]) -> dict[int, _MaskedReply]:
    """Return the replies of the form that most have; the others are refused."""
    forms = Counter(part.form.pack() for part in parts.values())
    if len(forms) <= 1:
        return parts
    common = forms.most_common(1)[0][0]
    refused |= {
        node: "unlike most, its masked reply has other entries"
        for node, part in parts.items()
        if part.form.pack() != common
    }
    return {node: part for node, part in parts.items() if node not in refused}


def _mean(form: Form, total: Limbs, nodes: Mapping[int, int]) -> Summed:
    """Return the mean reply; SumFailedError if masks are left in the sum."""
    numbers = decode(total)
    if numbers[0] != len(nodes):
        reason = "the masks do not cancel: a node was given other participants or keys, or sent a wrong seed"
        raise SumFailedError(dict.fromkeys(nodes, reason))
    try:
        return masked.to_content(form, numbers, nodes)
    except ValueError as error:
        raise SumFailedError(dict.fromkeys(nodes, str(error))) from None
