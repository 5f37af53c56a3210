"""A head in closed form: against scikit-learn and references on pooled features, however data are
split and however nodes behave.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message, MetricRecord, RecordDict
from sklearn.linear_model import Ridge
from torch import nn

from fedbn_flwr import run, wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.clientapp import ClientApp
from fedbn_flwr.data import Split
from fedbn_flwr.experiments import UsageError
from fedbn_flwr.server import head_from_sums
from fedbn_flwr.simulation.in_process import InProcessGrid, OneByOneGrid
from fedbn_flwr.simulation.stacked.stacked_grid import StackedGrid
from fedbn_flwr.state import State
from fedbn_flwr.strategies import (
    BaseStrategy,
    CannotTrainError,
    Fed3R,
    FedAvg,
    FedBN,
    FedNCM,
    FedTAN,
    FixBN,
    PersonalFed3R,
    Privacy,
)
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.closed_form import RIDGE, HeadMoments
from tests.clientapp.test_own_loop import own_app, plain_loop
from tests.helpers.faults import failed, spoiling
from tests.helpers.harness import (
    CLASSES,
    SIZES,
    Backwards,
    ClientWrapper,
    Federation,
    Traffic,
    distance,
    make_model,
    make_split,
    participants,
    parts,
)

#: how far solutions from sums in another order may be apart, in float64
EXACT = 1e-9
HEAD = "net.7"


def features_of(samples: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """Return what goes into the head for samples, in evaluation mode, and their labels."""
    model: Any = make_model()
    split = make_split()
    with torch.no_grad():
        features = model.net[:-1].eval()(split.inputs[samples].double())
    return features.numpy(), split.labels[samples].numpy()


def by_scikit_learn(
    features: np.ndarray,
    labels: np.ndarray,
    ridge: float = RIDGE,
    weights: np.ndarray | None = None,
) -> State:
    """Return the head of ridge regression: `alpha` is of sums, `ridge` a share of a mean."""
    weights = np.ones(len(labels)) if weights is None else weights
    centred = features - np.average(features, 0, weights)
    alpha = ridge * np.sum(weights[:, None] * centred**2) / features.shape[1]
    fitted = Ridge(alpha=alpha, solver="cholesky").fit(features, np.eye(CLASSES)[labels], weights)
    return {
        f"{HEAD}.weight": torch.from_numpy(fitted.coef_),
        f"{HEAD}.bias": torch.from_numpy(fitted.intercept_),
    }


def assert_head(model: Mapping[str, torch.Tensor], wanted: State) -> None:
    """Check the head, and that all other entries are as they came."""
    assert distance({name: model[name] for name in wanted}, wanted) < EXACT
    for name, value in make_model().state_dict().items():
        assert name in wanted or torch.equal(model[name], value)


@pytest.mark.parametrize("ridge", [0.001, RIDGE, 10.0])
@pytest.mark.parametrize("grid", [InProcessGrid, OneByOneGrid, StackedGrid, Backwards])
def test_the_head_is_that_of_all_samples_in_one_place(
    grid: type[InProcessGrid], ridge: float
) -> None:
    model = Federation(make_model(), grid=grid).run(Fed3R(ridge=ridge))
    assert_head(model, by_scikit_learn(*features_of(), ridge))


class Averaging(StackedGrid):
    """A grid that answers with the mean of all replies, as in a run of an experiment."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, average_by="examples")


@pytest.mark.parametrize("sizes", [(44,), (22, 22), (1, 43), (1,) * 44, SIZES])
@pytest.mark.parametrize("grid", [InProcessGrid, Averaging])
def test_it_is_the_same_for_every_split(grid: type[InProcessGrid], sizes: Any) -> None:
    federation = Federation(make_model(), sizes, grid=grid)
    federation.split = make_split()
    strategy = Fed3R(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    assert_head(federation.run(strategy), by_scikit_learn(*features_of()))
    assert len(strategy.training.replies) == (1 if grid is Averaging else len(sizes))


def test_one_exchange_and_the_run_is_done() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    strategy = Fed3R()
    nodes.run(strategy, 9)
    assert strategy.training.number == 1
    assert isinstance(nodes.grid, Traffic)
    asked = [message.metadata.message_type for message in nodes.grid.sent]
    assert asked.count(wire.GATHER) == len(SIZES)
    assert strategy.evaluation.number == 1
    rows = 65
    sent = nodes.grid.replies[0].content.array_records[wire.MOMENTS]
    counted = sum(array.numpy().size for array in sent.values())
    assert counted == rows * (rows + 1) // 2 + rows * 3


@pytest.mark.parametrize("strategy", [Fed3R, FedNCM])
def test_nodes_that_take_part_in_several_rounds_count_once(strategy: Any) -> None:
    """Half of the nodes join a round, all are in after two."""
    made = strategy(fraction_train=0.5, fraction_evaluate=0.0)
    drawn = participants(made)
    model = Federation(make_model()).run(made, 9)
    assert [len(nodes) for nodes in drawn] == [2, 2]
    assert sorted([*drawn[0], *drawn[1]]) == [0, 1, 2, 3]
    assert distance(model, Federation(make_model()).run(strategy())) < EXACT


def test_partial_participation_has_the_head_of_those_who_took_part() -> None:
    made = Fed3R(fraction_train=0.5, fraction_evaluate=0.0)
    drawn = participants(made)
    model = Federation(make_model()).run(made, 1)
    ((one, other),) = drawn
    samples = np.concatenate([parts()[one], parts()[other]])
    assert_head(model, by_scikit_learn(*features_of(torch.from_numpy(samples))))
    assert made.training.measured["samples-in-head"] == len(samples)


class Late(InProcessGrid):
    """A grid whose last node comes when two rounds are over."""

    looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return list(super().get_node_ids())[: None if self.looks > 4 else -1]


def test_a_late_node_refines_the_head() -> None:
    """A run that waits for it goes on."""
    made = Fed3R(fraction_evaluate=0.0)
    federation = Federation(make_model(), grid=Late)
    made.is_finished = lambda grid: len(made.state.counted) == len(SIZES)  # type: ignore[method-assign]
    drawn = participants(made)
    model = federation.run(made, 9)
    assert drawn[0] == [0, 1, 2]
    assert drawn[-1] == [3]
    assert made.training.number > 1
    assert_head(model, by_scikit_learn(*features_of()))


def test_a_late_node_with_numbers_among_labels_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    made = Fed3R(fraction_evaluate=0.0)
    made.is_finished = lambda grid: len(made.state.asked) == len(SIZES)  # type: ignore[method-assign]
    numbers = becomes(LIES["numbers among labels"][0], partition=3)
    federation = Federation(make_model(), grid=Late, wrap=numbers)
    model = federation.run(made, 9)
    early = torch.from_numpy(np.concatenate(parts()[:3]))
    assert_head(model, by_scikit_learn(*features_of(early)))
    assert "Node 1003 is left out" in caplog.text
    assert "not with-labels and second, as those of others" in caplog.text


def test_a_node_that_never_answers_is_asked_three_times() -> None:
    """And costs nobody the head."""
    made = Fed3R(fraction_evaluate=0.0)
    grid = spoiling(failed, lambda partition, _: partition == 2, (wire.GATHER,))
    model = Federation(make_model(), grid=grid).run(made, 30)
    assert made.training.number == 3
    honest = torch.from_numpy(np.concatenate([parts()[node] for node in (0, 1, 3)]))
    assert_head(model, by_scikit_learn(*features_of(honest)))


def test_what_was_summed_up_goes_on_from_a_checkpoint() -> None:
    first = Fed3R(fraction_train=0.5, fraction_evaluate=0.0)
    federation = Federation(make_model())
    federation.run(first, 1)
    again = Fed3R(fraction_train=0.5, fraction_evaluate=0.0)
    partitions = {partition: 1000 + partition for partition in range(len(SIZES))}
    again.load_state_dict(first.state_dict(), partitions)
    result = again.start(federation.grid, federation.initial, 2, rounds_done=1)
    assert_head(result.arrays.to_torch_state_dict(), by_scikit_learn(*features_of()))


def test_with_balanced_classes_each_weighs_the_same() -> None:
    made = Fed3R(balanced=True)
    model = Federation(make_model()).run(made, 9)
    features, labels = features_of()
    counts = np.bincount(labels)
    weights = len(labels) / (CLASSES * counts[labels])
    assert made.training.number == 2
    assert_head(model, by_scikit_learn(features, labels, weights=weights))


@pytest.mark.parametrize("bias", [True, False])
def test_the_number_of_samples_does_not_matter(bias: bool) -> None:
    """Nor does the sum of their weights, as where a class weighs nothing on the nodes that answer."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    features = torch.cat([features, torch.ones(20, 1, dtype=torch.float64)], 1)
    targets = F.one_hot(torch.arange(20) % 3).double()
    moments = HeadMoments(features.T @ targets, features.T @ features)
    smaller = HeadMoments(moments.cross / 7, features.T @ features / 7)
    for one, other in zip(moments.solve(0.1, bias), smaller.solve(0.1, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


def test_the_nearest_class_mean_is_the_largest_output() -> None:
    model = Federation(make_model()).run(FedNCM())
    features, labels = features_of()
    means = np.stack([features[labels == label].mean(0) for label in range(CLASSES)])
    distances = ((features[:, None] - means) ** 2).sum(2)
    weight, bias = (model[f"{HEAD}.{name}"].numpy() for name in ("weight", "bias"))
    outputs = features @ weight.T + bias
    assert np.abs(weight - means).max() < EXACT
    assert np.abs((features**2).sum(1)[:, None] - 2 * outputs - distances).max() < 1e-6
    assert (outputs.argmax(1) == distances.argmin(1)).all()


def test_a_class_without_samples_is_never_the_nearest() -> None:
    moments = HeadMoments(torch.tensor([[3.0, 0.0, 1.0], [0.5, 0.0, 0.5]]).double(), None)
    weight, bias = moments.class_means()
    outputs = torch.linspace(-4, 9, 30).double()[:, None] @ weight.T + bias
    assert not (outputs.argmax(1) == 1).any()


def test_a_head_without_a_bias_and_numbers_in_place_of_labels() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(30, 5, generator=generator).double() + 1
    targets = torch.randn(30, 2, generator=generator).double()
    rows = torch.cat([features, torch.ones(30, 1).double()], 1)
    moments = HeadMoments(rows.T @ targets / 30, rows.T @ rows / 30)
    for bias in (True, False):
        centred = features - features.mean(0) * bias
        alpha = float(0.3 * centred.square().sum() / 5)
        fitted = Ridge(alpha=alpha, fit_intercept=bias).fit(features.numpy(), targets.numpy())
        weight, offset = HeadMoments.unpack(moments.pack()).solve(0.3, bias)
        assert np.abs(weight.numpy() - fitted.coef_).max() < EXACT
        assert np.abs(offset.numpy() - fitted.intercept_).max() < EXACT


def test_features_that_do_not_vary_are_named() -> None:
    same = torch.ones(3, 3).double()
    with pytest.raises(ValueError, match="singular with ridge=0: try a larger one"):
        HeadMoments(torch.ones(3, 2).double(), same).solve(0.0)


# ---- bad nodes -----------------------------------------------------------------------------------


def becomes(change: Callable[[State], State], partition: int = 2) -> ClientWrapper:
    """Return a wrapper whose client of this number changes what it sends."""

    class Changed(BNClient):
        def gather(self, received: Mapping[str, State], instruction: Instruction) -> Reply:
            reply = super().gather(received, instruction)
            reply.records[wire.MOMENTS] = change(reply.records[wire.MOMENTS])
            return reply

    def wrap(client: BNClient, number: int) -> BNClient:
        if number == partition:
            client.__class__ = Changed
        return client

    return wrap


LIES: dict[str, tuple[Callable[[State], State], str]] = {
    "other names": (lambda sent: {"crossed": sent["with-labels"]}, "not of layer"),
    "another shape": (lambda sent: {**sent, "second": sent["second"][:-1]}, "not of layer"),
    "float32": (lambda sent: {**sent, "with-labels": sent["with-labels"].float()}, "not of layer"),
    "not finite": (
        lambda sent: {**sent, "with-labels": sent["with-labels"] / 0},
        "finite|NaN|number",
    ),
    "numbers among labels": (
        lambda sent: {"with-numbers": sent["with-labels"], "second": sent["second"]},
        "unlike most, entry 'with-",
    ),
    "a share below zero": (
        # the others have what it lacks
        lambda sent: {**sent, "with-labels": sent["with-labels"] + torch.tensor([0.0, -2.0, 2.0])},
        "not those of a whole",
    ),
    "more than a whole": (
        lambda sent: {name: 100 * values for name, values in sent.items()},
        "not those of a whole",
    ),
    "samples that count more": (
        lambda sent: {**sent, "second": 100 * sent["second"]},
        "do not count as one",
    ),
    "too large a product with a label": (
        lambda sent: {
            **sent,
            "with-labels": sent["with-labels"]
            + 1e3 * (torch.arange(len(sent["with-labels"])) == 2)[:, None],
        },
        "than its factors allow",
    ),
    "negative squares": (lambda sent: {**sent, "second": -sent["second"]}, "is negative"),
    "too large a product": (
        lambda sent: {**sent, "second": sent["second"] + 1e6 * (torch.arange(2145) == 1)},
        "than its factors allow",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_moments_of_no_samples_are_refused_and_cost_nobody_else_anything(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, said = LIES[lie]
    made = Fed3R(fraction_evaluate=0.0)
    model = Federation(make_model(), wrap=becomes(change)).run(made, 1)
    honest = torch.from_numpy(np.concatenate([parts()[node] for node in (0, 1, 3)]))
    assert_head(model, by_scikit_learn(*features_of(honest)))
    ((named,),) = [[text for text in caplog.messages if "Node 1002 is left out" in text]]
    assert re.search(said, named)


# ---- which layer, and what does not go -----------------------------------------------------------


class TwoHeads(nn.Module):
    """A network whose last linear layer does not give its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, CLASSES)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        result: torch.Tensor = self.first(flat) + 0 * self.last(flat)
        return result


def test_a_layer_that_is_not_the_output_is_refused_and_another_offered() -> None:
    with pytest.raises(CannotTrainError, match=r"'last' does not give .*closed-form=NAME"):
        Federation(TwoHeads()).run(Fed3R())
    with pytest.raises(CannotTrainError, match="no linear layer 'head2'; there are: first, last"):
        Federation(TwoHeads()).run(Fed3R(closed_form="head2"))


def test_a_model_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(CannotTrainError, match=r"needs an nn.Linear, and the model has none"):
        Federation(nn.Sequential(nn.Conv2d(1, CLASSES, 4), nn.Flatten())).run(Fed3R())


@pytest.mark.parametrize(
    ("method", "model", "reason"),
    [
        ("fed3r:closed-form=head2", "mlp", "there is no linear layer 'head2'"),
        ("fedavg:closed-form=head", "small-fcn", "needs an nn.Linear, and the model has none"),
    ],
)
def test_a_run_is_refused_before_it_starts(
    method: str, model: str, reason: str, tmp_path: Path
) -> None:
    data = "streets:cities=2:images=4:test=2" if model == "small-fcn" else "digits"
    with pytest.raises(UsageError, match=reason):
        run(method, data=data, model=model, rounds=1, folder=tmp_path, progress=False)
    assert not [*tmp_path.glob("*/summary.json")]


def test_what_a_node_would_send_is_said_and_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        Federation(make_model()).run(Fed3R())
    assert "Each node sends 0.0 MB once, the moments of 64 features, for layer net.7" in caplog.text
    monkeypatch.setattr(head_from_sums, "MOST_BYTES", 18000)
    Federation(make_model()).run(FedNCM())
    with pytest.raises(CannotTrainError, match="take fedncm, or a layer before it"):
        Federation(make_model()).run(Fed3R())


@pytest.mark.parametrize(
    "made",
    [
        lambda **options: Fed3R(**options),
        lambda **options: FedAvg(closed_form="head", weighting="uniform", **options),
    ],
)
def test_neither_robust_rules_nor_privacy_reach_sums(made: Callable[..., BaseStrategy]) -> None:
    with pytest.raises(ValueError, match="would not reach moments of features"):
        made(robust="median")
    with pytest.raises(ValueError, match="would not protect moments of features"):
        made(privacy=Privacy(1.0, 1.0))


# ---- loops of a user's own -----------------------------------------------------------------------


def test_a_loop_of_ones_own_needs_its_training_data_only() -> None:
    """Labels of the evaluation would give another head: they are wrong here."""
    app = ClientApp(model=make_model)
    split = make_split()

    @app.training_data()
    def training_data(message: Message, context: Any) -> Any:
        own = torch.from_numpy(parts()[int(context.node_config["partition-id"])])
        return zip(split.inputs[own].split(3), split.labels[own].split(3), strict=True)

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        model = make_model()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        loss = F.cross_entropy(model(split.inputs), torch.zeros_like(split.labels))
        metrics = MetricRecord({"num-examples": len(split), "eval-loss": float(loss.detach())})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    made = Fed3R()
    model = Federation(make_model()).run(made, grid=InProcessGrid(app, len(SIZES)))
    assert_head(model, by_scikit_learn(*features_of()))
    assert len(made.evaluation.replies) == len(SIZES)


def test_data_without_labels_are_named() -> None:
    app: Any = own_app(plain_loop, make_model)
    app.training_data()(lambda message, context: [make_split().inputs])
    with pytest.raises(CannotTrainError, match="needs targets beside inputs"):
        Federation(make_model()).run(Fed3R(), grid=InProcessGrid(app, len(SIZES)))


# ---- methods that begin from it ------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [FedAvg, FedBN, FixBN, FedTAN, lambda **given: FedAvg(freeze_bn=True, **given)],
)
def test_any_method_may_begin_from_it(made: Callable[..., BaseStrategy]) -> None:
    """A run without it that begins from the same, scaled head has the same end."""
    scaled = {
        name: head_from_sums.LOGITS * value
        for name, value in by_scikit_learn(*features_of()).items()
    }
    begun = make_model()
    begun.load_state_dict({**begun.state_dict(), **scaled})
    wanted = Federation(begun).run(made(), 2)
    got = Federation(make_model()).run(made(closed_form="head"), 2)
    assert distance(got, wanted) < 1e-8


def of_numbers() -> Federation:
    """A federation whose targets are three numbers a sample."""
    nodes = Federation(make_model())
    targets = torch.randn(len(nodes.split), CLASSES, generator=torch.Generator().manual_seed(2))
    nodes.split = Split(nodes.split.inputs, targets + 2)
    return nodes


def test_a_head_for_numbers_is_not_scaled() -> None:
    nodes = of_numbers()
    features, _ = features_of()
    alpha = RIDGE * np.sum((features - features.mean(0)) ** 2) / features.shape[1]
    fitted = Ridge(alpha=alpha, solver="cholesky").fit(
        features, nodes.split.labels.double().numpy()
    )
    wanted = {"weight": fitted.coef_, "bias": fitted.intercept_}
    options: dict[str, Any] = {"fraction_evaluate": 0.0, "freeze_bn": True}
    for made in (Fed3R(fraction_evaluate=0.0), FedAvg(closed_form="head", **options)):
        model = nodes.run(made, 1, lr=0.0)
        for name, value in wanted.items():
            assert np.abs(model[f"{HEAD}.{name}"].numpy() - value).max() < EXACT


@pytest.mark.parametrize("made", [FedNCM, lambda: Fed3R(balanced=True)])
def test_classes_that_are_none_are_refused(made: Callable[..., BaseStrategy]) -> None:
    with pytest.raises(CannotTrainError, match="need labels"):
        of_numbers().run(made())


def test_a_start_without_a_usable_reply_says_why() -> None:
    def broken(client: BNClient, partition: int) -> BNClient:
        client.indices = client.indices[:0]
        return client

    with pytest.raises(CannotTrainError, match="no node could sum up its features: node 1000"):
        Federation(make_model(), wrap=broken).run(FedAvg(closed_form="head"), 1)


# ---- heads of the nodes' own ---------------------------------------------------------------------


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_nodes_own_samples_weigh_more_in_its_own_head(own_loop: bool) -> None:
    """Kept as the node's own entries; the global head is Fed3R's."""
    made = PersonalFed3R(own_weight=3.0)
    federation = Federation(make_model())
    if own_loop:
        federation.grid = InProcessGrid(own_app(plain_loop, make_model), len(SIZES))
    assert_head(federation.run(made), by_scikit_learn(*features_of()))
    features, labels = features_of()
    for node, own in enumerate(parts()):
        weights = np.ones(len(labels))
        weights[own] += 3
        assert (
            distance(federation.kept(node), by_scikit_learn(features, labels, weights=weights))
            < EXACT
        )
    losses = [reply.metrics["eval-loss"] for reply in made.evaluation.replies]
    assert len(set(losses)) == len(SIZES)
