"""Differential privacy: by entries' names in this project's strategies, and what Flower's own
wrappers and mods do.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import strategy as flower

from fedbn_flwr import norm, state
from fedbn_flwr.strategies import (
    BaseStrategy,
    CannotTrainError,
    FedAvg,
    FedBN,
    FedProx,
    FedTAN,
    FixBN,
    Privacy,
    SiloBN,
)
from tests.helpers.harness import INSTRUCTION, SIZES, Federation, make_model, make_split
from tests.helpers.references import federated, make_nodes

NODES = len(SIZES)
#: a norm that no update reaches, so that nothing is clipped
NO_CLIPPING = 1e9
#: strategies that share a part of the model only, in some round
PARTIAL: dict[str, Callable[..., BaseStrategy]] = {
    "fedbn": FedBN,
    "silobn": SiloBN,
    "fixbn": lambda **options: FixBN(freeze_round=1, **options),
    "fixbn, affine": lambda **options: FixBN(freeze_round=1, freeze="both", **options),
}
STRATEGIES: dict[str, Callable[..., BaseStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": lambda **options: FedProx(mu=0.5, **options),
    **PARTIAL,
}


def covering(clipping_norm: float, noise_multiplier: float, seed: int | None = None) -> Privacy:
    """Return privacy that lets running statistics go without."""
    return Privacy(
        clipping_norm, noise_multiplier, seed, unprotected=["*.running_mean", "*.running_var"]
    )


def run(strategy: BaseStrategy, rounds: int = 3, lr: float = INSTRUCTION.lr) -> list[state.State]:
    """Return the global state before and after every round."""
    nodes, seen = Federation(make_model()), list[state.State]()
    strategy.start(
        nodes.grid,
        nodes.initial,
        rounds,
        train_config=replace(INSTRUCTION, lr=lr).to_config(),
        evaluate_fn=lambda _, arrays: seen.append(state.from_record(arrays)),
    )
    return seen


def parameters() -> list[str]:
    return [name for name, _ in make_model().named_parameters()]


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_noise_and_without_clipping_nothing_changes(name: str) -> None:
    options: dict[str, Any] = {"weighting": "uniform", "fraction_evaluate": 0.0}
    plain = run(STRATEGIES[name](**options))[-1]
    private = run(STRATEGIES[name](**options, privacy=covering(NO_CLIPPING, 0.0)))[-1]
    for entry, value in plain.items():
        torch.testing.assert_close(private[entry], value, rtol=0, atol=1e-12)
        assert private[entry].dtype == value.dtype


def test_a_round_of_a_single_node_is_protected_too() -> None:
    options: dict[str, Any] = {
        "weighting": "uniform",
        "fraction_evaluate": 0.0,
        "fraction_train": 1 / NODES,
    }
    before, after = run(FedAvg(**options, min_train_nodes=1, privacy=covering(0.05, 0.0)), rounds=1)
    update = torch.cat([(after[name] - before[name]).flatten() for name in parameters()])
    assert float(update.norm()) == pytest.approx(0.05)


def test_updates_are_clipped_to_the_norm_over_all_parameters() -> None:
    """The reference: each node trains by itself, and its update is scaled to length C if it is
    longer.
    """
    limit = 0.05
    after = run(
        FedAvg(weighting="uniform", privacy=covering(limit, 0.0), fraction_evaluate=0.0), rounds=1
    )[-1]
    before, moved = make_model().state_dict(), []
    ends = [federated(make_model(), make_split(), [node], 1, INSTRUCTION) for node in make_nodes()]
    for alone in ends:
        update = torch.cat([(alone[name] - before[name]).flatten() for name in parameters()])
        assert update.norm() > limit
        moved.append(update * limit / update.norm())
    wanted = torch.stack(moved).mean(0)
    found = torch.cat([(after[name] - before[name]).flatten() for name in parameters()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for name in norm.statistics_keys(make_model()):
        mean = torch.stack([end[name] for end in ends]).mean(0)
        torch.testing.assert_close(after[name], mean, rtol=0, atol=1e-12)


def test_noise_has_the_printed_deviation() -> None:
    """Draws divided by z C / K: the deviation of 395 of them is within 15 % of 1 (four standard
    errors).
    """
    limit, multiplier = 0.5, 2.0
    options: dict[str, Any] = {"weighting": "uniform", "fraction_evaluate": 0.0}
    quiet = run(FedAvg(**options, privacy=covering(limit, 0.0)), rounds=1)[-1]
    loud = run(FedAvg(**options, privacy=covering(limit, multiplier, seed=1)), rounds=1)[-1]
    noise = (
        torch.cat([(loud[name] - quiet[name]).flatten() for name in parameters()])
        * NODES
        / (multiplier * limit)
    )
    assert len(noise) == sum(value.numel() for value in make_model().parameters())
    assert float(noise.std()) == pytest.approx(1.0, abs=0.15)
    assert abs(float(noise.mean())) < 0.2


@pytest.mark.parametrize("name", STRATEGIES)
def test_counters_and_statistics_are_free_of_noise(name: str) -> None:
    """A noise of deviation 5 would make variances negative, which are around 1. Training under it
    must not diverge.
    """
    privacy = covering(1.0, 5.0 * NODES)
    states = run(
        STRATEGIES[name](weighting="uniform", privacy=privacy, fraction_evaluate=0.0), lr=1e-9
    )
    model = make_model()
    for before, after in pairwise(states):
        for entry in norm.statistics_keys(model):
            assert torch.isfinite(after[entry]).all()
            if entry.endswith("running_var"):
                assert (after[entry] >= 0).all()
        for entry in norm.counter_keys(model):
            assert after[entry].dtype == torch.int64
            assert after[entry].shape == ()
            assert after[entry] >= before[entry]
    stays = {"fedbn": "bn", "silobn": "statistics"}.get(name, "none")
    if name.startswith("fixbn"):
        stays, states = "bn" if "affine" in name else "statistics", states[1:]
    for entry in state.group_keys(model, stays):
        assert all(torch.equal(later[entry], states[0][entry]) for later in states)
    noised = [entry for entry in parameters() if entry not in state.group_keys(model, stays)]
    assert all((states[-1][entry] - states[-2][entry]).abs().max() > 0.1 for entry in noised)


def test_noise_differs_by_run_and_by_round_unless_a_seed_is_given() -> None:
    def after(seed: int | None) -> list[state.State]:
        privacy = covering(1e-9, 1e9, seed)
        return run(FedAvg(weighting="uniform", privacy=privacy, fraction_evaluate=0.0), rounds=2)

    name = parameters()[0]
    one, two, first, again = after(None)[-1], after(None)[-1], after(3), after(3)
    assert not torch.equal(one[name], two[name])
    assert torch.equal(first[-1][name], again[-1][name])
    initial, middle, last = (step[name] for step in first)
    assert (middle - initial - (last - middle)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("named", "bare"),
    [
        ([], "net.1.running_mean, net.1.running_var, net.4.running_mean, net.4.running_var"),
        (["*.running_mean", "net.1.running_var"], "net.4.running_var"),
    ],
)
def test_statistics_that_leave_nodes_must_be_named(named: list[str], bare: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^privacy does not cover {bare}: .*name them: Privacy\(..., unprotected=",
    ):
        run(
            FedAvg(
                weighting="uniform",
                privacy=Privacy(1.0, 1.0, unprotected=named),
                fraction_evaluate=0.0,
            ),
            rounds=1,
        )


def test_to_name_a_parameter_does_not_uncover_it() -> None:
    options: dict[str, Any] = {"weighting": "uniform", "fraction_evaluate": 0.0}
    wanted = run(FedAvg(**options, privacy=covering(0.05, 1.0, seed=1)), rounds=1)[-1]
    found = run(FedAvg(**options, privacy=Privacy(0.05, 1.0, seed=1, unprotected=["*"])), rounds=1)[
        -1
    ]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_methods_that_keep_statistics_need_to_name_none() -> None:
    for strategy in (SiloBN, FedBN):
        run(
            strategy(weighting="uniform", privacy=Privacy(1.0, 1.0), fraction_evaluate=0.0),
            rounds=1,
        )


# ---- Flower's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FedAvg, FedBN, FedTAN])
def test_a_wrapper_around_a_strategy_is_refused_in_the_first_round(
    strategy: Callable[..., BaseStrategy],
) -> None:
    nodes = Federation(make_model())
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(strategy(), 0.1, 1.0, NODES)
    with pytest.raises(
        RuntimeError, match=r"must be started itself, .* strategies take `privacy=Privacy\("
    ):
        wrapped.start(nodes.grid, nodes.initial, 3, train_config=INSTRUCTION.to_config())


@pytest.mark.parametrize("strategy", PARTIAL.values())
def test_a_mod_that_refuses_every_reply_ends_the_run(strategy: Callable[..., BaseStrategy]) -> None:
    nodes = Federation(make_model(), mods=[LocalDpMod(1.0, 1.0, 1.0, 0.1)])
    with pytest.raises(
        CannotTrainError, match=r"no node could train in round [12].*LocalDpMod expects the keys"
    ):
        nodes.run(strategy(fraction_evaluate=0.0), 3)
