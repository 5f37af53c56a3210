"""Prints the table of docs/fedtan.md: how far sweeps are from the exact gradient, by their number.

python docs/sweeps_table.py mlp small-cnn resnet20
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr import data, models
from fedbn_flwr.layerwise import gradients
from fedbn_flwr.norm import bn_layers

CLIENTS, BATCH, SEEDS = 5, 32, 3
SWEEPS = (0, 1, 2, 3, 5, 10, 20)


def mean_gradient(name: str, seed: int, **options: object) -> Tensor:
    """The weighted mean of the clients' gradients at a fresh model, two classes of the digits a client."""
    digits = data.load("digits")
    model = models.build(name, in_channels=1, image_size=8, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for indices in data.partition("classes:2", digits, CLIENTS, seed):
        chosen = torch.from_numpy(indices)[torch.randperm(len(indices), generator=generator)[:BATCH]]
        inputs, labels = digits.train.batch(chosen)
        batches.append((inputs.double(), labels))
    found = gradients(model, batches, [1.0] * CLIENTS, F.cross_entropy, **options)  # type: ignore[arg-type]
    return torch.stack([torch.cat([part.flatten() for part in each.values()]) for each in found]).mean(0)


def error(name: str, **options: object) -> float:
    """The relative error of the mean gradient, averaged over seeds."""
    total = 0.0
    for seed in range(SEEDS):
        exact = mean_gradient(name, seed)
        total += float((mean_gradient(name, seed, **options) - exact).norm() / exact.norm())
    return total / SEEDS


def main() -> None:
    """One column a model."""
    names = sys.argv[1:]
    torch.set_num_threads(1)
    layers = {name: len(bn_layers(models.build(name, in_channels=1, image_size=8))) for name in names}
    print("| S | exchanges |", " | ".join(f"`{name}` (L = {layers[name]})" for name in names), "|")
    print("|---|---|" + "---|" * len(names))
    for sweeps in SWEEPS:
        cells = [f"{error(name, sweeps=sweeps):.2g}" if sweeps <= layers[name] + 1 else "" for name in names]
        print(f"| {sweeps} | {2 * sweeps + 1} |", " | ".join(cells), "|", flush=True)
    print("| forward only | L + 1 |", " | ".join(f"{error(name, exchange='forward'):.2g}" for name in names), "|")


if __name__ == "__main__":
    main()
