"""Corrections carried under masks: a node keeps its own local values, and makes its own corrections.

What `CarriedValues` is on a server that sees every node's values, is divided here (`fedbn_flwr.layerwise.carried` has
the method). At the start of a round, the server asks the nodes whose values are new for their pool, a sum under masks
(`CARRIED_QUERY`). It returns the pool with the round's training message, and each node makes its own corrections of it,
within `trust`. After training, a node keeps its new local values, and sends none.

A node gives its values for one pool only: with two of them, the server could tell what the nodes had that are in one of
them. For the same reason nobody takes back what corrections of gradients add when a node is in the pool, and is lost
before it has trained: this surplus is what the lost node had.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.layerwise.carried import (
    EXAMPLES,
    KINDS,
    LAYERS,
    SIZES,
    Entries,
    correction,
    trusted,
    why_not_carried,
)
from fedbn_flwr.secure import ProtocolError
from fedbn_flwr.state.records import InMemoryArray, make_record
from fedbn_flwr.wire import masked

#: beside what a server keeps of a node: that a pool had the values
GIVEN = "given"


def for_pool(message: Message, context: Context) -> RecordDict:
    """Return a node's values, to be masked, or a sign that it has none; from then on they count as given."""
    if masked.SECURE not in message.content:
        raise ProtocolError("carried values leave a node under masks only")
    kept = _kept(context)
    if not kept:
        return RecordDict({wire.METRICS: MetricRecord({}), wire.REPORT: ConfigRecord({wire.LACKS_STATE: True})})
    if GIVEN in kept:
        raise ProtocolError("the server asks again for values that were in a pool before")
    _keep(context, {**kept, GIVEN: np.array(True)})
    names = kept[LAYERS].tobytes().decode().split("\n")
    counts = {masked.COUNT + name: count for name, count in zip(names, kept[SIZES][0], strict=True)}
    return RecordDict(
        {
            wire.CARRIED: _record({**{kind: kept[kind] for kind in KINDS if kind in kept}, **counts}),
            wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: kept[EXAMPLES].item()}),
        }
    )


def with_corrections(content: RecordDict, context: Context) -> RecordDict:
    """Return what a message under masks holds, with the node's own corrections in the place of the pool."""
    pool, kept = _arrays(content.array_records[wire.CARRIED]), _kept(context)
    trust = float(pool[masked.TRUST])
    if trust != 0 and not 1 < trust < float("inf"):
        raise ProtocolError(f"the server asks to trust corrections up to {trust:g}: 0, or more than 1, is allowed")
    others = {name: record for name, record in content.items() if name != wire.CARRIED}
    if not _fits(pool, kept):
        return RecordDict(others)
    sizes = np.concatenate([pool[masked.COUNTS][None], kept[SIZES][1:]])
    corrections = {LAYERS: kept[LAYERS], SIZES: sizes}
    for kind in KINDS:
        if kind in kept:
            own, pooled = (torch.from_numpy(values[kind]) for values in (kept, pool))
            rows = trusted(kind, correction(kind, own.unsqueeze(0), pooled), trust)
            corrections[kind] = rows[0].numpy()
    return RecordDict({**others, wire.CARRIED: _record(corrections)})


def keep_values(reply: RecordDict, context: Context) -> RecordDict:
    """Keep the values of a reply, and return the rest of it."""
    if wire.CARRIED not in reply:
        return reply
    metrics: Any = reply.metric_records[wire.METRICS]
    values = _arrays(reply.array_records[wire.CARRIED])
    _keep(context, {} if why_not_carried(values) else {**values, EXAMPLES: np.array(metrics[wire.NUM_EXAMPLES])})
    return RecordDict({name: record for name, record in reply.items() if name != wire.CARRIED})


def _fits(pool: Mapping[str, np.ndarray], kept: Mapping[str, np.ndarray]) -> bool:
    """Return whether the pool is of a node's own layers, and of use."""
    layers = {name: kept[name] for name in (LAYERS, SIZES) if name in kept}
    pooled: Entries = {kind: pool[kind] for kind in KINDS if kind in pool}
    same = pooled.keys() == {kind for kind in KINDS if kind in kept}
    return bool(kept) and same and not why_not_carried({**layers, **pooled})


def _kept(context: Context) -> Entries:
    record = dict(Memory(context.state).kept(wire.CARRIED)).get("")
    return {} if record is None else _arrays(record)


def _keep(context: Context, values: Mapping[str, np.ndarray]) -> None:
    Memory(context.state).keep(wire.CARRIED, _record(values))


def _arrays(record: Any) -> Entries:
    return {name: array.numpy() for name, array in record.items()}


def _record(values: Mapping[str, np.ndarray]) -> ArrayRecord:
    return make_record({name: InMemoryArray(np.asarray(value)) for name, value in values.items()})
