"""The projects of apps/examples, before and after: in this process, and with `flwr run` on the built wheel."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.helpers.checkout import BIN, copy_checkout, run
from tests.helpers.flower_command import FlowerCommand
from tests.plug_in_table import BEGIN, END, EXAMPLES, PAGE, PROJECTS, cell, row, sources

ALL = sorted(PROJECTS)
#: cells with the numbers of their lines: a loop of one's own, a head in the node's state, a closure, lists of arrays
QUICK = {
    ("quickstart", "fixbn"): "+4 −4",
    ("advanced", "fedtan"): "+4 −4",
    ("lightning", "scaffold"): "+4 −4",
    ("lightning", "fedtan"): "+4 −4",
    ("numpy-client", "fedprox"): "+19 −25",
    ("numpy-client", "fedtan"): "+19 −25",
}


def test_every_project_is_in_the_table() -> None:
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/before")) == ALL


@pytest.mark.parametrize("project", ALL)
def test_models_data_and_loops_are_not_touched(project: str) -> None:
    before, after = EXAMPLES / project / "before", EXAMPLES / project / "after"
    changed = {path.name for path in before.iterdir()} - {"__pycache__"}
    assert changed == {"client_app.py", "server_app.py", "pyproject.toml"}
    assert changed < {path.name for path in after.iterdir()}
    assert all((before / name).read_text() != (after / name).read_text() for name in changed)
    needs = [
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"] for folder in (before, after)
    ]
    assert [*needs[0], "fedbn-flwr>=0.1"] == needs[1]
    assert not any("fedbn_flwr" in text for text in sources(project, "before").values())


@pytest.mark.parametrize(("project", "method"), QUICK)
def test_a_project_obeys_a_method(project: str, method: str) -> None:
    assert cell(project, method) == QUICK[project, method]


@pytest.mark.slow
@pytest.mark.parametrize("project", ALL)
def test_the_documented_table_is_what_the_projects_show(project: str) -> None:
    page = PAGE.read_text()
    shown = page[page.index(BEGIN) : page.index(END)]
    assert row(project) in shown.splitlines(), "write it by `python -m tests.plug_in_table`"


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
    needed = {
        item
        for project in ALL
        for item in tomllib.loads((EXAMPLES / project / "before" / "pyproject.toml").read_text())["project"][
            "dependencies"
        ]
    }
    run(BIN / "uv", "pip", "install", "--quiet", "--python", python, wheel, "flwr[simulation]>=1.38", *sorted(needed))
    return python.parent


@pytest.fixture(scope="module")
def flower(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerCommand]:
    flower = FlowerCommand.prepare(tmp_path_factory.mktemp("flower") / "home", installed)
    try:
        yield flower
    finally:
        flower.stop()


@pytest.mark.slow
@pytest.mark.xdist_group("flower on the wheel")
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("project", ALL)
def test_flwr_run_completes(project: str, kind: str, flower: FlowerCommand, tmp_path: Path) -> None:
    # Flower refuses underscores in the app's folder
    app = tmp_path / project
    for name in dict.fromkeys(["after", kind]):
        copytree(EXAMPLES / project / name, app, ignore=lambda *_: ["__pycache__"], dirs_exist_ok=True)
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
