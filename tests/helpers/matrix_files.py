"""The files of a study, as commands write them, without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.experiments.recipes.schema import parse_recipe
from fedbn_flwr.experiments.runs import folder_name

ROUNDS = 4
RECIPE: dict[str, Any] = {
    "place": "Table 1",
    "about": "GN & BN over partitions <and steps>",
    "methods": {"BN": "fedavg", "GN": "fedavg+gn"},
    "vary": {
        "partition": {"IID": "iid", "Shards": "classes:2"},
        "local-steps": {"E=1": 1, "E=9": 9},
    },
    "quantities": ["accuracy", "megabytes", "domain-accuracy"],
    "seeds": 2,
    "reported": [
        {
            "place": "page 7",
            "values": {
                "BN": {"IID, E=1": {"accuracy": "90.10 ± 0.40"}, "Shards, E=1": {"accuracy": 80}},
                "GN": {"IID, E=1": {"accuracy": "85.5"}, "Shards, E=1": {"accuracy": 40}},
            },
        }
    ],
    "directions": [{"claim": "GN > BN", "in": "E=1", "column": "accuracy"}],
    "notes": ["seen in <small> only"],
}


def round_row(number: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """Return a row of `rounds.jsonl`."""
    row = {"round": number, "nodes": 2, "train-loss": 2.0 / number, "seconds": 0.5, "exchanges": 3}
    return {**row, "paper-bytes": 10**6, "accuracy": accuracy, **more}


def write_run(
    folder: Path, rows: Sequence[Mapping[str, Any]], method: str = "fedavg", seed: int = 0
) -> None:
    """Write what a run has written after so many rounds."""
    folder.mkdir(parents=True)
    options = {"method": method, "seed": seed, "rounds": ROUNDS, "lr": 0.1}
    config = {
        "options": options,
        "versions": {"torch": "2.9"},
        "hardware": "a machine",
        "command": "fedbn-flwr run",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def summary_of(accuracy: float, seed: int) -> dict[str, Any]:
    """Return the summary of a run."""
    counted = {
        "rounds": ROUNDS,
        "exchanges": 3 * ROUNDS,
        "paper-bytes": 10**6 * ROUNDS,
        "payload-bytes": 2 * 10**6,
    }
    domains = {"photo": accuracy, "sketch": accuracy / 2}
    return {
        "seed": seed,
        "accuracy": accuracy,
        "domain-accuracy": domains,
        "seconds": 2.0,
        **counted,
    }


def write_study(folder: Path, recipe: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Path:
    """Write what was asked for; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    study = {
        "title": "mine",
        "command": "fedbn-flwr ...",
        "engine": "stacked",
        "recipe": recipe,
        "smoke": False,
    }
    (folder / "study.json").write_text(
        json.dumps({**study, "only": [], "seeds": 2, "rounds": ROUNDS, "runs": runs})
    )
    return folder


def write_matrix(
    folder: Path, accuracies: Mapping[tuple[str, str], Sequence[float]], **changes: Any
) -> Path:
    """Write the study of a recipe of which these cells have ended; return its folder."""
    content, folder, runs = {**RECIPE, **changes}, folder / "out", []
    study = parse_recipe("mine", content).study
    for setting, label in study.cells():
        for seed in range(study.seeds):
            name = folder_name(f"{setting.name}-{label}-seed{seed}")
            place = {"setting": setting.name, "labels": dict(setting.labels), "label": label}
            runs.append({**place, "method": study.methods[label], "seed": seed, "folder": name})
            for accuracy in accuracies.get((setting.name, label), ())[seed : seed + 1]:
                write_finished(folder / name, accuracy, str(study.methods[label]), seed)
    return write_study(folder, content, runs)


def write_finished(folder: Path, accuracy: float, method: str = "fedavg", seed: int = 0) -> None:
    """Write a run that has finished."""
    rows = [
        round_row(n, accuracy * n / ROUNDS if n % 2 == 0 else None) for n in range(1, ROUNDS + 1)
    ]
    write_run(folder, rows, method, seed)
    (folder / "summary.json").write_text(
        json.dumps({"method": method, **summary_of(accuracy, seed)})
    )


def write_comparison(
    folder: Path, ended: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any] | None = None
) -> Path:
    """Write a study of runs with these summaries, each with its `method`; return its folder.

    Those without a seed have 0, those without a setting are of the only one, and those with nothing
    else wait.
    """
    runs = []
    for number, summary in enumerate(ended):
        method, path = summary["method"], folder / str(number)
        place = {"setting": "", "labels": {}, "label": method, "method": method, "seed": 0}
        runs.append(
            {
                **place,
                **{key: summary[key] for key in place.keys() & summary.keys()},
                "folder": path.name,
            }
        )
        if summary.keys() - place.keys():
            path.mkdir(parents=True)
            (path / "summary.json").write_text(json.dumps(summary))
    return write_study(
        folder, recipe or {"methods": [*dict.fromkeys(run["label"] for run in runs)]}, runs
    )
