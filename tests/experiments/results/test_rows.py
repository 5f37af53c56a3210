"""Rows of folders: a study's, those that no file of a study lists, and those of older versions."""

import json
from pathlib import Path

import pytest

from fedbn_flwr.experiments import UsageError
from fedbn_flwr.experiments.results.folders import read_parts, rows
from tests.helpers.matrix_files import RECIPE, ROUNDS, round_row, summary_of, write_finished, write_run, write_study

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
    recipe |= {"reported": [], "directions": [{"claim": "GN > BN", "in": "E=1"}], "quantities": ["gigabytes"]}
    study = write_study(tmp_path / "study", recipe, RUNS)
    for name, end in (("BN-E=1-0", summary_of(0.5, 0)), ("BN-E=1-1", {"failed": "it is <nan>", "diverged": 2})):
        write_run(study / name, [round_row(1, 0.3)])
        (study / name / "summary.json").write_text(json.dumps({"method": "fedavg", **end}))
    write_run(study / "GN-E=1-0", [round_row(1, 0.3)])
    # a run that is not asked for is none of the study
    write_run(study / "LN-E=1-0", [round_row(1, 0.3)])
    frame = rows(study)
    assert list(frame["folder"].map(lambda folder: Path(folder).name)) == [run["folder"] for run in RUNS]
    assert list(frame["state"]) == ["finished", "failed", "unfinished", *["waiting"] * 5]
    assert list(frame["setting"].unique()) == ["E=1", "E=9"]
    first, second = frame.iloc[0], frame.iloc[1]
    assert (first["accuracy"], first["label"], first["method"], first["seed"]) == (0.5, "BN", "fedavg", 0)
    assert (second["error"], second["diverged"], second["seed"]) == ("it is <nan>", 2, 1)
    (part,) = read_parts([study])
    assert (part.title, part.command, part.is_small) == ("mine", "fedbn-flwr ...", False)
    assert (part.paper.quantities, part.paper.rounds) == (["gigabytes"], ROUNDS)
    assert part.paper.directions[0].text == "GN > BN"


def test_a_comparison_is_a_study_without_settings(tmp_path: Path) -> None:
    methods = ("fedavg", "mymethod:of=a-plugin")
    runs = [{"labels": {}, "label": name, "method": name, "seed": 0, "folder": name[:8]} for name in methods]
    (part,) = read_parts([write_study(tmp_path / "study", {"methods": list(methods), "options": {}}, runs)])
    assert [(row["label"], row["setting"], row["state"]) for row in part.rows] == [(m, "", "waiting") for m in methods]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("study.json", text) for text in ("", "[]", '{"title": "mine", "recipe": {}, "runs": [{}]}')),
        ("study.json", '{"title": "a", "recipe": {}, "runs": []}'),
        ("matrix.json", '{"title": "mine"}'),
    ],
)
def test_a_study_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "recipe.yaml").write_text("methods: [fedavg]")
    with pytest.raises(UsageError, match=f"{name} is not the record of a study"):
        rows(tmp_path)


def test_folders_of_older_versions_are_rows(tmp_path: Path) -> None:
    """A matrix of which not every run has begun, a comparison, and single runs, of `flwr run` too."""
    matrix, both = tmp_path / "out", tmp_path / "both"
    done = [{"method": "fedavg", **summary_of(accuracy, seed)} for seed, accuracy in enumerate((0.9, 0.8))]
    for row in done:
        write_finished(matrix / f"IID__E=1/fedavg-seed{row['seed']}", row["accuracy"], seed=row["seed"])
    recipe = {"methods": {"BN": "fedavg", "GN": "fedavg+gn"}, "options": {"rounds": 4}}
    axes = {"partition": {"IID": "iid"}, "local-steps": {"E=1": 1, "E=9": 9}}
    reported = [{"place": "page 7", "values": {"BN": {"IID, E=1": 90.1}}}]
    (matrix / "recipe.yaml").write_text(json.dumps({**recipe, "vary": axes, "reported": reported}))
    (matrix / "matrix.json").write_text(json.dumps({"smoke": False, "only": ["E=1"], "seeds": 2, "rounds": 4}))
    for method, seed in (("fedavg", 0), ("fixbn", 0), ("fixbn", 1)):
        write_run(both / f"{method}-seed{seed}", [round_row(1, 0.3)], method, seed)
    (both / "fixbn-seed0" / "summary.json").write_text('{"method": "fixbn", "error": "it is <nan>"}')
    write_finished(tmp_path / "one", 0.5)
    frame = rows([matrix, both, tmp_path / "one"])
    states = [*["finished"] * 2, *["waiting"] * 2, "unfinished", "failed", "unfinished", "finished"]
    assert list(frame["state"]) == states
    assert list(frame["accuracy"].dropna()) == [0.9, 0.8, 0.5]
    assert list(frame["label"]) == ["BN", "BN", "GN", "GN", "fedavg", "fixbn", "fixbn", "fedavg"]
    assert list(frame["seed"][:4]) == [0, 1, 0, 1]
    number = read_parts([matrix])[0].paper.reported[0].number("BN", "IID, E=1", "accuracy")
    assert number is not None
    assert number.mean == 90.1
    assert (frame["setting"].iloc[0], frame["labels"].iloc[0]) == (
        "IID, E=1",
        {"partition": "IID", "local-steps": "E=1"},
    )
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
