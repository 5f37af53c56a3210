"""A method of a user's own, both halves in one file outside of this package, runs like those of the
project.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedbn_flwr.experiments import UsageError, main, resolve
from fedbn_flwr.experiments.sites.own_model import load_own_model
from fedbn_flwr.plugins import described
from fedbn_flwr.strategies import FedTAN, register_strategy
from fedbn_flwr.wire import Instruction
from tests.helpers.deaths import Death, dying
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.registered import registries_restored
from tests.helpers.runs import model_bytes, run, run_in

pytestmark = pytest.mark.usefixtures("registered")
TOY = "tests.helpers.toy_method"


def model_of(folder: Path, *words: str, **options: str) -> dict[str, Tensor]:
    """The final model of a run."""
    assert run("run", *words, results_dir=str(folder), **options) == 0
    return load_file(run_in(folder) / "model.safetensors")


def test_it_is_the_method_that_it_says_with_options_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = model_of(tmp_path / "inside", plugins=TOY, method="toy:rate=0.5")
    outside = model_of(tmp_path / "outside", plugins=TOY, method="toy", rate="0.5")
    assert distance(inside, outside) == 0
    # weight decay in the optimizer is weight decay by the rule
    decay = model_of(tmp_path / "decay", method="fedavg", weight_decay="0.5")
    assert distance(inside, decay) < 1e-6
    assert distance(inside, model_of(tmp_path / "plain", method="fedavg")) > 1e-2
    capsys.readouterr()
    assert main(["list", "--json", "--plugins", TOY]) == 0
    assert "toy" in [row["name"] for row in json.loads(capsys.readouterr().out)["strategies"]]
    with pytest.raises(SystemExit):
        run("run", "--help-all", plugins=TOY)
    helped = " ".join(capsys.readouterr().out.split())
    assert "--rate RATE share of a weight that is added to its gradient [0.1] (toy)" in helped


def test_a_rule_works_in_a_layer_wise_method() -> None:
    resolve({"plugins": TOY, "method": "toy"})

    @register_strategy("toy-tan")
    class ToyTan(FedTAN):
        def instruct(self, instruction: Instruction) -> Instruction:
            return super().instruct(instruction).with_rule(shrink_rate=0.5)

    by_rule = Federation(make_model()).run(ToyTan(), 2)
    by_decay = Federation(make_model()).run(FedTAN(), 2, weight_decay=0.5)
    assert distance(by_rule, by_decay) < 1e-12
    assert distance(by_rule, Federation(make_model()).run(FedTAN(), 2)) > 1e-3


# ---- code that files name ------------------------------------------------------------------------

HINT = "names code of brought; if you trust it, add --plugins brought"


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has a module with a method."""
    lines = (
        "from tests.helpers.toy_method import Toy, register_strategy",
        "@register_strategy('brought')",
    )
    (tmp_path / "brought.py").write_text("\n".join([*lines, "class Brought(Toy): ..."]))
    os.utime(tmp_path / "brought.py", (1, 1))  # before this process began
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("brought")
@pytest.mark.parametrize(
    "content",
    [
        {"methods": ["brought"], "options": {"plugins": "brought", "rate": 0.1}},
        {"methods": ["fedavg"], "options": {"model": "brought:net"}},
        {"methods": ["fedavg:objective=brought:loss"]},
        {"methods": ["fedavg"], "grid": {"dataset": ["digits", "brought:data"]}},
        # what is loaded already is no less another's choice, and names are known per option
        {"methods": ["fedavg"], "options": {"dataset": "builtins:breakpoint"}},
        {"methods": ["fedavg"], "options": {"dataset": "numpy.linalg:test"}},
        {"methods": ["fedavg"], "options": {"model": "digits:net"}},
        {"methods": ["fedavg"], "options": {"model": "small-cnn:net"}},
        {"methods": ["fedavg"], "options": {"dataset": "timm:net"}},
        {"methods": ["fedavg"], "options": {"objective": "torchvision:net"}},
        {"methods": ["fedavg:model=sys:exit"]},
        {"methods": ["fedavg"], "options": {"model": "digits:net", "dataset": "digits:net"}},
    ],
)
def test_a_recipe_imports_nothing_by_itself(
    content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(json.dumps(content))
    path = [*sys.path]
    for words in ((), ("--dry-run",)):
        assert main(["reproduce", "mine.yaml", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fedbn-flwr: recipe mine")
        assert re.search(r"names code of ([\w.-]+); if you trust it, add --plugins \1$", line)
    assert "brought" not in sys.modules
    assert sys.path == path


@pytest.mark.usefixtures("brought")
@pytest.mark.parametrize(
    "named", [{"plugins": "brought", "method": "brought"}, {"dataset": "brought:data"}]
)
def test_results_import_nothing_by_themselves(named: dict[str, str]) -> None:
    sys.path.insert(0, str(Path.cwd()))
    options = {"method": "fedavg:lr-schedule=0.1@0.5", "rounds": 4, **named}
    about = {"options": json.dumps(options), "about": json.dumps({"shape": [1, 8, 8]})}
    save_file({"weight": torch.zeros(1)}, "own.safetensors", about)
    with pytest.raises(UsageError, match=f"own.safetensors {HINT}"):
        load_own_model("own.safetensors")
    assert "brought" not in sys.modules


@pytest.mark.usefixtures("brought")
def test_plugins_are_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"plugins": "brought", "method": "brought", "rate": "0.2", "checkpoint_every": "1"}
    with registries_restored():
        with dying(0) as whole:
            assert run("run", **options, results_dir="whole") == 0
        with dying(int(0.9 * whole.count)), pytest.raises(Death):
            run("run", **options, results_dir="first")
    Path("mine.json").write_text(
        json.dumps(json.loads(Path("first/study.json").read_text())["recipe"])
    )
    for words in (["run", "--resume", "first"], ["reproduce", "mine.json"]):
        sys.path[:] = [folder for folder in sys.path if folder != str(Path.cwd())]
        with registries_restored():
            assert main(words) == 2
            assert HINT in capsys.readouterr().err
            assert "brought" not in sys.modules
        assert str(Path.cwd()) not in sys.path
        with registries_restored():
            assert (
                main(
                    [
                        *words,
                        "--plugins",
                        "brought",
                        *(["--results-dir", "second"] * (words[0] != "run")),
                    ]
                )
                == 0
            )
    assert model_bytes(Path("first")) == model_bytes(Path("second")) == model_bytes(Path("whole"))


def test_an_error_is_told_with_the_line_of_the_users_code_that_led_to_it() -> None:
    """Not with torch's, in which it was raised."""

    def forward() -> Tensor:
        return nn.Sequential(nn.Linear(2, 2))(torch.zeros(1, 3))  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError) as caught:
        forward()
    assert described(caught.value).endswith(
        f"({__file__}, line {forward.__code__.co_firstlineno + 1})"
    )
