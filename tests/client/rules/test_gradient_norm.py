"""The bound on the norm of a step's gradient, against torch's own."""

import pytest
import torch
from flwr.app import RecordDict
from torch import nn

from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.rules import Session, rules_for
from fedbn_flwr.strategies import REGISTRY
from fedbn_flwr.wire import Instruction

#: below and above the norms of the gradients, and of some of them
BOUNDS = [0.01, 3.0, 100.0]


def model_of(seed: int) -> nn.Module:
    """Return a model with gradients of a client's own size; one parameter has none, and one does not learn."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(2, 1))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    model[3].requires_grad_(False)
    for parameter in list(model.parameters())[:-3]:
        parameter.grad = torch.randn_like(parameter) * 10**seed / 10
    model.get_parameter("scale").grad = torch.tensor(0.5)
    return model


def adjust(model: nn.Module, bound: float) -> None:
    instruction = Instruction().with_rule(clip_norm=bound)
    session = Session(model, torch.optim.SGD(model.parameters()), instruction, {}, Memory(RecordDict()))
    rules = rules_for(instruction)
    for rule in rules:
        rule.begin(session)
    for rule in rules:
        rule.adjust()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("bound", BOUNDS)
def test_gradients_are_scaled_as_torch_scales_them(bound: float) -> None:
    for seed in range(3):
        model, wanted = model_of(seed), model_of(seed)
        torch.nn.utils.clip_grad_norm_(wanted.parameters(), bound)
        adjust(model, bound)
        scaled = gradients_of(model)
        assert scaled.keys() == gradients_of(wanted).keys()
        assert all(torch.equal(scaled[name], gradient) for name, gradient in gradients_of(wanted).items())


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_asks_for_it_so_that_a_client_must_acknowledge_it(name: str) -> None:
    for strategy, asked in ((REGISTRY[name](clip_norm=2), True), (REGISTRY[name](), False)):
        strategy.num_rounds = 4
        assert ("clip-norm" in strategy.instruct(Instruction(batch_size=8)).binding_keys()) == asked
