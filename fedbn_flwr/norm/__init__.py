"""Normalizers: what BN is in a model, freezing it, and swapping it for something else."""

from fedbn_flwr.norm.agc import adaptive_clip, classifier_parameters, clip_gradients
from fedbn_flwr.norm.batch import BatchNorm
from fedbn_flwr.norm.detect import affine_keys, bn_keys, bn_layers, counter_keys, local_keys, statistics_keys
from fedbn_flwr.norm.freeze import Frozen, asked_to_train, freeze
from fedbn_flwr.norm.group import GroupNorm
from fedbn_flwr.norm.hybrid import HybridBatchNorm
from fedbn_flwr.norm.moments import Moments, gather, install, pool
from fedbn_flwr.norm.renorm import BatchRenorm
from fedbn_flwr.norm.replace import NORMS, replace
from fedbn_flwr.norm.static import StaticBatchNorm

__all__ = [
    "NORMS",
    "BatchNorm",
    "BatchRenorm",
    "Frozen",
    "GroupNorm",
    "HybridBatchNorm",
    "Moments",
    "StaticBatchNorm",
    "adaptive_clip",
    "affine_keys",
    "asked_to_train",
    "bn_keys",
    "bn_layers",
    "classifier_parameters",
    "clip_gradients",
    "counter_keys",
    "freeze",
    "gather",
    "install",
    "local_keys",
    "pool",
    "replace",
    "statistics_keys",
]
