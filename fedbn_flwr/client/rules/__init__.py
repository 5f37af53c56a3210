"""The rules that methods add to local training, one a file, switched on by their instruction keys."""

from importlib import import_module
from pkgutil import iter_modules

from fedbn_flwr.client.rules.base import Rule, Session
from fedbn_flwr.client.rules.registry import RULES, obeyed_keys, read_instruction, register_rule, rules_for

__all__ = ["RULES", "Rule", "Session", "obeyed_keys", "read_instruction", "register_rule", "rules_for"]

# every file of this folder registers its rule when it is imported
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
