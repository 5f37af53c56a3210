"""What this machine computes with: its processors, and its accelerator.

The accelerator is torch's generic one: CUDA, ROCm, MPS, XPU, or what else torch registers. What
only CUDA has is where it is used: `CUDA_VISIBLE_DEVICES` in `fedbn_flwr/experiments/engines.py`,
TF32 in `fedbn_flwr/client/training.py`.
"""

import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: whether deterministic algorithms fill fresh memory
_MEMORY: Any = torch.utils.deterministic
#: the memory limit of a container
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
#: rows of a tensor that follow each other, or the numbers of chosen ones on its device
Rows = slice | Tensor


@cache
def accelerator() -> torch.device | None:
    """Return the kind of the accelerator; None if there is none."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return None


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def started() -> Any:
    """Return the module of the accelerator, such as `torch.cuda`, once it has been used; None
    before.
    """
    found = accelerator()
    module = None
    if found:
        module = torch.get_device_module(found)
    # MPS does not tell, and starts at once
    if module and getattr(module, "is_initialized", lambda: True)():
        return module
    return None


def has_graphs(device: torch.device) -> bool:
    """Return whether operations of a device can be captured and replayed."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "CUDAGraph")


def form_of(tensor: Tensor) -> Hashable:
    """Return all that a captured operation must find as it was, but the numbers."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def set_up_accelerator(device: torch.device, deterministic: bool) -> None:
    """Make a device the current one of its kind, and let its libraries repeat their bits if they
    are to.

    torch warns of operations that cannot. cuBLAS reads the environment at its first use in the
    process.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    # with it, cuDNN's algorithms are deterministic too
    torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    _MEMORY.fill_uninitialized_memory = False
    if device.index is not None:
        torch.get_device_module(device).set_device(device.index)


@contextmanager
def settings_restored() -> Iterator[None]:
    """Put torch's settings of this process back at the end of the block, as far as runs change
    them.
    """
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    index = _current_index()
    tries = torch.backends.cudnn.benchmark
    fills = _MEMORY.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = tries
        _MEMORY.fill_uninitialized_memory = fills
        if _current_index() != index:
            started().set_device(index)


@contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Give the block torch as a new process has it, as far as runs depend on that: gradients,
    float32, no autocast, and no default device but the CPU.
    """
    found = accelerator()
    kinds = {"cpu", found.type} if found else {"cpu"}
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        # torch 2.6 does not tell the device of a block by get_default_device
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def _current_index() -> int:
    """Return the number of the current device; 0 before the first use."""
    module = started()
    if hasattr(module, "current_device"):
        return int(module.current_device())
    return 0


def pick_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the accelerator where there is one."""
    found = accelerator()
    known = ", ".join(["auto", "cpu", *([found.type] if found else [])])
    if name == "auto":
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; known: {known}") from None
    count = 0
    if found and device.type == found.type:
        count = torch.accelerator.device_count()
    if device.type != "cpu" and (device.index or 0) >= count:
        raise ValueError(
            f"device {name!r} is not available here: {count} of the kind; known: {known}"
        )
    return device


def accelerator_name(device: str = "auto") -> str:
    """Return the product name of the accelerator that an option `device` chooses.

    The name is empty if it chooses none.
    """
    found = accelerator()
    if found is None or (device != "auto" and torch.device(device).type != found.type):
        return ""
    name: str = getattr(torch.get_device_module(found), "get_device_name", lambda: found.type)()
    return name


@cache
def total_memory(device: torch.device) -> int:
    """Return the whole memory of the device, free or not, in bytes."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if device.type != "cpu" and properties:  # others, such as MPS, share the CPU's memory
        return int(properties(device).total_memory)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or "max"
        return min(physical, int(_CONTAINER_LIMIT.read_text()))
    return physical


@cache
def pins() -> bool:
    """Whether torch has memory of the CPU that is pinned for copies to and from the accelerator;
    not with MPS.
    """
    try:
        return torch.empty(1, pin_memory=True).device.type == "cpu"
    except RuntimeError:
        return False


@lru_cache(maxsize=1024)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device, where they stay: to send them at each use would be a copy that is
    waited for.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def rows_on(numbers: Sequence[int], device: torch.device) -> Rows:
    """Return what picks the rows of these numbers from tensors on a device."""
    if isinstance(numbers, range):
        return slice(numbers.start, numbers.stop)
    return constant(tuple(numbers), torch.int64, device)


@cache
def exact(device: torch.device) -> torch.device:
    """Return where sums in float64 are made: on the device, or on the CPU if the device has none,
    as the log says.
    """
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).device
    except (TypeError, RuntimeError):
        said = "%s has no float64: sums of moments and of exchanges are made on the CPU"
        logging.getLogger("flwr").info(said, device)
        return torch.device("cpu")


def where_exact(values: Tensor) -> Tensor:
    """Return values on a device that has float64."""
    return values.to(exact(values.device))
