"""The messages of a layer-wise step: `train.layerwise`, several a round.

A message holds

- what a training message holds: always the instruction, the arrays only in the first message of a step and where a
  node asks for them,
- ConfigRecord `turn`: `phase`, `attempt`, `index` (see `Turn`),
- ArrayRecord `answers`, in the phase `exchange`: by their number, the answers that the node does not have yet,
- ArrayRecords `statistics` and `gradients`, in sweeps: by layer, the node's own corrections,
- with each of these three a ConfigRecord `...-counts`: how many values are behind an answer.

A reply is that of plain training, at the end of the step, or it holds

- ArrayRecord `said`: by layer, what the client says, and ConfigRecord `report` with its `kind`, `layers` (their
  order), `counts` and `last`: whether the client foresees that it will ask no more,
- or nothing but `lacks-arrays` in the report: the message must be sent again, with the arrays and all answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr import state
from fedbn_flwr.layerwise import Answer, Kind, Report, Request
from fedbn_flwr.wire import instruction as wire

TURN = "turn"
ANSWERS = "answers"
CORRECTIONS = ("statistics", "gradients")
SAID = "said"
LACKS_ARRAYS = "lacks-arrays"

#: suspended at an exchange; a sweep, forward or backward; a step under settled corrections; forget it all
PHASES = ("exchange", "forward", "backward", "step", "abandon")

Content = dict[str, ArrayRecord | ConfigRecord]


@dataclass(frozen=True)
class Turn:
    """Where in a layer-wise step a message belongs."""

    phase: str
    #: how often the step was started anew in this round
    attempt: int = 0
    #: how many answers there are, the message's included
    index: int = 0

    @classmethod
    def of(cls, content: RecordDict) -> "Turn":
        """Read it from a message."""
        record: Any = content[TURN]
        turn = cls(record["phase"], record["attempt"], record["index"])
        if turn.phase not in PHASES:
            raise ValueError(f"unknown phase {turn.phase!r}; known: {', '.join(PHASES)}")
        return turn

    def pack(self) -> Content:
        """Put it into a message."""
        return {TURN: ConfigRecord(dict(vars(self)))}


def pack_answers(group: str, answers: Mapping[str, Answer]) -> Content:
    """Answers or corrections on their way to a node."""
    return {
        group: state.to_record({name: answer.tensor for name, answer in answers.items()}),
        f"{group}-counts": ConfigRecord({name: answer.count for name, answer in answers.items()}),
    }


def read_answers(content: Mapping[str, Any], group: str) -> dict[str, Answer]:
    """The answers of a group, none if it is not there."""
    if group not in content:
        return {}
    counts = content[f"{group}-counts"]
    return {name: Answer(tensor, counts[name]) for name, tensor in state.from_record(content[group]).items()}


def report(requests: Sequence[Request], last: bool) -> dict[str, Any]:
    """What goes with the tensors that a client says."""
    return {
        "kind": requests[0].kind if requests else "statistics",
        "layers": [request.layer for request in requests],
        "counts": [request.count for request in requests],
        "last": last,
    }


def read_said(content: Mapping[str, Any]) -> Report:
    """What a client said, by layer; ValueError if it cannot be read."""
    try:
        record = content[wire.REPORT]
        kind, layers, counts = record["kind"], record["layers"], record["counts"]
        tensors = state.from_record(content[SAID])
        if kind not in get_args(Kind) or set(layers) != set(tensors):
            raise ValueError(f"{kind!r} of {layers}, and the arrays {list(tensors)}")
        return {name: Request(kind, name, tensors[name], count) for name, count in zip(layers, counts, strict=True)}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"what it says of its BN layers cannot be read: {error}") from error


def foresees_end(content: RecordDict) -> bool:
    """Whether the client will ask no more, as far as it knows."""
    return bool(content[wire.REPORT].get("last"))


def lacks_arrays(content: RecordDict) -> bool:
    """Whether the client needs the message again, and whole."""
    return LACKS_ARRAYS in content.get(wire.REPORT, {})
