"""A random stream of a step's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class OwnRandomness:
    """A stream that layers without a generator argument (dropout) draw from, only inside `drawing`.

    PyTorch's default generators belong to the process, not to the thread: steps that take turns would
    otherwise draw from one stream, and their masks would depend on who ran before.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Tensor, list[Tensor]] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Put the stream in place of the process's, and at the end the process's back as it was."""
        with torch.random.fork_rng(devices=_gpus()):
            self._resume()
            try:
                yield
            finally:
                self._state = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in _gpus()]

    def _resume(self) -> None:
        if self._state is None:
            torch.default_generator.manual_seed(self._seed)
            for gpu in _gpus():
                torch.cuda.default_generators[gpu].manual_seed(self._seed)
            return
        torch.set_rng_state(self._state[0])
        for gpu, state in enumerate(self._state[1]):
            torch.cuda.set_rng_state(state, gpu)


def _gpus() -> list[int]:
    """None as long as nobody used one: asking for their generators would start CUDA."""
    started: bool = torch.cuda.is_initialized()
    return list(range(torch.cuda.device_count())) if started else []
