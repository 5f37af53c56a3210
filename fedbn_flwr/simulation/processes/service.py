"""What a worker does for its grid, and the worker that is the grid's own process."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.data import prefetch
from fedbn_flwr.simulation.processes.averaged_replies import average_replies
from fedbn_flwr.transports.workers_transport import WorkerShare

#: makes the grid of some partitions' nodes; it is pickled, and called in the worker
GridFactory = Callable[[Sequence[int]], Grid]


class WorkerError(RuntimeError):
    """A worker cannot do what it was asked for."""


class Service(WorkerShare):
    """The service of a worker: the methods named in `REQUESTS`, with one payload each."""

    REQUESTS: ClassVar[frozenset[str]] = frozenset(
        {"open", "deliver", "context", "save_states", "restore_states", "states", "set_states"}
        | {"open_step", "advance", "replies", "abandon"}
    )

    def open(self, payload: tuple[GridFactory, Sequence[int], str]) -> None:
        """Make the grid that later requests are about; the last item says how replies of training are averaged."""
        make_grid, partitions, self._weighting = payload
        self._grid = make_grid(partitions)

    def deliver(self, messages: list[Message]) -> list[Message | None]:
        """Return the answers, in the order of the messages; None where an answer is in the mean of several."""
        replies = {reply.metadata.reply_to_message_id: reply for reply in self.grid.send_and_receive(messages)}
        ordered = [replies[message.metadata.message_id] for message in messages]
        is_training = all(message.metadata.message_type == MessageType.TRAIN for message in messages)
        return self._averaged(ordered) if is_training else [*ordered]

    def replies(self, _: None) -> list[Message | None]:
        """Return the nodes' replies at the end of a step, as `deliver` does."""
        return self._averaged(self.step_replies())

    def _averaged(self, replies: Sequence[Message]) -> list[Message | None]:
        return average_replies(replies, self._weighting) if self._weighting else [*replies]

    def context(self, node: int) -> Context:
        """Return a node's present context."""
        context: Context = self.grid.context(node)  # type: ignore[attr-defined]
        return context

    def save_states(self, folder: Path) -> None:
        """Write what this worker's nodes remember into a folder."""
        self.grid.save_states(folder)  # type: ignore[attr-defined]

    def restore_states(self, folder: Path) -> None:
        """Let this worker's nodes remember what is in a folder."""
        self.grid.restore_states(folder)  # type: ignore[attr-defined]

    def states(self, _: None) -> dict[str, bytes]:
        """Return what this worker's nodes remember, as files by name, for a machine with other files."""
        with TemporaryDirectory() as folder:
            self.save_states(Path(folder))
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def set_states(self, files: dict[str, bytes]) -> None:
        """Let this worker's nodes remember what is in these files."""
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self.restore_states(Path(folder))


def respond(service: Service, name: str, payload: Any) -> tuple[str, Any]:
    """Return what went wrong, if anything, and the answer."""
    if name not in service.REQUESTS:
        return f"unknown request {name!r}; known: {', '.join(sorted(service.REQUESTS))}", None
    try:
        return "", getattr(service, name)(payload)
    except Exception as error:
        logging.getLogger("flwr").debug("A worker failed", exc_info=error)
        return f"{type(error).__name__}: {error}", None


class OwnShare:
    """A worker in the grid's own process: it works while its answer is waited for.

    Two cores then have two processes, and not a third one that only waits for them. At every exchange of a layer-wise
    step, one process fewer has to be woken.

    Images are decoded in this process meanwhile, as in the other workers, of which there are as many as cores.
    """

    index, shares_files = 0, True

    def __init__(self) -> None:
        self._service, self._unanswered = Service(), list[tuple[str, Any]]()

    def ask(self, name: str, payload: Any) -> None:
        """Take note of a request."""
        self._unanswered.append((name, payload))

    def answer(self) -> Any:
        """Do what was asked for, and return the answer to the latest request."""
        value = None
        while self._unanswered:
            with prefetch.decoding_here():
                failure, value = respond(self._service, *self._unanswered.pop(0))
            if failure:
                raise WorkerError(f"worker {self.index}: {failure}")
        return value

    @property
    def process_id(self) -> int:
        """The number of this process."""
        return os.getpid()

    def hang_up(self) -> None:
        """Forget the nodes."""
        self._service = Service()

    def end(self) -> None:
        """Do nothing: this process goes on."""
