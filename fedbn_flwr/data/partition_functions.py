"""Functions that share out rows: they return one array of row numbers a client, from labels or domains alone.

Rows are taken in the order in which they come, so shuffle them first, as `partition` does.
"""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

#: how often `unbalanced` lets all clients split their shards in a new way
SWEEPS = 32
#: how often `dirichlet` draws until every client has enough, as `flwr-datasets` does
ATTEMPTS = 11


def evenly(count: int, clients: int) -> list[Rows]:
    """Give each client consecutive rows, as many as the others to within one."""
    return np.array_split(np.arange(count), clients)


def class_holders(clients: int, num_classes: int, classes_per_client: int) -> list[list[int]]:
    """Return the clients that hold each class: consecutive classes a client, rotating through all classes.

    Y. Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, appendix D (FedTAN),
    which this gives exactly for 5 clients and 10 classes. With N clients and C classes, client k starts at
    class floor(k C / N). The number of holders differs by at most one from class to class. Where N clients
    are too few for all classes, the classes in the gaps are left out.
    """
    held_by: list[list[int]] = [[] for _ in range(num_classes)]
    for client in range(clients):
        start = client * num_classes // clients
        for step in range(classes_per_client):
            held_by[(start + step) % num_classes].append(client)
    return held_by


def rotating_classes(labels: Rows, clients: int, num_classes: int, classes_per_client: int) -> list[Rows]:
    """Cut every class evenly into one piece for each of its `class_holders`."""
    pieces: list[list[Rows]] = [[] for _ in range(clients)]
    for label, holders in enumerate(class_holders(clients, num_classes, classes_per_client)):
        rows = np.flatnonzero(labels == label)
        if len(rows) < len(holders):
            raise ValueError(f"the {len(rows)} samples of class {label} cannot serve {len(holders)} clients")
        for holder, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            pieces[holder].append(piece)
    return [np.concatenate(held) for held in pieces]


def shards(labels: Rows, counts: NDArray[np.int64], seed: int) -> list[Rows]:
    """Cut rows, sorted by label, into shards, and deal client k `counts[k]` random ones.

    M. J. Idrissi et al., FEDBS: Learning on Non-IID Data in Federated Learning using Batch Normalization,
    section V. The sizes of shards differ by at most one row and no row is left over.
    """
    by_label = np.argsort(labels, kind="stable")
    cut = np.array_split(by_label, counts.sum())
    order = np.random.default_rng(seed).permutation(len(cut))
    hands = np.split(order, np.cumsum(counts)[:-1])
    return [np.concatenate([cut[shard] for shard in hand]) for hand in hands]


def unbalanced(clients: int, shards: int, most: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw how many shards each client gets: 1 to `most`, `shards` in all, every such allocation equally likely.

    Idrissi et al. (FedBS) deal 1,200 shards to 100 clients, "at least one shard and a maximum of 30". They leave the
    distribution open. Numbers drawn uniformly from 1 to 30 do not add up to 1,200. Here they are drawn uniformly given
    that they do: all of 1 to 30 occur, the smaller ones more often.

    The allocation starts even. In every sweep random pairs of clients split their shards in a new way, all possible
    ways being equally likely. After 8 sweeps the numbers of 100 clients have the frequencies of the exact distribution.
    """
    if not clients <= shards <= clients * most:
        raise ValueError(f"{shards} shards cannot be dealt to {clients} clients with 1 to {most} for each")
    counts = np.array([len(part) for part in evenly(shards, clients)])
    for _ in range(SWEEPS):
        one, other = generator.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        both = counts[one] + counts[other]
        counts[one] = generator.integers(np.maximum(1, both - most), np.minimum(most, both - 1) + 1)
        counts[other] = both - counts[one]
    return counts


def dirichlet(labels: Rows, clients: int, alpha: float, fewest: int, seed: int) -> list[Rows]:
    """Spread every class over the clients by Dirichlet(alpha): the draw that `flwr-datasets` makes of this seed.

    Where a client gets fewer rows than `fewest`, all classes are drawn again.
    """
    generator = np.random.default_rng(seed)
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(ATTEMPTS):
        pieces = []
        for rows in by_class:
            ends = np.cumsum(generator.dirichlet(np.full(clients, alpha))) * len(rows)
            pieces.append(np.split(rows, ends.astype(int)[:-1]))
        parts = [np.concatenate(held) for held in zip(*pieces, strict=True)]
        if min(map(len, parts)) >= fewest:
            return parts
    raise ValueError(f"in {ATTEMPTS} draws, a client had fewer than {fewest} samples: take a larger ALPHA")


def label_mixes(
    labels: Rows, clients: int, num_classes: int, alpha: float, generator: np.random.Generator
) -> list[Rows]:
    """Give each client as many rows, to within one, in its own label mix q ~ Dirichlet(alpha p).

    Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
    p is the label mix of all rows, so with C classes of equal size every class has the concentration alpha / C; where a
    paper writes Dirichlet(a) for a concentration a of every class, alpha is a C. A client takes size q rows of the
    classes, rounded. A class that has no rows left is skipped, with q renormalized over the other classes, so that
    every row has one client: the last clients take what is left. alpha -> infinity gives every client p, alpha -> 0
    one class for as long as there are rows of it.
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
    size: int, left: NDArray[np.int64], concentrations: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw a label mix and return how many rows of each class make up `size` rows of it, given what is left."""
    counts = np.zeros_like(left)
    mix = np.zeros(len(left))
    while (missing := size - counts.sum()) > 0:
        open_classes = left > counts
        mix[~open_classes] = 0
        if mix.sum() == 0:  # at first, and where a small alpha gave the other classes nothing at all
            mix[open_classes] = generator.dirichlet(concentrations[open_classes])
        wanted = np.diff(np.rint(missing * np.cumsum(mix) / mix.sum()), prepend=0).astype(np.int64)
        counts = np.minimum(counts + wanted, left)
    return counts
