"""Which samples of a training split each client holds."""

import warnings
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.data.partition_specs import PARTITIONS, Kind, Request
from fedbn_flwr.data.splits import Data
from fedbn_flwr.seeding import numpy_generator

Indices = NDArray[np.int64]


def partition(spec: str, data: Data, clients: int, seed: int) -> list[Indices]:
    """Sorted indices into the training split, one array a client; the same arguments give the same arrays.

    No sample has two clients. Every sample has one, but for what a spec itself leaves out: `classes` where
    the clients are too few to hold every class, and `domain` with more splits than clients a domain.
    Without SPLITS a domain is cut into as many parts as it has clients. What cannot be done as asked is a
    ValueError.
    """
    return _partition(spec, data, clients, seed)


def describe(partition: list[Indices], data: Data) -> list[dict[str, Any]]:
    """For every client how many samples it has, in all, of each class and of each domain (where not none)."""
    table = []
    for client, indices in enumerate(partition):
        row: dict[str, Any] = {"client": client, "examples": len(indices)}
        row["classes"] = _counts(data.train.labels[indices].numpy(force=True))
        if data.train.domains is not None:
            found = _counts(data.train.domains[indices].numpy(force=True))
            row["domains"] = {data.domain_names[domain]: count for domain, count in found.items()}
        table.append(row)
    return table


@lru_cache(maxsize=16)
def _partition(spec: str, data: Data, clients: int, seed: int) -> list[Indices]:
    kind, arguments = _parse(spec)
    if not 1 <= clients <= len(data.train):
        raise ValueError(f"partition {spec!r}: {clients} clients cannot share {len(data.train)} samples")
    try:
        indices = _share(kind, arguments, data, clients, seed)
    except ValueError as error:
        raise ValueError(f"partition {spec!r} ({kind.form}): {error}") from error
    if empty := [str(client) for client, own in enumerate(indices) if len(own) == 0]:
        raise ValueError(f"partition {spec!r}: no sample for client {', '.join(empty)}")
    return indices


def _parse(spec: str) -> tuple[Kind, list[str]]:
    name, *arguments = spec.split(":")
    kind = PARTITIONS.get(name)
    if kind is None or len(arguments) > kind.form.count(":"):
        forms = ", ".join(kind.form for kind in PARTITIONS.values())
        raise ValueError(f"unknown partition {spec!r}; there are: {forms}")
    return kind, arguments


def _share(kind: Kind, arguments: list[str], data: Data, clients: int, seed: int) -> list[Indices]:
    """Share out the samples in an order shuffled by the seed."""
    order = numpy_generator(seed, "partition", "order").permutation(len(data.train))
    with warnings.catch_warnings():
        # DirichletPartitioner warns of every draw that it repeats, which is how it keeps to its minimum
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        return [np.sort(order[rows]) for rows in kind.share(Request(arguments, data, clients, seed, order))]


def _counts(values: Indices) -> dict[int, int]:
    return {int(value): int(count) for value, count in zip(*np.unique(values, return_counts=True), strict=True)}
