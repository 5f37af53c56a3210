"""A simulated accelerator: torch's device `fake`, with the CPU's memory behind it and operations
that run on the CPU.

It refuses what a GPU refuses: operations on tensors of two devices, the CPU's generators,
`numpy()`, use after a fork, and while a graph is captured, waits, host reads, generators and copies
between host and device. A graph does not own what it reads and has not made: once others have freed
such memory, it refuses to replay the graph, where a GPU would read what is there by then. And what a
graph has made is garbage after a replay, as where other graphs have the same memory. It has no
memory for tensors larger than `largest`. Its results have the CPU's bits. An observer is told of
kernels, copies and waits. It shows neither speed nor what an accelerator rounds in another way. Two
variables of the environment change it: with `FAKE_ACCELERATOR_FLOAT64=0` it has no float64, and it
fails in processes of multiprocessing while the file exists that `FAKE_ACCELERATOR_FAILS` names.

Tensors become those of the other device through DLPack, whose records say in a field where the
memory is. Processes whose `PYTHONPATH` has this folder have the device, because torch loads it by
its entry point.
"""

import ctypes
import multiprocessing
import os
import re
import warnings
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration

NAME = "fake"
#: less than most machines have, since it is theirs
MEMORY = 8 << 30
#: bytes of the largest tensor that there is memory for
largest = float("inf")
FAILING = os.environ.get("FAKE_ACCELERATOR_FAILS", "")
_CPU, _FAKE = 1, 12  # of DLPack: kDLCPU, kDLExtDev
#: operations whose result's shape is in the values, so that the host waits for it
_WAITING = {
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
}
#: operations that change no value
_VIEWS = {"view", "as_strided", "_reshape_alias", "unfold", "alias", "detach", "resize_"}
_INDEXING = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}

_ATEN = torch.ops.aten

#: is told of "kernel", "to device", "to host" or "wait", the name of the operation, and the bytes
#: of a copy
Observer = Callable[[str, str, int], None]
observer: Observer | None = None
#: the graph that is captured
_tape: "_Graph | None" = None
#: the device's memory, by where it begins
_allocated: dict[int, "_Memory"] = {}
_libraries: list[torch.library.Library] = []
_pinned: set[int] = set()


@dataclass(frozen=True)
class _Memory:
    """Memory of a tensor: how many bytes, and whether somebody holds it."""

    size: int
    held: StorageWeakRef


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _retag(tensor: Tensor, device_type: int) -> Tensor:
    """Return the same memory as a tensor of the other device."""
    if (
        device_type == _FAKE
        and not _Module.float64
        and tensor.dtype in (torch.float64, torch.complex128)
    ):
        raise TypeError(
            "Cannot convert a fake Tensor to float64 dtype as the fake framework doesn't support "
            "float64"
        )
    capsule = torch._C._to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
    _DLTensor.from_address(_pointer(capsule, b"dltensor")).device_type = device_type
    made: Tensor = torch._C._from_dlpack(capsule)
    return made


class _Stream:
    """A stream, behind which everything has always ended."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: "_Stream") -> None:
        pass


class _Graph:
    """A graph of operations, which runs them again in the same memory."""

    def __init__(self) -> None:
        #: operations, and their arguments and results in the CPU's memory
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        #: memory that there is when it is captured, by where it begins, in order
        self._before: dict[int, _Memory] = {}
        self._starts: list[int] = []
        #: what of that it reads or writes
        self._foreign: dict[int, _Memory] = {}
        #: by where it begins, what it makes
        self._made: dict[int, Tensor] = {}

    def begin(self) -> None:
        for start, memory in [*_allocated.items()]:
            if memory.held.expired():
                del _allocated[start]
        self._before = dict(_allocated)
        self._starts = sorted(self._before)

    def record(self, op: Any, given: Any, named: dict[str, Any], results: Any) -> None:
        held = partial(_map, self._held)
        by_name = {key: held(value) for key, value in named.items()}
        self.tape.append((op, held(given), by_name, held(results)))
        _map(self._note_made, results)

    def _held(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the graph holds it: without owning it, if it was there before."""
        place = tensor.data_ptr()
        found = bisect(self._starts, place)
        if not tensor.numel() or not found:
            return tensor
        start = self._starts[found - 1]
        memory = self._before[start]
        if place >= start + memory.size or memory.held.expired():
            return tensor
        self._foreign[start] = memory
        last = sum(
            (count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        there = (ctypes.c_byte * ((last + 1) * tensor.itemsize)).from_address(place)
        return torch.frombuffer(there, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _note_made(self, tensor: Tensor) -> Tensor:
        if self._held(tensor) is tensor and tensor.numel():
            self._made[tensor.data_ptr()] = tensor
        return tensor

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def replay(self) -> None:
        _note("kernel", "graph")
        if any(memory.held.expired() for memory in self._foreign.values()):
            raise RuntimeError("fake error: a graph reads memory that has been freed")
        for op, given, named, results in self.tape:
            _write(results, op(*given, **named))
        for memory in self._made.values():
            memory.fill_(torch.nan if memory.is_floating_point() else -1)


def _write(targets: Any, values: Any) -> None:
    """Put what an operation returned where it was when it was recorded."""
    if isinstance(targets, Tensor):
        if targets.numel() and targets.data_ptr() != values.data_ptr():
            targets.copy_(values)
    elif isinstance(targets, list | tuple):
        for target, value in zip(targets, values, strict=True):
            _write(target, value)


class _Module:
    """What `torch.get_device_module("fake")` returns."""

    float64 = os.environ.get("FAKE_ACCELERATOR_FLOAT64") != "0"
    _started, _bad_fork, _seed = False, False, None
    #: the stream behind the device
    generator = torch.Generator()

    def __init__(self) -> None:
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._bad_fork = self._started

    def start(self) -> None:
        """Start the device; its generator begins anywhere unless somebody has seeded it."""
        if self._bad_fork:
            raise RuntimeError("Cannot re-initialize the fake device in forked subprocess")
        if FAILING and multiprocessing.parent_process() and os.path.exists(FAILING):
            raise RuntimeError("fake error: an illegal memory access was encountered")
        if not self._started:
            self._started = True
            self.generator.seed() if self._seed is None else self.generator.manual_seed(self._seed)

    def is_initialized(self) -> bool:
        return self._started

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return self._bad_fork

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device, or note the seed for its start."""
        self._seed = seed
        if self._started:
            self.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        self.start()
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.start()
        _refuse_in_graphs("a generator is changed")
        self.generator.set_state(state)

    CUDAGraph, Stream = _Graph, _Stream
    _warns = 0
    _has_warned = False

    def get_sync_debug_mode(self) -> int:
        return self._warns

    def set_sync_debug_mode(self, mode: int) -> None:
        """Set the mode; the first time in a process, torch says this."""
        self._warns = mode
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "Synchronization debug mode is a prototype feature and does not yet detect all "
                "synchronizing "
                "operations",
                stacklevel=2,
            )

    _current: Any = _Stream()

    def current_stream(self, device: Any = None) -> _Stream:
        current: _Stream = self._current
        return current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def graph(
        self,
        graph: _Graph,
        *,
        pool: Any = None,
        stream: _Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        global _tape
        with self.stream(stream or _Stream()):
            graph.begin()
            _tape = graph
            try:
                yield
            finally:
                _tape = None

    def synchronize(self, device: Any = None) -> None:
        """Wait for nothing: operations are done when they are called."""

    def get_device_name(self, device: Any = None) -> str:
        return "simulated accelerator"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=MEMORY)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_module = _Module()


def _note(kind: str, name: str, size: int = 0) -> None:
    if kind == "wait" and _module._warns:
        warnings.warn(f"called a synchronizing operation: {name}", stacklevel=2)
    if observer is not None:
        observer(kind, name, size)


def _refuse_large(tensor: Tensor) -> Tensor:
    if tensor.nbytes > largest:
        raise torch.OutOfMemoryError(f"fake out of memory. Tried to allocate {tensor.nbytes} bytes")
    return tensor


def _refuse_in_graphs(what: str) -> None:
    if _tape is not None:
        raise RuntimeError(f"fake error: operation not permitted when stream is capturing: {what}")


def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


@dataclass(frozen=True)
class _Form:
    """What is known of an operation before it runs."""

    #: without its overload, and with it
    name: str
    full: str
    #: its arguments, by position and by name: how each is called, and whether it is written
    arguments: list[tuple[str, bool]]
    by_name: dict[str, tuple[str, bool]]
    #: where its generator stands among the arguments; none if it has none
    generator: int | None
    #: whether it takes numbers of the CPU beside the device's tensors
    relaxed: bool


@cache
def _form(op: Any) -> _Form:
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    full = f"{name}.{schema.overload_name}".removesuffix(".")
    arguments = [
        (each.name, each.alias_info is not None and each.alias_info.is_write)
        for each in schema.arguments
    ]
    names = [each for each, _ in arguments]
    generator = names.index("generator") if "generator" in names else None
    relaxed = full in _iterator_operations() or name.startswith("_foreach_")
    return _Form(
        name, full, arguments, dict(zip(names, arguments, strict=True)), generator, relaxed
    )


def _run(op: Any, *args: Any, **options: Any) -> Any:
    """Run an operation on the CPU, on the memory of its arguments."""
    _module.start()
    form = _form(op)
    name = form.name
    full = form.full
    #: the device's tensors and the CPU's, by the ids of the former
    table: dict[int, tuple[Tensor, Tensor]] = {}

    def to_cpu(argument: Any, written: bool, tensor: Tensor) -> Tensor:
        if not _is_here(tensor):
            if name in _INDEXING and argument == "indices":
                _refuse_in_graphs(f"{full} with the host's indices")
                _note("to device", full, tensor.nbytes)
            elif not form.relaxed or written or tensor.dim():
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, "
                    f"{NAME}:0 and {tensor.device}! (argument {argument} of {full})"
                )
            return tensor
        if (
            name in _INDEXING
            and argument == "indices"
            and tensor.dtype in (torch.bool, torch.uint8)
        ):
            _refuse_in_graphs(f"the host waits for a mask of {full}")
            _note("wait", f"{full} with a mask")
        if id(tensor) not in table:
            # an output that the operation may give another size needs memory that can grow
            fresh = written and not tensor.numel()
            table[id(tensor)] = (
                tensor,
                torch.empty(tensor.shape, dtype=tensor.dtype) if fresh else _retag(tensor, _CPU),
            )
        return table[id(tensor)][1]

    def convert(argument: tuple[str, bool], value: Any) -> Any:
        called, written = argument
        if called == "device" and value is not None:
            return torch.device("cpu")
        if called == "generator" and value not in (None, _module.generator):
            raise RuntimeError(
                f"Expected a '{NAME}' device type for generator but found '{value.device}'"
            )
        if isinstance(value, Tensor | list | tuple):
            return _map(partial(to_cpu, called, written), value)
        return value

    given = [
        convert(argument, value) for argument, value in zip(form.arguments, args, strict=False)
    ]
    named = {key: convert(form.by_name[key], value) for key, value in options.items()}
    if form.generator is not None and len(given) <= form.generator:
        named["generator"] = _module.generator
        _refuse_in_graphs(f"{full} draws")
    if name in _WAITING:
        _refuse_in_graphs(f"the host waits for {full}")
    if name not in _VIEWS:
        for _ in range(_launches(name, args)):
            _note("wait" if name in _WAITING else "kernel", full)
    results = op(*given, **named)
    _map(_refuse_large, results)
    if _tape is not None and name not in _VIEWS:
        _tape.record(op, given, named, results)
    for own, cpu in table.values():
        if own.shape != cpu.shape:
            _note_memory(cpu)
            own.data = _retag(cpu, _FAKE)
    back = {id(cpu): own for own, cpu in table.values()}
    known = {cpu.untyped_storage()._cdata for _, cpu in table.values()}

    def to_fake(result: Tensor) -> Tensor:
        if id(result) in back:
            return back[id(result)]
        if result.untyped_storage()._cdata not in known:
            _note_memory(result)
        return _retag(result, _FAKE)

    return _map(to_fake, results)


def _launches(name: str, args: Sequence[Any]) -> int:
    """Return how many kernels an operation is: as CUDA, one on lists of tensors only where all of a
    list have one dtype, and those at one place of the lists the same shape and strides.
    """
    lists = [values for values in args if isinstance(values, list | tuple)]
    if not name.startswith("_foreach_") or not lists:
        return 1
    lists = [values for values in lists if values and isinstance(values[0], Tensor)]
    one_dtype = all(len({value.dtype for value in values}) == 1 for values in lists)
    alike = all(
        len({(value.shape, value.stride()) for value in values}) == 1
        for values in zip(*lists, strict=True)
    )
    if one_dtype and alike:
        return 1
    return len(lists[0])


def _map(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Change the tensors among values."""
    if isinstance(values, Tensor):
        return change(values)
    return (
        type(values)([_map(change, value) for value in values])
        if type(values) in (list, tuple)
        else values
    )


@cache
def _iterator_operations() -> frozenset[str]:
    """Return the operations that take a CPU's tensor without dimensions beside a GPU's, as a
    number.
    """
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    blocks = path.read_text().split("\n- func: ")
    return frozenset(
        block.partition("(")[0] for block in blocks if "device_check: NoCheck" in block
    )


def _empty(
    size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any
) -> Tensor:
    _module.start()
    form = memory_format or torch.contiguous_format
    return _garbage(torch.empty(size, dtype=dtype, memory_format=form))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any
) -> Tensor:
    _module.start()
    return _garbage(torch.empty_strided(size, stride, dtype=dtype))


def _garbage(tensor: Tensor) -> Tensor:
    """Return fresh memory of the device, which holds no zeros by chance."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    _note_memory(tensor)
    return _retag(tensor, _FAKE)


def _note_memory(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _allocated[storage.data_ptr()] = _Memory(storage.nbytes(), StorageWeakRef(storage))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _module.start()
    if _is_here(source) and _is_here(target):
        _note("kernel", "copy_")
    else:
        host = target if _is_here(source) else source
        _refuse_in_graphs("a copy between host and device")
        blocks = not (non_blocking and host.untyped_storage().data_ptr() in _pinned)
        name = "copy_" if blocks else "copy_ without blocking"
        _note("to host" if _is_here(source) else "to device", name, source.nbytes)
    here, there = (
        _retag(tensor, _CPU) if _is_here(tensor) else tensor for tensor in (source, target)
    )
    there.copy_(here)
    if _tape is not None:
        _tape.record(Tensor.copy_, (there, here), {}, there)
    return target


def _copy_each(
    targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
) -> None:
    """As CUDA: one kernel for many where all are on the device, or else copies one after
    another.
    """
    if all(map(_is_here, sources)):
        _run(_ATEN._foreach_copy_.default, targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def _split_copy(
    source: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> None:
    """As CUDA: one kernel where the source is contiguous, or else copies one after another."""
    if source.is_contiguous():
        _run(_ATEN.split_with_sizes_copy.out, source, sizes, dim, out=out)
        return
    for target, part in zip(out, source.split(list(sizes), dim), strict=True):
        target.copy_(part)


def _item(tensor: Tensor) -> Any:
    _module.start()
    _refuse_in_graphs("the host reads a number")
    _note("wait", "item")
    return _retag(tensor, _CPU).item()


def _dropout(inputs: Tensor, probability: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Draw as the CPU's dropout does; torch's kernel has no argument for a generator."""
    mask = torch.empty_like(inputs, memory_format=torch.contiguous_format).bernoulli_(
        1 - probability
    )
    return inputs * mask.div(1 - probability), mask.bool()


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *options: Any) -> Any:
    bias = [gradient.shape[1]]
    return _run(_ATEN.convolution_backward.default, gradient, inputs, weight, bias, *options)


def _cast(op: Any, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
    """Run an operation under autocast."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and _is_here(tensor) else tensor

    keys: Any = torch._C.DispatchKey
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(keys.AutocastPrivateUse1)):
        return op(*_map(cast, args), **options)


def _with_pinned(
    empty: Callable[..., Tensor], *args: Any, pin_memory: bool = False, **options: Any
) -> Tensor:
    made = empty(*args, **options)
    if pin_memory:
        _pinned.add(made.untyped_storage().data_ptr())
    return made


def _deep_copy(copy: Callable[..., Tensor], tensor: Tensor, memory: dict[int, Any]) -> Tensor:
    """Copy as torch does for MPS: its way for other devices needs an allocator, which only C++ can
    register.
    """
    if not _is_here(tensor):
        return copy(tensor, memory)
    copied: Tensor = memory.setdefault(
        id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )
    return copied


def activate() -> None:
    """Make the device known to torch.

    Torch calls this by the entry point, at the end of its import.
    """
    backend_registration._setup_privateuseone_for_python_backend(NAME, _module)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    autocast = torch.library.Library("_", "IMPL")
    _libraries.extend([everything, aten, autocast])
    everything.fallback(_run, "PrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy,
        "_local_scalar_dense": _item,
        "native_dropout": _dropout,
        "convolution_overrideable": partial(_run, _ATEN.convolution.default),
        "convolution_backward_overrideable": _convolution_backward,
    }
    # torch makes these of single operations for devices that it does not know
    for name in torch._C._dispatch_get_all_op_names():
        short, _, overload = name.removeprefix("aten::").partition(".")
        if re.match(r"aten::_foreach_\w+(\.(?!.*out)\w+)?$", name) and not name.endswith("_out"):
            op = getattr(getattr(_ATEN, short), overload or "default")
            kernels[name.removeprefix("aten::")] = partial(_run, op)
    kernels["_foreach_copy_"] = _copy_each
    kernels["split_with_sizes_copy.out"] = _split_copy
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    for op, dtype in (
        ("conv2d", torch.bfloat16),
        ("linear", torch.bfloat16),
        ("nll_loss", torch.float32),
    ):
        aten.impl(op, partial(_cast, getattr(_ATEN, op).default, dtype), "AutocastPrivateUse1")
    torch.empty = partial(_with_pinned, torch.empty)
    setattr(Tensor, "__deepcopy__", partialmethod(partial(_deep_copy, Tensor.__deepcopy__)))  # noqa: B010
