"""What a strategy's constructor and `start` take is checked by name."""

import math
import re
from collections.abc import Callable
from math import inf, isfinite
from typing import Annotated, Any

import pytest

from fedbn_flwr.experiments.method import own_options
from fedbn_flwr.plugins.options import Option, Range
from fedbn_flwr.server.constructor_options import constructor_options
from fedbn_flwr.strategies import (
    HBN,
    MTFL,
    REGISTRY,
    BaseStrategy,
    Centralized,
    FedAvg,
    FedBN,
    FedBS,
    FedNorm,
    FedProx,
    FedTAN,
    FedTANII,
    FedWon,
    FixBN,
    HeteroFL,
    Privacy,
    Scaffold,
    Standalone,
)


@pytest.mark.parametrize(
    ("strategy", "wrong", "meant"),
    [
        (FixBN, "freeze_rounds", "freeze_round"),
        (FedAvg, "fraction_fit", "fraction_train"),
        (FedAvg, "wait", "known: arrayrecord_key, "),
        (FedTANII, "exchanges", "exchange"),
        (FedTANII, "freeze_round", "known: arrayrecord_key, "),
        # what would do nothing
        (FedBS, "weighting", "known: arrayrecord_key, "),
        (FedNorm, "server_optimizer", "known: arrayrecord_key, "),
        (Standalone, "server_optimizer", "known: arrayrecord_key, "),
        (Standalone, "server_lr", "known: arrayrecord_key, "),
    ],
)
def test_a_wrong_keyword_is_named_with_what_was_meant(
    strategy: type[BaseStrategy], wrong: str, meant: str
) -> None:
    given: Any = {wrong: 1}
    with pytest.raises(TypeError) as error:
        strategy(**given)
    hint = meant if meant.startswith("known") else f"did you mean {meant!r}?"
    assert f"{strategy.__name__} has no option {wrong!r}; {hint}" in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"fraction_train": 0.0},
        {"fraction_train": -0.5},
        {"fraction_train": 2.0},
        {"fraction_evaluate": -0.5},
        {"fraction_evaluate": 1.5},
    ],
)
def test_a_share_of_the_nodes_is_at_most_one(options: dict[str, Any]) -> None:
    """Flower's own strategies would take them."""
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=rf"^{name} must be .* 1, got {value}$"):
        FedAvg(**options)


def wrong(option: Option) -> list[Any]:
    """Return values of Python's that an option does not take: of another type, out of its range,
    next to its bounds.
    """
    bounds = option.range or Range(0)
    outside = [math.nextafter(bounds.low, -inf), math.nextafter(bounds.high, inf)]
    outside += [bounds.low] * (bounds.excluded == "low") + [bounds.high] * (
        bounds.excluded == "high"
    )
    outside = [
        math.floor(value) if option.kind is int else value for value in outside if isfinite(value)
    ]
    return ["soon" if option.kind is not bool else "true", *(outside if option.range else [])]


@pytest.mark.parametrize("name", REGISTRY)
def test_what_an_option_does_not_take_is_refused_by_its_name(name: str) -> None:
    # a rule is read by `Robust.parse`
    known = constructor_options(REGISTRY[name]).items()
    options = {
        key: each for key, each in known if each.kind is not str and (each.help or each.range)
    }
    usual = {"evaluate_every", "clip_norm", "momentum_state"}
    assert options.keys() >= usual - {*REGISTRY[name].replaced}
    for key, option in options.items():
        for value in wrong(option):
            with pytest.raises(
                ValueError, match=f"^{key} must be .*, got {re.escape(repr(value))}$"
            ):
                REGISTRY[name](**{key: value})


def test_the_bounds_of_options_are_those_of_the_methods() -> None:
    """What a method cannot work with: derived from what each number is."""
    refused: list[tuple[type[BaseStrategy], dict[str, Any]]] = [
        (FedAvg, {"evaluate_every": 0}),
        (FedAvg, {"clip_norm": -1.0}),
        (FedAvg, {"clip_norm": math.nan}),
        (FedBS, {"epsilon": -0.1}),
        (FedBS, {"mu": -0.1}),
        (FedBS, {"patience_rounds": 0}),
        (FedProx, {"mu": -0.1}),
        (FixBN, {"frozen_lr": -1.0}),
        (FixBN, {"window": 1}),
        (FixBN, {"threshold": -1.0}),
        (FixBN, {"latest": 0.0}),
        (FixBN, {"latest": 1.1}),
        (FixBN, {"freeze": "none"}),
        (FedTAN, {"memory": 1.0}),
        (FedTAN, {"oldest": -1}),
        (FedWon, {"clip_factor": 0.0}),
        (HBN, {"gather_samples": -1}),
        (HBN, {"average": 1.0}),
    ]
    for strategy, options in refused:
        with pytest.raises(ValueError, match=f"^{next(iter(options))} must be "):
            strategy(**options)
    FedBS(epsilon=0.0, mu=0.0, patience_rounds=1)
    FixBN(latest=1, window=2, threshold=0, frozen_lr=0)
    FedTAN(carry=True, memory=0, oldest=0)


PRIVATE: dict[str, Any] = {"weighting": "uniform", "privacy": Privacy(1.0, 1.0)}
#: what does not go together, and why
REFUSED: list[tuple[Callable[[], object], str]] = [
    *(
        (
            lambda given=given: FedTAN(**given),
            f"{next(iter(given))} is an option of carried corrections, but carry is",
        )
        for given in ({"memory": 0.1}, {"oldest": 1})
    ),
    (
        lambda: Centralized(freeze_bn=True, freeze_round=1, freeze="affine"),
        "freeze_bn freezes statistics from the start on, and freeze_round later: give one of them",
    ),
    (lambda: FedAvg(server_lr=0.1), "server_lr is the rate of a server_optimizer, which is none"),
    (
        lambda: FedAvg(gather_samples=9),
        "gather_samples are of gathered statistics, but statistics is running",
    ),
    (lambda: FedTAN(carry=True, exchange="paper"), "carried corrections are always fused"),
    (
        lambda: FedTAN(arrayrecord_key="weights"),
        "FedTAN sends messages of its own, with 'arrays' and 'config' in them",
    ),
    (
        lambda: FedBS(robust="median"),
        "would not reach losses, by which nodes are weighted, which FedBS",
    ),
    (
        lambda: FedNorm(robust="median"),
        "would not reach means of BN over few nodes, which FedNorm shares",
    ),
    (
        lambda: FedAvg(momentum_state="global", robust="median"),
        "would not reach the optimizer's state",
    ),
    (
        lambda: FedAvg(**PRIVATE, robust="median"),
        "privacy needs the mean, to which its noise is scaled",
    ),
    (lambda: FedAvg(privacy=Privacy(1.0, 1.0)), "privacy needs weighting='uniform'"),
    (
        lambda: FixBN(**PRIVATE, send_frozen=True),
        r"not protect frozen entries that are sent \(send_frozen\)",
    ),
    (lambda: Scaffold(**PRIVATE), "privacy would not protect control variates"),
    (lambda: FedTAN(**PRIVATE), "privacy would not protect the statistics of layer-wise steps"),
    *(
        (
            lambda make=make: make(**PRIVATE, statistics="exact"),
            "privacy would not protect gathered statistics",
        )
        for make in (HBN, HeteroFL, FedAvg, MTFL)
    ),
    (lambda: FedBS(privacy=PRIVATE["privacy"]), "privacy would not protect losses"),
    (lambda: FedNorm(**PRIVATE), "privacy would not protect means of BN over few nodes"),
    (
        lambda: FedAvg(**PRIVATE, momentum_state="global"),
        "privacy would not protect the optimizer's state",
    ),
    (
        lambda: FedBN(**PRIVATE, mean_personal=True),
        "privacy would not protect the entries that nodes keep",
    ),
    *(
        (
            lambda bad=bad: Privacy(*bad),
            "clipping_norm must be positive and noise_multiplier not negative",
        )
        for bad in ((0.0, 1.0), (1.0, -1.0), (inf, 1.0), (1.0, math.nan))
    ),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_what_does_not_go_together_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


class Unspoken(FedAvg):
    """A user's own method, whose options say little of themselves."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        strength=0.5,
        layers: list[int] | None = None,
        shares: Annotated[list[float] | str, "of all"] = "",
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.taken = strength, layers, shares


def test_options_that_say_nothing_of_what_they_take_take_anything() -> None:
    assert Unspoken(1, layers=[1, 2], shares=[0.5], seed=3).taken == (1, [1, 2], [0.5])
    assert Unspoken(strength="much").taken[0] == "much"
    assert "shares" not in own_options(Unspoken)
    with pytest.raises(ValueError, match="clip_norm must be"):
        Unspoken(clip_norm=-1)


@pytest.mark.parametrize("name", REGISTRY)
def test_choices_have_the_type_that_says_them(name: str) -> None:
    # a rule has a number, or none, and layers have any names
    for option in own_options(REGISTRY[name]).values():
        if option.name in ("robust", "closed_form"):
            continue
        assert "str" not in str(option.kind).replace("Literal", ""), (
            f"{name}: {option.name} is {option.kind}"
        )
