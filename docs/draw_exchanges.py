"""Draws the picture of exchanges in docs/benchmarks.md from docs/measured/exchanges.csv.

python docs/draw_exchanges.py

The table is written by `python -m benchmarks.exchanges`.
"""

import csv
from collections import defaultdict
from pathlib import Path

from fedbn_flwr.experiments.results.plots import figure

FOLDER = Path(__file__).parent


def draw(path: Path) -> None:
    """Draw the time of a round, and of its exchanges, over the number of workers, a line for each delay."""
    with (FOLDER / "measured" / "exchanges.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = defaultdict(list)
    for row in rows:
        lines[row["delay, ms"]].append(row)
    with figure(path, 2, (10, 4)) as (picture, (of_round, of_exchange)):
        for index, (delay, points) in enumerate(lines.items()):
            workers = [int(row["workers"]) for row in points]
            low, middle, high = (
                [1000 * float(row[name]) for row in points] for name in ("lower quartile", "seconds", "upper quartile")
            )
            exchanges = int(points[0]["exchanges"])
            of_round.plot(workers, middle, "o-", color=f"C{index}", label=f"{delay} ms")
            of_round.fill_between(workers, low, high, alpha=0.2, color=f"C{index}")
            costs = [value / exchanges - float(delay) for value in middle]
            of_exchange.plot(workers, costs, "o-", color=f"C{index}")
        for panel, label in ((of_round, "ms per round"), (of_exchange, "ms per exchange, less the delay")):
            panel.set(xlabel="workers", ylabel=label, xticks=workers, ylim=(0, None))
            panel.grid(alpha=0.3)
        picture.legend(title="delay", loc="outside right", frameon=False)


if __name__ == "__main__":
    draw(FOLDER / "exchanges.png")
