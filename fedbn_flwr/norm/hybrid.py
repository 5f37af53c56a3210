"""Hybrid batch normalization."""

import torch
from torch import Tensor, nn

from fedbn_flwr.norm.batch import BatchNorm, along_channels, channel_axes


class HybridBatchNorm(BatchNorm):
    """BN that normalizes in training with a learnable mix of the global and the batch's statistics.

    Chen, Xu, Wu and Kittler, "Hybrid Batch Normalisation", ICML 2025: mean = (1 - s) mean_global + s mean_B,
    var = (1 - s) var_global + s var_B (biased), with s = sigmoid(mix). There is one `mix` a channel, zero at
    first, and it stays on the client. Evaluation uses the global statistics alone: the running buffers, which
    training never changes, because they come from an exchange of gathered statistics (`gather`).
    `fixed_mix` sets s for good: with 1 it trains as BN does, with 0 as BN with frozen statistics.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        fixed_mix: float | None = None,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.mix: Tensor
        if fixed_mix is None:
            self.mix = nn.Parameter(torch.zeros(num_features))
            self.local_entries = ("mix",)
        else:
            constant = torch.full((num_features,), fixed_mix).logit()
            self.register_buffer("mix", constant, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the inputs."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance = self._mixed_statistics(input)
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        output = (input - along_channels(mean, input)) * along_channels(scale, input)
        output = output if self.bias is None else output + along_channels(self.bias, input)
        return output.to(input.dtype)

    def _mixed_statistics(self, input: Tensor) -> tuple[Tensor, Tensor]:
        assert self.running_mean is not None
        assert self.running_var is not None
        values = input.to(self.running_mean.dtype)
        variance, mean = torch.var_mean(values, dim=channel_axes(input), correction=0)
        share = torch.sigmoid(self.mix)
        return torch.lerp(self.running_mean, mean, share), torch.lerp(self.running_var, variance, share)
