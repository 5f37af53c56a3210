"""The common part of the `register_*` functions, and the import of users' modules that call them."""

from fedbn_flwr.plugins.extras import MissingExtraError, extra
from fedbn_flwr.plugins.load import load_plugins
from fedbn_flwr.plugins.registry import add, same_definition

__all__ = ["MissingExtraError", "add", "extra", "load_plugins", "same_definition"]
