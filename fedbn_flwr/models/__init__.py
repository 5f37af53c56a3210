"""The networks of the papers, and building any model by name."""

from importlib import import_module
from pkgutil import iter_modules

from fedbn_flwr.models.registry import MODELS, build, register_model

__all__ = ["MODELS", "build", "register_model"]

# every file of this folder that has a model registers it when it is imported
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
