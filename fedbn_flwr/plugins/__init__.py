"""The common part of the `register_*` functions, and the import of users' modules that call them."""

from fedbn_flwr.plugins.named import Named, fingerprint, is_foreign, is_importable
from fedbn_flwr.plugins.registry import MissingExtraError, add, did_you_mean, extra, load_plugins, same_definition

__all__ = [
    "MissingExtraError",
    "Named",
    "add",
    "did_you_mean",
    "extra",
    "fingerprint",
    "is_foreign",
    "is_importable",
    "load_plugins",
    "same_definition",
]
