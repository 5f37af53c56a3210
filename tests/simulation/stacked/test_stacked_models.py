"""Models of every kind: what can be stacked trains as it does alone, what cannot is left alone,
with a reason.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.simulation.how_trained import APART
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedTAN, FixBN, Scaffold
from tests.helpers.engine_comparison import (
    EXACT,
    SIZES_APART,
    Stacked,
    assert_same,
    both,
    difference,
    quiet,
    watching,
)
from tests.helpers.harness import CLASSES, SIZES, Double, Federation, make_model

RAGGED: dict[str, Any] = {"local_steps": 0, "local_epochs": 2, "momentum": 0.9, "weight_decay": 0.1}


class Net(nn.Module):
    """A convolution, something in the middle, a linear layer."""

    norm: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, CLASSES)
        self.make()

    def make(self) -> None:
        self.norm = nn.BatchNorm2d(4)

    def middle(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(self.first(inputs))
        result: Tensor = self.last(hidden.flatten(1))
        return result


class Entries(Net):
    """Whatever entries a model may have."""

    seen: Tensor
    level: Tensor
    scale: Tensor

    def make(self) -> None:
        self.norm = norm = nn.BatchNorm2d(4)
        # buffers that are not changed in place, but replaced
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(4))
        # a constant that is not in the state dict
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5, 2.0]), persistent=False)
        # tied weights
        self.encode, self.decode = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.decode.weight = self.encode.weight
        # a single number that learns
        self.temperature = nn.Parameter(torch.tensor(1.5))
        # a parameter that the loss does not depend on has no gradient, and does not decay
        self.idle = nn.Linear(3, 3)
        # whole numbers
        self.order = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)
        # parameters that do not learn
        self.first.weight.requires_grad_(False)
        norm.bias.requires_grad_(False)

    def middle(self, hidden: Tensor) -> Tensor:
        self.seen = self.seen + 1
        hidden = hidden.index_select(1, self.order)
        self.level = 0.9 * self.level + 0.1 * hidden.detach().mean((0, 2, 3))
        # what a model notes down for itself does not matter
        self.calls = getattr(self, "calls", 0) + 1
        scaled = (
            (self.norm(hidden) - self.level[:, None, None])
            * self.scale[:, None, None]
            * self.temperature
        )
        values: Tensor = self.decode(torch.tanh(self.encode(scaled.flatten(1))))
        return values


class Dropouts(Net):
    """Maps and values, one layer used twice, one in place, one that drops nothing, and one that
    drops everything.
    """

    def make(self) -> None:
        super().make()
        self.maps, self.twice, self.in_place = (
            nn.Dropout2d(0.3),
            nn.Dropout(0.4),
            nn.Dropout(0.5, inplace=True),
        )
        self.nothing, self.everything = nn.Dropout(0.0), nn.Dropout(1.0)

    def middle(self, hidden: Tensor) -> Tensor:
        values = self.nothing(self.twice(torch.relu(self.maps(self.norm(hidden)))))
        dropped: Tensor = self.twice(values + self.everything(values))
        copied = 2 * dropped
        # what is dropped in place is used once more
        return torch.tanh(dropped + self.in_place(copied) + copied) / 4


class Outputs(Net):
    """Returns an object of a user's own, of which vmap can make nothing."""

    def middle(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden).relu()

    def forward(self, inputs: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(inputs), hidden=inputs)


def maker(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Double(kind())

    return make


@pytest.mark.parametrize("sizes", [SIZES, SIZES_APART], ids=str)
@pytest.mark.parametrize("kind", [Entries, Dropouts, Outputs])
def test_model_with_unequal_steps_or_batches(kind: type[Net], sizes: Sequence[int]) -> None:
    assert_same(
        lambda: quiet(Scaffold, clip_norm=0.5),
        maker(kind),
        rounds=2,
        nodes={"sizes": sizes},
        **RAGGED,
    )


def test_masks_are_those_that_a_client_draws_alone() -> None:
    """Another mask would be seen; the process's own random stream is not."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    alone, _ = assert_same(lambda: quiet(FedAvg), maker(Dropouts), within=1e-14, lr=0.02, **RAGGED)
    assert torch.equal(torch.get_rng_state(), before)
    other, _ = both(lambda: quiet(FedAvg), maker(Dropouts), seed=6, lr=0.02, **RAGGED)
    assert difference(alone, other) > 1e-3


@pytest.mark.parametrize("kind", [Entries, Dropouts, Outputs])
def test_model_in_a_layer_wise_step(kind: type[Net]) -> None:
    assert_same(lambda: quiet(FedTAN), maker(kind), momentum=0.9, batch_size=5)


class Other(Net):
    """A net with another function in the middle."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.other = middle

    def middle(self, hidden: Tensor) -> Tensor:
        return self.other(self.norm(hidden))


class SpectralNorm(Other):
    """A parametrization, with vectors that move in every forward pass."""

    def make(self) -> None:
        super().make()
        nn.utils.parametrizations.spectral_norm(self.last)


class CumulativeAverage(Other):
    def make(self) -> None:
        self.norm = nn.BatchNorm2d(4, momentum=None)


#: models that `vmap` refuses, and its words
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "alpha dropout": (lambda: Other(nn.AlphaDropout(0.3)), "random"),
    "functional dropout": (lambda: Other(lambda hidden: F.dropout(hidden, 0.3)), "random"),
    "noise": (lambda: Other(lambda hidden: hidden + 0.1 * torch.randn(4, 1, 1)), "random"),
    "a branch": (
        lambda: Other(lambda hidden: hidden if hidden.sum() > 0 else -hidden),
        "data-dependent",
    ),
    "a number": (lambda: Other(lambda hidden: hidden * (1 + abs(hidden.mean().item()))), "item"),
    "spectral norm": (lambda: SpectralNorm(torch.relu), "not implemented for aten::div.out"),
}


COUNTS = "BN with momentum=None averages over steps that each client counts for itself"
KEPT_ADAM = "the state of adam counts the steps of all clients of a stack alike"
#: a strategy, a model and options that are not stacked, words of the reason, and whether a user is
#: warned
LEFT_ALONE: dict[
    str, tuple[Callable[[], BaseStrategy], Callable[[], nn.Module], dict[str, Any], str, bool]
] = {
    **{
        case: (lambda: quiet(FedAvg), maker(make), {}, words, True)
        for case, (make, words) in REFUSED.items()
    },
    "a cumulative average": (
        lambda: quiet(FedAvg),
        maker(lambda: CumulativeAverage(torch.relu)),
        {},
        COUNTS,
        False,
    ),
    "kept Adam": (
        lambda: quiet(FedAvg, momentum_state="local"),
        make_model,
        {"optimizer": "adam", "lr": 0.01},
        KEPT_ADAM,
        False,
    ),
    "a freeze that clients choose": (
        lambda: quiet(FixBN, freeze_round="auto", latest=1.0),
        make_model,
        {},
        "StatisticsChange does not work on stacked models",
        False,
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_cannot_be_stacked_is_left_alone(case: str) -> None:
    strategy, make, options, words, is_warned = LEFT_ALONE[case]
    alone, together = both(strategy, make, local_steps=0, local_epochs=1, **options)
    assert difference(alone, together) == 0
    assert not together.watch.stacks
    [reason] = together.watch.reasons
    assert (f"{APART}{reason}" in together.watch.warnings) == is_warned
    assert words in reason
    assert "\n" not in reason


def test_a_cumulative_average_that_is_frozen_is_stacked() -> None:
    alone, together = both(
        lambda: quiet(FixBN, freeze_round=1),
        maker(lambda: CumulativeAverage(torch.relu)),
        momentum=0.0,
    )
    assert difference(alone, together) < EXACT
    assert together.watch.stacks


@pytest.mark.parametrize("case", ["a branch", "noise"])
def test_what_cannot_be_stacked_takes_a_layer_wise_step_by_messages(case: str) -> None:
    """It is tried in every round, and said in the first one."""
    make, words = REFUSED[case]
    alone, together = both(lambda: quiet(FedTAN), maker(make))
    assert difference(alone, together) == 0
    assert not together.watch.stacks
    said = next(text for text in together.watch.warnings if "steps go by messages" in text)
    assert words in said


def test_a_model_in_evaluation_mode_is_set_to_train() -> None:
    """Nine samples are one batch of a layer-wise step, whatever mode the model was in."""

    def make() -> nn.Module:
        return make_model().eval()

    assert_same(
        lambda: quiet(FedTAN), make, clients=8, nodes={"sizes": (9, 20, 16, 8)}, batch_size=8
    )
    assert_same(
        lambda: quiet(FedAvg), make, nodes={"sizes": (5, 7, 9, 12)}, local_steps=0, local_epochs=2
    )


def unstackable_clients(app: ClientApp) -> list[str]:
    nodes = Federation(make_model())
    nodes.grid = Stacked(app, 4)
    with watching() as watch:
        nodes.run(quiet(FedAvg))
    assert not watch.stacks
    return watch.reasons


def test_clients_with_models_of_their_own_are_left_alone() -> None:
    nodes = [Federation(make_model()) for _ in range(4)]
    app = client_app(
        lambda context: nodes[int(context.node_config["partition-id"])].client(context)
    )
    assert unstackable_clients(app) == ["each has a model of its own"]


def test_another_client_app_is_left_alone() -> None:
    own, app = ClientApp(), client_app(Federation(make_model()).client)

    @own.train()
    def train(message: Message, context: Context) -> Message:
        return app(message, context)

    assert unstackable_clients(own) == ["the ClientApp was not made by `client_app`, or has mods"]


def test_two_models_in_one_process_are_two_stacks() -> None:
    """Nodes that share a model are stacked, whoever else there is."""
    halves = [Federation(make_model()) for _ in range(2)]
    nodes, alone = Federation(make_model()), Federation(make_model())
    nodes.grid = Stacked(
        client_app(lambda c: halves[int(c.node_config["partition-id"]) % 2].client(c)), 4
    )
    with watching() as watch:
        found = nodes.run(quiet(FedAvg))
    assert watch.stacks == [2, 2] * 3
    assert not [text for text in watch.messages if text.startswith(APART)]
    wanted = alone.run(quiet(FedAvg))
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=EXACT) for name in wanted)
