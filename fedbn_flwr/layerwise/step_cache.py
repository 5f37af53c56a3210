"""What a process keeps between the exchanges of suspended steps: the steps, and copies of models for them."""

import copy
import threading
from collections.abc import Hashable
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fedbn_flwr.layerwise.suspended_step import SuspendedStep


class StepCache:
    """Keeps at most `max_steps` suspended steps, each at most `time_to_live` seconds.

    A step that is not in the cache is replayed from its log. The cache abandons a new step if there is no room: clients
    alternate, so that abandoning the oldest step would leave no client its step for its next message. It also abandons
    steps that are too old, and a step in whose place another is kept.
    """

    def __init__(self, max_steps: int = 16, time_to_live: float = 600.0) -> None:
        self.max_steps, self._time_to_live = max_steps, time_to_live
        self._lock = threading.RLock()
        # in the order of arrival, which is that of their deadlines
        self._kept: dict[Hashable, tuple[float, SuspendedStep[Any]]] = {}
        self._timer: threading.Timer | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def make_room(self, steps: int) -> None:
        """Raise `max_steps` to at least this number: one step for each client of a process."""
        self.max_steps = max(self.max_steps, steps)

    def keep(self, key: Hashable, step: SuspendedStep[Any]) -> None:
        """Keep the step until it is taken."""
        with self._lock:
            previous = self.take(key)
            if previous is not None and previous is not step:
                previous.abandon()
            if len(self._kept) >= self.max_steps:
                step.abandon()
                return
            self._kept[key] = monotonic() + self._time_to_live, step
            self._watch()

    def take(self, key: Hashable) -> SuspendedStep[Any] | None:
        """Remove the step and return it, None if it is not there; the caller owns the step."""
        with self._lock:
            _, step = self._kept.pop(key, (0.0, None))
            return step

    def clear(self) -> None:
        """Abandon all steps."""
        with self._lock:
            for key in list(self._kept):
                self._drop(key)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _drop(self, key: Hashable) -> None:
        _, step = self._kept.pop(key)
        step.abandon()

    def _watch(self) -> None:
        """Set one timer for the next deadline: an idle process must abandon its steps too."""
        if self._timer is None and self._kept:
            deadline, _ = next(iter(self._kept.values()))
            self._timer = threading.Timer(max(0.0, deadline - monotonic()), self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            self._timer = None
            now = monotonic()
            for key in [key for key, (deadline, _) in self._kept.items() if deadline <= now]:
                self._drop(key)
            self._watch()


class Replicas:
    """Copies of models, to be used again: to make one takes as long as several messages."""

    def __init__(self) -> None:
        self._free: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

    def take(self, model: nn.Module) -> nn.Module:
        """Return a copy that nobody else uses, with any values."""
        free = self._free.get(model)
        return free.pop() if free else copy.deepcopy(model)

    def give_back(self, model: nn.Module, replica: nn.Module) -> None:
        """Take back a copy that is not used any more, and has no hooks."""
        self._free.setdefault(model, []).append(replica)
