"""Batch normalization over the mini-batches of all clients, as one autograd function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedbn_flwr.device import where_exact
from fedbn_flwr.layerwise.exchange import Answer, Exchange, Kind, Requests
from fedbn_flwr.norm.detect import along_channels, channel_axes

#: "paper": mean, then variance, then gradients. "fused": mean and variance at once, then gradients.
#: "forward": mean and variance at once, and each client's own gradients. "forward-paper": mean,
#: then variance, and each client's own gradients.
Mode = Literal["paper", "fused", "forward", "forward-paper"]


@dataclass(frozen=True)
class Use:
    """A use of a BN layer in a forward pass, and its exchanges with the other clients."""

    layer: str
    exchange: Exchange
    mode: Mode
    #: False for a pass that only gathers the clients' local values; then one value a channel is
    #: enough
    final: bool = True
    #: number of stacked clients, whose channels are side by side
    clients: int = 1
    #: what the layer adds to variances before it divides by them
    eps: float = 0.0

    def statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return mean and biased variance of each channel over all clients' inputs, and the count
        of values.
        """
        axes = channel_axes(inputs)
        count = inputs.numel() // inputs.shape[1]
        if count == 0:
            raise ValueError(f"BN layer {self.layer!r}: an empty mini-batch has no statistics")
        mean = inputs.mean(axes, dtype=torch.promote_types(inputs.dtype, torch.float32))
        if self.mode in ("paper", "forward-paper"):
            mean = self._ask("mean", mean, count).tensor
            answer = self._ask("variance", _variance(inputs, mean), count)
            variance = answer.tensor
        else:
            answer = self._ask("statistics", torch.stack([mean, _variance(inputs, mean)]), count)
            mean, variance = answer.tensor.unbind()
        if self.final and answer.count == 1:
            raise ValueError(
                f"BN layer {self.layer!r}: expected more than 1 value per channel over all clients"
            )
        return mean, variance, answer.count

    def gradients(self, local: Tensor, count: int) -> Tensor:
        """Return the gradients by mean and variance with which the client goes on, (2, C)."""
        if self.mode in ("forward", "forward-paper"):
            return local
        return self._ask("gradients", local, count).tensor

    def _ask(self, kind: Kind, tensor: Tensor, count: int) -> Answer:
        rows = where_exact(tensor.unflatten(-1, (self.clients, -1)).movedim(-2, 0))
        answer = self.exchange(
            Requests(kind, self.layer, rows, (count,) * self.clients, eps=self.eps)
        )
        if answer.tensor.shape == rows.shape:
            # an answer for each client
            return Answer(answer.tensor.to(tensor).movedim(0, -2).flatten(-2), answer.count)
        if answer.tensor.shape != rows[0].shape:
            asked = tuple(rows[0].shape)
            got = tuple(answer.tensor.shape)
            raise ValueError(
                f"BN layer {self.layer!r}: the answer to its {kind} is {got}, not {asked}"
            )
        return Answer(torch.cat([answer.tensor.to(tensor)] * len(rows), -1), answer.count)


class SharedBatchNorm(torch.autograd.Function):
    """BN whose mean and variance, and whose gradients by them, are those of all clients.

    Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", algorithms 2
    and 3. Client i has n_i values x of a channel, weight p_i and the mean loss F_i over its own
    mini-batch; the global loss is F = sum_i p_i F_i. Forward, y = gamma (x - mean) r + beta, r = 1
    / sqrt(variance + eps),

        mean = sum_i p_i sum_x x / n_i,    variance = sum_i p_i sum_x (x - mean)^2 / n_i.

    Backward, with g = dF_i/dy, which is what PyTorch hands to client i. The client's own gradients
    are a_i = dF_i/dmean = -gamma r sum g and b_i = dF_i/dvariance = -gamma r^3 / 2 sum g (x -
    mean), and the global ones A = dF/dmean = sum_i p_i a_i and B = sum_i p_i b_i (equation 41). One
    x of client i moves the mean by p_i / n_i and the variance by 2 p_i (x - mean) / n_i, so that

        dF/dx = p_i (gamma r g) + A p_i / n_i + B 2 p_i (x - mean) / n_i = p_i h,
        h = gamma r g + (A + 2 B (x - mean)) / n_i.

    The client hands h on: the factor p_i is common to all terms, hence the weighted mean of the
    clients' gradients is the gradient of F. So a client sends plain a_i and b_i, without any
    factor, and divides by its own n_i, not by the global count. If p_i is proportional to the batch
    sizes, F is the mean loss on the union of the mini-batches and this is centralized BN.

    Deviations from the paper: (26e) lacks the factor -1/2 of b_i. With the modes "forward" A and B
    are the client's own a_i and b_i (the paper's FedAvg + Algorithm 2). Nothing is asked if nobody
    needs h, for instance where the inputs are data. Sums are in float32 at least.
    """

    @staticmethod
    def forward(
        inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, use: Use
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The outputs, and the global mean, biased variance and count."""
        mean, variance, count = use.statistics(inputs)
        if weight is None:
            dtype = mean.dtype
        else:
            dtype = weight.dtype
        outputs = F.batch_norm(inputs, mean.to(dtype), variance.to(dtype), weight, bias, eps=eps)
        return outputs, mean, variance, torch.tensor(count, dtype=torch.float64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep for the backward pass what the local kernel would keep."""
        values, weight, _, ctx.eps, ctx.use = inputs
        _, mean, variance, count = output
        ctx.save_for_backward(values, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """The gradients by inputs, weight and bias; names as in the class's derivation."""
        inputs, weight, mean, variance = ctx.saved_tensors
        axes = channel_axes(inputs)
        r = (variance + ctx.eps).rsqrt()
        scale = r if weight is None else r * weight
        centered = inputs - along_channels(mean, inputs)
        grad_bias = grad.sum(axes, dtype=mean.dtype)
        grad_weight = r * (grad * centered).sum(axes)
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            local = torch.stack([-scale * grad_bias, -0.5 * scale * r * grad_weight])
            n = inputs.numel() // inputs.shape[1]
            a, b = ctx.use.gradients(local, n).unbind()
            grad_inputs = centered.mul_(along_channels(2 * b / n, inputs)).add_(
                along_channels(a / n, inputs)
            )
            grad_inputs = grad_inputs.addcmul_(grad, along_channels(scale, inputs)).to(inputs.dtype)
        affine: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[1]:
            affine[0] = grad_weight
        if ctx.needs_input_grad[2]:
            affine[1] = grad_bias
        return grad_inputs, *affine, None, None

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        use: Use,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """Stacked clients, whose channels are side by side: one client more has other channels, not
        other sums.
        """
        clients = info.batch_size
        if dims[0] is None:
            raise RuntimeError(
                f"what clients say of BN layer {use.layer!r} does not depend on their data"
            )
        flat = inputs.movedim(dims[0], 1).flatten(1, 2)
        affine = []
        for value, dim in zip((weight, bias), dims[1:3], strict=True):
            if value is not None and dim is not None:
                value = value.movedim(dim, 0)
            affine.append(None if value is None else value.expand(clients, -1).flatten())
        apply: Callable[..., tuple[Tensor, ...]] = SharedBatchNorm.apply
        outputs, mean, variance, count = apply(flat, *affine, eps, replace(use, clients=clients))
        shape = (clients, len(mean) // clients)
        every = outputs.unflatten(1, shape), mean.view(shape), variance.view(shape), count
        return every, (1, 0, 0, None)


def _variance(inputs: Tensor, mean: Tensor) -> Tensor:
    """Around a given mean. In two passes: faster on a CPU than `torch.var_mean`, and as exact."""
    return (inputs - along_channels(mean, inputs)).square_().mean(channel_axes(inputs))
