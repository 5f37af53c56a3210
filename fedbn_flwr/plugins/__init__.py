"""What the `register_*` functions share, and importing the modules of users that call them."""

from fedbn_flwr.plugins.load import load_plugins
from fedbn_flwr.plugins.registry import add, same_definition

__all__ = ["add", "load_plugins", "same_definition"]
