"""The server's end of sums under masks: strategies see one reply in place of all, the mean of the nodes that count.

The nodes' end is `fedbn_flwr/client/gate.py`, the protocol is in `fedbn_flwr/secure`, the messages are described in
`fedbn_flwr/wire/masked.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.secure import Participants
from fedbn_flwr.secure.fixed_point import Limbs, decode, sum_of
from fedbn_flwr.server.ask_nodes import ask_nodes
from fedbn_flwr.server.averaging import unusable, view_arrays
from fedbn_flwr.server.passing_grid import PassingGrid
from fedbn_flwr.server.replies import ReadT, Refusal, RefusedError, log_refused, read_each, whole
from fedbn_flwr.state.records import array_records, view_array
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
    sealed: Sequence[bytes] = ()
    commitments: Sequence[bytes] = ()


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
        #: the latest round, and the nodes of its latest sum: no others answer in this round
        self._counted: tuple[int, Sequence[int]] = -1, ()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the mean of the nodes' replies, and errors."""
        return list(self.ask(list(messages), self._timeout if timeout is None else timeout).values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: what is pulled later would be replies of single nodes."""
        raise RuntimeError("with secure=true, nodes are asked by `send_and_receive`, which returns a mean of replies")

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
        is_step = messages[0].metadata.message_type == wire.LAYERWISE
        if refused and is_step:
            raise SumFailedError(refused)  # before the others have taken a mini-batch for nothing
        if not nodes:
            return self._errors(sent, refused)
        asked = self._begin_sum(sent, nodes)
        replies = ask_nodes(self._grid, [sent[node] for node in nodes], timeout)
        sign = masked.LACKS_ARRAYS if is_step else wire.LACKS_STATE
        heard = _read(nodes, replies, refused, lambda node, content: self._read_reply(node, content, len(nodes), sign))
        parts = _of_one_form({node: each for node, each in heard.items() if each}, refused)
        others = {node: replies[node] for node, each in heard.items() if not each}
        if is_step:  # arrays are sent again to all, or to none
            fewer: dict[int, Any] = others if len(others) <= len(parts) else parts
            refused |= dict.fromkeys(fewer, "unlike most, it has lost the arrays of the step, or has not")
            fewer.clear()
        is_exchange = any(part.form.kind for part in parts.values())
        if is_exchange and len(parts) < len(nodes):
            raise SumFailedError(refused)
        if not parts:
            return others | self._errors(sent, refused)
        total = sum_of(part.hidden for part in parts.values())
        try:
            content = _mean(parts, total if is_exchange else self._unmask(total, parts, asked, sent, timeout))
        except SumFailedError as failure:
            refused |= failure.reasons
            rest = dict.fromkeys(parts.keys() - refused.keys(), "the sum that it is in was not opened")
            return others | self._errors(sent, refused | rest)
        first = next(iter(parts))
        return {first: Message(content, reply_to=sent[first])} | others | self._errors(sent, refused)

    def _meet(self, sent: Mapping[int, Message], timeout: float) -> dict[int, str]:
        """Ask the nodes for their public keys that were not asked yet; return why nodes have none."""
        refused = dict[int, str]()
        new = [node for node in sent if node not in self._keys]
        if new:
            question = {masked.SECURE: ConfigRecord({"minimum": self._minimum})}
            questions = [Message(_of_round(sent[node], question), node, masked.SECURE_QUERY) for node in new]
            _read(new, ask_nodes(self._grid, questions, timeout), refused, self._take_key)
            log(INFO, "%d nodes have keys for sums under masks", len(self._keys))
        if self._counted[0] == masked.step_of(next(iter(sent.values())).content)[0]:
            gone = sent.keys() - refused.keys() - set(self._counted[1])
            refused |= dict.fromkeys(
                gone, "the sums of a round are among the same nodes, and it was not in the last one"
            )
        known = [node for node in sent if node not in refused]
        if len(known) < self._minimum:
            few = f"a sum of {len(known)} nodes would show too much of each: {self._minimum} at least"
            refused |= dict.fromkeys(known, few)
        return refused

    def _begin_sum(self, sent: Mapping[int, Message], nodes: Sequence[int]) -> dict[str, Any]:
        """Let the messages ask for a new sum, and return what they say of it."""
        self._counted = masked.step_of(sent[nodes[0]].content)[0], nodes
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
        asked: Mapping[str, Any],
        sent: Mapping[int, Message],
        timeout: float,
    ) -> Limbs:
        """Take away the masks that do not cancel; SumFailedError if too few nodes help."""
        # cryptography takes a while to import, and every ClientApp's process imports strategies
        from fedbn_flwr.secure import masks

        participants = Participants(b"", tuple(asked["nodes"]), tuple(asked["keys"]))
        survivors, place = list(parts), {node: index for index, node in enumerate(participants.nodes)}
        absent = [node for node in participants.nodes if node not in parts]
        needed = max(self._minimum, masks.threshold(len(place)))
        if len(survivors) < needed:
            reason = f"replies of {len(survivors)} of {len(place)} nodes came, and a sum needs {needed}"
            raise SumFailedError(dict.fromkeys(survivors, reason))
        self._counted = self._counted[0], survivors
        questions = []
        for node in survivors:
            sealed = [parts[sender].sealed[place[node]] for sender in survivors]
            question = {masked.SECURE: ConfigRecord({**asked, "survivors": survivors, "sealed": sealed})}
            questions.append(Message(_of_round(sent[node], question), node, masked.SECURE_QUERY))
        why = dict[int, str]()
        answers = ask_nodes(self._grid, questions, timeout)
        helped = _read(survivors, answers, why, lambda node, said: _opening(node, said, len(survivors), absent))
        why = {node: f"it did not help to open the sum: {reason}" for node, reason in why.items()}
        seeds = {pair: seed for _, known in helped.values() for pair, seed in known.items()}
        own, disagree = list[bytes | None](), list[tuple[int, int]]()
        for index, (owner, part) in enumerate(parts.items()):
            given = {node: shares[index] for node, (shares, _) in helped.items()}
            seed, wrong = masks.open_shares(given, part.commitments, participants)
            own.append(seed)
            disagree += [(owner, node) for node in wrong]
        counts = Counter(node for pair in disagree for node in pair)
        # one share may be wrong by its holder, or by its owner, who said what it is: who disagrees with more is named
        liars = {node for pair in disagree for node in pair if counts[node] == max(map(counts.__getitem__, pair))}
        why |= dict.fromkeys(liars, "a share of a mask is not the one that its owner announced")
        log_refused([Refusal(node, reason) for node, reason in why.items()], "of no help")
        if absent and len(helped) < len(survivors):
            lost = f"without it, masks with nodes {absent} do not cancel"
            raise SumFailedError({node: f"{reason}; {lost}" for node, reason in why.items()})
        if unknown := [owner for owner, seed in zip(parts, own, strict=True) if seed is None]:
            raise SumFailedError(why or dict.fromkeys(unknown, "its mask cannot be opened"))
        return masks.cancel(total, participants, filter(None, own), seeds)

    def _read_reply(self, node: int, content: RecordDict, nodes: int, sign: str) -> _MaskedReply | None:
        """Return a node's masked reply among so many nodes; None for its sign that it lacks something."""
        if masked.MASKED not in content:
            if sign not in content.config_records.get(wire.REPORT, {}):
                raise RefusedError("it answers without masks")
            return None
        said: Any = content.config_records[f"{masked.MASKED}-form"]
        hidden = view_array(content.array_records[masked.MASKED]["sum"])
        form, shares, commitments = Form.read(said["form"]), said.get("shares", []), said.get("commitments", [])
        if hidden.dtype != np.uint64 or hidden.shape != (2, form.size):
            raise ValueError(f"{hidden.dtype} of the shape {hidden.shape} where uint64 of {(2, form.size)} is due")
        if not all(_are_bytes(values, 0 if form.kind else nodes) for values in (shares, commitments)):
            raise ValueError(f"it does not hold {nodes} shares")
        partition = whole(said, "partition")
        self._take_key(node, content, f"{masked.MASKED}-form")
        return _MaskedReply(form, partition, hidden, shares, commitments)

    def _take_key(self, node: int, content: RecordDict, name: str = masked.MASKED) -> None:
        """Keep a node's next public key with its signature; an error if there is none."""
        # cryptography takes a while to import, and every ClientApp's process imports strategies
        from fedbn_flwr.secure import masks

        if name not in content.config_records:
            raise RefusedError("its app knows no sums under masks: make it with fedbn_flwr.clientapp")
        said: Any = content.config_records[name]
        key, signature = said["key"], said["signature"]
        if not isinstance(key, bytes) or not masks.is_key(key) or not isinstance(signature, bytes):
            raise ValueError(f"its key is {key!r:.80}")
        if any(key == other for other, _ in self._keys.values()):
            raise RefusedError("its key is another node's, too")
        self._keys[node] = key, signature

    def _errors(self, sent: Mapping[int, Message], reasons: Mapping[int, str]) -> dict[int, Message]:
        return {
            node: Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=sent[node])
            for node, reason in reasons.items()
        }


def _of_round(message: Message, records: Mapping[str, Any]) -> RecordDict:
    """Return records beside what a message says of its round and run, by which nodes find what they have kept."""
    config = message.content.get(wire.CONFIG)
    return RecordDict({**records, **({} if config is None else {wire.CONFIG: config})})


def _read(
    nodes: Iterable[int],
    answers: Mapping[int, Message],
    refused: dict[int, str],
    read: Callable[[int, RecordDict], ReadT],
) -> dict[int, ReadT]:
    """Return what can be read of the nodes' answers; why others are not is added to `refused`."""

    def content_of(node: int, answer: Message | None) -> ReadT:
        if answer is None:
            raise RefusedError("it did not answer in time")
        if answer.has_error():
            raise RefusedError(answer.error.reason or "it failed")
        return read(node, answer.content)

    understood, unread = read_each(((node, answers.get(node)) for node in nodes), content_of)
    refused |= {each.node: each.reason for each in unread}
    return understood


def _are_bytes(values: object, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(isinstance(value, bytes) for value in values)


def _opening(
    node: int, content: RecordDict, survivors: int, absent: Sequence[int]
) -> tuple[Sequence[bytes], Mapping[tuple[int, int], bytes]]:
    """Return the shares that a node gives, and the seeds of its masks with absent nodes; an error if there are none."""
    said: Any = content.config_records[masked.MASKED]
    shares, seeds = said["shares"], said.get("seeds", [])
    if not _are_bytes(shares, survivors) or not _are_bytes(seeds, len(absent)):
        raise RefusedError("its answer is of another sum")
    return shares, {(node, other): seed for other, seed in zip(absent, seeds, strict=True)}


def _of_one_form(parts: dict[int, _MaskedReply], refused: dict[int, str]) -> dict[int, _MaskedReply]:
    """Return the replies of the form that most have; the others are refused."""
    forms = {node: part.form.pack() for node, part in parts.items()}
    counts = Counter(forms.values())
    common = max(counts, key=counts.__getitem__, default="")
    refused |= {node: "unlike most, its masked reply has other entries" for node in forms if forms[node] != common}
    return {node: part for node, part in parts.items() if node not in refused}


def _mean(parts: Mapping[int, _MaskedReply], total: Limbs) -> Summed:
    """Return the mean reply; SumFailedError if masks are left in the sum."""
    numbers, nodes = decode(total), {node: part.partition for node, part in parts.items()}
    if numbers[0] != len(nodes):
        reason = "the masks do not cancel: a node was given other participants or keys, or sent a wrong seed"
        raise SumFailedError(dict.fromkeys(nodes, reason))
    try:
        content = masked.to_content(next(iter(parts.values())).form, numbers, nodes)
    except ValueError as error:
        raise SumFailedError(dict.fromkeys(nodes, str(error))) from None
    for group, record in array_records(content).items():
        if bad := unusable(view_arrays(record)):
            raise SumFailedError(dict.fromkeys(nodes, f"in the mean of all, array {bad[0]!r} in {group!r} {bad[1]}"))
    return content
