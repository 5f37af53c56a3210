"""Every method on every engine: the model, what nodes keep, and what is counted, as of messages in
one process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import pytest

from fedbn_flwr import wire
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import OwnShare
from fedbn_flwr.state import State
from fedbn_flwr.strategies import (
    HBN,
    BaseStrategy,
    FedAvg,
    FedBN,
    FedDNA,
    FedProx,
    FedTAN,
    Scaffold,
)
from fedbn_flwr.transports.counting_grid import CountingGrid, Traffic
from tests.helpers.engine_comparison import EXACT, Stacked, memories, memory_difference
from tests.helpers.harness import SIZES, Federation, distance, make_model
from tests.helpers.tellers import engine
from tests.strategies.test_contract import SOLVED, TABLE, make

#: methods that send other messages than each other
RULED: dict[str, Callable[..., BaseStrategy]] = {
    "fedavg": FedAvg,
    "fedbn": partial(FedBN, mean_personal=True),
    "fedtan": FedTAN,
    "fedtan, in three exchanges": partial(FedTAN, exchange="paper"),
    "fedtan, carried": partial(FedTAN, carry=True),
    "scaffold": Scaffold,
}
Case = tuple[Callable[[], BaseStrategy], str]
#: the contract's methods, and what is kept or sent in another way; with the normalizer of the model
CASES: dict[str, Case] = {
    **{name: (partial(make, name), norm) for name, (_, norm, _) in TABLE.items()},
    "uniform weights": (partial(FedAvg, weighting="uniform"), "bn"),
    "momentum of the nodes": (partial(FedAvg, momentum_state="local"), "bn"),
    "momentum of the server": (partial(FedAvg, momentum_state="global"), "bn"),
    "fedtan, in three exchanges": (partial(FedTAN, exchange="paper"), "bn"),
    "fedtan, momentum of the server": (partial(FedTAN, momentum_state="global"), "bn"),
    "fedtan, carried": (partial(FedTAN, carry=True), "bn"),
    "feddna, carried": (partial(FedDNA, carry=True), "bn"),
    # sums of other nodes in each round
    "fedprox, half of the nodes": (partial(FedProx, mu=0.1, fraction_train=0.5), "bn"),
    "scaffold, half of the nodes": (partial(Scaffold, fraction_train=0.5), "bn"),
    # which reads single replies, and single numbers of each
    **{
        f"{name}, under a rule": (partial(kind, robust="median"), "bn")
        for name, kind in RULED.items()
    },
    "hbn, under a rule": (partial(HBN, robust="median"), "hbn"),
}


#: engines whose replies are means
ADDING = {"stacks that add up": "sums", "workers that add up": "workers"}
GRIDS: dict[str, type[InProcessGrid]] = {
    "messages": InProcessGrid,
    "one by one": OneByOneGrid,
    "stacked": Stacked,
}


def nodes_of(norm: str, partitions: Sequence[int]) -> InProcessGrid:
    """Return some of the federation's nodes."""
    return InProcessGrid(
        client_app(Federation(make_model(norm)).client), len(SIZES), partitions=partitions
    )


@contextmanager
def opened(
    kind: str, nodes: Federation, norm: str, strategy: BaseStrategy
) -> Iterator[InProcessGrid | WorkersGrid]:
    """Open a grid of the federation's nodes."""
    app = client_app(nodes.client)
    if kind in GRIDS:
        yield GRIDS[kind](app, len(SIZES))
    elif kind in ADDING:
        with engine(ADDING[kind], nodes, strategy.weighting) as grid:
            yield grid
    else:
        start = partial(WorkersGrid, partial(nodes_of, norm), len(SIZES), 2)
        with start(start=OwnShare) if kind == "two workers" else start() as grid:
            yield grid


@dataclass
class End:
    """What a run has left."""

    model: State
    kept: list[dict[str, State]]
    #: of training and of evaluation
    traffic: tuple[Traffic, Traffic]
    #: the sum of training losses in the last round
    loss: float


@cache
def ended(case: str, kind: str = "messages") -> End:
    """Run a case on an engine."""
    make_strategy, norm = CASES[case]
    nodes, strategy = Federation(make_model(norm)), make_strategy()
    with opened(kind, nodes, norm, strategy) as grid:
        counting = CountingGrid(grid)
        model = nodes.run(strategy, 3, counting, momentum=0.9)
        kept = memories(grid)
    replies = strategy.training.replies
    if kind in ADDING and strategy.fraction_train == 1:
        # one reply for each process; of two workers, each has every second node
        halves = [{1000: 0, 1002: 2}, {1001: 1, 1003: 3}]
        wanted = halves if ADDING[kind] == "workers" else [halves[0] | halves[1]]
        assert [dict(reply.nodes) for reply in replies] == wanted
    loss = 0.0
    if case not in SOLVED:
        loss = sum(reply.metrics[wire.TRAIN_LOSS] * reply.num_examples for reply in replies)
    return End(model, kept, (counting.training, counting.evaluation), loss)


#: what adds numbers up in another order, and how far apart they may be; other engines have the same
#: bits
ROUNDING = dict.fromkeys(("stacked", *ADDING), EXACT)
#: which cases an engine has, if not all
SOME: dict[str, Callable[[str], bool]] = {
    "processes": lambda case: case in ("fedbn", "fedtan"),
    **dict.fromkeys(ADDING, lambda case: not CASES[case][0]().needs_single_replies),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (kind, case)
        for kind in ("one by one", "stacked", "two workers", *ADDING, "processes")
        for case in CASES
        if SOME.get(kind, bool)(case)
    ],
)
@pytest.mark.sampled(15)
def test_an_engine_has_the_end_of_messages(
    kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedbn_flwr.simulation.in_process.PORTION", 2 if kind == "one by one" else 100
    )
    found, wanted, within = ended(case, kind), ended(case), ROUNDING.get(kind, 0.0)
    assert distance(found.model, wanted.model) <= within
    assert memory_difference(found.kept, wanted.kept) <= within
    assert found.loss == pytest.approx(wanted.loss, rel=within or 1e-15)
    # counted as if every node had sent its own
    assert found.traffic == wanted.traffic


def test_in_these_cases_nodes_keep_something() -> None:
    keep = {case for case in CASES if any(ended(case).kept)}
    names = {
        "fedbn",
        "silobn",
        "mtfl",
        "scaffold",
        "hbn",
        "standalone",
        "momentum of the nodes",
        "fed3r-personal",
    }
    assert keep == names | {
        case for case in CASES if case.split(",")[0] in ("fedbn", "scaffold", "hbn")
    }
