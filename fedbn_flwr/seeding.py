"""Random streams that are a function of where they are used, never of what ran before."""

import hashlib

import numpy as np
import torch

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
