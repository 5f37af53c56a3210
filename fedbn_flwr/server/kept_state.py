"""What a strategy keeps from round to round: as a dictionary, for a run that is resumed in another process."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self


class KeptState:
    """Saves and restores the attributes that classes name in `kept` and `kept_by_node`.

    Each class of a hierarchy names only its own. An attribute with methods `state_dict` and `load_state_dict` is asked
    for its state. Every other one is an array, a number, a text, None, or a dictionary, list, tuple or set of these.
    """

    #: attributes that a later round depends on
    kept: ClassVar[tuple[str, ...]] = ()
    #: dictionaries and sets of nodes, by the nodes' ids; `a.b` is an attribute of an attribute
    kept_by_node: ClassVar[tuple[str, ...]] = ()

    #: the arguments of the constructor: an experiment makes a strategy of its own from them for each run
    made_with: tuple[tuple[Any, ...], Mapping[str, Any]]

    def __new__(cls, *positional: Any, **options: Any) -> Self:
        """Note the arguments."""
        strategy = super().__new__(cls)
        strategy.made_with = positional, options
        return strategy

    #: the partition of every node that has replied; nodes have other ids in another process
    partitions: dict[int, int]

    def state_dict(self) -> dict[str, Any]:
        """Return all that later rounds depend on beside the model, with partitions in place of nodes' ids."""
        state = {name: _state_of(getattr(self, name)) for name in self._named("kept")}
        return state | {name: self._by_partition(attrgetter(name)(self)) for name in self._named("kept_by_node")}

    def load_state_dict(self, state: Mapping[str, Any], nodes: Mapping[int, int]) -> None:
        """Take up what `state_dict` returned; `nodes` are the present ids by partition, absent nodes are forgotten."""
        for name in self._named("kept"):
            present = getattr(self, name)
            if hasattr(present, "load_state_dict"):
                present.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])
        for name in self._named("kept_by_node"):
            present = attrgetter(name)(self)
            values = {nodes[partition]: value for partition, value in state[name].items() if partition in nodes}
            present.clear()
            present.update(values)
        self.partitions = {node: partition for partition, node in nodes.items()}

    def _named(self, attribute: str) -> Iterator[str]:
        for parent in reversed(type(self).__mro__):
            yield from vars(parent).get(attribute, ())

    def _by_partition(self, values: dict[int, Any] | set[int]) -> dict[int, Any]:
        by_node = values if isinstance(values, dict) else dict.fromkeys(values, True)
        return {self.partitions[node]: value for node, value in by_node.items()}


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
