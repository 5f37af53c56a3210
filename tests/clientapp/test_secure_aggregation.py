"""Methods whose server only averages, under Flower's SecAgg+ and its older server: `fit_config`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from fedbn_flwr import norm, state
from fedbn_flwr.client import BNClient
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import (
    MTFL,
    BaseStrategy,
    FedAvg,
    FedBN,
    FedProx,
    FedWon,
    FixBN,
    SiloBN,
    fit_config,
    prepare,
)
from tests.helpers.harness import CLASSES, SIZES, make_model, make_split, parts

NODES, ROUNDS = 3, 3
CLIP, LEVELS = 8.0, 2**22
#: a power of two, so that a node's share of it is a whole number of levels
MOST = 32.0
#: a node's value, times its share of `MOST`, goes to one of the two levels beside it; the server divides by the sum
STEP = 2 * CLIP / LEVELS * NODES * MOST / sum(SIZES[:NODES])

METHODS: dict[str, Callable[[], BaseStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": lambda: FedProx(mu=0.5),
    "fixbn": lambda: FixBN(freeze_round=1, frozen_lr=1.0),
    "fedbn": FedBN,
    "silobn": SiloBN,
    "mtfl": MTFL,
    "fedwon": lambda: FedWon(agc="on"),
}
#: what stays on nodes
LOCAL = {"fedbn": "bn", "silobn": "statistics", "mtfl": "affine"}

Arrays = list[np.ndarray]


class Recording(BNClient):
    """A client that also notes what it received and returned."""

    heard: list[tuple[Arrays, Arrays, int]]

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        reply = super().fit(parameters, config)
        self.heard.append((parameters, [array.copy() for array in reply[0]], reply[1]))
        return reply


class Run:
    """A run of Flower's older server: the model after every round, and what clients received and returned."""

    def __init__(self, method: str, secure: bool) -> None:
        self.models: list[Arrays] = []
        self.heard: list[tuple[Arrays, Arrays, int]] = []
        self._method = method
        app = ClientApp(client_fn=lambda context: self._client(context).to_client(), mods=[secaggplus_mod] * secure)
        grid = InProcessGrid(app, NODES)
        strategy = OlderFedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=NODES,
            min_available_clients=NODES,
            initial_parameters=ndarrays_to_parameters([value.numpy() for value in make(method).state_dict().values()]),
            on_fit_config_fn=fit_config(METHODS[method](), local_steps=2, batch_size=5, lr=0.05),
            evaluate_fn=lambda number, arrays, config: self.models.append([np.array(array) for array in arrays]),
        )
        context = Context(grid.run.run_id, 0, {}, RecordDict(), {})
        protocol = SecAggPlusWorkflow(3, 2, max_weight=MOST, clipping_range=CLIP, quantization_range=LEVELS)
        rounds = LegacyContext(context, ServerConfig(num_rounds=ROUNDS), strategy)
        DefaultWorkflow(fit_workflow=protocol if secure else None)(grid, rounds)

    def _client(self, context: Context) -> BNClient:
        index = int(context.node_config["partition-id"])
        known: Any = {"num_classes": CLASSES, "memory": context.state, "device": "cpu"}
        client = Recording(make(self._method), make_split(), indices=parts()[index], partition_id=index, **known)
        client.heard = self.heard
        return client

    def of_round(self, number: int) -> list[tuple[Arrays, Arrays, int]]:
        return self.heard[(number - 1) * NODES : number * NODES]


def make(method: str) -> Any:
    return prepare(make_model(seed=3), method)


def shared(method: str) -> list[str]:
    """Return the names of the entries that nodes send."""
    model = make(method)
    local = state.group_keys(model, LOCAL.get(method, "none"))
    return [name for name in model.state_dict() if name not in local]


def averaged(method: str) -> list[int]:
    """Return the places of entries that can be averaged: Flower does not scale 0-d arrays, and counters are 0-d."""
    counters = norm.counter_keys(make(method))
    return [place for place, name in enumerate(shared(method)) if name not in counters]


@pytest.mark.parametrize("method", METHODS)
def test_secagg_plus_gives_the_mean_within_its_quantization(method: str) -> None:
    run = Run(method, secure=True)
    assert len(run.models) == 1 + ROUNDS
    for number in range(1, ROUNDS + 1):
        replies = run.of_round(number)
        assert len(replies) == NODES
        for place in averaged(method):
            mean = sum(arrays[place] * (count / sum(SIZES[:NODES])) for _, arrays, count in replies)
            np.testing.assert_allclose(run.models[number][place], mean, rtol=0, atol=STEP)


def test_secagg_plus_gives_what_flowers_fedavg_gives_without() -> None:
    secure, plain = Run("fixbn", secure=True), Run("fixbn", secure=False)
    for place in averaged("fixbn"):
        np.testing.assert_allclose(secure.models[1][place], plain.models[1][place], rtol=0, atol=STEP)
        assert not np.array_equal(secure.models[1][place], plain.models[1][place])


def test_frozen_statistics_are_kept_under_secagg_plus() -> None:
    """Clients return the bits that they received; the server's move by the quantization alone."""
    run, names = Run("fixbn", secure=True), shared("fixbn")
    statistics = [names.index(name) for name in norm.statistics_keys(make("fixbn"))]
    for number, is_frozen in ((1, False), (2, True), (3, True)):
        for received, returned, _ in run.of_round(number):
            assert all(np.array_equal(received[place], returned[place]) is is_frozen for place in statistics)
    for place in statistics:
        assert np.abs(run.models[1][place] - run.models[0][place]).max() > 100 * STEP
        np.testing.assert_allclose(run.models[3][place], run.models[1][place], rtol=0, atol=2 * STEP)
    weight = names.index("net.0.weight")
    assert np.abs(run.models[3][weight] - run.models[1][weight]).max() > 100 * STEP
