"""What a node notes of a layer-wise step, so that whoever gets the next message can go on."""

from typing import Any

from flwr.app import RecordDict

from fedbn_flwr import state, wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.layerwise import Answer
from fedbn_flwr.state import State
from fedbn_flwr.state.records import payload_bytes
from fedbn_flwr.wire import layerwise as turns

_PREFIX = "layerwise/"


class Notes:
    """What a node keeps of a layer-wise step in its `Context.state`, so that any process can replay it."""

    def __init__(self, memory: Memory, place: str) -> None:
        self._memory, self.place = memory, place
        self._received, self._log = f"{_PREFIX}{place}/received/", f"{_PREFIX}{place}/log/"

    def add(self, content: RecordDict, limit: float) -> None:
        """Note what a message brings; arrays begin a new step, and are only kept up to so many megabytes."""
        received = _received(content)
        if received:
            self.clear()
            size = sum(payload_bytes(array) for record in received.values() for array in record.values())
            for name, record in received.items() if size <= limit * 2**20 else ():
                self._memory.keep(f"{self._received}{name}", record)
        known: dict[str, Any] = dict(self._memory.kept(self._log))
        for group in (turns.ANSWERS, f"{turns.ANSWERS}-counts"):
            brought: Any = content.get(group)
            if group in known and brought:
                known[group].update(brought)
            elif brought:
                # a record of its own: the messages to all nodes may share theirs
                self._memory.keep(f"{self._log}{group}", brought.copy())

    def received(self, content: RecordDict) -> dict[str, State] | None:
        """The groups of arrays that the step starts from, if they are at hand."""
        records = _received(content) or dict(self._memory.kept(self._received))
        return {name: state.from_record(record) for name, record in records.items()} or None

    def answers(self, count: int) -> list[Answer] | None:
        """So many answers in their order, if all are known."""
        known = turns.read_answers(dict(self._memory.kept(self._log)), turns.ANSWERS)
        numbers = [str(number) for number in range(count)]
        return [known[number] for number in numbers] if known.keys() >= set(numbers) else None

    def clear(self) -> None:
        """Forget the step."""
        self._memory.forget(_PREFIX)


def _received(content: RecordDict) -> dict[str, Any]:
    """The groups of arrays of a plain training message, if this message brings them."""
    if wire.ARRAYS not in content:
        return {}
    records = content.array_records.items()
    return {name: record for name, record in records if name not in (turns.ANSWERS, *turns.CORRECTIONS)}
