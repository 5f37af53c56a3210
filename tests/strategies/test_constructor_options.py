"""What a strategy's constructor and `start` take is checked: by types before a run, by name in it."""

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from mypy import api

from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.norm import StaticBatchNorm
from fedbn_flwr.server.constructor_options import BaseOptions
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, FedAvg, FedTANII, FixBN, prepare
from tests.helpers.checkout import ROOT
from tests.helpers.harness import make_model

WRONG = """
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from fedbn_flwr.strategies import FedTANII, FixBN

FixBN(freeze_rounds=3)
FixBN(freeze="nonsense")
FixBN(fraction_train="half")
FedTANII(m=3, exchanges="paper")
def run(grid: Grid, arrays: ArrayRecord) -> None:
    FixBN().start(grid, arrays, train_confg=ConfigRecord())
"""
RIGHT = """
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from fedbn_flwr.strategies import FedTANII, FixBN

FixBN(freeze_round=3, freeze="both", fraction_train=0.5, momentum_state="local", seed=1)
FedTANII(m=3, exchange="paper", freeze="affine", server_optimizer="adam")
def run(grid: Grid, arrays: ArrayRecord) -> None:
    FixBN().start(grid, arrays, 3, train_config=ConfigRecord())
"""


def test_a_type_checker_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    monkeypatch.chdir(ROOT)
    shown, _, _ = api.run(["--strict", str(tmp_path / "wrong.py"), str(tmp_path / "right.py")])
    errors = [line for line in shown.splitlines() if ": error: " in line]
    assert [line for line in errors if "right.py" in line] == []
    wanted = ("freeze_rounds", "nonsense", "fraction_train", "exchanges", "train_confg")
    for word, line in zip(wanted, errors, strict=True):
        assert "wrong.py" in line
        assert word in line


@pytest.mark.parametrize(
    ("strategy", "wrong", "meant"),
    [
        (FixBN, "freeze_rounds", "freeze_round"),
        (FedAvg, "fraction_fit", "fraction_train"),
        (FedAvg, "wait", "known: arrayrecord_key, "),
        (FedTANII, "exchanges", "exchange"),
    ],
)
def test_a_wrong_keyword_is_named_with_what_was_meant(strategy: type[BaseStrategy], wrong: str, meant: str) -> None:
    given: Any = {wrong: 1}
    with pytest.raises(TypeError) as error:
        strategy(**given)
    hint = meant if meant.startswith("known") else f"did you mean {meant!r}?"
    assert f"{strategy.__name__} has no option {wrong!r}; {hint}" in str(error.value)


@pytest.mark.parametrize("strategy", [FixBN, FedTANII])
def test_the_types_are_those_of_the_constructors(strategy: type[BaseStrategy]) -> None:
    """`FixBN` passes on what it does not take itself; the type of these must name all that its bases take."""
    taken = {option.name for option in own_options(strategy).values()} | {"lr_schedule", "seed", "patience"}
    hints = get_type_hints(strategy.__init__)
    (rest,) = get_args(hints["options"])
    assert taken <= hints.keys() | rest.__annotations__.keys()
    assert BaseOptions.__annotations__.keys() <= rest.__annotations__.keys()


@pytest.mark.parametrize("name", REGISTRY)
def test_choices_have_the_type_that_says_them(name: str) -> None:
    for option in own_options(REGISTRY[name]).values():
        assert "str" not in str(option.kind).replace("Literal", ""), f"{name}: {option.name} is {option.kind}"


def test_a_model_is_prepared_with_the_options_of_its_normalizer() -> None:
    model = prepare(make_model(), "heterofl", statistics="instant")
    assert {layer.instant for layer in model.modules() if isinstance(layer, StaticBatchNorm)} == {True}


def test_a_method_without_a_normalizer_of_its_own_leaves_the_model_as_it_is() -> None:
    model = make_model()
    before = str(model)
    assert prepare(model, "fedavg") is model
    assert str(model) == before
