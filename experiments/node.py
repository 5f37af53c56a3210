"""The client's side of an experiment: from a node's Context to its `BNClient`."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from flwr.app import Context

from fedbn_flwr.client import BNClient

from .config import Config
from .methods import settle
from .workbench import load_data, make_partition, set_threads, shared_model


def client_for(run_config: Mapping[str, Any], context: Context) -> BNClient:
    """The client of one node; its partition is the node's `partition-id`."""
    config = _settled(tuple(run_config.items()))
    set_threads(config)
    loaded = load_data(config)
    partition_id, nodes = _place(context)
    return BNClient(
        shared_model(config),
        loaded.train,
        test=loaded.test,
        num_classes=loaded.num_classes,
        indices=make_partition(config, config.clients or nodes)[partition_id],
        partition_id=partition_id,
        memory=context.state,
        device=config.device,
    )


def client_fn(context: Context) -> BNClient:
    """For an app whose options are Flower's run configuration."""
    return client_for(context.run_config, context)


def bound_client_fn(run_config: Mapping[str, Any]) -> Callable[[Context], BNClient]:
    """For engines that hand no run configuration to their nodes."""
    return lambda context: client_for(run_config, context)


@lru_cache(maxsize=8)
def _settled(options: tuple[tuple[str, Any], ...]) -> Config:
    """The shared options, read once a process: a client is made for every message, in less time than reading takes."""
    return settle(dict(options)).config


def _place(context: Context) -> tuple[int, int]:
    try:
        return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    except KeyError as missing:
        raise ValueError(
            f"the node has no {missing}: start its SuperNode with "
            "--node-config 'partition-id=0 num-partitions=5' (its own number, and how many there are)"
        ) from None
