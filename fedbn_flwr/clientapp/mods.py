"""Mods for Flower's ClientApp, around any handler: keep entries on the node, refuse broken models,
count bytes.

`export_personal` returns the model of a node that keeps entries. `keep_states` keeps a node's state
in a folder of the site's: it outlives the SuperNode, which keeps states in memory.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import NAMESPACE, Memory, state_folder
from fedbn_flwr.state import from_record
from fedbn_flwr.state.record_files import SUFFIX, pack_records, read_records
from fedbn_flwr.state.records import array_records, view_array
from fedbn_flwr.whole_files import write_bytes
from fedbn_flwr.wire.history import CHECKPOINT, History, path_number, site_number

#: as in Flower, where the names have moved
ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]

_OUTERMOST = "outermost"

#: where a node keeps entries, in its memory
KEPT = "kept-by-mod"
SERVER_ROUND = "server-round"
#: the log of a layer-wise step; a node that has lost it asks for the arrays again
_PASSING = f"{NAMESPACE}/layerwise/"


def outermost(mod: Mod) -> Mod:
    """Mark a mod that this project's ClientApps call around everything else, for every message."""
    mod.__dict__[_OUTERMOST] = True
    return mod


def is_outermost(mod: Mod) -> bool:
    """Return whether a mod is marked so."""
    return bool(getattr(mod, _OUTERMOST, False))


def keep_local(*patterns: str) -> Mod:
    """Make a mod that keeps the entries whose names match: `keep_local("*bn*", "head.*")`.

    The handler trains and evaluates the node's own entries, which stay in `Context.state`. In their
    place the server gets back what it sent, so every strategy of Flower can average the replies.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.content.array_records:
            return call_next(message, context)
        if message.metadata.message_type == wire.LAYERWISE:
            raise ValueError(
                "keep_local cannot serve a layer-wise method, whose nodes take steps together"
            )
        memory = Memory(context.state)
        (group, sent), *more = array_records(message.content).items()
        if more:
            raise ValueError(
                f"keep_local needs messages with one ArrayRecord; here is {more[0][0]!r}, too"
            )
        own = memory.record(KEPT)
        message.content[group] = ArrayRecord(
            {name: own.get(name, array) for name, array in sent.items()}
        )
        reply = call_next(message, context)
        if (
            message.metadata.message_type.partition(".")[0] == MessageType.TRAIN
            and reply.has_content()
        ):
            ((group, trained),) = array_records(reply.content).items()
            stays = {
                name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)
            }
            memory.keep(KEPT, ArrayRecord({name: trained[name] for name in stays}))
            shown = {
                name: sent[name] if name in stays else array for name, array in trained.items()
            }
            reply.content[group] = ArrayRecord(shown)
        return reply

    return mod


def export_personal(arrays: ArrayRecord, kept: RecordDict) -> ArrayRecord:
    """Return a node's own model: the server's entries, with those that the node keeps in their
    places.

    `arrays` is the server's model, for instance the final `result.arrays`. `kept` is the node's
    `context.state`, in which strategies such as `FedBN` and the mod `keep_local` keep entries. The
    result shares nothing with either. ValueError if the node keeps no entry of the model: its own
    model is then the server's, or it never trained.
    """
    memory = Memory(kept)
    personal = {**memory.recall(wire.STAYS), **memory.recall(KEPT)}
    if not personal:
        raise ValueError(
            "the node keeps no entries of the model: it never trained, or the strategy shares all "
            "of them"
        )
    model = from_record(arrays)
    unknown = sorted(personal.keys() - model.keys())
    if unknown:
        raise ValueError(
            f"the node keeps {unknown[0]!r}, which is not an entry of the server's model"
        )
    for name, value in personal.items():
        if value.shape != model[name].shape:
            raise ValueError(
                f"the node keeps {name!r} with shape {tuple(value.shape)}, the model has "
                f"{tuple(model[name].shape)}"
            )
    return ArrayRecord({**model, **personal})


def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer with an error, which names the entry, in place of a reply with numbers that are not
    finite.
    """
    reply = call_next(message, context)
    if not reply.has_content():
        return reply
    for group, record in array_records(reply.content).items():
        for name, array in record.items():
            values = view_array(array)
            if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
                reason = f"entry {name!r} of {group!r} is not finite after training"
                return Message(
                    Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message
                )
    return reply


def count_bytes(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Add the bytes of the arrays that came and went to the reply's metrics: `bytes-down` and
    `bytes-up`.
    """
    down = _bytes_of(message)
    reply = call_next(message, context)
    if reply.has_content():
        for metrics in list(reply.content.metric_records.values())[:1]:
            metrics["bytes-up"] = _bytes_of(reply)
            metrics["bytes-down"] = down
    return reply


def _bytes_of(message: Message) -> int:
    return sum(
        len(array.data)
        for record in array_records(message.content).values()
        for array in record.values()
    )


@outermost
def keep_states(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let the node remember what it kept, and keep what it remembers then: a mod for any ClientApp.

    Does nothing where the site names no folder.
    """
    folder = state_folder(context)
    if folder:
        return keep_states_in(folder)(message, context, call_next)
    return call_next(message, context)


def keep_states_in(folder: Path) -> Mod:
    """Return the mod for a folder."""

    @outermost
    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config = message.content.get(wire.record_names(message.content)[1])
        if not isinstance(config, ConfigRecord) or SERVER_ROUND not in config:
            return call_next(message, context)
        states = KeptStates(folder, context, config)
        if not context.state:
            context.state = states.recall()
        reply = call_next(message, context)
        states.keep(context.state)
        return reply

    return mod


class Version(NamedTuple):
    """A file with a node's state as it was after its part in a round."""

    place: tuple[int, int]
    server_round: int
    path: Path


class KeptStates:
    """The states of one node in one run: `FOLDER/RUN/PARTITION/ROUND-RUN.records`, each replaced as
    a whole.

    There are at most two: the latest, and that of the last checkpoint, with which the run may be
    resumed.
    """

    def __init__(self, folder: Path, context: Context, config: ConfigRecord) -> None:
        self._history = History.read(config, context)
        self._round, self._checkpoint = (
            path_number(key, config.get(key, 0)) for key in (SERVER_ROUND, CHECKPOINT)
        )
        self._folder = folder / self._history.first / str(site_number(context))

    def recall(self) -> RecordDict:
        """Return the latest state; nothing if there is none."""
        versions = self._versions()
        if versions:
            return read_records(versions[-1].path)
        return RecordDict()

    def keep(self, state: RecordDict) -> None:
        """Write the state if it has changed, and remove what no run can go on with."""
        content = pack_records(
            RecordDict({key: value for key, value in state.items() if not key.startswith(_PASSING)})
        )
        versions = self._versions()
        if content == (versions[-1].path.read_bytes() if versions else b""):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        latest = self._folder / f"{self._round}-{self._history.present}{SUFFIX}"
        write_bytes(latest, content, durable=True)
        resumable = [
            version.path for version in versions if version.server_round <= self._checkpoint
        ][-1:]
        for path in self._folder.iterdir():
            if path not in (latest, *resumable):
                path.unlink()

    def _versions(self) -> list[Version]:
        """Return the states that count, the latest last."""
        versions = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            server_round, _, run = path.stem.partition("-")
            place = self._history.place(run, int(server_round))
            if place is not None:
                versions.append(Version(place, int(server_round), path))
        return sorted(versions)
