"""What becomes of running statistics between the nodes and the server."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr.doctor.findings import Finding, worst_first
from fedbn_flwr.doctor.observer import as_arrays, layer_of, match
from fedbn_flwr.norm import bn_layers
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state import Arrays

#: what becomes of an entry that nodes send
Fate = Literal[
    "mean",
    "pooled",
    "unchanged",
    "one node's",
    "shortened",
    "between",
    "beyond",
    "below zero",
    "not finite",
    "absent",
]
Values = NDArray[np.float64]
#: a network's entries
GivenState = nn.Module | Mapping[str, Any] | Sequence[Any]
MEAN = "running_mean"
VARIANCE = "running_var"
COUNTER = "num_batches_tracked"
#: share of the variance between the nodes from which they lie apart
APART = 0.1
#: weight of one node from which it counts alone
ALONE = 0.98
#: of the largest number of an entry, what rounding makes of it
ROUNDING = 1e-5
_NAMES: dict[Fate, str] = {
    "not finite": "not-finite",
    "below zero": "negative-variance",
    "beyond": "not-a-mean",
    "shortened": "shortened",
    "one node's": "one-node",
    "unchanged": "not-averaged",
    "between": "between",
}


@dataclass
class SentRound:
    """The arrays of a round by the entries of the model, as far as they are known."""

    before: Arrays
    #: by node, in one order
    after: Sequence[Arrays]
    averaged: Arrays
    #: the nodes' numbers of samples; empty if they do not say
    weights: Sequence[float] = ()
    rounding: float = ROUNDING
    #: fates by entry, once they were looked for
    fates: dict[str, Fate] = field(default_factory=dict)
    #: by layer, the share of its variance that lies between the nodes
    shares: dict[str, float] = field(default_factory=dict)


def check(
    before: nn.Module | Mapping[str, Any],
    after: Sequence[GivenState],
    averaged: GivenState,
    weights: Sequence[float] = (),
) -> list[Finding]:
    """Say what becomes of BN in a round, worst first.

    `before` is the model, or the state dict, that the nodes began with; `after` has the state dicts
    of the nodes, and `averaged` what was made of them, on any device: or models, ArrayRecords, or
    lists of arrays in the order of the state. The nodes' numbers of samples need not be given. With
    a model, BN layers are found by type; without one, by the names of their running statistics,
    which does not find a layer of which none was ever sent. Names may have a prefix, such as
    `module.`.
    """
    if len(weights) not in (0, len(after)):
        raise UsageError(f"there are {len(weights)} weights, and {len(after)} nodes")
    layers: Iterable[str] | None = None
    parameters: Iterable[str] = ()
    if isinstance(before, nn.Module):
        layers = bn_layers(before)
        parameters = dict(before.named_parameters())
        before = before.state_dict()
    begun = as_arrays(before)
    nodes = [_as_entries(state, begun, parameters) for state in after]
    seen = SentRound(begun, nodes, _as_entries(averaged, begun, parameters), weights)
    if layers is None:
        layers = layers_by_name([seen.before, *nodes])
    names = list(layers)
    return worst_first(look_at(seen, names, len(names)))


def _as_entries(state: GivenState, begun: Arrays, parameters: Iterable[str]) -> Arrays:
    """Return a state's arrays by the names that the entries had before."""
    if isinstance(state, nn.Module):
        state = state.state_dict()
    elif not isinstance(state, Mapping):
        state = {str(place): value for place, value in enumerate(state)}
    arrays = as_arrays(state)
    if not begun or arrays.keys() & begun.keys():
        return arrays
    found = match(arrays, begun, parameters)
    if not found:
        raise UsageError(
            f"no entry of a state, such as {next(iter(state), '')!r}, is one of those before, such "
            f"as {next(iter(begun), '')!r}"
        )
    return {entry: arrays[key] for entry, key in found.items()}


def layers_by_name(states: Iterable[Iterable[str]]) -> list[str]:
    """Return the layers that have running statistics in one of the states."""
    entries = dict.fromkeys(name for state in states for name in state)
    return [layer_of(name) for name in entries if name.endswith(f".{MEAN}") or name == MEAN]


def entry_of(layer: str, kind: str) -> str:
    """Return the name of a layer's entry; the network may be the layer itself."""
    return f"{layer}.{kind}" if layer else kind


def statistics_of(layer: str) -> list[str]:
    """Return the names of a layer's running statistics."""
    return [entry_of(layer, MEAN), entry_of(layer, VARIANCE)]


def look_at(seen: SentRound, layers: Sequence[str], of: int) -> list[Finding]:
    """Return what is to be said of the running statistics of some of a network's layers; fills in
    fates and shares.
    """
    if not seen.after:
        return []
    findings = []
    weights = _weights(seen, layers)
    if not _is_mean(seen, layers, weights):
        ends = replace(seen, after=[end_of(seen.before, state) for state in seen.after])
        weights_of_ends = _weights(ends, layers)
        if _is_mean(ends, layers, weights_of_ends):  # nodes send what they changed
            seen.after = ends.after
            weights = weights_of_ends
    by_fate: dict[Fate, list[str]] = {}
    lacking = []
    for layer in layers:
        names = statistics_of(layer)
        sent = [name for name in names if _sent_by_all(seen, name)]
        if not sent and _sent_by_all(seen, entry_of(layer, "weight")):
            lacking.append(layer)
        for name in sent:
            fate = seen.fates[name] = _fate(seen, name, weights)
            by_fate.setdefault(fate, []).append(layer)
        if len(sent) == len(names):
            seen.shares[layer] = _share_between(seen, layer, weights[0])
    if "between" in by_fate:  # a median of all layers may be one node's in some
        by_fate["between"] += by_fate.pop("one node's", [])
    if lacking:
        findings.append(Finding("statistics-not-sent", tuple(lacking), of=of))
    for fate, name in _NAMES.items():
        concerned = tuple(dict.fromkeys(by_fate.get(fate, ())))
        if concerned:
            findings.append(Finding(name, concerned, _least(seen, concerned, fate), of))
    far = [layer for layer, share in seen.shares.items() if share > APART]
    if far and all(seen.fates[entry_of(layer, VARIANCE)] == "mean" for layer in far):
        most = max(far, key=seen.shares.__getitem__)
        share = seen.shares[most]
        detail = (
            f": their means differ by {share**0.5:.2g} standard deviations, "
            f"{100 * share:.0f} % of the variance"
        )
        findings.append(Finding("apart", (most,), detail, of))
    changed = [layer for layer in layers if _other_kind(seen, entry_of(layer, COUNTER))]
    if changed:
        entry = entry_of(changed[0], COUNTER)
        now = seen.averaged[entry]
        was = seen.after[0][entry]
        detail = f": {was.dtype}{list(was.shape)} becomes {now.dtype}{list(now.shape)}"
        findings.append(Finding("counters", tuple(changed), detail, of))
    half = [layer for layer in layers if _is_half(seen, entry_of(layer, VARIANCE))]
    if half:
        findings.append(Finding("half", tuple(half), of=of))
    return findings


def _least(seen: SentRound, layers: Iterable[str], fate: Fate) -> str:
    if fate != "below zero":
        return ""
    least = min(float(seen.averaged[entry_of(layer, VARIANCE)].min()) for layer in layers)
    return f": down to {least:.2g}"


def _other_kind(seen: SentRound, name: str) -> bool:
    if name not in seen.averaged or not _sent_by_all(seen, name):
        return False
    was = seen.after[0][name]
    now = seen.averaged[name]
    return (was.dtype, was.shape) != (now.dtype, now.shape)


def _is_half(seen: SentRound, name: str) -> bool:
    return any(name in state and state[name].dtype == np.float16 for state in seen.after)


def end_of(before: Arrays, change: Arrays) -> Arrays:
    """Return what a node ends with that sends its changes."""
    ends = dict(change)
    for name, begun in before.items():
        if name in change and change[name].shape == begun.shape:
            ends[name] = begun + change[name]
    return ends


def _sent_by_all(seen: SentRound, name: str) -> bool:
    return all(name in state for state in seen.after)


def _is_mean(seen: SentRound, layers: Sequence[str], weights: Sequence[Values]) -> bool:
    """Return whether the averaged means of all layers are means."""
    names = [entry_of(layer, MEAN) for layer in layers]
    sent = [name for name in names if _sent_by_all(seen, name)]
    return bool(sent) and all(_fate(seen, name, weights) == "mean" for name in sent)


# ---- one entry -----------------------------------------------------------------------------------


def _weights(seen: SentRound, layers: Sequence[str]) -> list[Values]:
    """Return the weights that a mean may have: the numbers of samples, none, and those that the
    means of all layers suggest.
    """
    count = len(seen.after)
    candidates = [np.full(count, 1 / count)]
    if len(seen.weights) == count and sum(seen.weights) > 0:
        candidates.insert(0, np.array(seen.weights, float) / sum(seen.weights))
    names = [
        name
        for name in (entry_of(layer, MEAN) for layer in layers)
        if name in seen.averaged and _sent_by_all(seen, name)
    ]
    if names and all(np.isfinite(seen.averaged[name]).all() for name in names):
        nodes = np.concatenate([_stacked(seen, name) for name in names], axis=1)
        target = np.concatenate([_flat(seen.averaged[name]) for name in names])
        # weights sum to 1: the last one follows from the others
        others = (nodes[:-1] - nodes[-1]).T
        if len(target) > 2 * count and np.isfinite(nodes).all():
            found = np.linalg.lstsq(others, target - nodes[-1], rcond=None)[0]
            found = np.append(found, 1 - found.sum())
            # where one node counts alone, the others are left out
            if (found > -1e-3).all() and found.max() < ALONE:
                candidates.append(found)
    return candidates


def _fate(seen: SentRound, name: str, weights: Sequence[Values]) -> Fate:
    if name not in seen.averaged or seen.averaged[name].size != seen.after[0][name].size:
        return "absent"
    now = _flat(seen.averaged[name])
    if not np.isfinite(now).all():
        return "not finite"
    nodes = _stacked(seen, name)
    tolerance = _tolerance(seen, name)
    if name.endswith(VARIANCE) and (now < -tolerance).any():
        return "below zero"
    means = [weight @ nodes for weight in weights]
    if any(_equal(now, mean, tolerance) for mean in means):
        return "mean"
    if name.endswith(VARIANCE) and _is_pooled(seen, name, weights, tolerance):
        return "pooled"
    if any(_equal(now, node, tolerance) for node in nodes):
        return "one node's"
    if name in seen.before and seen.before[name].size == now.size:
        old = _flat(seen.before[name])
        if _equal(now, old, tolerance):
            return "unchanged"
        if any(_is_between(old, mean, now, tolerance) for mean in means):
            return "shortened"
    if (now >= nodes.min(0) - tolerance).all() and (now <= nodes.max(0) + tolerance).all():
        return "between"
    return "beyond"


def _is_pooled(seen: SentRound, name: str, weights: Sequence[Values], tolerance: float) -> bool:
    """Return whether a variance is that of the nodes' data together, or wider than all of theirs
    as that is.
    """
    mean_name = entry_of(layer_of(name), MEAN)
    if mean_name not in seen.averaged or not _sent_by_all(seen, mean_name):
        return False
    now = _flat(seen.averaged[name])
    variances = _stacked(seen, name)
    means = _stacked(seen, mean_name)
    mixed = (weight @ (variances + (means - weight @ means) ** 2) for weight in weights)
    return any(_equal(now, each, 10 * tolerance) for each in mixed)


def _is_between(old: Values, mean: Values, now: Values, tolerance: float) -> bool:
    way = mean - old
    if len(way) < 2 or not way.any():
        return False
    part = (now - old) @ way / (way @ way)
    return bool(0 < part < 0.999) and _equal(now, old + part * way, tolerance)


def _share_between(seen: SentRound, layer: str, weights: Values) -> float:
    """Return the share of a layer's variance that lies between the nodes, over its channels."""
    means = _stacked(seen, entry_of(layer, MEAN))
    variances = _stacked(seen, entry_of(layer, VARIANCE))
    between = float((weights @ (means - weights @ means) ** 2).sum())
    within = float((weights @ variances).sum())
    if not np.isfinite(between + within) or between + within <= 0:
        return 0.0
    return between / (between + within)


def _tolerance(seen: SentRound, name: str) -> float:
    kinds = [state[name].dtype for state in (*seen.after, seen.averaged)]
    rounding = [float(np.finfo(kind).eps) for kind in kinds if np.issubdtype(kind, np.floating)]
    largest = float(np.abs(_stacked(seen, name)).max(initial=0.0))
    return max(seen.rounding, *(4 * each for each in rounding)) * largest + 1e-12


def _equal(left: Values, right: Values, tolerance: float) -> bool:
    return bool((np.abs(left - right) <= tolerance).all())


def _stacked(seen: SentRound, name: str) -> Values:
    return np.stack([_flat(state[name]) for state in seen.after])


def _flat(values: NDArray[Any]) -> Values:
    return np.asarray(values, np.float64).reshape(-1)
