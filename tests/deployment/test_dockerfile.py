"""The Dockerfile's lines, executed one after another in a scratch folder.

`/srv` and `/var` are folders in it, and so is Python's environment, which sees the packages of this one. Nothing is
downloaded: `apt-get` is a program that notes what it is asked for.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.checkout import ROOT, environment, run
from tests.helpers.compose import health_check, image_environment, read_dockerfile


class Image:
    """A scratch folder in which a Dockerfile's instructions are executed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.work = folder, folder / "venv" / "bin", folder
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        (packages,) = (folder / "venv").glob("lib/*/site-packages")
        (packages / "test.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.asked = folder / "apt-get.log"
        (self.bin / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {self.asked}\n')
        (self.bin / "apt-get").chmod(0o755)
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_ARGS": ""}
        variables = {key: self.inside(value) for key, value in image_environment().items()}
        self.variables = environment(**variables, **offline)
        self.variables["PATH"] = f"{self.bin}:{self.variables['PATH']}"

    def inside(self, text: str) -> str:
        """Return text in which the image's folders are those of the scratch folder."""
        for name in ("/srv", "/var"):
            text = text.replace(name, f"{self.folder}{name}")
        return text

    def execute(self, instruction: str, text: str) -> None:
        """Execute an instruction of the Dockerfile."""
        match instruction:
            case "RUN":
                self.run("sh", "-c", self.inside(text))
            case "COPY":
                *sources, target = text.split()
                for source in sources:
                    self._copy(ROOT / source, self.work / target)
            case "WORKDIR":
                self.work = Path(self.inside(text))
                self.work.mkdir(parents=True, exist_ok=True)
            case "ENTRYPOINT":
                self.entrypoint = json.loads(text)
            case "CMD":
                self.command = json.loads(text)
            case _:
                assert instruction in ("FROM", "ENV", "ARG", "USER", "HEALTHCHECK"), instruction

    def run(self, *words: str) -> str:
        """Run a program in the image, and return what it printed."""
        return run(*words, cwd=self.work, env=self.variables)

    def exit_code(self, words: Sequence[str], **variables: str) -> int:
        """Run a program in the image with further variables, and return its exit code."""
        env = {**self.variables, **variables}
        return subprocess.run(words, cwd=self.work, env=env, capture_output=True, check=False).returncode

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    image = Image(tmp_path_factory.mktemp("image"))
    for instruction, text in read_dockerfile():
        image.execute(instruction, text)
    return image


def test_the_image_asks_for_the_proxy(image: Image) -> None:
    update, install = image.asked.read_text().splitlines()
    assert update == "update"
    assert install.split()[-1] == "nginx-light"


def test_the_project_is_baked_in(image: Image) -> None:
    place = image.run("python", "-c", "import fedbn_flwr; print(fedbn_flwr.__file__)")
    assert Path(place.strip()).is_relative_to(image.folder)
    for module in ("fedbn_flwr.strategies", "fedbn_flwr.deployment.supernode", "fedbn_flwr.clientapp"):
        image.run("python", "-c", f"import {module}")


def test_the_entrypoint_shows_the_commands_and_provisions(image: Image) -> None:
    assert image.run(*image.entrypoint, *image.command).startswith("usage: fedbn-flwr")
    example = str(ROOT / "federation.example.yaml")
    image.run(*image.entrypoint, "provision", example, "--out", "federation")
    assert (image.work / "federation/sites/west/docker-compose.yml").exists()


def test_the_health_check_tells_well_from_ill(image: Image) -> None:
    assert image.exit_code(health_check()) == 0
    assert image.exit_code(health_check(), FEDBN_HEALTH="connected 1") == 1


def test_every_user_can_write_where_services_do(image: Image) -> None:
    for name in ("home", "state", "results"):
        assert (image.folder / "srv" / name).stat().st_mode & 0o7777 == 0o1777
