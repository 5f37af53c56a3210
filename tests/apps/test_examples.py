"""The projects of apps/examples, before and after: in this process, and with `flwr run` on the
built wheel.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import BIN, ROOT, copy_checkout, run
from tests.helpers.flower_command import FlowerCommand, flower_command
from tests.helpers.flower_simulation import InMemoryGrid

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
    changed = {
        path.name
        for path in before.glob("*.*")
        if path.read_text() != (after / path.name).read_text()
    }
    assert changed == {"client_app.py", "server_app.py"}
    assert not any("fedbn_flwr" in path.read_text() for path in before.glob("*.py"))


# ---- another method, in this process -------------------------------------------------------------

NODES = 3
OPTIONS: dict[str, Any] = {
    "num-server-rounds": 3,
    "local-epochs": 1,
    "learning-rate": 0.05,
    "batch-size": 32,
}
#: whose weights would be downloaded
OPTIONS["pretrained"] = False
#: strategies, with their options: for a loop of one's own, a head in the node's state, a closure,
#: lists of arrays
OBEYED = [
    ("quickstart", "FixBN", "freeze_round=1, "),
    ("advanced", "FedProx", "mu=0.5, "),
    pytest.param("lightning", "Scaffold", "", marks=pytest.mark.slow),
    ("lightning", "FedTAN", ""),
    ("numpy-client", "FedProx", "mu=0.5, "),
    ("numpy-client", "FedTAN", ""),
]


@pytest.fixture
def modules(
    project: str, strategy: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, ModuleType]]:
    """The modules of a project with another strategy in FixBN's place, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    paths = sorted((EXAMPLES / project).glob("*.py"))
    for path in paths:
        text = path.read_text()
        if path.stem == "server_app":
            text = re.sub(r"\bFixBN\b", strategy, re.sub(r"freeze_round=[\d.]+, ", options, text))
        (tmp_path / path.name).write_text(text)
    yield {path.stem: import_module(path.stem) for path in paths}
    forget(paths)


def forget(paths: Iterable[Path]) -> None:
    """Let modules be imported again."""
    for path in paths:
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize(("project", "strategy", "options"), OBEYED)
@pytest.mark.sampled(1)
def test_nodes_obey_another_method(
    project: str, modules: dict[str, ModuleType], flower_log: pytest.LogCaptureFixture
) -> None:
    """`test_own_loop` compares the numbers of such loops with those of a `BNClient`."""
    grid = InProcessGrid(modules["client_app"].app, NODES, OPTIONS)
    modules["server_app"].app(grid, Context(1, 0, {}, RecordDict(), OPTIONS))
    assert "is left out of this round" not in flower_log.text
    heads = [grid.context(node).state.array_records.get("head") for node in grid.get_node_ids()]
    assert [head is not None for head in heads] == [project == "advanced"] * NODES
    assert project != "advanced" or heads[0] != heads[1] != heads[2]


#: strategies that a loop of one's own does not do everything for, in `advanced`, and what it should
#: do
LOOPS = [
    ("FedTAN", "", "ask.grid, messages, timeout"),
    ("FedAvg", 'statistics="exact", ', "gather.arrays"),
]


@pytest.mark.parametrize(
    ("project", "strategy", "options", "remedy"), [("advanced", *loop) for loop in LOOPS]
)
def test_a_loop_of_ones_own_is_told_what_a_method_needs(
    remedy: str, modules: dict[str, ModuleType]
) -> None:
    # statistics are of training data, without which the first round would say so
    modules["client_app"].app.training_data()(lambda message, context: ())
    grid = InProcessGrid(modules["client_app"].app, NODES, OPTIONS)
    with pytest.raises(RuntimeError, match=rf"^DecayingFedAvg needs `\w+ = strategy\.{remedy}"):
        modules["server_app"].app(grid, Context(1, 0, {}, RecordDict(), OPTIONS))


# ---- on workers, in place of Flower's simulation -------------------------------------------------

#: an argument of the strategy's `start`, before and after
GRID, WORKERS = "grid=grid,", 'grid=in_workers(grid, context, "client_app:app"),'


def seeded(project: str, target: Path, kind: str, grid: str) -> Path:
    """Copy a project, with this grid.

    Its model and its loops draw from a seed, a node and a round.
    """
    copied(project, target, kind)
    server, client = target / "server_app.py", target / "client_app.py"
    text = server.read_text().replace(GRID, grid).replace(WORKERS, grid)
    text = text.replace("    strategy = ", "    torch.manual_seed(0)\n    strategy = ", 1)
    imported = "" if kind == "after" else "from fedbn_flwr.simulation import in_workers\n"
    server.write_text(text.replace("import torch\n", f"import torch\n{imported}", 1))
    seed = (
        'torch.manual_seed(100 * msg.content["config"]["server-round"] + '
        'context.node_config["partition-id"])'
    )
    text = client.read_text().replace("    model = Net()\n", f"    {seed}\n    model = Net()\n")
    client.write_text(text.replace("from flwr.app", "import torch\nfrom flwr.app", 1))
    return target


@pytest.mark.parametrize(("project", "kind"), [("quickstart", "before"), ("advanced", "after")])
@pytest.mark.sampled(1)
def test_workers_bring_the_results_of_one_process(
    project: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flower_log: pytest.LogCaptureFixture,
) -> None:
    """Before, the project has a plain ClientApp and Flower's FedAvg."""
    folder = seeded(project, tmp_path / project, kind, WORKERS)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    models = []
    for grid in (InProcessGrid, InMemoryGrid):
        client, server = import_module("client_app"), import_module("server_app")
        server.app(grid(client.app, NODES, OPTIONS), Context(1, 0, {}, RecordDict(), OPTIONS))
        forget(folder.glob("*.py"))
        (saved,) = folder.glob("*_model.pt")
        models.append(torch.load(saved))
        saved.unlink()
        assert ("3 nodes train in" in flower_log.text) == (grid is InMemoryGrid)
    torch.testing.assert_close(models[1], models[0], rtol=1e-6, atol=1e-6)


# ---- flwr run, on the wheel ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what the projects need, and nothing of this checkout.

    Its programs.
    """
    folder = tmp_path_factory.mktemp("environment")
    checkout = copy_checkout(folder / "checkout")
    run(BIN / "uv", "build", "--quiet", "--wheel", "--out-dir", folder, cwd=checkout)
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    run(BIN / "uv", "venv", "--quiet", "--python", BIN / "python", folder / "env")
    packages = {item for project in ALL for item in needed(EXAMPLES / project)}
    run(
        BIN / "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        wheel,
        "flwr[simulation]>=1.38",
        *sorted(packages),
    )
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
    # Flower refuses underscores in the app's folder
    app = copied(project, tmp_path / project, kind)
    options = ("--federation-config", "num-supernodes=2 client-resources-num-cpus=1")
    config: dict[str, Any] = {"pretrained": False} if project == "lightning" else {}
    best = flower.home / "best_model.pt"
    best.unlink(missing_ok=True)
    shown, status = flower.run(app, *options, num_server_rounds=2, **config)
    assert status == "finished:completed", shown
    if project == "advanced":  # its own loop says nothing of rounds, and keeps the best model
        assert best.exists()
    else:
        assert "ROUND 2" in shown
    assert "Traceback" not in shown
    assert "Error" not in shown
    for name in ("final_model.pt", "best_model.pt"):
        if (model := flower.home / name).exists():
            saved = torch.load(model)
            assert all(torch.isfinite(value).all() for value in saved.values())
            if kind == "after":
                assert {value.dtype for key, value in saved.items() if "num_batches" in key} == {
                    torch.int64
                }
            model.unlink()


@pytest.mark.slow
@pytest.mark.xdist_group("flower on the wheel")
def test_workers_bring_the_results_of_flowers_simulation(
    flower: FlowerCommand, tmp_path: Path
) -> None:
    models = []
    for name, grid in {"simulation": GRID, "workers": WORKERS}.items():
        app = seeded("quickstart", tmp_path / name, "before", grid)
        options = ("--federation-config", "num-supernodes=3 client-resources-num-cpus=1")
        shown, status = flower.run(app, *options, num_server_rounds=2)
        assert status == "finished:completed", shown
        assert ("3 nodes train in" in shown) == (grid == WORKERS)
        saved = flower.home / "final_model.pt"
        models.append(torch.load(saved))
        saved.unlink()
    torch.testing.assert_close(models[1], models[0], rtol=1e-6, atol=1e-6)
