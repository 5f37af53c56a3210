"""What becomes of running statistics, on state dicts: against averages made by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedbn_flwr.doctor import check

State = dict[str, Tensor]
WEIGHTS = (10.0, 30.0, 60.0)


class Net(nn.Module):
    """BN layers under names that do not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm2d(5)
        self.downsample = nn.Sequential(nn.Conv2d(5, 6, 1), nn.BatchNorm2d(6))


def state_of(seed: int, shift: float = 0.0) -> State:
    torch.manual_seed(seed)
    state = Net().state_dict()
    for name, value in state.items():
        if name.endswith("tracked"):
            value += 7
        elif name.endswith("running_var"):
            value.copy_(1 + torch.rand_like(value))
        else:
            value.copy_(torch.randn_like(value) / 10 + shift)
    return state


BEFORE = state_of(0)
AFTER = [state_of(seed) for seed in (1, 2, 3)]
MEAN: State = {}
for entry, value in BEFORE.items():
    weighted = [w / 100 * state[entry] for w, state in zip(WEIGHTS, AFTER, strict=True)]
    MEAN[entry] = torch.stack(weighted).sum(0).to(value.dtype)


def made_of(state: State) -> Net:
    net = Net()
    net.load_state_dict(state)
    return net


def mean_of(states: Sequence[State]) -> Any:
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def names(averaged: State, **others: Any) -> set[str]:
    given: dict[str, Any] = {
        "before": BEFORE,
        "after": AFTER,
        "averaged": averaged,
        "weights": WEIGHTS,
        **others,
    }
    return {finding.name for finding in check(**given)}


def statistics(change: Callable[[str, Tensor], Tensor]) -> State:
    return {
        name: change(name, value) if "running" in name else value for name, value in MEAN.items()
    }


def test_a_mean_is_nothing_to_speak_of_with_weights_that_are_said_or_not() -> None:
    assert names(MEAN) == set()
    assert names(MEAN, weights=()) == set()
    assert names(MEAN, before=Net()) == set()
    assert names(mean_of(AFTER)) == {"counters"}


def test_nodes_may_send_what_they_changed() -> None:
    """As `watched` sees it, which knows nothing of the nodes' networks."""
    changes = [{name: value - BEFORE[name] for name, value in state.items()} for state in AFTER]
    assert names(MEAN, after=changes) == set()
    assert names(BEFORE, after=changes) == {"not-averaged"}
    assert names(statistics(lambda _, value: value + 5), after=changes) == {"not-a-mean"}


def test_the_variance_of_all_data_is_nothing_to_speak_of_and_lacks_no_spread() -> None:
    after = [state_of(seed, shift=2.0 * seed) for seed in (1, 2, 3)]
    plain = mean_of(after)
    pooled = dict(plain)
    for name in BEFORE:
        if name.endswith("running_var"):
            mean = name.replace("_var", "_mean")
            pooled[name] = (
                sum(state[name] + (state[mean] - plain[mean]) ** 2 for state in after) / 3
            )
    given: dict[str, Any] = {"before": BEFORE, "after": after}
    found = {each.name: each for each in check(averaged=plain, **given)}
    assert set(found) == {"apart", "counters"}
    shares = []
    for layer in [name.removesuffix(".running_var") for name in plain if "running_var" in name]:
        means = torch.stack([state[f"{layer}.running_mean"] for state in after])
        between = means.double().var(0, correction=0).sum()
        shares.append(between / (between + plain[f"{layer}.running_var"].double().sum()))
    most = float(max(shares))
    assert f"by {most**0.5:.2g} standard deviations" in found["apart"].saw
    assert f"{100 * most:.0f} % of the variance" in found["apart"].saw
    assert {each.name for each in check(averaged=pooled, **given)} == {"counters"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda name, value: AFTER[1][name], "one-node"),
        (lambda name, value: BEFORE[name], "not-averaged"),
        (lambda name, value: value * float("nan"), "not-finite"),
        (lambda name, value: value - 5, "negative-variance"),
        (lambda name, value: value + 5, "not-a-mean"),
        (lambda name, value: BEFORE[name] + 0.3 * (value - BEFORE[name]), "shortened"),
        (
            lambda name, value: torch.stack([state[name] for state in AFTER]).median(0).values,
            "between",
        ),
    ],
)
def test_what_is_no_mean_is_named(change: Callable[[str, Tensor], Tensor], name: str) -> None:
    averaged = statistics(change)
    expected = {name}
    if name == "negative-variance":  # the means have moved as well
        expected.add("not-a-mean")
    assert names(averaged) == expected
    (finding,) = (each for each in check(BEFORE, AFTER, averaged, WEIGHTS) if each.name == name)
    assert finding.layers == ("stem", "downsample.1")
    assert "all 2 BN layers" in finding.saw


def test_statistics_that_are_not_sent_are_seen_with_the_model_only() -> None:
    parameters = {name for name, _ in Net().named_parameters()}
    after = [{name: state[name] for name in parameters} for state in AFTER]
    averaged = {name: MEAN[name] for name in parameters}
    assert names(averaged, after=after, before=Net()) == {"statistics-not-sent"}
    assert names(averaged, after=after) == {"statistics-not-sent"}
    assert names(averaged, after=after, before=averaged) == set()


def test_half_precision_is_still_a_mean() -> None:
    halved = {name: value.half() if "running" in name else value for name, value in MEAN.items()}
    after = [
        {name: value.half() if "running" in name else value for name, value in state.items()}
        for state in AFTER
    ]
    assert names(halved, after=after) == {"half"}


def test_names_may_have_a_prefix_and_none_in_common_are_refused() -> None:
    def wrapped(state: State) -> State:
        return {f"module.{name}": value for name, value in state.items()}

    after = list(map(wrapped, AFTER))
    assert names(MEAN, after=after) == names(wrapped(MEAN), after=after) == set()
    assert names(AFTER[0], after=after, before=Net()) == {"one-node"}
    assert names(AFTER[0], before=nn.DataParallel(Net())) == {"one-node"}
    with pytest.raises(ValueError, match="2 weights, and 3 nodes"):
        check(BEFORE, AFTER, MEAN, [1, 2])
    with pytest.raises(ValueError, match=r"such as 'w', is one of those before, such as 'stem"):
        check(BEFORE, [{"w": torch.zeros(3)}], MEAN)


@pytest.mark.parametrize("of", [ArrayRecord, lambda state: [*state.values()], made_of])
def test_states_may_be_records_lists_and_models(of: Callable[[State], Any]) -> None:
    after = list(map(of, AFTER))
    assert names(of(AFTER[0]), after=after, before=Net()) == {"one-node"}
    assert names(of(MEAN), after=after) == set()


def test_weights_may_be_an_array_and_the_state_before_unknown() -> None:
    assert names(MEAN, weights=np.array(WEIGHTS)) == set()
    assert names(AFTER[0], before={}) == {"one-node"}
