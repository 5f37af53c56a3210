"""Layer-wise steps whose clients are all in one stack: nobody is asked, and all is as if they were."""

from collections.abc import Callable
from typing import Any

import pytest

from fedbn_flwr.layerwise import SuspendedStep
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import BaseStrategy, FedDNA, FedTAN
from fedbn_flwr.transports.counting_grid import CountingGrid
from tests.helpers.engine_comparison import Stacked, both, difference, quiet, run
from tests.helpers.faults import Without
from tests.helpers.harness import Federation, distance, make_float32_model, make_model
from tests.simulation.stacked.test_stacked_layerwise import POISONS, poisoned

#: one size of first batches
SIZES = (8, 12, 8, 16)
METHODS: dict[str, Callable[[], BaseStrategy]] = {
    "fused": FedTAN,
    "paper": lambda: FedTAN(exchange="paper"),
    "forward": FedDNA,
    "forward, paper": lambda: FedDNA(exchange="paper"),
    "uniform": lambda: FedTAN(weighting="uniform"),
}


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(*_: Any) -> None:
        raise AssertionError("a client waits for others")

    monkeypatch.setattr(SuspendedStep, "advance", waiting)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("name", METHODS)
def test_it_ends_where_exchanges_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(grid: type[InProcessGrid]) -> tuple[Any, dict[str, int]]:
        nodes = Federation(make_model(), SIZES, grid=grid)
        counting = CountingGrid(nodes.grid)
        final = nodes.run(METHODS[name](), 3, grid=counting, batch_size=8, momentum=0.9)
        return final, vars(counting.training)

    here, counted = ended(Stacked)
    monkeypatch.undo()
    asked, by_messages = ended(InProcessGrid)
    assert distance(here, asked) < 1e-12
    assert counted == by_messages


def test_clients_in_another_order_have_their_own_weights() -> None:
    """Those with more steps come first in a stack."""
    alone, together = both(
        lambda: quiet(FedTAN), nodes={"sizes": SIZES}, batch_size=8, local_steps=0, local_epochs=1
    )
    assert difference(alone, together) < 1e-12
    assert together.watch.stacks == [4, 4]


@pytest.mark.parametrize("case", POISONS)
def test_a_client_whose_values_cannot_be_pooled_is_found(case: str) -> None:
    change, _ = POISONS[case]
    nodes: dict[str, Any] = {"sizes": SIZES, "wrap": poisoned(change)}
    together = run(Stacked, quiet(FedTAN), make_float32_model, nodes=nodes, batch_size=8)
    assert [reply.partition for reply in together.strategy.training.replies] == [0, 2, 3]
    assert any("Node 1001 is left out of this round" in text for text in together.watch.messages)
    others = run(Without, quiet(FedTAN), make_float32_model, nodes={"sizes": SIZES}, batch_size=8)
    assert distance(together.final, others.final) == 0
