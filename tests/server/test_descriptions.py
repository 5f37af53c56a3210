"""Which entries are parameters is what most nodes say, and no single node changes it or ends the
run.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from fedbn_flwr import wire
from fedbn_flwr.server.sampling import Roster
from fedbn_flwr.state import State
from fedbn_flwr.strategies import FedAvg, FedNorm, Privacy
from tests.helpers.faults import FaultyReply
from tests.helpers.harness import Federation, make_model
from tests.helpers.tellers import describing, report

PARAMETERS = [name for name, _ in make_model().named_parameters()]
ENTRIES = list(make_model().state_dict())


def fails(_: Any) -> Any:
    raise RuntimeError("no idea")


#: what the first node says of its model
LIES: dict[str, Callable[[Any], Any]] = {
    "one parameter": report(parameters=PARAMETERS[:1]),
    "no parameters": report(parameters=[]),
    "all entries": report(parameters=ENTRIES),
    "entries that are not there": report(
        parameters=[*PARAMETERS, *(f"more.{number}" for number in range(9))]
    ),
    "an odd number of tied names": report(tied=ENTRIES[:3]),
    "tied entries of other shapes": report(
        tied=["net.3.weight", "net.0.weight", "net.7.bias", "net.7.weight"]
    ),
    "tied entries that are not there": report(
        tied=["net.3.weight", "more", "more", "net.3.weight"]
    ),
    "nothing": fails,
}
STRATEGIES: dict[str, Callable[[], FedAvg]] = {
    "privacy": lambda: FedAvg(
        weighting="uniform",
        privacy=Privacy(0.05, 1.0, seed=1, unprotected=["*.running_mean", "*.running_var"]),
    ),
    "adam": lambda: FedAvg(server_optimizer="adam"),
}


@cache
def honest(name: str, nodes: int) -> State:
    return Federation(make_model(), (7, 12, 20, 5)[:nodes]).run(STRATEGIES[name](), 2)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("lie", LIES)
def test_one_node_does_not_say_for_all_what_is_a_parameter(lie: str, name: str) -> None:
    after = Federation(make_model(), wrap=describing(LIES[lie])).run(STRATEGIES[name](), 2)
    assert all(torch.equal(after[entry], value) for entry, value in honest(name, 4).items())


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("lie", sorted(LIES.keys() - {"all entries"}))
def test_of_two_nodes_the_one_that_fits_the_model_counts(lie: str, name: str) -> None:
    """Of two that fit, the one that names more parameters: privacy then covers all that one of them
    names.
    """
    after = Federation(make_model(), (7, 12), describing(LIES[lie])).run(STRATEGIES[name](), 2)
    assert all(torch.equal(after[entry], value) for entry, value in honest(name, 2).items())


def test_what_most_nodes_leave_out_ends_a_private_run() -> None:
    lies = report(parameters=PARAMETERS[:1])
    nodes = Federation(make_model())
    nodes._wrap = lambda client, index: (
        describing(lies, index)(client, index) if index < 3 else client
    )
    with pytest.raises(
        ValueError,
        match=r"privacy does not cover net\.0\.bias, net\.1\.bias, .*, net\.7\.weight: keep",
    ):
        nodes.run(STRATEGIES["privacy"](), 2)


@pytest.mark.parametrize(("name", "who"), [("privacy", "privacy"), ("adam", "a server optimizer")])
def test_nodes_that_all_say_nothing_end_the_run(name: str, who: str) -> None:
    nodes = Federation(make_model())
    nodes._wrap = lambda client, index: describing(fails, index)(client, index)
    with pytest.raises(
        ValueError, match=f"{who} needs clients that say which entries are parameters"
    ):
        nodes.run(STRATEGIES[name](), 2)


class Silent(FaultyReply):
    """A grid in which the first node never describes itself."""

    node, message_type = 1000, wire.DESCRIBE


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_node_that_is_silent_does_not_end_the_run(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = STRATEGIES[name]()
    strategy.roster = Roster(0.05)
    after = Federation(make_model(), grid=Silent).run(strategy, 2)
    assert all(torch.equal(after[entry], value) for entry, value in honest(name, 4).items())
    assert (
        caplog.text.count(
            "Node 1000 is drawn by id, without a description: no answer in 0.05 seconds"
        )
        == 1
    )


def test_the_other_domains_go_on_without_a_silent_node(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedNorm()
    strategy.roster = Roster(0.05)
    after = Federation(make_model(), grid=Silent).run(strategy, 2)
    assert all(value.isfinite().all() for value in after.values())
    assert "Node 1000 is left out of this round: FedNorm needs one domain a node" in caplog.text


def test_an_odd_number_of_tied_names_is_refused_where_it_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lie = describing(LIES["an odd number of tied names"])
    Federation(make_model(), wrap=lie).run(FedAvg(fraction_train=0.5), 1)
    assert (
        "Node 1000 is drawn by id, without a description: its 'tied' are 3 names, no pairs"
        in caplog.text
    )
