"""The hooks of strategies: which there are, where they are explained, and in what order a round calls them."""

import re
from collections.abc import Callable
from typing import Any

from fedbn_flwr.strategies import REGISTRY, BaseStrategy, FedAvg
from tests.helpers.faults import failed, spoiling
from tests.helpers.harness import Federation, make_model

HOOKS = {
    "own_norm",
    "instruct",
    "package",
    "ask",
    "weigh",
    "update",
    "lose_round",
    "instruct_evaluation",
    "learn_from_evaluation",
}
#: what classes have of their own that is no hook
OTHER = {"__init__", "__new__", "__init_subclass__", "state_dict", "load_state_dict"}


def documented() -> list[str]:
    """Return the methods that `BaseStrategy` lists, in their order."""
    listed = re.findall(r"^    - `(\w+)`:", BaseStrategy.__doc__ or "", re.MULTILINE)
    return [name for name in listed if hasattr(BaseStrategy, name)]


def overridden() -> set[str]:
    """Return what the project's own strategies override of what `BaseStrategy` can do, properties included."""
    bases = {base for strategy in REGISTRY.values() for base in strategy.__mro__}
    own = [base for base in bases if base.__module__.startswith("strategies.")]
    assert len(own) > len(set(REGISTRY.values()))  # and those that are no method by themselves
    kinds = (property, classmethod, staticmethod)
    return {
        name
        for base in own
        for name, value in vars(base).items()
        if name in dir(BaseStrategy) and (isinstance(value, kinds) or (callable(value) and not isinstance(value, type)))
    } - OTHER


def test_the_projects_own_strategies_override_nine_hooks() -> None:
    assert overridden() == HOOKS
    assert not [name for name in overridden() if name.startswith("_")]


def test_each_hook_is_explained_once_and_no_other_method() -> None:
    assert sorted(documented()) == sorted(HOOKS)


def test_hooks_are_explained_in_the_order_in_which_a_round_calls_them() -> None:
    """Of a round with replies, and of one without; a model's normalizer comes before all rounds."""
    calls: list[tuple[int, str]] = []

    def noting(name: str) -> Callable[..., Any]:
        def note(self: FedAvg, *given: Any) -> Any:
            calls.append((self.round.number, name))
            return getattr(super(kind, self), name)(*given)

        return note

    in_rounds = [name for name in documented() if name != "own_norm"]
    kind: Any = type("Noting", (FedAvg,), {name: noting(name) for name in in_rounds})
    Federation(make_model(), grid=spoiling(failed, lambda _, number: number == 2)).run(kind(), 2, evaluate_every=1)
    assert documented()[0] == "own_norm"
    for number, missing in ((1, "lose_round"), (2, "weigh, update")):
        called = list(dict.fromkeys(name for server_round, name in calls if server_round == number))
        assert called == [name for name in in_rounds if name not in missing.split(", ")]
