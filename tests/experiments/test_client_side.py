"""From a node's Context to its client."""

from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.experiments import UsageError, resolve
from fedbn_flwr.experiments import client_side as node
from fedbn_flwr.experiments.client_side import bound_client_fn, client_fn

OPTIONS: dict[str, Any] = {
    "dataset": "synthetic:n=40:test=4:classes=4:size=8:channels=1",
    "model": "small-cnn",
    "partition": "iid",
    "clients": 2,
}


def context(partition: int = 0, **options: Any) -> Context:
    place: dict[str, Any] = {"partition-id": partition, "num-partitions": 2}
    return Context(1, partition, place, RecordDict(), {**OPTIONS, **options})


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that have been resolved since the test began."""
    seen: list[dict[str, Any]] = []

    def noting(options: dict[str, Any]) -> Any:
        seen.append(options)
        return resolve(options)

    monkeypatch.setattr(node, "resolve", noting)
    node._config_of.cache_clear()
    node._resources.cache_clear()
    return seen


def test_options_are_resolved_once_for_all_nodes_and_messages(resolved: list[dict[str, Any]]) -> None:
    bound = bound_client_fn(resolve(OPTIONS).config)
    clients = [make(context(partition)) for make in (bound, client_fn) for partition in (0, 1, 0)]
    assert resolved == [OPTIONS]
    assert [client.partition_id for client in clients] == [0, 1, 0] * 2
    assert len({id(client.model) for client in clients}) == 1


def test_equal_numbers_of_other_types_are_other_options(resolved: list[dict[str, Any]]) -> None:
    client_fn(context(replacement=True))
    for wrong in (1, 1.0):
        with pytest.raises(UsageError, match="replacement must be true or false"):
            client_fn(context(replacement=wrong))
    assert len(resolved) == 3


def test_a_client_keeps_its_memory_in_the_context_of_its_message() -> None:
    first, second = context(), context()
    for each in (first, second):
        client_fn(each).memory.store("momentum", {})
        assert len(each.state) == 1
