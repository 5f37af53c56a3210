"""`from fedbn_flwr.strategies import FedAvg` in an editable install, a Flower bundle and a wheel.

The last beside a user's own `strategies` and `apps`. Nothing here needs a network.
"""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from fedbn_flwr.deployment.cli import main
from tests.helpers.checkout import ROOT, copy_checkout, environment, run

#: prints where each of the modules named on the command line comes from
WHERE = (
    "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in "
    "sys.argv[1:]), sep='\\n')"
)
#: before it: a folder serves as site-packages, before the environment's own, in which this project
#: is installed too
INSTALLED = (
    "import site, sys; known = len(sys.path); site.addsitedir({!r}); sys.path[1:1] = "
    "sys.path[known:]; "
)
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index")
#: what extras bring and the core does without; `rich` and `yaml` come with Flower
EXTRAS = {"datasets", "matplotlib", "pandas", "ray", "safetensors", "scipy", "sklearn", "timm"}
EXTRAS |= {"torchmetrics", "torchvision"}
#: what a checkout and a bundle hold side by side, and a wheel one inside the other
SOURCES = ("fedbn_flwr", "strategies")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("clone") / "fedbn-flwr")


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site-packages")
    run(*PIP, "install", *OFFLINE, "--target", target, wheel)
    return target


@pytest.fixture
def user_project(tmp_path: Path) -> Path:
    """A project whose folders have the names of ours."""
    for name in ("strategies", "experiments", "apps"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    return tmp_path


def build_wheel(source: Path, target: Path) -> Path:
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", target, source)
    (built,) = target.glob("*.whl")
    return built


def where(
    *modules: str, cwd: Path, site: Path | None = None, path: Path | None = None
) -> list[Path]:
    """The files of modules, imported by a new interpreter in a folder."""
    code = (INSTALLED.format(str(site)) if site else "") + WHERE
    env = environment(**({"PYTHONPATH": str(path)} if path else {}))
    return [
        Path(line)
        for line in run(sys.executable, "-c", code, *modules, cwd=cwd, env=env).splitlines()
    ]


@pytest.mark.slow
def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    run(*PIP, "install", *OFFLINE, "--no-build-isolation", "--target", site, "--editable", checkout)
    names = ("fedbn_flwr.strategies", "strategies.fedavg", "fedbn_flwr.experiments")
    assert {file.is_relative_to(checkout) for file in where(*names, cwd=tmp_path, site=site)} == {
        True
    }


@pytest.fixture(scope="module")
def unpacked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a bundle for Flower."""
    unpacked = tmp_path_factory.mktemp("bundle")
    # what `flwr build` writes
    with ZipFile(BytesIO(build_fab_from_disk(checkout))) as archive:
        archive.extractall(unpacked)
    return unpacked


def test_bundle(checkout: Path, unpacked: Path) -> None:
    names = {".info", "LICENSE", "pyproject.toml", *SOURCES, "apps"}
    assert {path.name for path in unpacked.iterdir()} == names
    assert python_files(unpacked) == python_files(checkout)
    # what Flower's Hub takes: the newest format, for a version of Flower, with the licence's text
    project = tomllib.loads((unpacked / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert (app["fab-format-version"], app["flwr-version-target"]) == (1, "1.42.0")
    assert project["project"]["license"] == {"file": "LICENSE"}
    assert "Apache License" in (unpacked / "LICENSE").read_text()


@pytest.mark.slow
def test_bundle_is_imported(unpacked: Path, tmp_path: Path) -> None:
    names = ("fedbn_flwr.strategies", "strategies.fedavg", "apps.server", "apps.client")
    assert {
        file.is_relative_to(unpacked) for file in where(*names, cwd=tmp_path, path=unpacked)
    } == {True}


@pytest.mark.slow
def test_wheel_holds_one_module_with_everything_in_it(wheel: Path, checkout: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fedbn_flwr"}
    assert "fedbn_flwr/py.typed" in names
    doors = {"fedbn_flwr/strategies.py"}
    sources = {name for name in python_files(checkout) if not name.startswith("apps/")} - doors
    inside = {name if name.startswith("fedbn_flwr/") else f"fedbn_flwr/{name}" for name in sources}
    assert {name for name in names if name.endswith(".py")} == inside


@pytest.mark.slow
def test_console_command_of_the_wheel(site_packages: Path, user_project: Path) -> None:
    command, env = site_packages / "bin" / "fedbn-flwr", environment(PYTHONPATH=str(site_packages))
    (user_project / "mine.py").write_text(
        """
import sys
from fedbn_flwr.data import load

def few():
    with open("where", "w") as file:
        print(*(sys.modules[f"fedbn_flwr.{name}"].__file__ for name in ("experiments", "strategies.fedavg")), file=file)
    return load("digits").validation_split(0.5, seed=1)
"""
    )
    options = ("--dataset", "mine:few", "--model", "mlp", "--rounds", "1", "--results-dir", "here")
    run(command, "run", *options, cwd=user_project, env=env)
    (summary,) = (user_project / "here").glob("*/summary.json")
    assert json.loads(summary.read_text())["dataset"] == "mine:few"
    files = (user_project / "where").read_text().split()
    inside = site_packages / "fedbn_flwr"
    assert files == [
        str(inside / "experiments" / "__init__.py"),
        str(inside / "strategies" / "fedavg.py"),
    ]


@pytest.mark.slow
def test_wheel_by_way_of_a_source_distribution_is_the_same(
    checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "sdist",
        "--directory",
        tmp_path,
        cwd=checkout,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        # from Python 3.11.4 on, one is asked to say so
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        source.extractall(tmp_path / "source", **safely)
    (unpacked,) = (tmp_path / "source").iterdir()
    again = build_wheel(unpacked, tmp_path / "wheel")
    assert contents(again) == contents(wheel)


def test_links_of_the_readme_on_a_package_index_lead_into_the_repository() -> None:
    project = ProjectMetadata(str(ROOT), PluginManager()).core
    root = re.escape(project.urls["Repository"])
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", project.readme)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text()))
    ours = [
        (mark, re.fullmatch(rf"{root}/(raw|blob)/v{project.config['version']}/([^#]*).*", to))
        for mark, to in links
    ]
    assert all(
        found or to.startswith("https://") for (_, found), (_, to) in zip(ours, links, strict=True)
    )
    inside = [(mark, found[1], found[2]) for mark, found in ours if found]
    assert len(inside) > 10
    assert [
        path
        for mark, kind, path in inside
        if (kind == "raw") != (mark == "!") or not (ROOT / path).exists()
    ] == []


def test_continuous_integration_runs_the_pythons_that_the_package_supports() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    names = [
        text.rpartition(" ")[2]
        for text in ProjectMetadata(str(ROOT), PluginManager()).core.classifiers
    ]
    assert workflow["jobs"]["ci"]["strategy"]["matrix"]["python"] == [
        name for name in names if name.startswith("3.")
    ]
    assert workflow["jobs"]["ci"]["steps"][-1] == {"run": ".ci/run"}


#: runs a program as if none of the packages of extras were installed
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({}))\n"


def test_the_core_needs_flower_torch_and_numpy_only(tmp_path: Path) -> None:
    program = (
        WITHOUT.format(sorted(EXTRAS))
        + """
import torch
from flwr.app import ConfigRecord
from torch import nn
from fedbn_flwr import models, norm, state, transports
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import ClientApp, client_app, numpy_client_app
from fedbn_flwr.data import Split
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.strategies import FedTAN, FedWon, prepare

def client(context):
    split = Split(torch.randn(12, 2, 6, 6), torch.arange(12) % 3)
    return BNClient(make(), split, partition_id=context.node_config["partition-id"], memory=context.state)

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

grid = StackedGrid(client_app(client), 3, {})
result = FedTAN(fraction_evaluate=0.0).start(
    grid, state.to_record(make().state_dict()), 2, train_config=ConfigRecord({"lr": 0.1})
)
assert int(result.arrays["1.num_batches_tracked"].numpy()) > 0
assert not norm.bn_layers(prepare(make(), FedWon))
"""
    )
    run(sys.executable, "-c", program, cwd=tmp_path, env=environment())


#: packages of extras, with commands that need them
MISSING: dict[str, tuple[tuple[str, ...], str]] = {
    "ray": (("run", "--rounds", "1", "--engine", "ray"), "simulation"),
    "tensorboard": (("run", "--rounds", "1", "--log-to", "tensorboard"), "tensorboard"),
    "torchvision": (("run", "--rounds", "1", "--model", "resnet18"), "models"),
    "wandb": (("compare", "--methods", "fedavg", "--rounds", "1", "--log-to", "wandb"), "wandb"),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_extra_is_one_line_that_names_it(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    # another test may have had it imported
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    arguments, extra = MISSING[package]
    assert main(arguments) == 2
    line = f"fedbn-flwr: {package} is not installed: pip install '.[{extra}]' in the clone"
    assert capsys.readouterr().err.splitlines()[-1:] == [line]


COMMAND = "from fedbn_flwr.deployment.cli import main\nsys.exit(main({}))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "program", "extra"),
    [
        ("rich", COMMAND.format(["list"]), "cli"),
        ("sklearn", COMMAND.format(["run", "--dataset", "digits-domains"]), "data"),
        ("safetensors", "from fedbn_flwr import compare", "cli"),
        ("safetensors", "from fedbn_flwr import run", "cli"),
    ],
)
def test_so_is_one_that_this_process_has_imported(
    package: str, program: str, extra: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", WITHOUT.format([package]) + program]
    ended = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert ended.returncode == (2 if "main" in program else 1)
    wanted = f": {package} is not installed: pip install '.[{extra}]' in the clone"
    assert ended.stderr.splitlines()[-1].endswith(wanted)


def contents(wheel: Path) -> dict[str, int]:
    """Names and checksums; a RECORD lists the others, in an order of its own."""
    with ZipFile(wheel) as archive:
        return {
            item.filename: item.CRC
            for item in archive.infolist()
            if not item.filename.endswith("RECORD")
        }


def python_files(root: Path) -> set[str]:
    found = [path for folder in SOURCES for path in (root / folder).rglob("*.py")] + list(
        (root / "apps").glob("*.py")
    )
    return {path.relative_to(root).as_posix() for path in found}
