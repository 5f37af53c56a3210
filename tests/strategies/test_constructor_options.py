"""What a strategy's constructor and `start` take is checked by name."""

from typing import Any

import pytest

from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.norm import StaticBatchNorm
from fedbn_flwr.strategies import REGISTRY, BaseStrategy, FedAvg, FedTANII, FixBN, prepare
from tests.helpers.harness import make_model


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


@pytest.mark.parametrize("every", [0, -1])
def test_how_often_nodes_evaluate_is_a_positive_number(every: int) -> None:
    with pytest.raises(ValueError, match=f"evaluate_every must be at least 1, got {every}"):
        FedAvg(evaluate_every=every)


@pytest.mark.parametrize("name", REGISTRY)
def test_choices_have_the_type_that_says_them(name: str) -> None:
    # a rule has a number, or none
    for option in own_options(REGISTRY[name]).values():
        if option.name == "robust":
            continue
        assert "str" not in str(option.kind).replace("Literal", ""), f"{name}: {option.name} is {option.kind}"


def test_a_model_is_prepared_with_the_options_of_its_normalizer() -> None:
    model = prepare(make_model(), "heterofl", statistics="instant")
    assert {layer.instant for layer in model.modules() if isinstance(layer, StaticBatchNorm)} == {True}
