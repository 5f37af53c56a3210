"""Runs that end early: at a score, or after rounds without a better one."""

from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from fedbn_flwr import rows, run
from fedbn_flwr.experiments.output.run_folder import RunFolder
from fedbn_flwr.experiments.output.scoring import Scorer
from fedbn_flwr.experiments.results.values import numbers_of
from tests.helpers.runs import DATA, OPTIONS, results, rounds, run_in

SMALL: dict[str, Any] = {
    key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "dataset"
}


def quick(folder: Path, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {**SMALL, "data": DATA, "rounds": 8, "local_steps": 8, **options}
    summary: dict[str, Any] = run(folder=folder, **given).summaries[0]
    return summary


def scored(
    values: list[float], folder: Path, metric: str = "accuracy", **options: Any
) -> dict[str, Any]:
    """Run with these scores in place of those of the evaluations."""
    left = iter(values)
    with (
        patch.object(Scorer, "score", lambda *_: {metric: next(left)}),
        patch.object(Scorer, "metric", property(lambda _: metric, lambda *_: None), create=True),
    ):
        return quick(
            folder, **{"model": "mlp", "evaluate_every": 1, "rounds": len(values), **options}
        )


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("fedavg", {"engine": "stacked"}),
        pytest.param("fedbn", {"workers": 2}, marks=pytest.mark.slow),
        pytest.param(
            "fedbn", {"engine": "ray"}, marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]
        ),
    ],
)
def test_a_score_ends_a_run(tmp_path: Path, method: str, engine: dict[str, Any]) -> None:
    options: dict[str, Any] = {"method": method, "validation": 0.3, **engine}
    whole = quick(tmp_path / "whole", **options)
    scores = {
        row["round"]: row["accuracy"] for row in rounds(tmp_path / "whole") if "accuracy" in row
    }
    target = max(scores.values())
    last = next(number for number, score in scores.items() if score == target)
    assert 1 < last < 8, scores
    stopped = quick(tmp_path / "stopped", **options, stop_at=target)
    assert rounds(tmp_path / "stopped") == rounds(tmp_path / "whole")[:last]
    assert stopped["accuracy"] == target
    assert (stopped["stopped-after"], stopped["rounds"]) == (last, 8)
    assert stopped["stopped-by"] == f"stop-at={target:g}"
    assert not whole.keys() & {"stopped-after", "stopped-by"}
    # finished: the same again runs nothing, and the model is that of the last round
    assert quick(tmp_path / "stopped", **options, stop_at=target)["seconds"] == stopped["seconds"]
    quick(tmp_path / "shorter", **options, rounds=last, lr_schedule="0.1@4,0.1@6")
    models = [
        load_file(run_in(tmp_path / name) / "model.safetensors") for name in ("stopped", "shorter")
    ]
    assert all((models[0][name] == value).all() for name, value in models[1].items())


@pytest.mark.parametrize(
    ("values", "options", "last"),
    [
        ([0.1, 0.5, 0.4, 0.5, 0.5, 0.6], {"stop_after": 3}, 5),
        ([0.1, 0.5, 0.4, 0.3, 0.6, 0.6], {"stop_after": 3}, None),
        # the scores of rounds 2, 4 and 5
        ([0.5, 0.4, 0.6], {"stop_after": 1, "evaluate_every": 2, "rounds": 5}, 4),
        ([float("nan"), 0.1, float("nan"), 0.05, 0.2], {"stop_after": 2}, 4),
        # the last round ends a run anyway
        ([0.1, 0.2, 0.9], {"stop_at": 0.9}, None),
    ],
)
def test_rounds_without_a_better_score_end_a_run(
    tmp_path: Path, values: list[float], options: dict[str, Any], last: int | None
) -> None:
    assert scored(values, tmp_path, **options).get("stopped-after") == last


def test_a_method_that_needs_no_more_rounds_ends_a_run(tmp_path: Path) -> None:
    ended = quick(tmp_path, method="fed3r")
    assert (ended["stopped-after"], ended["rounds"], ended["exchanges"]) == (1, 8, 1)
    assert ended["stopped-by"] == "fed3r needs no more rounds"
    numbers = numbers_of(rows(tmp_path), ["extra-exchanges"])
    assert numbers["value"].tolist() == [0.0]


def test_of_an_error_less_is_better(tmp_path: Path) -> None:
    falling = [0.9, 0.5, 0.4, 0.1]
    assert scored(falling, tmp_path / "at", "mse", stop_at=0.5)["stopped-after"] == 2
    assert "stopped-after" not in scored(falling, tmp_path / "after", "mse", stop_after=1)
    assert scored(falling[::-1], tmp_path / "rising", "mse", stop_after=2)["stopped-after"] == 3


@pytest.mark.parametrize(
    ("method", "dies"), [("fedbn", "on the way"), ("fednorm", "before its end")]
)
def test_a_run_that_died_ends_where_it_would_have(tmp_path: Path, method: str, dies: str) -> None:
    options = {
        "data": "digits-domains",
        "partition": "domain",
        "clients": 5,
        "method": method,
        "model": "mlp",
    }
    options |= {
        "stop_after": 2,
        "lr": 0.0,
        "checkpoint_every": 1,
        "rounds": 9,
        "local_steps": 1,
        "evaluate_every": 2,
    }
    assert quick(tmp_path / "whole", **options)["stopped-after"] == 4
    score, calls = Scorer.score, count()

    end = patch.object(RunFolder, "finish", side_effect=KeyboardInterrupt)

    def fatal(*arguments: Any) -> Any:
        if next(calls):  # in the second evaluation
            raise KeyboardInterrupt
        return score(*arguments)

    death = end if dies == "before its end" else patch.object(Scorer, "score", fatal)
    with death, pytest.raises(KeyboardInterrupt):
        quick(tmp_path / "died", **options)
    assert any(run_in(tmp_path / "died").glob("checkpoint-*"))
    quick(tmp_path / "died", **options)
    assert results(tmp_path / "died") == results(tmp_path / "whole")
    assert len(list((run_in(tmp_path / "died") / "personal").iterdir())) == 5
