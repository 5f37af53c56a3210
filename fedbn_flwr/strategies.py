"""The public import path of the strategies in a checkout.

A wheel carries them here as a subpackage.
"""

from strategies import *  # noqa: F403
from strategies import __all__ as __all__
