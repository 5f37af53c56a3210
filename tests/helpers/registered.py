"""Registering something for the length of a test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedbn_flwr.client.learning_task import TASKS
from fedbn_flwr.client.rules import RULES
from fedbn_flwr.data import DATASETS, PARTITIONS
from fedbn_flwr.models import MODELS
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins import TRUSTED
from fedbn_flwr.strategies import REGISTRY

DICTIONARIES: tuple[dict[str, Any], ...] = (
    REGISTRY,
    NORMS,
    MODELS,
    DATASETS,
    PARTITIONS,
    TASKS,
    RULES,
)


@contextmanager
def registries_restored() -> Iterator[None]:
    """Forget what is registered inside, the modules that are imported to do so, and those that were
    named.
    """
    before, modules = [dict(items) for items in DICTIONARIES], set(sys.modules)
    trusted = {*TRUSTED}
    try:
        yield
    finally:
        TRUSTED.clear()
        TRUSTED.update(trusted)
        for items, kept in zip(DICTIONARIES, before, strict=True):
            for name in items.keys() - kept.keys():
                registering = getattr(items[name], "__module__", "")
                if registering in sys.modules.keys() - modules:
                    del sys.modules[registering]
            items.clear()
            items.update(kept)
