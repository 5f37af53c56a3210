"""A layer that stands twice in a model is one layer with two names: whatever a strategy does, they
hold one value.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import norm, state
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import REGISTRY, FedBN, FedTAN, Privacy
from tests.helpers.engine_comparison import EXACT, Stacked
from tests.helpers.harness import CLASSES, Federation, distance
from tests.strategies.test_contract import TABLE, make


class Twice(nn.Module):
    """Uses a BN layer, a convolution and a linear layer twice, in float64; with `named`, also by a
    second name.
    """

    def __init__(self, kind: str = "bn", *, named: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.mix = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.normalizer, self.dense, self.last = (
                nn.BatchNorm2d(4),
                nn.Linear(4, 4),
                nn.Linear(64, CLASSES),
            )
        norm.replace(self.double(), kind)
        if named:
            self.normalizer_again, self.mix_again, self.dense_again = (
                self.normalizer,
                self.mix,
                self.dense,
            )

    def forward(self, inputs: Tensor) -> Tensor:
        images = self.mix(self.normalizer(self.first(inputs.double())).relu())
        pixels = self.mix(self.normalizer(images).relu()).flatten(2).transpose(1, 2)
        result: Tensor = self.last(self.dense(self.dense(pixels).relu()).flatten(1))
        return result


def assert_one_layer(method: Callable[[], Any], kind: str = "bn", **instruction: Any) -> None:
    """Check both names, on two engines, against the model in which the layers have one name."""
    wanted = Federation(Twice(kind, named=False)).run(method(), 2, **instruction)
    for grid in (InProcessGrid, Stacked):
        found = Federation(Twice(kind, named=True), grid=grid).run(method(), 2, **instruction)
        assert all(torch.equal(found[name], found[name.replace("_again", "")]) for name in found)
        assert len(found) > len(wanted)
        assert distance({name: found[name] for name in wanted}, wanted) < EXACT


#: the methods that take a server optimizer
OPTIMIZED = [name for name in TABLE if "server_optimizer" not in REGISTRY[name].replaced]


@pytest.mark.parametrize(
    ("name", "server_optimizer"),
    [("fedavg", "momentum"), *((name, "adam") for name in sorted(OPTIMIZED))],
)
@pytest.mark.sampled(6)
def test_two_names_are_one_parameter_to_a_server_optimizer(
    name: str, server_optimizer: str
) -> None:
    assert_one_layer(
        lambda: make(name, server_optimizer=server_optimizer, fraction_evaluate=0.0), TABLE[name][1]
    )


@pytest.mark.parametrize(
    "name",
    sorted(name for name in OPTIMIZED if not make(name).sends and make(name).statistics != "exact"),
)
def test_two_names_are_clipped_and_noised_as_one_parameter(name: str) -> None:
    private = Privacy(0.05, 1.0, seed=1, unprotected=["*.running_*"])
    assert_one_layer(
        lambda: make(
            name,
            privacy=private,
            weighting="uniform",
            server_optimizer="momentum",
            fraction_evaluate=0.0,
        ),
        TABLE[name][1],
    )


@pytest.mark.parametrize("kind", ["local", "global"])
def test_two_names_have_one_momentum(kind: str) -> None:
    assert_one_layer(
        lambda: make("fedbn", momentum_state=kind, server_optimizer="momentum"), momentum=0.9
    )


def test_two_names_have_one_correction() -> None:
    assert_one_layer(lambda: FedTAN(carry=True, server_optimizer="momentum"))
    assert_one_layer(lambda: make("fednorm"))


def test_what_is_tied_to_an_entry_that_stays_stays_with_it() -> None:
    """A convolution whose bias is BN's: neither name may leave the node."""
    model = Twice(named=False)
    model.first.bias = model.normalizer.bias
    nodes, strategy = Federation(model), FedBN(fraction_evaluate=0.0)
    nodes.run(strategy)
    local = state.group_keys(model, "bn")
    assert {"first.bias", "normalizer.bias"} <= local
    assert all(not local & reply.arrays.keys() for reply in strategy.training.replies)
    assert torch.equal(nodes.kept(1)["first.bias"], nodes.kept(1)["normalizer.bias"])
