"""MTFL."""

from typing import ClassVar

from .base_partial import PartialSharing
from .registry import register_strategy


@register_strategy("mtfl")
class MTFL(PartialSharing):
    """BN's affine parameters stay on the client; its statistics are averaged with everything else.

    Mills, Hu, Min, Multi-Task Federated Learning for Personalised Deep Neural Networks in Edge Computing, TPDS 2021,
    in the variant that the BN papers compare with (private affine parameters, federated statistics).

    A model without affine BN, on which this would be FedAvg, is refused.
    """

    paper: ClassVar[str] = "Mills, Hu and Min, TPDS 2021"
    leaves: ClassVar[str] = "everything but BN's affine parameters"
    use: ClassVar[str] = "each node keeps a model for its own task"
    stays: ClassVar[str] = "affine"
    needs: str = "affine"
