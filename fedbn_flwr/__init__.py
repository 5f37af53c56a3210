"""Batch normalization in federated learning, on Flower and PyTorch.

The library knows no strategy and no app. The strategies are imported from `fedbn_flwr.strategies`. `compare` and `run`
start experiments, `rows` reads their folders, `adapt` fits a model to a new site. They are imported when they are asked
for, because they need packages that the library does without.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fedbn_flwr.plugins import extra

try:
    __version__ = version("fedbn-flwr")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from fedbn_flwr.experiments.laboratory import compare as compare
    from fedbn_flwr.experiments.laboratory import run as run
    from fedbn_flwr.experiments.results.rows import rows as rows
    from fedbn_flwr.norm import adapt as adapt

__all__ = ["__version__", "adapt", "compare", "rows", "run"]
_LABORATORY = "experiments.laboratory"
_MODULES = {"compare": _LABORATORY, "run": _LABORATORY, "rows": "experiments.results.rows", "adapt": "norm"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra("cli"):
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
