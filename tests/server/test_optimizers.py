"""Server optimizers: Flower's numbers for parameters, plain averages for everything else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

from fedbn_flwr.server.optimizers import ServerOptimizer
from fedbn_flwr.server.pooling import Start
from fedbn_flwr.strategies import FedAvg
from tests.helpers.harness import Federation, distance, make_model

FLOWER: dict[str, Callable[[], Any]] = {
    "adam": lambda: FedAdam(eta=0.1),
    "yogi": lambda: FedYogi(eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    "adagrad": lambda: FedAdagrad(eta=0.1, tau=1e-3),
    "momentum": lambda: FedAvgM(server_learning_rate=1.0, server_momentum=0.9),
}


@pytest.mark.parametrize("rule", FLOWER)
def test_parameters_move_as_with_flowers_own(rule: str) -> None:
    generator = np.random.default_rng(0)
    start = generator.normal(size=(4, 3))
    averages = [start + generator.normal(size=start.shape) for _ in range(4)]
    ours: Any = start
    optimizer, memory = ServerOptimizer(rule), dict[str, Any]()
    for server_round, averaged in enumerate(averages, 1):
        before = Start(server_round, {"w": ours}, lambda _: (frozenset({"w"}), {}))
        ours = optimizer.apply({"w": averaged}, before, memory)["w"]
    np.testing.assert_allclose(ours, flower(FLOWER[rule](), start, averages), rtol=1e-12)


def flower(strategy: Any, start: np.ndarray, averages: list[np.ndarray]) -> np.ndarray:
    """One node that always answers with the average."""
    grid = Federation(make_model()).grid
    arrays = ArrayRecord({"w": Array(start)})
    for server_round, averaged in enumerate(averages, 1):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        content = RecordDict(
            {"arrays": ArrayRecord({"w": Array(averaged)}), "m": MetricRecord({"num-examples": 1})}
        )
        arrays, _ = strategy.aggregate_train(server_round, [Message(content, reply_to=messages[0])])
    result: np.ndarray = arrays["w"].numpy()
    return result


@pytest.mark.parametrize("rule", FLOWER)
def test_statistics_and_counters_are_averaged(rule: Any) -> None:
    plain = Federation(make_model()).run(FedAvg(), 1)
    stepped = Federation(make_model()).run(FedAvg(server_optimizer=rule), 1)
    buffers = dict(make_model().named_buffers())
    assert buffers
    assert all(torch.equal(plain[name], stepped[name]) for name in buffers)
    # momentum's first step is the whole average
    assert (
        distance(plain, stepped) < 1e-15 if rule == "momentum" else distance(plain, stepped) > 1e-3
    )
