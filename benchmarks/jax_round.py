"""The bare loop's round in JAX: one jitted function, which maps over the clients and scans over
their steps.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# the card's memory is not for this process alone
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import torch
from jax import lax
from torch import Tensor, nn

from benchmarks.bare import BareLoop

#: entries of a state by name, kernels and images with their channels last
Entries = dict[str, Any]
STATISTICS = ("running_mean", "running_var")
#: of torch's BN
EPS = 1e-5
MOMENTUM = 0.1
#: what JAX calls the precisions of a run
PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32"}
#: the axes of a kernel, each by its number in the other library
IN_JAX = (2, 3, 1, 0)
IN_TORCH = (3, 2, 0, 1)


class Network:
    """The layers of a network in training, as torch computes them, and how statistics move."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.moved: Entries = {}

    def conv(self, name: str, images: Any, stride: int = 1) -> Any:
        """A padded 3 x 3 convolution without bias."""
        return lax.conv_general_dilated(
            images,
            self.entries[f"{name}.weight"],
            (stride, stride),
            ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def norm(self, name: str, images: Any) -> Any:
        """Batch normalization."""
        mean = images.mean((0, 1, 2))
        variance = jnp.square(images - mean).mean((0, 1, 2))
        count = images.size // images.shape[-1]
        seen = {"running_mean": mean, "running_var": variance * (count / (count - 1))}
        for entry, value in seen.items():
            old = self.entries[f"{name}.{entry}"]
            self.moved[f"{name}.{entry}"] = (1 - MOMENTUM) * old + MOMENTUM * value
        normal = (images - mean) * lax.rsqrt(variance + EPS)
        return normal * self.entries[f"{name}.weight"] + self.entries[f"{name}.bias"]

    def linear(self, name: str, features: Any) -> Any:
        """A linear layer."""
        return features @ self.entries[f"{name}.weight"] + self.entries[f"{name}.bias"]


def small_cnn(network: Network, images: Any) -> Any:
    """Return the logits of `fedbn_flwr.models`' network of this name."""
    for conv, norm, stride in (("0", "1", 1), ("3", "4", 2), ("6", "7", 2)):
        images = jax.nn.relu(network.norm(norm, network.conv(conv, images, stride)))
    return network.linear("11", images.mean((1, 2)))


def resnet20(network: Network, images: Any) -> Any:
    """Return the logits of `fedbn_flwr.models`' network of this name."""
    images = jax.nn.relu(network.norm("bn1", network.conv("conv1", images)))
    for stage in (1, 2, 3):
        for block in (0, 1, 2):
            name = f"layer{stage}.{block}"
            stride = 1
            if stage > 1 and block == 0:
                stride = 2
            inner = network.conv(f"{name}.conv1", images, stride)
            inner = jax.nn.relu(network.norm(f"{name}.bn1", inner))
            inner = network.norm(f"{name}.bn2", network.conv(f"{name}.conv2", inner))
            if stride == 2:
                new = images.shape[-1] // 2
                images = jnp.pad(images[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (new, new)))
            images = jax.nn.relu(images + inner)
    return network.linear("fc", images.mean((1, 2)))


FORWARDS: dict[str, Callable[[Network, Any], Any]] = {"small-cnn": small_cnn, "resnet20": resnet20}


class JaxLoop(BareLoop):
    """Federated averaging as the bare loop has it, of networks that are written here."""

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tensor, Tensor],
        parts: Sequence[Tensor],
        forward: str,
        precision: str = "float32",
        **options: Any,
    ) -> None:
        super().__init__(model, data, [part.cpu() for part in parts], **options)
        images, labels = data
        self._jax_data = to_jax(images.movedim(1, -1)), to_jax(labels)
        self._entries = {
            name: to_jax(_reordered(value, IN_JAX))
            for name, value in model.state_dict().items()
            if value.is_floating_point()
        }
        sizes = torch.tensor([len(part) for part in parts], dtype=images.dtype)
        self._weights = to_jax(sizes / sizes.sum())
        self._precision = PRECISIONS[precision]
        self._jitted = jax.jit(partial(_round, FORWARDS[forward], self._lr))

    def round(self) -> None:
        """Train every client from the same state, and average."""
        drawn = torch.stack([torch.stack(list(self._batches(part))) for part in self._parts])
        with jax.default_matmul_precision(self._precision):
            self._entries = self._jitted(
                self._entries, *self._jax_data, to_jax(drawn), self._weights
            )
        jax.block_until_ready(self._entries)

    def state(self) -> dict[str, Tensor]:
        """The server's model, without counters."""
        entries = self._entries.items()
        return {name: _reordered(torch.tensor(value), IN_TORCH) for name, value in entries}


def is_on_cpu() -> bool:
    """Return whether JAX has no accelerator here."""
    return str(jax.default_backend()) == "cpu"


def to_jax(values: Tensor) -> Any:
    """Return a tensor as JAX has it."""
    return jnp.asarray(values.detach().cpu().numpy())


def _reordered(value: Tensor, axes: Sequence[int]) -> Tensor:
    """Return an entry with the axes of a kernel in this order, and those of a matrix swapped."""
    if value.dim() == 4:
        return value.permute(*axes)
    if value.dim() == 2:
        return value.T
    return value


def _round(
    forward: Callable[[Network, Any], Any],
    lr: float,
    entries: Entries,
    images: Any,
    labels: Any,
    drawn: Any,
    weights: Any,
) -> Entries:
    """Return the mean of what clients make of these entries, each on its own drawn samples."""

    def loss_of(learned: Entries, statistics: Entries, samples: Any) -> tuple[Any, Entries]:
        network = Network({**learned, **statistics})
        likelihoods = jax.nn.log_softmax(forward(network, images[samples]))
        chosen = jnp.take_along_axis(likelihoods, labels[samples][:, None], 1)
        return -chosen.mean(), network.moved

    def step(before: tuple[Entries, Entries], samples: Any) -> tuple[tuple[Entries, Entries], Any]:
        learned, statistics = before
        (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            learned, statistics, samples
        )
        after = {name: learned[name] - lr * gradients[name] for name in learned}
        return (after, moved), loss

    def client(samples: Any) -> Entries:
        statistics = {
            name: value for name, value in entries.items() if name.rpartition(".")[2] in STATISTICS
        }
        learned = {name: entries[name] for name in entries.keys() - statistics.keys()}
        (learned, statistics), _ = lax.scan(step, (learned, statistics), samples)
        return {**learned, **statistics}

    trained = jax.vmap(client)(drawn)
    return {name: jnp.tensordot(weights, rows, 1) for name, rows in trained.items()}
