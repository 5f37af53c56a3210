"""Options are read from constructors: kind, default and the help beside each."""

from typing import Annotated, Any, ClassVar

from fedbn_flwr.experiments.method import all_options, own_options, owners
from fedbn_flwr.plugins.options import Option, Range
from fedbn_flwr.strategies import REGISTRY, Centralized, FedAvg, FedProx, FixBN


class Parent(FedAvg):
    def __init__(self, *, pull_often: Annotated[int | str, "how often it pulls"] = 3, **options: Any) -> None:
        super().__init__(**options)


class Child(Parent):
    replaced: ClassVar[tuple[str, ...]] = ("weighting",)

    def __init__(self, *, pull_often: float = 5.0, bare: bool = False, **options: Any) -> None:
        super().__init__(**options)


def test_an_option_has_its_kind_its_default_and_its_help() -> None:
    option = own_options(Parent)["pull-often"]
    assert option == Option("pull_often", int | str, 3, "how often it pulls")
    assert own_options(FedProx)["mu"] == Option("mu", float, 0.01, "weight of the proximal term", Range(0))


def test_a_subclass_changes_the_default_and_keeps_the_help() -> None:
    assert own_options(Child)["pull-often"] == Option("pull_often", float, 5.0, "how often it pulls")
    assert own_options(Child)["bare"] == Option("bare", bool, False, "")
    fixed, central = own_options(FixBN)["freeze-round"], own_options(Centralized)["freeze-round"]
    assert central.help == fixed.help != ""
    assert (fixed.default, central.default) == (0.5, 10**9)


def test_an_object_of_pythons_is_no_option() -> None:
    assert "privacy" not in all_options()


def test_an_option_that_a_subclass_replaces_is_not_its_own() -> None:
    assert "weighting" in own_options(Parent)
    assert "weighting" not in own_options(Child)


def test_what_follows_from_shared_options_is_not_a_strategys_own() -> None:
    assert not {"seed", "lr-schedule", "patience", "evaluate-every"} & set(all_options())


def test_owners_are_the_strategies_that_have_the_option() -> None:
    assert sorted(owners("mu")) == ["fedbs", "fedprox"]
    assert owners("weighting") == list(REGISTRY)
