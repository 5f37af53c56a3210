"""The server's half: what sites say of their data, checked before round 1, and what follows for all
of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import nn

from fedbn_flwr import wire
from fedbn_flwr.client.learning_task import LearningTask
from fedbn_flwr.data import Data, Split, normalized
from fedbn_flwr.data.pixels import deviations
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.material import Form, Material
from fedbn_flwr.plugins.options import UsageError, as_value
from fedbn_flwr.server.grids import PassingGrid, ask_nodes
from fedbn_flwr.server.pooling import name_dominant
from fedbn_flwr.wire.site_data import DATA_MEAN, DATA_SHAPE, DATA_STD, SITE_DATA, SiteData

#: descriptions by node, or why there is none
Answers = Mapping[int, SiteData | str]
#: seconds that a site has to describe its data when it comes after round 1
PATIENCE = 120.0


@dataclass(frozen=True)
class Agreement:
    """What all sites of a run have in common."""

    #: the run's options, with the normalization
    config: Config
    #: what the data of all sites are for
    task: str
    shape: tuple[int, ...]
    #: the number of means that a site says: one a channel, or none of ids
    means: int
    #: whether inputs are from 0 to 1 at most sites, so that no site's moments are larger
    scaled: bool
    #: the descriptions by node, of the sites that were there before round 1
    sites: Mapping[int, SiteData]

    @property
    def form(self) -> Form:
        """What a model must know of the data."""
        return Form.of(len(self.config.data.classes), self.shape)

    def example(self, task: LearningTask, model: nn.Module) -> Material:
        """Return what a site would work with, on two samples of its form without their content: to
        try a model.
        """
        config = self.config
        options = config.data
        inputs = torch.zeros(2, *self.shape)
        if not self.means:
            inputs = inputs.long()
        classes = len(options.classes)
        if not task.has_classes:
            # nobody here knows the shape of float targets, which an objective would be tried on
            config = config.but(objective="")
            labels = torch.zeros(2, classes)
        elif task.placed:
            labels = torch.zeros(2, *self.shape[1:], dtype=torch.int64)
        else:
            labels = torch.zeros(2, dtype=torch.int64)
        split = Split(inputs, labels)
        samples = Data("the sites' data", split, split, classes, task=self.task)
        if options.mean:
            samples = normalized(samples, options.mean, options.std)
        return Material(config, samples, [], model, torch.device("cpu"))

    @property
    def samples(self) -> int:
        """The number of training samples of all sites."""
        return sum(site.samples[0] for site in self.sites.values())

    @property
    def absent_classes(self) -> list[str]:
        """The classes of which no site has a training sample, where samples have classes."""
        counts = Counter[str]()
        for site in self.sites.values():
            if site.train:
                counts.update(dict(zip(site.class_names, site.train, strict=True)))
        if not counts:
            return []
        return [name for name in self.config.data.classes if not counts[name]]

    def to_config(self) -> ConfigRecord:
        """Return what every message tells a site."""
        mean = self.config.data.mean
        std = self.config.data.std
        return ConfigRecord(
            {DATA_MEAN: as_value(mean), DATA_STD: as_value(std), DATA_SHAPE: list(self.shape)}
        )

    def objection(self, node: int, site: SiteData | str, others: Mapping[int, SiteData]) -> str:
        """Return why a node cannot take part beside others, whose answer may be a reason.

        The text is empty if it can.
        """
        if isinstance(site, str):
            return site
        same = [
            other
            for other, present in others.items()
            if present.site == site.site and other != node
        ]
        if same:
            return f"node {same[0]} has its site number {site.site}: give each site its own number"
        unknown = [name for name in site.class_names if name not in self.config.data.classes]
        if unknown:
            known = ", ".join(self.config.data.classes)
            return wire.printable(f"class {unknown[0]!r} is not one of the run's classes: {known}")
        if site.task != self.task:
            return wire.printable(
                f"its data are for {site.task}, but those of most sites for {self.task}"
            )
        if site.shape != self.shape:
            shapes = f"{_times(site.shape)}, but {_times(self.shape)} at most sites"
            return f"its images are {shapes} (set image-size to scale all images)"
        if len(site.mean) != self.means:
            return f"it says {len(site.mean)} means, but most sites {self.means}"
        most = max((*map(abs, site.mean), *site.variance), default=0)
        if self.scaled and (most > 1 or min(site.mean, default=0) < 0):
            about = f"channels have means and variances up to {most:g}"
            return f"its {about}, but inputs at most sites are from 0 to 1"
        return ""

    def table(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return a row about each site, for the results."""
        rows = []
        for node, site in sorted(self.sites.items(), key=lambda each: each[1].site):
            row: dict[str, Any] = {
                "site": names.get(node, site.site),
                "shape": list(site.shape),
                "samples": list(site.samples),
            }
            if site.train:
                row["train"] = dict(zip(site.class_names, site.train, strict=True))
                row["test"] = dict(zip(site.class_names, site.test, strict=True))
            rows.append(row)
        return rows


def ask_sites(grid: Grid, nodes: Sequence[int], timeout: float) -> Answers:
    """Ask nodes what their data are."""
    question = RecordDict({wire.CONFIG: ConfigRecord()})
    messages = [Message(question, dst_node_id=node, message_type=SITE_DATA) for node in nodes]
    replies = ask_nodes(grid, messages, timeout)
    return {node: _read(replies.get(node), timeout) for node in nodes}


def agree(config: Config, answers: Answers) -> Agreement:
    """Return what the sites agree on.

    A UsageError names the first site that cannot take part, and why.

    With `min_nodes`, a site may be left out if enough others can take part: `SitesGrid` asks that
    site again.
    """
    described = [answer for answer in answers.values() if isinstance(answer, SiteData)]
    if any(site.class_names for site in described) and not config.data.classes:
        names = wire.printable(
            ",".join(sorted({name for site in described for name in site.class_names}))
        )
        raise UsageError(
            f"the data set 'sites' needs classes, in the order of their numbers; there are: {names}"
        )
    forms = Counter((site.task, site.shape, len(site.mean)) for site in described)
    form: tuple[str, tuple[int, ...], int] = ("", (), 0)
    if forms:
        form, _ = forms.most_common(1)[0]
    task, shape, means = form
    scaled = 2 * sum(site.scaled for site in described) >= len(described)
    sites = dict[int, SiteData]()
    refused = dict[int, str]()
    agreement = Agreement(config, task, shape, means, scaled, sites)
    for node, answer in answers.items():
        reason = agreement.objection(node, answer, sites)
        if isinstance(answer, str) or reason:
            refused[node] = reason
        else:
            log(INFO, "Site %d (node %d): %s", answer.site, node, spoken(answer))
            sites[node] = answer
    for node, reason in refused.items():
        if not 0 < config.network.min_nodes <= len(sites):
            raise UsageError(f"node {node}: {reason}")
        log(WARNING, "Node %d is not there at the start: %s", node, reason)
    name_dominant(
        {node: site.samples[0] for node, site in sites.items()}, "the sites' descriptions"
    )
    return replace(agreement, config=_normalized(config, list(sites.values())))


def spoken(site: SiteData) -> str:
    """Return a line about a site's data."""
    names = list(site.class_names)
    if site.train:
        counted = zip(names, site.train, strict=True)
        names = [f"{name} {count}" for name, count in counted]
    sizes = f"{site.samples[0]} training and {site.samples[1]} test images"
    about = f"{sizes} of {_times(site.shape)} for {site.task}"
    if names:
        about += f"; {', '.join(names)}"
    return wire.printable(about)


def _normalized(config: Config, sites: Sequence[SiteData]) -> Config:
    """Return the options with mean and standard deviation: those that are given, or of all sites'
    images together.

    mean = sum n_k m_k / N,   variance = sum n_k (v_k + (m_k - mean)^2) / N,   N = sum n_k
    """
    if config.data.mean:
        return config
    counts = [site.samples[0] for site in sites]
    total = sum(counts)
    if not total:
        raise UsageError("the sites say that they have no training images")
    means = []
    variances = []
    for channel in range(len(sites[0].mean)):
        counted = zip(counts, sites, strict=True)
        moments = [(count, site.mean[channel], site.variance[channel]) for count, site in counted]
        mean = sum(count * center for count, center, _ in moments) / total
        variance = (
            sum(count * (width + (center - mean) ** 2) for count, center, width in moments) / total
        )
        means.append(mean)
        variances.append(variance)
    return config.but(mean=tuple(means), std=deviations(tuple(variances)))


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _read(reply: Message | None, timeout: float) -> SiteData | str:
    if reply is None:
        return f"it has not said what its data are within {timeout:g} seconds"
    if reply.has_error():
        return wire.printable(f"it cannot say what its data are: {reply.error.reason}")
    try:
        return SiteData.read(reply.content)
    except ValueError as error:
        return str(error)


class SitesGrid(PassingGrid):
    """Asks a node for its data when it is connected for the first time, and hides it if they do not
    fit.
    """

    def __init__(self, grid: Grid, agreement: Agreement) -> None:
        super().__init__(grid)
        self._agreement = agreement
        self._accepted = dict(agreement.sites)

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes that can take part."""
        connected = list(self._grid.get_node_ids())
        # a refused site is asked again when it comes back
        self.unfit &= set(connected)
        new = [node for node in connected if node not in self._accepted and node not in self.unfit]
        if new:
            self._meet(new, connected)
        return [node for node in connected if node in self._accepted]

    def _meet(self, new: list[int], connected: list[int]) -> None:
        for node, answer in ask_sites(self._grid, new, PATIENCE).items():
            present = {known: site for known, site in self._accepted.items() if known in connected}
            reason = self._agreement.objection(node, answer, present)
            if isinstance(answer, str) or reason:
                log(
                    WARNING,
                    "Node %d cannot take part until its SuperNode starts again: %s",
                    node,
                    reason,
                )
                self.unfit.add(node)
            else:
                log(INFO, "Site %d (node %d): %s", answer.site, node, spoken(answer))
                self._accepted[node] = answer
