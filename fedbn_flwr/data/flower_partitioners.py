"""Partitions drawn by `flwr-datasets` (`dirichlet`), and others in the form of its partitioners.

Importing this module imports `flwr-datasets`, which takes seconds.
"""

from collections.abc import Callable

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, Partitioner

from fedbn_flwr.data.partition_functions import Rows


class RowPartitioner(Partitioner):  # type: ignore[misc]
    """A partitioner around a function of `partition_functions`, which gets one column of numbers of the data set.

    `RowPartitioner(10, "label", lambda labels: rotating_classes(labels, 10, num_classes=10, classes_per_client=2))`
    """

    def __init__(self, num_partitions: int, column: str, share: Callable[[Rows], list[Rows]]) -> None:
        super().__init__()
        self._num_partitions, self._column, self._share = num_partitions, column, share
        self._assigned: list[Rows] | None = None

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the rows of one partition."""
        if self._assigned is None:
            self._assigned = self._share(np.asarray(self.dataset.with_format("arrow")[self._column][:]))
        return self.dataset.select(self._assigned[partition_id])


class RowNumbers(Dataset):  # type: ignore[misc]
    """A data set whose `select` returns only row numbers; `Dataset.select` takes half a millisecond a client."""

    def select(self, indices: list[int]) -> Rows:
        """Return the row numbers."""
        return np.asarray(indices, dtype=np.int64)


def dirichlet(labels: Rows, clients: int, alpha: float, fewest: int, seed: int) -> list[Rows]:
    """Spread every class over the clients by Dirichlet(alpha), as `flwr-datasets` does."""
    partitioner = DirichletPartitioner(clients, "label", alpha, fewest, shuffle=False, seed=seed)
    partitioner.dataset = RowNumbers(Dataset.from_dict({"label": labels}).data)
    return [partitioner.load_partition(client) for client in range(clients)]
