"""Draws README's picture of what happens to BN: `python docs/draw_idea.py`.

A small CNN after 40 rounds of `fedavg` on Fashion-MNIST, ten clients with two classes each: what
goes into one channel of its last BN layer on the images of two clients, and what BN makes of it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from fedbn_flwr import norm, run
from fedbn_flwr.data import Split, load, partition
from fedbn_flwr.experiments.results.plots import figure

DOCS = Path(__file__).parent
CLIENTS = 10
SEED = 0
#: images of a client that are looked at
IMAGES = 500
#: one client in blue, the other in orange; what the server has in grey
COLOURS = ("#0072B2", "#D55E00")
GREY = "#444444"
EDGES = 60


def seen(model: torch.nn.Module, layer: str, split: Split, indices: Any) -> torch.Tensor:
    """Return what goes into a BN layer for images, a row for each channel."""
    kept: list[torch.Tensor] = []
    handle = norm.bn_layers(model)[layer].register_forward_pre_hook(
        lambda _, inputs: kept.append(inputs[0].transpose(0, 1).flatten(1))
    )
    rows = torch.as_tensor(indices[:IMAGES])
    with torch.no_grad():
        for inputs, _ in split.batches(rows, [len(rows)], torch.device("cpu")):
            model.eval()(inputs)
    handle.remove()
    return torch.cat(kept, 1)


def farthest(values: list[torch.Tensor]) -> tuple[int, int, int]:
    """Return the channel and the two clients whose means lie farthest apart, in the mean standard
    deviation.
    """
    means = torch.stack([value.mean(1) for value in values])
    deviation = torch.stack([value.std(1) for value in values]).mean(0)
    gaps = (means[:, None] - means[None]) / deviation
    place = int(gaps.argmax())
    first, rest = divmod(place, means.shape[0] * means.shape[1])
    second, channel = divmod(rest, means.shape[1])
    return channel, first, second


def draw(panel: Axes, values: list[np.ndarray], names: list[str]) -> None:
    """Draw the distribution of each client's values."""
    edges = np.linspace(*np.percentile(np.concatenate(values), [0.2, 99.8]), EDGES)
    for value, colour, name in zip(values, COLOURS, names, strict=True):
        panel.hist(value, edges, density=True, color=colour, alpha=0.45, label=name)
    panel.set(yticks=[])
    panel.spines[["left", "right", "top"]].set_visible(False)


def mark(panel: Axes, mean: float, deviation: float, colour: str, height: float, text: str) -> None:
    """Draw a mean and a standard deviation to both sides above a distribution."""
    top = panel.get_ylim()[1] * height
    panel.errorbar(
        mean, top, xerr=deviation, fmt="o", color=colour, capsize=4, linewidth=2, clip_on=False
    )
    panel.text(
        mean, top * 1.03, text, color=colour, ha="center", va="bottom", fontsize=8, clip_on=False
    )


if __name__ == "__main__":
    options = {"partition": "classes:2", "clients": CLIENTS, "seed": SEED}
    found = run("fedavg", data="fashion-mnist", model="small-cnn", rounds=40, lr=0.3, **options)
    model = found.model()
    data = load("fashion-mnist")
    parts = partition("classes:2", data, CLIENTS, SEED)
    layer = list(norm.bn_layers(model))[-1]
    each = [seen(model, layer, data.train, part) for part in parts]
    channel, *chosen = farthest(each)
    values = [each[client][channel].numpy() for client in chosen]
    own = [(value.mean(), value.std()) for value in values]
    mean = float(np.mean([value[channel].mean() for value in each]))
    averaged = float(np.sqrt(np.mean([value[channel].var() for value in each])))
    names = ["client A", "client B"]
    with figure(DOCS / "idea.png", 3, (11, 2.9)) as (picture, (before, in_training, in_test)):
        draw(before, values, names)
        before.set_ylim(0, before.get_ylim()[1] * 1.35)
        for (centre, deviation), colour in zip(own, COLOURS, strict=True):
            mark(before, centre, deviation, colour, 0.78, "own")
        mark(before, mean, averaged, GREY, 0.9, "averaged by the server")
        before.set(title="what goes into one channel", xlabel="value")
        before.legend(loc="upper right", frameon=False, fontsize=8)
        draw(in_training, [(v - m) / s for v, (m, s) in zip(values, own, strict=True)], names)
        in_training.set(title="training: own statistics", xlabel="normalized value")
        draw(in_test, [(v - mean) / averaged for v in values], names)
        in_test.set(title="evaluation: averaged statistics", xlabel="normalized value")
        for panel in (in_training, in_test):
            panel.axvline(0, color=GREY, linewidth=1)
        limits = in_test.get_xlim()
        in_training.set_xlim(limits)
    print(f"{layer}, channel {channel}, clients {chosen}, averaged {mean:.2f} {averaged:.2f}")
