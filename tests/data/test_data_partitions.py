"""Every partition: what each client gets, that nothing is lost or given twice, and what is
refused.
"""

import warnings
from collections import Counter
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedbn_flwr.data import Data, Split, partition
from fedbn_flwr.data.partition import label_mixes, unbalanced
from fedbn_flwr.randomness import derive, numpy_generator


@cache
def labelled(count: int, classes: int = 10, domains: int = 0) -> Data:
    """Data of which only labels and domains matter: the images are one pixel."""
    inputs = torch.zeros(count, 1, 1, 1, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count)[torch.randperm(count, generator=generator)] % classes
    split = Split(inputs, labels, torch.arange(count) % domains if domains else None)
    return Data(
        "labelled", split, split, classes, tuple(f"domain {number}" for number in range(domains))
    )


def twin(data: Data) -> Data:
    """The same data as another object, for which nothing is cached."""
    return Data("twin", data.train, data.test, data.num_classes, data.domain_names)


def class_counts(parts: list[NDArray[np.int64]], data: Data) -> NDArray[np.int64]:
    labels = data.train.labels.numpy()
    return np.stack([np.bincount(labels[part], minlength=data.num_classes) for part in parts])


def assert_disjoint(parts: list[NDArray[np.int64]], count: int) -> None:
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts)) == count
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert (np.diff(part) > 0).all()


COMPLETE = [
    "iid",
    "dirichlet:0.5",
    "dirichlet:10:1",
    "label-mix:1",
    "classes:3",
    "classes:10",
    "shards:1",
    "shards:2",
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(COMPLETE), st.integers(4, 13), st.integers(0, 2**40), st.integers(600, 640))
def test_every_sample_has_exactly_one_client(
    spec: str, clients: int, seed: int, count: int
) -> None:
    data = labelled(count)
    parts = partition(spec, data, clients, seed)
    assert len(parts) == clients
    assert_disjoint(parts, count)
    sizes = [len(part) for part in parts]
    assert spec not in ("iid", "label-mix:1") or max(sizes) - min(sizes) <= 1
    again = partition(spec, twin(data), clients, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


#: whether a client has other classes, and not only other samples of them
OTHER_CLASSES = {
    "iid": False,
    "classes:5": False,
    "domain:2": False,
    "dirichlet:0.5": True,
    "label-mix:1": True,
}
OTHER_CLASSES |= {"shards:2": True, "shards-unbalanced": True}


@pytest.mark.parametrize("spec", OTHER_CLASSES)
def test_every_seed_draws_differently(spec: str) -> None:
    data = labelled(600, domains=4)
    draws = [partition(spec, data, 8 if spec == "domain:2" else 4, seed) for seed in range(5)]
    for one, other in combinations(draws, 2):
        assert not all(map(np.array_equal, one, other))
        assert not (
            OTHER_CLASSES[spec]
            and np.array_equal(class_counts(one, data), class_counts(other, data))
        )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([0.1, 0.5, 3.0, 100.0]),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
def test_a_dirichlet_draw_is_that_of_flwr_datasets(
    clients: int, alpha: float, fewest: int, seed: int
) -> None:
    from flwr_datasets.partitioner import DirichletPartitioner

    data, spec, stream = (
        labelled(300, 5),
        f"dirichlet:{alpha}:{fewest}",
        derive(seed, "partition", "dirichlet"),
    )
    theirs = DirichletPartitioner(clients, "label", alpha, fewest, shuffle=False, seed=stream)
    try:
        expected = parts_of(theirs, data, clients, seed)
    except ValueError:
        with pytest.raises(ValueError, match="in 11 draws, a client had fewer than"):
            partition(spec, data, clients, seed)
        return
    assert [part.tolist() for part in partition(spec, data, clients, seed)] == expected


def test_shards_are_those_of_flwr_datasets_where_nothing_is_left_over() -> None:
    from flwr_datasets.partitioner import ShardPartitioner

    data, stream = labelled(200, 5), derive(7, "partition", "shards")
    theirs = ShardPartitioner(
        10, "label", num_shards_per_partition=2, shard_size=10, shuffle=False, seed=stream
    )
    expected = parts_of(theirs, data, 10, 7)
    assert [part.tolist() for part in partition("shards:2", data, 10, 7)] == expected


def parts_of(theirs: Any, data: Data, clients: int, seed: int) -> list[list[int]]:
    """The samples that a partitioner of `flwr-datasets` gives to each client, of rows in our
    order.
    """
    from datasets import Dataset

    order = numpy_generator(seed, "partition", "order").permutation(len(data.train))
    theirs.dataset = Dataset.from_dict({"label": data.train.labels.numpy()[order], "index": order})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of draws that are repeated, and of pyarrow
        return [sorted(theirs.load_partition(client)["index"][:]) for client in range(clients)]


# ---- label mixes ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_clients_with_label_mixes_share_all_rows_equally(
    class_sizes: list[int], draw: st.DataObject
) -> None:
    count = sum(class_sizes)
    clients = draw.draw(st.integers(1, max(count, 1)))
    alpha, seed = (
        draw.draw(st.sampled_from([1e-9, 0.1, 1.0, 50.0, 1e9])),
        draw.draw(st.integers(0, 99)),
    )
    labels = np.random.default_rng(seed).permutation(
        np.repeat(np.arange(len(class_sizes)), class_sizes)
    )
    parts = label_mixes(labels, clients, len(class_sizes), alpha, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    # rows of a class are dealt in the order in which they come
    dealt = np.concatenate(parts)
    assert all(
        (np.diff(dealt[labels[dealt] == label]) > 0).all() for label in range(len(class_sizes))
    )


@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_a_label_mix_has_the_moments_of_a_dirichlet_draw(alpha: float) -> None:
    """Of Dirichlet(alpha p): mean p, variance p (1 - p) / (alpha + 1).

    No class can run out for the first client.
    """
    shares, draws = np.array([0.5, 0.3, 0.2]), 1000
    labels = np.repeat(np.arange(3), (shares * 1000).astype(int))
    mixes = np.stack(
        [
            np.bincount(
                labels[label_mixes(labels, 10, 3, alpha, np.random.default_rng(seed))[0]],
                minlength=3,
            )
            / 100
            for seed in range(draws)
        ]
    )
    variance = shares * (1 - shares) / (alpha + 1)
    assert (np.abs(mixes.mean(0) - shares) < 4 * np.sqrt(variance / draws)).all()
    np.testing.assert_allclose(mixes.var(0), variance, rtol=0.15)


def test_a_class_that_runs_out_is_made_up_for_by_the_others_in_proportion() -> None:
    """Three clients of 10 rows, of 2, 12 and 16 in the classes, and the mix (0.6, 0.32, 0.08), by
    hand.

    The first client would have 6, 3 and 1, but class 0 has 2: the 4 missing are shared out as 0.32
    to 0.08, 3 and 1. The second draws a mix of what is left, 6 and 14: it would have 8 and 2, gets
    6 and 2, and 2 more of class 2.
    """
    mixes = {3: [0.6, 0.32, 0.08], 2: [0.8, 0.2], 1: [1.0]}
    asked: list[list[float]] = []

    class FixedMixes:
        def dirichlet(self, concentrations: NDArray[np.float64]) -> NDArray[np.float64]:
            asked.append(concentrations.tolist())
            return np.array(mixes[len(concentrations)])

    labels = np.repeat(np.arange(3), [2, 12, 16])
    parts = label_mixes(labels, 3, 3, 7.5, FixedMixes())  # type: ignore[arg-type]
    assert [np.bincount(labels[part], minlength=3).tolist() for part in parts] == [
        [2, 6, 2],
        [0, 6, 4],
        [0, 0, 10],
    ]
    # alpha p, of the classes that have rows left
    assert [pytest.approx(concentrations) for concentrations in asked] == [
        [0.5, 3.0, 4.0],
        [3.0, 4.0],
        [4.0],
    ]


# ---- classes -------------------------------------------------------------------------------------

# Appendix D of FedTAN, word for word: the share of every class among the samples of each client
APPENDIX_D = {
    2: """
        1/2 1/2 0 0 0 0 0 0 0 0
        0 0 1/2 1/2 0 0 0 0 0 0
        0 0 0 0 1/2 1/2 0 0 0 0
        0 0 0 0 0 0 1/2 1/2 0 0
        0 0 0 0 0 0 0 0 1/2 1/2""",
    4: """
        1/4 1/4 1/4 1/4 0 0 0 0 0 0
        0 0 1/4 1/4 1/4 1/4 0 0 0 0
        0 0 0 0 1/4 1/4 1/4 1/4 0 0
        0 0 0 0 0 0 1/4 1/4 1/4 1/4
        1/4 1/4 0 0 0 0 0 0 1/4 1/4""",
}


@pytest.mark.parametrize("classes", APPENDIX_D)
def test_classes_give_fedtans_appendix_d(classes: int) -> None:
    data = labelled(6000)  # 600 of each class, which 1 and 2 clients can share evenly
    counts = class_counts(partition(f"classes:{classes}", data, 5, 0), data)
    shares = [
        [1 / int(cell.split("/")[1]) if "/" in cell else 0.0 for cell in row.split()]
        for row in APPENDIX_D[classes].strip().splitlines()
    ]
    np.testing.assert_allclose(counts / counts.sum(1, keepdims=True), shares)
    # "each client receives an equal number of training samples"
    assert counts.sum(1).tolist() == [1200] * 5


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_any_number_of_clients_shares_the_classes_evenly(
    clients: int, classes: int, draw: st.DataObject
) -> None:
    each = draw.draw(st.integers(1, classes))
    data = labelled(40 * classes, classes=classes)
    counts = class_counts(partition(f"classes:{each}", data, clients, 0), data)
    assert ((counts > 0).sum(1) == each).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for label in np.flatnonzero(holders):
        held = counts[counts[:, label] > 0, label]
        assert held.sum() == 40
        assert held.max() - held.min() <= 1


def test_too_few_clients_for_all_classes_leave_the_gaps_out() -> None:
    data = labelled(100)
    counts = class_counts(partition("classes:2", data, 3, 0), data)
    assert [np.flatnonzero(row).tolist() for row in counts] == [[0, 1], [3, 4], [6, 7]]


@pytest.mark.parametrize(("clients", "each"), [(2, 5), (3, 4), (5, 2), (50, 2)])
def test_without_a_number_no_class_is_left_out(clients: int, each: int) -> None:
    data = labelled(1000)
    counts = class_counts(partition("classes", data, clients, 0), data)
    assert counts.any(0).all()
    assert ((counts > 0).sum(1) == each).all()


@pytest.mark.parametrize(("samples", "shards"), [(60_000, 1200), (50_000, 1000)])
def test_fedbs_unbalanced_shards_of_50_with_1_to_30_each(samples: int, shards: int) -> None:
    data = labelled(samples)
    parts = partition("shards-unbalanced", data, 100, 0)
    assert_disjoint(parts, samples)
    counts = class_counts(parts, data)
    assert (counts % 50 == 0).all()  # shards are whole
    held = counts.sum(1) // 50
    assert held.sum() == shards
    assert held.min() >= 1
    assert held.max() <= 30
    assert len(set(held)) > 20


@pytest.mark.parametrize(("clients", "total", "most"), [(3, 6, 3), (4, 7, 4), (2, 5, 3)])
@pytest.mark.slow
def test_small_allocations_are_equally_likely(clients: int, total: int, most: int) -> None:
    allocations = [
        numbers for numbers in product(range(1, most + 1), repeat=clients) if sum(numbers) == total
    ]
    generator, draws = np.random.default_rng(0), 100 * len(allocations)
    drawn = Counter(
        tuple(unbalanced(clients, total, most, generator).tolist()) for _ in range(draws)
    )
    assert set(drawn) == set(allocations)
    assert all(abs(count - 100) < 5 * 100**0.5 for count in drawn.values())


def test_a_whole_domain_a_client() -> None:
    data = labelled(103, domains=5)
    domains = data.train.domains
    assert domains is not None
    for spec in ("domain", "domain:1", "domain:1:1"):
        parts = partition(spec, data, 5, 0)
        for domain, part in enumerate(parts):
            assert np.array_equal(part, np.flatnonzero(domains.numpy() == domain))
    halves = zip(partition("domain", data, 10, 0), partition("domain:2", data, 10, 0), strict=True)
    assert all(np.array_equal(one, other) for one, other in halves)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 10), st.integers(0, 2**40))
def test_fedwon_adds_clients_with_fixed_tenths_and_changes_none(each: int, seed: int) -> None:
    data = labelled(500, domains=5)
    most, fewer = (
        partition("domain:10:10", data, 50, seed),
        partition(f"domain:{each}:10", data, 5 * each, seed),
    )
    assert_disjoint(most, 500)
    for client, part in enumerate(fewer):
        assert np.array_equal(part, most[client])
        assert len(part) == 10
        assert set(part % 5) == {client % 5}


#: two samples of domain 0, and eight of domain 1
LOPSIDED = Split(
    torch.zeros(10, 1, 1, 1), torch.zeros(10, dtype=torch.int64), (torch.arange(10) < 8).long()
)
LOPSIDED_DATA = Data("x", LOPSIDED, LOPSIDED, 2, ("a", "b"))


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("shard:2", 2, "unknown partition 'shard:2'; did you mean 'shards:"),
        ("", 2, "unknown partition ''; known: iid"),
        ("iid:2", 2, "unknown partition 'iid:2'"),
        ("domain:1:2:3", 5, "unknown partition 'domain:1:2:3'"),
        ("iid", 0, "0 clients cannot share 100 samples"),
        ("iid", 101, "101 clients cannot share 100 samples"),
        ("dirichlet", 2, "ALPHA must be a number above 0"),
        ("dirichlet:much", 2, "ALPHA must be a number above 0"),
        ("dirichlet:inf", 2, "ALPHA must be a number above 0"),
        ("label-mix", 2, "ALPHA must be a number above 0"),
        ("label-mix:1:2", 2, "unknown partition 'label-mix:1:2'"),
        ("dirichlet:1:0", 2, "expected a whole number of at least 1, not '0'"),
        ("dirichlet:1:60", 2, "100 samples cannot give 2 clients 60 each"),
        (
            "dirichlet:0.01",
            50,
            "dirichlet:0.01.*dirichlet:ALPHA.*in 11 draws, a client had fewer than 2 samples",
        ),
        ("shards", 2, "expected a whole number of at least 1, not ''"),
        ("classes:0", 2, "expected a whole number of at least 1, not '0'"),
        ("classes:11", 2, "labelled has only 10 classes"),
        ("classes:10", 11, "class 0 has 10 samples, too few for 11 of the clients"),
        ("shards:2", 51, "100 samples cannot fill 102 shards"),
        ("shards-unbalanced", 33, "32 shards cannot be dealt to 33 clients with 1 to 30 for each"),
        ("shards-unbalanced", 1, "32 shards cannot be dealt to 1 clients with 1 to 30 for each"),
        ("domain", 5, "labelled has no domains"),
        ("domain:4", 8, "'domain:4': no sample for client 4, 6"),
        ("classes:2", 2, "class 1 has 0 samples, too few for 2 of the clients"),
        ("shards:-2", 2, "expected a whole number of at least 1, not '-2'"),
        ("domain:1", 4, "5 domains with 1 each need 5 clients, not 4"),
        ("domain:2", 5, "5 domains with 2 each need 10 clients, not 5"),
        ("domain:3:2", 15, "3 clients a domain need 3 splits of it, not 2"),
        ("union", 2, "1 client holds everything, not 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec: str, clients: int, message: str) -> None:
    others = {"domain": labelled(100), "shards-unbalanced": labelled(1600)}
    data = others.get(
        spec, LOPSIDED_DATA if spec in ("domain:4", "classes:2") else labelled(100, domains=5)
    )
    with pytest.raises(ValueError, match=message) as error:
        partition(spec, data, clients, 0)
    assert "\n" not in str(error.value)


def test_union_is_everything() -> None:
    (everything,) = partition("union", labelled(20), 1, 0)
    assert everything.tolist() == list(range(20))
