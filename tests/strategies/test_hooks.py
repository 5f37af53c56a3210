"""The hooks of strategies: which there are, where they are explained, and in what order a round calls them."""

import re
from collections.abc import Callable
from typing import Any

from fedbn_flwr.strategies import BaseStrategy, FedAvg
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


def documented() -> list[str]:
    """Return the methods that `BaseStrategy` lists, in their order."""
    listed = re.findall(r"^    - `(\w+)`:", BaseStrategy.__doc__ or "", re.MULTILINE)
    return [name for name in listed if hasattr(BaseStrategy, name)]


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
