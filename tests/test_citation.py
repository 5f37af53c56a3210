"""CITATION.cff, the strategies and the page on methods name the same papers."""

import re
import tomllib

import pytest
import yaml

from fedbn_flwr.strategies import REGISTRY
from tests.helpers.checkout import ROOT

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_it_cites_the_version_and_the_licence_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert CITATION["version"] == project["version"]
    # Flower's bundles want the name of a file in the place of the licence's
    assert project["license"] == {"file": "LICENSE"}
    name = (ROOT / "LICENSE").read_text().split("Version")[0].strip()
    assert (CITATION["license"], name) == ("Apache-2.0", "Apache License")
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)


def test_the_papers_are_those_that_strategies_name() -> None:
    cited = {
        item["value"] for paper in CITATION["references"] for item in paper.get("identifiers", [])
    }
    named = {
        text
        for kind in REGISTRY.values()
        for text in re.findall(r"arXiv:[\d.]+\d", vars(kind).get("paper", ""))
    }
    linked = re.findall(
        r"\[(arXiv:[\d.]+)\]\(https://arxiv.org/abs/([\d.]+)\)",
        (ROOT / "docs/methods.md").read_text(),
    )
    assert cited == named == {text for text, _ in linked}
    assert all(text == f"arXiv:{number}" for text, number in linked)


@pytest.mark.parametrize("name", REGISTRY)
def test_each_method_has_its_paper_with_full_names(name: str) -> None:
    """`paper` names the first author and the year."""
    named = re.match(r"(?:\w\. )?(\w+).*?(\d{4})", REGISTRY[name].paper)
    if named is None:
        assert name in ("centralized", "standalone", "fed3r-personal")
        return
    papers = [
        paper
        for paper in CITATION["references"]
        if named[1] in paper["authors"][0]["family-names"].split()
    ]
    # of a preprint, the year of either
    assert any(abs(paper["year"] - int(named[2])) <= 1 for paper in papers)
    assert all(author["given-names"] for paper in papers for author in paper["authors"])
