"""Partitions by name: how a spec is written, and the function that shares out the rows.

Rows are taken in the order in which they come, which `partition` has shuffled.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.data.splits import Data
from fedbn_flwr.plugins import add, did_you_mean
from fedbn_flwr.randomness import numpy_generator

Indices = NDArray[np.int64]

#: FedBS's unbalanced case: the samples of a shard, and the largest number of shards of a client
SHARD_SIZE = 50
MOST_SHARDS = 30
#: how often `unbalanced` lets all clients split their shards in a new way
SWEEPS = 32
#: the fewest samples of a client under `dirichlet`: batch normalization cannot train on one
DIRICHLET_MINIMUM = 2
#: how often `dirichlet` draws until every client has enough, as `flwr-datasets` does
ATTEMPTS = 11


@dataclass(frozen=True)
class PartitionRequest:
    """The arguments of a spec `name[:argument[:argument]]`, the data, and the number of clients."""

    arguments: Sequence[str]
    data: Data
    clients: int
    seed: int
    #: the sample of each row
    order: Indices

    @property
    def labels(self) -> Indices:
        """The class of every row; images with label maps have none of their own, and float targets
        are none.
        """
        targets = self.data.train.targets
        if targets:
            raise ValueError(
                f"{self.data.name} has {targets} and no labels: take iid, city, domain or union"
            )
        return self.data.train.labels.numpy(force=True)[self.order]

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.data.train)

    def number(self, position: int, default: int | None = None) -> int:
        """Return an argument that is a whole number of at least 1."""
        if position < len(self.arguments):
            text = self.arguments[position]
        else:
            text = str(default or "")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"expected a whole number of at least 1, not {text!r}")
        return int(text)

    def alpha(self) -> float:
        """Return the first argument, the concentration of a Dirichlet distribution."""
        try:
            alpha = float(self.arguments[0])
        except (ValueError, IndexError):
            alpha = 0.0
        if not 0 < alpha < float("inf"):
            raise ValueError("ALPHA must be a number above 0")
        return alpha


#: shares out the rows: for every client the numbers of its rows
Share = Callable[[PartitionRequest], list[Indices]]


@dataclass(frozen=True)
class PartitionKind:
    """A kind of partition: how its spec is written, and the function that shares out the rows."""

    form: str
    share: Share


#: the kinds of partitions by name; `register_partition` adds one
PARTITIONS: dict[str, PartitionKind] = {}

S = TypeVar("S", bound=Share)


def register_partition(form: str) -> Callable[[S], S]:
    """Register a function that shares out training samples; used as a decorator.

    `form` is how `--partition` is written: a name, and arguments in capitals.

        @register_partition("halves:FIRST")
        def halves(request: PartitionRequest) -> list[NDArray[np.int64]]:
            return [rows for rows in np.split(np.arange(request.samples), [request.number(0)])]

    The function returns each client's rows; row i is the sample `request.order[i]`, in an order
    shuffled by the seed. A name that another partition has is a ValueError.
    """

    def register(share: S) -> S:
        name = re.split(r"[:\[]", form)[0]
        add(
            PARTITIONS,
            "partition",
            name,
            PartitionKind(form, share),
            source=lambda kind: kind.share,
        )
        return share

    return register


@register_partition("iid")
def _iid(request: PartitionRequest) -> list[Indices]:
    """Equal shares, drawn at random."""
    return evenly(request.samples, request.clients)


def evenly(count: int, clients: int) -> list[Indices]:
    """Give each client consecutive rows, as many as the others to within one."""
    return np.array_split(np.arange(count), clients)


@register_partition("dirichlet:ALPHA[:FEWEST-SAMPLES]")
def _dirichlet(request: PartitionRequest) -> list[Indices]:
    """Each class is shared out by a Dirichlet draw over the clients; sizes differ.

    This is the draw that `flwr-datasets` makes of the seed. Where a client gets too few rows, all
    classes are drawn again.
    """
    alpha = request.alpha()
    clients = request.clients
    fewest = request.number(1, DIRICHLET_MINIMUM)
    if fewest * clients > request.samples:
        raise ValueError(f"{request.samples} samples cannot give {clients} clients {fewest} each")
    labels = request.labels
    generator = numpy_generator(request.seed, "partition", "dirichlet")
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(ATTEMPTS):
        pieces = []
        for rows in by_class:
            ends = np.cumsum(generator.dirichlet(np.full(clients, alpha))) * len(rows)
            pieces.append(np.split(rows, ends.astype(int)[:-1]))
        parts = [np.concatenate(held) for held in zip(*pieces, strict=True)]
        if min(map(len, parts)) >= fewest:
            return parts
    raise ValueError(
        f"in {ATTEMPTS} draws, a client had fewer than {fewest} samples: take a larger ALPHA"
    )


@register_partition("label-mix:ALPHA")
def _label_mixes(request: PartitionRequest) -> list[Indices]:
    """Each client draws a mix of labels, as Hsu et al.; sizes are equal."""
    generator = numpy_generator(request.seed, "partition", "label mixes")
    return label_mixes(
        request.labels, request.clients, request.data.num_classes, request.alpha(), generator
    )


def label_mixes(
    labels: Indices, clients: int, num_classes: int, alpha: float, generator: np.random.Generator
) -> list[Indices]:
    """Give each client as many rows, to within one, in its own label mix q ~ Dirichlet(alpha p).

    Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, 2019. p is the label mix of all rows, so with C classes of equal size every
    class has the concentration alpha / C; where a paper writes Dirichlet(a) for a concentration a
    of every class, alpha is a C. A client takes size q rows of the classes, rounded. A class that
    has no rows left is skipped, with q renormalized over the other classes, so that every row has
    one client: the last clients take what is left. alpha -> infinity gives every client p, alpha ->
    0 one class for as long as there are rows of it.
    """
    left = np.bincount(labels, minlength=num_classes)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(left)[:-1])
    prior = left / max(len(labels), 1)
    parts = []
    for share in evenly(len(labels), clients):
        counts = _fill(len(share), left, alpha * prior, generator)
        starts = np.array([len(rows) for rows in by_class]) - left
        taken = zip(by_class, starts, counts, strict=True)
        parts.append(np.concatenate([rows[start : start + count] for rows, start, count in taken]))
        left = left - counts
    return parts


def _fill(
    size: int,
    left: NDArray[np.int64],
    concentrations: NDArray[np.float64],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Draw a label mix and return how many rows of each class make up `size` rows of it, given what
    is left.
    """
    counts = np.zeros_like(left)
    mix = np.zeros(len(left))
    while (missing := size - counts.sum()) > 0:
        open_classes = left > counts
        mix[~open_classes] = 0
        # at first, and where a small alpha gave the other classes nothing at all
        if mix.sum() == 0:
            mix[open_classes] = generator.dirichlet(concentrations[open_classes])
        wanted = np.diff(np.rint(missing * np.cumsum(mix) / mix.sum()), prepend=0).astype(np.int64)
        counts = np.minimum(counts + wanted, left)
    return counts


@register_partition("classes[:PER-CLIENT]")
def _classes(request: PartitionRequest) -> list[Indices]:
    """Each client has a given number of classes, in turn; by default as few as leave no class out,
    and at least two.

    A class is cut evenly into one piece for each of its holders.
    """
    classes = request.data.num_classes
    labels = request.labels
    per_client = request.number(0, default=min(max(-(-classes // request.clients), 2), classes))
    if per_client > classes:
        raise ValueError(f"{request.data.name} has only {classes} classes")
    pieces: list[list[Indices]] = [[] for _ in range(request.clients)]
    for label, holders in enumerate(_class_holders(request.clients, classes, per_client)):
        rows = np.flatnonzero(labels == label)
        if len(rows) < len(holders):
            raise ValueError(
                f"class {label} has {len(rows)} samples, too few for {len(holders)} of the clients"
            )
        for holder, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            pieces[holder].append(piece)
    return [np.concatenate(held) for held in pieces]


def _class_holders(clients: int, num_classes: int, classes_per_client: int) -> list[list[int]]:
    """Return the clients that hold each class: consecutive classes a client, rotating through all
    classes.

    Y. Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, appendix D
    (FedTAN), which this gives exactly for 5 clients and 10 classes. With N clients and C classes,
    client k starts at class floor(k C / N). The number of holders differs by at most one from class
    to class. Where N clients are too few for all classes, the classes in the gaps are left out.
    """
    held_by: list[list[int]] = [[] for _ in range(num_classes)]
    for client in range(clients):
        start = client * num_classes // clients
        for step in range(classes_per_client):
            held_by[(start + step) % num_classes].append(client)
    return held_by


@register_partition("shards:PER-CLIENT")
def _shards(request: PartitionRequest) -> list[Indices]:
    """Samples sorted by label, cut into shards, and dealt: as many to each client."""
    per_client = request.number(0)
    if per_client * request.clients > request.samples:
        raise ValueError(
            f"{request.samples} samples cannot fill {per_client * request.clients} shards"
        )
    return _deal(request, np.full(request.clients, per_client))


@register_partition("shards-unbalanced")
def _shards_unbalanced(request: PartitionRequest) -> list[Indices]:
    """FedBS's unbalanced case: from 1 to 30 shards of 50 samples a client."""
    shards = -(-request.samples // SHARD_SIZE)
    generator = numpy_generator(request.seed, "partition", "shards of each")
    return _deal(request, unbalanced(request.clients, shards, MOST_SHARDS, generator))


def _deal(request: PartitionRequest, counts: NDArray[np.int64]) -> list[Indices]:
    """Cut rows, sorted by label, into shards, and deal client k `counts[k]` random ones.

    M. J. Idrissi et al., FEDBS: Learning on Non-IID Data in Federated Learning using Batch
    Normalization, section V. The sizes of shards differ by at most one row and no row is left over.
    """
    by_label = np.argsort(request.labels, kind="stable")
    cut = np.array_split(by_label, counts.sum())
    order = numpy_generator(request.seed, "partition", "shards").permutation(len(cut))
    hands = np.split(order, np.cumsum(counts)[:-1])
    return [np.concatenate([cut[shard] for shard in hand]) for hand in hands]


def unbalanced(
    clients: int, shards: int, most: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw how many shards each client gets: 1 to `most`, `shards` in all, every such allocation
    equally likely.

    Idrissi et al. (FedBS) deal 1,200 shards to 100 clients, "at least one shard and a maximum of
    30". They leave the distribution open. Numbers drawn uniformly from 1 to 30 do not add up to
    1,200. Here they are drawn uniformly given that they do: all of 1 to 30 occur, the smaller ones
    more often.

    The allocation starts even. In every sweep random pairs of clients split their shards in a new
    way, all possible ways being equally likely. After 8 sweeps the numbers of 100 clients have the
    frequencies of the exact distribution.
    """
    if not clients <= shards <= clients * most:
        raise ValueError(
            f"{shards} shards cannot be dealt to {clients} clients with 1 to {most} for each"
        )
    counts = np.array([len(part) for part in evenly(shards, clients)])
    for _ in range(SWEEPS):
        one, other = generator.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        both = counts[one] + counts[other]
        counts[one] = generator.integers(np.maximum(1, both - most), np.minimum(most, both - 1) + 1)
        counts[other] = both - counts[one]
    return counts


@register_partition("domain[:CLIENTS-PER-DOMAIN[:SPLITS]]")
def _domain(request: PartitionRequest) -> list[Indices]:
    """Each client has samples of one domain only.

    W. Zhuang and L. Lyu, Is Batch Normalization Necessary for Multi-domain Federated Learning?,
    Fig. 4 (FedWon), after X. Li et al., FedBN, ICLR 2021: with 10 splits and 1 to 10 clients a
    domain, clients are added and none is changed. Client k D + d holds part k of domain d, of D;
    parts that no client holds are left out.
    """
    if request.data.train.domains is None:
        raise ValueError(f"{request.data.name} has no domains")
    # domains without training samples are left out
    present, column = np.unique(
        request.data.train.domains.numpy(force=True)[request.order], return_inverse=True
    )
    domains = len(present)
    per_domain = request.number(0, default=max(request.clients // domains, 1))
    splits = request.number(1, default=per_domain)
    if per_domain > splits:
        raise ValueError(
            f"{per_domain} clients a domain need {per_domain} splits of it, not {splits}"
        )
    if request.clients != domains * per_domain:
        needed = f"{domains} domains with {per_domain} each need {domains * per_domain} clients"
        raise ValueError(f"{needed}, not {request.clients}")
    parts = [np.array_split(np.flatnonzero(column == domain), splits) for domain in range(domains)]
    return [parts[client % domains][client // domains] for client in range(request.clients)]


@register_partition("city")
def _city(request: PartitionRequest) -> list[Indices]:
    """Each client has all samples of one city, or other domain, as FixBN divides Cityscapes."""
    return _domain(request)


@register_partition("union")
def _union(request: PartitionRequest) -> list[Indices]:
    """One client has all samples."""
    if request.clients != 1:
        raise ValueError(f"1 client holds everything, not {request.clients}")
    return evenly(request.samples, 1)


def partition(spec: str, data: Data, clients: int, seed: int) -> list[Indices]:
    """Return sorted indices into the training split, one array a client.

    No sample has two clients. Every sample has one, except where a spec leaves samples out:
    `classes` with too few clients to hold every class, and `domain` with more splits than clients a
    domain. Without SPLITS a domain is cut into as many parts as it has clients. A spec that is
    unknown or cannot be followed is a ValueError.
    """
    kind, arguments = _parse(spec)
    if not 1 <= clients <= len(data.train):
        raise ValueError(
            f"partition {spec!r}: {clients} clients cannot share {len(data.train)} samples"
        )
    try:
        order = numpy_generator(seed, "partition", "order").permutation(len(data.train))
        request = PartitionRequest(arguments, data, clients, seed, order)
        indices = [np.sort(order[rows]) for rows in kind.share(request)]
    except ValueError as error:
        raise ValueError(f"partition {spec!r} ({kind.form}): {error}") from error
    _check_share(spec, indices, clients)
    empty = [str(client) for client, samples in enumerate(indices) if len(samples) == 0]
    if empty:
        raise ValueError(f"partition {spec!r}: no sample for client {', '.join(empty)}")
    return indices


def _check_share(spec: str, indices: list[Indices], clients: int) -> None:
    """Refuse what a partition of a user's own may return by mistake."""
    if len(indices) != clients:
        raise ValueError(
            f"partition {spec!r} has samples for {len(indices)} clients, not for {clients}"
        )
    samples = np.sort(np.concatenate(indices))
    twice = samples[:-1][samples[1:] == samples[:-1]]
    if len(twice):
        raise ValueError(f"partition {spec!r} gives sample {twice[0]} to two clients")


def about_absent(classes: Sequence[str], partition: str, clients: int) -> str:
    """Return a sentence about classes that nobody has, though they are tested."""
    few = ", ".join(classes[:5])
    if len(classes) > 5:
        few += f" and {len(classes) - 5} more"
    return f"no client has samples of some classes: {few} ({partition} with {clients:.0f} clients)"


def _parse(spec: str) -> tuple[PartitionKind, list[str]]:
    name, *arguments = spec.split(":")
    kind = PARTITIONS.get(name)
    if kind is None or len(arguments) > kind.form.count(":"):
        forms = (kind.form for kind in PARTITIONS.values())
        raise ValueError(f"unknown partition {spec!r}; {did_you_mean(spec, forms)}")
    return kind, arguments
