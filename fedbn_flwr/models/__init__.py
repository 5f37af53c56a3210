"""The networks of the papers, and building any model by name."""

from fedbn_flwr.models.registry import MODELS, Entry, build

__all__ = ["MODELS", "Entry", "build"]
