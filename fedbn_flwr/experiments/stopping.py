"""How a signal ends the runs of this process: after the present round, or at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: set in a process whose run has others beside it, which their common parent stops
SIDE_BY_SIDE = threading.Event()


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


class Stop:
    """Whether a signal has asked this process to end, and how it then ends."""

    def __init__(self) -> None:
        self._error: type[KeyboardInterrupt] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the present round is the last one."""
        return self._error is not None

    def ask(self, error: type[KeyboardInterrupt]) -> None:
        """Let the run end with this error after the present round."""
        self._error = error

    def obey(self) -> None:
        """Raise the error if a signal has asked for it."""
        if self._error:
            raise self._error

    def forget(self) -> None:
        """Go on as if no signal had come."""
        self._error = None


#: of this process
STOP = Stop()


@contextmanager
def stoppable(at_once: bool = False) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C end the run after its present round.

    A second signal ends it now, and with `at_once` the first one does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> None:
        error = KeyboardInterrupt
        if number == signal.SIGTERM:
            error = Terminated
        if at_once or STOP.is_asked:
            raise error
        STOP.ask(error)
        if not SIDE_BY_SIDE.is_set():
            print("fedbn-flwr: stops after this round; once more stops it now", file=sys.stderr)

    # a terminal sends Ctrl-C to all processes, and those that this one has started obey its SIGTERM
    numbers = [signal.SIGTERM]
    if not SIDE_BY_SIDE.is_set():
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        STOP.forget()
        for number, handler in before.items():
            signal.signal(number, handler)
