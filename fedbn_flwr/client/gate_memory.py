"""What a node's gate remembers, and where its site says what it expects; without cryptography, which loads slowly."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbn_flwr.client.node_memory import STATE_VARIABLE, Memory, state_folder
from fedbn_flwr.secure import ProtocolError
from fedbn_flwr.state.record_files import SUFFIX, pack_records, read_records, write_bytes
from fedbn_flwr.wire import Instruction, masked
from fedbn_flwr.wire.history import site_number

#: the folder with a site's signing key (`sign.key`) and the public keys of all sites (`sites.txt`)
SITE_VARIABLE = "FEDBN_FLWR_SECURE_SITE"
#: the smallest sum that a site takes part in, if it is more than the default
MINIMUM_VARIABLE = "FEDBN_FLWR_SECURE_MIN"
MINIMUM = 3

#: in a node's memory: what it knows of its sums, and of the message at hand until something leaves
_SUMS, _ENTERED = "secure/sums", "secure/entered"


def is_closed(message: Message) -> bool:
    """Return whether nothing may leave the node in the clear in answer to a message."""
    asked = message.metadata.message_type == masked.SECURE_QUERY or masked.SECURE in message.content
    return asked or bool(os.environ.get(SITE_VARIABLE))


class SumMemory:
    """What a node remembers of its sums: in the site's folder, where there is one, or else in its `Context.state`.

    What is in the folder is written before anything leaves, and no run that is resumed rewinds it.
    """

    def __init__(self, context: Context) -> None:
        folder, self._memory = state_folder(context), Memory(context.state)
        self._path = folder / "secure" / f"{context.run_id}-{site_number(context)}{SUFFIX}" if folder else None
        if self._path is None and os.environ.get(SITE_VARIABLE):
            raise ProtocolError(f"a site with pinned keys needs a folder for what it remembers: {STATE_VARIABLE}")
        if self._path is not None and self._path.exists():
            self._values: dict[str, Any] = dict(read_records(self._path).config_records[_SUMS])
        else:
            self._values = dict(self._memory.record(_SUMS))
        #: of the message at hand
        self.entered: dict[str, Any] = dict(self._memory.record(_ENTERED))

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def get(self, key: str, default: Any) -> Any:
        """Return a value, or what there is in its place."""
        return self._values.get(key, default)

    def update(self, **values: Any) -> None:
        """Remember values."""
        self._values |= values
        record = ConfigRecord(dict(self._values))
        if self._path is None:
            self._memory.keep(_SUMS, record)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, pack_records(RecordDict({_SUMS: record})), durable=True)

    def enter(self, **values: Any) -> None:
        """Note what is to be remembered as soon as something leaves in answer to the message at hand."""
        self.entered = values
        self._memory.keep(_ENTERED, ConfigRecord(dict(values)))


def other_batches(
    batch_is_all: Callable[[Instruction], bool], instruction: Instruction, content: RecordDict, context: Context
) -> Instruction:
    """Return the instruction of a layer-wise step, which draws other mini-batches if the step begins again.

    From the same arrays and mini-batches, the sums of two attempts would differ by what a node that is lost has sent.
    """
    memory = SumMemory(context) if masked.SECURE in content else None
    secret = memory.entered.get("secret", memory.get("secret", b"")) if memory else b""
    if not secret:
        return instruction
    if batch_is_all(instruction):
        raise ProtocolError(
            "the server begins a step again, and this node's mini-batch is all of its samples: the difference would "
            "show what a lost node has; a smaller batch-size avoids this"
        )
    digest = hashlib.sha256(secret + str(instruction.seed).encode()).digest()
    return replace(instruction, seed=int.from_bytes(digest[:7], "big"))
