"""Random streams that are a function of where they are used, never of what ran before."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

Stream = int | str


def derive(seed: int, *stream: Stream) -> int:
    """A 63-bit seed for one stream, e.g. `derive(seed, "batches", partition, server_round)`."""
    text = "/".join([str(seed), *map(str, stream)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(seed: int, *stream: Stream, device: str | torch.device = "cpu") -> torch.Generator:
    """A PyTorch generator of the stream's own."""
    return torch.Generator(device=device).manual_seed(derive(seed, *stream))


def numpy_generator(seed: int, *stream: Stream) -> np.random.Generator:
    """A NumPy generator of the stream's own."""
    return np.random.default_rng(derive(seed, *stream))


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
