"""The wire format: the keys that a strategy and a client exchange.

A strategy's orders for a round travel as an `Instruction`, packed into the message's ConfigRecord
under the kebab-case names of its fields (`server-round` is Flower's own name). Fields at their
default are not sent. The keys of rules travel beside them; each rule declares its own (see
`register_rule`). How to train (`lr`, `batch-size`) is the user's to write; what changes the method
has names that start with `fedbn.`, so that a user's own `freeze` is theirs. The reply holds

- ArrayRecord `arrays`: the entries of the state dict that leave the client, by name, with their
  dtype,
- further ArrayRecords for what a method adds (`momentum`, `control-variates`, ...),
- MetricRecord `metrics`: `num-examples`, `partition-id`, `train-loss`, ...
- ConfigRecord `report`: `obeyed`, the binding keys that the client acted upon.

A layer-wise step takes several messages a round (`train.layerwise`, see
`transports/message_records.py`).

A *binding* key changes the method: a client that ignores it would turn the method into another one
in silence, so a strategy refuses a reply that does not list every binding key it sent.
"""

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
REPORT = "report"
#: in a report: the node has lost the entries that stay on it, and has done nothing
LACKS_STATE = "lacks-state"
MOMENTUM = "momentum"
CONTROL_VARIATES = "control-variates"
MOMENTS = "moments"
CARRIED = "carried"
STAYS = "stays"
#: how much a sample of each class counts in moments of features
CLASS_WEIGHTS = "class-weights"

NUM_EXAMPLES = "num-examples"
PARTITION_ID = "partition-id"
STATISTICS_CHANGE = "statistics-change-variance"
#: before the name of a BN layer: its change, its distance from the global statistics, its variance
#: in a window
DYNAMICS = "dynamics-"
TRAIN_LOSS = "train-loss"
LOCAL_LOSS = "local-loss"
RECEIVED_LOSS = "received-loss"
EVAL_LOSS = "eval-loss"
ACCURACY = "accuracy"
ACCURACY_PERSONAL = "accuracy-personal"
DOMAIN_SCORES = "domain-"
DOMAIN = "domain"
#: before the name of a per-class metric
CLASS = "class-"
#: before the name of a score of the task beside the accuracy
SCORE = "score-"
OBEYED = "obeyed"
PARAMETERS = "parameters"
#: the further names of entries that have several, each followed by the first name of the entry
TIED = "tied"
BN_ENTRIES = "bn-entries"
NUM_ROUNDS = "num-rounds"
DESCRIBE = "query.describe"
GATHER = "train.gather"
#: the pass of a `train.gather` message that gathers BN's statistics
STATISTICS = "statistics"
LAYERWISE = "train.layerwise"

#: before the wire names of what changes the method
NAMESPACE = "fedbn."

#: a value of a key on the wire
Scalar = bool | int | float | str

#: groups of a state's entries, which `fedbn_flwr.state.group_keys` finds in a model
GROUPS = ("none", "statistics", "affine", "bn", "mix", "all")
#: values of `momentum_state`
MOMENTUM_STATES = ("none", "local", "global")
#: values of `freeze`
FREEZES = ("none", "statistics", "affine", "both")
#: corrections of an ordinary training message, from values that nodes sent in earlier rounds
CARRIED_MODES = ("carried", "carried-forward")
#: values of `layerwise`
LAYERWISE_MODES = ("none", "paper", "fused", "forward", "forward-paper", *CARRIED_MODES)


def _binding(default: Any) -> Any:
    return field(default=default, metadata={"binding": True})


@dataclass(frozen=True)
class Instruction:
    """A strategy's orders to a client for one round."""

    server_round: int = 0
    seed: int = 0
    #: mini-batch steps per round; 0: use `local_epochs`
    local_steps: int = 0
    local_epochs: int = 1
    batch_size: int = 32
    #: draw every mini-batch from all samples, instead of going through the samples in order
    replacement: bool = False
    augmentation: str = "none"
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    #: `float32`, `tf32` (TF32 products and convolutions on GPUs) or `bf16` (bfloat16 autocast)
    precision: str = field(default="float32", metadata={"any type": True})

    #: what a model must have, or the method is another one: `bn`, `affine`, `statistics`,
    #: `all-statistics` or `no-bn`
    bn_needed: str = "none"
    #: part of BN that is frozen during training: one of FREEZES
    freeze: str = _binding("none")
    #: state entries that stay on the client, neither sent nor overwritten: one of GROUPS
    stays: str = _binding("none")
    #: state entries that the client does not send back, because the server has them: one of GROUPS
    omit: str = _binding("none")
    #: where the optimizer's state is kept between rounds: one of MOMENTUM_STATES
    momentum_state: str = _binding("none")
    #: share BN statistics with the other clients in the first step: one of LAYERWISE_MODES
    layerwise: str = _binding("none")
    #: a pass over the node's data in the place of training, by name, with an argument after a
    #: colon (see `fedbn_flwr.client.passes`). In an evaluation, the node's own model gets and keeps
    #: what the pass finds
    gather: str = _binding("")
    #: samples from which statistics are gathered, in one batch; 0: all
    gather_samples: int = 0
    #: in an evaluation, also send the entries that stay on the client
    send_personal: bool = _binding(False)
    #: also report a loss on all local training data, by the name of its metric: `local-loss`, of
    #: the model after training, or in an evaluation; `received-loss`, of the model before training
    report_loss: str = _binding("")
    #: comma-separated metrics per class that an evaluation also reports
    class_metrics: str = ""
    #: report how every BN layer's mini-batch statistics change, with their variance over this many
    #: rounds; 0: off
    dynamics_window: int = 0
    #: comma-separated binding keys of later rounds: a client that does not know them is refused at
    #: once
    later: str = _binding("")
    #: what clients' rules are asked for: wire keys and values, sorted by key; see `with_rule`
    rule_keys: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def from_config(
        cls,
        config: ConfigRecord | dict[str, Any],
        rule_keys: Mapping[str, Scalar] = MappingProxyType({}),
    ) -> Self:
        """Read the fields, and the keys of rules that this process knows, given with their
        defaults.

        Other keys are left alone: they may be a user's own. So may `precision`, which users of
        Lightning give as a number: only a `BNClient` reads it, and refuses what it does not know.
        """
        values: dict[str, Any] = {}
        for key, item in _BY_KEY.items():
            named = on_wire(key)
            if named in config and "any type" in item.metadata:
                values[item.name] = config[named]
            elif named in config:
                values[item.name] = _typed(named, config[named], item.default)
        keys = sorted(key for key in rule_keys.keys() - _BY_KEY.keys() if on_wire(key) in config)
        asked = ((key, _typed(on_wire(key), config[on_wire(key)], rule_keys[key])) for key in keys)
        return cls(**values, rule_keys=tuple(asked))

    @classmethod
    def wire_keys(cls) -> frozenset[str]:
        """Return the wire keys of all fields."""
        return frozenset(map(on_wire, _BY_KEY))

    def with_rule(self, **keys: Scalar) -> Self:
        """Return a copy that also asks clients for a rule, by the rule's keys:
        `with_rule(proximal_mu=0.1)`.

        These keys are binding. A client that has no rule with such a key does not acknowledge the
        key, and its replies are not used (see `fedbn_flwr.client.register_rule`).
        """
        asked = {wire_key(name): value for name, value in keys.items()}
        clash = asked.keys() & _BY_KEY.keys()
        if clash:
            raise ValueError(f"{min(clash)!r} is a field of Instruction: use dataclasses.replace")
        return replace(self, rule_keys=tuple(sorted((dict(self.rule_keys) | asked).items())))

    def values_of(self, defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the values of rules' keys.

        A key may also be a field, and one that was not sent has its default.
        """
        fields_among = {
            key: getattr(self, _BY_KEY[key].name) for key in defaults.keys() & _BY_KEY.keys()
        }
        return {**defaults, **fields_among, **dict(self.rule_keys)}

    def to_config(self, always: Collection[str] = ()) -> ConfigRecord:
        """Pack the fields that differ from their defaults or have one of these wire keys, and the
        keys of rules.
        """
        values = {key: getattr(self, item.name) for key, item in _BY_KEY.items()}
        sent = {
            key: values[key]
            for key, item in _BY_KEY.items()
            if on_wire(key) in always or values[key] != item.default
        }
        return ConfigRecord(
            {on_wire(key): value for key, value in {**sent, **dict(self.rule_keys)}.items()}
        )

    @property
    def trains(self) -> bool:
        """Return whether clients train; otherwise a pass goes over their data."""
        return not self.gather

    @property
    def waits_for_others(self) -> bool:
        """Return whether clients wait for each other in their first step."""
        return self.layerwise not in ("none", *CARRIED_MODES)

    def binding_keys(self) -> list[str]:
        """Return the keys in force that change the method, which a client must acknowledge."""
        changed = [key for key, item in BINDING.items() if getattr(self, item.name) != item.default]
        return sorted([*changed, *dict(self.rule_keys)])


def printable(text: str, longest: int = 500) -> str:
    """Return a text of others as logs and terminals may show it: in one line of at most so many
    signs.
    """
    return "".join(sign if sign.isprintable() else " " for sign in text[:longest])


def wire_key(name: str) -> str:
    """Return the kebab-case spelling of a Python name."""
    return name.replace("_", "-")


def on_wire(key: str) -> str:
    """Return the name under which a field's or a rule's key travels."""
    return key if key in _PLAIN else NAMESPACE + key


#: an instruction's fields by the wire's names
_BY_KEY: dict[str, Field[Any]] = {
    wire_key(item.name): item for item in fields(Instruction) if item.name != "rule_keys"
}

#: those that change the method
BINDING = {key: item for key, item in _BY_KEY.items() if item.metadata.get("binding")}

#: the fields that say how to train, and not by which method
_PLAIN = _BY_KEY.keys() - BINDING.keys()


def _typed(key: str, value: Any, default: Any) -> Any:
    """Return the value if its type is the default's.

    An int is also accepted where a float is meant.
    """
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"instruction key {key!r} must be {kind.__name__}, got {value!r}")
    return value


#: what Flower's messages hold
Record = ArrayRecord | ConfigRecord | MetricRecord


def record_names(content: RecordDict) -> tuple[str, str]:
    """Return the names of the model's arrays and of the configuration in a strategy's message.

    They are its `arrayrecord_key` and `configrecord_key`. What a method adds comes after the model.
    """
    return _one_of(content, ArrayRecord, ARRAYS), _one_of(content, ConfigRecord, CONFIG)


def _one_of(content: RecordDict, kind: type[ArrayRecord | ConfigRecord], usual: str) -> str:
    # every message is asked, and `content.array_records` would make a new collection of all records
    # each time
    if isinstance(content.get(usual), kind):
        return usual
    return next((name for name, record in content.items() if isinstance(record, kind)), usual)
