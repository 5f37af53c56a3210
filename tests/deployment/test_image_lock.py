"""The versions in the image are those that the project allows, and the build takes them."""

import tomllib

from packaging.requirements import Requirement

from tests.helpers.checkout import ROOT

EXTRAS = ("cli", "models", "data", "tensorboard", "timm")


def test_each_requirement_of_the_image_is_locked_to_a_version_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        *(requirement for name in EXTRAS for requirement in extras[name]),
    ]
    lines = (ROOT / "image.lock").read_text().split()
    locked = dict(line.split("==") for line in lines)
    for text in asked:
        requirement = Requirement(text)
        if requirement.name != "fedbn-flwr":
            assert requirement.specifier.contains(locked[requirement.name]), text


def test_the_build_takes_the_lock() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "-c image.lock" in dockerfile
    assert "!image.lock" in (ROOT / ".dockerignore").read_text().split()
    for name in EXTRAS:
        assert f"e['{name}']" in dockerfile
