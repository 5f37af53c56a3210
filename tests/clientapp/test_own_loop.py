"""A training loop of a user's own obeys every strategy: the same models as `BNClient` on the same
batches.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp as FlowerClientApp
from torch import Tensor, nn

from fedbn_flwr import norm, state
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.rules import read_instruction
from fedbn_flwr.client.training import make_optimizer
from fedbn_flwr.clientapp import ClientApp, numpy_client_app
from fedbn_flwr.server.replies import CannotTrainError
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import (
    FBN,
    HBN,
    BaseStrategy,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FedWon,
    FixBN,
    HeteroFL,
    Scaffold,
    prepare,
)
from fedbn_flwr.wire import Instruction
from tests.helpers.harness import SIZES, Federation, distance, make_model, make_split, parts

#: the largest difference between the two in float64
EXACT = 1e-12
ROUNDS = 3

Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, Iterator[Batch], float, float], float]


def plain_loop(
    model: nn.Module,
    batches: Iterator[Batch],
    lr: float,
    momentum: float,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Train as in PyTorch's tutorials."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model.train()
    total = samples = 0.0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy((forward or model)(inputs), targets)
        loss.backward()
        optimizer.step()
        total, samples = total + float(loss.detach()) * len(targets), samples + len(targets)
    return total / samples


def loop_over_parts(
    model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float
) -> float:
    """Train by calling the model's layers, and never the whole, as LightningModules may."""
    net: Any = model.net

    def forward(inputs: Tensor) -> Tensor:
        outputs = inputs.double()
        for layer in net:
            outputs = layer(outputs)
        return outputs

    return plain_loop(model, batches, lr, momentum, forward)


def own_app(
    loop: Loop,
    make: Callable[[], nn.Module],
    loss_name: str = "train-loss",
    weight_name: str = "num-examples",
    factor: int = 1,
    arrays: str = "arrays",
    settings: str = "config",
    evaluates: bool = True,
    **options: Any,
) -> FlowerClientApp:
    """Return a user's app: it loads, trains by the loop, and replies, and knows nothing of this
    project's methods.

    (It asks a `BNClient` for the batches that such a client would train on.)
    """
    app, split = ClientApp(model=make, **options), make_split()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = make()
        model.load_state_dict(message.content.array_records[arrays].to_torch_state_dict())
        config: Any = message.content.config_records[settings]
        loss = loop(
            model, batches_of(config, context, make), config["lr"], config.get("momentum", 0.0)
        )
        part = int(context.node_config["partition-id"])
        metrics = MetricRecord({weight_name: factor * SIZES[part], loss_name: loss})
        content = RecordDict({arrays: ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.training_data()
    def training_data(message: Message, context: Context) -> list[Batch]:
        own = torch.from_numpy(parts()[int(context.node_config["partition-id"])])
        return [(split.inputs[own], split.labels[own])]

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model = make()
        model.load_state_dict(message.content.array_records[arrays].to_torch_state_dict())
        model.train(not evaluates)
        with torch.no_grad():
            loss = F.cross_entropy(model(split.inputs), split.labels)
        metrics = MetricRecord({weight_name: len(split), "eval-loss": float(loss)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def batches_of(
    config: ConfigRecord, context: Context, make: Callable[[], nn.Module]
) -> Iterator[Batch]:
    """Yield the batches that a `BNClient` would train on."""
    part = int(context.node_config["partition-id"])
    asked = BNClient(make(), make_split(), indices=parts()[part], partition_id=part, device="cpu")
    yield from asked.plan(read_instruction(config))


#: tells how many examples a node has
COUNTED: dict[str, Any] = {
    "num_examples": lambda context: SIZES[int(context.node_config["partition-id"])]
}
METHODS: dict[str, Callable[[], BaseStrategy]] = {
    "fixbn, statistics and affine": lambda: FixBN(freeze_round=1, freeze="both"),
    "fedbn": FedBN,
    "fedprox": lambda: FedProx(mu=0.5),
    "fedwon": lambda: FedWon(clip_factor=0.05, agc="on"),
    "scaffold": Scaffold,
    "fedbs": lambda: FedBS(loss="running"),
    "scaffold, bounded gradients": lambda: Scaffold(clip_norm=0.2),
    "fedtan": FedTAN,
    "fedtan, carried": lambda: FedTAN(carry=True),
    "feddna": FedDNA,
    "local momentum": lambda: FedAvg(momentum_state="local"),
    "global momentum": lambda: FedAvg(momentum_state="global"),
    "fedbn, global momentum": lambda: FedBN(momentum_state="global"),
    "fixbn, automatic freeze": lambda: FixBN(freeze_round="auto", window=2),
    "fbn": FBN,
}


def make() -> nn.Module:
    """Return the model of both."""
    return make_model(seed=3)


def make_without_bn() -> nn.Module:
    """Return FedWon's model."""
    return prepare(make(), "fedwon")


def run_both(method: str, loop: Loop) -> float:
    """Return the distance between the models of `BNClient` and of a user's loop."""
    made = make_without_bn if method == "fedwon" else make
    grid = InProcessGrid(own_app(loop, made, **COUNTED), len(SIZES))
    asked: dict[str, Any] = {"lr": 0.05, "momentum": momentum_of(method)}
    return distance(
        Federation(made()).run(METHODS[method](), ROUNDS, grid=grid, **asked), wanted_of(method)
    )


def momentum_of(method: str) -> float:
    return 0.9 if "momentum" in method else 0.0


@cache
def wanted_of(method: str) -> state.State:
    """Return the end of a run with `BNClient`."""
    made = make_without_bn if method == "fedwon" else make
    return Federation(made()).run(METHODS[method](), ROUNDS, lr=0.05, momentum=momentum_of(method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(8)
def test_a_plain_loop_obeys_every_strategy(method: str) -> None:
    assert run_both(method, plain_loop) < EXACT


def test_what_a_rule_reports_reaches_the_strategy() -> None:
    """Statistics that change as much as they like: BN freezes once the window is full."""
    strategy = FixBN(freeze_round="auto", window=2, threshold=1e9, latest=1.0)
    grid = InProcessGrid(own_app(plain_loop, make, **COUNTED), len(SIZES))
    Federation(make()).run(strategy, 4, grid=grid, lr=0.05)
    assert strategy.state.frozen_after == 3


@pytest.mark.parametrize("method", ["fedtan", "fedtan, carried", "scaffold"])
def test_so_does_a_loop_that_calls_parts_of_the_model(method: str) -> None:
    assert run_both(method, loop_over_parts) < EXACT


@pytest.mark.parametrize("method", ["fedwon", "scaffold", "fedprox", "scaffold, bounded gradients"])
def test_rules_change_the_parameters_that_the_optimizer_has(method: str) -> None:
    """As where a device's `to` makes others, after the model has run once."""

    def loop(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
        inputs, _ = first = next(batches)
        before = deepcopy(model.state_dict())
        with torch.no_grad():
            model.train()(inputs)
        model.load_state_dict(before)
        for layer in [layer for layer in model.modules() if layer._parameters]:
            for name, value in layer.named_parameters(recurse=False):
                setattr(layer, name, nn.Parameter(value.detach().clone()))
        return plain_loop(model, chain([first], batches), lr, momentum)

    assert run_both(method, loop) < EXACT


def scaled(fused: bool, first_scale: float = 1024.0, overflows: bool = False) -> Loop:
    """Return a loop with a `GradScaler`, which leaves the scale to fused optimizers."""

    def loop(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
        model.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            if overflows:
                loss = 2 * loss.float()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return float(loss.detach())

    return loop


@pytest.mark.parametrize("method", ["fedprox", "fedwon", "scaffold, bounded gradients", "fedtan"])
def test_rules_change_gradients_that_a_fused_optimizer_would_scale_back(method: str) -> None:
    assert run_both(method, scaled(fused=True)) < EXACT


@pytest.mark.parametrize("method", ["scaffold", "feddna"])
def test_a_step_that_a_fused_optimizer_skips_is_none(method: str) -> None:
    """The first one: twice 2 to the power of 127 is no float32."""
    ends = [
        Federation(make()).run(
            METHODS[method](),
            ROUNDS,
            grid=InProcessGrid(
                own_app(scaled(fused, 2.0**127, overflows=True), make, **COUNTED), len(SIZES)
            ),
            lr=0.05,
        )
        for fused in (True, False)
    ]
    assert distance(*ends) < EXACT


class Around(torch.optim.Optimizer):
    """An optimizer that lets another one step, as SAM and Lookahead do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> Any:
        """Take the loss's gradients, and step."""
        with torch.enable_grad():
            loss = closure()
        self.base.step()
        return float(loss.detach())


STEPS: dict[str, Callable[[torch.optim.Optimizer, Callable[[], Tensor]], Any]] = {
    "a closure": lambda optimizer, closure: optimizer.step(closure),  # type: ignore[arg-type]  # as torch's own do
    "a closure by its name": lambda optimizer, closure: optimizer.step(closure=closure),  # type: ignore[arg-type]
    "an optimizer around it": lambda optimizer, closure: Around(optimizer).step(closure),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("method", ["fedprox", "scaffold", "local momentum"])
def test_a_step_may_compute_the_loss(method: str, step: str) -> None:
    def loop(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        model.train()
        for inputs, targets in batches:

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            last: Any = STEPS[step](optimizer, closure)
        return float(torch.as_tensor(last).detach())

    assert run_both(method, loop) < EXACT


def two_optimizers(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train each half of the parameters by an optimizer of its own."""
    halves = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizers = [torch.optim.SGD(half, lr=lr, momentum=momentum) for half in halves]
    model.train()
    for inputs, targets in batches:
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return float(loss.detach())


def head_first(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train the last layer on one batch, and then all."""
    *body, _, _ = model.parameters()
    for value in body:
        value.requires_grad_(False)
    plain_loop(model, iter([next(batches)]), lr, momentum)
    for value in body:
        value.requires_grad_(True)
    return plain_loop(model, batches, lr, momentum)


@pytest.mark.parametrize("method", ["fedprox", "fedwon", "scaffold", "fedtan"])
def test_each_of_two_optimizers_steps_with_its_own_gradients(method: str) -> None:
    assert run_both(method, two_optimizers) < EXACT


def own_network_first(
    model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float
) -> float:
    """Train a network of the node's own first, as Ditto may."""
    seen = list(batches)
    plain_loop(make_model(seed=4), iter(seen), lr, momentum)
    return plain_loop(model, iter(seen), lr, momentum)


def mean_teacher(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Ask a copy in training mode before each step."""
    teacher = deepcopy(model).train()

    def forward(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            teacher(inputs)
        return cast(Tensor, model(inputs))

    return plain_loop(model, batches, lr, momentum, forward)


def compiled(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train in one graph, which no hook may break."""
    graph: Any = torch.compile(model, backend="eager", fullgraph=True)
    return plain_loop(model, batches, lr, momentum, graph.__call__)


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
@pytest.mark.parametrize(
    ("method", "loop"),
    [
        *(
            (method, loop)
            for method in ("fixbn, statistics and affine", "scaffold", "fedtan", "fedtan, carried")
            for loop in (own_network_first, mean_teacher)
        ),
        pytest.param("fixbn, statistics and affine", compiled, marks=pytest.mark.slow),
        pytest.param("scaffold", compiled, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(4)
def test_the_model_that_begins_as_received_is_meant(method: str, loop: Loop) -> None:
    """Whatever else trains, and however it is called."""
    assert run_both(method, loop) < EXACT


class Wrapper(nn.Module):
    """Has the entries of the model in it, as Lightning's Fabric makes it, but other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        return self.model(inputs)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.model.state_dict(*args, **options)


def wrapped(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    return plain_loop(model, batches, lr, momentum, Wrapper(model).train())


def test_a_wrapper_that_has_the_models_entries_is_not_the_model() -> None:
    """SCAFFOLD sends control variates by the names of parameters."""
    assert run_both("scaffold", wrapped) < EXACT


class UsersClient(NumPyClient):
    """A client of Flower's tutorials: lists of arrays, and a loop of its own."""

    def __init__(self, part: int) -> None:
        self.part, self.model = part, make()

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        names = self.model.state_dict()
        self.model.load_state_dict(
            {name: torch.tensor(value) for name, value in zip(names, parameters, strict=True)}
        )
        asked = BNClient(
            make(), make_split(), indices=parts()[self.part], partition_id=self.part, device="cpu"
        )
        batches = iter(asked.plan(read_instruction(config)))
        loss = plain_loop(
            self.model, batches, float(config["lr"]), float(config.get("momentum", 0.0))
        )
        # a client may well lose the dtype of a counter
        arrays = [value.numpy().astype(float) for value in self.model.state_dict().values()]
        metrics = {"train_loss": loss, "note": "trained", "stopped": False, "steps": np.int64(3)}
        return arrays, np.int64(SIZES[self.part]), metrics  # type: ignore[return-value]  # as users do


@pytest.mark.parametrize("method", ["fedbn", "fedprox", "fedtan"])
def test_a_numpy_client_may_lose_dtypes(method: str) -> None:
    app = numpy_client_app(
        lambda context: UsersClient(int(context.node_config["partition-id"])), make, **COUNTED
    )
    result = Federation(make()).run(
        METHODS[method](), ROUNDS, grid=InProcessGrid(app, len(SIZES)), lr=0.05
    )
    wanted = wanted_of(method)
    assert distance(result, wanted) < EXACT
    assert {name: value.dtype for name, value in result.items()} == {
        name: v.dtype for name, v in wanted.items()
    }


def test_a_node_evaluates_the_model_that_it_keeps() -> None:
    federation, losses = Federation(make()), []
    for grid in (federation.grid, InProcessGrid(own_app(plain_loop, make), len(SIZES))):
        strategy = FedBN(fraction_evaluate=1.0)
        federation.run(strategy, ROUNDS, grid=grid, lr=0.05)
        losses.append([reply.metrics["eval-loss"] for reply in strategy.evaluation.replies])
        assert not strategy.evaluation.replies[0].records.get("arrays")
    # `BNClient` adds losses up in float32
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(losses[1])) == len(SIZES)


@pytest.mark.parametrize("evaluates", [True, False])
def test_the_log_says_once_that_a_model_is_evaluated_in_training_mode(
    evaluates: bool, caplog: pytest.LogCaptureFixture
) -> None:
    grid = InProcessGrid(own_app(plain_loop, make, evaluates=evaluates), len(SIZES))
    with caplog.at_level("WARNING", logger="flwr"):
        Federation(make()).run(FedAvg(fraction_evaluate=1.0), 2, grid=grid, lr=0.05)
    assert caplog.text.count("the evaluation runs BN in training mode") == (0 if evaluates else 1)


def test_the_first_mini_batch_is_that_of_the_model_and_not_of_a_transform(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def transformed(
        model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float
    ) -> float:
        scale = nn.Identity()
        return plain_loop(
            model,
            ((torch.stack([scale(x) for x in inputs]), y) for inputs, y in batches),
            lr,
            momentum,
        )

    grid = InProcessGrid(own_app(transformed, make), len(SIZES))
    with caplog.at_level("WARNING", logger="flwr"):
        Federation(make()).run(FedTAN(), 1, grid=grid, lr=0.05)
    assert "node 1000 counted 4 of 17 samples in the layer-wise step, but 7 of 44" in caplog.text


@pytest.mark.parametrize("strategy", [FedAvg, FedBN, FedTAN])
def test_a_strategy_may_weigh_by_any_metric_and_then_needs_no_other(
    strategy: Callable[..., BaseStrategy],
) -> None:
    wanted = Federation(make()).run(strategy(), 2, lr=0.05)
    grid = InProcessGrid(own_app(plain_loop, make, weight_name="samples", **COUNTED), len(SIZES))
    strategy_by_samples = strategy(weighted_by_key="samples")
    assert (
        distance(Federation(make()).run(strategy_by_samples, 2, grid=grid, lr=0.05), wanted) < EXACT
    )
    assert len(strategy_by_samples.evaluation.replies) == len(SIZES)


def test_scaffolds_share_of_the_clients_compares_numbers_of_one_kind() -> None:
    """Nodes describe themselves by their examples; if other numbers are their weights, the share is
    that of nodes.
    """
    ten_times: dict[str, Any] = {"weight_name": "pixels", "factor": 10}
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (ten_times, {"weighted_by_key": "pixels"}),
    ]
    models = [
        Federation(make()).run(
            Scaffold(fraction_train=0.5, fraction_evaluate=0.0, **options),
            ROUNDS,
            grid=InProcessGrid(
                own_app(plain_loop, make, **app, **(COUNTED if app else {})), len(SIZES)
            ),
            lr=0.05,
        )
        for app, options in runs
    ]
    assert distance(*models) < EXACT


def in_two_passes(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Go forward twice, and move the last layer's weights only, in a first step."""
    head = cast(Any, model).net[-1]
    head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=lr)
    model.train()
    inputs, targets = next(batches)
    model(inputs)
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    return 0.0


def test_the_log_says_once_what_a_loop_shared(flower_log: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(own_app(in_two_passes, make), len(SIZES))
    Federation(make()).run(FedTAN(), 2, grid=grid, lr=0.05)
    # a record may be caught twice
    told = {
        id(record): record.message
        for record in flower_log.records
        if "in 2 forward passes" in record.message
    }
    assert len(told) == len(SIZES)
    assert next(iter(told.values())).endswith("(SGD, of 1 of the 8 parameters that learn)")


def test_an_optimizer_of_this_package_calls_hooks_as_torchs_do() -> None:
    """Where a user's loop counts steps by them."""
    model, seen = make(), list[int]()
    optimizer = make_optimizer(model, Instruction())
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(3):
        optimizer.step()
    assert len(seen) == 3


def test_prepare_leaves_a_model_alone_whose_method_brings_no_normalizer() -> None:
    assert prepare(model := make(), "fedavg") is model
    with pytest.raises(ValueError, match=r"unknown strategy 'fedwin'; did you mean 'fedwon'"):
        prepare(make(), "fedwin")
    with pytest.raises(TypeError, match=r"FedWon has no option 'branch'; known: .*branch_scale"):
        prepare(make(), "fedwon", branch="paper")
    with pytest.raises(ValueError, match=r"must be a name or the class of a strategy, got <"):
        prepare(make(), FedAvg())  # type: ignore[arg-type]


def test_prepare_puts_in_the_normalizer_that_a_method_names() -> None:
    assert any(isinstance(layer, nn.GroupNorm) for layer in prepare(make(), "fedavg+gn").modules())
    with pytest.raises(ValueError, match="fedwon sets its own normalizer 'wsconv', not 'gn'"):
        prepare(make(), "fedwon+gn")


# ---- what cannot be obeyed -----------------------------------------------------------------------


def held_loop(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Keep BN in eval mode, as loops that fine-tune a network do."""

    def forward(inputs: Tensor) -> Tensor:
        for layer in norm.bn_layers(model).values():
            layer.eval()
        return cast(Tensor, model(inputs))

    return plain_loop(model, batches, lr, momentum, forward)


def other_model(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train a model that nobody asked for."""
    plain_loop(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), batches, lr, momentum)
    return 0.0


def new_model(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train what was never received."""
    return plain_loop(make_model(seed=4), batches, lr, momentum)


def other_head(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train with a new head, for two more classes, which has more than half of the weights."""
    net: Any = model.net
    net[-1] = nn.Linear(64, 5).double()
    return plain_loop(model, batches, lr, momentum)


def compiled_in_place(
    model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float
) -> float:
    """Train a model whose calls no hook sees."""
    model.compile(backend="eager")
    return plain_loop(model, batches, lr, momentum)


def own_copy_first(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train a copy of what was received, which is not sent, first."""
    seen = list(batches)
    plain_loop(deepcopy(model), iter(seen[:1]), lr, momentum)
    return plain_loop(model, iter(seen), lr, momentum)


def teacher_with_gradients(
    model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float
) -> float:
    """Ask a copy in training mode before each step, with gradients that nobody takes."""
    teacher = deepcopy(model).train()

    def forward(inputs: Tensor) -> Tensor:
        teacher(inputs)
        return cast(Tensor, model(inputs))

    return plain_loop(model, batches, lr, momentum, forward)


def no_step(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Go forward only."""
    return float(model.train()(next(batches)[0]).sum().detach())


def by_hand(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Subtract gradients without an optimizer."""
    model.train()
    inputs, targets = next(batches)
    loss = F.cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(lr * gradient)
    return float(loss.detach())


def make_bare() -> nn.Module:
    """Return a model without BN."""
    return make_model("gn")


def averaged(model: nn.Module, batches: Iterator[Batch], lr: float, momentum: float) -> float:
    """Train a copy, and send its mean with what was received, as averages of weights do."""
    trained = deepcopy(model)
    loss = plain_loop(trained, batches, lr, momentum)
    with torch.no_grad():
        for value, other in zip(model.parameters(), trained.parameters(), strict=True):
            value.lerp_(other, 0.5)
    return loss


@pytest.mark.parametrize(
    ("strategy", "loop"), [(lambda: FixBN(freeze_round=0), averaged), (FedAvg, own_copy_first)]
)
def test_another_model_may_be_sent(strategy: Callable[[], BaseStrategy], loop: Loop) -> None:
    """One that comes from what was trained; any, where the strategy asks for nothing."""
    before = make().state_dict()
    grid = InProcessGrid(own_app(loop, make), len(SIZES))
    assert distance(Federation(make()).run(strategy(), 1, grid=grid, lr=0.05), before) > 0


def app_that_replies(reply: Callable[[Message], Any]) -> FlowerClientApp:
    app = ClientApp(model=make)
    app.train()(lambda message, context: reply(message))
    return app


NO_OPTIMIZER = "the loop took no step of a torch.optim.Optimizer"
NO_BN = "the method would be another one: the model has no BN layer"
HELD = "all BN layers are in eval mode in training"
MISTAKES: list[tuple[Callable[[], BaseStrategy], FlowerClientApp, str]] = [
    *(
        (
            strategy,
            own_app(other_model, make),
            f"cannot obey {key}.*: the handler trained a Sequential",
        )
        for strategy, key in (
            (lambda: FixBN(freeze_round=0), "freeze"),
            (lambda: FedProx(mu=0.5), "proximal-mu"),
            (FedTAN, "layerwise"),
        )
    ),
    (
        lambda: FixBN(freeze_round=0),
        own_app(new_model, make),
        "the handler trained a .* that does not begin with the received weights; it must train, "
        "from what it received",
    ),
    (
        lambda: FixBN(freeze_round=0),
        own_app(other_head, make),
        "a Double that does not begin with the received weights",
    ),
    (
        lambda: FixBN(freeze_round=0),
        own_app(compiled_in_place, make),
        r"the handler trained nothing in training mode \(a thread of its own or model.compile\(\) hides",
    ),
    *(
        (each, own_app(loop, make), "two models began with what was received, and the second one")
        for each in (lambda: FixBN(freeze_round=0), lambda: FedProx(mu=0.5), FedTAN)
        for loop in (own_copy_first, teacher_with_gradients)
    ),
    *(
        (
            each,
            own_app(two_optimizers, make),
            f"the loop has several optimizers, and {option} needs one for all parameters",
        )
        for each, option in (
            (lambda: Scaffold(clip_norm=0.2), "clip_norm"),
            (lambda: FedAvg(momentum_state="local"), "momentum_state"),
        )
    ),
    (
        lambda: FedProx(mu=0.5),
        own_app(head_first, make),
        "net.0.weight begins to learn after the first step of an optimizer",
    ),
    (lambda: FedProx(mu=0.5), own_app(no_step, make), NO_OPTIMIZER),
    (FedAvg, app_that_replies(lambda _: None), "the handler must return a Message, not NoneType"),
    (
        FedAvg,
        app_that_replies(lambda message: Message(Error(0, "no disk"), reply_to=message)),
        "node 1000: it failed: RuntimeError: no disk",
    ),
    # statistics would be those of before the step: nothing tells when that ends
    *(
        (each, own_app(by_hand, make), NO_OPTIMIZER)
        for each in (FedTAN, FedDNA, lambda: FedTAN(carry=True))
    ),
    *(
        (each, own_app(held_loop, make), HELD)
        for each in (FedTAN, FedDNA, lambda: FedTAN(carry=True))
    ),
    *((each, own_app(plain_loop, make_bare), NO_BN) for each in (FedBN, FixBN, FedTAN)),
    (
        FedWon,
        own_app(plain_loop, make),
        r"without BN, and there is 'net.1.running_var'.*prepare\(model, ",
    ),
    *(
        (each, own_app(plain_loop, make), r"the model has BatchNorm2d.*prepare\(model, ")
        for each in (HBN, HeteroFL)
    ),
    (
        FedBS,
        own_app(plain_loop, make),
        "lack 'local-loss'; they are num-examples, partition-id, train-loss",
    ),
    (
        lambda: FedBS(loss="running"),
        own_app(plain_loop, make, loss_name="my-loss"),
        "weighs by the metric 'train-loss', which no node sent; node 1000 sent my-loss",
    ),
    (
        lambda: FedAvg(weighted_by_key="samples"),
        own_app(plain_loop, make),
        "its metrics lack 'samples', which the strategy weighs by; they are num-examples, "
        "train-loss",
    ),
    (
        FedAvg,
        numpy_client_app(lambda _: cast(Any, Client()), make),
        r"returned a Client, which is a flwr.client.Client; numpy_client_app takes a NumPyClient: .*ClientApp\(model=",
    ),
]


@pytest.mark.parametrize(("strategy", "app", "message"), MISTAKES)
@pytest.mark.sampled(18)
def test_what_cannot_be_obeyed_ends_the_run_by_name(
    strategy: Callable[[], BaseStrategy], app: FlowerClientApp, message: str
) -> None:
    with pytest.raises(CannotTrainError, match=message):
        Federation(cast(ClientApp, app).structure).run(
            strategy(), 1, grid=InProcessGrid(app, len(SIZES)), lr=0.05
        )
