"""FedBN."""

from typing import ClassVar

from .base_partial import PartialSharing
from .registry import register_strategy


@register_strategy("fedbn")
class FedBN(PartialSharing):
    """BN layers stay on the client, affine parameters and statistics; everything else is averaged.

    X. Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

    A model without BN, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "X. Li et al., ICLR 2021, arXiv:2102.07623"
    leaves: ClassVar[str] = "everything but BN"
    use: ClassVar[str] = "each node keeps a model for its own domain"
    stays: ClassVar[str] = "bn"
    needs: str = "bn"
