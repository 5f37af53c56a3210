"""The messages of a layer-wise step: `train.layerwise`, several a round.

A message holds

- what a training message holds: always the instruction; the arrays only in the first message of a
  step, and where a node asks for them,
- ConfigRecord `position`: `attempt` and `index` (see `StepPosition`),
- ArrayRecord `answers`: by their number, the answers that the node does not have yet,
- with it a ConfigRecord `answers-counts`: how many values are behind an answer,
- ConfigRecord `side-channel` in the first message of a step whose other messages go over one (see
  `side_channel_client.py`): its `address` and the node's `token`.

At the end of the step, a reply is that of plain training. Before, a reply holds

- ArrayRecord `request`: under the name of the layer, the tensor of the client's request, and
  ConfigRecord `report` with the request's `kind` and `count`,
- or nothing but `lacks-arrays` in the report: the message must be sent again, with the arrays and
  all answers,
- or nothing but `unreachable` in the report: why the node cannot use the side channel,
- or nothing in the report: the server has ended the attempt, and waits for no reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr import state, wire
from fedbn_flwr.layerwise import Answer, Kind, Requests
from fedbn_flwr.layerwise.exchange import MOST

ANSWERS = "answers"
COUNTS = "answers-counts"
POSITION = "position"
REQUEST = "request"
#: in a report: the node must be sent the arrays of its layer-wise step again
LACKS_ARRAYS = "lacks-arrays"
SIDE_CHANNEL = "side-channel"
ADDRESS = "address"
TOKEN = "token"
UNREACHABLE = "unreachable"

Content = dict[str, ArrayRecord | ConfigRecord]


@dataclass(frozen=True)
class StepPosition:
    """The position of a message in a layer-wise step."""

    #: how often the step was started in this round
    attempt: int = 0
    #: number of answers so far, that of the message included
    index: int = 0

    @classmethod
    def of(cls, content: RecordDict) -> "StepPosition":
        """Read the position from a message."""
        record: Any = content[POSITION]
        return cls(record["attempt"], record["index"])

    def pack(self) -> Content:
        """Return the record that tells a node its position."""
        return {POSITION: ConfigRecord(dict(vars(self)))}


def pack_answers(answers: Mapping[str, Answer]) -> Content:
    """Return the records that bring answers to a node."""
    return {
        ANSWERS: state.to_record({number: answer.tensor for number, answer in answers.items()}),
        COUNTS: ConfigRecord({number: answer.count for number, answer in answers.items()}),
    }


def read_answers(content: Mapping[str, Any]) -> dict[str, Answer]:
    """Return the answers by their number, none if the message does not hold any."""
    if ANSWERS not in content:
        return {}
    counts = content[COUNTS]
    return {
        number: Answer(tensor, counts[number])
        for number, tensor in state.from_record(content[ANSWERS]).items()
    }


def read_request(content: Mapping[str, Any]) -> Requests:
    """Return a client's request; an error if it is none."""
    report = content[wire.REPORT]
    kind = report["kind"]
    count = report["count"]
    ((layer, tensor),) = state.from_record(content[REQUEST]).items()
    if kind not in get_args(Kind) or not isinstance(count, int) or count > MOST:
        raise ValueError(f"{kind!r} over {count!r} values")
    return Requests.of_client(kind, layer, tensor, count)
