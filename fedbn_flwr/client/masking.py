"""A node's end of sums under masks: what leaves the node is masked, and a sum is opened once, or not at all.

A node does not trust the server to keep the rules of `fedbn_flwr.secure.masks`. It remembers what it has sent, and
refuses, with a line that says why,

- fewer participants than `minimum()`, or a list without its own key,
- a sum that it was in before, or one of an earlier step: the server could compare two of them,
- within a round, to gather statistics among other nodes than before,
- to unmask another sum than the last one, twice, or for fewer nodes than `minimum()`, or than the threshold.

A site's operator may pin the keys of all sites (`SITE_VARIABLE`). Then the node signs its own key, counts only keys
that another site has signed, and answers no message in the clear.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.client.masked_carried import keep_values
from fedbn_flwr.client.masked_memory import MINIMUM, MINIMUM_VARIABLE, SITE_VARIABLE, Kept
from fedbn_flwr.secure import NotEncodableError, Participants, ProtocolError, masks
from fedbn_flwr.secure.fixed_point import Limbs
from fedbn_flwr.wire import masked
from fedbn_flwr.wire.masked import Form, Numbers
from fedbn_flwr.wire.site_data import SITE_DATA, without_numbers

_SIGNED = b"fedbn-flwr key of a session "


def minimum() -> int:
    """Return the number of nodes that a sum must have for this site to be among them."""
    return max(MINIMUM, int(os.environ.get(MINIMUM_VARIABLE) or 0))


def answer_query(message: Message, context: Context) -> RecordDict:
    """Answer the server's question for a public key, or for what takes away masks."""
    asked: Any = message.content[masked.SECURE]
    memory = Kept(context)
    return _open(asked, memory, context.node_id) if "survivors" in asked else _advertise(asked, memory)


def leave_masked(reply: RecordDict, message: Message, context: Context) -> RecordDict:
    """Return what leaves the node in place of a reply: itself if nobody asked for masks."""
    asked: Any = message.content.get(masked.SECURE)
    if message.metadata.message_type == SITE_DATA and (asked is not None or _pins() is not None):
        return without_numbers(reply)
    if asked is None:
        if _pins() is not None:
            raise ProtocolError("this site answers only under masks: secure=true")
        return reply
    if message.metadata.message_type == wire.DESCRIBE or not masked.needs_masks(reply):
        return masked.control_reply(reply)
    memory = Kept(context)
    participants = _participants(asked, memory)
    _require_own_key(participants, memory, context.node_id)
    if not masked.is_over_stream(message.content):  # there, the step was new when it began
        _require_new_step(message.metadata.message_type, message.content, participants, memory)
    if message.metadata.message_type != masked.CARRIED_QUERY:
        reply = keep_values(reply, context)
    form, numbers = masked.to_numbers(reply, masked.terms_of(asked))
    # a sum of an exchange needs all nodes, so nothing is ever opened
    own = b"" if form.kind else masks.own_seed()
    hidden = _mask(numbers, context.node_id, memory["private"], participants, own)
    content: dict[str, Any] = {"form": form.pack(), "partition": masked.partition_of(reply)}
    if own:
        shares = masks.seal_shares(own, context.node_id, memory["private"], participants)
        content |= {"shares": [each.sealed for each in shares], "commitments": [each.commitment for each in shares]}
    memory.update(number=asked["number"], pending=participants.digest if own else b"")
    return RecordDict(
        {masked.MASKED: ArrayRecord({"sum": Array(hidden)}), f"{masked.MASKED}-form": ConfigRecord(content)}
    )


class StepMasks:
    """The masks of a layer-wise step that is taken without messages: a sum among the same nodes for each exchange."""

    def __init__(self, content: RecordDict, context: Context) -> None:
        memory, self._node = Kept(context), context.node_id
        self._asked: Any = content[masked.SECURE]
        participants = _participants(self._asked, memory)
        _require_own_key(participants, memory, self._node)
        _require_new_step(wire.LAYERWISE, content, participants, memory)
        self._private = memory["private"]
        # moments are weighted by what they were measured on
        gathers = masked.kind_of(wire.LAYERWISE, content) == wire.GATHER
        terms = masked.terms_of(self._asked)
        self._terms = replace(terms, weighting="values") if gathers else terms
        #: exchanges so far
        self._sums = 0

    def hide(self, request: RecordDict) -> tuple[Form, Limbs]:
        """Return a request's form and numbers under masks."""
        self._sums += 1
        participants = masked.participants_of(self._asked, self._sums)
        form, numbers = masked.to_numbers(request, self._terms)
        return form, _mask(numbers, self._node, self._private, participants, b"")


def _mask(numbers: Numbers, node: int, private: bytes, participants: Participants, own: bytes) -> Limbs:
    try:
        return masks.mask(numbers, node, private, participants, own)
    except NotEncodableError as error:
        raise NotEncodableError(f"what it would send {error}") from None


def _advertise(asked: Mapping[str, Any], memory: Kept) -> RecordDict:
    """Make a key for a new session, and return its public half."""
    if memory.get("session", "") != asked["session"]:
        memory.begin(session=asked["session"], private=masks.new_private_key(), number=0, pending=b"")
    elif memory["number"]:
        raise ProtocolError("the server asks again for the key of a session that has begun")
    public = masks.public_key(memory["private"])
    pins = _pins()
    signature = pins[0].sign(_signed(asked["session"], public)) if pins else b""
    return _answer({"key": public, "signature": signature})


def _open(asked: Mapping[str, Any], memory: Kept, node: int) -> RecordDict:
    """Return the shares of the own masks of the nodes that count, and the seeds of masks with those that do not."""
    participants, survivors = _participants(asked, memory), tuple(asked["survivors"])
    if memory["pending"] != participants.digest or asked["number"] != memory["number"]:
        raise ProtocolError("the server asks to open a sum that is not this node's last one, or that was opened before")
    if len(set(survivors)) < len(survivors) or not set(survivors) <= set(participants.nodes):
        raise ProtocolError("the server names nodes that are no participants")
    needed = max(minimum(), asked["minimum"], masks.threshold(len(participants.nodes)))
    if len(survivors) < needed:
        few = f"a sum of {len(survivors)} of {len(participants.nodes)} nodes"
        raise ProtocolError(f"{few} is not opened: {needed} at least")
    if node not in survivors:
        raise ProtocolError("the server says that this node did not send its part, and it has")
    # before anything leaves: whoever asks again gets nothing
    memory.update(pending=b"")
    private = memory["private"]
    shares = [
        masks.unseal_share(sealed, sender, node, private, participants)
        for sender, sealed in zip(survivors, asked["sealed"], strict=True)
    ]
    absent = [other for other in participants.nodes if other not in survivors]
    return _answer({"shares": shares, "seeds": [masks.pair_seed(private, other, participants) for other in absent]})


def _answer(values: dict[str, Any]) -> RecordDict:
    # Flower cannot count the bytes of an empty list
    content = {key: value for key, value in values.items() if value != []}
    return RecordDict({masked.MASKED: ConfigRecord(content)})


def _participants(asked: Mapping[str, Any], memory: Kept) -> Participants:
    """Return the participants that the server names; ProtocolError unless the sum is one of this node's session."""
    if memory.get("session", "") != asked["session"]:
        raise ProtocolError("the server names a session that this node has no key for")
    nodes, keys = tuple(asked["nodes"]), tuple(asked["keys"])
    if len(nodes) < (needed := max(minimum(), asked["minimum"])):
        raise ProtocolError(f"a sum of {len(nodes)} nodes would show too much of each: {needed} at least")
    if (pins := _pins()) is not None:
        _require_signed(asked["session"], keys, asked["signatures"], pins[1])
    return masked.participants_of(asked)


def _require_own_key(participants: Participants, memory: Kept, node: int) -> None:
    if participants.key_of(node) != masks.public_key(memory["private"]):
        raise ProtocolError("the server has put another key in the place of this node's")


def _require_new_step(message_type: str, content: RecordDict, participants: Participants, memory: Kept) -> None:
    """Refuse a sum that this node was in before, and remember this one."""
    asked: Any = content[masked.SECURE]
    if asked["number"] <= memory["number"]:
        raise ProtocolError("the server asks for a sum that this node was in before, or for an earlier one")
    kind, step = masked.kind_of(message_type, content), list(masked.step_of(content))
    last = list(memory.get(f"step {kind}", [-1, 0, 0]))
    if kind == wire.GATHER:
        among = hashlib.sha256(repr(sorted(participants.keys)).encode()).digest()
        if step[0] < last[0] or (step[0] == last[0] and among != memory["gathered among"]):
            raise ProtocolError("the server asks again for statistics of this round, or an earlier one, among others")
        memory.update(**{"gathered among": among})
    elif step <= last:
        raise ProtocolError(f"the server asks for round {step[0]} again, or for an earlier one: the node is past it")
    memory.update(**{f"step {kind}": step})


def _require_signed(
    session: str, keys: tuple[bytes, ...], signatures: list[bytes], sites: tuple[Ed25519PublicKey, ...]
) -> None:
    """Refuse a key that no site has signed, or two that are signed by the same one."""
    signed = [_signed(session, key) for key in keys]
    signers = [_signer(content, signature, sites) for content, signature in zip(signed, signatures, strict=True)]
    if None in signers:
        raise ProtocolError("the server names a key that no site has signed")
    if len(set(signers)) < len(signers):
        raise ProtocolError("the server names two keys of one site")


def _signer(content: bytes, signature: bytes, sites: tuple[Ed25519PublicKey, ...]) -> int | None:
    for number, site in enumerate(sites):
        try:
            site.verify(signature, content)
        except InvalidSignature:
            continue
        return number
    return None


def _signed(session: str, key: bytes) -> bytes:
    return _SIGNED + hashlib.sha256(session.encode()).digest() + key


def _pins() -> tuple[Ed25519PrivateKey, tuple[Ed25519PublicKey, ...]] | None:
    """Return the site's signing key and the keys of all sites; None where nothing is pinned."""
    folder = os.environ.get(SITE_VARIABLE, "")
    return read_pins(folder) if folder else None


def read_pins(folder: str) -> tuple[Ed25519PrivateKey, tuple[Ed25519PublicKey, ...]]:
    """Return what is in the folder of `SITE_VARIABLE`; ProtocolError if there is none."""
    try:
        own = bytes.fromhex((Path(folder) / "sign.key").read_text().strip())
        lines = (Path(folder) / "sites.txt").read_text().splitlines()
        sites = [bytes.fromhex(line.split()[0]) for line in lines if line]
        return Ed25519PrivateKey.from_private_bytes(own), tuple(map(Ed25519PublicKey.from_public_bytes, sites))
    except (OSError, ValueError, IndexError) as error:
        raise ProtocolError(f"{SITE_VARIABLE}={folder} has no keys of sites: {error}") from None
