"""The client's side of an experiment: from a node's Context to its `BNClient`."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr.client import BNClient
from fedbn_flwr.data import Data

from .config import Config
from .methods import settle
from .workbench import load_data, make_partition, set_threads, shared_model

#: options as they were given, hashable: 1, 1.0 and True are three values
Given = tuple[tuple[str, type, Any], ...]


def client_for(config: Config, context: Context) -> BNClient:
    """The client of one node; its partition is the node's `partition-id`."""
    set_threads(config)
    partition_id, nodes = _place(context)
    loaded, model, partition = _workplace(config, config.clients or nodes)
    return BNClient(
        model,
        loaded.train,
        test=loaded.test,
        num_classes=loaded.num_classes,
        indices=partition[partition_id],
        partition_id=partition_id,
        memory=context.state,
        device=config.device,
    )


@lru_cache(maxsize=2)
def _workplace(config: Config, clients: int) -> tuple[Data, nn.Module, list[NDArray[np.int64]]]:
    """What all clients of a process share, found once: a client is made for every message."""
    return load_data(config), shared_model(config), make_partition(config, clients)


def client_fn(context: Context) -> BNClient:
    """For an app whose options are Flower's run configuration."""
    return client_for(_settled(_given(context.run_config)), context)


def bound_client_fn(run_config: Mapping[str, Any]) -> Callable[[Context], BNClient]:
    """For engines that hand no run configuration to their nodes."""
    given = _given(run_config)
    return lambda context: client_for(_settled(given), context)


def _given(run_config: Mapping[str, Any]) -> Given:
    return tuple((key, type(value), value) for key, value in run_config.items())


@lru_cache(maxsize=16)
def _settled(given: Given) -> Config:
    """Settled once a process: to look through all strategies' options takes as long as a step of training."""
    return settle({key: value for key, _, value in given}).config


def _place(context: Context) -> tuple[int, int]:
    try:
        return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    except KeyError as missing:
        raise ValueError(
            f"the node has no {missing}: start its SuperNode with "
            "--node-config 'partition-id=0 num-partitions=5' (its own number, and how many there are)"
        ) from None
