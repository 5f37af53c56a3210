"""The client's side of an experiment: from a node's Context to its `BNClient`."""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr.client import BNClient, pick_device
from fedbn_flwr.client.learning_task import LearningTask, task_of
from fedbn_flwr.data import Data, without_domains
from fedbn_flwr.data.loading import ROOT_VARIABLE
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.method import import_plugins, resolve
from fedbn_flwr.experiments.resources import load_data, make_partition, set_threads, shared_model
from fedbn_flwr.experiments.sites.own_data import DATA_KEY, at_site


class Resources(NamedTuple):
    """The data and the model that all nodes of a process share."""

    data: Data
    partition: list[NDArray[np.int64]]
    model: nn.Module
    device: str
    task: LearningTask


def client_fn(context: Context) -> BNClient:
    """Make the client of a node whose options are Flower's run configuration."""
    # 1, 1.0 and True are three values
    return _client(_config_of(tuple((key, type(value), value) for key, value in context.run_config.items())), context)


def bound_client_fn(config: Config) -> Callable[[Context], BNClient]:
    """Return a `client_fn` for engines that hand no run configuration to their nodes."""
    return partial(_client, config)


@lru_cache(maxsize=2)
def _config_of(given: tuple[tuple[str, type, Any], ...]) -> Config:
    """Resolve options once a process, because it takes as long as a step of training."""
    return resolve({key: value for key, _, value in given}).config


def _client(config: Config, context: Context) -> BNClient:
    """The client of one node; its partition is the node's `partition-id`, or all data of its own."""
    partition_id, nodes = _place(context)
    own_data = str(context.node_config.get(DATA_KEY, ""))
    shared = _resources(config, nodes, os.environ.get(ROOT_VARIABLE), own_data)
    return BNClient(
        shared.model,
        shared.data.train,
        test=shared.data.test,
        num_classes=shared.data.num_classes,
        indices=shared.partition[0 if own_data else partition_id],
        partition_id=partition_id,
        memory=context.state,
        device=shared.device,
        task=shared.task,
    )


@lru_cache(maxsize=2)
def _resources(config: Config, nodes: int, root: str | None, own_data: str) -> Resources:
    """Load what all nodes of a process share.

    `root` is where data are looked for that name no place of their own.
    """
    import_plugins(config.plugins)
    config = at_site(config, own_data)
    set_threads(config)
    partition = make_partition(config, config.clients or nodes)
    data = without_domains(load_data(config)) if own_data else load_data(config)
    return Resources(data, partition, shared_model(config), str(pick_device(config.device)), task_of(data.task))


def _place(context: Context) -> tuple[int, int]:
    try:
        return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    except KeyError as missing:
        raise ValueError(
            f"the node has no {missing}: start its SuperNode with "
            "--node-config 'partition-id=0 num-partitions=5' (its own number, and how many there are)"
        ) from None
