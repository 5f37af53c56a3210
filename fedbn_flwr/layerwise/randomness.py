"""A random stream of a step's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: of the CPU's generator, and of every GPU's
States = tuple[Tensor, list[Tensor]]


class OwnRandomness:
    """A stream that layers without a generator argument (dropout) draw from, only inside `drawing`.

    PyTorch's default generators belong to the process, not to the thread: steps that take turns would
    otherwise draw from one stream, and their masks would depend on who ran before.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: States | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Put the stream in place of the process's, and at the end the process's back as it was."""
        process = _read()
        self._resume()
        try:
            yield
        finally:
            self._state = _read()
            _write(process)

    def _resume(self) -> None:
        if self._state is not None:
            _write(self._state)
            return
        torch.default_generator.manual_seed(self._seed)
        for gpu in _gpus():
            torch.cuda.default_generators[gpu].manual_seed(self._seed)


def _read() -> States:
    return torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in _gpus()]


def _write(states: States) -> None:
    torch.set_rng_state(states[0])
    for gpu, state in enumerate(states[1]):
        torch.cuda.set_rng_state(state, gpu)


def _gpus() -> list[int]:
    """None as long as nobody used one: asking for their generators would start CUDA."""
    started: bool = torch.cuda.is_initialized()
    return list(range(torch.cuda.device_count())) if started else []
