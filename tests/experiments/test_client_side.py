"""From a node's Context to its client."""

from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.experiments import UsageError
from fedbn_flwr.experiments.client_side import client_fn

OPTIONS: dict[str, Any] = {
    "dataset": "synthetic:n=40:test=4:classes=4:size=8:channels=1",
    "model": "small-cnn",
    "partition": "iid",
    "clients": 2,
}


def context(partition: int = 0, **options: Any) -> Context:
    place: dict[str, Any] = {"partition-id": partition, "num-partitions": 2}
    return Context(1, partition, place, RecordDict(), {**OPTIONS, **options})


def test_equal_numbers_of_other_types_are_other_options() -> None:
    client_fn(context(replacement=True))
    for wrong in (1, 1.0):
        with pytest.raises(UsageError, match="replacement must be true or false"):
            client_fn(context(replacement=wrong))
