"""What a node keeps between messages."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbn_flwr.client.node_memory import NAMESPACE, Memory
from fedbn_flwr.wire import PERSONAL
from tests.helpers.toys import assert_same_state

KEPT = {"weight": torch.tensor([1.0, 2.0]), "counter": torch.tensor(7)}


def test_it_keeps_to_its_namespace() -> None:
    records = RecordDict({"momentum": ArrayRecord(), "mine": ConfigRecord({"a": 1})})
    memory = Memory(records)
    assert memory.recall("mine") == {}
    memory.store("momentum", KEPT)
    assert records["momentum"] == ArrayRecord()
    assert records["mine"] == {"a": 1}
    assert {name for name in records if name not in ("momentum", "mine")} == {f"{NAMESPACE}/momentum"}


def test_what_is_recalled_is_a_copy_of_what_was_stored_last() -> None:
    memory = Memory(RecordDict())
    memory.store("momentum", {"other": torch.zeros(1)})
    memory.store("momentum", KEPT)
    memory.recall("momentum")["weight"].zero_()
    assert_same_state(memory.recall("momentum"), KEPT)


def test_personal_entries_are_only_those_that_still_stay() -> None:
    memory = Memory(RecordDict())
    assert memory.personal({"weight"}) == {}
    memory.store(PERSONAL, KEPT)
    assert list(memory.personal({"weight", "unheard-of"})) == ["weight"]
    assert memory.personal(set()) == {}
