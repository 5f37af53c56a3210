"""The kinds of partition, by name: how each spec is written, and the partitioner that it stands for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedbn_flwr.data.splits import Data
from fedbn_flwr.seeding import derive, numpy_generator

if TYPE_CHECKING:  # takes seconds to import: only who partitions pays
    from flwr_datasets.partitioner import Partitioner

#: FedBS's unbalanced case: the samples of a shard, and the most shards that a client gets
SHARD_SIZE, MOST_SHARDS = 50, 30
#: the fewest samples of a client under `dirichlet`: batch normalization cannot train on one
DIRICHLET_MINIMUM = 2


@dataclass(frozen=True)
class Request:
    """The arguments of a spec `name[:argument[:argument]]`, and what to partition among how many clients."""

    arguments: list[str]
    data: Data
    clients: int
    seed: int

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.data.train)

    def number(self, position: int, default: int | None = None) -> int:
        """An argument that is a whole number of at least 1."""
        text = self.arguments[position] if position < len(self.arguments) else str(default or "")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"expected a whole number of at least 1, not {text!r}")
        return int(text)


def _iid(request: Request) -> "Partitioner":
    from flwr_datasets.partitioner import IidPartitioner

    return IidPartitioner(request.clients)


def _dirichlet(request: Request) -> "Partitioner":
    from flwr_datasets.partitioner import DirichletPartitioner

    try:
        alpha = float(request.arguments[0])
    except (ValueError, IndexError):
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise ValueError("ALPHA must be a number above 0")
    fewest = request.number(1, DIRICHLET_MINIMUM)
    if fewest * request.clients > request.samples:
        raise ValueError(f"{request.samples} samples cannot give {request.clients} clients {fewest} each")
    seed = derive(request.seed, "partition", "dirichlet")
    return DirichletPartitioner(request.clients, "label", alpha, fewest, shuffle=False, seed=seed)


def _classes(request: Request) -> "Partitioner":
    from fedbn_flwr.data.partitioners import RotatingClassPartitioner

    classes = request.number(0)
    if classes > request.data.num_classes:
        raise ValueError(f"{request.data.name} has only {request.data.num_classes} classes")
    return RotatingClassPartitioner(request.clients, "label", request.data.num_classes, classes)


def _shards(request: Request) -> "Partitioner":
    from fedbn_flwr.data.partitioners import ShardsPartitioner

    each = request.number(0)
    if each * request.clients > request.samples:
        raise ValueError(f"{request.samples} samples cannot fill {each * request.clients} shards")
    seed = derive(request.seed, "partition", "shards")
    return ShardsPartitioner(np.full(request.clients, each), "label", seed)


def _shards_unbalanced(request: Request) -> "Partitioner":
    from fedbn_flwr.data.partitioners import ShardsPartitioner, unbalanced

    shards = -(-request.samples // SHARD_SIZE)
    generator = numpy_generator(request.seed, "partition", "shards of each")
    counts = unbalanced(request.clients, shards, MOST_SHARDS, generator)
    return ShardsPartitioner(counts, "label", derive(request.seed, "partition", "shards"))


def _domain(request: Request) -> "Partitioner":
    from fedbn_flwr.data.partitioners import DomainPartitioner

    domains = len(request.data.domain_names)
    if not domains:
        raise ValueError(f"{request.data.name} has no domains")
    each = request.number(0, default=1)
    splits = request.number(1, default=each)
    if each > splits:
        raise ValueError(f"{each} clients a domain need {each} splits of it, not {splits}")
    if request.clients != domains * each:
        needed = f"{domains} domains with {each} each need {domains * each} clients"
        raise ValueError(f"{needed}, not {request.clients}")
    return DomainPartitioner("domain", domains, each, splits)


def _union(request: Request) -> "Partitioner":
    from fedbn_flwr.data.partitioners import UnionPartitioner

    if request.clients != 1:
        raise ValueError(f"1 client holds everything, not {request.clients}")
    return UnionPartitioner()


@dataclass(frozen=True)
class Kind:
    """A kind of partition: how its spec is written, and what makes its partitioner."""

    form: str
    make: Callable[[Request], "Partitioner"]


PARTITIONS: dict[str, Kind] = {
    "iid": Kind("iid", _iid),
    "dirichlet": Kind("dirichlet:ALPHA[:FEWEST-SAMPLES]", _dirichlet),
    "classes": Kind("classes:PER-CLIENT", _classes),
    "shards": Kind("shards:PER-CLIENT", _shards),
    "shards-unbalanced": Kind("shards-unbalanced", _shards_unbalanced),
    "domain": Kind("domain[:CLIENTS-PER-DOMAIN[:SPLITS]]", _domain),
    "union": Kind("union", _union),
}
