"""What a sum under masks costs a node and the server: `python -m benchmarks.secure`.

One node masks, and its part stands for those of all. A model of 270,000 numbers is a ResNet-20, one of 11 million a
ResNet-18; 128 numbers are an exchange at a layer of 64 channels.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedbn_flwr.secure import Participants, masks
from fedbn_flwr.secure.fixed_point import sum_of
from fedbn_flwr.secure.masks import unseal_share

COLUMNS = ("nodes", "numbers", "keys, ms", "masks, ms", "shares, ms", "opening, ms", "sum, s", "bytes")


def measure(nodes: int, size: int) -> list[Any]:
    """Return a row: milliseconds of one node for keys, masks, shares and to help opening; seconds of the server."""
    private = [masks.new_private_key() for _ in range(nodes)]
    people = Participants(b"benchmark", tuple(range(nodes)), tuple(map(masks.public_key, private)))
    values, own = np.random.default_rng(0).standard_normal(size), masks.own_seed()
    keys, _ = timed(lambda: [masks.pair_seed(private[0], other, people) for other in range(1, nodes)])
    masking, hidden = timed(lambda: masks.mask(values, 0, private[0], people, own))
    sharing, shares = timed(lambda: masks.seal_shares(own, 0, private[0], people))
    opening, _ = timed(lambda: [unseal_share(shares[0].sealed, 0, 0, private[0], people) for _ in range(nodes)])
    given = {node: unseal_share(each.sealed, 0, node, private[node], people) for node, each in enumerate(shares)}
    # the server does this for every node
    adding, total = timed(lambda: sum_of([hidden, hidden]))
    commitments = [each.commitment for each in shares]
    masks.open_shares(given, commitments, people)  # weights are made once
    recovering, _ = timed(lambda: masks.open_shares(given, commitments, people))
    removing, _ = timed(lambda: masks.cancel(total, people, [own], {}))
    up = hidden.nbytes + sum(len(each.sealed) + len(each.commitment) for each in shares)
    milliseconds = [round(1000 * each, 2) for each in (keys, masking, sharing, opening)]
    return [nodes, size, *milliseconds, round(nodes * (adding + recovering + removing), 2), up]


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that something takes, and its result."""
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secure", description=__doc__)
    numbers = lambda text: [int(item) for item in text.split(",")]  # noqa: E731
    parser.add_argument("--nodes", type=numbers, default=[3, 10, 30, 100], help="[3,10,30,100]")
    parser.add_argument("--sizes", type=numbers, default=[128, 270_000, 11_200_000], help="[128,270000,11200000]")
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    for size in options.sizes:
        for nodes in options.nodes:
            print(f"| {' | '.join(map(str, measure(nodes, size)))} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
