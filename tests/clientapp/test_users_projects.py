"""What projects on Flower do that this one's own experiments do not: keys, mods and clients of
their own.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp as FlowerClientApp
from flwr.clientapp.mod import arrays_size_mod, message_size_mod
from flwr.common.constant import ErrorCode
from flwr.server import LegacyContext, Server, ServerConfig, SimpleClientManager
from flwr.server.workflow import DefaultWorkflow
from torch import nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import ClientApp, client_app, count_bytes, guard, keep_local
from fedbn_flwr.clientapp.mods import ClientAppCallable
from fedbn_flwr.server.replies import CannotTrainError, NotObeyedError
from fedbn_flwr.simulation import StackedGrid
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import (
    BaseStrategy,
    FedAvg,
    FedBN,
    FedBS,
    FedTAN,
    FedWon,
    FixBN,
    HeteroFL,
    Scaffold,
    prepare,
)
from fedbn_flwr.wire import Instruction
from tests.clientapp.test_own_loop import own_app, plain_loop
from tests.helpers.faults import FaultyReply
from tests.helpers.harness import (
    CLASSES,
    INSTRUCTION,
    SIZES,
    Federation,
    distance,
    make_model,
    make_split,
    parts,
)

NODES = len(SIZES)


def make() -> nn.Module:
    return make_model(seed=3)


def bn_client(context: Context, **options: Any) -> BNClient:
    index = int(context.node_config["partition-id"])
    known: dict[str, Any] = {
        "test": make_split(),
        "num_classes": CLASSES,
        "memory": context.state,
        "device": "cpu",
    }
    return BNClient(
        make(), make_split(), indices=parts()[index], **{"partition_id": index, **known, **options}
    )


def start(
    strategy: BaseStrategy, app: FlowerClientApp, rounds: int = 2, **config: Any
) -> state.State:
    """Run a strategy with a user's own configuration, and return the model."""
    record = ConfigRecord({"local-steps": 2, "batch-size": 5, "lr": 0.05, **config})
    initial = state.to_record(make().state_dict())
    return state.from_record(
        strategy.start(InProcessGrid(app, NODES), initial, rounds, train_config=record).arrays
    )


def foreign_app(
    seen: list[dict[str, Any]], arrays: str = "arrays", config: str = "config", mods: Any = None
) -> FlowerClientApp:
    """Return an app that knows nothing of this project: it adds 1 to the first entry."""
    app = FlowerClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(dict(message.content.config_records[config]))
        values = message.content.array_records[arrays].to_torch_state_dict()
        values[next(iter(values))] += 1
        content: Any = {
            arrays: ArrayRecord(values),
            "metrics": MetricRecord({"num-examples": 3, "train-loss": 1.0}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        raise NotImplementedError

    return app


# ---- keys ----------------------------------------------------------------------------------------


def test_a_users_keys_arrive_as_they_are_whatever_they_are_called() -> None:
    seen: list[dict[str, Any]] = []
    mine = {
        "freeze": "backbone",
        "stays": 7,
        "omit": [1, 2],
        "lr": 0.1,
        "momentum": 0.0,
        "proximal-mu": "mine",
    }
    start(FedAvg(fraction_evaluate=0.0), foreign_app(seen), rounds=1, **mine)
    assert {key: seen[0][key] for key in mine} == mine


@pytest.mark.parametrize(
    "strategy", [FedAvg, lambda **options: FixBN(freeze_round=1, **options), FedTAN]
)
def test_a_precision_of_a_users_own_may_be_a_number(strategy: Callable[..., BaseStrategy]) -> None:
    seen: list[Any] = []

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append(message.content.config_records["config"].get("precision"))
        return call_next(message, context)

    app = own_app(plain_loop, make, mods=[watch])
    trained = start(strategy(fraction_evaluate=0.0), app, precision=32)
    assert set(seen) == {32}
    assert distance(trained, start(strategy(fraction_evaluate=0.0), own_app(plain_loop, make))) == 0
    with pytest.raises(CannotTrainError, match="unknown precision 32; known: float32, tf32, bf16"):
        start(strategy(fraction_evaluate=0.0), client_app(bn_client), precision=32)


@pytest.mark.parametrize(
    "app", [client_app(bn_client), own_app(plain_loop, make, arrays="weights", settings="settings")]
)
@pytest.mark.parametrize("strategy", [FedAvg, Scaffold])
def test_records_may_have_a_users_names(
    strategy: Callable[..., BaseStrategy], app: FlowerClientApp
) -> None:
    names = {"arrayrecord_key": "weights", "configrecord_key": "settings"}
    assert distance(start(strategy(**names), app), start(strategy(), client_app(bn_client))) < 1e-12


def test_a_users_mean_of_metrics_sees_whole_replies() -> None:
    app, contents = ClientApp(model=make), list[RecordDict]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 2, "hits": [1, 2]})
        told: Any = {
            "arrays": message.content["arrays"],
            "metrics": metrics,
            "told": ConfigRecord({"site": "north"}),
        }
        return Message(RecordDict(told), reply_to=message)

    def mean(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        contents.extend(replies)
        return MetricRecord({"sites": len(replies)})

    strategy = FedAvg(fraction_evaluate=0.0, train_metrics_aggr_fn=mean)
    result = strategy.start(InProcessGrid(app, 3), state.to_record(make().state_dict()), 1)
    assert dict(result.train_metrics_clientapp[1]) == {"sites": 3}
    assert contents[0].metric_records["metrics"]["hits"] == [1, 2]
    assert contents[0].config_records["report"]["site"] == "north"


# ---- what a client cannot do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        (lambda: FixBN(freeze_round=5), "freeze,omit"),
        (lambda: FedBS(loss="running"), "proximal-mu"),
    ],
)
def test_a_client_that_cannot_do_what_later_rounds_ask_for_is_refused_in_the_first(
    strategy: Callable[[], BaseStrategy], key: str
) -> None:
    with pytest.raises(NotObeyedError) as refusal:
        start(strategy(), foreign_app([]), rounds=9)
    assert f"node 1000 did not acknowledge {key}, which later rounds ask for" in str(refusal.value)
    assert "ClientApp(model=...)" in str(refusal.value)


def test_a_client_that_cannot_say_what_its_model_holds_is_refused_where_the_model_has_bn() -> None:
    """Without clipping, FedWon asks for nothing that a client must acknowledge: only the model
    tells it from FedAvg.
    """
    with pytest.raises(CannotTrainError) as refusal:
        start(FedWon(agc="off", fraction_evaluate=0.0), foreign_app([]), rounds=1)
    assert "FedWon is for models without BN, and there is 'net.1.running_var'" in str(refusal.value)
    seen: list[dict[str, Any]] = []
    prepared = state.to_record(prepare(make(), FedWon).state_dict())
    FedWon(agc="off", fraction_evaluate=0.0).start(
        InProcessGrid(foreign_app(seen), NODES), prepared, 1
    )
    assert len(seen) == NODES


def test_a_node_with_another_normalizer_is_left_out_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Static BN has the entries of BN, so that nothing else tells them apart."""

    def some(context: Context) -> BNClient:
        known: Any = {"train": make_split(), "memory": context.state, "device": "cpu"}
        last = context.node_config["partition-id"] == NODES - 1
        return BNClient(make() if last else prepare(make(), HeteroFL), **known)

    strategy = HeteroFL(fraction_evaluate=0.0)
    start(strategy, client_app(some), rounds=1)
    assert [reply.node for reply in strategy.training.replies] == [*range(1000, 999 + NODES)]
    assert f"Node {999 + NODES} is left out of this round: " in caplog.text
    assert (
        "brings a normalizer of its own, and the model has BatchNorm2d: make it with `prepare(model"
        in caplog.text
    )


def test_a_silent_node_does_not_keep_the_others_from_a_model_of_the_methods_own() -> None:
    strategy = FedWon(agc="off", fraction_evaluate=0.0, exchange_timeout=0.0)
    prepared = state.to_record(prepare(make(), FedWon).state_dict())
    silent = type("Silent", (FaultyReply,), {"node": 1000, "message_type": wire.DESCRIBE})
    strategy.start(silent(foreign_app([]), NODES), prepared, 1)
    assert len(strategy.training.replies) == NODES


def test_a_mod_may_answer_in_a_nodes_place(flower_log: pytest.LogCaptureFixture) -> None:
    def refuse(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != "query.describe":
            return call_next(message, context)
        reply = Message(
            Error(ErrorCode.MOD_FAILED_PRECONDITION, "no queries here"), reply_to=message
        )
        reply.metadata.__dict__["_reply_to_message_id"] = ""
        return reply

    start(
        FedAvg(fraction_train=0.4, fraction_evaluate=0.0), foreign_app([], mods=[refuse]), rounds=1
    )
    nodes = ", ".join(map(str, range(1000, 1000 + NODES)))
    assert f"Nodes {nodes} are drawn by id, without a description: no queries" in flower_log.text


def test_says_that_clients_share_a_number(flower_log: pytest.LogCaptureFixture) -> None:
    for client in (bn_client, lambda context: bn_client(context, partition_id=7)):
        assert "several nodes say that they are partition" not in flower_log.text
        start(FedAvg(fraction_evaluate=0.0), client_app(client), rounds=1)
    assert (
        "several nodes say that they are partition 7: give each client its own partition_id"
        in flower_log.text
    )


# ---- mods ----------------------------------------------------------------------------------------


def test_flowers_own_mods_work() -> None:
    with_mods = client_app(bn_client, mods=[message_size_mod, arrays_size_mod])
    assert distance(start(FedBN(), with_mods), start(FedBN(), client_app(bn_client))) == 0
    start(FedTAN(), with_mods)
    own = ClientApp(model=make, mods=[message_size_mod])
    assert isinstance(own, FlowerClientApp)


def test_an_app_with_mods_is_not_bypassed() -> None:
    seen: list[str] = []

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    initial = state.to_record(make().state_dict())
    FedAvg(fraction_evaluate=0.0).start(
        StackedGrid(client_app(bn_client, mods=[watch]), NODES, {}), initial, 2
    )
    assert seen == ["train"] * 2 * NODES


def test_keep_local_keeps_what_matches_on_the_node() -> None:
    bn = norm.bn_keys(make())
    assert bn
    kept = start(
        FedAvg(fraction_evaluate=0.0), client_app(plain_client, mods=[keep_local(*bn)]), rounds=3
    )
    wanted = Federation(make()).run(
        FedBN(fraction_evaluate=0.0), 3, local_steps=2, batch_size=5, lr=0.05, seed=0
    )
    initial = make().state_dict()
    for name, value in kept.items():
        torch.testing.assert_close(
            value, initial[name] if name in bn else wanted[name], rtol=0, atol=1e-12
        )


def test_keep_local_lets_pass_what_has_no_arrays_and_refuses_layer_wise_steps() -> None:
    app = client_app(plain_client, mods=[keep_local("head.*")])
    start(FedAvg(fraction_evaluate=0.0, server_optimizer="momentum"), app)
    with pytest.raises(CannotTrainError, match="keep_local cannot serve a layer-wise method"):
        start(FedTAN(fraction_evaluate=0.0), app)


def plain_client(context: Context) -> BNClient:
    """Return a client whose own memory keeps nothing: the mod does."""
    return bn_client(context, memory=RecordDict())


def test_guard_names_an_entry_that_is_not_finite(flower_log: pytest.LogCaptureFixture) -> None:
    def break_first(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if context.node_id == 1001:
            values = reply.content.array_records["arrays"].to_torch_state_dict()
            values["net.0.weight"][0] = float("nan")
            reply.content["arrays"] = ArrayRecord(values)
        return reply

    start(FedAvg(fraction_evaluate=0.0), client_app(bn_client, mods=[guard, break_first]), rounds=1)
    assert "Node 1001 is left out of this round: it failed: " in flower_log.text
    assert "entry 'net.0.weight' of 'arrays' is not finite after training" in flower_log.text


def test_count_bytes_counts_what_came_and_went() -> None:
    model = make()
    whole = sum(value.numpy().nbytes for value in model.state_dict().values())
    shared = whole - sum(model.state_dict()[name].numpy().nbytes for name in norm.bn_keys(model))
    grid = InProcessGrid(client_app(bn_client, mods=[count_bytes]), NODES)
    result = FedBN(fraction_evaluate=0.0).start(
        grid, state.to_record(model.state_dict()), 2, train_config=INSTRUCTION.to_config()
    )
    for server_round, wanted in ((1, whole), (2, shared)):
        metrics: Any = result.train_metrics_clientapp[server_round]
        assert wanted < metrics["bytes-down"] < 2 * wanted + 5000
    assert metrics["bytes-up"] == metrics["bytes-down"]


# ---- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [InProcessGrid, StackedGrid])
def test_a_client_may_bring_its_optimizer(grid: type[InProcessGrid]) -> None:
    made: list[float] = []

    def adagrad(model: nn.Module, instruction: Instruction) -> torch.optim.Optimizer:
        made.append(instruction.lr)
        return torch.optim.Adagrad(model.parameters(), lr=instruction.lr)

    nodes, initial = (
        grid(client_app(lambda context: bn_client(context, make_optimizer=adagrad)), NODES, {}),
        make(),
    )
    strategy = FedAvg(fraction_evaluate=0.0, lr_schedule="0.5@1")
    config = ConfigRecord({"local-steps": 1, "lr": 0.2})
    result = strategy.start(nodes, state.to_record(initial.state_dict()), 2, train_config=config)
    assert made == [0.2] * NODES + [0.1] * NODES
    trained = state.from_record(result.arrays)
    assert not any(
        torch.equal(trained[name], value) for name, value in initial.state_dict().items()
    )


# ---- Flower's older server -----------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["server", "workflow"])
def test_flowers_older_server_ends_with_one_line(ask: str) -> None:
    manager, strategy = SimpleClientManager(), cast(Any, FixBN(freeze_round=1))
    context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), ServerConfig(1), strategy, manager)
    workflow: Any = DefaultWorkflow()
    runs: dict[str, Callable[[], Any]] = {
        "server": lambda: Server(client_manager=manager, strategy=strategy).fit(1, None),
        "workflow": lambda: workflow(SimpleNamespace(get_node_ids=list), context),
    }
    with pytest.raises(
        SystemExit,
        match=r"^FixBN cannot run .*start_simulation.*: call `strategy\.start\(grid, .*\)`",
    ):
        runs[ask]()


def test_waiting_for_nodes_says_so(
    flower_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedbn_flwr.server import grids

    monkeypatch.setattr(grids, "SAY_EVERY", 0.0)
    counts = iter([[1], [1], [1, 2]])
    grid: Any = SimpleNamespace(get_node_ids=lambda: next(counts))
    with flower_log.at_level(logging.INFO, logger="flwr"):
        assert grids.wait_for_nodes(grid, 2, float("inf")) == [1, 2]
    assert "Waiting for nodes: 1 of 2 are connected" in flower_log.text


def test_a_grid_that_is_complete_has_no_nodes_to_wait_for() -> None:
    from fedbn_flwr.server.grids import PassingGrid, wait_for_nodes

    grid = PassingGrid(InProcessGrid(FlowerClientApp(), 1))
    with pytest.raises(CannotTrainError, match=r"wants 2 nodes, and 1 are all .* min_avail"):
        wait_for_nodes(grid, 2, float("inf"))
    assert wait_for_nodes(grid, 2, float("inf"), fewest=1) == [1000]
