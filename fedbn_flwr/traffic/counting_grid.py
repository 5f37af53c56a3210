"""Count the exchanges of a run, and the bytes of the arrays in them."""

from collections.abc import Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.server.passing_grid import PassingGrid
from fedbn_flwr.traffic.layerwise import CountedStep
from fedbn_flwr.traffic.sizes import message_sizes, paper_bytes
from fedbn_flwr.traffic.tally import Tally
from fedbn_flwr.wire import DESCRIBE
from fedbn_flwr.wire.layerwise_grid import LayerwiseGrid


class CountingGrid(PassingGrid):
    """Any grid, counted. Training and evaluation are kept apart; asking nodes who they are is neither."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.training, self.evaluation = Tally(), Tally()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count and pass on."""
        messages = list(messages)
        self._count_sent(messages)
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on and count."""
        replies = list(self._grid.pull_messages(message_ids))
        self._count_received(replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Count, pass on, count."""
        messages = list(messages)
        if not messages:
            return []
        self._count_sent(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._count_received(replies)
        return replies

    def open_step(self, messages: Sequence[Message]) -> CountedStep | None:
        """Open a layer-wise step that is counted, where the grid offers steps without messages."""
        step = self._grid.open_step(messages) if isinstance(self._grid, LayerwiseGrid) else None
        return None if step is None else CountedStep(step, self.training, self.count_exchange, messages)

    def count_exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        """Count what did not need to be sent as if it had been."""
        self._count_sent(list(sent))
        self._count_received(list(received))

    def _tally(self, message: Message) -> Tally:
        kind = message.metadata.message_type
        if kind == DESCRIBE:
            return Tally()
        return self.evaluation if kind.startswith("evaluate") else self.training

    def _count_sent(self, messages: list[Message]) -> None:
        if not messages:
            return
        tally = self._tally(messages[0])
        tally.exchanges += 1
        tally.paper += paper_bytes(messages)
        for message in messages:
            self._tally(message).payload_down += message_sizes(message).payload

    def _count_received(self, replies: list[Message]) -> None:
        for message in replies:
            if message.has_content():
                tally, sizes = self._tally(message), message_sizes(message)
                tally.payload_up += sizes.payload
                tally.paper += sizes.paper
