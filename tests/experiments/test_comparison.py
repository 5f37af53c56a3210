"""Several methods on the same data: pairing by seed, choosing values, and what is written."""

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
from fedbn_flwr.experiments.comparison import VALIDATION_SHARE, Plan, compare, lines, typical
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.method import Experiment
from fedbn_flwr.experiments.output.console import console, show_comparison
from fedbn_flwr.experiments.output.recorder import Progress, Summary
from fedbn_flwr.experiments.resources import load_data
from fedbn_flwr.strategies import CannotTrainError
from tests.helpers.runs import DATA, OPTIONS, run


def results(method: str, *accuracies: float, seeds: Sequence[int] = (0, 1, 2)) -> list[Summary]:
    return [
        {"method": method, "seed": seed, "accuracy": accuracy}
        for seed, accuracy in zip(seeds, accuracies, strict=False)
    ]


# ---- lines of the table ----------------------------------------------------------------------------------------------


def test_means_and_paired_differences_by_hand() -> None:
    first, second = lines([*results("a", 0.5, 0.6, 0.7), *results("b", 0.6, 0.8, 0.75)])
    assert first.method == "a"
    assert (first.mean, first.deviation) == pytest.approx((0.6, 0.1))
    assert (first.difference, first.half_width) == (0.0, 0.0)
    # the differences are 0.1, 0.2 and 0.05: mean 0.35 / 3, variance (0.000278 + 0.006944 + 0.004444) / 2
    assert second.difference == pytest.approx(0.35 / 3)
    # Student's t for 95 % and two degrees of freedom is 4.302653
    assert second.half_width == pytest.approx(4.302653 * (0.0116667 / 2 / 3) ** 0.5, rel=1e-5)
    assert second.summary["seed"] == 2
    (alone,) = lines(results("a", 0.5))
    assert (alone.mean, alone.deviation, alone.half_width) == (0.5, 0.0, 0.0)


def test_pairs_are_of_equal_seeds_whatever_the_order_and_whichever_is_missing() -> None:
    """A run that could not train has no accuracy."""
    first, second = lines([*results("a", 0.5, 0.7, seeds=(0, 2)), *results("b", 0.9, 0.6, 0.6, seeds=(2, 1, 0))])
    assert first.mean == pytest.approx(0.6)
    assert second.mean == pytest.approx(0.7)
    assert second.difference == pytest.approx(((0.6 - 0.5) + (0.9 - 0.7)) / 2)


def test_a_number_that_only_some_methods_have() -> None:
    summaries = [*results("a", 0.5, 0.6), *({**row, "accuracy-personal": 0.9} for row in results("b", 0.5, 0.6))]
    first, second = lines(summaries, "accuracy-personal")
    assert first.mean != first.mean
    assert second.mean == pytest.approx(0.9)


def test_the_title_is_of_a_finished_run_of_the_clients_if_there_is_one() -> None:
    failed, centralized, first, second = (
        {"partition": "iid", "error": "diverged"},
        {"partition": "union"},
        {"partition": "classes:1"},
        {"partition": "classes:2"},
    )
    assert typical([failed, centralized, first, second]) is first
    assert typical([failed, centralized]) is centralized


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


# ---- the table in the terminal ---------------------------------------------------------------------------------------

METHODS = ("fedavg", "fixbn:freeze-round=0.3:frozen-lr=0.05", "fedtan:carry=true", "centralized")
RUN: dict[str, Any] = {
    "dataset": "digits",
    "model": "small-cnn",
    "partition": "classes:2",
    "clients": 5,
    "rounds": 200,
    "lr": 0.1,
    "accuracy": 0.931,
    "accuracy-personal": 0.99,
    "accuracy-mean-bn": 0.9,
    "seconds": 51.0,
    "exchanges": 1400,
    "payload-bytes": 119_552_000,
}


def shown(seeds: int = 1, **more: Any) -> str:
    runs = [{**RUN, "method": method, "seed": seed, **more} for method in METHODS for seed in range(seeds)]
    with console.capture() as captured:
        show_comparison(runs, Path())
    return captured.get()


@pytest.mark.parametrize("seeds", [1, 3])
def test_names_and_numbers_are_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    monkeypatch.setattr(console, "width", 80)
    words = shown(seeds, **{"domain-accuracy": {"real": 0.5, "photos": 0.4}}).split()
    for part in ("fixbn", ":freeze-round=0.3", ":frozen-lr=0.05", "fedtan", ":carry=true", "centralized"):
        assert part in words
    # all differ by nothing, which has no sign but plus, and one seed has no spread
    assert words.count("+0.0") == len(METHODS) - 1
    assert ("±" in words) == (seeds > 1)
    # a megabyte has a million bytes
    assert words.count("1,400") == words.count("93.1") == words.count("119.6") == len(METHODS)


def test_a_value_that_was_chosen_is_shown_and_marked_at_the_edge() -> None:
    assert not {"lr", "chosen"} & set(shown().split())
    more: dict[str, Any] = {"chosen": {"lr": "0.1", "mu": "1"}, "chosen-at-edge": ["mu"]}
    words = shown(**more)
    assert words.count("lr=0.1, mu=1*") == len(METHODS)
    assert "* the least or the largest value of its grid" in words
