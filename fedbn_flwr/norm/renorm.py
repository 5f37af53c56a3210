"""Batch renormalization."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.norm.batch import BatchNorm, channel_axes


class BatchRenorm(BatchNorm):
    """BN that is corrected in training towards the running statistics it will be evaluated with.

    Ioffe, "Batch Renormalization", 2017: y = gamma ((x - mean_B) / sigma_B r + d) + beta, where
    r = sigma_B / sigma within [1 / r_max, r_max] and d = (mean_B - mean) / sigma within [-d_max, d_max] are
    taken for constants by the gradient; mean and sigma are the running ones from before the batch. Evaluation
    is BN's. With r_max = 1 and d_max = 0 it is BN.
    Deviations: the running variance is averaged, as in torch, not the standard deviation, so that the layer's
    state means what any BN's does; the limits are constant (the paper raises them from BN's to these).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        r_max: float = 3.0,
        d_max: float = 5.0,
    ) -> None:
        if r_max < 1 or d_max < 0:
            raise ValueError(f"r_max is at least 1 and d_max at least 0, not {r_max} and {d_max}")
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.r_max = r_max
        self.d_max = d_max

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, and update the running statistics in training."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        r, d = self._corrections(input)
        # gamma (z r + d) + beta is BN with the weight gamma r and the bias gamma d + beta.
        weight = r if self.weight is None else self.weight * r
        bias = d if self.weight is None else self.weight * d
        bias = bias if self.bias is None else bias + self.bias
        factor = self._average_factor()
        return F.batch_norm(input, self.running_mean, self.running_var, weight, bias, True, factor, self.eps)

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

    def _average_factor(self) -> float:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
