"""A module of a user's own, in a package that has the name of this project's strategies."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest


def users_module(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write and import the module, not from what Python compiled of another one a moment ago."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (folder / "mine.py").write_text("from fedbn_flwr.strategies import FedAvg, register_strategy\n" + code)
    spec = spec_from_file_location("strategies.mine", folder / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "strategies.mine", module)
    spec.loader.exec_module(module)
    return module
