"""The momentum that a node or the server keeps from round to round."""

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedbn_flwr import wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.rules import Session, rules_for
from fedbn_flwr.wire import Instruction

BUFFER = "momentum_buffer"


def session_of(model: nn.Module, kept: str, received: dict[str, Tensor], local: set[str], memory: Memory) -> Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return Session(model, optimizer, Instruction(momentum_state=kept), {wire.MOMENTUM: received}, memory, local)


def one_round(session: Session, gradient: float) -> None:
    """One step along the same number in every gradient."""
    (rule,) = rules_for(session.instruction)
    rule.begin(session)
    for parameter in session.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    session.optimizer.step()
    rule.finish(session)


def test_the_servers_momentum_is_not_changed_by_the_steps_of_a_node() -> None:
    model, received = nn.Linear(1, 1, bias=False), {f"weight/{BUFFER}": torch.tensor([[4.0]])}
    session = session_of(model, "global", received, set(), Memory(RecordDict()))
    one_round(session, 1.0)
    # .5 x 4 + 1, and what was received is as it was
    assert session.records[wire.MOMENTUM] == {f"weight/{BUFFER}": torch.tensor([[3.0]])}
    assert received == {f"weight/{BUFFER}": torch.tensor([[4.0]])}


def test_names_with_the_sign_that_divides_entries_are_sent_or_kept_like_others() -> None:
    model = nn.ModuleDict({"in/side": nn.Linear(1, 1, bias=False), "out/side": nn.Linear(1, 1, bias=False)})
    memory, local = Memory(RecordDict()), {"in/side.weight"}
    for wanted in (1.0, 1.5):
        session = session_of(model, "global", {}, local, memory)
        one_round(session, 1.0)
        # nothing is received back, so that what travels begins anew
        assert session.records[wire.MOMENTUM] == {f"out/side.weight/{BUFFER}": torch.tensor([[1.0]])}
        assert memory.recall(wire.MOMENTUM) == {f"in/side.weight/{BUFFER}": torch.tensor([[wanted]])}
