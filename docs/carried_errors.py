"""Draws the picture of docs/fedtan.md: the error of the mean gradient over the rounds of a run.

python docs/carried_errors.py docs/carried.png
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr import data, models
from fedbn_flwr.diagnosis import replica
from fedbn_flwr.experiments.results.plots import draw_lines, figure, looks_of
from fedbn_flwr.experiments.results.rows import pd
from fedbn_flwr.layerwise import Answer, Exchange, Kind, Requests, lockstep, shared_statistics
from fedbn_flwr.layerwise.carried import Corrected, carried_corrections

CLIENTS, BATCH, ROUNDS, RATE, TRUST = 5, 32, 100, 0.1, 3.0
#: of what a running mean over rounds keeps from round to round: about the last 20 rounds count
KEPT = 0.95
WEIGHTS = [1 / CLIENTS] * CLIENTS
Batch = tuple[Tensor, Tensor]
Said = dict[Kind, dict[str, Requests]]


def client_batches() -> list[list[Batch]]:
    """Every round's mini-batches, two classes of the digits a client."""
    digits = data.load("digits")
    generator = torch.Generator().manual_seed(0)
    rounds: list[list[Batch]] = [[] for _ in range(ROUNDS)]
    for indices in data.partition("classes:2", digits, CLIENTS, 0):
        for batches in rounds:
            chosen = torch.from_numpy(indices)[
                torch.randperm(len(indices), generator=generator)[:BATCH]
            ]
            inputs, labels = digits.train.batch(chosen)
            batches.append((inputs.double(), labels))
    return rounds


def mean_of(found: Sequence[Sequence[Tensor]]) -> Tensor:
    """The mean of the clients' gradients, as one vector."""
    return torch.stack([torch.cat([part.flatten() for part in each]) for each in found]).mean(0)


def gradients(model: nn.Module, batch: Batch, exchange: Exchange) -> Sequence[Tensor]:
    """A client's gradients, by its parameters."""
    with shared_statistics(model, exchange, final=False):
        return torch.autograd.grad(
            F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters())
        )


def together(model: nn.Module, batches: Sequence[Batch]) -> list[Sequence[Tensor]]:
    """The gradients of clients that share everything."""
    steps = [partial(gradients, replica(model), batch) for batch in batches]
    return lockstep(steps, [1 / len(batches)] * len(batches), range(len(batches)))


def corrections(said: Sequence[Said], kind: Kind) -> list[dict[str, Answer]]:
    """Every client's corrections of one kind, from what all said in the round before."""
    found: list[dict[str, Answer]] = [{} for _ in range(CLIENTS)]
    for layer in said[0][kind] if said else ():
        requests = [each[kind][layer] for each in said]
        count = sum(request.counts[0] for request in requests)
        values = torch.cat([request.tensor for request in requests])
        for own, tensor in zip(
            found, carried_corrections(kind, values, WEIGHTS, TRUST).split(1), strict=True
        ):
            own[layer] = Answer(tensor, count)
    return found


def carried_step(
    model: nn.Module, batches: Sequence[Batch], said: Sequence[Said]
) -> tuple[Tensor, list[Said]]:
    """The mean gradient under carried corrections, and what the clients say this time."""
    kinds: tuple[Kind, Kind] = "statistics", "gradients"
    statistics, derivatives = (corrections(said, kind) for kind in kinds)
    found, now = [], []
    for batch, s, g in zip(batches, statistics, derivatives, strict=True):
        exchange = Corrected({"statistics": s, "gradients": g})
        found.append(gradients(model, batch, exchange))
        now.append(exchange.requests)
    return mean_of(found), now


def errors(name: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The relative errors of a run that follows the carried gradient: of each round, and of the
    mean over rounds.
    """
    torch.set_num_threads(1)
    model = models.build(name, in_channels=1, image_size=8, seed=0).double().train()
    found: dict[str, list[float]] = {"fedavg": [], "fedtan:carry=true": []}
    over_rounds: dict[str, list[float]] = {way: [] for way in found}
    means: dict[str, Tensor] = {}
    said: list[Said] = []
    for batches in client_batches():
        exact = mean_of(together(model, batches))
        carried, said = carried_step(model, batches, said)
        local = mean_of([together(model, [batch])[0] for batch in batches])
        means["exact"] = KEPT * means.get("exact", 0 * exact) + exact
        for way, gradient in zip(found, [local, carried], strict=True):
            found[way].append(float((gradient - exact).norm() / exact.norm()))
            means[way] = KEPT * means.get(way, 0 * exact) + gradient - exact
            over_rounds[way].append(float(means[way].norm() / means["exact"].norm()))
        with torch.no_grad():
            start = 0
            for parameter in model.parameters():
                end = start + parameter.numel()
                parameter.sub_(RATE * carried[start:end].view_as(parameter))
                start = end
    return found, over_rounds


def main() -> None:
    """Draw, and print the medians over the second half of the run."""
    titles = "of each round's gradient", "of the mean over about 20 rounds"
    with figure(Path(sys.argv[1]), 2) as (picture, panels):
        for panel, title, found in zip(panels, titles, errors("small-cnn"), strict=True):
            points = [
                (way, 0, n, error)
                for way, each in found.items()
                for n, error in enumerate(each, start=1)
            ]
            frame = pd.DataFrame(points, columns=["label", "run", "x", "y"])
            draw_lines(panel, frame, looks_of(frame.assign(method=frame["label"])))
            panel.set(xlabel="round", title=title, yscale="log", ylim=(0.1, 5))
            panel.set_yticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
            panel.set_yticks([], minor=True)
            panel.grid(alpha=0.3)
            for way, values in found.items():
                half = sorted(values[ROUNDS // 2 :])
                print(
                    f"{title}, {way}: median {half[len(half) // 2]:.2g}, round 2 {values[1]:.2g}",
                    flush=True,
                )
        panels[0].set(ylabel="relative error")
        picture.add_legend(panels[0])


if __name__ == "__main__":
    main()
