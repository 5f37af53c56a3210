"""The client's side of an experiment: from a node's Context to its `BNClient`."""

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr.client import BNClient, pick_device
from fedbn_flwr.client.learning_task import task_of
from fedbn_flwr.data import Data, without_domains
from fedbn_flwr.data.loading import ROOT_VARIABLE
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.method import resolve
from fedbn_flwr.experiments.resources import load_data, make_partition, set_threads, shared_model
from fedbn_flwr.experiments.sites.own_data import DATA_KEY, at_site

#: options as they were given, hashable: 1, 1.0 and True are three values
Given = tuple[tuple[str, type, Any], ...]


class Resources(NamedTuple):
    """The data and the model that all nodes of a process share."""

    config: Config
    data: Data
    partition: list[NDArray[np.int64]]
    model: nn.Module
    device: str


def client_fn(context: Context) -> BNClient:
    """Make the client of a node whose options are Flower's run configuration."""
    return _client(_given(context.run_config), context)


def bound_client_fn(run_config: Mapping[str, Any]) -> Callable[[Context], BNClient]:
    """Return a `client_fn` for engines that hand no run configuration to their nodes."""
    given = _given(run_config)
    return lambda context: _client(given, context)


def _client(given: Given, context: Context) -> BNClient:
    """The client of one node; its partition is the node's `partition-id`, or all data of its own."""
    partition_id, nodes = _place(context)
    own_data = str(context.node_config.get(DATA_KEY, ""))
    shared = _resources(given, nodes, os.environ.get(ROOT_VARIABLE), own_data)
    set_threads(shared.config)
    return BNClient(
        shared.model,
        shared.data.train,
        test=shared.data.test,
        num_classes=shared.data.num_classes,
        indices=shared.partition[0 if own_data else partition_id],
        partition_id=partition_id,
        memory=context.state,
        device=shared.device,
        task=task_of(shared.data.task),
    )


def _given(run_config: Mapping[str, Any]) -> Given:
    return tuple((key, type(value), value) for key, value in run_config.items())


@lru_cache(maxsize=2)
def _resources(given: Given, nodes: int, root: str | None, own_data: str) -> Resources:
    """Made once a process: to resolve options and look everything up takes as long as a step of training.

    `root` is where data are looked for that name no place of their own.
    """
    config = at_site(resolve({key: value for key, _, value in given}).config, own_data)
    set_threads(config)
    partition = make_partition(config, config.clients or nodes)
    data = without_domains(load_data(config)) if own_data else load_data(config)
    return Resources(config, data, partition, shared_model(config), str(pick_device(config.device)))


def _place(context: Context) -> tuple[int, int]:
    try:
        return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    except KeyError as missing:
        raise ValueError(
            f"the node has no {missing}: start its SuperNode with "
            "--node-config 'partition-id=0 num-partitions=5' (its own number, and how many there are)"
        ) from None
