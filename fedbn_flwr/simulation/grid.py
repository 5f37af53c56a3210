"""The base of the grids whose nodes are on this machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid

from fedbn_flwr.simulation.spill import SpillBuffer

if TYPE_CHECKING:
    from flwr.supercore.run import Run
else:
    try:
        from flwr.supercore.run import Run
    except ImportError:  # before Flower 1.35
        from flwr.common.typing import Run

try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # before Flower 1.38: messages need none
    TaskIdentity = None  # type: ignore[assignment,misc]


class LocalGrid(Grid):
    """A grid whose nodes are on this machine: whoever pushes messages finds the replies in `_replies`, by their ids."""

    def __init__(self) -> None:
        self._run = Run.create_empty(run_id=1)
        self._replies: dict[str, Message] = {}
        #: for the replies to the latest push
        self._spill = SpillBuffer()
        if TaskIdentity is not None:
            # Flower reads these when a message is created
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run.run_id, SUPERLINK_NODE_ID, 0

    def set_run(self, run: Run) -> None:
        """Take the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message, as Flower's older interface does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand the replies over, once."""
        return [self._replies.pop(item) for item in message_ids if item in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver and collect."""
        return self.pull_messages(self.push_messages(messages))


@runtime_checkable
class SavesStates(Protocol):
    """A grid that can save what its nodes remember, and restore it, where nodes do not do that themselves."""

    def save_states(self, folder: Path) -> None:
        """Write the state of every node that has one into a folder."""

    def restore_states(self, folder: Path) -> None:
        """Give the nodes the states of a folder."""
