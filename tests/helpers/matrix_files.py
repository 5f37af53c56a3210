"""The files of a matrix, as `fedbn-flwr reproduce` writes them, without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.experiments.comparison import run_folder
from fedbn_flwr.experiments.recipes.matrix import MatrixRecord, setting_folder
from fedbn_flwr.experiments.recipes.schema import read_recipe

ROUNDS = 4
RECIPE: dict[str, Any] = {
    "place": "Table 1",
    "about": "GN & BN over partitions <and steps>",
    "methods": {"BN": "fedavg", "GN": "fedavg+gn"},
    "vary": {"partition": {"IID": "iid", "Shards": "classes:2"}, "local-steps": {"E=1": 1, "E=9": 9}},
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


def write_run(folder: Path, rows: Sequence[Mapping[str, Any]], method: str = "fedavg", seed: int = 0) -> None:
    """Write what a run has written after so many rounds."""
    folder.mkdir(parents=True)
    options = {"method": method, "seed": seed, "rounds": ROUNDS, "lr": 0.1}
    config = {"options": options, "versions": {"torch": "2.9"}, "hardware": "a machine", "command": "fedbn-flwr run"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def summary_of(accuracy: float, seed: int) -> dict[str, Any]:
    """Return the summary of a run."""
    counted = {"rounds": ROUNDS, "exchanges": 3 * ROUNDS, "paper-bytes": 10**6 * ROUNDS, "payload-bytes": 2 * 10**6}
    domains = {"photo": accuracy, "sketch": accuracy / 2}
    return {"seed": seed, "accuracy": accuracy, "domain-accuracy": domains, "seconds": 2.0, **counted}


def write_matrix(folder: Path, accuracies: Mapping[tuple[str, str], Sequence[float]], **recipe: Any) -> Path:
    """Write a matrix of which these cells have ended; return its folder."""
    source = folder / "mine.yaml"
    source.write_text(yaml.safe_dump({**RECIPE, **recipe}, sort_keys=False))
    matrix = folder / "out"
    MatrixRecord("mine", False, (), 2, ROUNDS, "fedbn-flwr reproduce mine.yaml").write(matrix, source)
    content, rows = read_recipe(str(source)), []
    settings = {setting.name: setting for setting in content.settings}
    for (name, label), values in accuracies.items():
        setting, method = settings[name], content.methods[label]
        for seed, accuracy in enumerate(values):
            place = run_folder(setting_folder(matrix, setting), method, seed)
            lines = [round_row(n, accuracy * n / ROUNDS if n % 2 == 0 else None) for n in range(1, ROUNDS + 1)]
            write_run(place, lines, method, seed)
            (place / "summary.json").write_text(json.dumps({"method": method, **summary_of(accuracy, seed)}))
        runs = [{"method": method, **summary_of(value, seed)} for seed, value in enumerate(values)]
        rows.append({"labels": setting.labels, "label": label, "runs": runs})
    (matrix / "results.json").write_text(json.dumps(rows))
    return matrix
