"""Mods for Flower's ClientApp, around any handler: keep entries on the node, refuse broken models, count bytes.

`export_personal` returns the model of a node that keeps entries.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.state import from_record
from fedbn_flwr.state.records import array_records, view_array

#: as in Flower, where the names have moved
ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]

_OUTERMOST = "outermost"

#: where a node keeps entries, in its memory
KEPT = "kept-by-mod"


def outermost(mod: Mod) -> Mod:
    """Mark a mod that this project's ClientApps call around everything else, for every message."""
    mod.__dict__[_OUTERMOST] = True
    return mod


def is_outermost(mod: Mod) -> bool:
    """Return whether a mod is marked so."""
    return bool(getattr(mod, _OUTERMOST, False))


def keep_local(*patterns: str) -> Mod:
    """Make a mod that keeps the entries whose names match: `keep_local("*bn*", "head.*")`.

    The handler trains and evaluates the node's own entries, which stay in `Context.state`. In their place the server
    gets back what it sent, so every strategy of Flower can average the replies.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.content.array_records:
            return call_next(message, context)
        if message.metadata.message_type == wire.LAYERWISE:
            raise ValueError("keep_local cannot serve a layer-wise method, whose nodes take steps together")
        memory = Memory(context.state)
        (group, sent), *more = array_records(message.content).items()
        if more:
            raise ValueError(f"keep_local needs messages with one ArrayRecord; here is {more[0][0]!r}, too")
        own = memory.record(KEPT)
        message.content[group] = ArrayRecord({name: own.get(name, array) for name, array in sent.items()})
        reply = call_next(message, context)
        if message.metadata.message_type.partition(".")[0] == MessageType.TRAIN and reply.has_content():
            ((group, trained),) = array_records(reply.content).items()
            stays = {name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)}
            memory.keep(KEPT, ArrayRecord({name: trained[name] for name in stays}))
            shown = {name: sent[name] if name in stays else array for name, array in trained.items()}
            reply.content[group] = ArrayRecord(shown)
        return reply

    return mod


def export_personal(arrays: ArrayRecord, kept: RecordDict) -> ArrayRecord:
    """Return a node's own model: the server's entries, with those that the node keeps in their places.

    `arrays` is the server's model, for instance the final `result.arrays`. `kept` is the node's `context.state`, in
    which strategies such as `FedBN` and the mod `keep_local` keep entries. The result shares nothing with either.
    ValueError if the node keeps no entry of the model: its own model is then the server's, or it never trained.
    """
    memory = Memory(kept)
    personal = {**memory.recall(wire.PERSONAL), **memory.recall(KEPT)}
    if not personal:
        raise ValueError("the node keeps no entries of the model: it never trained, or the strategy shares all of them")
    model = from_record(arrays)
    if unknown := sorted(personal.keys() - model.keys()):
        raise ValueError(f"the node keeps {unknown[0]!r}, which is not an entry of the server's model")
    for name, value in personal.items():
        if value.shape != model[name].shape:
            raise ValueError(
                f"the node keeps {name!r} with shape {tuple(value.shape)}, the model has {tuple(model[name].shape)}"
            )
    return ArrayRecord({**model, **personal})


def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer with an error, which names the entry, in place of a reply with numbers that are not finite."""
    reply = call_next(message, context)
    if not reply.has_content():
        return reply
    for group, record in array_records(reply.content).items():
        for name, array in record.items():
            values = view_array(array)
            if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
                reason = f"entry {name!r} of {group!r} is not finite after training"
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
    return reply


def count_bytes(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Add the bytes of the arrays that came and went to the reply's metrics: `bytes-down` and `bytes-up`."""
    down = _bytes_of(message)
    reply = call_next(message, context)
    if reply.has_content():
        for metrics in list(reply.content.metric_records.values())[:1]:
            metrics["bytes-down"], metrics["bytes-up"] = down, _bytes_of(reply)
    return reply


def _bytes_of(message: Message) -> int:
    return sum(len(array.data) for record in array_records(message.content).values() for array in record.values())
