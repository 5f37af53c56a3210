"""The console command: exit codes, one line for each mistake, and help that names everything."""

import json
import os
import re
import subprocess
import sys
from argparse import _SubParsersAction
from inspect import Parameter, Signature
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import __version__
from fedbn_flwr.data import AUGMENTATIONS, DATASETS, PARTITIONS
from fedbn_flwr.deployment.cli import main as console_command
from fedbn_flwr.experiments import Config, main
from fedbn_flwr.experiments.cli import _parser
from fedbn_flwr.experiments.config import GROUPS, shared_options
from fedbn_flwr.experiments.method import SHARED, all_options, parse, split_methods
from fedbn_flwr.experiments.output.console import console
from fedbn_flwr.models import MODELS
from fedbn_flwr.norm import NORMS
from fedbn_flwr.plugins.options import option_key
from fedbn_flwr.strategies import REGISTRY, FedAvg, register_strategy
from tests.helpers.runs import run


def test_a_data_set_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--methods", "fedavg", "--dry-run", "--data-root", str(tmp_path), "--model", "mlp"]
    assert run("compare", *words, dataset="cifar10", results_dir=str(tmp_path / "results")) == 0
    shown = capsys.readouterr().out
    assert "data set 'cifar10' is not there: " in shown
    assert "?" not in shown.partition("data set")[0]
    assert (
        run(
            "compare",
            *words,
            "--local-epochs",
            "1",
            dataset="cifar10",
            results_dir=str(tmp_path / "results"),
        )
        == 0
    )
    assert "0 client steps where known" in capsys.readouterr().out


def test_the_package_is_run_as_the_command() -> None:
    command = [sys.executable, "-m", "fedbn_flwr", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == f"fedbn-flwr {__version__}\n"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert console_command(["--version"]) == 0
    assert capsys.readouterr().out == f"fedbn-flwr {__version__}\n"


def test_success_is_0_and_says_where_the_results_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", rounds="1", results_dir=str(tmp_path)) == 0
    output = capsys.readouterr()
    assert str(tmp_path) in output.out.replace("\n", "")
    assert "accuracy, %" in output.out
    assert "round 1/1, " in output.out  # line by line, where the output is redirected


def test_an_error_of_the_program_is_not_taken_for_a_mistake_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("fedbn_flwr.experiments.output.recorder.Journal.summary", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run("run", rounds="1", results_dir=str(tmp_path))
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("name", ["run", "compare", "diagnose"])
def test_help_names_every_option_with_its_default(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help-all"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    words = text.split()
    headings = [line for line in text.splitlines() if re.fullmatch("[a-z ]+:", line)]
    groups = ["options:", "run:", *(f"{group}:" for group in GROUPS)]
    assert headings == [*groups, "options of single strategies:", "examples:"]
    wanted = {*shared_options()} | set(all_options()) | {"engine", "verbose"}
    if name == "compare":
        wanted = wanted - {"method", "resume"} | {
            "methods",
            "seeds",
            "grid",
            "grid-seeds",
            "side-by-side",
        }
    if name == "diagnose":
        wanted = wanted - {"resume", "checkpoint-every", "log-to", "engine", "verbose"} | {
            "batches"
        }
        assert "--engine" not in words
    assert {f"--{key}" for key in wanted} <= set(words)
    assert f"[{Config.lr_schedule}]" in words
    # each strategy's own default and meaning
    text = " ".join(words)
    assert (
        "a round's [0.9] (fbn); weight of the steady statistics when they move towards gathered "
        "ones [0.998] " in text
    )
    assert "auto [0.5] (fixbn); when to freeze, as for fixbn; empty: never (centralized)" in text
    assert "[None]" not in words


def options_of_commands() -> set[str]:
    """Return the options of the commands that also have those of strategies, and the word that
    names a command.
    """
    names = {"command"}
    for action in _parser({})._actions:
        for parser in (
            (action.choices or {}).values() if isinstance(action, _SubParsersAction) else ()
        ):
            words = {
                word.removeprefix("--")
                for word in parser._option_string_actions
                if word.startswith("--")
            }
            names |= words if set(all_options()) < words else set()
    return names - set(all_options()) - {option_key(name) for name in SHARED}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("key", sorted(options_of_commands()))
def test_a_strategys_option_that_the_command_has_is_refused_in_one_line(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @register_strategy("taken")
    class Taken(FedAvg):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    option = Parameter(
        key.replace("-", "_"), Parameter.KEYWORD_ONLY, default=False, annotation=bool
    )
    Taken.__init__.__signature__ = Signature([option])  # type: ignore[attr-defined]
    assert main(["list"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"fedbn-flwr: strategy 'taken': the option {key!r} of its constructor is "
    )


@pytest.mark.parametrize("name", ["run", "compare"])
def test_short_help_is_one_screen_with_examples_that_can_be_run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    examples = [line.split()[1:] for line in lines if line.startswith("  fedbn-flwr ")]
    assert len(examples) == 2
    for words in examples:
        parsed = vars(_parser({}).parse_args(words))
        for method in split_methods(parsed.get("methods") or parsed["method"]):
            assert parse(method).name in REGISTRY


def test_list_names_everything_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {kind: [row["name"] for row in rows] for kind, rows in listed.items()} == {
        "strategies": list(REGISTRY),
        "normalizers": list(NORMS),
        "models": list(MODELS),
        "datasets": list(DATASETS),
        "partitions": list(PARTITIONS),
        "augmentations": list(AUGMENTATIONS),
    }
    assert [row["name"] for rows in listed.values() for row in rows if not row["about"]] == []
    (fixbn,) = [row for row in listed["strategies"] if row["name"] == "fixbn"]
    assert fixbn["paper"].startswith("Zhong, Chen and Chao, 2023")
    assert {"freeze-round", "freeze", "weighting"} <= set(fixbn["options"])


class Terminal(TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_the_list_fits_an_ascii_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(shown, "ascii", write_through=True))
    monkeypatch.setattr(console, "width", 80)
    assert main(["list"]) == 0
    text = shown.getvalue().decode("ascii")
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    forms = {kind.form for kind in PARTITIONS.values()}
    assert {line.split()[0] for line in lines} == {
        *REGISTRY,
        *NORMS,
        *MODELS,
        *DATASETS,
        *AUGMENTATIONS,
        *forms,
    }
    assert max(map(len, lines)) <= 80


def test_list_tells_all_about_one_name_or_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "fixbn"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("Zhong", "frozen statistics", "freeze-round"))
    assert main(["list", "models"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in MODELS)


def test_a_reader_that_stops_reading_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # what is left in its buffer goes nowhere when it is closed, and is no error then
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert console_command(["list", "--json"]) == 141
    assert capsys.readouterr().err == ""


def test_closed_streams_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):  # as Python has them under `<&- >&- 2>&-`
        monkeypatch.setattr(sys, name, None)
    assert console_command(["list", "--json"]) == 0
    assert console_command(["doctor", str(tmp_path)]) == 2


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What a node's process prints would be written into a file of the run."""
    code = (
        "import os, subprocess, sys\n"
        "from fedbn_flwr.deployment.cli import main\n"
        "main(['--version'])\n"
        f"file = open({str(tmp_path / 'rows')!r}, 'w')\n"
        "opens = 'import os; os._exit(os.open(os.devnull, os.O_RDONLY))'\n"
        "there = subprocess.run([sys.executable, '-c', opens]).returncode\n"
        "os._exit(min(file.fileno(), there))\n"
    )
    closed = subprocess.run(f'exec {sys.executable} -c "{code}" <&- >&- 2>&-', shell=True)
    assert closed.returncode > 2
