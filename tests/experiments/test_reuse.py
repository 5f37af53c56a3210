"""Results that were made with code or data of a user's own: taken or trained again only where the
user says so.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import compare, run
from fedbn_flwr.data import Data, load, register_dataset, register_partition
from fedbn_flwr.experiments import UsageError
from fedbn_flwr.experiments.laboratory import UNSET, given_options, study_of
from fedbn_flwr.experiments.runs import BEFORE, Run, finished_summary, set_aside, settle
from fedbn_flwr.models import register_model
from fedbn_flwr.norm import register_norm
from fedbn_flwr.plugins import warn_once
from fedbn_flwr.strategies import FedAvg, FedProx
from tests.helpers.registered import registries_restored
from tests.helpers.runs import DATA, OPTIONS, results, run_in
from tests.helpers.runs import run as command

SMALL: dict[str, Any] = {
    key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "dataset"
}
QUESTION = "has results that were made with code or data of your own"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Forget what a test registers."""
    with registries_restored():
        yield


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a user's module."""
    made = ModuleType("users_parts")
    made.net = lambda num_classes: nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))  # type: ignore[attr-defined]
    made.data = lambda: load(DATA)  # type: ignore[attr-defined]
    made.loss = nn.CrossEntropyLoss(label_smoothing=0.1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_parts", made)
    return made


class Mine(FedAvg):
    """FedAvg by another name."""


def made(method: Any = "fedavg", model: Any = UNSET, data: Any = UNSET, **options: Any) -> Run:
    """Return a run."""
    given = {
        **{key: value for key, value in OPTIONS.items() if key != "dataset" or data is UNSET},
        **options,
    }
    (one,) = study_of([method], given_options(model, data, None, given), 1, {}, 1, "stacked").runs(
        Path("nowhere")
    )
    return one


def quick(method: Any, folder: Path, **options: Any) -> Any:
    return run(method, folder=folder, **{**SMALL, "data": DATA, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"method": Mine},
        {"model": nn.Flatten()},
        {"model": lambda: nn.Flatten()},
        {"data": lambda: load(DATA)},
        {"objective": nn.CrossEntropyLoss()},
        {"model": "users_parts:net"},
        {"dataset": "users_parts:data"},
        {"objective": "users_parts:loss"},
        {"plugins": "users_parts"},
        {"model": "own"},
        {"dataset": "own"},
        {"partition": "own:1"},
        {"norm": "own"},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_run_knows_what_of_it_is_a_users_own(options: dict[str, Any], module: ModuleType) -> None:
    register_model("own")(lambda num_classes, *_: nn.Linear(4, num_classes))
    register_dataset("own")(lambda _: load(DATA))
    register_partition("own:COUNT")(lambda request: [request.order])
    register_norm("own")(lambda model: model)
    assert len(made(**options).experiment.own) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "fedprox:mu=0.1"},
        {"method": FedProx(mu=0.1)},
        {"method": "fixbn+bn-ws"},
        {"model": "timm:resnet18"},
        {"model": "resnet20"},
        {"partition": "dirichlet:0.3", "dataset": "digits"},
        {"augmentation": "crop-flip:padding=2"},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_run_of_built_in_parts_has_nothing_of_a_users_own(options: dict[str, Any]) -> None:
    assert made(**options).experiment.own == []


def grey(shade: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return grey images as if in three colours, which take no memory more: classes differ by their
    brightness.
    """
    labels = torch.arange(60) % 3
    noise = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (noise / 10 + labels.reshape(-1, 1, 1, 1) * shade).expand(-1, 3, -1, -1)
    return (images, labels), (images, labels)


def test_other_data_under_the_same_name_do_not_get_a_finished_score(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        **SMALL,
        "partition": "iid",
        "folder": tmp_path,
        "rounds": 8,
        "progress": False,
    }
    (first,) = compare(["fedavg"], data=grey(0.3), **options).summaries
    (folder,) = tmp_path.glob("fedavg*")
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(
        UsageError,
        match=f"{folder} {QUESTION} .dataset own data.*--reuse takes them, --anew trains",
    ):
        compare(["fedavg"], data=grey(0.0), **options)
    assert (folder / "summary.json").read_bytes() == before
    assert (
        compare(["fedavg"], data=grey(0.0), reuse=True, **options).summaries[0]["seconds"]
        == first["seconds"]
    )
    (other,) = compare(["fedavg"], data=grey(0.0), anew=True, **options).summaries
    assert other["loss"] != first["loss"]
    assert (folder / BEFORE / "1" / "summary.json").read_bytes() == before
    assert json.loads((folder / "summary.json").read_text())["loss"] == other["loss"]
    with pytest.raises(UsageError, match="give one of them"):
        compare(["fedavg"], data=grey(0.0), reuse=True, anew=True, **options)


def test_the_command_asks_in_one_line_and_takes_both_answers(
    tmp_path: Path, module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--model", "users_parts:net"]
    assert command(*words, results_dir=str(tmp_path)) == 0
    folder = run_in(tmp_path)
    before = (folder / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert command(*words, results_dir=str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedbn-flwr: {folder} {QUESTION} (model users_parts:net)")
    assert command(*words, "--reuse", results_dir=str(tmp_path)) == 0
    assert (folder / "summary.json").stat().st_mtime_ns == before
    assert command(*words, "--anew", results_dir=str(tmp_path)) == 0
    again, earlier = results(folder), results(folder / BEFORE / "1")
    assert {**again, "files": []} == {**earlier, "files": []}
    assert (folder / "summary.json").stat().st_mtime_ns != before
    # also of those that came to no end
    (folder / "summary.json").unlink()
    assert command("compare", "--methods", "fedavg", *words[1:], results_dir=str(tmp_path)) == 2


def test_built_in_runs_are_taken_without_a_question_and_trained_again_on_request(
    tmp_path: Path,
) -> None:
    first = quick("fedavg", tmp_path).summaries
    assert quick("fedavg", tmp_path).summaries[0]["seconds"] == first[0]["seconds"]
    assert not list(tmp_path.glob(f"*/{BEFORE}"))
    again = quick("fedavg", tmp_path, anew=True).summaries
    assert again[0]["seconds"] != first[0]["seconds"]
    assert again[0]["accuracy"] == first[0]["accuracy"]


def test_finished_runs_of_another_version_are_taken_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may stand beside runs of this one in a table."""
    caplog.set_level("WARNING", "flwr")
    first = compare(["fedavg", "fedbn"], folder=tmp_path, data=DATA, **SMALL).summaries
    compare(["fedavg", "fedbn"], folder=tmp_path, data=DATA, **SMALL)
    assert not caplog.messages
    for file in tmp_path.glob("*/config.json"):
        content = json.loads(file.read_text())
        content["versions"]["fedbn-flwr"] = "0.0.1"
        file.write_text(json.dumps(content))
    again = compare(["fedavg", "fedbn"], folder=tmp_path, data=DATA, **SMALL).summaries
    assert [one["seconds"] for one in again] == [one["seconds"] for one in first]
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} has finished runs of fedbn-flwr 0.0.1 (now ")
    warn_once.cache_clear()
    caplog.clear()
    compare(["fedavg", "fedbn"], folder=tmp_path, data=DATA, anew=True, **SMALL)
    compare(["fedavg", "fedbn"], folder=tmp_path, data=DATA, **SMALL)
    assert not caplog.messages


class Dies(FedAvg):
    """Stops this process's run in its third round."""

    alive: bool = False

    def update(self, pooled: Any) -> Any:
        """Stop once."""
        if self.round.number == 3 and not type(self).alive:
            raise KeyboardInterrupt
        return super().update(pooled)


@pytest.mark.parametrize("how", ["reuse", "resume"])
def test_an_interrupted_run_of_own_code_goes_on_where_the_user_says_so(
    how: str, tmp_path: Path
) -> None:
    Dies.alive = True
    options = {"rounds": 4, "checkpoint_every": 1}
    whole = quick(Dies, tmp_path / "whole", **options)
    Dies.alive = False
    with pytest.raises(KeyboardInterrupt):
        quick(Dies, tmp_path / "out", **options)
    Dies.alive = True
    with pytest.raises(UsageError, match=QUESTION):
        quick(Dies, tmp_path / "out", **options)
    if how == "reuse":
        quick(Dies, tmp_path / "out", reuse=True, **options)
    else:
        with pytest.raises(UsageError, match="made with a strategy 'dies' of your own"):
            run(resume=str(run_in(tmp_path / "out")))
        run(Dies, resume=str(run_in(tmp_path / "out")))
        with pytest.raises(UsageError, match="resume goes on with a run, and anew begins it again"):
            run(resume=str(run_in(tmp_path / "out")), anew=True)
    assert results(run_in(tmp_path / "out")) == results(run_in(tmp_path / "whole"))
    assert whole.summaries[0]["rounds"] == 4


def test_a_function_that_was_loaded_again_gives_its_new_data(module: ModuleType) -> None:
    def labelled(label: int) -> Callable[[], Data]:
        known = load(DATA)
        return lambda: replace(
            known, train=replace(known.train, labels=torch.full_like(known.train.labels, label))
        )

    found = []
    for label in (1, 2):
        module.data = labelled(label)  # type: ignore[attr-defined]
        found += [load("users_parts:data"), load("users_parts:data")]
    assert [int(data.train.labels[0]) for data in found] == [1, 1, 2, 2]
    assert found[2] is found[3]


def test_a_run_that_is_half_set_aside_is_not_taken_for_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("checkpoint-3", "config.json", "lock", "rounds.jsonl", "summary.json")
    moved: list[str] = []
    for name in names:
        (tmp_path / name).write_text("{}")
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    set_aside(tmp_path)
    assert moved == ["summary.json", "checkpoint-3", "config.json", "rounds.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEFORE, "lock"]
    assert finished_summary(tmp_path) is None


def test_a_folder_of_flowers_run_is_asked_about_too(tmp_path: Path, module: ModuleType) -> None:
    one = replace(made(model="users_parts:net"), folder=tmp_path)
    settle([one])
    (tmp_path / "rounds.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=QUESTION):
        settle([one])
    settle([one], reuse=True)
    settle([one], anew=True)
    assert not (tmp_path / "rounds.jsonl").exists()
