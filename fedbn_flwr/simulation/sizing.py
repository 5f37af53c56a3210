"""How many processes train the clients of a run, and how large a stack is: what is worth it, and
what fits into memory.
"""

import copy
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.client import BNClient, training
from fedbn_flwr.device import total_memory
from fedbn_flwr.randomness import OwnRandomness
from fedbn_flwr.simulation.in_process import PORTION
from fedbn_flwr.wire import Instruction

#: multiplications in the forward passes of a run from which on it starts processes. At this size
#: two took about as long to start as they saved (on two cores one is started): 40,000 steps of
#: small-cnn, or 2,000 of resnet20, batches of 20
WORTH_STARTING = 10**11
#: clients per process in a round where models are stacked: five clients are faster in a stack than
#: one after another (docs/benchmarks.md, "Choices in the code")
CLIENTS_PER_WORKER = 5
#: larger stacks do not make a step faster, because a CPU's caches are full, unless their step keeps
#: no more than so many bytes (docs/benchmarks.md, "Stacks of many clients"). An accelerator stacks
#: all clients that are prepared together and fit into its memory (docs/benchmarks.md, "On a GPU")
_LARGEST_ON_CPU = 20
_SMALL_STACK = 64_000_000
#: parameters of the largest model that trains faster in a stack than alone on a CPU: between
#: resnet20 (270,000) and mobilenetv2 (2.2 million), see docs/benchmarks.md, "Choices in the code"
_LARGEST_MODEL = 1_000_000
#: mean bytes of a tensor that a forward pass keeps, from which on stacks do not make a CPU faster,
#: because the step of a single client does not fit into the caches (docs/benchmarks.md, "Stacks and
#: image sizes")
_LARGE_ACTIVATIONS = 100_000
#: the largest stack of such steps if they are layer-wise: clients that wait for each other at every
#: layer are faster in stacks of 5 than one by one, and larger stacks need more memory
#: (docs/benchmarks.md, "Choices in the code")
_LARGEST_LAYERWISE = 5
#: the share of the whole memory that a stack may take; an accelerator keeps a step twice, by
#: autograd and captured
_SHARE = 0.5
_SHARE_OF_ACCELERATOR = 0.25
#: parameters of glibc's `mallopt`
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
#: parameters, their gradients, the optimizer's state, what is received, what is sent, and one more
#: while adding up
_COPIES = 6


@dataclass(frozen=True)
class StepMemory:
    """What one client's training step keeps in memory, in bytes."""

    #: each tensor that the forward pass keeps for the backward pass, but not the parameters
    activations: tuple[int, ...]
    state: int

    @classmethod
    def of(cls, client: BNClient, instruction: Instruction) -> "StepMemory":
        """Look at one forward pass, of a whole mini-batch also where the client has fewer samples.

        So it is the same whichever client is asked; a client that cannot train says so when it is
        its turn.
        """
        try:
            activations = _kept_for_backward(client, instruction)
        except Exception:
            activations = ()
        return cls(activations, sum(value.nbytes for value in client.model.state_dict().values()))

    @property
    def total(self) -> int:
        """Estimate the bytes to train one client.

        A backward pass needs about as much as it is given.
        """
        return 2 * sum(self.activations) + _COPIES * self.state

    @property
    def large(self) -> bool:
        """Whether the activations are so large that stacks do not pay."""
        return sum(self.activations) > _LARGE_ACTIVATIONS * len(self.activations)


def _kept_for_backward(client: BNClient, instruction: Instruction) -> tuple[int, ...]:
    # two samples at least, for layers that normalize over the batch
    whole = replace(
        instruction, batch_size=max(instruction.batch_size, 2), local_steps=1, replacement=True
    )
    model = copy.deepcopy(client.model).train()
    of_model = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_model:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        OwnRandomness(0).drawing(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept),
    ):
        (batch,) = client.plan(whole)
        training.batch_loss(model, batch, instruction, client.loss_function)
    return tuple(kept.values())


def largest_useful_stack(
    model: nn.Module, device: torch.device, step: Callable[[], StepMemory], layerwise: bool = False
) -> int:
    """Return the largest stack of such clients that still speeds up a step; 1 if none does.

    `step` is called only where its answer counts: it takes a forward pass, which a large model need
    not spend.
    """
    if device.type != "cpu":
        return PORTION
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST_MODEL:
        return 1
    kept = step()
    if kept.large:
        return _LARGEST_LAYERWISE if layerwise else 1
    small = _SMALL_STACK // max(kept.total, 1)
    return min(max(small, _LARGEST_ON_CPU), PORTION)


def clients_that_fit(step: StepMemory, device: torch.device) -> int:
    """Return how many clients there is memory for, at least 1."""
    share = _SHARE_OF_ACCELERATOR
    if device.type == "cpu":
        share = _SHARE
    return max(1, int(total_memory(device) * share / max(step.total, 1)))


@dataclass(frozen=True)
class Work:
    """What a run asks of the processes that train its clients."""

    model: nn.Module
    device: torch.device
    layerwise: bool
    #: the clients of a round
    at_once: int
    #: samples in the mini-batches of the whole run
    samples: int
    #: multiplications of a sample's forward pass, and what a client's step keeps: each takes a pass
    #: of the model, and is called only where its answer counts
    multiplications: Callable[[], int]
    step: Callable[[], StepMemory]


def worthwhile_workers(work: Work, gpus: Sequence[str], cores: int) -> int:
    """Return the number of processes that make a run faster, starting them included.

    Several processes do not make a GPU faster: each of several GPUs has one. They make a round of a
    single layer-wise step faster, although they wait for each other at every layer
    (docs/benchmarks.md).
    """
    if gpus:
        return min(len(gpus), work.at_once)
    if work.device.type != "cpu" or min(cores, work.at_once) <= 1:
        return 1
    if work.samples * work.multiplications() < WORTH_STARTING:
        return 1
    return useful_workers(work, cores)


def useful_workers(work: Work, cores: int) -> int:
    """Return how many processes on CPUs with so many cores make a round faster."""
    stack = largest_useful_stack(work.model, torch.device("cpu"), work.step, work.layerwise)
    clients = CLIENTS_PER_WORKER if stack > 1 else 1
    return max(min(cores, work.at_once // clients), 1)


def visible_gpus(device: str) -> list[str]:
    """Return the names of the GPUs of a run, as `CUDA_VISIBLE_DEVICES` has them.

    There are none if the run is not for all GPUs.
    """
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    # a name of none hides those after it
    if named:
        return named.split(",")[:count]
    return [str(number) for number in range(count)]


def count_multiplications(model: nn.Module, inputs: Tensor) -> int:
    """Return the multiplications of convolutions and linear layers in the forward pass of one
    sample, of which `inputs` has at least two.
    """
    total = 0

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        weight: Tensor = layer.weight  # type: ignore[assignment]
        total += output.numel() * weight[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return total // len(inputs)


def keep_freed_memory() -> None:
    """Let this process hold on to what it frees, where the C library is glibc.

    By default glibc returns every large block to the system, which clears it when it is asked for
    again: a step of 20 stacked small-cnn with batches of 32 (32 x 32 pixels) then takes 0.35 CPU
    seconds, and 0.19 in this way.
    """
    try:
        change = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    change(_MMAP_THRESHOLD, 1 << 30)
    change(_TRIM_THRESHOLD, (1 << 31) - 1)
