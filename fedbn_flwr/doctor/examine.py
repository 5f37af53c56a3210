"""Say what becomes of BN in an app that was run: findings, and a table by layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from fedbn_flwr.doctor.app import AppHistory, AppRound, Visit
from fedbn_flwr.doctor.check import (
    COUNTER,
    MEAN,
    VARIANCE,
    SentRound,
    end_of,
    entry_of,
    look_at,
    statistics_of,
)
from fedbn_flwr.doctor.findings import Finding, worst_first
from fedbn_flwr.doctor.observer import LayerSeen, Network, match, network_of, same_numbers
from fedbn_flwr.state import Arrays

#: messages of training, and the networks that were trained
Visits = list[tuple[Visit, Network]]
#: share of what came that is still in running statistics at the end of a round, from which they lag
LAG = 0.25
#: share of an update's squared norm from which statistics decide what a clip does
DOMINANT = 0.5
#: of the largest number of an entry, what packing, such as SecAgg+'s whole numbers, makes of it
PACKED = 1e-3
#: where running statistics come from, worst first: what was seen once stands
STANDS = ("made anew", "set back")
#: what may become of statistics, worst first: of both, and of all rounds, the worst stands
AVERAGED = (
    "not finite",
    "below zero",
    "beyond",
    "shortened",
    "between",
    "one node's",
    "unchanged",
    "pooled",
    "mean",
    "absent",
    "-",
)
PLAIN = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


@dataclass
class LayerFate:
    """What became of a BN layer: a row of the table."""

    name: str
    sent: str = "no"
    averaged: str = "-"
    came_back: str = "-"
    moved: bool = False
    tracks: bool = True


@dataclass
class Examination:
    """All that is to be said of an app."""

    findings: list[Finding]
    layers: list[LayerFate] = field(default_factory=list)
    #: why the ServerApp ended before its rounds did; empty if it did not
    stopped: str = ""
    #: whether a node has trained a network
    trained: bool = True


def examine(history: AppHistory, model: Network | None = None) -> Examination:
    """Examine a run; `model` describes the network if no node's process has called one."""
    findings = list(_of_errors(history))
    for each in history.rounds:
        for visit in each.visits:
            if visit.network is None and model is not None and not visit.error:
                visit.network = _as_matched(model, visit)
                if visit.sent and not visit.network.sent:
                    findings.append(Finding("unnamed", detail=str(len(visit.sent))))
    _unpack(history)
    trained = [network for each in history.rounds for _, network in each.networks]
    if not trained:
        return Examination(findings, stopped=history.stopped, trained=False)
    network = trained[0]
    fates = {name: LayerFate(name) for name in network.layers}
    findings += _of_kinds(network)
    if fates:
        findings += _of_processes(history, fates)
        findings += _of_wire(history, fates)
    return Examination(worst_first(findings), list(fates.values()), history.stopped)


def _as_matched(model: Network, visit: Visit) -> Network:
    received = match(visit.received, model.start, model.parameters)
    sent = match(visit.sent, model.start, model.parameters)
    start = {entry: visit.received[key] for entry, key in received.items()}
    end = {entry: visit.sent[key] for entry, key in sent.items()}
    return replace(model, start=start, end=end, received=received, sent=sent)


def _unpack(history: AppHistory) -> None:
    """Where an app packs or encrypts its arrays, take the networks' own entries for what was sent
    and what came back: all but those that a node's next message finds as the node left them.
    """
    for index, each in enumerate(history.rounds):
        later = [*each.evaluated]
        if index + 1 < len(history.rounds):
            later += history.rounds[index + 1].trained
        for visit, network in each.networks:
            returned = [
                (other, other.network)
                for other in later
                if other.node == visit.node and other.network
            ]
            if network.sent or not returned:
                continue
            first, back = returned[0]
            if not visit.sent and not _has_news(first, visit):
                continue
            shared = [
                name
                for name, value in network.end.items()
                if name in back.start and not same_numbers(value, back.start[name])
            ]
            visit.sent = network.end
            each.rounding = PACKED
            network.sent = {name: name for name in shared}
            each.averaged = back.start
            for other, begun in returned:
                if not begun.received:
                    other.received = begun.start
                    begun.received = {name: name for name in shared}


def _has_news(later: Visit, before: Visit) -> bool:
    """Whether a node receives other numbers than before."""
    both = later.received.keys() & before.received.keys()
    return any(not same_numbers(later.received[name], before.received[name]) for name in both)


# ---- what a node's process saw -------------------------------------------------------------------


def _of_errors(history: AppHistory) -> Iterator[Finding]:
    for each in history.rounds:
        for visit in each.visits:
            if not visit.error:
                continue
            detail = f": node {visit.node}, {visit.error[:300].rstrip('.')}"
            if "more than 1 value per channel" in visit.error:
                yield Finding("one-value", detail=detail)
            elif "state_dict" in visit.error or "size mismatch" in visit.error:
                yield Finding("does-not-load", detail=detail)
            else:
                yield Finding("node-failed", detail=detail)


def _of_kinds(network: Network) -> Iterator[Finding]:
    layers = network.layers
    if network.foreign:
        yield Finding("foreign", network.foreign)
    elif not layers:
        yield Finding("no-bn")
    variants: dict[str, int] = {}
    for layer in layers.values():
        if layer.kind not in PLAIN:
            variants[layer.kind] = variants.get(layer.kind, 0) + 1
    if variants:
        yield Finding("variants", detail=_counted(variants))
    if network.others:
        yield Finding("others", detail=_counted(network.others))
    without = tuple(name for name, layer in layers.items() if not layer.tracks)
    if without:
        yield Finding("without-statistics", without, of=len(layers))


def _counted(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _of_processes(history: AppHistory, fates: dict[str, LayerFate]) -> Iterator[Finding]:
    """What layers were called with, and whether their statistics moved."""
    of = len(fates)
    called = dict[str, LayerSeen]()
    for each in history.rounds:
        for visit, network in each.networks:
            for name in fates.keys() & network.layers.keys():
                fates[name].moved |= _moved(network, name)
                fates[name].tracks = network.layers[name].tracks
                if network.layers[name].learning:
                    called[name] = network.layers[name]
            by_name: dict[str, list[str]] = {}
            for name, layer in network.layers.items():
                for finding in _of_training(network, name, layer):
                    by_name.setdefault(finding, []).append(name)
            for finding, layers in by_name.items():
                detail = f", on node {visit.node}" if finding == "one-sample" else ""
                yield Finding(finding, tuple(layers), detail, of)
        for evaluated, where in each.evaluations:
            measured = [name for name, seen in evaluated.layers.items() if _measured(seen)]
            if measured:
                yield Finding("measured-in-training", tuple(measured), where, of)
    still = [name for name, seen in called.items() if seen.tracks and not fates[name].moved]
    if still:
        detail = ": momentum is 0" if called[still[0]].momentum == 0 else ""
        yield Finding("never-move", tuple(still), detail, of)


def _of_training(network: Network, name: str, layer: LayerSeen) -> Iterator[str]:
    moved = _moved(network, name)
    if layer.learning == 0 and layer.fixed > 0 and layer.tracks:
        yield "eval-mode-untrained" if _is_new(network.start, name) else "eval-mode"
    if layer.learning == 0:
        return
    if layer.fewest == 1:
        yield "one-sample"
    if not layer.tracks:
        return
    if layer.trained_fixed > 0:
        yield "eval-mode-later"
    if moved and layer.learns is False:
        yield "frozen-moves"
    elif moved and layer.momentum is None and entry_of(name, COUNTER) in network.received:
        yield "cumulative"


def _measured(layer: LayerSeen) -> bool:
    """Whether a layer saw an evaluation in training mode only."""
    in_training = layer.learning + layer.measuring
    return layer.tracks and in_training > 0 and layer.evaluating + layer.fixed == 0


def _moved(network: Network, layer: str) -> bool:
    names = statistics_of(layer)
    return any(
        name in network.start
        and name in network.end
        and not same_numbers(network.start[name], network.end[name])
        for name in names
    )


def _is_new(state: Arrays, layer: str) -> bool:
    """Whether running statistics are those of a layer that was just made."""
    mean = state.get(entry_of(layer, MEAN))
    variance = state.get(entry_of(layer, VARIANCE))
    if mean is None or variance is None:
        return False
    return not mean.any() and bool((variance == 1).all())


# ---- what nodes send, what is made of it, what comes back ----------------------------------------


def _of_wire(history: AppHistory, fates: dict[str, LayerFate]) -> Iterator[Finding]:
    of = len(fates)
    tracked = [name for name, fate in fates.items() if fate.tracks]
    lost = any(visit.error for each in history.rounds for visit in each.trained)
    failed = lost or bool(history.stopped)
    _note_sent(history, fates)
    _note_returns(history, fates)
    groups: dict[str, list[str]] = {}
    for name in tracked:
        groups.setdefault(_way(fates[name], failed), []).append(name)
    shared = groups.pop("shared", [])
    groups.pop("", None)
    local = [*groups.get("local", ()), *groups.get("local-lost", ())]
    # a network of the node's own may stay whole, beside one that is shared
    mixed = {network_of(name) for name in local} & {
        network_of(name) for name in tracked if name not in local
    }
    if mixed:
        groups.pop("local", None)
        groups["partly-local"] = [
            name for name in tracked if name not in local and network_of(name) in mixed
        ]
    for name, layers in groups.items():
        detail = ""
        if name == "partly-local":
            detail = ": " + Finding("local", tuple(local), of=of).named()
        yield Finding(name, tuple(layers), detail, of)
    found = list(_of_rounds(history, fates, shared))
    if mixed:  # layers between those that are kept drift apart
        found = [finding for finding in found if finding.name != "apart"]
    yield from found
    if not any(finding.level == "wrong" for finding in found):
        yield from _of_evaluations(history, groups, of)
    spoiled = [each for each in found if each.level == "wrong" or each.name == "between"]
    bad = {layer for finding in spoiled for layer in finding.layers}
    good = tuple(name for name in shared if name not in bad)
    if good and "partly-local" not in groups:
        yield Finding("averaged", good, of=of)


def _way(fate: LayerFate, failed: bool) -> str:
    """Return which finding a layer belongs to by what nodes send of it and what comes back;
    `shared` if its statistics are sent, and others may come back.
    """
    kept = fate.came_back == "kept"
    if fate.sent == "weights" and kept:
        return "statistics-local"
    if fate.sent == "weights":
        return "statistics-not-sent"
    if kept:
        return "local"
    if fate.came_back == "made anew":
        return "local-lost"
    if fate.sent in ("all", "statistics"):
        return "shared"
    if fate.came_back == "-" and not failed:
        return "no-repeat"
    return ""


def _note_sent(history: AppHistory, fates: dict[str, LayerFate]) -> None:
    """Fill in what of each layer all nodes send, or that only some do."""
    every = [network for each in history.rounds for _, network in each.networks]
    told = [network.sent for network in every if network.sent]
    for name, fate in fates.items():
        statistics = all(entry in sent for sent in told for entry in statistics_of(name))
        weights = all(entry_of(name, "weight") in sent for sent in told)
        if statistics and told:
            fate.sent = "all" if weights else "statistics"
        elif weights and told:
            fate.sent = "weights"
        elif any(entry_of(name, "weight") in sent for sent in told):
            fate.sent = "by some"


def _note_returns(history: AppHistory, fates: dict[str, LayerFate]) -> None:
    """Fill in where the running statistics come from with which a node's later messages begin."""
    ends: dict[int, Arrays] = {}
    for each in history.rounds:
        for visit in each.visits:
            network = visit.network
            if network is None:
                continue
            if visit.node in ends:
                of_new = _source_of_new(visit, network)
                for name, fate in fates.items():
                    source = _source(visit, network, name, ends[visit.node], of_new)
                    seen = (source, fate.came_back)
                    worst = next((each for each in STANDS if each in seen), "")
                    fate.came_back = worst or source or fate.came_back
            if visit in each.trained:
                ends[visit.node] = network.end


def _source(visit: Visit, network: Network, layer: str, end: Arrays, of_new: str) -> str:
    names = statistics_of(layer)
    if any(name not in network.start for name in names):
        return ""
    received = network.received
    if all(
        name in received and same_numbers(visit.received[received[name]], network.start[name])
        for name in names
    ):
        return "loaded"
    if all(name in end and same_numbers(end[name], network.start[name]) for name in names):
        return "kept"
    if not _is_new(network.start, layer):
        return "made of others"
    return of_new


def _source_of_new(visit: Visit, network: Network) -> str:
    """Return where statistics of new layers come from: with the weights that were received, they
    were set back.

    All such layers tell together: the weights of one may be those of a new layer by chance.
    """
    new = [entry_of(name, "weight") for name in network.layers if _is_new(network.start, name)]
    weights = [name for name in new if name in network.start]
    received = network.received
    are_received = [
        name in received and same_numbers(visit.received[received[name]], network.start[name])
        for name in weights
    ]
    if weights and all(are_received):
        return "set back"
    return "made anew"


def _of_rounds(
    history: AppHistory, fates: dict[str, LayerFate], shared: list[str]
) -> Iterator[Finding]:
    of = len(fates)
    for each in history.rounds:
        visits = each.networks
        if not visits:
            continue
        yield from _of_places(visits, shared, of)
        copies = [name for name in shared if any(_is_copy(*visit, name) for visit in visits)]
        if copies:
            yield Finding("copy-without-statistics", tuple(copies), of=of)
        clipped = _clipped(visits)
        if clipped < 1:
            detail = f": the node clips its update to {100 * clipped:.1f} %"
            yield Finding("shortened", tuple(shared), detail, of)
        seen = _named(each, visits)
        found = look_at(seen, [name for name in shared if name not in copies], of)
        yield from found
        share = max(network.statistics_share for _, network in visits)
        shortened = clipped < 1 or any(finding.name == "shortened" for finding in found)
        if shortened and share > DOMINANT:
            yield Finding("clipped-by-statistics", detail=f"{100 * share:.0f} %")
        yield from _of_lag(visits, shared, of)
        for name in shared:
            now = [seen.fates[entry] for entry in statistics_of(name) if entry in seen.fates]
            fates[name].averaged = min([fates[name].averaged, *now], key=AVERAGED.index)


def _named(each: AppRound, visits: Visits) -> SentRound:
    """Return the arrays of a round by the entries of the network."""
    after = [_after(visit, network) for visit, network in visits]
    first, network = visits[0]
    places = network.sent
    # what comes back has the places of what was sent
    averaged = {entry: each.averaged[key] for entry, key in places.items() if key in each.averaged}
    before = {entry: first.received[key] for entry, key in places.items() if key in first.received}
    weights = [visit.weight for visit, _ in visits]
    return SentRound(before, after, averaged, weights, rounding=each.rounding)


def _after(visit: Visit, network: Network) -> Arrays:
    """Return what a node's training has made of its entries, also if it sends their changes."""
    sent = {entry: visit.sent[key] for entry, key in network.sent.items()}
    if network.sends_changes:
        received = {entry: visit.received[key] for entry, key in network.received.items()}
        return end_of(received, sent)
    return sent


def _of_places(visits: Visits, shared: list[str], of: int) -> Iterator[Finding]:
    """Compare the places that nodes send entries at."""
    (one, first), *others = visits
    for visit, other in others:
        differing = []
        for name in shared:
            entries = [entry_of(name, "weight"), *statistics_of(name)]
            if any(first.sent.get(entry) != other.sent.get(entry) for entry in entries):
                differing.append(name)
        if differing:
            detail = f": node {visit.node} and node {one.node} disagree"
            yield Finding("names-differ", tuple(differing), detail, of)
            return


def _is_copy(visit: Visit, network: Network, layer: str) -> bool:
    """Whether the weights that are sent have moved, and the running statistics have not, although
    the network's have.
    """
    if network.sends_changes or not _moved(network, layer):
        return False
    names = statistics_of(layer)
    return all(
        name in network.sent and same_numbers(visit.sent[network.sent[name]], network.start[name])
        for name in names
    )


def _clipped(visits: Visits) -> float:
    """Return the smallest factor by which a node shortened its update; 1 if none did."""
    factors = [network.kept_change for _, network in visits if network.kept_change is not None]
    return min((factor for factor in factors if 0 < factor < 0.999), default=1.0)


def _of_lag(visits: Visits, shared: list[str], of: int) -> Iterator[Finding]:
    lagging = []
    most = 0.0
    for name in shared:
        for _, network in visits:
            layer = network.layers.get(name)
            if layer and layer.momentum and layer.learning:
                left = (1 - layer.momentum) ** layer.learning
                if left > LAG:
                    lagging.append(name)
                    most = max(most, left)
    if lagging:
        yield Finding("lag", tuple(dict.fromkeys(lagging)), f"{100 * most:.0f} %", of)


def _of_evaluations(history: AppHistory, groups: Iterable[str], of: int) -> Iterator[Finding]:
    """Evaluations with statistics of a new layer, unless that was said as what it comes from."""
    if {"statistics-not-sent", "local-lost"} & set(groups):
        return
    for each in history.rounds:
        moved = {
            name for _, trained in each.networks for name in trained.layers if _moved(trained, name)
        }
        for network, where in each.evaluations:
            new = [name for name in network.layers if _is_new(network.start, name)]
            layers = tuple(name for name in new if name in moved)
            if layers:
                yield Finding("evaluated-without", layers, where, of)
