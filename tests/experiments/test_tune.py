"""`fedbn-flwr tune freeze-round`: the window rule and the search, on held-out data, and what is recommended."""

import json
from pathlib import Path

import pytest

from fedbn_flwr.experiments.tune import Candidate, advice, best, candidates
from tests.helpers.runs import run

ROUNDS = {"rounds": "10", "model": "mlp", "evaluate-every": "10", "workers": "1"}


def test_the_rule_comes_first_and_then_the_grid() -> None:
    assert candidates("fixbn:window=5", "0.2, 0.5") == {
        "auto": "fixbn:window=5:freeze-round=auto",
        "0.2": "fixbn:window=5:freeze-round=0.2",
        "0.5": "fixbn:window=5:freeze-round=0.5",
    }


def test_the_best_is_recommended_and_of_equals_the_one_that_freezes_first() -> None:
    rule, early = Candidate("auto", [40, 44], [0.9, 0.7]), Candidate("0.3", [18, 18], [0.8, 0.8])
    never = Candidate("1", [None, None], [0.8, 0.8])
    assert rule.score == pytest.approx(0.8)
    assert rule.after == 42
    assert (
        best([Candidate("auto", [40], [0.75]), Candidate("0.5", [30], [0.75]), Candidate("0.3", [18], [0.7])]).after
        == 30
    )
    assert best([never, early]) is early
    assert advice([never, early], "fixbn") == (
        "Recommended: --method fixbn:freeze-round=18, the best on held-out training data."
    )
    assert advice([Candidate("auto", [30, None], [0.9, 0.9]), early], "fixbn").startswith("Recommended: no freeze.")


def test_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a threshold that every variance is below: the rule fires as soon as its window of 3 rounds is full
    method = "fixbn:window=3:threshold=1000000000"
    options = {**ROUNDS, "grid": "0.2,5,10", "seeds": "2", "method": method}
    assert run("tune", "freeze-round", **options, results_dir=str(tmp_path)) == 0
    tuned = json.loads((tmp_path / "tune.json").read_text())
    rows = {row["freeze-round"]: row for row in tuned["candidates"]}
    assert [*rows] == ["auto", "0.2", "5", "10"]
    assert [row["frozen-after"] for row in rows.values()] == [[4, 4], [2, 2], [5, 5], [None, None]]
    fixed = json.loads((next(tmp_path.glob("*freeze-round=5-seed1")) / "summary.json").read_text())
    assert rows["5"]["scores"][1] == fixed["accuracy"]
    config = json.loads((next(tmp_path.glob("*freeze-round=5-seed1")) / "config.json").read_text())
    assert config["options"]["validation"] == 0.2  # the test data are not looked at
    means = {name: sum(row["scores"]) / 2 for name, row in rows.items()}
    assert means[next(name for name in rows if rows[name]["frozen-after"][0] == tuned["recommended"])] == max(
        means.values()
    )
    assert (tmp_path / "tune.png").exists()
    assert "Recommended: " in capsys.readouterr().out


def test_a_rule_that_never_fires_is_fedavg(tmp_path: Path) -> None:
    options = {**ROUNDS, "grid": "0.5", "method": "fixbn:threshold=0:latest=1"}
    assert run("tune", "freeze-round", **options, results_dir=str(tmp_path)) == 0
    rule = json.loads((tmp_path / "tune.json").read_text())["candidates"][0]
    assert rule["frozen-after"] == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fedbn"}, "method 'fedbn' has no freeze-round to tune; those that have: "),
        ({"method": "fixbn:freeze-round=0.3"}, "sets freeze-round, which is the option that is tuned"),
        ({"freeze-round": "0.3"}, "--freeze-round is the option that is tuned: give the values to try with --grid"),
        ({"grid": "0.5,-2"}, "--grid has shares of the rounds, as 0.3, or numbers of rounds, as 30: '-2' is n"),
        ({"grid": "auto"}, "--grid has shares of the rounds, as 0.3, or numbers of rounds, as 30: 'auto' is n"),
        ({"seeds": "0"}, "--seeds must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_one_line(
    options: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tune", "freeze-round", **options, results_dir=str(tmp_path / "results")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
