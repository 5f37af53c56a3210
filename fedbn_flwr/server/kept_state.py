"""A run that goes on in another process: what a strategy keeps from round to round, and rounds that begin later."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy


class KeptState:
    """Saves and restores the attributes that classes name in `kept` and `kept_by_node`.

    Each class of a hierarchy names only its own. An attribute with methods `state_dict` and `load_state_dict` is asked
    for its state. Every other one is an array, a number, a text, None, or a dictionary, list, tuple or set of these.
    """

    #: attributes that a later round depends on
    kept: ClassVar[tuple[str, ...]] = ()
    #: dictionaries and sets of nodes, by the nodes' ids; `a.b` is an attribute of an attribute
    kept_by_node: ClassVar[tuple[str, ...]] = ()

    #: the partition of every node that has replied; nodes have other ids in another process
    partitions: dict[int, int]

    def state_dict(self) -> dict[str, Any]:
        """Return all that later rounds depend on beside the model, with partitions in place of nodes' ids."""
        state: dict[str, Any] = {}
        for name in self._named("kept"):
            value = getattr(self, name)
            state[name] = value.state_dict() if hasattr(value, "state_dict") else value
        for name in self._named("kept_by_node"):
            nodes = attrgetter(name)(self)
            by_node = nodes if isinstance(nodes, dict) else dict.fromkeys(nodes, True)
            state[name] = {self.partitions[node]: value for node, value in by_node.items()}
        return state

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

    def _named(self, attribute: str) -> Iterator[Any]:
        """Yield what each class of the hierarchy lists, base classes first."""
        for parent in reversed(type(self).__mro__):
            yield from vars(parent).get(attribute, ())


def _passed_on(hook: str) -> Callable[..., Any]:
    """Return a method that calls a hook of the strategy with the number of the later round."""
    return lambda self, server_round, *rest: getattr(self._strategy, hook)(server_round + self._done, *rest)


class LaterRounds(Strategy):
    """Calls a strategy with round numbers that go on after `rounds_done`; Flower's loop and result count from 1."""

    def __init__(self, strategy: Strategy, rounds_done: int) -> None:
        self._strategy, self._done = strategy, rounds_done

    configure_train = _passed_on("configure_train")
    aggregate_train = _passed_on("aggregate_train")
    configure_evaluate = _passed_on("configure_evaluate")
    aggregate_evaluate = _passed_on("aggregate_evaluate")

    def summary(self) -> None:
        """Pass on."""
        self._strategy.summary()
