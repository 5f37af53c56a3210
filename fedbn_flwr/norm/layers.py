"""The normalizers that this package puts into models, as layers.

They take the options of torch's layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.norm.detect import along_channels, channel_axes


class BatchNorm(_BatchNorm):
    """torch's batch normalization of (N, C) and (N, C, ...) inputs alike.

    Ioffe and Szegedy, "Batch Normalization", 2015: y = gamma (x - mean) / sqrt(var + eps) + beta.
    It stands where the layer that it replaces does not say how many dimensions its inputs have (a
    GroupNorm), and is what this package's variants of BN derive from.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of shape (N, C, ...), got {tuple(input.shape)}")


class StaticBatchNorm(BatchNorm):
    """BN that keeps no running statistics while it trains.

    Diao, Ding and Tarokh, "HeteroFL", ICLR 2021: training normalizes with the batch's own
    statistics and tracks nothing. Evaluation normalizes with the running buffers, which hold what
    was gathered from the clients after training (`gather`), as in its code.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the inputs."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)


class BatchRenorm(BatchNorm):
    """BN that is corrected in training towards the running statistics it will be evaluated with.

    Ioffe, "Batch Renormalization", 2017: y = gamma ((x - mean_B) / sigma_B r + d) + beta, where r =
    sigma_B / sigma within [1 / r_max, r_max] and d = (mean_B - mean) / sigma within [-d_max, d_max]
    are taken for constants by the gradient; mean and sigma are the running ones from before the
    batch. Evaluation is BN's. With r_max = 1 and d_max = 0 it is BN. Deviations: the running
    variance is averaged, as in torch, not the standard deviation, so that the layer's state means
    what any BN's does; the limits are constant (the paper raises them from BN's to these).
    """

    def __init__(
        self, num_features: int, *, r_max: float = 3.0, d_max: float = 5.0, **options: Any
    ) -> None:
        if r_max < 1 or d_max < 0:
            raise ValueError(f"r_max is at least 1 and d_max at least 0, not {r_max} and {d_max}")
        super().__init__(num_features, **options)
        self.r_max = r_max
        self.d_max = d_max

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, and update the running statistics in training."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        r, d = self._corrections(input)
        # gamma (z r + d) + beta is BN with the weight gamma r and the bias gamma d + beta.
        if self.weight is None:
            weight = r
        else:
            weight = self.weight * r
        bias = d if self.weight is None else self.weight * d
        if self.bias is not None:
            bias = bias + self.bias
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            factor = 1 / float(self.num_batches_tracked)
        else:
            factor = self.momentum
        return F.batch_norm(
            input, self.running_mean, self.running_var, weight, bias, True, factor, self.eps
        )

    @torch.no_grad()
    def _corrections(self, input: Tensor) -> tuple[Tensor, Tensor]:
        assert self.running_mean is not None
        assert self.running_var is not None
        values = input.to(self.running_mean.dtype)
        variance, mean = torch.var_mean(values, dim=channel_axes(input), correction=0)
        running_deviation = (self.running_var + self.eps).sqrt()
        r = (variance + self.eps).sqrt() / running_deviation
        d = (mean - self.running_mean) / running_deviation
        return r.clamp(1 / self.r_max, self.r_max), d.clamp(-self.d_max, self.d_max)


class HybridBatchNorm(BatchNorm):
    """BN that normalizes in training with a learnable mix of the global and the batch's statistics.

    Chen, Xu, Wu and Kittler, "Hybrid Batch Normalisation", ICML 2025: mean = (1 - s) mean_global +
    s mean_B, var = (1 - s) var_global + s var_B (biased), with s = sigmoid(mix). There is one `mix`
    a channel, zero at first, and it stays on the client. Training never changes global statistics,
    which are gathered (`gather`), and there are two: training mixes with steady ones, which move
    slowly, and evaluation uses the running ones alone.
    """

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.register_buffer("steady_mean", torch.zeros(num_features))
        self.register_buffer("steady_var", torch.ones(num_features))
        self.steady_mean: Tensor
        self.steady_var: Tensor
        self.mix = nn.Parameter(torch.zeros(num_features))
        self.local_entries = ("mix",)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the inputs."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance = self.mixed_statistics(input)
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        output = (input - along_channels(mean, input)) * along_channels(scale, input)
        if self.bias is not None:
            output = output + along_channels(self.bias, input)
        return output.to(input.dtype)

    def mixed_statistics(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance that training normalizes with."""
        values = input.to(self.steady_mean.dtype)
        variance, mean = torch.var_mean(values, dim=channel_axes(input), correction=0)
        share = torch.sigmoid(self.mix)
        return torch.lerp(self.steady_mean, mean, share), torch.lerp(
            self.steady_var, variance, share
        )


class GroupNorm(nn.GroupNorm):
    """Group normalization that refuses to normalize a single value, which would be zero whatever
    came in.

    Wu and He, "Group Normalization", 2018: each sample's channels are normalized in `num_groups`
    groups. Layer normalization over (C, ...) is one group; instance normalization is one group a
    channel. None keeps running statistics.
    """

    def __init__(self, groups: int, channels: int, *, name: str = "", **options: Any) -> None:
        super().__init__(groups, channels, **options)
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; a group of one value is an error that names the layer."""
        if input[0].numel() == self.num_groups:
            raise ValueError(
                f"layer {self.name!r} would normalize groups of a single value (input "
                f"{tuple(input.shape)}, "
                f"{self.num_groups} groups), which gives zero whatever the input: use fewer groups"
            )
        return super().forward(input)
