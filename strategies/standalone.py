"""Training without an exchange."""

from typing import ClassVar

from .base_partial import PartialSharing
from .registry import register_strategy


@register_strategy("standalone")
class Standalone(PartialSharing):
    """Every node trains alone from the common initial model; nothing of the model leaves it.

    With one node this is plain training.
    """

    stays: ClassVar[str] = "all"
