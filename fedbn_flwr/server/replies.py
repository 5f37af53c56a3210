"""Reading replies: what a node sent, checked before anything is averaged."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import LARGEST, MOST, NOT_FINITE, TOO_LARGE, Fault, Why
from fedbn_flwr.state import view_arrays
from fedbn_flwr.state.flat import FlatArrays, Layout, portions
from fedbn_flwr.state.records import array_records
from fedbn_flwr.wire.pooled import Summed

SentT = TypeVar("SentT")
ReadT = TypeVar("ReadT")


class NotObeyedError(RuntimeError):
    """A client did not acknowledge an instruction without which the method would be another one."""


class CannotTrainError(RuntimeError):
    """The run cannot go on, with the reason, such as that no node could train."""


class DivergedError(CannotTrainError):
    """Training has diverged; `server_round` is the first round in which nothing was learned, or the
    last of a run whose score is then not finite.
    """

    def __init__(self, server_round: int, reason: str) -> None:
        super().__init__(server_round, reason)
        self.server_round = server_round
        self.reason = reason

    def __str__(self) -> str:
        return "training diverged at round {}: {}".format(*self.args)


class RefusedError(ValueError):
    """A reply that cannot be used, with the reason."""

    def __init__(self, reason: str, why: Why = Why.OTHER) -> None:
        super().__init__(reason)
        self.why = why


@dataclass(frozen=True)
class Refusal:
    """Why nothing of a node can be used in a round, or of all nodes, which is node 0."""

    node: int
    reason: str
    why: Why = Why.OTHER

    def __post_init__(self) -> None:
        """Clean the reason, which may be the node's own words."""
        object.__setattr__(self, "reason", wire.printable(self.reason))

    def __str__(self) -> str:
        if self.node:
            return f"node {self.node}: {self.reason}"
        return self.reason


def log_left_out(node: int, reason: str) -> Refusal:
    """Say in the log why a node is left out, and return it."""
    refusal = Refusal(node, reason)
    log_refused([refusal])
    return refusal


def log_refused(refused: Sequence[Refusal], outcome: str = "left out of this round") -> None:
    """Say in the log why nodes are left out, each reason once."""
    for reason in dict.fromkeys(refusal.reason for refusal in refused):
        nodes = [str(refusal.node) for refusal in refused if refusal.reason == reason]
        if len(nodes) == 1:
            who = f"Node {nodes[0]} is"
        else:
            who = f"Nodes {', '.join(nodes)} are"
        log(WARNING, "%s %s: %s", who, outcome, reason)


def read_each(
    sent: Iterable[tuple[int, SentT]], read: Callable[[int, SentT], ReadT]
) -> tuple[dict[int, ReadT], list[Refusal]]:
    """Read what nodes sent, node by node; return what could be read, and for the log the refusals
    of the others.

    A node may send anything. So whatever fails here is the fault of this node, and costs no other
    one anything.
    """
    understood = dict[int, ReadT]()
    refused = list[Refusal]()
    for node, content in sent:
        try:
            understood[node] = read(node, content)
        except RefusedError as reason:
            refused.append(Refusal(node, str(reason), reason.why))
        except Exception as error:
            refused.append(Refusal(node, f"it cannot be read: {type(error).__name__}: {error}"))
    return understood, refused


@dataclass(frozen=True, eq=False)
class NodeReply:
    """A node's usable reply, or the mean of several nodes' replies: `node` is then the first of
    `nodes`.
    """

    node: int
    partition: int
    #: or what the metric `weighted_by_key` says
    num_examples: float
    metrics: Mapping[str, Any]
    records: Mapping[str, Mapping[str, np.ndarray]]
    content: RecordDict

    @property
    def nodes(self) -> Mapping[int, int]:
        """The nodes whose mean this is, with their partitions.

        One, unless a grid has made it of several replies.
        """
        if isinstance(self.content, Summed):
            return self.content.nodes
        return {self.node: self.partition}

    @property
    def counts(self) -> Mapping[int, float]:
        """The number of examples of each node."""
        if isinstance(self.content, Summed):
            return self.content.counts
        return {self.node: self.num_examples}

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The entries of the model's state that the node sent; none after a pass over its data."""
        return self.records.get(wire.ARRAYS, {})


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
    #: the binding keys of later rounds, for the words of a refusal
    later: str = ""
    #: whether an answer must hold entries of the model
    needs_model: bool = False
    #: raises RefusedError for what else cannot be used
    check: Callable[["NodeReply"], None] = lambda reply: None

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of the whole state."""
        return FlatArrays.layout_of(self.arrays)


def parse_replies(
    messages: Iterable[Message], sent: Iterable[Message], expected: Expected
) -> tuple[list[NodeReply], list[Refusal]]:
    """The usable replies, ordered by partition, and why others are not: `log_refused` is for the
    caller to use.

    `sent` are the messages that were answered: Flower's own error replies may not name the node.
    The order makes the result of a run independent of the order in which nodes answer.
    """
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    named = [
        (asked.get(each.metadata.reply_to_message_id, each.metadata.src_node_id), each)
        for each in messages
    ]
    replies, refused = read_each(named, lambda node, message: read_reply(node, message, expected))
    usable = sorted(replies.values(), key=lambda reply: (reply.partition, reply.node))
    return _with_common_entries(usable, expected.groups, refused), refused


def mean_metrics(replies: Sequence[NodeReply], names: Sequence[str]) -> MetricRecord:
    """The weighted means of some metrics, none if all weights are 0: Flower's default, without its
    records.
    """
    weights = [reply.num_examples for reply in replies]
    total = sum(weights)
    if not total:
        return MetricRecord()
    shares = [weight / total for weight in weights]
    means = MetricRecord()
    for name in names:
        means[name] = _mean([reply.metrics[name] for reply in replies], shares)
    return means


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    if isinstance(values[0], list):
        return [_mean(column, shares) for column in zip(*values, strict=True)]
    return sum(value * share for value, share in zip(values, shares, strict=True))


def read_reply(node: int, message: Message, expected: Expected) -> NodeReply:
    """Return what a node has replied; RefusedError, or any other error, if it cannot be used."""
    if message.has_error():
        # a client refuses to send such numbers in words only
        words = message.error.reason or ""
        infinite = any(fault.words in words for fault in (NOT_FINITE, TOO_LARGE))
        raise RefusedError(f"it failed: {words}", Why.INFINITE if infinite else Why.OTHER)
    content = message.content
    if lacks_state(message):
        raise RefusedError("it has lost the entries that stay on it")
    _check_obeyed(content, expected)
    metrics = read_metrics(content)
    records = _read_records(content, expected)
    key = expected.weighted_by
    if key not in metrics:
        names = ", ".join(sorted(metrics.keys() - {wire.PARTITION_ID})) or "none"
        raise RefusedError(
            f"its metrics lack {key!r}, which the strategy weighs by; they are {names}"
        )
    if isinstance(content, Summed):
        count = metrics[key]
    else:
        count = read_count(metrics[key], key)
    reply = NodeReply(
        node, whole(metrics, wire.PARTITION_ID, node), count, metrics, records, content
    )
    expected.check(reply)
    return reply


def _check_obeyed(content: RecordDict, expected: Expected) -> None:
    """Refuse a reply of a client that does not do what the strategy asks for."""
    report = content.get(wire.REPORT, ConfigRecord())
    if not isinstance(report, ConfigRecord):
        raise RefusedError("its report is no ConfigRecord")
    obeyed = report.get(wire.OBEYED)
    ignored = {*expected.binding}
    if isinstance(obeyed, list):
        ignored -= {*obeyed}
    if ignored:
        keys = [
            f"{expected.later}, which later rounds ask for" if key == "later" else key
            for key in sorted(ignored)
        ]
        raise RefusedError(
            f"it did not acknowledge {', '.join(keys)}: its client does not implement what the "
            "strategy asked for; make the app with fedbn_flwr.clientapp: ClientApp(model=...) "
            "around a loop of your own, or client_app",
            Why.NOT_OBEYED,
        )


def _read_records(content: RecordDict, expected: Expected) -> dict[str, FlatArrays]:
    """Return a reply's arrays by group, all that are needed, in the forms of the model's."""
    records = {name: view_arrays(record) for name, record in array_records(content).items()}
    if expected.arrays_key in records:
        records[wire.ARRAYS] = records.pop(expected.arrays_key)
    required = [*expected.groups]
    if expected.needs_model:
        required.insert(0, wire.ARRAYS)
    missing = [group for group in required if group not in records]
    if missing:
        raise RefusedError(f"it lacks {missing[0]!r}")
    for group, arrays in records.items():
        of_model = group in (wire.ARRAYS, wire.STAYS, *expected.groups) and group != wire.MOMENTS
        if of_model and expected.arrays and arrays.layout is not expected.layout:
            _check_forms(arrays, expected.arrays, is_beside=group in expected.groups)
        # of carried values, nodes do without those that cannot be used
        if group != wire.CARRIED:
            bad = unusable(arrays)
            if bad:
                raise RefusedError(f"its array {bad[0]!r} in {group!r} {bad[1].words}", bad[1].why)
    return records


def read_count(count: object, key: str = wire.NUM_EXAMPLES) -> float:
    """Return a node's number of examples, or what else it is weighed by; RefusedError if it is
    none.
    """
    if not isinstance(count, int | float) or not 0 <= count <= MOST:
        raise RefusedError(f"its {key!r} is {count!r}")
    return count


def read_metrics(content: RecordDict) -> dict[str, Any]:
    """Return all metrics of a reply: numbers, and lists of numbers."""
    metrics = {
        key: value for record in content.metric_records.values() for key, value in record.items()
    }
    for key, value in metrics.items():
        # this one is not averaged but read
        numbers: list[Any] = (
            value if isinstance(value, list) and key != wire.STATISTICS_CHANGE else [value]
        )
        if not all(isinstance(number, int | float) for number in numbers):
            raise RefusedError(f"its metric {key!r} is {value!r}, no number")
        if any(LARGEST < abs(number) < float("inf") for number in numbers):
            raise RefusedError(f"its metric {key!r} {TOO_LARGE.words}", TOO_LARGE.why)
    return metrics


def whole(metrics: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a metric that is a whole number of at most 64 bits, as ids are."""
    value = metrics.get(key, default)
    if not (isinstance(value, int | float) and abs(value) <= 2**64 and value == int(value)):
        raise RefusedError(f"its {key!r} is {value!r}")
    return int(value)


def lacks_state(message: Message) -> bool:
    """Whether a node has lost the entries that stay on it, and asks for the whole model."""
    report = None
    if message.has_content():
        report = message.content.get(wire.REPORT)
    return isinstance(report, ConfigRecord) and bool(report.get(wire.LACKS_STATE))


def unusable(arrays: Mapping[str, np.ndarray]) -> tuple[str, Fault] | None:
    """The first of the arrays that holds what nobody may send, and why not: infinity, no number, or
    one too large.
    """
    if isinstance(arrays, FlatArrays) and all(map(_is_usable, arrays.buffers.values())):
        return None
    bad = [(name, array) for name, array in arrays.items() if not _is_usable(array.reshape(-1))]
    if bad:
        return (bad[0][0], TOO_LARGE if np.isfinite(bad[0][1]).all() else NOT_FINITE)
    return None


def _is_usable(run: np.ndarray) -> bool:
    if run.dtype.kind not in "fc":
        return True
    if run.itemsize < 8:  # float32 holds nothing larger
        return all(np.isfinite(run[part]).all() for part in portions(run))
    return all((abs(run[part]) <= LARGEST).all() for part in portions(run))


def _check_forms(
    arrays: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], is_beside: bool
) -> None:
    for name, array in arrays.items():
        if name not in expected:
            raise RefusedError(f"its array {name!r} is not part of the model")
        if array.shape != expected[name].shape:
            raise RefusedError(
                f"its array {name!r} has shape {array.shape}, not {expected[name].shape}"
            )
        if array.dtype != expected[name].dtype and not (is_beside and array.dtype == np.float64):
            raise RefusedError(f"its array {name!r} is {array.dtype}, not {expected[name].dtype}")


def _with_common_entries(
    replies: list[NodeReply], required: Sequence[str], refused: list[Refusal]
) -> list[NodeReply]:
    """Keep the replies that carry the same entries and lists of metrics, as most do, and refuse the
    others.

    Of the other groups that are averaged, a reply may hold nothing.
    """
    required = (wire.ARRAYS, wire.METRICS, *required)
    if replies:
        averaged = set.intersection(*(set(reply.metrics) for reply in replies))
    else:
        averaged = set()
    for group in (*required, wire.MOMENTUM, wire.MOMENTS, wire.STAYS):
        forms = {
            reply: form
            for reply in replies
            if (form := _form(reply, group, averaged)) or group in required
        }
        votes = Counter[frozenset[Any]]()
        for reply, form in forms.items():
            votes[form] += len(reply.nodes)
        if votes:
            common = votes.most_common(1)[0][0]
        else:
            common = frozenset()
        for reply in [reply for reply, form in forms.items() if form != common]:
            example = min(entry[0] for entry in forms[reply] ^ common)
            refused += [
                Refusal(node, f"unlike most, entry {example!r} in {group!r}")
                for node in reply.nodes
            ]
            replies = [each for each in replies if each is not reply]
    return replies


def _form(reply: NodeReply, group: str, averaged: Iterable[str]) -> frozenset[Any]:
    """Return names, dtypes and shapes of arrays, or the lengths of the metrics that are averaged;
    -1 is a number's.
    """
    if group == wire.METRICS:
        values = {key: reply.metrics[key] for key in averaged}
        return frozenset(
            (key, len(value) if isinstance(value, list) else -1) for key, value in values.items()
        )
    arrays = reply.records.get(group)
    if isinstance(arrays, FlatArrays):
        return arrays.layout.all_entries
    return frozenset()
