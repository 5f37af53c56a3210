"""The number of processes of a run: a plain rule, so that the same command gives the same bits."""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.client import BNClient, pick_device
from fedbn_flwr.client.learning_task import task_of
from fedbn_flwr.experiments.config import Config
from fedbn_flwr.experiments.resources import expected_steps, load_data, shared_model
from fedbn_flwr.experiments.server_side import instruction_of
from fedbn_flwr.simulation.processes.grid import count_cores
from fedbn_flwr.simulation.stacked.memory_budget import StepMemory, largest_useful_stack

#: multiplications in the forward passes of a run from which on it starts processes. At this size two took about as long
#: to start as they saved (on two cores one is started): 40,000 steps of small-cnn, or 2,000 of resnet20, batches of 20
WORTH_STARTING = 10**11
#: clients per process in a round where models are stacked: five clients are faster in a stack than one after another
#: (docs/benchmarks.md, "Choices in the code")
CLIENTS_PER_WORKER = 5


def count_workers(config: Config, layerwise: bool = False) -> int:
    """Return the number of processes of the stacked engine: `workers`, or in a long run as many as there are cores.

    The rule knows the model, the sizes of its activations, the number of clients and steps, the cores and the options,
    and nothing that is measured. Several processes do not make a GPU faster: each of several GPUs has one. They make a
    round of a single layer-wise step faster, although they wait for each other at every layer (docs/benchmarks.md).
    """
    if config.workers:
        return min(config.workers, config.clients)
    if gpus := visible_gpus(config):
        return min(len(gpus), clients_in_round(config))
    if pick_device(config.device).type != "cpu" or min(count_cores(), clients_in_round(config)) <= 1:
        return 1
    samples = expected_steps(config) * config.batch_size
    if samples * count_multiplications(config) < WORTH_STARTING:
        return 1
    return useful_workers(config, layerwise, count_cores())


def useful_workers(config: Config, layerwise: bool, cores: int) -> int:
    """Return how many processes on CPUs with so many cores make a round faster."""
    stacks = largest_useful_stack(shared_model(config), torch.device("cpu"), lambda: one_step(config), layerwise) > 1
    return max(min(cores, clients_in_round(config) // (CLIENTS_PER_WORKER if stacks else 1)), 1)


def clients_in_round(config: Config) -> int:
    """Return how many clients train in a round."""
    return max(int(config.clients * config.fraction_train), 1)


def visible_gpus(config: Config) -> list[str]:
    """Return the names of the GPUs of a run, as `CUDA_VISIBLE_DEVICES` has them; none if it is not for all GPUs."""
    if config.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def one_step(config: Config) -> StepMemory:
    """Return what a client's step on a mini-batch of the training data keeps in memory."""
    data = load_data(config)
    few = np.arange(min(len(data.train), config.batch_size))
    device = str(pick_device(config.device))
    client = BNClient(shared_model(config), data.train, indices=few, device=device, task=task_of(data.task))
    return StepMemory.of(client, instruction_of(config))


def count_multiplications(config: Config) -> int:
    """Return the multiplications of convolutions and linear layers in the forward pass of one sample."""
    model, total = shared_model(config), 0

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        weight: Tensor = layer.weight  # type: ignore[assignment]
        total += output.numel() * weight[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    # two of them, for layers that normalize over the batch also when they do not learn
    inputs, _ = load_data(config).train.batch(torch.zeros(2, dtype=torch.int64), torch.device("cpu"))
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return total // len(inputs)
