"""Rows of folders: a study's, and those that no file of a study lists."""

import json
from pathlib import Path

import pytest

from fedbn_flwr.experiments import UsageError
from fedbn_flwr.experiments.results.rows import rows
from tests.helpers.matrix_files import (
    RECIPE,
    round_row,
    summary_of,
    write_finished,
    write_run,
    write_study,
)

RUNS = [
    {
        "setting": steps,
        "labels": {"steps": steps},
        "label": label,
        "method": method,
        "seed": seed,
        "folder": f"{label}-{steps}-{seed}",
    }
    for steps in ("E=1", "E=9")
    for label, method in (("BN", "fedavg"), ("GN", "fedavg+gn"))
    for seed in (0, 1)
]


def test_a_study_has_a_row_for_each_run_in_every_state(tmp_path: Path) -> None:
    recipe = {**RECIPE, "vary": {"steps": {"E=1": {"local-steps": 1}, "E=9": {"local-steps": 9}}}}
    recipe |= {
        "reported": [],
        "directions": [{"claim": "GN > BN", "in": "E=1"}],
        "quantities": ["gigabytes"],
    }
    study = write_study(tmp_path / "study", recipe, RUNS)
    for name, end in (
        ("BN-E=1-0", summary_of(0.5, 0)),
        ("BN-E=1-1", {"failed": "it is <nan>", "diverged": 2}),
    ):
        write_run(study / name, [round_row(1, 0.3)])
        (study / name / "summary.json").write_text(json.dumps({"method": "fedavg", **end}))
    write_run(study / "GN-E=1-0", [round_row(1, 0.3)])
    # a run that is not asked for is none of the study
    write_run(study / "LN-E=1-0", [round_row(1, 0.3)])
    frame = rows(study)
    assert list(frame["folder"].map(lambda folder: Path(folder).name)) == [
        run["folder"] for run in RUNS
    ]
    assert list(frame["state"]) == ["finished", "failed", "unfinished", *["waiting"] * 5]
    assert list(frame["setting"].unique()) == ["E=1", "E=9"]
    first, second = frame.iloc[0], frame.iloc[1]
    assert (first["accuracy"], first["label"], first["method"], first["seed"]) == (
        0.5,
        "BN",
        "fedavg",
        0,
    )
    assert (second["error"], second["diverged"], second["seed"]) == ("it is <nan>", 2, 1)


def test_a_comparison_is_a_study_without_settings(tmp_path: Path) -> None:
    methods = ("fedavg", "mymethod:of=a-plugin")
    runs = [
        {"labels": {}, "label": name, "method": name, "seed": 0, "folder": name[:8]}
        for name in methods
    ]
    frame = rows(write_study(tmp_path / "study", {"methods": list(methods), "options": {}}, runs))
    assert [*zip(frame["label"], frame["setting"], frame["state"], strict=True)] == [
        (m, "", "waiting") for m in methods
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"title": "mine", "recipe": {}, "runs": [{}]}',
        '{"title": "a", "recipe": {}, "runs": []}',
    ],
)
def test_a_study_that_cannot_be_read_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(UsageError, match=r"study.json is not the record of a study"):
        rows(tmp_path)


def test_single_runs_are_rows_of_their_own_files(tmp_path: Path) -> None:
    """Those of `flwr run` too, whose folder is the run's; a folder of folders has no results."""
    write_run(tmp_path / "one", [round_row(1, 0.3)], "fixbn", 1)
    write_finished(tmp_path / "two", 0.5)
    (tmp_path / "two/summary.json").write_text('{"method": "fedavg", "error": "it is <nan>"}')
    frame = rows([tmp_path / "one", tmp_path / "two"])
    assert [*zip(frame["label"], frame["seed"], frame["state"], strict=True)] == [
        ("fixbn", 1, "unfinished"),
        ("fedavg", 0, "failed"),
    ]
    with pytest.raises(UsageError, match="holds no results"):
        rows(tmp_path)


@pytest.mark.parametrize(("lr", "labels"), [(0.1, ["fedavg"]), (0.3, ["first", "second"])])
def test_single_runs_are_seeds_of_one_method_if_nothing_else_differs(
    lr: float, labels: list[str], tmp_path: Path
) -> None:
    for seed, (name, rate) in enumerate({"first": 0.1, "second": lr}.items()):
        write_finished(tmp_path / name, 0.5, seed=seed)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["options"] |= {"lr": rate, "timeout": float(seed)}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert list(dict.fromkeys(rows([tmp_path / "first", tmp_path / "second"])["label"])) == labels
