"""The base of grids that stand in front of another one."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.supercore.run import Run


class PassingGrid(Grid):
    """A grid in front of another one, which may change: what is not overridden is passed on."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def outgoing(self, messages: list[Message]) -> list[Message]:
        """Return what is sent in the place of messages."""
        return messages

    def incoming(self, replies: list[Message]) -> list[Message]:
        """Return what is handed over in the place of replies."""
        return replies

    def end_attempt(self) -> None:
        """End an attempt at a layer-wise step."""
        if isinstance(self._grid, PassingGrid):
            self._grid.end_attempt()

    def set_run(self, run: "Run") -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> "Run":
        """Pass on."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Pass on."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, as `outgoing` has them."""
        return self._grid.push_messages(self.outgoing(list(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, as `incoming` has them."""
        return self.incoming(list(self._grid.pull_messages(message_ids)))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies, as `outgoing` and `incoming` have them."""
        sent = self.outgoing(list(messages))
        return self.incoming(list(self._grid.send_and_receive(sent, timeout=timeout))) if sent else []
