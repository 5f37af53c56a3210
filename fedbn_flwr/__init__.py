"""Batch normalization in federated learning, on Flower and PyTorch.

Names are imported when they are asked for, because some need packages that the library does
without.
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
    from fedbn_flwr.experiments.laboratory import compare, run
    from fedbn_flwr.experiments.results.rows import rows
    from fedbn_flwr.experiments.sites.own_model import load_own_model
    from fedbn_flwr.norm import adapt

__all__ = ["__version__", "adapt", "compare", "load_own_model", "rows", "run"]
_PACKAGES = ("client", "clientapp", "data", "models", "norm", "simulation", "strategies")
_MODULES = {
    "adapt": "norm",
    "compare": "experiments.laboratory",
    "load_own_model": "experiments.sites.own_model",
    "rows": "experiments.results.rows",
    "run": "experiments.laboratory",
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra("cli"):
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
