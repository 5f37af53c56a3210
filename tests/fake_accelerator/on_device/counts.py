"""What a step, a round and an evaluation ask of the device."""

from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.kernels import CASES, CLIENTS, ENGINES, step_and_round
from fedbn_flwr import state
from fedbn_flwr.client.evaluation import evaluate, mean_loss
from tests.fake_accelerator.tally import counting
from tests.helpers.harness import make_float32_model, make_split

#: layers of small-cnn that exchange
LAYERS = 3
#: several tests ask for the same counts
ask = cache(step_and_round)


# kept Adam is not stacked
@pytest.mark.parametrize(
    ("case", "engine"),
    [(case, engine) for case in CASES for engine in ENGINES if (case, engine) != ("kept Adam", "stacked")],
)
def test_a_step_waits_for_nothing(case: str, engine: str) -> None:
    method, options = CASES[case]
    step, a_round = ask(method, engine, model="small-cnn", **options)
    # what is drawn for crops is sent in one copy, whose memory nobody waits for
    wanted = {"to device": float(case == "crop-flip"), "to host": 0, "wait": 0}
    assert {kind: step[kind] for kind in wanted} == wanted
    waits = 2 * LAYERS if case == "FedTAN" and engine == "stacked" else 0
    assert a_round["wait"] == waits
    if case == "FedAvg":
        clients = CLIENTS if engine == "inprocess" else 1
        # the model and the batch on the way there; the model and the loss on the way back
        assert (a_round["to device"], a_round["to host"]) == (4 * clients, 3 * clients)


@pytest.mark.parametrize(
    ("method", "options", "copies"),
    [
        ("fedavg", {}, (4, 3)),
        # the variates of the server and of the clients; the clients' new ones and their changes
        ("scaffold", {}, (4 + 2, 3 + 2)),
        ("fedavg", {"momentum": 0.9, "momentum_state": "local"}, (4 + 1, 3 + 1)),
    ],
)
def test_a_stacked_round_of_a_large_model_has_as_few_copies(
    method: str, options: dict[str, Any], copies: tuple[int, int]
) -> None:
    _, a_round = ask(method, "stacked", model="resnet20", **options)
    assert (a_round["to device"], a_round["to host"], a_round["wait"]) == (*copies, 0)


def test_rules_launch_few_kernels() -> None:
    def kernels(method: str) -> float:
        return ask(method, "stacked", model="small-cnn")[0]["kernel"]

    plain = kernels("fedavg")
    assert kernels("scaffold") == plain + 2
    # two norms for each of six parameters that are not the classifier's, and five kernels for all
    assert kernels("fedwon:agc=on") == kernels("fedwon:agc=off") + 2 * 6 + 5


def test_an_evaluation_waits_once_a_batch() -> None:
    model, split = make_float32_model().to("fake"), make_split()
    with counting() as tally:
        evaluate(model, split, 3, "fake", batch_size=10)
    assert (tally.of("wait"), tally.of("to host")) == (0, -(-len(split) // 10) + 1)
    with counting() as tally:
        mean_loss(model, split, torch.arange(len(split)).numpy(), "fake", batch_size=10)
    assert (tally.of("wait"), tally.of("to host")) == (0, 1)


def test_loading_a_model_is_one_copy_a_dtype() -> None:
    model = make_float32_model().to("fake")
    values = state.snapshot(model)
    with counting() as tally:
        state.load(model, values)
        state.load(model, dict(values))
    assert tally.of("to device") == 2 * len({value.dtype for value in values.values()})
