"""The projects of apps/examples, before and after: in this process, and with `flwr run` on the built wheel."""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import state
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.batch_plan import BatchLoader
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.clientapp.mods import ClientAppCallable
from fedbn_flwr.data import Split
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction
from tests.helpers.checkout import BIN, ROOT, copy_checkout, run
from tests.helpers.flower_command import FlowerCommand, flower_command

EXAMPLES = ROOT / "apps" / "examples"
ALL = sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))


def needed(folder: Path) -> list[str]:
    """Return the packages that a project asks for."""
    return list(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"])


def copied(project: str, target: Path, kind: str = "after") -> Path:
    """Copy a project, as it is or as it was before."""
    copytree(EXAMPLES / project, target, ignore=lambda *_: ["__pycache__"])
    if kind == "before":
        run("git", "apply", "--reverse", "-p0", "changes.diff", cwd=target)
    return target


@pytest.mark.parametrize("project", ALL)
def test_models_data_and_loops_are_not_touched(project: str, tmp_path: Path) -> None:
    before, after = copied(project, tmp_path / "before", "before"), EXAMPLES / project
    changed = {path.name for path in before.glob("*.*") if path.read_text() != (after / path.name).read_text()}
    assert changed == {"client_app.py", "server_app.py", "pyproject.toml"}
    assert [*needed(before), "fedbn-flwr>=0.1"] == needed(after)
    assert not any("fedbn_flwr" in path.read_text() for path in before.glob("*.py"))


# ---- another method, in this process ---------------------------------------------------------------------------------

NODES = 3
#: so large that every step is on all of a node's data, and an epoch is one step
WHOLE = 10_000
OPTIONS: dict[str, Any] = {"num-server-rounds": 3, "local-epochs": 2, "learning-rate": 0.05, "batch-size": WHOLE}
#: strategies, with their options: for a loop of one's own, a head in the node's state, a closure, lists of arrays
OBEYED = [
    ("quickstart", "FixBN", "freeze_round=1, "),
    ("advanced", "FedTAN", ""),
    ("lightning", "Scaffold", ""),
    ("lightning", "FedTAN", ""),
    ("numpy-client", "FedProx", "mu=0.5, "),
    ("numpy-client", "FedTAN", ""),
]


@pytest.fixture
def modules(
    project: str, strategy: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, ModuleType]]:
    """The modules of a project with another strategy in FixBN's place, in the current folder and in float64."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    paths = sorted((EXAMPLES / project).glob("*.py"))
    for path in paths:
        text = path.read_text()
        if path.stem == "server_app":
            text = re.sub(r"\bFixBN\b", strategy, text.replace("freeze_round=0.5, ", options))
        (tmp_path / path.name).write_text(text)
    torch.set_default_dtype(torch.float64)
    try:
        yield {path.stem: import_module(path.stem) for path in paths}
    finally:
        torch.set_default_dtype(torch.float32)
        for path in paths:
            sys.modules.pop(path.stem, None)


class Recorder(InProcessGrid):
    """Keeps the arrays of every reply in training."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__(app, NODES, OPTIONS)
        self.replied: list[dict[str, State]] = []

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        assert reply.has_content(), reply.error.reason
        if message.metadata.message_type.startswith("train"):
            self.replied.append(arrays_of(reply.content))
        return reply

    def kept(self) -> list[dict[str, State]]:
        """Return what the nodes keep for their strategy."""
        memories = (Memory(self.context(node).state) for node in self.get_node_ids())
        return [arrays_of(RecordDict(dict(memory.kept("")))) for memory in memories]


def arrays_of(content: RecordDict) -> dict[str, State]:
    return {name: state.from_record(record) for name, record in content.array_records.items()}


class WholeData(BNClient):
    """Takes each step on all data, as the projects do here."""

    def plan(self, instruction: Instruction) -> BatchLoader:
        return super().plan(replace(instruction, batch_size=WHOLE))


def bn_client_app(modules: dict[str, ModuleType], own_head: bool) -> ClientApp:
    """Return the app of `BNClient`s with a project's model, data and epochs, and if it has one its nodes' own head."""
    model = modules["client_app"].app.structure
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))

    def client(context: Context) -> BNClient:
        part = int(context.node_config["partition-id"])
        loaded = (loader.dataset.tensors for loader in modules["task"].load_data(part, NODES, WHOLE))
        train, test = (Split(inputs.float(), labels) for inputs, labels in loaded)
        return WholeData(model, train, test=test, partition_id=part, memory=context.state, device="cpu")

    def as_the_project(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config: Any = message.content["config"]
        config["local-epochs"] = OPTIONS["local-epochs"]
        if own_head and "head" in context.state and "arrays" in message.content:
            message.content["arrays"] = ArrayRecord({**message.content["arrays"], **context.state["head"]})
        reply = call_next(message, context)
        if own_head and reply.has_content() and "arrays" in reply.content:
            trained = reply.content.array_records["arrays"].items()
            context.state["head"] = ArrayRecord({name: array for name, array in trained if name.startswith("fc.")})
        return reply

    return client_app(client, mods=[as_the_project])


@pytest.mark.parametrize(("project", "strategy", "options"), OBEYED)
def test_nodes_send_and_keep_what_bn_clients_do(project: str, modules: dict[str, ModuleType]) -> None:
    grids = []
    for app in (modules["client_app"].app, bn_client_app(modules, project == "advanced")):
        torch.manual_seed(0)
        grids.append(Recorder(app))
        modules["server_app"].app(grids[-1], Context(1, 0, {}, RecordDict(), OPTIONS))
    found, wanted = grids
    assert wanted.replied
    torch.testing.assert_close(found.replied, wanted.replied, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.kept(), wanted.kept(), rtol=1e-10, atol=1e-12)


# ---- flwr run, on the wheel ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what the projects need, and nothing of this checkout; its programs."""
    folder = tmp_path_factory.mktemp("environment")
    checkout = copy_checkout(folder / "checkout")
    run(BIN / "uv", "build", "--quiet", "--wheel", "--out-dir", folder, cwd=checkout)
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    run(BIN / "uv", "venv", "--quiet", "--python", BIN / "python", folder / "env")
    packages = {item for project in ALL for item in needed(EXAMPLES / project)}
    run(BIN / "uv", "pip", "install", "--quiet", "--python", python, wheel, "flwr[simulation]>=1.38", *sorted(packages))
    return python.parent


@pytest.fixture(scope="module")
def flower(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerCommand]:
    with flower_command(tmp_path_factory.mktemp("flower") / "home", installed) as flower:
        yield flower


@pytest.mark.slow
@pytest.mark.xdist_group("flower on the wheel")
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("project", ALL)
def test_flwr_run_completes(project: str, kind: str, flower: FlowerCommand, tmp_path: Path) -> None:
    app = copied(project, tmp_path / project, kind)  # Flower refuses underscores in the app's folder
    options = ("--federation-config", "num-supernodes=2 client-resources-num-cpus=1")
    shown, status = flower.run(app, *options, num_server_rounds=2)
    assert status == "finished:completed", shown
    assert "ROUND 2" in shown
    assert "Traceback" not in shown
    assert "Error" not in shown
    for name in ("final_model.pt", "best_model.pt"):
        if (model := flower.home / name).exists():
            saved = torch.load(model)
            assert all(torch.isfinite(value).all() for value in saved.values())
            if kind == "after":
                assert {value.dtype for key, value in saved.items() if "num_batches" in key} == {torch.int64}
            model.unlink()
