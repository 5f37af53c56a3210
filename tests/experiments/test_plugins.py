"""A method of a user's own, both halves in one file outside of this package, runs like those of the project."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from fedbn_flwr.experiments import main, resolve
from fedbn_flwr.strategies import FedTAN, register_strategy
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.runs import run, run_in

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
