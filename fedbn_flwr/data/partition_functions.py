"""How rows are shared out: for every client the rows that it takes, from labels or domains alone.

Rows are taken in the order in which they come: shuffle them before, as `partition` does. Plain functions, because
`flwr-datasets`, which wraps the like in partitioners, takes seconds to import and half a millisecond a client.
"""

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def evenly(count: int, clients: int) -> list[Rows]:
    """Consecutive rows, as many for each client to within one."""
    return np.array_split(np.arange(count), clients)


def class_holders(clients: int, num_classes: int, classes_per_client: int) -> list[list[int]]:
    """The clients that hold each class: so many consecutive classes a client, rotating through all of them.

    Y. Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, appendix D (FedTAN),
    which this gives exactly for 5 clients and 10 classes. With N clients and C classes, client k starts at
    class floor(k C / N). The number of holders differs by at most one from class to class. Where N clients
    are too few for all classes, those in the gaps are left out.
    """
    held_by: list[list[int]] = [[] for _ in range(num_classes)]
    for client in range(clients):
        start = client * num_classes // clients
        for step in range(classes_per_client):
            held_by[(start + step) % num_classes].append(client)
    return held_by


def rotating_classes(labels: Rows, clients: int, num_classes: int, classes_per_client: int) -> list[Rows]:
    """Every class cut evenly into one piece a holder."""
    pieces: list[list[Rows]] = [[] for _ in range(clients)]
    for label, holders in enumerate(class_holders(clients, num_classes, classes_per_client)):
        rows = np.flatnonzero(labels == label)
        if len(rows) < len(holders):
            raise ValueError(f"the {len(rows)} samples of class {label} cannot serve {len(holders)} clients")
        for holder, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            pieces[holder].append(piece)
    return [np.concatenate(held) for held in pieces]


def shards(labels: Rows, counts: NDArray[np.int64], seed: int) -> list[Rows]:
    """Rows sorted by label, cut into shards and dealt at random, to every client a number of its own.

    M. J. Idrissi et al., FEDBS: Learning on Non-IID Data in Federated Learning using Batch Normalization,
    section V. The sizes of shards differ by at most one row and no row is left over.
    """
    by_label = np.argsort(labels, kind="stable")
    cut = np.array_split(by_label, counts.sum())
    order = np.random.default_rng(seed).permutation(len(cut))
    hands = np.split(order, np.cumsum(counts)[:-1])
    return [np.concatenate([cut[shard] for shard in hand]) for hand in hands]


def unbalanced(clients: int, shards: int, most: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """How many shards each client gets: uniform from 1 to `most`, then moved until none is left over."""
    if not clients <= shards <= clients * most:
        raise ValueError(f"{shards} shards cannot be dealt to {clients} clients with 1 to {most} for each")
    counts = generator.integers(1, most + 1, clients)
    while (missing := shards - counts.sum()) != 0:
        step = np.sign(missing)
        movable = np.flatnonzero((counts + step >= 1) & (counts + step <= most))
        counts[generator.permutation(movable)[: abs(missing)]] += step
    return counts


def domain_parts(domains: Rows, num_domains: int, clients_per_domain: int, splits: int) -> list[Rows]:
    """Every domain cut into `splits` fixed parts, of which `clients_per_domain` are used, one a client.

    W. Zhuang and L. Lyu, Is Batch Normalization Necessary for Multi-domain Federated Learning?, Fig. 4
    (FedWon), after X. Li et al., FedBN, ICLR 2021: with 10 splits and 1 to 10 clients a domain, clients are
    added and none is changed. Client k D + d holds part k of domain d, of D; parts that no client holds are
    left out.
    """
    parts = [np.array_split(np.flatnonzero(domains == d), splits) for d in range(num_domains)]
    return [parts[k % num_domains][k // num_domains] for k in range(num_domains * clients_per_domain)]
