"""FedWon, HBN, FedDNA and centralized training against what their papers' equations say, in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import HBN, Centralized, FedAvg, FedDNA, FedWon
from tests.helpers.harness import (
    ALONE,
    INSTRUCTION,
    SIZES,
    Federation,
    assert_all_differ,
    distance,
    make_model,
    make_split,
    parts,
)
from tests.helpers.norm_references import RELU_GAIN, feddna_step, fedwon, hbn
from tests.helpers.references import State, make_nodes, mini_batches

ROUNDS = 3


def normalizer_free() -> nn.Module:
    # the closed form: the library integrates numerically, to four digits
    return make_model("wsconv", gamma=RELU_GAIN)


def fedwon_by_hand(factor: float, **instruction: Any) -> State:
    start = {name: value.clone() for name, value in normalizer_free().state_dict().items()}
    return fedwon(start, make_split(), make_nodes(), ROUNDS, replace(INSTRUCTION, **instruction), factor)


CLIPPED: dict[str, tuple[dict[str, Any], int, float]] = {
    "with the paper's factor": ({"agc": "on"}, 4, 0.1),
    "with another factor": ({"agc": "on", "clip_factor": 0.02}, 4, 0.02),
    "from batches of 32 on": ({}, 32, 0.1),
    "not with batches of 31": ({}, 31, math.inf),
    "not where it is off": ({"agc": "off"}, 32, math.inf),
}


@pytest.mark.parametrize("case", CLIPPED)
def test_fedwon_is_the_papers_equations(case: str) -> None:
    options, batch_size, factor = CLIPPED[case]
    got = Federation(normalizer_free()).run(FedWon(**options), ROUNDS, batch_size=batch_size)
    assert distance(got, fedwon_by_hand(factor, batch_size=batch_size)) < 1e-9


def test_clipping_changes_the_example_above() -> None:
    ends = [fedwon_by_hand(factor, batch_size=32) for factor in (0.02, 0.05, 0.1, math.inf)]
    assert_all_differ(ends, by=1e-4)


@pytest.mark.parametrize("average", [0.0, 0.3])
def test_hbn_learns_its_mixes_and_pools_every_layer(average: float) -> None:
    federation = Federation(make_model("hbn"))
    start = {name: value.clone() for name, value in federation.model.state_dict().items()}
    got = federation.run(HBN(average=average), ROUNDS, lr=0.3)
    expected, mixes = hbn(start, make_split(), make_nodes(), ROUNDS, replace(INSTRUCTION, lr=0.3), average)
    assert max(float(values.abs().max()) for mix in mixes for values in mix.values()) > 1e-3
    assert distance({name: got[name] for name in expected}, expected) < 1e-9
    for index, mix in enumerate(mixes):
        found = {name.removesuffix(".mix"): value for name, value in federation.kept(index).items()}
        assert distance(found, mix) < 1e-9


@pytest.mark.parametrize("exchange", ["fused", "paper"])
def test_feddna_is_fedavg_with_algorithm_2(exchange: Any) -> None:
    expected = {name: value.detach() for name, value in make_model().named_parameters()}
    shares = [size / sum(SIZES) for size in SIZES]
    for server_round in range(1, ROUNDS + 1):
        asked = replace(INSTRUCTION, server_round=server_round, local_steps=1)
        batches = [mini_batches(make_split(), node, asked, True)[0] for node in make_nodes()]
        expected = feddna_step(expected, batches, shares, asked.lr)
    got = Federation(make_model()).run(FedDNA(exchange=exchange), ROUNDS, local_steps=1)
    assert distance({name: got[name] for name in expected}, expected) < 1e-12


def test_centralized_is_one_long_run_of_plain_sgd() -> None:
    got = Federation(make_model(), (44,)).run(Centralized(**ALONE), ROUNDS)
    model, (node,) = make_model(), make_nodes((44,))
    optimizer = torch.optim.SGD(model.parameters(), lr=INSTRUCTION.lr)
    model.train()
    for server_round in range(1, ROUNDS + 1):
        for inputs, labels in mini_batches(
            make_split((44,)), node, replace(INSTRUCTION, server_round=server_round), True
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    assert distance(got, {name: value.detach() for name, value in model.state_dict().items()}) < 1e-12


def test_without_bn_a_step_of_all_clients_on_all_data_is_one_of_centralized_training() -> None:
    """The clients' gradients, weighted by examples, are the gradient of their union."""
    whole: dict[str, Any] = {"local_steps": 1, "batch_size": 100}
    federated = Federation(make_model("gn")).run(FedAvg(), ROUNDS, **whole)
    union = Federation(make_model("gn"))
    union.parts = [parts((44,))[0]] * len(SIZES)
    pooled = union.run(Centralized(fraction_train=0.25, **ALONE), ROUNDS, **whole)
    assert distance(federated, pooled) < 1e-12
