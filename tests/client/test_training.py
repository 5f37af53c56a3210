"""The precision of local training, and what it says of batches on which BN cannot train."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import RecordDict
from torch import Tensor, nn

from fedbn_flwr.client import training
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.client.rules import Session
from fedbn_flwr.client.training import (
    OPTIMIZERS,
    LossTotals,
    batch_loss,
    by_autograd,
    make_optimizer,
    products,
)
from fedbn_flwr.data.splits import Batch
from fedbn_flwr.wire import Instruction
from tests.helpers.toys import CLASSES, toy_cnn, toy_split


def toy_batches(steps: int = 4, size: int = 5) -> list[Batch]:
    split = toy_split(steps * size)
    return [split.batch(positions) for positions in torch.arange(steps * size).split(size)]


def trained(
    model: nn.Module,
    batches: list[Batch],
    instruction: Instruction,
    optimizer: torch.optim.Optimizer | None = None,
) -> float:
    model.train()
    optimizer = optimizer or make_optimizer(model, instruction)

    session = Session(model, optimizer, instruction, {}, Memory(RecordDict()))
    losses = LossTotals(session, 1, torch.device("cpu"))

    def loss_of(batch: Batch) -> Tensor:
        loss = batch_loss(model, batch, instruction, F.cross_entropy)
        losses.add(loss, len(batch[1]))
        return loss

    step = by_autograd(loss_of, [*model.parameters()], [optimizer.step])
    for batch in batches:
        step(batch)
    [mean] = losses.means([sum(len(targets) for _, targets in batches)])
    return mean


def test_bfloat16_computes_in_bfloat16_and_keeps_the_weights_in_float32() -> None:
    model, exact, seen = toy_cnn(), toy_cnn(), set()
    model[0].register_forward_hook(lambda _, inputs, output: seen.add(output.dtype))
    losses = [
        trained(model, toy_batches(), Instruction(precision="bf16")),
        trained(exact, toy_batches(), Instruction()),
    ]
    assert seen == {torch.bfloat16}
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


TORCHS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_torchs_and_do_not_import_its_compiler(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes seconds, in every process that has an optimizer."""
    models = toy_cnn(), toy_cnn()
    instruction = Instruction(optimizer=name, lr=0.01, momentum=0.9, weight_decay=0.1)
    torchs = TORCHS[name](models[0].parameters(), lr=0.01, weight_decay=0.1)
    losses = [trained(models[0], toy_batches(), instruction, torchs)]
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    losses.append(trained(models[1], toy_batches(), instruction))
    assert losses[0] == losses[1]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


CUDNN: Any = torch.backends.cudnn
MATMUL: Any = torch.backends.cuda.matmul
#: the settings that torch has from 2.9 on
PRODUCTS = [MATMUL, CUDNN.conv, CUDNN.rnn] if hasattr(MATMUL, "fp32_precision") else []


def precisions() -> list[str]:
    return [settings.fp32_precision for settings in PRODUCTS]


@pytest.fixture
def _usual_products() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for settings in PRODUCTS:
        settings.fp32_precision = "none" if settings is MATMUL else "tf32"


@pytest.mark.skipif(not PRODUCTS, reason="needs torch 2.9")
@pytest.mark.usefixtures("_usual_products")
@pytest.mark.parametrize("before", [["none", "tf32", "tf32"], ["tf32"] * 3])
@pytest.mark.parametrize(
    ("precision", "wanted"), [("float32", "ieee"), ("bf16", "ieee"), ("tf32", "tf32")]
)
def test_a_gpu_multiplies_as_asked_for_until_every_step_is_done(
    before: list[str], precision: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, value in zip(PRODUCTS, before, strict=True):
        settings.fp32_precision = value
    asked = Instruction(precision=precision)
    with products(asked):  # no accelerator is in use
        assert precisions() == before
    monkeypatch.setattr(training, "started", lambda: torch.cuda)
    first, second = products(asked), products(asked)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert precisions() == [wanted] * 3
    second.__exit__(None, None, None)
    assert precisions() == before


@pytest.mark.usefixtures("_usual_products")
@pytest.mark.parametrize("before", ["highest", "medium"])
def test_older_settings_of_products_can_be_read_during_and_after_a_step(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch raises where they differ from the newer ones."""
    monkeypatch.setattr(training, "started", lambda: torch.cuda)
    torch.set_float32_matmul_precision(before)
    for precision, allows, level in (("float32", False, "highest"), ("tf32", True, "high")):
        with products(Instruction(precision=precision)):
            assert CUDNN.allow_tf32 == MATMUL.allow_tf32 == allows
            assert torch.get_float32_matmul_precision() == level
        assert (CUDNN.allow_tf32, torch.get_float32_matmul_precision()) == (True, before)


# ---- one sample ----------------------------------------------------------------------------------


def test_bn_without_pixels_says_in_one_line_that_it_cannot() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES))
    with pytest.raises(
        ValueError, match=r"cannot train on a mini-batch of 1 sample.*larger batch-size"
    ) as caught:
        trained(model, toy_batches(steps=1, size=1), Instruction())
    assert "\n" not in str(caught.value)


def test_other_errors_of_the_model_are_its_own() -> None:
    def complain(_: Tensor, __: Tensor) -> Tensor:
        raise ValueError("my own complaint")

    with pytest.raises(ValueError, match=r"^my own complaint$"):
        batch_loss(toy_cnn(), toy_batches()[0], Instruction(), complain)
