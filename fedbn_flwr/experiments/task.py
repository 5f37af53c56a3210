"""What the server of a run knows of its data: the data themselves, or what the sites say of theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fedbn_flwr.client import pick_device
from fedbn_flwr.data import SITES
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.output.scoring import Scorer
from fedbn_flwr.experiments.output.site_scoring import SiteScorer
from fedbn_flwr.experiments.resources import (
    Form,
    check_partition,
    form_of,
    load_data,
    make_partition,
    rounds_within_budget,
    set_threads,
    shared_model,
)
from fedbn_flwr.experiments.sites.agreement import agree, ask_sites
from fedbn_flwr.experiments.sites.grid import SitesGrid


@dataclass(frozen=True)
class Task:
    """A run's options with what its data decide, the nodes that have data for it, and who scores its models."""

    config: Config
    grid: Grid
    #: what a model must know of the data
    form: Form
    scorer: Scorer | SiteScorer
    #: what every message tells a node of the data
    told: ConfigRecord
    #: a row about each site's data
    sites: list[dict[str, Any]]
    #: by node, the number of training samples, where sites have said it
    counts: Mapping[int, int] = field(default_factory=dict)


def make_task(grid: Grid, config: Config, nodes: int, before: Mapping[str, Any], secure: bool = False) -> Task:
    """Return the task of a run; `before` are the options of the run that goes on, if there is one."""
    return _at_sites(grid, config, nodes, before, secure) if config.dataset == SITES else _here(grid, config, nodes)


def _here(grid: Grid, config: Config, nodes: int) -> Task:
    check_partition(config, nodes)
    config = rounds_within_budget(config, nodes)
    set_threads(config)
    trained = np.concatenate(make_partition(config, nodes)) if config.train_loss_global else None
    scorer = Scorer(shared_model(config), load_data(config), pick_device(config.device), trained, config.class_metrics)
    return Task(config, grid, form_of(config), scorer, ConfigRecord(), [])


def _at_sites(grid: Grid, config: Config, nodes: int, before: Mapping[str, Any], secure: bool) -> Task:
    """Ask the sites what their data are, and agree on what they have in common."""
    if before and not config.mean:
        # what the sites agreed on then: today another one may be absent
        config = Config.from_mapping({**config.to_mapping(), "mean": before["mean"], "std": before["std"]})
    answers = ask_sites(grid, sorted(grid.get_node_ids()), config.node_timeout, secure)
    agreement = agree(replace(config, partition=SITES), answers)
    config = rounds_within_budget(agreement.config, nodes, agreement.samples)
    set_threads(config)
    scorer = SiteScorer(config.classes, config.class_metrics)
    sites_grid = SitesGrid(grid, agreement, secure)
    counts = {node: sum(site.train) for node, site in agreement.sites.items()}
    return Task(config, sites_grid, agreement.form, scorer, agreement.to_config(), agreement.table(), counts)
