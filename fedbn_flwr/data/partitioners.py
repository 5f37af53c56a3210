"""Partitioners that `flwr-datasets` lacks, to be used like its own.

Each takes rows in the order in which they come: shuffle the data set before, as `partition` does. Importing
this module imports `flwr-datasets`, which takes seconds, so `fedbn_flwr.data` does so only to partition.
"""

from abc import abstractmethod

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class RowPartitioner(Partitioner):  # type: ignore[misc]
    """A partitioner whose subclasses say, once, which rows each partition takes."""

    def __init__(self, num_partitions: int) -> None:
        super().__init__()
        self._num_partitions = num_partitions
        self._assigned: list[Rows] | None = None

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """The rows of one partition."""
        if self._assigned is None:
            self._assigned = self.assign()
        return self.dataset.select(self._assigned[partition_id])

    def column(self, name: str) -> Rows:
        """A whole column of numbers."""
        return np.asarray(self.dataset.with_format("arrow")[name][:])

    @abstractmethod
    def assign(self) -> list[Rows]:
        """The rows of every partition."""


class UnionPartitioner(RowPartitioner):
    """One partition with everything: centralized training."""

    def __init__(self) -> None:
        super().__init__(1)

    def assign(self) -> list[Rows]:
        """All rows."""
        return [np.arange(self.dataset.num_rows)]


class RotatingClassPartitioner(RowPartitioner):
    """Every partition holds `classes_per_partition` consecutive classes, rotating through all of them.

    Y. Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, appendix D (FedTAN),
    which this gives exactly for 5 partitions and 10 classes. With N partitions and C classes, partition k
    starts at class floor(k C / N). A class is split evenly among its holders, and the number of these
    differs by at most one from class to class. Where N partitions are too few for all classes, those in the
    gaps are left out.
    """

    def __init__(self, num_partitions: int, partition_by: str, num_classes: int, classes_per_partition: int) -> None:
        super().__init__(num_partitions)
        self._partition_by = partition_by
        self._num_classes, self._classes_per_partition = num_classes, classes_per_partition

    def holders(self) -> list[list[int]]:
        """The partitions that hold each class."""
        held_by: list[list[int]] = [[] for _ in range(self._num_classes)]
        for partition in range(self._num_partitions):
            start = partition * self._num_classes // self._num_partitions
            for step in range(self._classes_per_partition):
                held_by[(start + step) % self._num_classes].append(partition)
        return held_by

    def assign(self) -> list[Rows]:
        """Every class cut into one piece a holder."""
        labels = self.column(self._partition_by)
        pieces: list[list[Rows]] = [[] for _ in range(self._num_partitions)]
        for label, holders in enumerate(self.holders()):
            rows = np.flatnonzero(labels == label)
            if len(rows) < len(holders):
                raise ValueError(f"the {len(rows)} samples of class {label} cannot serve {len(holders)} clients")
            for holder, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
                pieces[holder].append(piece)
        return [np.concatenate(held) for held in pieces]


class ShardsPartitioner(RowPartitioner):
    """Rows sorted by label, cut into shards and dealt at random, to every partition a number of its own.

    M. J. Idrissi et al., FEDBS: Learning on Non-IID Data in Federated Learning using Batch Normalization,
    section V. `flwr_datasets.partitioner.ShardPartitioner` drops what does not fill a shard, and gives every
    partition the same number; here the sizes of shards differ by at most one row and no row is left over.
    """

    def __init__(self, shards: NDArray[np.int64], partition_by: str, seed: int) -> None:
        super().__init__(len(shards))
        self._shards, self._partition_by, self._seed = shards, partition_by, seed

    def assign(self) -> list[Rows]:
        """The dealt shards of every partition."""
        by_label = np.argsort(self.column(self._partition_by), kind="stable")
        shards = np.array_split(by_label, self._shards.sum())
        order = np.random.default_rng(self._seed).permutation(len(shards))
        hands = np.split(order, np.cumsum(self._shards)[:-1])
        return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]


def unbalanced(partitions: int, shards: int, most: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """How many shards each partition gets: uniform from 1 to `most`, then moved until none is left over."""
    if not partitions <= shards <= partitions * most:
        raise ValueError(f"{shards} shards cannot be dealt to {partitions} clients with 1 to {most} for each")
    counts = generator.integers(1, most + 1, partitions)
    while (missing := shards - counts.sum()) != 0:
        step = np.sign(missing)
        movable = np.flatnonzero((counts + step >= 1) & (counts + step <= most))
        counts[generator.permutation(movable)[: abs(missing)]] += step
    return counts


class DomainPartitioner(RowPartitioner):
    """Every domain cut into `splits` fixed parts, of which `partitions_per_domain` are used, one a partition.

    W. Zhuang and L. Lyu, Is Batch Normalization Necessary for Multi-domain Federated Learning?, Fig. 4
    (FedWon), after X. Li et al., FedBN, ICLR 2021: with 10 splits and 1 to 10 clients a domain, clients are
    added and none is changed. Partition k D + d holds part k of domain d, of D; parts that no partition
    holds are left out.
    """

    def __init__(self, partition_by: str, num_domains: int, partitions_per_domain: int, splits: int) -> None:
        super().__init__(num_domains * partitions_per_domain)
        self._partition_by, self._num_domains, self._splits = partition_by, num_domains, splits

    def assign(self) -> list[Rows]:
        """The parts in the order of the partitions."""
        domains = self.column(self._partition_by)
        parts = [np.array_split(np.flatnonzero(domains == d), self._splits) for d in range(self._num_domains)]
        return [parts[k % self._num_domains][k // self._num_domains] for k in range(self._num_partitions)]
