"""Which way of training several clients of one process is the fastest for a model on a machine: measured, and kept."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

#: at once; and with images in the order of memory that some convolutions of stacks are faster in
STACKED, STACKED_LAST = "stacked", "stacked-channels-last"
#: `plain`: one client after another; `channels-last` and `compiled`: the same, with images in this order of memory, or
#: the model by `torch.compile`
WAYS = ("plain", "channels-last", "compiled", STACKED, STACKED_LAST)

#: how often each way is timed; the fastest counts, because other work on the machine only ever slows down
_REPETITIONS = 3
#: a compiled model must win back the minute or so that compiling takes
WORTH_COMPILING = 1200.0


@dataclass
class Choice:
    """What was measured, and what is therefore used."""

    way: str
    #: seconds a client and step, by way
    seconds: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    #: why a way was left out
    left_out: dict[str, str] = field(default_factory=dict)

    def joined(self, other: "Choice") -> "Choice":
        """Both measurements as one."""
        seconds = {**self.seconds, **other.seconds}
        fastest = min(seconds, key=seconds.__getitem__, default="plain")
        compiling = max(self.compile_seconds, other.compile_seconds)
        return Choice(fastest, seconds, compiling, {**self.left_out, **other.left_out})

    def __str__(self) -> str:
        times = ", ".join(f"{way} {value * 1e3:.3g} ms" for way, value in self.seconds.items())
        out = "".join(f"; {way} left out: {reason}" for way, reason in self.left_out.items())
        return f"{self.way} (a client's step: {times}{out})"


def measure(ways: Mapping[str, Callable[[], int]]) -> Choice:
    """Time ways of taking some steps, each of which returns the number of clients times steps that it took."""
    found = Choice("plain")
    for way, take in ways.items():
        started = perf_counter()
        try:
            take()
        except Exception as error:  # whatever a model or a missing compiler makes of it
            found.left_out[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        first = perf_counter() - started
        found.seconds[way] = min(_timed(take) for _ in range(_REPETITIONS))
        if way == "compiled":
            found.compile_seconds = first
    found.way = min(found.seconds, key=found.seconds.__getitem__, default="plain")
    return found


def _timed(take: Callable[[], int]) -> float:
    started = perf_counter()
    count = take()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (perf_counter() - started) / max(count, 1)


class Kept:
    """What was chosen before on this machine, in a file of the user's cache; losing it costs a measurement."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "engine.json"

    def recall(self, key: str) -> Choice | None:
        """The choice, if there is one."""
        known = self._read().get(key)
        try:
            return None if known is None else Choice(**known)
        except TypeError:  # written by another version
            return None

    def keep(self, key: str, choice: Choice) -> None:
        """Remember; a cache that cannot be written is no reason to stop."""
        everything = {**self._read(), key: asdict(choice)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(everything, indent=1, sort_keys=True))
            temporary.replace(self._path)
        except OSError:
            pass

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def cache_folder() -> Path:
    """Where a user's caches are, `$XDG_CACHE_HOME` or what stands for it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbn-flwr"


def describe(model: nn.Module, *circumstances: object) -> str:
    """A key for a model, the circumstances of its training, and the machine."""
    shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.state_dict().items()]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    machine = platform.machine(), platform.processor(), os.cpu_count(), gpu, torch.__version__, torch.get_num_threads()
    text = repr((type(model).__qualname__, repr(model), shapes, circumstances, machine, WAYS))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
