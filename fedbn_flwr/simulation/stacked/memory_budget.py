"""How many clients' models and activations fit into memory at once."""

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.client import BNClient, training
from fedbn_flwr.layerwise import OwnRandomness
from fedbn_flwr.wire import Instruction

#: more do not make a step faster: a CPU's caches are full, a GPU's processors busy
_ENOUGH = {"cpu": 20, "cuda": 512}
#: the share of the free memory that a stack may take
_SHARE = 0.5
#: parameters of glibc's `mallopt`
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: parameters, their gradients, the optimizer's state, what is received, what is sent, and one more while adding up
_COPIES = 6


def worth_stacking(device: torch.device) -> int:
    """How many clients."""
    return _ENOUGH.get(device.type, _ENOUGH["cpu"])


def clients_that_fit(client: BNClient, instruction: Instruction) -> int:
    """How many clients there is memory for, at least 1."""
    try:
        needed = bytes_of_a_client(client, instruction)
    except Exception:  # a client that cannot train says so when it is its turn
        needed = 1
    return max(1, int(free_memory(client.device) * _SHARE / max(needed, 1)))


def bytes_of_a_client(client: BNClient, instruction: Instruction) -> int:
    """About what training one client takes: copies of its state, and what a forward pass keeps for the backward."""
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


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def keep_freed_memory() -> None:
    """Let this process hold on to what it frees, where the C library is glibc.

    By default it returns every large block to the system, and has it cleared when it asks again: in every step, for
    the activations of a stack, that takes as long as some of its layers.
    """
    try:
        change = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    change(_MMAP_THRESHOLD, 1 << 30)
    change(_TRIM_THRESHOLD, (1 << 31) - 1)


def _unchanged(value: Any) -> Any:
    return value
