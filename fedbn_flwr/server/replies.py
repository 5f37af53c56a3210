"""Reading replies: what a node sent, checked before anything is averaged."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING
from math import isfinite
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import NOT_FINITE, TOO_LARGE
from fedbn_flwr.server.averaging import not_finite, view
from fedbn_flwr.state.flat import FlatArrays, Layout
from fedbn_flwr.state.records import array_records
from fedbn_flwr.wire.masked import Summed, Tally

#: rounds without a usable reply that end a run
LOST_ROUNDS = 3


class NotObeyedError(RuntimeError):
    """A client did not acknowledge an instruction without which the method would be another one."""


class CannotTrainError(RuntimeError):
    """The run cannot go on, with the reason: no node could train, or nodes did not say who they are."""


class DivergedError(CannotTrainError):
    """Training has diverged; `server_round` is the first round in which nothing was learned."""

    def __init__(self, server_round: int, reason: str) -> None:
        super().__init__(server_round, reason)
        self.server_round, self.reason = server_round, reason

    def __str__(self) -> str:
        return f"training diverged at round {self.server_round}: {self.reason}"


class RefusedError(ValueError):
    """A reply that cannot be used, with the reason."""


@dataclass(frozen=True)
class Refusal:
    """Why nothing of a node can be used in a round."""

    node: int
    reason: str

    def __str__(self) -> str:
        return f"node {self.node}: {self.reason}"

    @property
    def is_infinite(self) -> bool:
        """Return whether the node sent, or its client refused to send, numbers that are not finite or too large."""
        return NOT_FINITE in self.reason or TOO_LARGE in self.reason


@dataclass(frozen=True)
class NodeReply:
    """A node's usable reply, or the mean of several nodes' replies: `node` is then the first of `nodes`."""

    node: int
    partition: int
    #: or what the metric `weighted_by_key` says
    num_examples: float
    metrics: Mapping[str, Any]
    records: Mapping[str, Mapping[str, np.ndarray]]
    content: RecordDict

    @property
    def nodes(self) -> Mapping[int, int]:
        """The nodes whose mean this is, with their partitions; one, unless a grid has made it of several replies."""
        return self.content.nodes if isinstance(self.content, Summed) else {self.node: self.partition}

    @property
    def tally(self) -> Tally | None:
        """What a sum says of a metric; None for a reply of one node."""
        return self.content.tally if isinstance(self.content, Summed) else None

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The entries of the model's state that the node sent."""
        return self.records[wire.ARRAYS]


@dataclass(frozen=True)
class Expected:
    """The request of a strategy: the binding keys, and the arrays whose shapes an answer must have.

    `groups` are those that an answer must hold beside the model, with entries of the model too.
    """

    binding: Sequence[str]
    arrays: Mapping[str, np.ndarray]
    arrays_key: str = wire.ARRAYS
    weighted_by: str = wire.NUM_EXAMPLES
    groups: Sequence[str] = ()

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of the whole state."""
        return FlatArrays.layout_of(self.arrays)


def parse_replies(
    messages: Iterable[Message], sent: Mapping[str, int], expected: Expected
) -> tuple[list[NodeReply], list[Refusal]]:
    """The usable replies, ordered by partition, and why others are not; these are named in the log.

    `sent` maps message ids to the nodes they went to: Flower's own error replies may not name the node. The order
    makes the result of a run independent of the order in which nodes answer.
    """
    usable, refused = [], []
    for message in messages:
        node = sent.get(message.metadata.reply_to_message_id, message.metadata.src_node_id)
        try:
            usable.append(_read(node, message, expected))
        except RefusedError as reason:
            log(WARNING, "Node %d is left out of this round: %s", node, reason)
            refused.append(Refusal(node, str(reason)))
    usable.sort(key=lambda reply: (reply.partition, reply.node))
    return _with_common_entries(usable, (wire.ARRAYS, *expected.groups)), refused


def require_obeyed(replies: Sequence[NodeReply], binding: Sequence[str], later: str = "") -> None:
    """Fail if a client did not acknowledge a key that changes the method; `later` are keys of rounds to come."""
    for reply in replies:
        if ignored := _ignored(reply.content, binding):
            named = ", ".join(f"{later}, which later rounds ask for" if key == "later" else key for key in ignored)
            raise NotObeyedError(
                f"node {reply.node} did not acknowledge {named}: its client does not implement what the strategy asked "
                "for, and going on would silently be another method; make the client's app with "
                "fedbn_flwr.clientapp: ClientApp(model=...) around a loop of your own, or client_app"
            )


def mean_metrics(replies: Sequence[NodeReply], names: Sequence[str], weighted_by: str) -> MetricRecord:
    """The weighted means of some metrics, none if all weights are 0: Flower's default, without its records."""
    weights = [reply.metrics[weighted_by] for reply in replies]
    if not (total := sum(weights)):
        return MetricRecord()
    shares = [weight / total for weight in weights]
    columns = {name: [reply.metrics[name] for reply in replies] for name in names}
    return MetricRecord({name: _mean(column, shares) for name, column in columns.items()})


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    if isinstance(values[0], list):
        return [_mean(column, shares) for column in zip(*values, strict=True)]
    return sum(value * share for value, share in zip(values, shares, strict=True))


def _ignored(content: RecordDict, binding: Sequence[str]) -> list[str]:
    """The binding keys that a reply does not acknowledge."""
    report = content.get(wire.REPORT)
    obeyed = report.get(wire.OBEYED, []) if isinstance(report, ConfigRecord) else []
    return sorted(set(binding) - set(obeyed if isinstance(obeyed, list) else []))


def _read(node: int, message: Message, expected: Expected) -> NodeReply:
    if message.has_error():
        raise RefusedError(f"it failed: {message.error.reason}")
    content = message.content
    if lacks_state(message):
        raise RefusedError("it has lost the entries that stay on it")
    measured = [record for record in content.values() if isinstance(record, MetricRecord)]
    metrics = {key: value for record in measured for key, value in record.items()}
    records = {name: view(record) for name, record in array_records(content).items()}
    if expected.arrays_key in records:
        records[wire.ARRAYS] = records.pop(expected.arrays_key)
    missing = [group for group in expected.groups if group not in records]
    # of a client that does not know what was asked, that is to be said, and not what follows from it
    if missing and not _ignored(content, expected.binding):
        raise RefusedError(f"it lacks {missing[0]!r}")
    for group, arrays in records.items():
        of_model = group in (wire.ARRAYS, wire.PERSONAL, *expected.groups)
        if not (of_model and isinstance(arrays, FlatArrays) and arrays.layout is expected.layout):
            _check_forms(arrays, expected.arrays if of_model else {})
        if (bad := not_finite(arrays)) is not None:
            raise RefusedError(f"its array {bad!r} in {group!r} {NOT_FINITE}")
    return NodeReply(
        node=node,
        partition=_integer(metrics.get(wire.PARTITION_ID, node)),
        num_examples=_count(metrics, expected.weighted_by),
        metrics=metrics,
        records=records,
        content=content,
    )


def lacks_state(message: Message) -> bool:
    """Whether a node has lost the entries that stay on it, and asks for the whole model."""
    report = message.content.get(wire.REPORT) if message.has_content() else None
    return isinstance(report, ConfigRecord) and bool(report.get(wire.LACKS_STATE))


def _count(metrics: Mapping[str, object], key: str) -> float:
    if key not in metrics:
        raise RefusedError(f"its metrics lack {key!r}, which the strategy weighs by; they are {_names(metrics)}")
    count = metrics[key]
    if not isinstance(count, int | float) or not np.isfinite(count) or count < 0:
        raise RefusedError(f"its {key!r} is {count!r}")
    return count


def _names(metrics: Mapping[str, object]) -> str:
    return ", ".join(sorted(metrics.keys() - {wire.PARTITION_ID})) or "none"


def _integer(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _check_forms(arrays: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if expected and name not in expected:
            raise RefusedError(f"its array {name!r} is not part of the model")
        if expected and array.shape != expected[name].shape:
            raise RefusedError(f"its array {name!r} has shape {array.shape}, not {expected[name].shape}")
        if expected and array.dtype != expected[name].dtype:
            raise RefusedError(f"its array {name!r} is {array.dtype}, not {expected[name].dtype}")


def _with_common_entries(replies: list[NodeReply], groups: Sequence[str]) -> list[NodeReply]:
    """Keep the replies that carry the same entries as most do."""
    names = [tuple(_entry_names(reply.records.get(group, {})) for group in groups) for reply in replies]
    if len(set(names)) <= 1:
        return replies
    votes = Counter[tuple[frozenset[str], ...]]()
    for reply, present in zip(replies, names, strict=True):
        votes[present] += len(reply.nodes)
    common = votes.most_common(1)[0][0]
    kept = []
    for reply, present in zip(replies, names, strict=True):
        if present == common:
            kept.append(reply)
        else:
            unlike = zip(groups, present, common, strict=True)
            group, example = min((group, name) for group, some, most in unlike for name in some ^ most)
            log(WARNING, "Node %d is left out of this round: unlike most, entry %r in %r", reply.node, example, group)
    return kept


def _entry_names(arrays: Mapping[str, np.ndarray]) -> frozenset[str]:
    return arrays.layout.all_names if isinstance(arrays, FlatArrays) else frozenset(arrays)


class LostRounds:
    """The rounds since the last usable reply in which nodes sent numbers that are not finite.

    Rounds in which nodes only failed, or were silent, say nothing about the model, and do not count.
    """

    def __init__(self) -> None:
        self._rounds: list[int] = []
        self._nodes: set[int] = set()

    def add(self, server_round: int, refused: Sequence[Refusal], connected: int, circumstances: str) -> None:
        """Note a lost round; raise DivergedError if these are `LOST_ROUNDS`, of more nodes than one bad one.

        `connected` is the number of all nodes.
        """
        infinite = [refusal for refusal in refused if refusal.is_infinite]
        if not infinite:
            return
        self._rounds.append(server_round)
        self._nodes |= {refusal.node for refusal in infinite}
        if len(self._rounds) >= LOST_ROUNDS and len(self._nodes) >= min(connected, 2):
            reason = f"no node has had a usable reply since ({infinite[0]}); {circumstances}"
            raise DivergedError(self._rounds[0], reason)


def infinite_losses(replies: Sequence[NodeReply]) -> int:
    """Return how many nodes report a training loss if none of the losses is finite; 0 if one is."""
    losses = [loss for reply in replies if isinstance(loss := reply.metrics.get(wire.TRAIN_LOSS), float)]
    return 0 if any(map(isfinite, losses)) else len(losses)
