"""A cohort on one processor or on several, as threads or as processes: whichever is measured to be the fastest."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from flwr.app import Message, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.client import read_instruction
from fedbn_flwr.layerwise import respond
from fedbn_flwr.simulation.grid import PassingGrid
from fedbn_flwr.simulation.processes.grid import WorkersGrid
from fedbn_flwr.simulation.stacked.grid import CohortGrid
from fedbn_flwr.wire import Instruction

#: seconds of work that several processors must save: processes take some to start, each as much memory as this
WORTH_STARTING = 10.0
#: how many times as fast threads must be, and processes, which take memory
WORTH_THREADS, WORTH_HAVING = 1.05, 1.1
#: of a rehearsal, at least, and until there were so many seconds of them
_REPETITIONS, _ENOUGH = 3, 0.5
#: has a grid take a few steps of some clients, and says of how many
Rehearsal = Callable[[CohortGrid | WorkersGrid], int]
#: messages that tell how long all of them take, and steps of each client that tell how long many take
MOST_REHEARSED, REHEARSED = 100, 5


class SpreadGrid(PassingGrid):
    """Starts with all nodes in this process, and decides at the first training messages how to use several processors.

    If the run is long enough, torch's operations are tried with a thread for each processor, which stacks are large
    enough for. If that leaves something to save, processes are started, and used if they get through more steps a
    second while all of them are busy: a machine's other processors may be taken. Nodes that have stored something stay
    where they are.
    """

    _grid: CohortGrid | WorkersGrid

    def __init__(
        self, here: CohortGrid, make_workers: Callable[[int], WorkersGrid], processors: int, expected_steps: int
    ) -> None:
        super().__init__(here)
        self._here, self._make_workers, self._processors = here, make_workers, processors
        self._expected_steps, self._decided = expected_steps, False
        #: what was measured, for whoever wants to know
        self.measured: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.threads = 0
        if isinstance(self.chosen, WorkersGrid):
            self.chosen.close()

    @property
    def chosen(self) -> CohortGrid | WorkersGrid:
        """What the messages are passed on to."""
        return self._grid

    @property
    def choice(self) -> dict[str, str | int | float]:
        """How clients train and where, for whoever reports it."""
        workers = self._processors if isinstance(self.chosen, WorkersGrid) else 1
        return {**self._here.choice, "workers": workers}

    def context(self, node: int) -> Any:
        """Pass on."""
        return self.chosen.context(node)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Decide, and pass on."""
        messages = list(messages)
        self._decide(messages, partial(_rehearse, messages=messages[:MOST_REHEARSED]))
        return self.chosen.push_messages(messages)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Decide, and pass on."""
        return self.pull_messages(self.push_messages(messages))

    def open_step(self, messages: Sequence[Message]) -> Any:
        """Decide, and pass on."""
        self._decide(messages, partial(_rehearse_step, messages=messages[:MOST_REHEARSED]))
        return self.chosen.open_step(messages)

    def _decide(self, messages: Sequence[Message], rehearse: Rehearsal) -> None:
        if self._decided or len(messages) < 2 or not messages[0].metadata.message_type.startswith("train"):
            return
        if self._processors < 2 or not self._here.untouched:
            self._decided = True
            return
        alone, clients = _seconds(self._here, rehearse)
        # what cannot be taken together is tried again as messages
        self._decided = clients > 0
        steps = clients * _rehearsed_steps(_instruction(messages[0]))
        rounds = self._expected_steps / max(steps, 1)
        ideal = alone / self._processors
        if not clients or (alone - ideal) * rounds < WORTH_STARTING:
            return
        self.measured["at first"] = alone
        here = self._try_threads(rehearse, alone, clients)
        if (here - ideal) * rounds >= WORTH_STARTING:
            self._try_processes(rehearse, here / WORTH_HAVING, clients)
        log(INFO, "Seconds that a few steps of all clients take: %s", self.measured)

    def _try_threads(self, rehearse: Rehearsal, alone: float, clients: int) -> float:
        """Keep them if they are worth it; returns the seconds of what is used now."""
        if torch.get_num_threads() >= self._processors:
            return alone
        self._here.threads = self._processors
        threaded, answered = _seconds(self._here, rehearse)
        if answered == clients:
            self.measured[f"{self._processors} threads"] = threaded
            if threaded * WORTH_THREADS < alone:
                return threaded
        self._here.threads = 0
        return alone

    def _try_processes(self, rehearse: Rehearsal, limit: float, clients: int) -> None:
        """Use them if they take less than so many seconds."""
        spread = self._make_workers(self._processors)
        try:
            together, answered = _seconds(spread, rehearse)
        except BaseException:
            spread.close()
            raise
        if answered == clients:
            self.measured[f"{self._processors} processes"] = together
        if answered == clients and together < limit:
            self._here.threads = 0
            spread.set_run(self._here.run)
            self._grid = spread
        else:
            spread.close()


def _seconds(grid: CohortGrid | WorkersGrid, rehearse: Rehearsal) -> tuple[float, int]:
    """How long it takes how many clients: at their fastest, once everything is warm; 0 of them if some failed."""
    clients, seconds = rehearse(grid), list[float]()
    while len(seconds) < _REPETITIONS or sum(seconds) < _ENOUGH:
        started = perf_counter()
        if not clients or rehearse(grid) < clients:
            return 0.0, 0
        seconds.append(perf_counter() - started)
    return min(seconds), clients


def _rehearse(grid: CohortGrid | WorkersGrid, messages: Sequence[Message]) -> int:
    return len(grid.rehearse([_shortened(message, layerwise="none") for message in messages]))


def _rehearse_step(grid: CohortGrid | WorkersGrid, messages: Sequence[Message]) -> int:
    """To the end of a layer-wise step, at which nodes would store something."""
    step = grid.open_step([_shortened(message) for message in messages])
    if step is None:
        return 0
    try:
        said = step.advance()
        while said:
            said = step.advance(respond(said, [1.0] * len(said)))
    except Exception as error:  # whoever takes the step in earnest will find that it cannot be opened
        log(INFO, "The nodes' common step failed, it is taken by messages: %s", error)
        return 0
    finally:
        step.abandon()
    return len(messages)


def _shortened(message: Message, **changes: Any) -> Message:
    """As much of a training message's work as tells how long all of it takes."""
    instruction = _instruction(message)
    steps = _rehearsed_steps(instruction)
    short = replace(instruction, local_steps=steps, local_epochs=1, **changes)
    content = RecordDict({**message.content, wire.CONFIG: short.to_config()})
    return Message(content, message.metadata.dst_node_id, message.metadata.message_type)


def _rehearsed_steps(instruction: Instruction) -> int:
    """That many of each client, also where an epoch has fewer."""
    return min(instruction.local_steps or REHEARSED, REHEARSED)


def _instruction(message: Message) -> Instruction:
    config: Any = message.content[wire.CONFIG]
    return read_instruction(config)
