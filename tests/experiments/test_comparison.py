"""Several methods on the same data: choosing values, and what is written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbn_flwr.experiments.output.scoring
from fedbn_flwr.client.evaluation import Evaluation, evaluate
from fedbn_flwr.data import Split
from fedbn_flwr.experiments import Config
from fedbn_flwr.experiments.comparison import VALIDATION_SHARE, Plan, compare
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.method import Experiment
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.resources import load_data
from fedbn_flwr.strategies import CannotTrainError
from tests.helpers.runs import DATA, OPTIONS, run

# ---- the plan --------------------------------------------------------------------------------------------------------


def plan(methods: Sequence[str], **options: Any) -> Plan:
    return Plan(OPTIONS, methods, **options)


def test_methods_share_everything_but_what_they_say() -> None:
    chosen = Plan({**OPTIONS, "seed": "7"}, ["fedavg", "fedprox:mu=0.5:lr=0.05"])
    one, other = (chosen.experiment(method, 1).config for method in chosen.methods)
    assert one.seed == 8
    assert (one.lr, other.lr) == (0.1, 0.05)
    assert {key for key, value in one.to_mapping().items() if value != other.to_mapping()[key]} == {"method", "lr"}


# ---- running it ------------------------------------------------------------------------------------------------------


class Engine:
    """An engine that trains nothing: its accuracy is a function of the experiment."""

    def __init__(self, **accuracies: float) -> None:
        self.accuracies = accuracies
        self.ran: list[Experiment] = []
        self.fails = set[tuple[str, int]]()

    def __call__(self, experiment: Experiment, folder: Path, progress: Progress | None = None) -> Summary:
        self.ran.append(experiment)
        config = experiment.config
        accuracy = self.accuracies.get(f"lr{config.lr:g}".replace(".", "_"), 0.5)
        if (f"lr{config.lr:g}", config.seed) in self.fails:
            raise CannotTrainError("it diverged")
        folder.mkdir(parents=True)
        (folder / "rounds.jsonl").write_text('{"round": 1, "accuracy": 0.5, "train-loss": 1.0}\n')
        told = {
            key: config.to_mapping()[key]
            for key in ("method", "seed", "lr", "dataset", "model", "partition", "clients")
        }
        return {**told, "accuracy": accuracy}


def silent(_: str) -> None:
    return None


def test_each_method_runs_with_its_best_values_of_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lr0_1=0.6, lr0_3=0.8, lr1=0.7)
    monkeypatch.setitem(ENGINES, "stacked", engine)
    chosen = plan(["fedavg", "fedprox:lr=0.1:mu=1"], seeds=2, grid={"lr": [0.1, 0.3, 1.0], "mu": [0.1]})
    summaries = compare(chosen, tmp_path, silent)
    assert [(run["method"], run["seed"], run["lr"]) for run in summaries] == [
        ("fedavg", 0, 0.3),
        ("fedavg", 1, 0.3),
        # a method keeps what it names
        ("fedprox:lr=0.1:mu=1", 0, 0.1),
        ("fedprox:lr=0.1:mu=1", 1, 0.1),
    ]
    assert sum(map(chosen.count, chosen.methods)) == len(engine.ran) == 4 + 2 * 3
    searched, trained = engine.ran[:6], engine.ran[6:]
    assert trained[0].choice is not None
    assert trained[0].choice.summary() == {
        "chosen": {"lr": 0.3},
        "chosen-at-edge": [],
        "grid": {"lr=0.1": 0.6, "lr=0.3": 0.8, "lr=1.0": 0.7},
    }
    assert trained[2].choice is None
    # values are chosen by two seeds on held-out training data, and what is reported is not
    assert [(run.config.seed, run.config.validation) for run in searched] == [
        (seed, VALIDATION_SHARE) for _ in range(3) for seed in (0, 1)
    ]
    assert [run.config.validation for run in trained] == [0.0] * 4


def test_a_value_that_diverges_with_one_seed_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lr0_1=0.2, lr9=0.9)
    engine.fails = {("lr9", 1)}
    monkeypatch.setitem(ENGINES, "stacked", engine)
    (summary,) = compare(plan(["fedavg"], grid={"lr": [9.0, 0.1]}), tmp_path / "one", silent)
    assert summary["lr"] == 0.1
    (summary,) = compare(plan(["fedavg"], grid={"lr": [9.0]}), tmp_path / "two", silent)
    assert summary["error"] == "no value of its grid came through: it diverged"


def test_a_value_that_fails_is_out_however_low_the_others_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of one's own may have scores that are below every share."""
    engine = Engine(lr0_1=-2.5, lr9=0.9)
    engine.fails = {("lr9", 0)}
    monkeypatch.setitem(ENGINES, "stacked", engine)
    (summary,) = compare(plan(["fedavg"], grid={"lr": [9.0, 0.1]}), tmp_path, silent)
    assert summary["lr"] == 0.1


def test_options_of_single_methods_are_chosen_for_these(tmp_path: Path) -> None:
    methods = ["fedavg", "fixbn"]
    grid: dict[str, list[Any]] = {"freeze-round": ["auto", 0.34, 1], "momentum": [0, 0.5]}
    first, second = (plan(methods, grid=grid).choice(method) for method in methods)
    assert first is not None
    assert [*first.combinations()] == ["momentum=0", "momentum=0.5"]
    assert second is not None
    assert len(second.combinations()) == 6
    at_edge = [replace(second, values={"freeze-round": value, "momentum": 0.5}) for value in grid["freeze-round"]]
    assert [choice.summary()["chosen-at-edge"] for choice in at_edge] == [
        ["momentum"],
        ["freeze-round", "momentum"],
        ["freeze-round", "momentum"],
    ]


def test_the_test_data_never_choose_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every evaluation, on the server and on the nodes, is of held-out training data until the rate is chosen."""
    test_data, seen = load_data(Config(dataset=DATA)).test, []

    def watched(model: torch.nn.Module, split: Split, *arguments: Any, **options: Any) -> Evaluation:
        seen.append("test" if split is test_data else "validation")
        return evaluate(model, split, *arguments, **options)

    monkeypatch.setattr(fedbn_flwr.experiments.output.scoring, "evaluate", watched)
    monkeypatch.setattr("fedbn_flwr.client.bn_client.evaluate", watched)
    announced: list[tuple[str, int]] = []
    options, grid = {**OPTIONS, "rounds": "1"}, {"lr": [0.1, 0.01]}
    chosen = Plan(options, ["fedbn:mean-personal=true"], grid=grid, grid_seeds=1, engine="inprocess")
    compare(chosen, tmp_path, lambda label: announced.append((label, len(seen))))
    (_, _), (_, _), (label, before) = announced
    assert "validating" not in label
    assert before > 0
    assert set(seen[:before]) == {"validation"}
    assert set(seen[before:]) == {"test"}


def test_a_comparison_in_which_nothing_trains_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("compare", "--methods", "fedavg,fedbn", model="mlp", batch_size="1", results_dir=str(tmp_path))
    assert code == 1
    output = capsys.readouterr()
    assert "fedavg, seed 0: no node could train in round 1" in output.out
    assert "fedbn-flwr: 2 of 2 methods failed: fedavg, fedbn" in output.err
