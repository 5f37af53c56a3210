"""A study: its list of runs, how values are chosen, what fails alone, and runs side by side."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr import compare
from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.engines import ENGINES
from fedbn_flwr.experiments.experiment import Experiment
from fedbn_flwr.experiments.output.recorder import Journal, Progress, Summary
from fedbn_flwr.experiments.recipes.schema import parse_recipe
from fedbn_flwr.experiments.runs import Run
from fedbn_flwr.experiments.stopping import SIDE_BY_SIDE
from fedbn_flwr.experiments.study import (
    VALIDATION_SHARE,
    Announce,
    Setting,
    Study,
    _chosen,
    _work,
    execute,
)
from fedbn_flwr.strategies import CannotTrainError
from tests.helpers.deaths import Death, dying
from tests.helpers.runs import OPTIONS, command, results, run, run_in

AXES: dict[str, Any] = {
    "about": "a recipe of one's own",
    "options": {
        key: value for key, value in OPTIONS.items() if key not in ("partition", "local-steps")
    },
    "methods": ["fedavg", "fixbn"],
    "vary": {"partition": {"IID": "iid", "skewed": "classes:2"}, "local-steps": [1, 2]},
}


def study(methods: Sequence[str], options: dict[str, Any] = OPTIONS, **more: Any) -> Study:
    return Study({method: method for method in methods}, [Setting({}, options)], **more)


class Engine:
    """An engine that trains nothing: its accuracy is a function of the experiment."""

    def __init__(self, **accuracies: float) -> None:
        self.accuracies = accuracies
        self.ran: list[Experiment] = []
        self.fails = set[tuple[str, int]]()

    def __call__(
        self, experiment: Experiment, folder: Path, progress: Progress | None = None
    ) -> Summary:
        self.ran.append(experiment)
        config = experiment.config
        accuracy = self.accuracies.get(f"lr{config.training.lr:g}".replace(".", "_"), 0.5)
        if (f"lr{config.training.lr:g}", config.seed) in self.fails:
            raise CannotTrainError("it diverged")
        folder.mkdir(parents=True)
        return {
            "method": config.method,
            "seed": config.seed,
            "lr": config.training.lr,
            "accuracy": accuracy,
        }


def rows_of(asked: Study, folder: Path) -> list[Summary]:
    return [summary for _, summary in execute(asked.runs(folder), lambda _: None)]


# ---- the list of runs ----------------------------------------------------------------------------


def test_methods_share_everything_but_what_they_say(tmp_path: Path) -> None:
    runs = study(["fedavg", "fedprox:mu=0.5:lr=0.05"], {**OPTIONS, "seed": "7"}, seeds=2).runs(
        tmp_path
    )
    one, other = runs[1].experiment.config, runs[3].experiment.config
    assert one.seed == other.seed == 8
    assert (one.training.lr, other.training.lr) == (0.1, 0.05)
    assert {key for key, value in one.to_mapping().items() if value != other.to_mapping()[key]} == {
        "method",
        "lr",
    }
    assert [run.folder.name.rpartition("-")[0] for run in runs[1:3]] == [
        "fedavg-seed8",
        "fedprox_mu=0.5_lr=0.05-seed7",
    ]


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Its name depends on all that was asked, and on nothing else: not on the other runs, nor on
    where it lies.
    """
    recipe = parse_recipe(
        "mine", {**AXES, "seeds": 2, "methods": {"one": "fedavg", "two": "fedavg+gn"}}
    )
    runs = recipe.study.runs(tmp_path)
    assert len({run.folder for run in runs}) == len(runs) == 16
    alone = recipe.only(["two", "skewed", "local-steps=2"]).study.runs(tmp_path / "elsewhere")
    assert {run.folder.name for run in alone} < {run.folder.name for run in runs}
    assert alone[0].folder.name.startswith("skewed__local-steps=2-two-seed0-")
    changed = replace(recipe.study, engine="inprocess").runs(tmp_path)
    assert not {run.folder for run in changed} & {run.folder for run in runs}


def test_a_method_of_many_letters_has_a_folder(tmp_path: Path) -> None:
    long = study(
        ["fixbn:lr-schedule=" + ",".join(f"0.{number}@{number}" for number in range(1, 60))]
    ).runs(tmp_path)
    long[0].folder.mkdir()


# ---- choosing values -----------------------------------------------------------------------------


def test_each_method_runs_with_its_best_values_of_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(lr0_1=0.6, lr0_3=0.8, lr1=0.7)
    monkeypatch.setitem(ENGINES, "stacked", engine)
    asked = study(
        ["fedavg", "fedprox:lr=0.1:mu=1"], seeds=2, grid={"lr": [0.1, 0.3, 1.0], "mu": [0.1]}
    )
    assert [(row["method"], row["seed"], row["lr"]) for row in rows_of(asked, tmp_path)] == [
        ("fedavg", 0, 0.3),
        ("fedavg", 1, 0.3),
        # a method keeps what it names
        ("fedprox:lr=0.1:mu=1", 0, 0.1),
        ("fedprox:lr=0.1:mu=1", 1, 0.1),
    ]
    assert len(engine.ran) == 4 + 2 * 3
    searched, trained = engine.ran[:6], engine.ran[6:]
    assert trained[0].choice is not None
    assert trained[0].choice.summary() == {
        "chosen": {"lr": 0.3},
        "chosen-at-edge": [],
        "grid": {"lr=0.1": 0.6, "lr=0.3": 0.8, "lr=1.0": 0.7},
    }
    assert trained[2].choice is None
    # values are chosen by two seeds on held-out training data, and what is reported is not
    assert [(each.config.seed, each.config.data.validation) for each in searched] == [
        (seed, VALIDATION_SHARE) for _ in range(3) for seed in (0, 1)
    ]
    assert [(each.config.seed, each.config.data.validation) for each in trained] == [
        (0, 0.0),
        (1, 0.0),
    ] * 2


@pytest.mark.parametrize("best", [0.2, -2.5])
def test_a_value_that_diverges_with_one_seed_is_out(
    best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However low the others score: a task of one's own may have scores that are below every
    share.
    """
    engine = Engine(lr0_1=best, lr9=0.9)
    engine.fails = {("lr9", 1)}
    monkeypatch.setitem(ENGINES, "stacked", engine)
    (row,) = rows_of(study(["fedavg"], grid={"lr": [9.0, 0.1]}), tmp_path / "one")
    assert row["lr"] == 0.1
    (row,) = rows_of(study(["fedavg"], grid={"lr": [9.0]}), tmp_path / "two")
    assert row["failed"] == "no value of its grid came through: it diverged"


def test_options_of_single_methods_are_chosen_for_these() -> None:
    methods = ["fedavg", "fixbn"]
    grid: dict[str, list[Any]] = {"freeze-round": ["auto", 0.34, 1], "momentum": [0, 0.5]}
    first, second = (study(methods, grid=grid).choice(method) for method in methods)
    assert first is not None
    assert [*first.combinations()] == ["momentum=0", "momentum=0.5"]
    assert second is not None
    assert len(second.combinations()) == 6
    at_edge = [
        replace(second, values={"freeze-round": value, "momentum": 0.5})
        for value in grid["freeze-round"]
    ]
    assert [choice.summary()["chosen-at-edge"] for choice in at_edge] == [
        ["momentum"],
        ["freeze-round", "momentum"],
        ["freeze-round", "momentum"],
    ]


# ---- what becomes of runs ------------------------------------------------------------------------


def test_a_comparison_in_which_nothing_trains_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        "compare",
        "--methods",
        "fedavg,fedbn",
        model="mlp",
        batch_size="1",
        results_dir=str(tmp_path),
    )
    assert code == 1
    output = capsys.readouterr()
    assert "fedavg, seed 0: no node could train in round 1" in output.out
    assert "fedbn-flwr: 2 of 2 methods failed: fedavg, fedbn" in output.err


def test_a_run_that_fails_before_its_first_round_leaves_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.fails = {("lr0.1", 1)}
    monkeypatch.setitem(ENGINES, "stacked", engine)
    runs = study(["fedavg"], seeds=2).runs(tmp_path)
    assert ["failed" in row for _, row in execute(runs, lambda _: None)] == [False, True]
    assert json.loads((runs[1].folder / "summary.json").read_text()) == {
        "method": "fedavg",
        "seed": 1,
        "lr": 0.1,
        "failed": "it diverged",
    }
    engine.fails.clear()
    assert runs[1].finished() is None


def reproduce(folder: Path, content: object, *words: str) -> int:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return main(
        ["reproduce", str(path), "--results-dir", str(folder / "out"), "--device", "cpu", *words]
    )


def summaries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the summaries of a study, without times, by the folders of their runs."""
    listed = json.loads((folder / "study.json").read_text())["runs"]
    found = {
        row["folder"]: json.loads((folder / row["folder"] / "summary.json").read_text())
        for row in listed
    }
    return {
        name: {key: value for key, value in row.items() if key != "seconds"}
        for name, row in found.items()
    }


def test_a_part_of_a_recipe_and_then_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(tmp_path, AXES, "--seeds", "2", "--only", "skewed", "--only", "fixbn") == 0
    part = summaries(tmp_path / "out")
    # 1 of 2 partitions x 2 numbers of local steps x 1 method x 2 seeds
    assert len(part) == 4
    options = json.loads(
        (run_in(tmp_path / "out", "skewed__local-steps=2-fixbn", 1) / "config.json").read_text()
    )
    chosen = options["options"]
    assert (chosen["local-steps"], chosen["partition"], chosen["seed"]) == (2, "classes:2", 1)
    capsys.readouterr()
    assert reproduce(tmp_path, AXES, "--seeds", "2") == 0
    assert "4 of 16 runs finished" in capsys.readouterr().out
    assert part.items() < summaries(tmp_path / "out").items()


def test_a_recipe_of_which_nothing_trains_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(tmp_path, {**AXES, "vary": {"lr": [1e30]}}) == 1
    assert "no run could train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"partition": "classes:9"}, [], "partition 'classes:9'"),
        ({"state-dir": "states"}, ["--engine", "ray"], "state-dir 'states' only works with"),
        ({"dataset": "folder:/nowhere"}, [], "/nowhere is missing"),
    ],
)
def test_what_cannot_be_in_one_cell_is_said_before_anything_starts(
    options: dict[str, Any],
    words: Sequence[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = {"as it is": {"partition": "iid"}, "impossible": options}
    assert (
        reproduce(tmp_path, {**AXES, "vary": {"kind": parts}, "smoke": {"seeds": 1}}, *words) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedbn-flwr: recipe mine (--smoke runs it in small on embedded data): ")
    assert f"'fedavg' in 'impossible': {message}" in line
    assert not (tmp_path / "out").exists()


def test_values_are_chosen_for_each_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {
        **AXES,
        "methods": ["fedavg"],
        "vary": {"partition": ["iid"]},
        "seeds": 1,
        "grid": {"lr": [0.0, 0.1]},
    }
    assert reproduce(tmp_path, content) == 0
    (row,) = summaries(tmp_path / "out").values()
    # a rate of 0 learns nothing
    assert (row["lr"], row["chosen-at-edge"], set(row["grid"])) == (
        0.1,
        ["lr"],
        {"lr=0.0", "lr=0.1"},
    )
    table = capsys.readouterr().out
    assert "lr=0.1*" in table
    assert "the least or the largest value of its grid" in table


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # 2 seeds x 3 rounds x 2 steps x (2 clients + 1 node with all data + 2 clients)
        ("compare --methods fedavg,centralized,fedtan --seeds 2", "3 cells, 60 client steps"),
        # (2 seeds + 2 seeds of 3 rates) x 3 rounds x 2 clients x (1 + 2) steps x 2 methods
        ("reproduce mine.yaml", "4 cells, 288 client steps"),
        (
            "compare --methods fedavg,fixbn --seeds 2 --grid lr=0.01,0.1,1",
            "2 cells, 192 client steps",
        ),
    ],
)
def test_a_plan_says_how_many_steps(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {**AXES, "vary": {"local-steps": [1, 2]}, "seeds": 2, "grid": {"lr": [0.01, 0.1, 1]}}
    Path("mine.yaml").write_text(yaml.safe_dump(content))
    options = (
        []
        if words.startswith("reproduce")
        else [f"--{key}={value}" for key, value in OPTIONS.items()]
    )
    assert main([*words.split(), *options, "--dry-run"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml"}
    shown = capsys.readouterr().out
    assert said in shown
    assert "?" not in shown


@pytest.mark.slow
def test_side_by_side_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    content = {**AXES, "methods": ["fedavg"], "vary": {"lr": [0.1, 1e30]}}
    assert reproduce(tmp_path / "one", content) == 0
    assert reproduce(tmp_path / "two", content, "--side-by-side", "2") == 0
    one, two = summaries(tmp_path / "one/out"), summaries(tmp_path / "two/out")
    assert two == one
    assert ["diverged" in row for row in one.values()] == [False, True]
    # the first one ends last
    methods = ["fedavg:rounds=40", "fedbn"]
    options: dict[str, Any] = {key.replace("-", "_"): value for key, value in OPTIONS.items()}
    for name, count in (("three", 1), ("four", 2)):
        found = compare(methods, folder=tmp_path / name, side_by_side=count, **options)
        assert list(found.differences) == methods
    for method in ("fedavg_rounds=40", "fedbn"):
        here, there = (results(run_in(tmp_path / name, method)) for name in ("three", "four"))
        assert here == there


def test_a_run_beside_others_leaves_an_interrupt_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count the SIGTERM that its parent then sends as the second signal, which ends it at
    once.
    """
    runs, record, before = (
        study(["fedavg"]).runs(tmp_path),
        Journal.record,
        signal.getsignal(signal.SIGINT),
    )

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return record(*arguments)

    monkeypatch.setattr(Journal, "record", interrupted)
    here, there = Pipe()
    try:
        _work(there, "", runs, verbose=False)
    finally:
        SIDE_BY_SIDE.clear()
        signal.signal(signal.SIGINT, before)
    assert here.poll()
    (summary,) = here.recv()
    assert "failed" not in summary


def test_values_that_change_other_options_are_chosen_once(tmp_path: Path) -> None:
    """`centralized` makes its batches as large as those of all clients of a round together."""
    words = [
        "compare",
        "--methods",
        "centralized",
        "--grid",
        "fraction-train=0.5,1",
        "--grid-seeds",
        "1",
    ]
    for _ in range(2):
        assert run(*words, results_dir=str(tmp_path)) == 0
    assert len(summaries(tmp_path)) == 1


def test_a_run_of_a_grid_goes_on_by_its_folder(tmp_path: Path) -> None:
    words = command(
        "compare",
        "--methods",
        "fedavg",
        "--grid",
        "lr=0.1,0.3",
        "--grid-seeds",
        "1",
        checkpoint_every="1",
    )
    words = [*words, "--results-dir", str(tmp_path)]
    with dying(0) as whole:
        assert main([*words, "--results-dir", str(tmp_path / "whole")]) == 0
    with dying(whole.count - 9), pytest.raises(Death):
        main(words)
    assert main(["run", "--resume", str(run_in(tmp_path, "fedavg"))]) == 0
    # with what was chosen
    assert results(run_in(tmp_path, "fedavg")) == results(run_in(tmp_path / "whole", "fedavg"))


def test_the_least_error_is_chosen_also_where_the_last_run_ends_without_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {0.1: 0.5, 0.2: 0.3, 0.3: 0.9}

    def trained(run: Run, _: Announce) -> Summary:
        error = errors.get(run.experiment.config.training.lr)
        return {"failed": "its process ended"} if error is None else {"metric": "mse", "mse": error}

    monkeypatch.setattr("fedbn_flwr.experiments.study._train", trained)
    (one,) = study(["fedavg"], OPTIONS, grid={"lr": [*errors, 0.4]}, grid_seeds=1).runs(tmp_path)
    assert one.experiment.choice
    choice, failure = _chosen(one.experiment.choice, one.tried, lambda _: None)
    assert choice.values == {"lr": 0.2}
    assert failure == "its process ended"


# ---- runs that diverge ---------------------------------------------------------------------------


#: trains for two rounds; then every model is infinite at once
METHOD = "fedavg:lr-schedule==1e30@2"
SAID = "training diverged at round 3: no node has had a usable reply since"
CALM = {"model": "mlp", "rounds": "20", "evaluate_every": "20", "workers": "1"}


def test_a_run_ends_at_once_with_one_line_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", "--method", METHOD, results_dir=str(tmp_path), **CALM) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedbn-flwr: {SAID} (node 1000: ")
    assert line.endswith("the learning rate is 1e+30: try a lower learning rate")
    summary = json.loads((run_in(tmp_path) / "summary.json").read_text())
    assert (summary["diverged"], summary["rounds-done"]) == (3, 4)
    assert summary["failed"].startswith(SAID)


def test_in_a_comparison_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        "compare",
        "--methods",
        f"fedavg,{METHOD},fedavg+gn",
        "--seeds",
        "2",
        results_dir=str(tmp_path),
        **CALM,
    )
    assert code == 1
    output = capsys.readouterr()
    rows = [line for line in output.out.splitlines() if "training" not in line]
    assert sum("diverged at round 3" in row for row in rows) == 1
    assert sum(row.count("±") for row in rows) >= 2
    assert {"fedavg", "fedavg+gn"} <= {row.split()[0] for row in rows if row.split()}
    assert f"fedbn-flwr: 1 of 3 methods failed: {METHOD}" in output.err
    runs = json.loads((tmp_path / "study.json").read_text())["runs"]
    records = [json.loads((tmp_path / run["folder"] / "summary.json").read_text()) for run in runs]
    assert [record.get("diverged") for record in records] == [None, None, 3, 3, None, None]
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    assert "diverged at round 3" in (tmp_path / "page" / "report.html").read_text()
