"""Runs with a lying client: under a rule, nothing that the method pools grows with the lie."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedbn_flwr import state
from fedbn_flwr.experiments.liar import LyingGrid
from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid
from fedbn_flwr.strategies import (
    HBN,
    CannotTrainError,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedNorm,
    FedTAN,
    FixBN,
    HeteroFL,
    Privacy,
    Scaffold,
)
from tests.helpers.engine_comparison import Stacked
from tests.helpers.faults import infinite, spoiling
from tests.helpers.harness import Federation, distance, make_model
from tests.helpers.runs import run as command_run

#: five clients, as Krum needs; the first one lies
SIZES = (7, 12, 20, 5, 9)
RULES = ("trimmed:0.2", "multi-krum:1", "norm:1.5")
#: by name, a strategy and the normalizer of its model
METHODS: dict[str, tuple[Callable[..., FedAvg], str]] = {
    "fedavg": (FedAvg, "bn"),
    "adam on the server": (lambda **options: FedAvg(server_optimizer="adam", **options), "bn"),
    "fedbn": (lambda **options: FedBN(mean_personal=True, **options), "bn"),
    "fixbn": (lambda **options: FixBN(freeze_round=2, **options), "bn"),
    "fedtan": (FedTAN, "bn"),
    "fedtan, paper": (lambda **options: FedTAN(exchange="paper", **options), "bn"),
    "carried": (lambda **options: FedTAN(carry=True, **options), "bn"),
    "feddna": (FedDNA, "bn"),
    "scaffold": (Scaffold, "bn"),
    "hbn": (HBN, "hbn"),
    "heterofl": (HeteroFL, "static-bn"),
}
#: their messages hold what those of others hold
SAME_MESSAGES = ("adam on the server", "fixbn", "feddna", "heterofl")
GRIDS: dict[str, type[InProcessGrid]] = {"messages": InProcessGrid, "one by one": OneByOneGrid, "stacked": Stacked}


def run(method: str, lie: float = 1.0, grid: str = "messages", rounds: int = 3, **options: Any) -> state.State:
    """Return the end of a run."""
    make, kind = METHODS[method]
    nodes = Federation(make_model(kind), SIZES, grid=GRIDS[grid])
    return nodes.run(make(**options), rounds, LyingGrid(nodes.grid, lie))


@pytest.mark.parametrize("method", ["fedavg", "fedtan", "scaffold", "hbn"])
def test_without_a_rule_the_model_grows_with_the_lie(method: str) -> None:
    assert distance(run(method), run(method, 1e6)) > 1


@pytest.mark.parametrize(
    ("method", "rule"), [*((method, "median") for method in METHODS), *(("fedtan", rule) for rule in RULES)]
)
def test_under_a_rule_the_lie_can_be_as_large_as_it_likes(method: str, rule: str) -> None:
    """The largest and the second largest lie come to the same end: only their order counts, or their direction."""
    assert distance(run(method, 1e6, robust=rule), run(method, 1e7, robust=rule)) < 1e-4


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SAME_MESSAGES])
def test_every_transport_brings_the_lie_to_the_rule(method: str) -> None:
    by_messages = run(method, -100.0, robust="trimmed:0.2")
    for grid in ("one by one", "stacked"):
        assert distance(by_messages, run(method, -100.0, grid, robust="trimmed:0.2")) < 1e-9


@pytest.mark.parametrize(
    ("make", "reason"), [(FedAvg, "replies of 5 nodes are needed, and there are 4"), (FedTAN, "is not finite")]
)
def test_with_too_few_replies_the_run_says_so(make: Callable[..., FedAvg], reason: str) -> None:
    nodes = Federation(make_model(), SIZES, grid=spoiling(infinite, lambda partition, _: partition == 1))
    with pytest.raises(CannotTrainError, match=reason):
        nodes.run(make(robust="multi-krum:1"), 1)


def test_a_round_with_too_few_replies_leaves_the_model_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    later = spoiling(infinite, lambda partition, number: partition == 1 and number > 1)
    nodes = Federation(make_model(), SIZES, grid=later)
    with caplog.at_level(logging.WARNING):
        ends = [nodes.run(FedAvg(robust="multi-krum:1"), rounds) for rounds in (1, 3)]
    assert distance(*ends) == 0
    assert caplog.text.count("replies of 5 nodes are needed, and there are 4") == 2


REFUSED: dict[str, tuple[Callable[[], FedAvg], str]] = {
    "losses": (lambda: FedBS(robust="median"), "would not reach losses, by which nodes are weighted, which FedBS"),
    "domains": (lambda: FedNorm(robust="median"), "would not reach means of BN over few nodes, which FedNorm shares"),
    "momentum": (lambda: FedAvg(momentum_state="global", robust="median"), "would not reach the optimizer's state"),
    "privacy": (
        lambda: FedAvg(weighting="uniform", privacy=Privacy(1.0, 0.0), robust="median"),
        "privacy needs the mean, to which its noise is scaled",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rule_with_a_way_around_it_is_refused(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fedavg:secure=true:lie=2", "lie changes what the server gets of one client, which secure=true hides"),
        ("fedavg:robust=multi-krum:1", "method 'fedavg:robust=multi-krum:1' needs 5 nodes in a round, and 2 take part"),
        ("fedavg:secure=true", "method 'fedavg:secure=true' needs 3 nodes in a round, and 2 take part"),
    ],
)
def test_a_rule_that_does_not_fit_a_run_is_one_line(
    method: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_run("run", method=method, clients="2", results_dir=str(tmp_path / "results")) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
def test_a_lie_is_an_option_of_a_run(engine: str, tmp_path: Path) -> None:
    """Krum finds the liar, and the model learns."""
    options: Any = {"rounds": "3", "clients": "5", "partition": "iid", "lie": "1e5"}
    for rule in ("none", "multi-krum:1"):
        folder = str(tmp_path / rule.replace(":", ""))
        assert command_run("run", engine=engine, robust=rule, results_dir=folder, **options) == 0
    files = [next((tmp_path / name).rglob("model.safetensors")) for name in ("none", "multi-krum1")]
    sizes = [max(value.abs().max().item() for value in load_file(file).values()) for file in files]
    assert sizes[0] > 1e4
    assert sizes[1] < 1e3
