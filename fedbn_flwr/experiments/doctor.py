"""The command `doctor`: what becomes of batch normalization in a Flower app."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from fedbn_flwr.doctor.app import FlowerApp, run_app
from fedbn_flwr.doctor.examine import Examination, examine
from fedbn_flwr.doctor.findings import PAGE
from fedbn_flwr.doctor.observer import Network, describe_network
from fedbn_flwr.experiments.output.console import console, new_table
from fedbn_flwr.plugins import import_function
from fedbn_flwr.plugins.options import UsageError, whole_number


def run_doctor(options: dict[str, Any]) -> int:
    """Run an app and print what was found; 1 if something is wrong, or was not seen to its end."""
    app = FlowerApp.read(Path(options["app"]).expanduser(), options.get("run-config", ""))
    nodes = whole_number("--nodes", options["nodes"])
    rounds = whole_number("--rounds", options["rounds"])
    minutes = whole_number("--minutes", options["minutes"])
    with _set_aside(options.get("verbose", False)):
        model = _model(options.get("model", ""), app.folder)
        history = run_app(app, nodes, rounds, 60.0 * minutes)
    examination = examine(history, model)
    if not examination.trained:
        _refuse_untrained(app, examination)
    if options.get("json", False):
        print(json.dumps(_as_json(examination), indent=2))
    else:
        _show(examination)
    wrong = any(finding.level == "wrong" for finding in examination.findings)
    return int(wrong or bool(examination.stopped))


def _refuse_untrained(app: FlowerApp, examination: Examination) -> None:
    """Say why no node has trained a network, unless it is a finding."""
    for finding in examination.findings:
        if finding.name != "node-failed":
            return
        known = ", ".join(app.run_config) or "none"
        raise UsageError(
            f"nothing was trained{finding.detail}; give the app its data, or other values of its "
            f"run config ({known}) with --run-config"
        )
    why = examination.stopped or "no node trained a network of PyTorch"
    raise UsageError(f"nothing was seen of {app.folder.name}: {why}")


def _model(name: str, folder: Path) -> Network | None:
    if not name:
        return None
    sys.path.insert(0, str(folder))
    try:
        made = import_function("model", name, ())()
    except (ValueError, TypeError) as error:
        raise UsageError(f"--model: {error}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"--model: {name!r} returns no network of PyTorch")
    return describe_network(made)


@contextmanager
def _set_aside(verbose: bool) -> Iterator[None]:
    """Keep what an app and its nodes' processes print out of the output."""
    folder = Path.cwd()
    kept = [os.dup(number) for number in (1, 2)]
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(2 if verbose else file.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            os.chdir(folder)


def _show(examination: Examination) -> None:
    for finding in examination.findings:  # worst first
        console.print(f"{finding.level}: {finding}")
        console.print(f"    {PAGE}#{finding.name}\n")
    if examination.layers:
        console.print(_table(examination))
    if examination.stopped:
        why = examination.stopped.rstrip(".")
        console.print(f"The run ended early: {why}.")


def _table(examination: Examination) -> Table:
    table = new_table(
        "running statistics, and weights", "BN layer", "sent", "averaged", "came back", "moved"
    )
    for layer in examination.layers:
        moved = "yes" if layer.moved else "no"
        if not layer.tracks:
            moved = "has none"
        table.add_row(layer.name, layer.sent, layer.averaged, layer.came_back, moved)
    return table


def _as_json(examination: Examination) -> dict[str, Any]:
    return {
        "findings": [finding.as_json() for finding in examination.findings],
        "layers": [asdict(layer) for layer in examination.layers],
        "stopped": examination.stopped,
    }
