"""The public import path of the experiments in a checkout; a wheel carries them here as a subpackage."""

from experiments import *  # noqa: F403
from experiments import __all__ as __all__
