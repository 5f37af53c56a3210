"""The choice of training messages that one stack of models can answer."""

from collections.abc import Hashable

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.rules import rules_for
from fedbn_flwr.client.training import make_optimizer
from fedbn_flwr.simulation.prepared import Job


def count_steps(job: Job) -> int:
    """Return the number of mini-batch steps of a job."""
    return job.client.count_steps(job.instruction)


def trial_key(job: Job) -> Hashable:
    """Return what jobs have in common that stack or fail to stack alike."""
    return id(job.client.model), tuple(job.instruction.binding_keys()), job.instruction.augmentation


def stack_key(job: Job) -> Hashable:
    """Return what jobs must have in common to be stacked; raise if a job cannot be planned."""
    client, instruction = job.client, job.instruction
    count_steps(job)
    remembered = tuple(sorted(name for name, _ in client.memory.kept("")))
    groups = tuple(sorted(job.received))
    # the first mini-batches of a layer-wise step meet at every layer
    apart = instruction.layerwise in ("none", *wire.CARRIED_MODES)
    first_batch = apart or client.first_batch_size(instruction)
    usual = client.make_optimizer is make_optimizer
    made = type(client), usual, id(client.model), client.loss_function, client.device
    return made, instruction, groups, remembered, first_batch


def why_not_stackable(job: Job) -> str:
    """Say why clients of this job's key cannot be stacked, whatever their model is; empty if they can."""
    client, instruction = job.client, job.instruction
    if type(client) is not BNClient:
        return f"{type(client).__name__} may train in a way of its own"
    if client.make_optimizer is not make_optimizer:
        return "its optimizer is its own"
    for rule in rules_for(instruction):
        if not rule.stacks:
            return f"{type(rule).__name__} does not work on stacked models"
    if instruction.optimizer != "sgd" and instruction.momentum_state != "none":
        return f"the state of {instruction.optimizer} counts the steps of all clients of a stack alike"
    return ""
