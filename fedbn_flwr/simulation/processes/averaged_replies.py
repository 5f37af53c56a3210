"""The replies of a worker's nodes as one, where a strategy only averages: what the server does next, done by workers.

The server then receives as much from 1,000 nodes of a worker as from 10, and averages as many replies as there are
workers. The mean has the dtypes of the replies, so that a result differs from that of single replies by rounding.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, cast

from flwr.app import ConfigRecord, Message, MetricRecord

from fedbn_flwr import wire
from fedbn_flwr.server.pooling import average
from fedbn_flwr.server.replies import Expected, NodeReply, mean_metrics, read_reply
from fedbn_flwr.state import arrays_to_record
from fedbn_flwr.state.flat import FlatArrays
from fedbn_flwr.wire.pooled import Summed


def average_replies(replies: Sequence[Message], weighting: str) -> list[Message | None]:
    """Return the mean of the replies in the place of the first of them, and None in the places of the others.

    Arrays are weighted as the option `weighting` says, metrics by numbers of samples. A reply that the server may have
    to refuse by name stays as it is, and so does one that is unlike most: an error, numbers that are not finite, a
    weight of 0.
    """
    readable = {place: read for place, message in enumerate(replies) if (read := _read(message)) is not None}
    kinds = {place: _kind(reply) for place, reply in readable.items()}
    if not kinds:
        return list(replies)
    common = Counter(kinds.values()).most_common(1)[0][0]
    places = [place for place, kind in kinds.items() if kind == common]
    averaged: list[Message | None] = list(replies)
    for place in places[1:]:
        averaged[place] = None
    first = replies[places[0]]
    first.content = _mean([readable[place] for place in places], weighting)
    return averaged


def _read(message: Message) -> NodeReply | None:
    """Return a reply that can be averaged."""
    if message.has_error():
        return None
    with suppress(Exception):  # the server says what is wrong with it
        reply = read_reply(message.metadata.src_node_id, message, Expected((), {}))
        numbers = [each for value in reply.metrics.values() for each in (value if isinstance(value, list) else [value])]
        return reply if reply.num_examples > 0 and all(map(isfinite, numbers)) else None
    return None


def _kind(reply: NodeReply) -> Hashable:
    """Return what replies have in common that can be averaged: arrays, metrics, and what their clients obeyed."""
    arrays = tuple((name, cast(FlatArrays, arrays).layout.entries) for name, arrays in sorted(reply.records.items()))
    lengths = tuple(
        (name, len(value) if isinstance(value, list) else 0) for name, value in sorted(reply.metrics.items())
    )
    return arrays, lengths, tuple(_obeyed(reply))


def _mean(replies: Sequence[NodeReply], weighting: str) -> Summed:
    weights = [1.0 if weighting == "uniform" else float(reply.num_examples) for reply in replies]
    mean = Summed()
    mean.nodes = {reply.node: reply.partition for reply in replies}
    mean.counts = {reply.node: reply.num_examples for reply in replies}
    for group in replies[0].records:
        mean[group] = arrays_to_record(average([reply.records[group] for reply in replies], weights))
    named = sorted(replies[0].metrics.keys() - {wire.NUM_EXAMPLES, wire.PARTITION_ID})
    # the least partition is the place of the mean among the replies of other workers
    known: Any = {wire.NUM_EXAMPLES: sum(mean.counts.values()), wire.PARTITION_ID: min(mean.nodes.values())}
    mean[wire.METRICS] = MetricRecord({**known, **mean_metrics(replies, named)})
    mean[wire.REPORT] = ConfigRecord({wire.OBEYED: _obeyed(replies[0])})
    return mean


def _obeyed(reply: NodeReply) -> list[Any]:
    report: Any = reply.content.get(wire.REPORT, {})
    return sorted(report.get(wire.OBEYED, []))
