"""Replies as numbers to be summed under masks, and means made of the sums.

A message whose reply is to be masked holds a ConfigRecord `secure`: `nodes`, `keys` and `signatures` are the
participants of the sum; `minimum` is the smallest number of them, and `weighting`, `tally` and `bound` are `Terms`. The
masked reply holds

- ArrayRecord `masked`: the numbers, (2, n) uint64 (see `fedbn_flwr.secure.fixed_point`),
- ConfigRecord `masked-form`: `partition`, the node's name in an experiment; `form`, which is names, shapes and dtypes;
  `key` and `signature` for the node's next sum; for sums that do not need all nodes `shares` and `commitments`, in the
  order of the participants.

Nothing else leaves the node. With n_k the node's number of samples and p_k its weight (n_k, 1, or the metric of the
tally), the numbers are

- 1, p_k, n_k, and of one metric that the server may name (`tally`) whether there is one, the metric, its square, and
  whether it is below a `bound`,
- p_k x for every number x of an array; p_k m and p_k (v + m^2) for means m and variances v of a layer-wise step,
- c, c m and c (v + m^2) for moments over c values,
- n_k y for every metric y; c for the count of a layer-wise request.

All of them are sums that have a meaning of their own, and the mean of all nodes is made of these sums alone.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, prod, sqrt
from typing import Any, Self, TypeGuard

import numpy as np
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import MOST
from fedbn_flwr.state.records import InMemoryArray, array_records, make_record, view_array
from fedbn_flwr.wire.site_data import SITE_DATA

SECURE, MASKED = "secure", "masked"
#: asks for a node's public key, or for what takes away masks that do not cancel
SECURE_QUERY = "query.secure"
REQUEST, POSITION = "request", "position"
#: in a report: the node must be sent the arrays of its layer-wise step again
LACKS_ARRAYS = "lacks-arrays"
#: messages whose answers hold no numbers of a node's data, or none under `secure`
CONTROL = (wire.DESCRIBE, SITE_DATA, SECURE_QUERY)
#: by what arrays are weighted
WEIGHTINGS = ("examples", "uniform", "tally")
#: what a reply's report may say in the clear: there is no number in it
_CLEAR = ("lacks-state", LACKS_ARRAYS, "parameters", "bn-entries", wire.OBEYED)

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Terms:
    """How replies are pooled."""

    #: by what arrays are weighted: `examples`, `uniform` or `tally`
    weighting: str
    #: a metric that is counted beside its mean; empty for none
    tally: str = ""
    #: nodes whose metric is below are counted, too
    bound: float = 0.0


@dataclass(frozen=True)
class Tally:
    """A metric over the nodes that have one, finite and not negative: how many, sum, deviation, how many below."""

    count: int = 0
    total: float = 0.0
    #: of the population; infinite if there is none
    deviation: float = inf
    below: int = 0

    @classmethod
    def over(cls, values: Iterable[object], bound: float) -> Self:
        """Count single nodes' values."""
        usable = [value for value in values if is_countable(value)]
        below = sum(value < bound for value in usable)
        return cls(len(usable), sum(usable), float(np.std(usable)), below) if usable else cls()


class Summed(RecordDict):
    """The content of a reply that is the mean of several nodes' replies; nothing that was received is one."""

    #: by node, the partition that it named
    nodes: Mapping[int, int] = {}
    tally: Tally = Tally()


@dataclass(frozen=True)
class Form:
    """What the numbers of a masked reply are; equal for all nodes of a sum."""

    #: group, name, shape and dtype of every array
    arrays: list[tuple[str, str, tuple[int, ...], str]] = field(default_factory=list)
    #: name, and number of values; None for a number by itself
    metrics: list[tuple[str, int | None]] = field(default_factory=list)
    #: the kind of a layer-wise request; empty for other replies
    kind: str = ""
    obeyed: list[str] = field(default_factory=list)

    def pack(self) -> str:
        """Return the form as text."""
        return json.dumps(vars(self))

    @classmethod
    @lru_cache(maxsize=256)
    def read(cls, text: str) -> "Form":
        """Return the form of a text; ValueError if it is none."""
        try:
            values = json.loads(text)
            arrays = [
                (str(group), str(name), tuple(map(int, shape)), str(np.dtype(dtype)))
                for group, name, shape, dtype in values["arrays"]
            ]
            metrics = [(str(name), None if count is None else int(count)) for name, count in values["metrics"]]
            return cls(arrays, metrics, str(values["kind"]), [str(key) for key in values["obeyed"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the form of its masked reply cannot be read: {error}") from None

    @property
    def size(self) -> int:
        """Return how many numbers are under masks."""
        arrays = sum(prod(shape) for _, _, shape, _ in self.arrays)
        return 7 + arrays + sum(1 if count is None else count for _, count in self.metrics) + bool(self.kind)


def control_reply(content: RecordDict) -> RecordDict:
    """Return what a reply without arrays or metrics may say in the clear."""
    report: Any = content.config_records.get(wire.REPORT, {})
    clear = {key: report[key] for key in _CLEAR if key in report}
    # readers expect these numbers, of which the first and the last say nothing
    numbers = MetricRecord({wire.NUM_EXAMPLES: 0, wire.PARTITION_ID: partition_of(content), wire.DOMAIN: -1})
    return RecordDict({wire.METRICS: numbers, wire.REPORT: ConfigRecord(clear)})


def partition_of(content: RecordDict) -> int:
    """Return the partition that a reply names, -1 for none: the node's name in an experiment."""
    metrics: Any = content.metric_records.get(wire.METRICS, {})
    return int(metrics.get(wire.PARTITION_ID, -1))


def needs_masks(content: RecordDict) -> bool:
    """Return whether a reply holds numbers, and is not only a sign."""
    report: Any = content.config_records.get(wire.REPORT, {})
    return not any(key in report for key in _CLEAR if key != wire.OBEYED)


def to_numbers(content: RecordDict, terms: Terms) -> tuple[Form, Numbers]:
    """Return a reply's form and numbers; ValueError if it has no number of samples, or arrays that are no numbers."""
    metrics = {key: value for record in content.metric_records.values() for key, value in record.items()}
    report: Any = content.config_records.get(wire.REPORT, {})
    examples = metrics.pop(wire.NUM_EXAMPLES, None)
    if not isinstance(examples, int | float) or not 0 <= examples < float("inf"):
        raise ValueError(f"a reply under masks needs {wire.NUM_EXAMPLES!r}, which is {examples!r}")
    metrics.pop(wire.PARTITION_ID, None)
    value = metrics.pop(terms.tally, None)
    tally = (1.0, value, value**2, float(value < terms.bound)) if is_countable(value) else (0.0,) * 4
    groups = array_records(content)
    kind = str(report.get("kind", "")) if REQUEST in groups else ""
    weights = {"uniform": 1.0, "tally": tally[1]}
    weight = weights.get(terms.weighting, float(examples))
    form = Form(
        [(group, name, array.shape, array.dtype) for group, record in groups.items() for name, array in record.items()],
        [(name, len(value) if isinstance(value, list) else None) for name, value in sorted(metrics.items())],
        kind,
        sorted(report.get(wire.OBEYED, [])),
    )
    parts = [np.array([1.0, weight, float(examples), *tally])]
    for group, record in groups.items():
        values = {name: np.asarray(view_array(array), np.float64) for name, array in record.items()}
        if group == wire.MOMENTS:
            values = {name: _moment_sum(name, values) for name in values}
        elif kind == "statistics" and group == REQUEST:
            values = {name: weight * np.stack([mean, var + mean**2]) for name, (mean, var) in values.items()}
        else:
            values = {name: weight * value for name, value in values.items()}
        parts += [value.ravel() for value in values.values()]
    parts += [float(examples) * np.atleast_1d(np.asarray(metrics[name], np.float64)) for name, _ in form.metrics]
    if kind:
        parts.append(np.array([float(report["count"])]))
    return form, np.concatenate(parts)


def to_content(form: Form, numbers: Numbers, nodes: Mapping[int, int]) -> Summed:
    """Return the mean of the replies of these nodes, made of the sums of their numbers."""
    _, weight, examples, count, total, squares, below = numbers[:7]
    if not 0 <= examples <= MOST or (form.arrays and (weight <= 0 or not (examples or form.kind))):
        raise ValueError(f"the nodes of the sum have a weight of {weight:g}, and {examples:g} samples")
    if form.kind and not 1 <= numbers[-1] <= MOST:
        raise ValueError(f"the {form.kind} are over {numbers[-1]:g} values")
    sizes = [prod(shape) for _, _, shape, _ in form.arrays]
    sizes += [1 if count is None else count for _, count in form.metrics]
    parts, groups = iter(np.split(numbers[7:], np.cumsum(sizes, dtype=int))), dict[str, dict[str, Numbers]]()
    for group, name, shape, _ in form.arrays:
        groups.setdefault(group, {})[name] = next(parts).reshape(shape)
    content = Summed()
    content.nodes = dict(nodes)
    if count > 0:
        deviation = sqrt(max(squares / count - (total / count) ** 2, 0.0))
        content.tally = Tally(round(count), float(total), deviation, round(below))
    for group, sums in groups.items():
        if group == wire.MOMENTS:
            values = {name: _moment_of(name, sums) for name in sums}
        else:
            values = {name: value / weight for name, value in sums.items()}
        if form.kind == "statistics" and group == REQUEST:
            values = {
                name: np.stack([mean, np.maximum(second - mean**2, 0.0)]) for name, (mean, second) in values.items()
            }
        arrays: dict[str, Array] = {}
        for name, dtype in [(name, np.dtype(dtype)) for of, name, _, dtype in form.arrays if of == group]:
            rounded = values[name] if dtype.kind == "f" else np.rint(values[name])
            arrays[name] = InMemoryArray(np.asarray(rounded, dtype))
        content[group] = make_record(arrays)
    means: dict[str, Any] = {}
    for (name, count), total in zip(form.metrics, parts, strict=False):
        mean = (total / examples if examples else np.zeros_like(total)).tolist()
        means[name] = mean[0] if count is None else mean
    whole = round(examples)
    content[wire.METRICS] = MetricRecord({wire.NUM_EXAMPLES: whole if whole == examples else float(examples), **means})
    request = {"kind": form.kind, "count": round(numbers[-1])} if form.kind else {}
    content[wire.REPORT] = ConfigRecord({**({wire.OBEYED: form.obeyed} if form.obeyed else {}), **request})
    return content


def is_countable(value: object) -> TypeGuard[float]:
    """Return whether a node's metric counts in a tally."""
    return isinstance(value, int | float) and 0 <= value < inf


def terms_of(asked: Mapping[str, Any]) -> Terms:
    """Return how the server of a message wants replies to be summed; ValueError if nodes do not weigh so.

    The one metric that may weigh is a loss: of another, the server might know which nodes have 0.
    """
    terms = Terms(asked["weighting"], asked["tally"], float(asked["bound"]))
    if terms.weighting not in WEIGHTINGS or (
        terms.weighting == "tally" and terms.tally not in (wire.LOCAL_LOSS, wire.TRAIN_LOSS)
    ):
        raise ValueError(f"nodes are not weighted by {terms.weighting!r} and {terms.tally!r}")
    return terms


def is_control(message: Message) -> bool:
    """Return whether no number of a node's data is in the answer to a message."""
    return message.metadata.message_type in CONTROL


def kind_of(message: Message) -> str:
    """Return what a message asks for: to train, to evaluate, or to gather, whatever its handler is called."""
    kind = message.metadata.message_type
    return wire.GATHER if kind == wire.GATHER else kind.partition(".")[0]


def step_of(content: RecordDict) -> tuple[int, int, int]:
    """Return the place of a message in a run, as numbers that only grow: round, attempt and exchange."""
    config: Any = content.config_records.get(wire.CONFIG, {})
    server_round = wire.Instruction.from_config(config).server_round if config else 0
    position: Any = content.config_records.get(POSITION, {})
    return server_round, int(position.get("attempt", 0)), int(position.get("index", 0))


def _moment_sum(name: str, values: dict[str, Numbers]) -> Numbers:
    """Return a layer's count c, c m, or c (v + m^2)."""
    layer, _, kind = name.rpartition("/")
    count = values[f"{layer}/count"]
    if kind == "count":
        return count
    mean = values[f"{layer}/mean"]
    return count * mean if kind == "mean" else count * (values[name] + mean**2)


def _moment_of(name: str, sums: dict[str, Numbers]) -> Numbers:
    layer, _, kind = name.rpartition("/")
    count = sums[f"{layer}/count"]
    if kind == "count":
        return count
    mean = sums[f"{layer}/mean"] / count
    return mean if kind == "mean" else np.maximum(sums[name] / count - mean**2, 0.0)
