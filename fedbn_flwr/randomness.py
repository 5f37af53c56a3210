"""Random streams that are a function of where they are used, never of what ran before."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.device import accelerator, started

Stream = int | str


def derive(seed: int, *stream: Stream) -> int:
    """A 63-bit seed for one stream, e.g. `derive(seed, "batches", partition, server_round)`."""
    text = "/".join([str(seed), *map(str, stream)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(seed: int, *stream: Stream) -> torch.Generator:
    """A PyTorch generator of the stream's own."""
    return torch.Generator().manual_seed(derive(seed, *stream))


def numpy_generator(seed: int, *stream: Stream) -> np.random.Generator:
    """A NumPy generator of the stream's own."""
    return np.random.default_rng(derive(seed, *stream))


#: of the CPU's generator, and of every accelerator's once these are used
GeneratorStates = tuple[Tensor, list[Tensor]]


class OwnRandomness:
    """A stream that layers without a generator argument (dropout) draw from, only inside `drawing`.

    PyTorch's default generators belong to the process, not to the thread: steps that take turns
    would otherwise draw from one stream, and their masks would depend on who ran before.
    """

    #: how often streams of this process were drawn from, which its own generators do not tell
    times: ClassVar[int] = 0

    def __init__(self, seed: int) -> None:
        self._seed = seed
        #: after the first use
        self._state: GeneratorStates | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Put the stream in place of the process's, and at the end the process's back as it was."""
        OwnRandomness.times += 1
        process = _read()
        _write(self._state or (torch.Generator().manual_seed(self._seed).get_state(), []))
        try:
            yield
        finally:
            self._state = _read()
            _write(process)


def _read() -> GeneratorStates:
    module = started()
    count = 0
    if module:
        count = torch.accelerator.device_count()
    return torch.get_rng_state(), [module.get_rng_state(index) for index in range(count)]


def _write(states: GeneratorStates) -> None:
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1]):
        started().set_rng_state(state, index)
    if not states[1]:
        module = started()
        if module:
            _seed(module)


def seed_unused() -> None:
    """Let an accelerator that nobody has used yet start with the seed of torch's generator."""
    found = accelerator()
    if found:
        _seed(torch.get_device_module(found))


def _seed(module: Any) -> None:
    (getattr(module, "manual_seed_all", None) or module.manual_seed)(torch.initial_seed())
