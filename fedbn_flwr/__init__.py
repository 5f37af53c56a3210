"""Batch normalization in federated learning, on Flower and PyTorch.

The library knows no strategy and no app. The strategies are imported from `fedbn_flwr.strategies`.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fedbn-flwr")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
