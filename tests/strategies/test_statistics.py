"""Which BN statistics a model is evaluated and kept with: as trained, gathered from all nodes, or
each node's own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.clientapp import ClientApp
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import (
    HBN,
    MTFL,
    REGISTRY,
    BaseStrategy,
    CannotTrainError,
    FedAvg,
    FedBN,
    FedNorm,
    FedTAN,
    FixBN,
    HeteroFL,
    SiloBN,
    Standalone,
)
from fedbn_flwr.transports.counting_grid import CountingGrid
from tests.clientapp.test_own_loop import own_app, plain_loop
from tests.helpers.engine_comparison import quiet
from tests.helpers.faults import failed, spoiling
from tests.helpers.harness import (
    CLASSES,
    SIZES,
    Federation,
    Traffic,
    distance,
    make_float32_model,
    make_model,
    make_split,
    parts,
)
from tests.helpers.nonsense import sends
from tests.helpers.references import pooled_moments

#: how far sums in another order may be from the reference, in float64
EXACT = 1e-12
#: batches as large as any node's data, so that a node's layers see all of it at once
WHOLE: dict[str, Any] = {"batch_size": 100}


def seen_by(model: nn.Module, samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what every BN layer sees of samples in one batch, layer by layer."""
    net, values, seen = model.net, samples.double(), dict[str, torch.Tensor]()
    assert isinstance(net, nn.Sequential)
    with torch.no_grad():
        for index, layer in enumerate(net):
            seen |= {f"net.{index}": values} if isinstance(layer, nn.BatchNorm2d) else {}
            values = layer.train()(values)
    return seen


def statistics_of(
    models: Mapping[int, state.State], inputs: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the statistics of all nodes' data together, each node with its own model: the slow
    reference.
    """
    split, seen = make_split(), list[dict[str, torch.Tensor]]()
    for node, entries in models.items():
        model = make_model()
        model.load_state_dict(entries)
        samples = split.inputs[torch.from_numpy(parts(SIZES)[node])] if inputs is None else inputs
        seen.append(seen_by(model, samples))
    pooled = {layer: pooled_moments(torch.cat([each[layer] for each in seen])) for layer in seen[0]}
    means = {f"{layer}.running_mean": mean for layer, (mean, _) in pooled.items()}
    return means | {f"{layer}.running_var": variance for layer, (_, variance) in pooled.items()}


def everywhere(model: state.State) -> dict[int, state.State]:
    return dict.fromkeys(range(len(SIZES)), model)


def assert_has(model: state.State, wanted: Mapping[str, torch.Tensor]) -> None:
    assert len(wanted) == 4
    assert distance({name: model[name] for name in wanted}, wanted) < EXACT


def gathers(nodes: Federation) -> list[int]:
    """Return the round of every message that asked a node for statistics."""
    assert isinstance(nodes.grid, Traffic)
    asked = [message for message in nodes.grid.sent if message.metadata.message_type == wire.GATHER]
    return [int(message.content.config_records[wire.CONFIG]["server-round"]) for message in asked]  # type: ignore[arg-type]


# ---- exact ---------------------------------------------------------------------------------------

METHODS: dict[str, Callable[..., BaseStrategy]] = {
    "fedavg": FedAvg,
    "half of the nodes": lambda **options: FedAvg(fraction_train=0.5, **options),
    "adam on the server": lambda **options: FedAvg(server_optimizer="adam", **options),
    "fixbn, later": lambda **options: FixBN(freeze_round=9, **options),
    "fedtan": FedTAN,
    "fedtan, carried": lambda **options: FedTAN(carry=True, **options),
}


@pytest.mark.parametrize("method", METHODS)
def test_exact_statistics_are_those_of_all_data_and_nothing_else_moves(method: str) -> None:
    running = Federation(make_model()).run(METHODS[method](), **WHOLE)
    exact = Federation(make_model()).run(METHODS[method](statistics="exact"), **WHOLE)
    wanted = statistics_of(everywhere(running))
    assert_has(exact, wanted)
    assert distance({name: running[name] for name in wanted}, wanted) > 1e-3
    others = running.keys() - wanted.keys()
    assert all(torch.equal(running[name], exact[name]) for name in others)


def test_of_private_affine_parameters_every_node_gathers_with_its_own() -> None:
    nodes = Federation(make_model())
    final = nodes.run(MTFL(statistics="exact"), **WHOLE)
    assert_has(
        final, statistics_of({node: {**final, **nodes.kept(node)} for node in range(len(SIZES))})
    )


def test_some_samples_are_gathered_from_in_one_batch() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    nodes.run(FedAvg(statistics="exact", gather_samples=6), 1)
    assert isinstance(nodes.grid, Traffic)
    replies = [reply.content.array_records for reply in nodes.grid.replies]
    counts = [
        float(each[wire.MOMENTS]["net.1/count"].numpy()) for each in replies if wire.MOMENTS in each
    ]
    assert counts == [6 * 16, 6 * 16, 6 * 16, 5 * 16]  # positions, of nodes with at least 5
    # the second layer sees what the first one has made of the whole batch, which is larger than
    # those of training
    options: dict[str, Any] = {"statistics": "exact", "gather_samples": max(SIZES)}
    running, exact = (
        Federation(make_model()).run(FedAvg(**more), batch_size=4) for more in ({}, options)
    )
    assert_has(exact, statistics_of(everywhere(running)))


def test_every_node_draws_the_gathered_samples_of_every_round_anew() -> None:
    """The model stays as it is, and all nodes have the same samples, so that what they draw makes
    the difference.
    """
    drawn = []
    for _ in range(2):
        nodes = Federation(make_model(), grid=Traffic)
        nodes.parts = [np.arange(20)] * len(SIZES)
        nodes.run(FedAvg(statistics="exact", gather_samples=3), 3, evaluate_every=1, lr=0.0)
        assert isinstance(nodes.grid, Traffic)
        replies = [reply.content.array_records for reply in nodes.grid.replies]
        drawn.append(
            [
                each[wire.MOMENTS]["net.1/mean"].numpy().tobytes()
                for each in replies
                if wire.MOMENTS in each
            ]
        )
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == len({*drawn[0]}) == 3 * len(SIZES)


def test_they_are_gathered_where_models_are_evaluated_and_cost_an_exchange() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    costs = []
    for statistics in ("running", "exact"):
        grid = CountingGrid(nodes.grid)
        nodes.run(
            FedAvg(statistics=statistics, fraction_evaluate=0.0), 5, grid=grid, evaluate_every=2
        )
        costs.append(grid.training)
    assert gathers(nodes) == [2] * 4 + [4] * 4 + [5] * 4
    more = costs[1] - costs[0]
    assert more.exchanges == 3
    model = sum(
        value.numel() * value.element_size() for value in make_model().state_dict().values()
    )
    assert more.payload_down == 3 * 4 * model
    # of two layers with four channels: a count, means and variances, 8 bytes each
    assert more.payload_up == 3 * 4 * 2 * (1 + 4 + 4) * 8


@pytest.mark.parametrize("freeze", ["statistics", "both"])
@pytest.mark.parametrize("freeze_round", [2, "auto"])
def test_what_is_frozen_is_what_was_gathered(freeze_round: Any, freeze: Any) -> None:
    """Also in a round that is not evaluated; afterwards nothing is gathered any more."""
    nodes = Federation(make_model(), grid=Traffic)
    options: dict[str, Any] = (
        {"window": 2, "threshold": 0.0, "latest": 0.4} if freeze_round == "auto" else {}
    )
    strategy = FixBN(
        freeze_round=freeze_round, freeze=freeze, statistics="exact", evaluate_every=9, **options
    )
    final = nodes.run(strategy, 5, **WHOLE)
    assert gathers(nodes) == [2] * 4
    at_freeze = Federation(make_model()).run(FedAvg(), 2, **WHOLE)
    assert_has(final, statistics_of(everywhere(at_freeze)))


def test_frozen_affine_parameters_leave_statistics_to_be_gathered() -> None:
    nodes = Federation(make_model(), grid=Traffic)
    nodes.run(FixBN(freeze_round=1, freeze="affine", statistics="exact"), 3, evaluate_every=3)
    assert gathers(nodes) == [1] * 4 + [3] * 4


def test_a_model_that_nobody_trained_in_a_round_gets_its_statistics_all_the_same() -> None:
    """Round 1 is not evaluated: its model, with the statistics of training, stays for the end."""
    everybody_fails = spoiling(failed, lambda _, server_round: server_round == 2)
    final = Federation(make_model(), grid=everybody_fails).run(
        FedAvg(statistics="exact", evaluate_every=2), 2, **WHOLE
    )
    trained = Federation(make_model()).run(FedAvg(), 1, **WHOLE)
    assert_has(final, statistics_of(everywhere(trained)))
    assert all(
        torch.equal(final[name], trained[name]) for name in dict(make_model().named_parameters())
    )


def test_a_round_in_which_nobody_answers_at_all_leaves_the_model_as_it_was() -> None:
    dark = spoiling(failed, lambda _, number: number == 2, ("train", wire.GATHER, "evaluate"))
    final = Federation(make_model(), grid=dark).run(FedAvg(statistics="exact", evaluate_every=2), 2)
    assert distance(final, Federation(make_model()).run(FedAvg(), 1)) == 0


def test_nodes_that_never_gather_end_the_run_also_after_a_round_without_answers() -> None:
    untold = spoiling(failed, lambda *_: True, (wire.GATHER,))
    dark = spoiling(failed, lambda _, number: number == 2, base=untold)
    with pytest.raises(CannotTrainError, match=r"no node could gather BN statistics: .* no power"):
        Federation(make_model(), grid=dark).run(FedAvg(statistics="exact", evaluate_every=2), 4)


def test_a_later_round_in_which_nobody_gathers_keeps_the_statistics_of_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained, untold = (
        FedAvg(statistics="exact"),
        spoiling(failed, lambda _, number: number == 2, (wire.GATHER,)),
    )
    final = Federation(make_model(), grid=untold).run(trained, 2, evaluate_every=1)
    assert "BN statistics stay as they were" in caplog.text
    replies, total = trained.training.replies, sum(SIZES)
    for name in ("net.1.running_mean", "net.4.running_var"):
        mean = sum(
            reply.num_examples / total * torch.from_numpy(reply.arrays[name]) for reply in replies
        )
        assert torch.allclose(final[name], torch.as_tensor(mean), rtol=0, atol=EXACT)


def test_answers_without_moments_are_refused() -> None:
    def empty(_: Message, reply: Message) -> Message:
        reply.content[wire.MOMENTS] = ArrayRecord({})
        return reply

    nothing = spoiling(empty, lambda *_: True, (wire.GATHER,))
    with pytest.raises(
        CannotTrainError, match=r"no node could gather BN statistics: .* it sent no moments"
    ):
        Federation(make_model(), grid=nothing).run(FedAvg(statistics="exact"), 1)


def test_a_node_that_outweighs_gathered_statistics_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def changed(content: RecordDict) -> None:
        seen: Any = content.array_records.get(wire.MOMENTS, {})
        for name in [name for name in seen if name.endswith("/count")]:
            seen[name] = Array(np.array(5000.0))

    Federation(make_model(), grid=sends(changed)).run(FedAvg(statistics="exact"), 1)
    assert "Node 1001 outweighs the others in gathered statistics: it counts 5000" in caplog.text


def test_heterofl_is_fedavg_with_static_bn_and_exact_statistics() -> None:
    ends = [
        Federation(make_model("static-bn")).run(strategy, 2)
        for strategy in (HeteroFL(), FedAvg(statistics="exact"))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# ---- methods that always gather ------------------------------------------------------------------


def test_hbn_gathers_without_sending_a_mix_to_nodes_that_have_one() -> None:
    nodes = Federation(make_model("hbn"), grid=Traffic)
    nodes.run(HBN(), 2)
    assert isinstance(nodes.grid, Traffic)
    sent = [message for message in nodes.grid.sent if message.metadata.message_type == wire.GATHER]
    assert len(sent) == 2 * len(SIZES)
    assert not any(
        name.endswith("mix")
        for message in sent[len(SIZES) :]
        for name in message.content[wire.ARRAYS]
    )


def test_nodes_do_not_send_statistics_that_training_does_not_change() -> None:
    strategy = HeteroFL()
    model = Federation(make_model("static-bn")).run(strategy, 1)
    for reply in strategy.training.replies:
        assert reply.arrays.keys() == {name for name in model if name.endswith(("weight", "bias"))}


@pytest.mark.parametrize(
    ("options", "counted"),
    [({}, 20 + 64), ({"gather_samples": 30}, 20 + 30), ({"gather_samples": 0}, 20 + 70)],
)
def test_hbn_gathers_up_to_so_many_samples_of_each_node(
    options: dict[str, Any], counted: int
) -> None:
    nodes = Federation(make_model("hbn"), (20, 70), grid=Traffic)
    nodes.run(HBN(min_available_nodes=2, **options), 1)
    records = [reply.content.array_records for reply in nodes.grid.replies]  # type: ignore[attr-defined]
    gathered = [record[wire.MOMENTS] for record in records if wire.MOMENTS in record]
    # positions
    assert sum(float(record["net.1/count"].numpy()) for record in gathered) == counted * 16


def large_mean(_: Message, reply: Message) -> Message:
    """Say means that float64 can square, as moments travel, and the model's float32 cannot."""
    values = reply.content.array_records[wire.MOMENTS]
    changed = {
        name: Array(array.numpy() * 0 + 1e20)
        for name, array in values.items()
        if name.endswith("/mean")
    }
    reply.content[wire.MOMENTS] = ArrayRecord({**values, **changed})
    return reply


#: grids in which the second node's moments overflow, or are never sent
LARGE, ABSENT = (
    spoiling(spoil, lambda node, _: node == 1, (wire.GATHER,)) for spoil in (large_mean, failed)
)


@pytest.mark.parametrize(("strategy", "kind"), [(HBN, "hbn"), (HeteroFL, "static-bn")])
def test_moments_that_overflow_the_models_numbers_are_left_out(
    strategy: type[FedAvg], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    after = Federation(make_float32_model(kind), grid=LARGE).run(strategy(), 2)
    named = [text for text in caplog.messages if "is left out of this round" in text]
    reason = "the statistics of BN layer '1' is too large to be pooled in float32"
    assert set(named) == {f"Node 1001 is left out of this round: {reason}"}
    others = Federation(make_float32_model(kind), grid=ABSENT).run(strategy(), 2)
    assert all(torch.equal(after[name], others[name]) for name in others)


def test_where_no_moments_can_be_pooled_the_run_says_why() -> None:
    with pytest.raises(
        CannotTrainError, match=r"no node could gather BN statistics: node 1001: .* is too large"
    ):
        Federation(make_float32_model("hbn"), (0, 20), grid=LARGE).run(quiet(HBN), 1)


# ---- own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FedBN, SiloBN, Standalone, MTFL, FedNorm])
def test_own_statistics_are_those_of_the_nodes_data_and_are_kept(
    strategy: Callable[..., BaseStrategy],
) -> None:
    nodes, trained = Federation(make_model()), Federation(make_model())
    made = strategy(statistics="own", fraction_evaluate=1.0)
    final = nodes.run(made, **WHOLE)
    running = trained.run(strategy(fraction_evaluate=0.0), **WHOLE)
    assert all(torch.equal(final[name], running[name]) for name in final)
    for node, reply in enumerate(made.evaluation.replies):
        model = make_model()
        received = made.package([reply.node], state.to_record(final))[reply.node][wire.ARRAYS]
        own = {**final, **state.from_record(received), **trained.kept(node)}
        own |= statistics_of({node: own})
        assert distance({name: own[name] for name in nodes.kept(node)}, nodes.kept(node)) < EXACT
        assert nodes.kept(node).keys() >= {"net.1.running_mean", "net.4.running_var"}
        model.load_state_dict(own)
        wanted = evaluate(model, make_split(), CLASSES, "cpu").loss
        # losses are added up in float32
        assert reply.metrics[wire.EVAL_LOSS] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("strategy", [FedBN, MTFL])
def test_own_statistics_change_nothing_of_what_nodes_train(
    strategy: Callable[..., BaseStrategy],
) -> None:
    """A node that is evaluated before it has trained still starts with the mean of what others
    keep.
    """
    # the mean is sent from round 3 on
    options: dict[str, Any] = {
        "fraction_train": 0.25,
        "min_train_nodes": 1,
    }
    options |= {"fraction_evaluate": 1.0, "mean_personal": True}
    ends = [
        Federation(make_model()).run(strategy(statistics=name, **options), 6, evaluate_every=1)
        for name in ("running", "own")
    ]
    learned = dict(make_model().named_parameters()).keys()
    assert all(torch.equal(ends[1][name], ends[0][name]) for name in learned)


# ---- what does not go ----------------------------------------------------------------------------


def test_what_a_method_can_be_evaluated_with() -> None:
    others = {
        **dict.fromkeys(("fedbn", "silobn", "standalone", "fednorm"), ("running", "own")),
        **dict.fromkeys(("hbn", "heterofl"), ("exact",)),
        **dict.fromkeys(("fbn", "fedwon", "fed3r", "fedncm", "fed3r-personal"), ("running",)),
        "mtfl": ("running", "exact", "own"),
    }
    for name, strategy in REGISTRY.items():
        usual = others.get(name, ("running", "exact"))
        assert strategy().statistics == usual[0]
        for statistics in ("running", "exact", "own"):
            if statistics in usual:
                assert strategy(statistics=statistics).statistics == statistics
            else:
                with pytest.raises(
                    ValueError, match=f"statistics of .* must be {' or '.join(usual)}, got"
                ):
                    strategy(statistics=statistics)


def test_a_model_without_statistics_has_no_others() -> None:
    with pytest.raises(
        CannotTrainError, match="the method would be another one: the model has no BN layer"
    ):
        Federation(make_model("gn")).run(FedAvg(statistics="exact"), 1)


@pytest.mark.parametrize(("strategy", "statistics"), [(FedAvg, "exact"), (FedBN, "own")])
def test_a_layer_without_statistics_leaves_those_of_others_to_be_gathered(
    strategy: Callable[..., BaseStrategy], statistics: str
) -> None:
    model = make_model()
    layer = norm.bn_layers(model)["net.1"]
    layer.track_running_stats = False
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        layer.register_buffer(name, None)
    nodes = Federation(model)
    made = strategy(statistics=statistics, fraction_evaluate=1.0)
    found = nodes.run(made, **WHOLE)
    assert len(made.evaluation.replies) == len(SIZES)
    # to the reference, statistics of the first layer make no difference: it has the mini-batch's
    whole = {**make_model().state_dict(), **found}
    wanted = statistics_of(everywhere(whole))
    if statistics == "own":
        found = nodes.kept(0)
        wanted = statistics_of({0: {**whole, **found}})
    later = [name for name in wanted if name.startswith("net.4.")]
    assert len(later) == 2
    for name in later:
        assert distance({name: found[name]}, {name: wanted[name]}) < EXACT


# ---- loops of a user's own -----------------------------------------------------------------------


def frozen_later() -> BaseStrategy:
    return FixBN(statistics="exact")


def own_grid() -> InProcessGrid:
    return InProcessGrid(own_app(plain_loop, make_model), len(SIZES))


def test_a_loops_training_data_give_the_same_statistics() -> None:
    wanted = Federation(make_model()).run(FedAvg(statistics="exact"), lr=0.05, **WHOLE)
    strategy = FedAvg(statistics="exact")
    got = Federation(make_model()).run(strategy, grid=own_grid(), lr=0.05, **WHOLE)
    assert distance(got, wanted) < EXACT


@pytest.mark.parametrize("form", ["pair", "list", "dictionary", "inputs"])
def test_batches_may_have_several_forms(form: str) -> None:
    """Of a dictionary, the first tensor with several dimensions is the inputs."""
    app: Any = own_app(plain_loop, make_model)
    split = make_split()

    @app.training_data()  # type: ignore[untyped-decorator]
    def training_data(message: Message, context: Any) -> list[Any]:
        own = torch.from_numpy(parts()[int(context.node_config["partition-id"])])
        inputs, labels = split.inputs[own], split.labels[own]
        forms = {
            "pair": (inputs, labels),
            "list": [inputs, labels],
            "dictionary": {"label": labels, "img": inputs},
            "inputs": inputs,
        }
        return [forms[form]]

    grid = InProcessGrid(app, len(SIZES))
    runs = [
        Federation(make_model()).run(FedAvg(statistics="exact"), grid=each, lr=0.05, **WHOLE)
        for each in (grid, own_grid())
    ]
    assert distance(*runs) == 0


@pytest.mark.parametrize("strategy", [FedBN, MTFL])
def test_a_loops_nodes_are_evaluated_with_their_own(strategy: Callable[..., BaseStrategy]) -> None:
    losses = []
    for grid in (own_grid(), None):
        made = strategy(statistics="own", fraction_evaluate=1.0)
        Federation(make_model()).run(made, grid=grid, lr=0.05, **WHOLE)
        losses.append([reply.metrics["eval-loss"] for reply in made.evaluation.replies])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "made",
    [lambda: FedAvg(statistics="exact"), lambda: FedBN(statistics="own"), HeteroFL, frozen_later],
)
def test_a_loop_that_has_only_training_is_refused_in_the_first_round(
    made: Callable[[], BaseStrategy],
) -> None:
    kind = "static-bn" if made is HeteroFL else "bn"
    app = ClientApp(model=lambda: make_model(kind))

    @app.train()
    def train(message: Message, context: Any) -> Message:
        content = RecordDict(
            {"arrays": message.content["arrays"], "m": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    wanted = r"no node could train in round 1: .*with @app.training_data\(\)"
    with pytest.raises(CannotTrainError, match=wanted):
        Federation(make_model(kind)).run(made(), 9, grid=InProcessGrid(app, len(SIZES)))


@pytest.mark.parametrize("batch", [[], {"label": torch.zeros(2)}, "text"])
def test_data_that_are_no_batches_are_named(batch: Any) -> None:
    app: Any = own_app(plain_loop, make_model)
    app.training_data()(lambda message, context: [batch])
    with pytest.raises(CannotTrainError, match="a batch of training data is a pair of inputs"):
        Federation(make_model()).run(
            FedAvg(statistics="exact"), 1, grid=InProcessGrid(app, len(SIZES)), lr=0.05
        )


def test_a_gather_of_ones_own_is_no_loop_of_ones_own() -> None:
    class Kept(FedAvg):
        """Keeps the statistics of training, and does not call this project's `gather`."""

        def gather(self, arrays: ArrayRecord) -> ArrayRecord:
            return arrays

    got = Federation(make_model()).run(Kept(statistics="exact"), 2)
    assert distance(got, Federation(make_model()).run(FedAvg(), 2)) == 0
