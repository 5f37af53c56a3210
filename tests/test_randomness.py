"""Random streams are a function of where they are used."""

import hashlib
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.randomness import derive, numpy_generator, torch_generator

streams = st.lists(st.one_of(st.integers(), st.text()), max_size=3)


def test_a_seed_is_half_of_eight_bytes_of_a_hash() -> None:
    digest = hashlib.blake2b(b"3/batches/round/7", digest_size=8).digest()
    assert derive(3, "batches", "round", 7) == int.from_bytes(digest, "big") // 2


@given(st.integers(), streams)
def test_a_seed_fits_every_generator_and_every_message(seed: int, stream: list[int | str]) -> None:
    assert 0 <= derive(seed, *stream) < 2**63
    assert derive(seed, *stream) == derive(seed, *stream)


def test_streams_differ_in_seed_name_and_place() -> None:
    wanted = [
        (seed, name, place)
        for seed in range(10)
        for name in ("batches", "dropout")
        for place in range(20)
    ]
    assert len({derive(*stream) for stream in wanted}) == len(wanted)


def test_global_generators_are_neither_read_nor_changed() -> None:
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    first = torch_generator(0, "a").initial_seed(), numpy_generator(0, "a").integers(2**32)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate()) == before[1:]
    torch.rand(1), np.random.random(), random.random()
    assert (
        torch_generator(0, "a").initial_seed(),
        numpy_generator(0, "a").integers(2**32),
    ) == first
