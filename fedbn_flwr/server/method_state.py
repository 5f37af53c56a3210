"""What a strategy keeps from round to round, as one value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from logging import WARNING
from typing import Any

from flwr.common import log

from fedbn_flwr.layerwise.exchange import Why
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.replies import CannotTrainError, DivergedError, Refusal
from fedbn_flwr.state import Arrays

#: rounds without a usable reply that end a run: in which nodes sent numbers that are not finite, or
#: of any kind
LOST_ROUNDS = 3
FRUITLESS_ROUNDS = 10
#: of the fields that are dictionaries by nodes' ids, which are others in another process
BY_NODE = {"by node": True}

UNTRAINED = (
    "`result.arrays` has %d entries that stay on the nodes and were not trained (%s): evaluate on "
    "the nodes, or use `export_personal`"
)


@dataclass
class LostRounds:
    """The rounds since the last usable reply; only those with numbers that are not finite speak of
    divergence.
    """

    fruitless: int = 0
    #: by round, what may have made training diverge
    infinite: dict[int, str] = field(default_factory=dict)
    #: the nodes that sent such numbers
    nodes: dict[int, bool] = field(default_factory=dict, metadata=BY_NODE)

    def add(
        self, server_round: int, refused: Sequence[Refusal], connected: int, circumstances: str
    ) -> None:
        """Note a lost round; raise DivergedError if these are `LOST_ROUNDS`, of more nodes than one
        bad one.

        `connected` is the number of all nodes. Raise CannotTrainError after `FRUITLESS_ROUNDS` of
        any kind.
        """
        self.fruitless += 1
        if self.fruitless >= FRUITLESS_ROUNDS:
            reason = refused[0] if refused else "no node answered"
            raise CannotTrainError(
                f"{self.fruitless} rounds in a row brought no usable reply: {reason}"
            )
        infinite = [refusal for refusal in refused if refusal.why is Why.INFINITE]
        if not infinite:
            return
        self.infinite[server_round] = circumstances
        self.nodes |= {refusal.node: True for refusal in infinite}
        if len(self.infinite) >= LOST_ROUNDS and len(self.nodes) >= min(connected, 2):
            first, circumstances = next(iter(self.infinite.items()))
            raise DivergedError(
                first, f"no node has had a usable reply since ({infinite[0]}); {circumstances}"
            )


@dataclass
class MethodState:
    """All that later rounds depend on beside the model: a checkpoint is this value, and nothing
    else survives.

    A method adds what it keeps in a subclass, which its strategy names as `state_type`. Fields are
    arrays, numbers, texts, None, dictionaries, lists and tuples of these, and dataclasses of such
    fields; all have defaults.
    """

    ever_trained: bool = False
    #: the round after which the method has frozen a part of BN
    frozen_after: int | None = None
    #: the binding keys that clients have acknowledged in training
    obeyed: dict[str, bool] = field(default_factory=dict)
    #: the mean of the clients' optimizer states, if it is `global`
    momentum: Arrays = field(default_factory=dict)
    #: what the server optimizer remembers
    moments: dict[str, Any] = field(default_factory=dict)
    #: whether statistics have ever been gathered
    gathered: bool = False
    #: the entries that nodes sent in the last round that brought a model
    shared: dict[str, bool] = field(default_factory=dict)
    #: the mean of the entries that nodes keep, if it is known
    personal: Arrays = field(default_factory=dict)
    lost: LostRounds = field(default_factory=LostRounds)

    def name_untrained(self, model: Arrays) -> None:
        """Warn of entries of a final model that stay on the nodes, unless the nodes' mean is in
        their places.
        """
        known = self.shared.keys() | self.personal.keys()
        names = []
        if self.ever_trained:
            names = [name for name in model if name not in known]
        if names:
            shown = names[:3]
            if len(names) > 3:
                shown.append("...")
            log(WARNING, UNTRAINED, len(names), ", ".join(shown))


def merged_type(types: Sequence[type[MethodState]]) -> type[MethodState]:
    """Return a class of states with the fields of all these classes."""
    parents = {parent for kind in types for parent in kind.__mro__[1:]}
    own = [kind for kind in dict.fromkeys(types) if kind not in parents]
    if len(own) == 1:
        return own[0]
    return dataclass(type("MergedState", tuple(own), {}))


def pack_state(state: Any, partitions: Mapping[int, int]) -> dict[str, Any]:
    """Return a state's fields, with partitions in place of nodes' ids."""
    packed: dict[str, Any] = {}
    for item in fields(state):
        value = getattr(state, item.name)
        if is_dataclass(value):
            value = pack_state(value, partitions)
        elif "by node" in item.metadata:
            value = {partitions[node]: each for node, each in value.items() if node in partitions}
        packed[item.name] = value
    return packed


def unpack_state(state: Any, packed: Mapping[str, Any], nodes: Mapping[int, int]) -> None:
    """Fill a new state; `nodes` are the present ids by partition, and absent nodes are
    forgotten.
    """
    lacking = [item.name for item in fields(state) if item.name not in packed]
    if lacking:
        raise UsageError(
            f"another version wrote the checkpoint, which lacks {lacking[0]!r}: begin again "
            "without it"
        )
    for item in fields(state):
        value = packed[item.name]
        present = getattr(state, item.name)
        if is_dataclass(present):
            unpack_state(present, value, nodes)
            continue
        if "by node" in item.metadata:
            value = {
                nodes[partition]: each for partition, each in value.items() if partition in nodes
            }
        setattr(state, item.name, value)
