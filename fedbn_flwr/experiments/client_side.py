"""The client's side of an experiment: from a node's Context to its `BNClient`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.data import SITES, Data, Split, without_domains
from fedbn_flwr.data.loading import ROOT_VARIABLE
from fedbn_flwr.data.splits import FLOATS, check_names
from fedbn_flwr.experiments.checks import check_task
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.experiment import import_plugins, resolve
from fedbn_flwr.experiments.material import Material, load_data, set_up_process
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.wire.site_data import DATA_MEAN, DATA_STD, SITE_DATA, SiteData, problem

#: where a site names its data, in its SuperNode's node configuration: `folder:/PATH` or
#: `package.module:function`
DATA_KEY = "data"
#: the options that a message may bring
_TOLD = {"mean": DATA_MEAN, "std": DATA_STD}


def at_site(config: Config, own_data: str) -> Config:
    """Return a run's options as a node trains by them.

    They name no file of weights, because the server sends what was in it. A site's own data stand
    in place of the run's, and then no option names a file. A run on other data than the site's is a
    UsageError, and so is a site that has none for a run on the sites' data.
    """
    config = config.but(init_from="")
    if own_data and config.data.dataset != SITES:
        raise UsageError(
            f"this site trains on its own data only: the run must have dataset={SITES!r}, not "
            f"{config.data.dataset!r}"
        )
    if not own_data:
        if config.data.dataset == SITES:
            raise UsageError(
                'this site has no data: its SuperNode needs data="folder:/PATH" in --node-config'
            )
        return config
    kind, _, path = own_data.partition(":")
    if kind == "folder" and not Path(path).is_absolute():
        raise UsageError(
            f"the site's data must be an absolute path, as in folder:/data, not {own_data!r}"
        )
    train = Path(path, "train")
    if kind == "folder" and not train.is_dir() and not any(Path(path).glob("*/train")):
        raise UsageError(
            f"the site's data must be in train/CLASS/ and test/CLASS/, and there is no {train}"
        )
    alone: dict[str, Any] = {"partition": "union", "clients": 1, "min_nodes": 0, "sites": ()}
    return config.but(dataset=own_data, data_root="", **alone)


def describe_data(context: Context) -> SiteData:
    """Return what a site says of its data: task, names, counts, shapes, and moments of the training
    images' channels.
    """
    config = resolve(_given(context), federation=True).config
    own = at_site(config, str(context.node_config.get(DATA_KEY, "")))
    # by their own names: which names the run knows is for the server to say
    data = load_data(replace(own.data, classes=(), mean=(), std=()))
    named = f"the site's data {own.data.dataset!r}"
    if not data.class_names and not data.train.is_dense:
        raise UsageError(f"{named} have no class names: `Data` takes `class_names`")
    check_task(own, data)
    if own.data.classes and data.train.targets == FLOATS:
        check_names(data, own.data.classes)
    if not len(data.train):
        raise UsageError(f"{named} have no training samples")
    mean, variance = data.train.moments()
    return SiteData(
        site=int(context.node_config["partition-id"]),
        task=data.task,
        class_names=data.class_names,
        samples=(len(data.train), len(data.test)),
        train=_by_class(data, data.train),
        test=_by_class(data, data.test),
        shape=tuple(data.train.inputs.shape[1:]),
        scaled=data.train.is_scaled,
        mean=mean,
        variance=variance,
    )


def _by_class(data: Data, split: Split) -> tuple[int, ...]:
    """Return how many samples each class has, if samples have classes."""
    if split.targets:
        return ()
    return tuple(np.bincount(split.labels, minlength=data.num_classes).tolist())


def add_site_data(app: ClientApp) -> ClientApp:
    """Let an app answer what its site's data are; returns the app."""

    @app.query(SITE_DATA.partition(".")[2])
    def answer(message: Message, context: Context) -> Message:
        try:
            content = describe_data(context).pack()
        except (ValueError, OSError, ImportError, KeyError) as error:
            content = problem(" ".join(str(error).split()) or type(error).__name__)
        return Message(content, reply_to=message)

    return app


def use_agreed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Hand the client the normalization of the message as if the run's options had it: a mod for
    the ClientApp.
    """
    config = message.content.get(wire.record_names(message.content)[1])
    agreed = {
        option: config[key]
        for option, key in _TOLD.items()
        if isinstance(config, ConfigRecord) and key in config
    }
    if not agreed:
        return call_next(message, context)
    given: Mapping[str, Any] = context.run_config
    context.run_config = {**given, **agreed}  # type: ignore[dict-item]  # texts
    try:
        return call_next(message, context)
    finally:
        context.run_config = dict(given)


def client_fn(context: Context) -> BNClient:
    """Make the client of a node whose options are Flower's run configuration."""
    # 1, 1.0 and True are three values
    return _client(
        _config_of(tuple((key, type(value), value) for key, value in _given(context).items())),
        context,
    )


def _given(context: Context) -> dict[str, Any]:
    """Return the run's options; a site with data of its own does not read the run's to see how they
    are split.
    """
    own = {}
    if context.node_config.get(DATA_KEY):
        own = {"partition": "union"}
    return {**context.run_config, **own}


def bound_client_fn(config: Config) -> Callable[[Context], BNClient]:
    """Return a `client_fn` for engines that hand no run configuration to their nodes."""
    return partial(_client, config)


@lru_cache(maxsize=2)
def _config_of(given: tuple[tuple[str, type, Any], ...]) -> Config:
    """Resolve options once a process, because it takes as long as a step of training."""
    return resolve({key: value for key, _, value in given}, federation=True).config


def _client(config: Config, context: Context) -> BNClient:
    partition_id, nodes = place_of(context)
    own_data = str(context.node_config.get(DATA_KEY, ""))
    material = _material(config, nodes, os.environ.get(ROOT_VARIABLE), own_data)
    if not own_data and partition_id >= len(material.partition):
        split = (
            f"{config.data.dataset!r} is split for the numbers 0 to {len(material.partition) - 1}"
        )
        raise UsageError(
            f"this site has number {partition_id}, but {split}: give more clients, or a site its "
            "data"
        )
    row = 0 if own_data else partition_id
    return material.client(row, partition_id=partition_id, memory=context.state)


@lru_cache(maxsize=2)
def _material(config: Config, nodes: int, root: str | None, own_data: str) -> Material:
    """Return what Flower's nodes of a process share: Flower hands them nothing but a Context, in
    message after message.

    `root` is where data are looked for that name no place of their own.
    """
    import_plugins(config.plugins)
    own = at_site(config, own_data)
    own = replace(own, clients=own.clients or nodes)
    set_up_process(own.engine)
    return Material.of(own, without_domains(load_data(own.data)) if own_data else None)


def place_of(context: Context) -> tuple[int, int]:
    """Return a node's number, and how many nodes there are."""
    try:
        return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    except KeyError as missing:
        raise ValueError(
            f"the node has no {missing}: start its SuperNode with --node-config 'partition-id=0 "
            "num-partitions=5' (its own number, and how many there are)"
        ) from None
