"""Training without an exchange."""

from typing import ClassVar

from .base_partial import PartialSharing
from .registry import register_strategy


@register_strategy("standalone")
class Standalone(PartialSharing):
    """Training of every node alone, from the common initial model; nothing of the model leaves a node.

    With one node this is plain training.
    """

    paper: ClassVar[str] = ""
    leaves: ClassVar[str] = "nothing"
    use: ClassVar[str] = "the lower bound: every node alone"
    stays: ClassVar[str] = "all"
