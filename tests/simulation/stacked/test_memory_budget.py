"""How many clients are stacked."""

import pytest
import torch
from torch import nn

from fedbn_flwr.client import BNClient
from fedbn_flwr.simulation.stacked.memory_budget import (
    bytes_of_a_client,
    clients_that_fit,
    largest_useful_stack,
)
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


@pytest.mark.parametrize(("device", "small", "large"), [("cpu", 20, 1), ("cuda", 512, 512)])
def test_a_cpu_stacks_no_models_of_more_than_a_million_parameters(device: str, small: int, large: int) -> None:
    def model(parameters: int) -> nn.Module:
        return nn.Linear(parameters, 1, bias=False, device="meta")

    assert largest_useful_stack(model(1_000_000), torch.device(device)) == small
    assert largest_useful_stack(model(1_000_001), torch.device(device)) == large
