"""Sums under masks: numbers in fixed point, shares of secrets, and masks that cancel."""

from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr.secure import Participants, ProtocolError, masks
from fedbn_flwr.secure.fixed_point import (
    Limbs,
    NotEncodableError,
    add_to,
    decode,
    encode,
    negative,
    subtract_from,
    sum_of,
)
from fedbn_flwr.secure.masks import unseal_share

numbers = st.floats(-1e15, 1e15, allow_subnormal=False)


def as_integer(limbs: Limbs) -> int:
    """The one number that the limbs are, in units of 2^-64."""
    whole = (int(limbs[0, 0]) << 64) + int(limbs[1, 0])
    return whole - 2**128 if whole >= 2**127 else whole


@given(numbers)
def test_a_number_is_itself_to_the_last_unit(number: float) -> None:
    limbs = encode(np.array([number]), 3)
    # what is below a unit is cut off, towards zero
    assert as_integer(limbs) == int(Fraction(number) * 2**64)
    assert decode(limbs)[0] == pytest.approx(number, rel=3e-16, abs=2.0**-63)


@given(st.lists(numbers, min_size=1, max_size=8))
def test_a_sum_is_exact_in_any_order(terms: list[float]) -> None:
    encoded = [encode(np.array([term]), len(terms)) for term in terms]
    exact = sum(int(Fraction(term) * 2**64) for term in terms)
    for ordered in (encoded, encoded[::-1]):
        total = sum_of(ordered)
        assert as_integer(total) == exact
        assert decode(total)[0] == pytest.approx(exact / 2**64, rel=3e-16, abs=2.0**-63)


def test_differences_and_complements_wrap_around() -> None:
    generator = np.random.default_rng(0)
    one, other = generator.integers(0, 2**64, (2, 2, 100), np.uint64)
    moved = one.copy()
    subtract_from(moved, other)
    assert not (moved == one).any()
    add_to(moved, other)
    assert (moved == one).all()
    add_to(moved, negative(one))
    assert (moved == 0).all()


@pytest.mark.parametrize(("number", "reason"), [(np.nan, "not finite"), (np.inf, "not finite"), (2.0**61, "too large")])
def test_what_cannot_be_summed_is_refused(number: float, reason: str) -> None:
    with pytest.raises(NotEncodableError, match=reason):
        encode(np.array([0.5, number]), 3)


SECRET = bytes(range(16))


def test_any_so_many_shares_open_the_secret_and_fewer_do_not() -> None:
    given = dict(enumerate(masks.split(SECRET, 3, 5), 1))
    for points in combinations(given, 3):
        assert masks.join({point: given[point] for point in points}) == SECRET
    assert masks.join(given) == SECRET
    for few in combinations(given, 2):
        assert masks.join({point: given[point] for point in few}) != SECRET


def test_fewer_shares_fit_every_secret() -> None:
    """Two shares of three: for any other secret there is a third share that opens it."""
    given = dict(enumerate(masks.split(SECRET, 3, 3), 1))
    other = bytes(16)
    # the value at 3 of the polynomial through (0, other), (1, s1), (2, s2)
    prime, (first, second) = 2**130 - 5, (int.from_bytes(given[point], "big") for point in (1, 2))
    third = (int.from_bytes(other, "big") - 3 * first + 3 * second) % prime
    assert masks.join({**given, 3: third.to_bytes(17, "big")}) == other


@pytest.mark.parametrize("wrong", [bytes(17), b"\xff" * 17])
def test_a_wrong_share_opens_another_secret_or_none(wrong: bytes) -> None:
    given = dict(enumerate(masks.split(SECRET, 2, 2), 1))
    assert masks.join({**given, 2: wrong}) != SECRET


NODES = (31, 7, 55, 12, 40)
VALUES = np.random.default_rng(1).standard_normal((len(NODES), 6)) * [1e-9, 1e-3, 1.0, 1e3, 1e9, 0.0]


class Sum:
    """A sum among `NODES`, of which each has sent its masked numbers."""

    def __init__(self, label: bytes = b"round 1") -> None:
        self.private = {node: masks.new_private_key() for node in NODES}
        self.people = Participants(label, NODES, tuple(masks.public_key(self.private[node]) for node in NODES))
        self.own = {node: masks.own_seed() for node in NODES}
        self.sent = {
            node: masks.mask(values, node, self.private[node], self.people, self.own[node])
            for node, values in zip(NODES, VALUES, strict=True)
        }

    def absent(self, survivors: tuple[int, ...]) -> dict[tuple[int, int], bytes]:
        """What the survivors say of the masks with the others."""
        return {
            (node, other): masks.pair_seed(self.private[node], other, self.people)
            for node in survivors
            for other in NODES
            if other not in survivors
        }

    def total(self, survivors: tuple[int, ...]) -> Limbs:
        return sum_of(self.sent[node] for node in survivors)

    def shares(self, owner: int) -> tuple[dict[int, bytes], list[bytes]]:
        """The shares of an owner's mask, by who has unsealed them, and what tells the right ones."""
        sealed = masks.seal_shares(self.own[owner], owner, self.private[owner], self.people)
        given = {
            node: unseal_share(each.sealed, owner, node, self.private[node], self.people)
            for node, each in zip(NODES, sealed, strict=True)
        }
        return given, [each.commitment for each in sealed]


@pytest.mark.parametrize("survivors", [NODES, *combinations(NODES, 4), *combinations(NODES, 3)])
def test_the_sum_is_that_of_the_nodes_that_count(survivors: tuple[int, ...]) -> None:
    case = Sum()
    opened = masks.cancel(
        case.total(survivors), case.people, [case.own[node] for node in survivors], case.absent(survivors)
    )
    expected = sum(VALUES[NODES.index(node)] for node in survivors)
    assert decode(opened) == pytest.approx(expected, rel=1e-12, abs=1e-17)


@pytest.mark.parametrize("left", ["own", "absent"])
def test_a_mask_that_is_left_hides_the_sum(left: str) -> None:
    case, survivors = Sum(), NODES[:4]
    own = [case.own[node] for node in survivors[left == "own" :]]
    absent = case.absent(survivors)
    if left == "absent":
        absent.popitem()
    opened = decode(masks.cancel(case.total(survivors), case.people, own, absent))
    assert (np.abs(opened) > 1e12).any()


def test_no_stream_is_used_twice() -> None:
    case, values = Sum(), np.zeros(64)
    labels = [b"round 1", b"round 2", b"round 1, exchange 1"]
    people = [Participants(label, NODES, case.people.keys) for label in labels]
    people.append(Participants(labels[0], NODES[:4], case.people.keys[:4]))
    sent = [masks.mask(values, NODES[0], case.private[NODES[0]], each) for each in people]
    assert not any((one == other).any() for one, other in combinations(sent, 2))
    # bytes of masks are uniform: a chi-squared of 255 degrees of freedom
    counts = np.bincount(np.concatenate(sent, 1).view(np.uint8).ravel(), minlength=256)
    assert (np.square(counts - counts.mean()) / counts.mean()).sum() < 400


def test_shares_open_a_mask_from_the_threshold_on() -> None:
    case = Sum()
    given, commitments = case.shares(NODES[2])
    needed = masks.threshold(len(NODES))
    assert needed == 4
    for some in combinations(given, needed):
        assert masks.open_shares({node: given[node] for node in some}, commitments, case.people) == (
            case.own[NODES[2]],
            [],
        )
    few = dict(list(given.items())[: needed - 1])
    assert masks.open_shares(few, commitments, case.people) == (None, [])


def openable(nodes: int, colluding: int, needed: int) -> list[set[frozenset[int]]]:
    """For every way to tell honest nodes who is absent: the parts of them of which the server can open the sum.

    A node helps with the mask of each node that it was told is there, and opens what it shares with an absent one.
    """
    honest = range(colluding, nodes)
    told = [
        [set(absent) for size in range(nodes - needed + 1) for absent in combinations(set(range(nodes)) - {node}, size)]
        for node in honest
    ]
    parts = [frozenset(part) for size in range(1, len(honest) + 1) for part in combinations(honest, size)]
    found = set()
    for lists in product(*told):
        absent = dict(zip(honest, lists, strict=True))
        helped = {node for node in honest if colluding + sum(node not in each for each in lists) >= needed}
        found.add(
            frozenset(
                part
                for part in parts
                if part <= helped
                and all(v in absent[u] or u in absent[v] for u in part for v in honest if v not in part)
            )
        )
    return [set(each) for each in found]


@pytest.mark.parametrize(
    ("nodes", "colluding"), [(3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2), pytest.param(6, 1)]
)
def test_whatever_the_server_tells_whom_it_opens_one_sum_over_enough_honest_nodes(nodes: int, colluding: int) -> None:
    needed = masks.threshold(nodes)
    least = 2 * needed - nodes - colluding
    for parts in openable(nodes, colluding, needed):
        assert all(len(part) >= least for part in parts)
        assert all(len(one - other) >= least for one in parts for other in parts if one - other)
        assert colluding or len(parts) <= 1


def test_two_thirds_would_not_do() -> None:
    assert min(len(part) for parts in openable(4, 0, 3) for part in parts) == 2


def test_a_wrong_share_is_named_and_not_used() -> None:
    case = Sum()
    given, commitments = case.shares(NODES[2])
    given[NODES[1]] = bytes(16)
    assert masks.open_shares(given, commitments, case.people) == (case.own[NODES[2]], [NODES[1]])


@pytest.mark.parametrize("changed", ["label", "key", "nodes"])
def test_a_share_among_other_participants_cannot_be_unsealed(changed: str) -> None:
    case = Sum()
    sealed = masks.seal_shares(case.own[7], 7, case.private[7], case.people)[2].sealed
    label, nodes, keys = case.people.label, case.people.nodes, case.people.keys
    others = {
        "label": Participants(b"round 2", nodes, keys),
        "key": Participants(label, nodes, (*keys[:-1], masks.public_key(masks.new_private_key()))),
        "nodes": Participants(label, nodes[:-1], keys[:-1]),
    }
    assert unseal_share(sealed, 7, 55, case.private[55], case.people)
    assert not unseal_share(sealed, 7, 55, case.private[55], others[changed])


def test_a_list_with_a_node_or_a_key_twice_is_refused() -> None:
    keys = tuple(masks.public_key(masks.new_private_key()) for _ in range(3))
    with pytest.raises(ProtocolError, match="twice"):
        Participants(b"", (1, 2, 2), keys)
    with pytest.raises(ProtocolError, match="twice"):
        Participants(b"", (1, 2, 3), (*keys[:2], keys[0]))


def test_a_large_model_is_masked_part_by_part() -> None:
    """More numbers than are masked at a time."""
    values = np.random.default_rng(0).standard_normal(40_000)
    case = Sum()
    sent = [masks.mask(values, node, case.private[node], case.people, case.own[node]) for node in NODES]
    opened = masks.cancel(sum_of(sent), case.people, case.own.values(), {})
    assert decode(opened) == pytest.approx(len(NODES) * values, rel=1e-12, abs=1e-17)
    assert len(np.unique(sent[0])) == sent[0].size
