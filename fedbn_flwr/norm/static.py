"""Static batch normalization."""

import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.norm.batch import BatchNorm


class StaticBatchNorm(BatchNorm):
    """BN that keeps no running statistics while it trains.

    Diao, Ding and Tarokh, "HeteroFL", ICLR 2021: training normalizes with the batch's own statistics and
    tracks nothing. Evaluation normalizes with the running buffers, which hold what was gathered from the
    clients after training (`gather`), as in its code; or, with `instant`, with the statistics of
    the test batch, as it is described by Wang et al., "FedTAN", 2023.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        instant: bool = False,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.instant = instant

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the inputs."""
        if not (self.training or self.instant):
            return super().forward(input)
        self._check_input_dim(input)
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
