"""A cohort in one process or in several, whichever is measured to be faster."""

from collections.abc import Callable, Iterable, Sequence
from logging import INFO
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from flwr.app import Message
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.cohort.grid import REHEARSED, CohortGrid
from fedbn_flwr.grids import PassingGrid
from fedbn_flwr.workers import WorkersGrid

#: seconds of work that several processes must save: they take some to start, each as much memory as this one
WORTH_STARTING = 10.0
#: how many times as fast they must be, and if they wait for each other at every layer
WORTH_HAVING, WORTH_MEETING = 1.1, 1.5
_REPETITIONS = 3
#: messages that tell how long all of them take
MOST_REHEARSED = 100


class SpreadGrid(PassingGrid):
    """Starts with all nodes in this process, and decides at the first training messages.

    Several processes are started if the run is long enough, and used if they get through more steps a second while all
    of them are busy than this process does alone: a machine's other cores may be taken. Nodes that have stored
    something stay where they are.
    """

    _grid: CohortGrid | WorkersGrid

    def __init__(
        self, here: CohortGrid, make_workers: Callable[[int], WorkersGrid], workers: int, expected_steps: int
    ) -> None:
        super().__init__(here)
        self._here, self._make_workers, self._workers = here, make_workers, workers
        self._expected_steps, self._decided = expected_steps, False
        #: what was measured, for whoever wants to know
        self.measured: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.chosen, WorkersGrid):
            self.chosen.close()

    @property
    def chosen(self) -> CohortGrid | WorkersGrid:
        """What the messages are passed on to."""
        return self._grid

    @property
    def choice(self) -> dict[str, str | int | float]:
        """How clients train and where, for whoever reports it."""
        workers = self._workers if isinstance(self.chosen, WorkersGrid) else 1
        return {**self._here.choice, "workers": workers}

    def context(self, node: int) -> Any:
        """Pass on."""
        return self.chosen.context(node)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Decide, and pass on."""
        messages = list(messages)
        self._decide(messages)
        return self.chosen.push_messages(messages)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Decide, and pass on."""
        return self.pull_messages(self.push_messages(messages))

    def open_step(self, messages: Sequence[Message]) -> Any:
        """Decide, and pass on."""
        self._decide(messages)
        return self.chosen.open_step(messages)

    def _decide(self, messages: Sequence[Message]) -> None:
        if self._decided or len(messages) < 2 or not messages[0].metadata.message_type.startswith("train"):
            return
        self._decided = True
        if self._workers < 2 or not self._here.untouched:
            return
        messages = messages[:MOST_REHEARSED]
        alone, answered = _seconds(lambda: self._here.rehearse(messages))
        expected = self._expected_steps / max(answered * REHEARSED, 1)
        if not answered or alone * expected * (1 - 1 / self._workers) < WORTH_STARTING:
            return
        spread = self._make_workers(self._workers)
        try:
            together, _ = _seconds(lambda: spread.rehearse(messages))
        except BaseException:
            spread.close()
            raise
        self.measured = {"one process": alone, f"{self._workers} processes": together}
        log(INFO, "Seconds that a few steps of all clients take: %s", self.measured)
        # a layer-wise step meets at every exchange, which the rehearsal leaves out
        layerwise = messages[0].metadata.message_type == wire.LAYERWISE
        if together * (WORTH_MEETING if layerwise else WORTH_HAVING) < alone:
            spread.set_run(self._here.run)
            self._grid = spread
        else:
            spread.close()


def _seconds(rehearse: Callable[[], list[Message]]) -> tuple[float, int]:
    """How long it takes to have how many messages answered: at its fastest, once everything is warm."""
    count, seconds = len(rehearse()), []
    for _ in range(_REPETITIONS):
        started = perf_counter()
        rehearse()
        seconds.append(perf_counter() - started)
    return min(seconds), count
