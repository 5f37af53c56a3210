"""Data sets, their partitions among clients, and augmentation.

A data set is a training and a test split in memory, loaded once a process and shared by all
clients. A partition is one array of indices a client.
"""

from fedbn_flwr.data.augmentation import AUGMENTATIONS, parse_augmentation
from fedbn_flwr.data.loading import DATASETS, SITES, DatasetRequest, load, register_dataset
from fedbn_flwr.data.partition import PARTITIONS, PartitionRequest, partition, register_partition
from fedbn_flwr.data.splits import Data, Split, leave_out, normalized, renumbered, without_domains

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "SITES",
    "Data",
    "DatasetRequest",
    "PartitionRequest",
    "Split",
    "leave_out",
    "load",
    "normalized",
    "parse_augmentation",
    "partition",
    "register_dataset",
    "register_partition",
    "renumbered",
    "without_domains",
]
