"""Steps that are captured and replayed, against the same steps by autograd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import fake_accelerator  # type: ignore[import-not-found]
import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks.bare import BareLoop, CapturedLoop
from fedbn_flwr.client import BNClient, captured
from fedbn_flwr.client.rules import Rule, Session, register_rule
from fedbn_flwr.client.rules.gradient_norm import Clipping, GradientNorm
from fedbn_flwr.client.steady import steady
from fedbn_flwr.device import constant
from fedbn_flwr.layerwise.carried import CorrectedClients
from fedbn_flwr.models import build
from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid
from fedbn_flwr.simulation.stacked.stacked_layers import StackedLayers
from fedbn_flwr.strategies import BaseStrategy, FedAvg, FedDNA, FedProx, FedTAN, FixBN, Scaffold
from fedbn_flwr.wire import Instruction
from tests.fake_accelerator.on_device.methods import CASES
from tests.helpers.engine_comparison import EXACT, Stacked, Watch, watching
from tests.helpers.harness import (
    ALONE,
    ClientWrapper,
    Federation,
    distance,
    make_float32_model,
    make_model,
)
from tests.helpers.registered import registries_restored
from tests.strategies.test_contract import SOLVED

#: clients with equal batches
SIZES = (8, 12, 8, 12)
GRIDS = (InProcessGrid, Stacked)
HALVED: dict[str, Any] = {"lr_schedule": "0.5@2,0.5@3"}


@pytest.fixture(autouse=True)
def _layers_of_tests_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "KNOWN", (*captured.KNOWN, "tests", __name__.partition(".")[0]))


class Counted:
    """How often graphs are replayed, inside the block."""

    def __enter__(self) -> "Counted":
        self.replays = 0
        fake_accelerator.observer = self._note
        return self

    def _note(self, kind: str, name: str, _: int) -> None:
        self.replays += name == "graph"

    def __exit__(self, *_: object) -> None:
        fake_accelerator.observer = None


def eager(client: BNClient, _: int) -> BNClient:
    client.captured = "never"
    return client


def always(client: BNClient, _: int) -> BNClient:
    client.captured = "always"
    return client


def ends(
    make: Callable[[], BaseStrategy],
    model: Callable[[], nn.Module],
    grid: type[InProcessGrid],
    rounds: int = 3,
    wrap: ClientWrapper = lambda client, _: client,
    **options: Any,
) -> tuple[float, int, Watch]:
    """Return how far a run with replays ends from one without, the number of replays, and what was
    logged.
    """

    def training_only() -> BaseStrategy:
        strategy = make()
        strategy.fraction_evaluate = 0.0
        return strategy

    with Counted() as none:
        wanted = Federation(model(), SIZES, device="fake", grid=grid, wrap=eager).run(
            training_only(), rounds, **options
        )
    assert not none.replays
    with Counted() as counted, watching() as watch:
        nodes = Federation(model(), SIZES, device="fake", grid=grid, wrap=wrap)
        ended = nodes.run(training_only(), rounds, **options)
    return distance(wanted, ended), counted.replays, watch


def said(watch: Watch) -> list[str]:
    return [text.partition(": ")[2] for text in watch.messages if "not captured" in text]


#: each with something of its own in a step
UNLIKE = ("fedavg", "fixbn", "fedtan", "fedtan, carried", "fedwon", "fedbs", "fbn", "scaffold")


@pytest.mark.parametrize("grid", [pytest.param(InProcessGrid, marks=pytest.mark.slow), Stacked])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in UNLIKE else pytest.mark.slow) for name in CASES],
)
@pytest.mark.sampled(4)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str, grid: type[InProcessGrid]) -> None:
    make, norm = CASES[name]

    def changing() -> BaseStrategy:
        strategy = make()
        strategy.schedule = FedAvg(**HALVED).schedule
        return strategy

    apart, replays, watch = ends(changing, lambda: make_model(norm), grid, rounds=4)
    assert apart == 0
    if name == "fbn":  # its hooks are called in every pass
        assert said(watch) == ["what BatchNorm2d does is not torch's alone"]
        return
    assert not said(watch)
    if name in SOLVED:
        assert replays == 0
        return
    # two rounds at least with three steps, of which the first is not replayed where clients ask
    # others
    asks = name.startswith(("fedtan", "feddna")) and grid is InProcessGrid
    sides = len(SIZES) if grid is InProcessGrid else 1
    assert replays >= 2 * sides * (2 if asks else 3)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.sampled(1)
def test_forward_is_not_called_in_replayed_steps(
    grid: type[InProcessGrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [], nn.Conv2d.forward

    def counted(layer: nn.Conv2d, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(layer)
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    nodes = Federation(make_model(), SIZES, device="fake", grid=grid)
    nodes.run(FedAvg(fraction_evaluate=0.0), 3)
    # two layers, in the three steps of the first client or stack, then in a step by autograd and
    # one that is captured
    assert len(calls) == 2 * (3 + 2)


@pytest.mark.parametrize(
    ("rule", "bounds"),
    [(Clipping, {"clip_factor": 0.02}), (GradientNorm, {"clip_norm": 0.1})],
)
@pytest.mark.sampled(1)
def test_clipping_is_replayed_with_the_bound_that_it_had(
    rule: type[Rule], bounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with another bound, on the same model, finds the steps of the first."""
    calls, adjust = [], rule.adjust

    def counted(self: Rule) -> None:
        calls.append(self)
        adjust(self)

    monkeypatch.setattr(rule, "adjust", counted)
    looser = {name: 10 * bound for name, bound in bounds.items()}
    ended = {}
    for name, wrap in (("eager", eager), ("replayed", lambda client, _: client)):
        nodes = Federation(make_model(), SIZES, device="fake", grid=Stacked, wrap=wrap)
        calls.clear()
        ended[name] = [nodes.run(FedAvg(**each), 3) for each in (bounds, looser, bounds)]
        ended[name].append(nodes.run(FedAvg(), 3))
    # three steps of the first stack, one by autograd and one that is captured, for either bound
    assert len(calls) == 2 * (3 + 2)
    for wanted, found in zip(*ended.values(), strict=True):
        assert distance(wanted, found) == 0
    assert all(
        distance(ended["eager"][0], other) for other in (ended["eager"][1], ended["eager"][3])
    )


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
    "momentum that nodes keep": {"momentum": 0.9, "momentum_state": "local"},
    "momentum that the server keeps": {"momentum": 0.9, "momentum_state": "global"},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("method", [FedAvg, FedProx, Scaffold])
@pytest.mark.sampled(3)
def test_the_optimizers_step_is_replayed_at_every_rate(
    method: Callable[..., BaseStrategy], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for clients that are at their end while others go on."""
    monkeypatch.setattr(f"{__name__}.SIZES", (16, 16, 8, 8))
    options = {**OPTIMIZERS[case], "batch_size": 4, "local_steps": 0, "local_epochs": 1}
    kept = options.pop("momentum_state", "none")

    def make() -> BaseStrategy:
        return method(momentum_state=kept, **HALVED)

    calls: list[Session] = []

    def counted(session: Session) -> None:
        steady(session)
        step: Callable[[], None] = session.optimizer.step

        def noted() -> None:
            calls.append(session)
            step()

        session.optimizer.step = noted  # type: ignore[method-assign,assignment]

    with monkeypatch.context() as patch:
        patch.setattr("fedbn_flwr.simulation.stacked.train_together.steady", counted)
        apart, replays, watch = ends(make, make_model, Stacked, rounds=5, **options)
    assert (apart, said(watch)) == (0, [])
    # of two kinds of steps each is compared in the second round, and all others are replayed
    assert replays == 4 * 4
    # by autograd, in each of five rounds; then in the first, and where the two are captured
    assert len(calls) == 5 * 4 + 4 + 2 * 2


@pytest.mark.slow
def test_runs_with_other_optimizers_find_no_steps_of_each_other() -> None:
    """On the same model, whose stack has what optimizers work with where it was."""
    every: list[dict[str, Any]] = [
        {"momentum": 0.9},
        {"momentum": 0.5},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"optimizer": "adam", "lr": 0.01},
        {},
    ]
    ended = []
    for wrap in (eager, lambda client, _: client):
        nodes = Federation(make_model(), SIZES, device="fake", grid=Stacked, wrap=wrap)
        ended.append([nodes.run(FedAvg(), 3, **options) for options in [*every, every[0]]])
    assert [distance(*pair) for pair in zip(*ended, strict=True)] == [0] * 6
    assert all(distance(ended[0][0], other) for other in ended[0][1:5])


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_stacks_optimizers_step_as_those_of_the_cpu(case: str) -> None:
    options = OPTIMIZERS[case]
    ended = [
        Federation(make_model(), SIZES, grid=grid, device=device).run(
            FedAvg(momentum_state=options.get("momentum_state", "none"), **HALVED),
            5,
            **{name: value for name, value in options.items() if name != "momentum_state"},
        )
        for grid, device in ((InProcessGrid, "cpu"), (Stacked, "fake"))
    ]
    assert distance(*ended) <= (1e-9 if "adam" in case else EXACT)


class Pairs(StackedGrid):
    """Trains two clients in a stack, and the last of three alone."""

    def __init__(self, client_app: ClientApp, num_nodes: int) -> None:
        super().__init__(client_app, num_nodes, chunk=2)


@pytest.mark.parametrize("where", ["local", "global"])
@pytest.mark.sampled(1)
def test_stacks_keep_no_momentum_of_parameters_without_gradients(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is alone has none, and would be unlike the others."""
    monkeypatch.setattr(f"{__name__}.SIZES", (8, 8, 8))

    def model() -> nn.Module:
        made = make_model()
        made.unused = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(made.unused.weight)
        return made

    ended = []
    with watching() as watch:
        for grid in (InProcessGrid, Pairs):
            nodes = Federation(model(), SIZES, device="fake", grid=grid)
            ended.append(nodes.run(FedAvg(momentum_state=where), 4, momentum=0.9))
    assert not [text for text in watch.messages if "left out" in text]
    assert distance(*ended) < 1e-12


class Halving(Rule):
    """A rule that cannot be replayed, and does not say that it can."""

    halves: bool = False

    def begin(self, session: Session) -> None:
        """Note what learns."""
        self.learned = [*session.learned().values()]
        self.steps = 0

    def adjust(self) -> None:
        """Halve the gradients in every other step."""
        self.steps += 1
        for parameter in self.learned if self.steps % 2 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def test_what_is_behind_a_rule_that_does_not_replay_is_not_replayed_either() -> None:
    """What a method adds to gradients is added before they are clipped, and they move nothing
    before.
    """

    class Halved(FedAvg):
        def instruct(self, instruction: Instruction) -> Instruction:
            return super().instruct(instruction).with_rule(halves=True)

    with registries_restored():
        register_rule(Halving)
        apart, replays, watch = ends(lambda: Halved(clip_norm=0.1), make_model, Stacked, rounds=4)
        alone = Federation(make_model(), SIZES).run(Halved(clip_norm=0.1), 4)
        stacked = Federation(make_model(), SIZES, device="fake", grid=Stacked).run(
            Halved(clip_norm=0.1), 4
        )
    assert (apart, said(watch)) == (0, [])
    assert replays
    assert distance(alone, stacked) <= EXACT


CHANGES: dict[str, tuple[Callable[[], BaseStrategy], dict[str, Any]]] = {
    "statistics that freeze": (lambda: FixBN(freeze_round=2), {"rounds": 4}),
    "fewer clients in some rounds": (lambda: FedAvg(fraction_train=0.6, **ALONE), {"rounds": 5}),
    "bfloat16": (FedAvg, {"precision": "bf16"}),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.sampled(3)
def test_what_changes_is_captured_again(case: str, grid: type[InProcessGrid]) -> None:
    make, options = CHANGES[case]
    model = make_float32_model if case == "bfloat16" else make_model
    apart, replays, watch = ends(make, model, grid, **options)
    assert (apart, said(watch)) == (0, [])
    assert replays


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.sampled(1)
def test_steps_of_more_kinds_than_are_kept_are_taken_by_autograd(
    grid: type[InProcessGrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs have a smaller last batch: two kinds take turns where there is room for one."""
    options: dict[str, Any] = {"local_steps": 0, "local_epochs": 1, "batch_size": 3}
    monkeypatch.setattr(captured, "KEPT", 1)
    monkeypatch.setattr(f"{__name__}.SIZES", (8, 8))
    apart, replays, watch = ends(FedAvg, make_model, grid, **options)
    assert (apart, said(watch)) == (0, [])
    assert not replays


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.sampled(1)
def test_a_capture_that_computes_something_else_is_not_used(
    grid: type[InProcessGrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = fake_accelerator._Graph
    monkeypatch.setattr(
        graph,
        "replay",
        lambda self: [op(*given, **named) for op, given, named, _ in self.tape[:-3]],
    )
    apart, _, watch = ends(FedAvg, make_model, grid)
    assert (apart, said(watch)) == (0, ["replayed it has other values"])


class Reading(nn.Module):
    """Reads a number in every pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs.sum().item() else 2 * inputs


def with_layer(layer: nn.Module) -> Callable[[], nn.Module]:
    def make() -> Any:
        model: Any = make_model()
        model.net.insert(3, layer)
        return model

    return make


def test_what_cannot_be_captured_goes_on_as_before() -> None:
    reasons = {
        "it draws at random": with_layer(nn.Dropout(0.2)),
        "the host waits for the device": with_layer(Reading()),
    }
    for words, model in reasons.items():
        apart, replays, watch = ends(FedAvg, model, InProcessGrid)
        assert (apart, replays) == (0, 0)
        [reason] = said(watch)
        assert words in reason


@pytest.mark.parametrize("strategy", [FedAvg, FedTAN])
@pytest.mark.sampled(1)
def test_stacks_draw_the_masks_of_dropout_ahead_of_a_step(
    strategy: Callable[[], BaseStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step, which tells what masks are of."""

    def model() -> Any:
        made: Any = make_model()
        made.net.insert(3, nn.Dropout2d(0.3))
        made.net.append(nn.Dropout(0.2, inplace=True))
        return made

    apart, replays, watch = ends(strategy, model, Stacked, rounds=4)
    assert (apart, said(watch)) == (0, [])
    # the second round captures its steps, and the last two have three of them
    assert replays >= 6
    # without that, no step is captured that draws
    with monkeypatch.context() as patch:
        patch.setattr(StackedLayers, "draw_masks", lambda *_: [])
        apart, replays, watch = ends(strategy, model, Stacked)
    assert (apart, replays, said(watch)) == (0, 0, ["it draws at random"])
    alone = Federation(model(), SIZES, device="fake").run(FedAvg(), 3)
    stacked = Federation(model(), SIZES, device="fake", grid=Stacked).run(FedAvg(), 3)
    assert distance(alone, stacked) < 1e-12


class Alternating(nn.Module):
    """Calls one of two dropout layers, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(0.3)
        self.second = nn.Dropout(0.6)
        self.calls = [0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        masked: torch.Tensor = (self.first if self.calls[0] % 2 else self.second)(inputs)
        return masked


@pytest.mark.slow
def test_masks_are_for_the_layers_that_they_were_drawn_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of layers of a user's own none are drawn ahead, unless that is asked for."""
    monkeypatch.setattr(captured, "_BROKEN", [])
    model = with_layer(Alternating())()
    with watching() as watch:
        Federation(model, SIZES, device="fake", grid=Stacked, wrap=always).run(FedAvg(), 3)
    assert any("called in another way" in text for text in watch.messages)
    monkeypatch.setattr(captured, "KNOWN", ("torch",))
    ended = []
    for grid in GRIDS:
        nodes = Federation(with_layer(Alternating())(), SIZES, device="fake", grid=grid)
        ended.append(nodes.run(FedAvg(), 3, local_steps=2))
    assert distance(*ended) < 1e-12


def test_layers_of_a_users_own_are_captured_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "KNOWN", ("torch",))
    apart, replays, watch = ends(FedAvg, make_model, InProcessGrid)
    words = "what Double does is not torch's alone (captured=always tries)"
    assert (apart, replays, said(watch)) == (0, 0, [words])
    for grid in GRIDS:
        apart, replays, watch = ends(FedAvg, make_model, grid, wrap=always)
        assert (apart, said(watch)) == (0, [])
        assert replays > 3


class Counting(nn.Module):
    """Does something else from its so many-th call on, which no attribute shows."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = [calls]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.left[0] -= 1
        return inputs if self.left[0] > 0 else 2 * inputs


def test_a_layer_that_counts_in_python_falls_back() -> None:
    """Whether it changes while it is captured, or later, between two comparisons."""
    for calls, most, words in (
        (5, 1, "replayed it has other values"),
        (7, 4, "What was trained may be wrong"),
    ):
        model = with_layer(Counting(calls))()
        nodes = Federation(model, SIZES, device="fake", grid=Stacked, wrap=always)
        with Counted() as counted, watching() as watch:
            nodes.run(FedAvg(), 8)
        assert 0 < counted.replays <= most
        assert len([text for text in watch.messages if words in text]) == 1


@pytest.mark.parametrize("strategy", [FedAvg, FedTAN])
@pytest.mark.sampled(1)
def test_steps_of_clients_with_other_batches_are_captured(
    strategy: Callable[[], BaseStrategy],
) -> None:
    """Of two steps, the second is of the clients with twelve samples, and has four of them."""
    options: dict[str, Any] = {"batch_size": 8, "local_steps": 0, "local_epochs": 1}
    apart, replays, watch = ends(strategy, make_model, Stacked, rounds=4, **options)
    assert (apart, said(watch)) == (0, [])
    assert replays == 2 * 3


def test_steps_of_several_sizes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As labels by a Dirichlet distribution give them: clients of all numbers of samples."""
    monkeypatch.setattr(f"{__name__}.SIZES", (5, 13, 9, 16, 11))
    apart, replays, watch = ends(FedAvg, make_model, Stacked, rounds=4, batch_size=8, local_steps=3)
    assert (apart, said(watch)) == (0, [])
    assert replays == 3 * 3


@pytest.mark.parametrize("make", [FedAvg, partial(FedTAN, carry=True)])
def test_a_captured_step_keeps_what_it_reads(
    make: Callable[[], BaseStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants on the device are forgotten when there are many, as in a run of many rounds with
    other clients in each.
    """

    def forgetting(client: BNClient, _: int) -> BNClient:
        constant.cache_clear()
        return client

    monkeypatch.setattr(f"{__name__}.SIZES", (5, 13, 9, 16))
    apart, replays, watch = ends(
        make, make_model, Stacked, rounds=5, wrap=forgetting, batch_size=8, local_steps=2
    )
    assert (apart, said(watch)) == (0, [])
    assert replays > 0


@pytest.mark.parametrize("make", [FedTAN, pytest.param(FedDNA, marks=pytest.mark.slow)])
def test_first_steps_under_corrections_are_replayed(
    make: Callable[..., BaseStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the replays leave of clients with unlike batches makes the next round's corrections."""
    monkeypatch.setattr(f"{__name__}.SIZES", (5, 13, 9, 16))
    options: dict[str, Any] = {"batch_size": 8, "local_steps": 2}
    found = [
        ends(lambda: make(carry=True), make_model, Stacked, rounds, **options) for rounds in (4, 5)
    ]
    assert [(apart, said(watch)) for apart, _, watch in found] == [(0, [])] * 2
    assert found[1][1] - found[0][1] == 2
    ended = [
        Federation(make_model(), SIZES, grid=Stacked, device=device).run(
            make(carry=True), 5, **options
        )
        for device in ("cpu", "fake")
    ]
    assert distance(*ended) <= EXACT


def test_a_replay_that_leaves_other_values_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = CorrectedClients._keep
    replayed = fake_accelerator._Graph.replay
    carried = set[CorrectedClients]()

    def noted(self: CorrectedClients, *args: Any) -> None:
        carried.add(self)
        keep(self, *args)

    def spoiled(graph: Any) -> None:
        replayed(graph)
        for clients in carried:
            for kept, _ in clients._asked.values():
                kept.add_(1)

    monkeypatch.setattr(CorrectedClients, "_keep", noted)
    monkeypatch.setattr(fake_accelerator._Graph, "replay", spoiled)
    monkeypatch.setattr(f"{__name__}.SIZES", (8, 8))
    apart, _, watch = ends(
        lambda: FedTAN(carry=True), make_model, Stacked, rounds=4, batch_size=8, local_steps=1
    )
    assert (apart, said(watch)) == (0, [captured.OTHER_VALUES])


@pytest.mark.slow
def test_the_captured_yardstick_ends_as_the_plain_one() -> None:
    data = torch.randn(40, 3, 8, 8).to("fake"), (torch.arange(40) % 10).to("fake")
    parts = [torch.arange(16).to("fake"), torch.arange(16, 40).to("fake")]
    ended = []
    for kind in (BareLoop, CapturedLoop):
        model = build("small-cnn", 10, 3, 8).to("fake")
        loop = kind(model, data, parts, local_steps=2, batch_size=8, lr=0.1)
        with Counted() as counted:
            loop.round()
            loop.round()
        ended.append({name: value.cpu() for name, value in loop.state().items()})
    assert counted.replays == 2 * 2 * 2
    assert all(map(torch.equal, ended[0].values(), ended[1].values()))


@pytest.mark.slow
def test_a_client_whose_replay_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends where it would have ended, as do all others."""
    wanted = Federation(make_model(), SIZES, device="fake", wrap=eager).run(FedAvg(), 3)
    replay, calls = captured.CapturedStep.replay, []

    def failing(step: captured.CapturedStep, *given: Any) -> Any:
        calls.append(step)
        if len(calls) == 14:
            raise RuntimeError("out of memory")
        return replay(step, *given)

    monkeypatch.setattr(captured.CapturedStep, "replay", failing)
    assert distance(wanted, Federation(make_model(), SIZES, device="fake").run(FedAvg(), 3)) > 0
    nodes = Federation(make_model(), SIZES, device="fake", grid=OneByOneGrid)
    calls.clear()
    assert distance(wanted, nodes.run(FedAvg(), 3)) == 0
    assert len(calls) > 14


def test_nothing_is_captured_after_a_capture_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not another kind of step of the same client: an epoch has a smaller last batch."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(captured, "_BROKEN", [])
    monkeypatch.setattr(f"{__name__}.SIZES", (8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", broken)
        apart, replays, watch = ends(
            FedAvg, make_model, InProcessGrid, local_steps=0, local_epochs=1, batch_size=3
        )
    [reason] = said(watch)
    assert (apart, replays, len(captured._BROKEN)) == (0, 0, 1)
    assert "previous error" in reason
    assert ends(FedAvg, make_model, InProcessGrid)[:2] == (0, 0)
