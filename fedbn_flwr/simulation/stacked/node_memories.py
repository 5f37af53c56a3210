"""The memories of several clients as one."""

from collections.abc import Sequence

from flwr.app import RecordDict

from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.simulation.stacked.model import stacked
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState


class CannotStackError(RuntimeError):
    """Says why these clients must train one after another."""


class StackedMemory(Memory):
    """The memories of several clients, which must hold the same entries of a group."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        super().__init__(RecordDict())
        self._memories, self._stored = memories, dict[str, State]()

    def recall(self, group: str) -> State:
        """Return a group's values of all clients, stacked."""
        states = [memory.recall(group) for memory in self._memories]
        if any(each.keys() != states[0].keys() for each in states):
            raise CannotStackError(f"the clients remember different entries of {group!r}")
        return stacked(states)

    def store(self, group: str, values: State) -> None:
        """Hold stacked values until `write`."""
        self._stored[group] = values

    def write(self) -> None:
        """Store every client's rows, as copies, in the client's own memory."""
        for group, values in self._stored.items():
            for memory, own in zip(self._memories, FlatState.copies_of(values, len(self._memories)), strict=True):
                memory.store(group, own)
