"""The client: what it trains with, what leaves it, and what it remembers."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import RecordDict
from torch import Tensor, nn

from fedbn_flwr import norm, state, wire
from fedbn_flwr.client import BNClient, Reply
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.data import Split
from fedbn_flwr.device import pick_device
from fedbn_flwr.randomness import torch_generator
from fedbn_flwr.state import State
from fedbn_flwr.wire import FREEZES, STAYS, Instruction
from tests.helpers.toys import CLASSES, assert_same_state, random_state, toy_cnn, toy_split

INSTRUCTION = Instruction(local_steps=3, batch_size=4, lr=0.05, seed=3)


def toy_client(
    model: nn.Module | None = None, split: Split | None = None, **options: Any
) -> BNClient:
    model, split = model or toy_cnn(), split or toy_split()
    return BNClient(
        model,
        split,
        **{"test": toy_split(12, seed=1), "num_classes": CLASSES, "device": "cpu", **options},
    )


def start() -> dict[str, Tensor]:
    return random_state(toy_cnn())


#: an order to the proximal rule
PROXIMAL = Instruction().with_rule(proximal_mu=0.1).rule_keys


def trained(client: BNClient, values: dict[str, Tensor], **options: Any) -> Reply:
    instruction = Instruction(**{**vars(INSTRUCTION), **options})
    return client.train({wire.ARRAYS: values}, instruction)


def arrays(reply: Reply) -> State:
    return reply.records[wire.ARRAYS]


# ---- training ------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.1}, torch.optim.SGD),
    "momentum and decay": ({"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}, torch.optim.SGD),
    "adam": ({"lr": 0.01, "weight_decay": 1e-2}, torch.optim.Adam),
    "adamw": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_a_plain_loop_over_batches_from_the_clients_own_samples(name: str) -> None:
    """Its loss is the mean over samples, and not over batches, which are of four samples and of
    two.
    """
    split, own = toy_split(), np.array([1, 4, 5, 8, 13, 16])
    options, make = OPTIMIZERS[name]
    asked = {**options, "optimizer": name if name.startswith("adam") else "sgd"}
    reply = trained(
        toy_client(split=split, indices=own), start(), local_steps=0, local_epochs=2, **asked
    )

    model = toy_cnn()
    model.load_state_dict(start())
    optimizer, total = make(model.parameters(), **options), 0.0
    generator = torch_generator(3, "batches", "round", 0, "partition", 0)
    for _ in range(2):
        for positions in torch.randperm(6, generator=generator).split(4):
            inputs, targets = split.batch(torch.from_numpy(own)[positions])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(positions)
    assert_same_state(arrays(reply), model.state_dict())
    assert reply.num_examples == 6
    assert reply.metrics[wire.TRAIN_LOSS] == pytest.approx(total / 12, rel=1e-6)


def test_global_generators_are_left_as_they_were() -> None:
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    client = toy_client(toy_cnn(dropout=0.5))
    trained(client, start(), augmentation="crop-flip")
    client.test({wire.ARRAYS: start()}, INSTRUCTION)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate()) == before[1:]


def test_a_single_last_sample_is_trained_with_the_batch_before() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES))
    reply = trained(
        toy_client(model, indices=np.arange(5)), random_state(model), local_steps=0, local_epochs=1
    )
    assert (
        int(arrays(reply)["2.num_batches_tracked"])
        == int(random_state(model)["2.num_batches_tracked"]) + 1
    )


def test_where_bn_stands_still_a_single_last_sample_is_a_batch() -> None:
    model, sizes = (
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES)),
        [],
    )
    model.register_forward_hook(lambda _, inputs, output: sizes.append(len(output)))
    client = toy_client(model, indices=np.arange(5))
    trained(client, random_state(model), local_steps=0, local_epochs=1, freeze="statistics")
    assert sizes == [4, 1]


def test_a_bn_layer_of_which_no_parameter_learns_keeps_its_statistics_and_uses_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES)
    )
    fixed = model[1].requires_grad_(False)
    values, seen = random_state(model), list[tuple[Tensor, Tensor]]()
    fixed.register_forward_hook(lambda _, inputs, outputs: seen.append((inputs[0], outputs)))
    after = arrays(trained(toy_client(model), values))
    assert all(torch.equal(after[key], values[key]) for key in values if key.startswith("1."))
    assert not any(
        torch.equal(after[f"3.{key}"], values[f"3.{key}"])
        for key in ("running_mean", "running_var")
    )
    inputs, outputs = seen[0]
    mean, variance, weight, bias = (
        values[f"1.{key}"] for key in ("running_mean", "running_var", "weight", "bias")
    )
    torch.testing.assert_close(outputs, (inputs - mean) / (variance + 1e-5).sqrt() * weight + bias)
    assert caplog.messages == [
        "1 of 2 BN layers keep their statistics, as none of their parameters learns"
    ]


# ---- one model for all clients of a process ------------------------------------------------------


def test_a_shared_model_carries_nothing_from_one_client_to_the_next() -> None:
    wanted = trained(toy_client(toy_cnn(dropout=0.5), partition_id=1), start(), momentum=0.9)
    model = toy_cnn(dropout=0.5)
    trained(toy_client(model), random_state(model, seed=8), freeze="both", lr=1.0, momentum=0.9)
    trained(
        toy_client(model),
        random_state(model, seed=9),
        stays="bn",
        optimizer="adam",
        rule_keys=PROXIMAL,
    )
    toy_client(model).test({wire.ARRAYS: random_state(model, seed=10)}, INSTRUCTION)
    found = trained(toy_client(model, partition_id=1), start(), momentum=0.9)
    assert_same_state(arrays(found), arrays(wanted))
    assert found.metrics == wanted.metrics


# ---- freezing ------------------------------------------------------------------------------------


def thawed(model: nn.Module) -> None:
    assert model.train().training
    assert all(layer.training for layer in norm.bn_layers(model).values())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("freeze", FREEZES)
def test_a_model_in_eval_mode_trains_as_any_other_and_a_freeze_ends_with_the_round(
    freeze: str,
) -> None:
    client, other = toy_client(), toy_client()
    other.model.eval()
    expected, found = (arrays(trained(each, start(), freeze=freeze)) for each in (client, other))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    thawed(client.model)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"freeze": "everything"},
            "unknown freeze 'everything'; known: none, statistics, affine, both",
        ),
        ({"stays": "head"}, "unknown group of entries 'head'; known: none, "),
        ({"omit": "head"}, "unknown group of entries 'head'; known: none, "),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb'; known: sgd, adam, adamw"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; known: float32, tf32, bf16"),
        ({"augmentation": "mixup"}, "'mixup'"),
    ],
)
def test_an_instruction_that_cannot_be_obeyed_is_an_error(
    option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trained(toy_client(), start(), **option)


# ---- evaluation and description ------------------------------------------------------------------


def test_a_test_uses_the_clients_own_loss() -> None:
    def half(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) / 2

    clients = toy_client(), toy_client(loss_function=half)
    losses: list[Any] = [
        client.test({wire.ARRAYS: start()}, INSTRUCTION).metrics[wire.EVAL_LOSS]
        for client in clients
    ]
    assert losses[1] == pytest.approx(losses[0] / 2)


class Outputs(nn.Module):
    """A model whose outputs are an object, as in other libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.net = toy_cnn()

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.net(inputs), hidden=None)


def test_logits_may_be_in_an_object() -> None:
    plain, other = toy_client(), toy_client(Outputs())
    named = {f"net.{name}": value for name, value in start().items()}
    found = {
        name.removeprefix("net."): value for name, value in arrays(trained(other, named)).items()
    }
    assert_same_state(found, arrays(trained(plain, start())))
    measured, wanted = (
        client.test({wire.ARRAYS: given}, INSTRUCTION).metrics
        for client, given in ((other, named), (plain, start()))
    )
    assert measured == wanted


def test_a_client_without_test_data_says_so() -> None:
    with pytest.raises(ValueError, match="no test split"):
        toy_client(test=None).test({wire.ARRAYS: start()}, INSTRUCTION)


def test_a_model_whose_copies_would_train_in_another_way_is_refused() -> None:
    model = toy_cnn()
    next(model.parameters()).register_hook(lambda gradient: gradient / 2)
    with pytest.raises(ValueError, match=r"has a hook on its parameter '.*weight', which its cop"):
        BNClient(model, toy_split())


def test_a_description_says_who_the_node_is() -> None:
    split = toy_split(8, domains=[0, 0, 0, 0, 1, 1, 1, 1])
    at_home, everywhere = (
        toy_client(split=split, indices=np.array(own), partition_id=2) for own in ([5, 6], [3, 4])
    )
    reply = at_home.describe()
    assert (reply.num_examples, reply.metrics) == (2, {"partition-id": 2, "domain": 1})
    assert everywhere.describe().metrics[wire.DOMAIN] == -1
    assert toy_client().describe().metrics[wire.DOMAIN] == -1
    assert reply.report[wire.PARAMETERS] == ["0.weight", "1.weight", "1.bias", "5.weight", "5.bias"]
    assert reply.records == {}


# ---- devices -------------------------------------------------------------------------------------


def test_the_device_is_the_gpu_where_there_is_one() -> None:
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "", "cuda:99"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}'"):
        pick_device(name)


@pytest.mark.parametrize("count", [1, 2])
def test_devices_count_from_0(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.device.accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    names = ["cuda", *(f"cuda:{index}" for index in range(count))]
    assert [pick_device(name).index for name in names] == [None, *range(count)]
    with pytest.raises(
        ValueError, match=rf"'cuda:{count}' is not available here: {count} of the kind"
    ):
        pick_device(f"cuda:{count}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu_agrees_with_the_cpu_and_leaves_its_generator_alone() -> None:
    before = torch.cuda.get_rng_state()
    on_gpu, on_cpu = (trained(toy_client(device=device), start()) for device in ("cuda", "cpu"))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for name, value in state.from_record(state.to_record(arrays(on_gpu))).items():
        torch.testing.assert_close(value, arrays(on_cpu)[name], rtol=1e-4, atol=1e-5)


# ---- what a node keeps between messages ----------------------------------------------------------


KEPT = {"weight": torch.tensor([1.0, 2.0]), "counter": torch.tensor(7)}


def test_what_is_recalled_is_a_copy_of_what_was_stored_last() -> None:
    memory = Memory(RecordDict())
    memory.store("momentum", {"other": torch.zeros(1)})
    memory.store("momentum", KEPT)
    memory.recall("momentum")["weight"].zero_()
    assert_same_state(memory.recall("momentum"), KEPT)


def test_personal_entries_are_only_those_that_still_stay() -> None:
    memory = Memory(RecordDict())
    assert memory.personal({"weight"}) == {}
    memory.store(STAYS, KEPT)
    assert list(memory.personal({"weight", "unheard-of"})) == ["weight"]
    assert memory.personal(set()) == {}
