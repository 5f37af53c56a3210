"""The size of a stack: how many clients are worth one, and how many fit into memory."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.client import BNClient, training
from fedbn_flwr.layerwise import OwnRandomness
from fedbn_flwr.wire import Instruction

#: larger stacks do not make a step faster: a CPU's caches are full, a GPU's processors busy
_LARGEST = {"cpu": 20, "cuda": 512}
#: parameters of the largest model that a CPU trains faster in a stack than alone. Stacks of resnet20 (270,000) take
#: 0.72 times as long as its clients one by one; of mobilenetv2 (2.2 million) 1.19, of digits-cnn (14 million) 2.9
_LARGEST_MODEL = 1_000_000
#: the share of the whole memory that a stack may take
_SHARE = 0.5
#: the memory limit of a container
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
#: parameters of glibc's `mallopt`
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: parameters, their gradients, the optimizer's state, what is received, what is sent, and one more while adding up
_COPIES = 6


def largest_useful_stack(model: nn.Module, device: torch.device) -> int:
    """Return the largest stack of such models that still speeds up a step; 1 if none does."""
    if device.type == "cpu" and sum(parameter.numel() for parameter in model.parameters()) > _LARGEST_MODEL:
        return 1
    return _LARGEST.get(device.type, _LARGEST["cpu"])


def clients_that_fit(client: BNClient, instruction: Instruction) -> int:
    """Return how many clients there is memory for, at least 1."""
    try:
        needed = bytes_of_a_client(client, instruction)
    except Exception:  # a client that cannot train says so when it is its turn
        needed = 1
    return max(1, int(total_memory(client.device) * _SHARE / max(needed, 1)))


def bytes_of_a_client(client: BNClient, instruction: Instruction) -> int:
    """Estimate the bytes to train one client: copies of its state, and what a forward pass keeps for the backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch: training.Batch = client.plan(instruction).first()
    with OwnRandomness(0).drawing(), torch.autograd.graph.saved_tensors_hooks(keep, _unchanged):
        training.batch_loss(client.model, batch, instruction, client.loss_function)
    # a backward pass needs about as much again
    return 2 * sum(kept.values()) + _COPIES * int(sum(value.nbytes for value in client.model.state_dict().values()))


def total_memory(device: torch.device) -> int:
    """Return the whole memory of the device, free or not, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or "max"
        return min(physical, int(_CONTAINER_LIMIT.read_text()))
    return physical


def keep_freed_memory() -> None:
    """Let this process hold on to what it frees, where the C library is glibc.

    By default glibc returns every large block to the system, which clears it when it is asked for again: in every step,
    for the activations of a stack, that takes as long as some of its layers.
    """
    try:
        change = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    change(_MMAP_THRESHOLD, 1 << 30)
    change(_TRIM_THRESHOLD, (1 << 31) - 1)


def _unchanged(value: Any) -> Any:
    return value
