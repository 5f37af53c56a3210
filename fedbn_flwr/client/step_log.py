"""The log of a node's layer-wise step, from which another process can replay the step."""

from typing import Any

from flwr.app import RecordDict

from fedbn_flwr import state, wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.layerwise import Answer
from fedbn_flwr.state import State
from fedbn_flwr.state.records import payload_bytes
from fedbn_flwr.wire.layerwise import ANSWERS, COUNTS, read_answers

_PREFIX = "layerwise/"


class StepLog:
    """The arrays and answers that a node has received in one attempt at a step; they are in its `Context.state`.

    `attempt` names the round and the attempt.
    """

    def __init__(self, memory: Memory, attempt: str) -> None:
        self._memory, self.attempt = memory, attempt
        self._received, self._answers = f"{_PREFIX}{attempt}/received/", f"{_PREFIX}{attempt}/log/"

    def add(self, content: RecordDict, limit: float) -> None:
        """Keep the arrays and answers of a message.

        Arrays begin a new step, so everything before is forgotten. More than `limit` megabytes of arrays are not kept.
        """
        received = _received(content)
        if received:
            self.clear()
            size = sum(payload_bytes(array) for record in received.values() for array in record.values())
            for name, record in received.items() if size <= limit * 2**20 else ():
                self._memory.keep(f"{self._received}{name}", record)
        kept: dict[str, Any] = dict(self._memory.kept(self._answers))
        for group in (ANSWERS, COUNTS):
            new: Any = content.get(group)
            if group in kept and new:
                kept[group].update(new)
            elif new:
                # a copy: the messages to all nodes may share their records
                self._memory.keep(f"{self._answers}{group}", new.copy())

    def received(self, content: RecordDict) -> dict[str, State] | None:
        """Return the groups of arrays that the step starts from, of this message or kept; None if there are none."""
        records = _received(content) or dict(self._memory.kept(self._received))
        return {name: state.from_record(record) for name, record in records.items()} or None

    def answers(self, count: int) -> list[Answer] | None:
        """Return the first `count` answers, None if some are missing."""
        answers = read_answers(dict(self._memory.kept(self._answers)))
        numbers = [str(number) for number in range(count)]
        return [answers[number] for number in numbers] if answers.keys() >= set(numbers) else None

    def clear(self) -> None:
        """Forget the step."""
        self._memory.forget(_PREFIX)


def _received(content: RecordDict) -> dict[str, Any]:
    """Return a message's groups of arrays, as plain training has them; none if it does not bring arrays."""
    if wire.ARRAYS not in content:
        return {}
    return {name: record for name, record in content.array_records.items() if name != ANSWERS}
