"""The wire format: every key that a strategy and a client exchange, in one file.

A strategy's wishes for a round travel as an `Instruction`, packed into the message's ConfigRecord under the
kebab-case names of its fields (`server-round` and `proximal-mu` are Flower's own names). Fields at their default
are not sent. The reply holds

- ArrayRecord `arrays`: the entries of the state dict that leave the client, by name, with their dtype,
- further ArrayRecords for what a method adds (`momentum`, `control-variates`, ...),
- MetricRecord `metrics`: `num-examples`, `partition-id`, `train-loss`, ...
- ConfigRecord `report`: `obeyed`, the binding keys that the client acted upon.

A layer-wise step takes several messages a round (`train.layerwise`, see `fedbn_flwr.wire.layerwise`).

A *binding* key changes the method: a client that ignores it would turn the method into another one in silence, so
a strategy refuses a reply that does not list every binding key it sent.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
REPORT = "report"
MOMENTUM = "momentum"
CONTROL_VARIATES = "control-variates"
MOMENTS = "moments"
PERSONAL = "personal"

NUM_EXAMPLES = "num-examples"
PARTITION_ID = "partition-id"
STATISTICS_CHANGE = "statistics-change"
TRAIN_LOSS = "train-loss"
EVAL_LOSS = "eval-loss"
ACCURACY = "accuracy"
ACCURACY_PERSONAL = "accuracy-personal"
DOMAIN_ACCURACY = "domain-accuracy"
DOMAIN = "domain"
OBEYED = "obeyed"
PARAMETERS = "parameters"
BN_ENTRIES = "bn-entries"
NUM_ROUNDS = "num-rounds"
DESCRIBE = "query.describe"
GATHER = "train.gather"
LAYERWISE = "train.layerwise"

Scalar = bool | int | float | str

GROUPS = ("none", "statistics", "affine", "bn", "mix", "all")
MOMENTUM_STATES = ("none", "local", "global")
FREEZES = ("none", "statistics", "affine", "both")
LAYERWISE_MODES = ("none", "paper", "fused", "forward", "sweeps")


def _binding(default: Any) -> Any:
    return field(default=default, metadata={"binding": True})


@dataclass(frozen=True)
class Instruction:
    """What a strategy wants of a client in one round."""

    server_round: int = 0
    seed: int = 0
    #: mini-batch steps a round; 0 means that `local_epochs` counts instead
    local_steps: int = 0
    local_epochs: int = 1
    batch_size: int = 32
    #: draw every mini-batch anew from all samples, instead of walking through them
    replacement: bool = False
    augmentation: str = "none"
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    #: `float32`, `tf32` to let GPUs use it for float32's products, or `bf16` for bfloat16 autocast
    precision: str = "float32"

    #: weight of (mu / 2) * squared distance to the received parameters (FedProx)
    proximal_mu: float = _binding(0.0)
    #: which part of BN stands still while training: one of FREEZES
    freeze: str = _binding("none")
    #: state entries that live on the client and are neither sent nor overwritten: one of GROUPS
    keep_local: str = _binding("none")
    #: state entries that the server holds and does not want back: one of GROUPS
    omit: str = _binding("none")
    #: adaptive gradient clipping: the largest ratio of a unit's gradient to its weights; 0 is off
    clip_factor: float = _binding(0.0)
    #: what becomes of the optimizer's state at the end of a round: one of MOMENTUM_STATES
    momentum_state: str = _binding("none")
    #: correct gradients with control variates (SCAFFOLD)
    control_variates: bool = _binding(False)
    #: share BN statistics with the other clients in the first step, message by message: one of LAYERWISE_MODES
    layerwise: str = _binding("none")
    #: forget the optimizer's state after the layer-wise step
    fresh_optimizer: bool = _binding(False)
    #: how many megabytes (2^20 bytes) of received arrays a node may keep in its state during a layer-wise step
    replay_limit: float = 16.0
    #: report how much the mini-batch statistics changed (FixBN's sliding window)
    report_change: bool = _binding(False)
    #: how many samples a gathering of statistics uses; 0 means all
    gather_samples: int = 0
    #: what layers normalize with while statistics are gathered: `batch` or `running` statistics
    gather_with: str = "batch"
    #: in an evaluation, also send the entries kept on the client, for a diagnostic
    send_personal: bool = _binding(False)

    @classmethod
    def from_config(cls, config: ConfigRecord | dict[str, Any]) -> Self:
        """Read the known keys; others (a user's own, say) are left alone."""
        known = ((_BY_KEY[key], key, value) for key, value in config.items() if key in _BY_KEY)
        return cls(**{item.name: _typed(key, value, type(item.default)) for item, key, value in known})

    @classmethod
    def wire_keys(cls) -> frozenset[str]:
        """Every key that an instruction can hold."""
        return frozenset(_BY_KEY)

    def to_config(self) -> ConfigRecord:
        """Pack what differs from the defaults."""
        return ConfigRecord({wire_key(name): value for name, value in self._changed().items()})

    def binding_keys(self) -> list[str]:
        """The keys in force that change the method, which a client must acknowledge."""
        return sorted(
            key
            for key, item in _BY_KEY.items()
            if item.metadata.get("binding") and getattr(self, item.name) != item.default
        )

    def _changed(self) -> dict[str, Scalar]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {item.name: values[item.name] for item in fields(self) if values[item.name] != item.default}


def wire_key(name: str) -> str:
    """The wire's spelling of a Python name."""
    return name.replace("_", "-")


#: an instruction's fields by the wire's names
_BY_KEY: dict[str, Field[Any]] = {wire_key(item.name): item for item in fields(Instruction)}


def _typed(key: str, value: Any, kind: type) -> Any:
    """Accept an int where a float is meant, nothing else."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"instruction key {key!r} must be {kind.__name__}, got {value!r}")
    return value


Record = ArrayRecord | ConfigRecord | MetricRecord
