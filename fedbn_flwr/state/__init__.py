"""A model's state as named arrays, on its way between PyTorch and Flower."""

from fedbn_flwr.state.model_state import (
    State,
    check,
    from_record,
    give,
    group_keys,
    load,
    read,
    snapshot,
    snapshot_without,
    to_record,
)

__all__ = [
    "State",
    "check",
    "from_record",
    "give",
    "group_keys",
    "load",
    "read",
    "snapshot",
    "snapshot_without",
    "to_record",
]
