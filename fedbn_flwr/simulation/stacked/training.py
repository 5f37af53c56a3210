"""One round of local training of several clients at once."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import BNClient, Reply, frozen_parts, training
from fedbn_flwr.client.precision import products
from fedbn_flwr.client.reply import Metrics
from fedbn_flwr.client.rules import Session, rules_for
from fedbn_flwr.layerwise import CorrectedClients, Exchange
from fedbn_flwr.simulation.stacked.model import Stack, stacked
from fedbn_flwr.simulation.stacked.node_memories import StackedMemory
from fedbn_flwr.simulation.stacked.steps import StackedSteps
from fedbn_flwr.state import State
from fedbn_flwr.state.flat import FlatState
from fedbn_flwr.wire import Instruction


def train_together(
    clients: Sequence[BNClient],
    structure: nn.Module,
    received: Sequence[Mapping[str, State]],
    instruction: Instruction,
    exchange: Exchange | None = None,
) -> list[Reply]:
    """Train clients at once; return what each one's `train` would reply, up to rounding.

    Nobody's memory changes unless all come to their end.
    The clients have models like `structure`, which nobody else uses meanwhile. They come in the order of their numbers
    of steps, the largest first: those that are at their end wait, unchanged, for the others.
    """
    local = state.group_keys(structure, instruction.keep_local)
    with norm.freeze(structure, **frozen_parts(instruction.freeze)), products(instruction):
        structure.train()
        stack = Stack(structure, _states(clients, received, local, structure))
        memory = StackedMemory([client.memory for client in clients])
        optimizer = training.make_optimizer(stack, instruction)
        groups = {name: [each[name] for each in received] for name in received[0] if name != wire.ARRAYS}
        others = {name: stacked(states) for name, states in groups.items()}
        session = Session(stack, optimizer, instruction, others, memory, local, structure=structure)
        losses = _learn(clients, stack, session, exchange)
    if local:
        memory.store(wire.PERSONAL, {name: value for name, value in stack.state_dict().items() if name in local})
    memory.write()
    stays = local | state.group_keys(structure, instruction.omit)
    shared = {name: value for name, value in stack.state_dict().items() if name not in stays}
    records = {
        name: FlatState.copies_of(values, stack.clients)
        for name, values in {wire.ARRAYS: shared, **session.records}.items()
    }
    metrics = _metrics(clients, stack, instruction, losses.tolist())
    return [
        client.reply(metrics[row], instruction, {name: states[row] for name, states in records.items()})
        for row, client in enumerate(clients)
    ]


def _metrics(
    clients: Sequence[BNClient], stack: Stack, instruction: Instruction, losses: Sequence[float]
) -> list[Metrics]:
    metrics: list[Metrics] = [{wire.TRAIN_LOSS: loss} for loss in losses]
    if instruction.report_local_loss:
        ends = stack.state_dict()
        for row, client in enumerate(clients):
            state.load(stack.structure, {name: values[row] for name, values in ends.items()})
            metrics[row] |= client.local_loss(stack.structure, instruction)
    return metrics


def _states(
    clients: Sequence[BNClient], received: Sequence[Mapping[str, State]], local: set[str], structure: nn.Module
) -> list[State]:
    """Return what each client's model starts from."""
    states: list[State] = []
    for client, groups in zip(clients, received, strict=True):
        personal = client.memory.personal(local)
        states.append({**groups[wire.ARRAYS], **personal} if personal else groups[wire.ARRAYS])
    for each in {id(each): each for each in states}.values():
        state.check(structure, each)
    return states


def _learn(clients: Sequence[BNClient], stack: Stack, session: Session, exchange: Exchange | None) -> Tensor:
    instruction = session.instruction
    plans = [client.plan(instruction, stack.structure) for client in clients]
    carried = None
    if instruction.layerwise in wire.CARRIED_MODES:
        carried = CorrectedClients(session.received.get(wire.CARRIED, {}), len(clients))
    steps = StackedSteps(clients, stack, session, plans, exchange, carried)
    session.steps = steps.steps
    rules = rules_for(instruction)
    for rule in rules:
        rule.begin(session)
    losses = training.train(steps.batches(), steps.loss_of, session.optimizer, [rule.adjust for rule in rules])
    steps.restore()
    for rule in rules:
        rule.finish(session)
    if carried and (values := carried.local_values()):
        session.records[wire.CARRIED] = values
    return losses
