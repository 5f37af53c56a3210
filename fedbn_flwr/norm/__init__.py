"""Normalizers: what BN is in a model, freezing it, and swapping it for something else."""

from importlib import import_module
from pkgutil import iter_modules

from fedbn_flwr.norm.detect import (
    affine_keys,
    bn_keys,
    bn_layers,
    counter_keys,
    lacks,
    local_keys,
    statistics_keys,
)
from fedbn_flwr.norm.freeze import freeze
from fedbn_flwr.norm.layers import BatchNorm
from fedbn_flwr.norm.moments import Moments, adapt, gather_moments, gathering, pool_moments
from fedbn_flwr.norm.replace import normalize_features, replace
from fedbn_flwr.norm.substitute import NORMS, Slot, register_norm, swap_normalizers

__all__ = [
    "NORMS",
    "BatchNorm",
    "Moments",
    "Slot",
    "adapt",
    "affine_keys",
    "bn_keys",
    "bn_layers",
    "counter_keys",
    "freeze",
    "gather_moments",
    "gathering",
    "lacks",
    "local_keys",
    "normalize_features",
    "pool_moments",
    "register_norm",
    "replace",
    "statistics_keys",
    "swap_normalizers",
]

# every file of this folder that has a normalizer registers it when it is imported
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
