"""A node's state in a folder of the site's: it outlives the SuperNode, which keeps states in memory."""

from pathlib import Path
from typing import NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import NAMESPACE, state_folder
from fedbn_flwr.clientapp.mods import ClientAppCallable, Mod, outermost
from fedbn_flwr.state.record_files import SUFFIX, pack_records, read_records, write_bytes
from fedbn_flwr.wire.history import CHECKPOINT, History, path_number, site_number

SERVER_ROUND = "server-round"
#: the log of a layer-wise step; a node that has lost it asks for the arrays again
_PASSING = f"{NAMESPACE}/layerwise/"


@outermost
def keep_states(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let the node remember what it kept, and keep what it remembers then: a mod for any ClientApp.

    Does nothing where the site names no folder.
    """
    folder = state_folder(context)
    return keep_states_in(folder)(message, context, call_next) if folder else call_next(message, context)


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
    """The states of one node in one run: `FOLDER/RUN/PARTITION/ROUND-RUN.records`, each replaced as a whole.

    There are at most two: the latest, and that of the last checkpoint, with which the run may be resumed.
    """

    def __init__(self, folder: Path, context: Context, config: ConfigRecord) -> None:
        self._history = History.read(config, context)
        self._round, self._checkpoint = (path_number(key, config.get(key, 0)) for key in (SERVER_ROUND, CHECKPOINT))
        self._folder = folder / self._history.first / str(site_number(context))

    def recall(self) -> RecordDict:
        """Return the latest state; nothing if there is none."""
        versions = self._versions()
        return read_records(versions[-1].path) if versions else RecordDict()

    def keep(self, state: RecordDict) -> None:
        """Write the state if it has changed, and remove what no run can go on with."""
        content = pack_records(RecordDict({key: value for key, value in state.items() if not key.startswith(_PASSING)}))
        versions = self._versions()
        if content == (versions[-1].path.read_bytes() if versions else b""):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        latest = self._folder / f"{self._round}-{self._history.present}{SUFFIX}"
        write_bytes(latest, content, durable=True)
        resumable = [version.path for version in versions if version.server_round <= self._checkpoint][-1:]
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
