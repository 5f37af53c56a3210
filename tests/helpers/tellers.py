"""Nodes that say other numbers of examples than they have, on every engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import OwnShare
from fedbn_flwr.state import State
from fedbn_flwr.strategies import FedAvg
from tests.helpers.harness import Federation, make_model

#: by partition, what a node says in a round: a number of examples, or None for no answer
Words = Mapping[int, Callable[[int], int | None]]


def telling(words: Words) -> Callable[[BNClient, int], BNClient]:
    """Return a wrapper of clients that puts other words in the places of their own."""

    def wrap(client: BNClient, partition: int) -> BNClient:
        if partition in words:
            honest = client.reply

            def reply(metrics: Any, instruction: Any, records: Any) -> Any:
                said = words[partition](instruction.server_round)
                if said is None:
                    raise RuntimeError("no power")
                return replace(honest(metrics, instruction, records), num_examples=said)

            # the client keeps its type: only a plain one is stacked
            client.__dict__["reply"] = reply
        return client

    return wrap


@contextmanager
def engine(
    kind: str, federation: Federation, weighting: str = "examples"
) -> Iterator[InProcessGrid | WorkersGrid]:
    """Open a grid of the federation's nodes: `inprocess`, `stacked`, or with `sums`, also of two
    `workers`.
    """
    app, nodes = client_app(federation.client), len(federation.parts)
    if kind != "workers":
        sums: Any = partial(StackedGrid, average_by=weighting)
        grids: dict[str, Any] = {"inprocess": InProcessGrid, "stacked": StackedGrid, "sums": sums}
        yield grids[kind](app, nodes)
        return
    InProcessGrid(app, nodes)  # makes messages possible here
    make = partial(_adding, app, nodes, weighting)
    with WorkersGrid(make, nodes, 2, start=OwnShare) as grid:
        yield grid


def _adding(app: Any, nodes: int, weighting: str, partitions: Any) -> StackedGrid:
    return StackedGrid(app, nodes, partitions=partitions, average_by=weighting)


def run(
    strategy: FedAvg, words: Words, sizes: tuple[int, ...], rounds: int, kind: str = "inprocess"
) -> State:
    """Run nodes with these words on an engine, and return the final model."""
    nodes = Federation(make_model(), sizes, telling(words))
    with engine(kind, nodes, strategy.weighting) as grid:
        return nodes.run(strategy, rounds, grid=grid, local_steps=1)


def describing(
    change: Callable[[Any], Any], partition: int = 0
) -> Callable[[BNClient, int], BNClient]:
    """Return a wrapper of clients that changes what one node says of itself."""

    def wrap(client: BNClient, index: int) -> BNClient:
        if index == partition:
            honest = client.describe
            client.__dict__["describe"] = lambda: change(honest())
        return client

    return wrap


def report(**entries: Any) -> Callable[[Any], Any]:
    """Return a change of a description's report."""
    names = {"parameters": wire.PARAMETERS, "tied": wire.TIED}
    changed = {names[key]: value for key, value in entries.items()}
    return lambda reply: replace(reply, report={**reply.report, **changed})
