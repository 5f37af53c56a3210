"""SiloBN."""

from typing import ClassVar

from .base_partial import PartialSharing
from .registry import register_strategy


@register_strategy("silobn")
class SiloBN(PartialSharing):
    """BN statistics stay on the client; affine parameters are averaged with everything else.

    Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DART 2020.

    A model without BN statistics, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "Andreux et al., DART 2020"
    leaves: ClassVar[str] = "everything but BN statistics"
    use: ClassVar[str] = "each node keeps statistics of its own, which are confidential"
    stays: ClassVar[str] = "statistics"
    needs: str = "statistics"
