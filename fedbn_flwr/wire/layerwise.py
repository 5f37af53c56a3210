"""The messages of a layer-wise step: `train.layerwise`, several a round.

A message holds

- what a training message holds: always the instruction; the arrays only in the first message of a step, and where a
  node asks for them,
- ConfigRecord `position`: `phase`, `attempt`, `index` (see `StepPosition`),
- ArrayRecord `answers`, in the phase `exchange`: by their number, the answers that the node does not have yet,
- ArrayRecords `statistics` and `gradients`, in sweeps: by layer, the node's corrections,
- with each of these three a ConfigRecord `...-counts`: how many values are behind an answer,
- ConfigRecord `side-channel`, where the whole step is taken over one (see `frames.py`): its `address` and the node's
  `token`. The one reply is that of the end of the step. In the phase `gather` nodes do not train: the exchanges are the
  moments of what BN layers see of all local data, from the first layer to the last, and the reply holds nothing more.

At the end of the step, a reply is that of plain training. Before, a reply holds

- ArrayRecord `requests`: by layer, the tensor of the client's request, and ConfigRecord `report` with the `kind`, the
  `layers` (in their order) and the `counts` of the requests,
- or nothing but `lacks-arrays` in the report: the message must be sent again, with the arrays and all answers,
- or nothing but `unreachable` in the report: why the node cannot use the side channel,
- or nothing but `over` in the report: the server has ended the attempt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr import state
from fedbn_flwr.layerwise import Answer, Kind, Report, Request
from fedbn_flwr.wire import instruction as wire

POSITION = "position"
ANSWERS = "answers"
CORRECTIONS: tuple[Kind, Kind] = ("statistics", "gradients")
REQUESTS = "requests"
LACKS_ARRAYS = "lacks-arrays"
SIDE_CHANNEL = "side-channel"
ADDRESS, TOKEN = "address", "token"
UNREACHABLE, OVER = "unreachable", "over"

#: wait at an exchange; a sweep, forward or backward; the step under settled corrections; forget the step; over a side
#: channel, gather statistics without training
PHASES = ("exchange", "forward", "backward", "step", "abandon", "gather")

Content = dict[str, ArrayRecord | ConfigRecord]


@dataclass(frozen=True)
class StepPosition:
    """The position of a message in a layer-wise step."""

    phase: str
    #: how often the step was started in this round
    attempt: int = 0
    #: number of answers so far, that of the message included
    index: int = 0

    @classmethod
    def of(cls, content: RecordDict) -> "StepPosition":
        """Read the position from a message; ValueError if its phase is unknown."""
        record: Any = content[POSITION]
        position = cls(record["phase"], record["attempt"], record["index"])
        if position.phase not in PHASES:
            raise ValueError(f"unknown phase {position.phase!r}; known: {', '.join(PHASES)}")
        return position

    def pack(self) -> Content:
        """Return the record that tells a node its position."""
        return {POSITION: ConfigRecord(dict(vars(self)))}


def pack_answers(group: str, answers: Mapping[str, Answer]) -> Content:
    """Return the records that bring answers or corrections to a node."""
    return {
        group: state.to_record({name: answer.tensor for name, answer in answers.items()}),
        f"{group}-counts": ConfigRecord({name: answer.count for name, answer in answers.items()}),
    }


def read_answers(content: Mapping[str, Any], group: str) -> dict[str, Answer]:
    """Return the answers of a group, none if the message does not hold the group."""
    if group not in content:
        return {}
    counts = content[f"{group}-counts"]
    return {name: Answer(tensor, counts[name]) for name, tensor in state.from_record(content[group]).items()}


def request_report(requests: Sequence[Request]) -> dict[str, Any]:
    """Return what a reply's report says of its requests."""
    return {
        "kind": requests[0].kind if requests else "statistics",
        "layers": [request.layer for request in requests],
        "counts": [request.count for request in requests],
    }


def read_requests(content: Mapping[str, Any]) -> Report:
    """Return a client's requests by layer; ValueError if they cannot be read."""
    try:
        report = content[wire.REPORT]
        kind, layers, counts = report["kind"], report.get("layers", []), report.get("counts", [])
        tensors = state.from_record(content[REQUESTS])
        if kind not in get_args(Kind) or set(layers) != set(tensors):
            raise ValueError(f"{kind!r} of {layers}, and the arrays {list(tensors)}")
        return {name: Request(kind, name, tensors[name], count) for name, count in zip(layers, counts, strict=True)}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the requests of its BN layers cannot be read: {error}") from error


def lacks_arrays(content: RecordDict) -> bool:
    """Return whether the client needs the message again, with the arrays and all answers."""
    return LACKS_ARRAYS in content.get(wire.REPORT, {})
