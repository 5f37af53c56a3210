"""Adapt the models of kept runs in several ways: `python docs/unseen.py results/here-unseen`.

It reads runs of the recipe here/unseen, or of `fedbn-flwr compare --unseen each`, and writes a row
for each run and way into docs/measured/unseen.csv: as the model is, then with statistics of so many
unlabeled images of the domain that nobody trained with, `two classes` of 100 images that have two
classes only, and `pseudo` samples that the model's own statistics count as (Schneider et al.,
NeurIPS 2020).
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr import adapt, rows, state
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data import leave_out
from fedbn_flwr.experiments.experiment import read_data, resolve
from fedbn_flwr.experiments.material import data_form, fresh_model, load_data
from fedbn_flwr.experiments.output.run_folder import read_config
from fedbn_flwr.experiments.results.rows import known
from fedbn_flwr.models import read_weights
from fedbn_flwr.norm import lacks
from fedbn_flwr.randomness import torch_generator

FILE = Path(__file__).parent / "measured" / "unseen.csv"
COLUMNS = ("data", "domain", "method", "seed", "inputs", "pseudo", "accuracy, %")
COUNTS, PSEUDO = (10, 20, 100), (0, 16, 64, 256)


def measured(run: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Yield a row for each way in which a run's model is tested."""
    options = {
        key: value
        for key, value in read_config(Path(run["folder"]))["options"].items()
        if key not in ("method", "resume")
    }
    config = resolve({**options, "method": run["method"]}).config
    data = load_data(config.data)
    model = fresh_model(config.model, data_form(data), config.seed)
    _, split = leave_out(
        read_data(resolve({**options, "method": run["strategy"], "unseen": ""}).config.data),
        run["unseen"],
    )
    place = {
        "data": data.name,
        "domain": run["unseen"],
        "method": run["method"].partition(":unseen=")[0],
        "seed": run["seed"],
    }

    def row(way: str, accuracy: float, pseudo: int = 0) -> dict[str, object]:
        return {**place, "inputs": way, "pseudo": pseudo, "accuracy, %": f"{100 * accuracy:.2f}"}

    yield row("none", run["accuracy"])
    if known(run.get("accuracy-mean-bn")):
        yield row("none, mean BN", run["accuracy-mean-bn"])
    if lacks(model, "statistics", in_training=False):
        return
    state.load(model, read_weights(Path(run["folder"]) / "model.safetensors"))
    mean, std = (
        torch.tensor(numbers).view(-1, *[1] * (split.inputs.dim() - 2))
        for numbers in (run["mean"], run["std"])
    )
    inputs = split.inputs / 255 if split.inputs.dtype == torch.uint8 else split.inputs
    order = torch.randperm(len(split), generator=torch_generator(run["seed"], "unlabeled"))
    drawn = order[torch.isin(split.labels[order], split.labels[order].unique()[:2])]
    ways = {
        **{str(count): order[:count] for count in COUNTS},
        "two classes": drawn[:100],
        "all": order,
    }
    for way, chosen in ways.items():
        batches = [((inputs[part] - mean) / std) for part in chosen.split(500)]
        for pseudo in PSEUDO if way != "all" and run["strategy"] == "fedavg" else (0,):
            adapted = adapt(model, batches, len(chosen) / (len(chosen) + pseudo))
            yield row(way, evaluate(adapted, data.test, data.num_classes, "cpu").accuracy, pseudo)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with FILE.open("w") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for folder in sys.argv[1:]:
            for each in rows(folder).to_dict("records"):
                if each["state"] == "finished" and each["unseen"]:
                    table.writerows(measured(each))
