"""Folders and files that somebody sent: what is written into them stays in them, and what they say
is only text.
"""

import csv
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.output.run_folder import RunFolder, read_json, read_rounds
from tests.helpers.runs import run, run_in

#: what changes a terminal's colour
ESCAPE = "\x1b[31m"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run."""
    folder = tmp_path_factory.mktemp("study")
    assert run("compare", "--methods", "fedavg", results_dir=str(folder), checkpoint_every="1") == 0
    return folder


@pytest.fixture
def sent(study: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder, as if somebody had sent it."""
    folder = tmp_path / "sent"
    shutil.copytree(study, folder)
    return folder


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command refuses."""
    capsys.readouterr()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", ["lock", "curves.png", "study.json.partial"])
@pytest.mark.parametrize("target", ["a file", "nothing"])
def test_a_command_writes_through_no_link_in_the_folder_of_a_study(
    name: str, target: str, sent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    if target == "a file":
        kept.write_text("mine")
    (sent / name).unlink(missing_ok=True)
    (sent / name).symlink_to(kept)
    line = refused(
        ["compare", "--methods", "fedavg", "--rounds", "1", "--results-dir", str(sent)], capsys
    )
    assert (
        line == f"fedbn-flwr: {sent / name} is a link, and results are not written through links: "
        "remove it"
    )
    assert kept.exists() == (target == "a file")
    assert not kept.exists() or kept.read_text() == "mine"


def test_a_report_replaces_nothing_behind_a_link(
    sent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (sent / "report").mkdir()
    (sent / "report" / "runs.csv.partial").symlink_to(kept)
    line = refused(["report", str(sent), "--format", "csv"], capsys)
    assert line.startswith(f"fedbn-flwr: {sent / 'report' / 'runs.csv.partial'} is a link")
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["rounds.jsonl.partial", "checkpoint-partial", "personal", "states", "before"]
)
def test_a_run_that_goes_on_writes_through_no_link(
    name: str, sent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_in(sent)
    (folder / "summary.json").unlink()
    kept = tmp_path / "kept"
    kept.mkdir()
    (folder / name).symlink_to(kept)
    options = {"method": "fedavg", "results_dir": str(sent), "checkpoint_every": "1"}
    for words in ((), ("--anew",)):
        capsys.readouterr()
        assert run("run", *words, **options) == 2
        assert capsys.readouterr().err.startswith(f"fedbn-flwr: {folder / name} is a link")
    assert not any(kept.iterdir())


def test_what_a_folder_says_reaches_a_terminal_as_plain_text(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((sent / "study.json").read_text())
    for each in content["runs"]:
        each["label"] = f"{ESCAPE}red"
    (sent / "study.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["results", str(sent)]) == 0
    shown = capsys.readouterr().out
    assert "red" in shown
    assert "\x1b" not in shown
    (sent / "mine.yaml").write_text('methods: {"\\e[31mred": fedavg}')
    assert main(["reproduce", str(sent / "mine.yaml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "red" in shown
    assert "\x1b" not in shown


def test_a_cell_of_a_report_is_no_formula(sent: Path) -> None:
    content = json.loads((sent / "study.json").read_text())
    for each in content["runs"]:
        each["label"] = '=HYPERLINK("http://somewhere")'
    (sent / "study.json").write_text(json.dumps(content))
    summary = json.loads((run_in(sent) / "summary.json").read_text())
    summary["domain-accuracy"] = {"=1+1": 0.5, "@b": 0.4}
    (run_in(sent) / "summary.json").write_text(json.dumps(summary))
    assert main(["report", str(sent), "--format", "csv"]) == 0
    for path in (sent / "report").glob("*.csv"):
        with path.open() as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "@"))], path


def test_a_file_that_is_nested_without_end_counts_as_no_file(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = "[" * 200_000
    (sent / "deep.json").write_text(deep)
    assert read_json(sent / "deep.json") is None
    (sent / "rounds.jsonl").write_text(f'{{"round": 1}}\n{deep}\n')
    assert len(read_rounds(sent)) == 1
    (sent / "deep.yaml").write_text(deep)
    assert "is not YAML" in refused(["reproduce", str(sent / "deep.yaml")], capsys)
    (sent / "study.json").write_text(deep)
    assert "is not the record of a study" in refused(["results", str(sent)], capsys)


def test_a_label_in_a_picture_is_no_mathematics(sent: Path) -> None:
    content = json.loads((sent / "study.json").read_text())
    for each in content["runs"]:
        each["label"] = "$x^{$"
        each["method"] = "$y_{$"
    (sent / "study.json").write_text(json.dumps(content))
    assert main(["report", str(sent), "--format", "html,latex"]) == 0


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has all of its rounds and no end."""
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "finish", Mock(side_effect=KeyboardInterrupt))
        assert (
            run("run", "--method", "fedavg", results_dir=str(folder), checkpoint_every="1") == 130
        )
    return run_in(folder)


#: what a part of `config.json` can be edited to
OTHERS = (None, 3, "x", [1], {"a": 1})
PLACES = (
    ("options",),
    ("asked",),
    ("asked", "engine"),
    ("options", "rounds"),
    ("asked", "options", "lr"),
)
#: of the same kinds
OTHER_PLACES = (
    ("versions",),
    ("asked", "options"),
    ("asked", "files"),
    ("asked", "choice"),
    ("options", "norm-options"),
    ("asked", "options", "norm-options"),
)


@pytest.mark.parametrize(
    "place",
    [*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in OTHER_PLACES)],
    ids=".".join,
)
@pytest.mark.sampled(1)
def test_a_configuration_that_was_edited_ends_in_one_line_or_counts_as_none(
    place: tuple[str, ...], half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((half / "config.json").read_text())
    folder = tmp_path / "sent"
    for other in OTHERS:
        edited = json.loads(json.dumps(content))
        part = edited
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = other
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(half, folder)
        (folder / "config.json").write_text(json.dumps(edited))
        for words in (["results", str(folder)], ["report", str(folder), "--format", "csv"]):
            assert main(words) == 0, other
        capsys.readouterr()
        code = main(["run", "--resume", str(folder)])
        lines = capsys.readouterr().err.splitlines()
        is_usual = place[-1] in ("rounds", "choice", "versions", "files", "lr")
        assert code == 2 or is_usual, other
        assert len([line for line in lines if line.startswith("fedbn-flwr: ")]) == (code == 2), (
            other
        )
