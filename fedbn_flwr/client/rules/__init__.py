"""The clients' halves of methods: what they add to local training, switched on by keys of the instruction.

A method's own rule lies beside its strategy. Here are those that any method can ask for, one a file.
"""

from importlib import import_module
from pkgutil import iter_modules

from fedbn_flwr.client.rules.rule import (
    RULES,
    Rule,
    Session,
    obeyed_keys,
    on_device,
    read_instruction,
    register_rule,
    rules_for,
)

__all__ = ["RULES", "Rule", "Session", "obeyed_keys", "on_device", "read_instruction", "register_rule", "rules_for"]

# every file of this folder registers its rule when it is imported
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
