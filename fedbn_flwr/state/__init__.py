"""A model's state as named arrays, between PyTorch and Flower."""

from fedbn_flwr.state.model_state import (
    State,
    check,
    from_record,
    group_keys,
    load,
    snapshot,
    snapshot_without,
    to_record,
    view_record,
)

__all__ = [
    "State",
    "check",
    "from_record",
    "group_keys",
    "load",
    "snapshot",
    "snapshot_without",
    "to_record",
    "view_record",
]
