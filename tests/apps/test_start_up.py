"""What a node imports for a message: its process is a new one each time, and imports are nearly all
of its cost.
"""

import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flwr.app import Message

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import resolve, serve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import environment, run
from tests.helpers.site_folders import CLASSES, SitesInProcess, write_sites

OPTIONS: dict[str, Any] = {
    "clients": 2,
    "model": "mlp",
    "rounds": 2,
    "local-steps": 2,
    "momentum": 0.5,
    "device": "cpu",
    "partition": "classes:5",
}
METHODS = (
    "fedavg",
    "fedavg with adam",
    "fixbn:freeze-round=1",
    "fedbn",
    "fedtan",
    "scaffold",
    "fedavg+gn",
)
#: what a message may import beside Flower's own command and PyTorch: `import torch` alone takes 3
#: CPU seconds, each of torch._dynamo, scikit-learn and torchvision takes as long again, and
#: matplotlib, SciPy and pandas a second or two
ALLOWED = {"apps", "fedbn_flwr", "filelock", "strategies", "safetensors"}
#: prints the modules that were imported for each run's messages in a file, after what every
#: ClientApp's process has
CODE = """
import json, pickle, sys
from flwr.supernode.cli import flwr_clientapp
import torch
before = set(sys.modules)
from apps.client import app
from flwr.app import Context, RecordDict
imported = []
for messages, options, place in pickle.load(open(sys.argv[1], "rb")):
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 2, **place}, RecordDict(), options)
    for message in messages:
        app(message, context)
    imported.append(sorted(set(sys.modules) - before))
    before |= set(sys.modules)
print(json.dumps(imported))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("only_composed")
def test_messages_import_nothing_that_takes_seconds(tmp_path: Path) -> None:
    """Of every method, and of a site with images.

    One process for all, because each would take as long.
    """
    runs: list[tuple[list[Message], dict[str, Any], dict[str, Any]]] = []
    for method in METHODS:
        name, _, optimizer = method.partition(" with ")
        options = {**OPTIONS, "method": name, "optimizer": optimizer or "sgd"}
        options["results-dir"] = str(tmp_path / str(len(runs)))
        grid = InProcessGrid(client_app(bound_client_fn(resolve(options).config)), 2)
        runs.append((sent(grid, options), options, {}))
    _, folders = write_sites(tmp_path / "images", "iid", 2, 0)
    given = {
        "dataset": "sites",
        "classes": ",".join(CLASSES),
        "results-dir": str(tmp_path / "results"),
    }
    options = {**OPTIONS, **given, "partition": ""}
    data = [f"folder:{folder}" for folder in folders]
    runs.append((sent(SitesInProcess(data, options), options), options, {"data": data[0]}))
    (tmp_path / "runs").write_bytes(pickle.dumps(runs))
    shown = run(sys.executable, "-c", CODE, tmp_path / "runs", env=environment(OMP_NUM_THREADS="1"))
    imported: list[list[str]] = json.loads(shown.splitlines()[-1])
    for name, modules in zip((*METHODS, "a site with images"), imported, strict=True):
        assert not [
            module for module in modules if module.startswith(("torch._dynamo", "torch._inductor"))
        ], name
        allowed = {*ALLOWED, "PIL"} if name == "a site with images" else ALLOWED
        assert {
            package for package in foreign(modules) if not package.startswith("_")
        } <= allowed, name


def sent(grid: InProcessGrid, options: dict[str, Any]) -> list[Message]:
    """Return what the node of partition 0 is sent in a run, as it was sent."""
    packed, answer = list[bytes](), grid._answer

    def noting(message: Message) -> Message:
        if message.metadata.dst_node_id == min(grid.get_node_ids()):
            packed.append(pickle.dumps(message))
        return answer(message)

    with patch.object(grid, "_answer", noting):
        serve(grid, options)
    messages = [pickle.loads(item) for item in packed]
    assert {message.metadata.message_type.partition(".")[0] for message in messages} >= {"train"}
    return messages


def foreign(modules: Sequence[str]) -> set[str]:
    """Return the packages beside Python's own, Flower's and PyTorch's."""
    return (
        {name.partition(".")[0] for name in modules}
        - sys.stdlib_module_names
        - {"torch", "flwr", "numpy"}
    )
