"""How many clients are stacked."""

import pytest

from fedbn_flwr.client import BNClient
from fedbn_flwr.simulation.stacked.memory_budget import bytes_of_a_client, clients_that_fit
from fedbn_flwr.wire import Instruction
from tests.helpers.toys import toy_cnn, toy_split


def test_as_many_are_stacked_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    client, instruction = BNClient(toy_cnn(), toy_split(), num_classes=4, device="cpu"), Instruction(batch_size=5)
    needed = bytes_of_a_client(client, instruction)
    assert needed > 6 * sum(value.nbytes for value in client.model.state_dict().values())
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.memory_budget.total_memory", lambda _: 7 * needed)
    assert clients_that_fit(client, instruction) == 3
    monkeypatch.setattr("fedbn_flwr.simulation.stacked.memory_budget.total_memory", lambda _: 0)
    assert clients_that_fit(client, instruction) == 1
