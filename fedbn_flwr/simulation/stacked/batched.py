"""The tensors inside of `torch.func.vmap`, with the dimension for the clients that it hides.

The functions of torch behind this are private: a version of torch may not have them.
"""

from torch import Tensor

try:
    from torch._C import _functorch
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as outside_of_vmap
except ImportError:
    _functorch = None  # type: ignore[assignment]

#: the private functions that are called here
NEEDED = ("maybe_current_level", "_unwrap_batched", "_add_batch_dim")

__all__ = ["is_available", "outside_of_vmap", "unwrapped", "wrapped"]


def is_available() -> bool:
    """Whether torch has these functions; without them `vmap` does what it does by itself."""
    return all(hasattr(_functorch, name) for name in NEEDED)


def unwrapped(value: Tensor) -> tuple[Tensor, int | None]:
    """Return the tensor of all clients and its dimension for them, None for one that is the same for all."""
    found: tuple[Tensor, int | None] = _functorch._unwrap_batched(value, _level())
    return found


def wrapped(values: Tensor, dim: int) -> Tensor:
    """Return a tensor of all clients as that of one."""
    return _functorch._add_batch_dim(values, dim, _level())


def _level() -> int:
    return _functorch.maybe_current_level() or 0
