"""Tasks: the pixel-wise loss and the mean IoU against torch and torchmetrics, and what a task
refuses.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

from fedbn_flwr import wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.evaluation import evaluate, mean_loss
from fedbn_flwr.client.learning_task import (
    CLASSIFICATION,
    SEGMENTATION,
    LearningTask,
    mean_iou,
    pixel_cross_entropy,
    register_task,
    task_of,
)
from fedbn_flwr.client.training import LossFunction
from fedbn_flwr.data import Split, load
from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.wire import Instruction
from tests.helpers.registered import registries_restored

CLASSES = 4


def pictures(images: int = 3, ignored: float = 0.3) -> tuple[Tensor, Tensor]:
    """Logits and targets of small pictures, of which a share has no class."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (images, 5, 6), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    return torch.randn(images, CLASSES, 5, 6, generator=generator, dtype=torch.float64), targets


def test_the_pixel_loss_is_torchs_cross_entropy_with_an_ignored_label() -> None:
    logits, targets = pictures()
    wanted, own = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    F.cross_entropy(wanted, targets, ignore_index=IGNORED).backward()
    loss = pixel_cross_entropy(own, targets)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(
        float(F.cross_entropy(logits, targets, ignore_index=IGNORED)), rel=1e-12
    )
    assert wanted.grad is not None
    assert own.grad is not None
    torch.testing.assert_close(own.grad, wanted.grad)


def test_pictures_without_a_class_cost_nothing_and_teach_nothing() -> None:
    logits, targets = pictures()
    logits.requires_grad_()
    loss = pixel_cross_entropy(logits, torch.full_like(targets, IGNORED))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0


def test_the_mean_iou_is_that_of_torchmetrics_on_all_pixels() -> None:
    logits, targets = pictures(images=9)
    counted = targets != IGNORED
    predicted = logits.argmax(1)
    cells = (targets * CLASSES + predicted)[counted]
    confusion = torch.bincount(cells, minlength=CLASSES**2).view(CLASSES, CLASSES)
    wanted = multiclass_jaccard_index(predicted, targets, CLASSES, ignore_index=IGNORED)
    assert mean_iou(confusion) == pytest.approx(float(wanted), rel=1e-6)


def test_a_class_that_nowhere_is_does_not_count() -> None:
    # IoU by hand: 5 / (6 + 7 - 5), 3 / (5 + 4 - 3), no pixel of the third
    assert mean_iou(torch.tensor([[5, 1, 0], [2, 3, 0], [0, 0, 0]])) == pytest.approx(
        (5 / 8 + 3 / 6) / 2
    )


def test_predictions_of_no_class_lower_the_mean_iou_and_are_no_class() -> None:
    # IoU by hand, where 2 and 4 pixels were predicted as none: 5 / (8 + 7 - 5), 3 / (9 + 4 - 3)
    assert mean_iou(torch.tensor([[5, 1, 2], [2, 3, 4]])) == pytest.approx((5 / 10 + 3 / 10) / 2)


class Grey(nn.Module):
    """Gives the logits of classes by fixed thresholds of brightness."""

    def forward(self, inputs: Tensor) -> Tensor:
        brightness = inputs.mean(1, keepdim=True)
        return torch.cat([-(brightness - place).abs() for place in (-1.0, 0.5, -0.5, 1.0, 0.0)], 1)


@pytest.mark.parametrize("batch_size", [3, 500])
def test_an_evaluation_counts_pixels_by_city(batch_size: int) -> None:
    data = load("streets:cities=2:images=2:test=4")
    result = evaluate(Grey(), data.test, 5, "cpu", batch_size, task=SEGMENTATION)
    inputs, targets = data.test.batch(torch.arange(8))
    predicted = Grey()(inputs).argmax(1)
    micro = multiclass_accuracy(predicted, targets, 5, average="micro", ignore_index=IGNORED)
    assert result.accuracy == pytest.approx(float(micro))
    wanted = multiclass_jaccard_index(predicted, targets, 5, ignore_index=IGNORED)
    assert result.scores == {"mean-iou": pytest.approx(float(wanted), rel=1e-5)}
    by_city = []
    for city in range(2):
        here = slice(4 * city, 4 * city + 4)
        own = multiclass_accuracy(
            predicted[here], targets[here], 5, average="micro", ignore_index=IGNORED
        )
        assert result.by_domain()[city] == pytest.approx(float(own))
        by_city.append(
            float(multiclass_jaccard_index(predicted[here], targets[here], 5, ignore_index=IGNORED))
        )
    assert result.by_domain(SEGMENTATION.measure) == pytest.approx(by_city, rel=1e-5)
    # a node that has 3/4 of its images from the first city, and one from a city without test images
    mixed = result.score_for(mean_iou, torch.tensor([0.75, 0.25]))
    assert mixed == pytest.approx(0.75 * by_city[0] + 0.25 * by_city[1], rel=1e-5)
    elsewhere = evaluate(Grey(), data.test, 5, "cpu", batch_size, 3, SEGMENTATION)
    assert elsewhere.score_for(mean_iou, torch.tensor([0.0, 0.0, 1.0])) == pytest.approx(
        float(wanted), rel=1e-5
    )
    assert elsewhere.score_for(mean_iou, torch.tensor([0.0, 0.5, 0.5])) == pytest.approx(
        by_city[1], rel=1e-5
    )
    assert int(result.confusion.sum()) == int((targets != IGNORED).sum()) < targets.numel()
    assert result.loss == pytest.approx(
        mean_loss(Grey(), data.test, np.arange(8), "cpu", SEGMENTATION.loss, batch_size)
    )


def test_an_augmentation_that_leaves_label_maps_where_they_were_is_refused() -> None:
    for spec in ("none", "random-crop", "flip-rotate:degrees=10", "resized-crop-flip"):
        SEGMENTATION.check_augmentation(spec)
    with pytest.raises(
        ValueError,
        match="'crop-flip' would move the images and not their label maps; there are: none,",
    ):
        SEGMENTATION.check_augmentation("crop-flip")
    CLASSIFICATION.check_augmentation("crop-flip")


def test_a_registered_task_is_found_by_its_name() -> None:
    with registries_restored():
        task = register_task(
            "of-a-test", LearningTask(measures={"cells": lambda confusion: float(confusion.sum())})
        )
        assert task_of("of-a-test") is task
        with pytest.raises(ValueError, match="task 'of-a-test' is there already"):
            register_task("of-a-test", LearningTask())
    with pytest.raises(
        ValueError,
        match="unknown task 'of-a-test'; there are: classification, regression, segmentation",
    ):
        task_of("of-a-test")


def test_the_error_of_a_task_without_classes_is_known_as_one() -> None:
    """Its name alone tells tables and `stop-at` that it is no share, and that less is better."""
    with pytest.raises(ValueError, match="metric 'pinball' is none of mse, mae, bce, loss, error"):
        LearningTask(distance, metric="pinball", has_classes=False)
    with pytest.raises(ValueError, match="metric 'accuracy' is none of"):
        LearningTask(distance, has_classes=False)


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs().mean()


@pytest.mark.parametrize(("loss", "name", "power"), [(None, "mse", 2), (distance, "loss", 1)])
def test_a_client_with_float_targets_reports_its_error(
    loss: LossFunction | None, name: str, power: int
) -> None:
    images = torch.rand(12, 3, 4, 5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 1))
    split = Split(images, torch.rand(12))
    client = BNClient(model, split, test=split, num_classes=1, loss_function=loss)
    metrics = client.test({wire.ARRAYS: model.state_dict()}, Instruction()).metrics
    with torch.no_grad():
        error = model(images)[:, 0] - split.labels
    assert metrics[name] == pytest.approx(float(error.abs().pow(power).mean()))


class TwoHeads(nn.Module):
    """Returns two predictions, which are no logits."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean = images.mean((1, 2, 3))
        return mean, 2 * mean


def test_a_loss_takes_all_that_the_model_returns() -> None:
    """In an evaluation, too, and by domain."""
    images = torch.rand(12, 3, 4, 5)
    split = Split(images, torch.rand(12), domains=torch.arange(12) % 2)

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return sum(((each - targets) ** 2 for each in outputs), torch.zeros(())).mean()

    client = BNClient(TwoHeads(), split, test=split, num_classes=1, loss_function=loss)
    metrics = client.test({wire.ARRAYS: {}}, Instruction()).metrics
    mean = images.mean((1, 2, 3))
    errors = (mean - split.labels) ** 2 + (2 * mean - split.labels) ** 2
    assert metrics["loss"] == pytest.approx(float(errors.mean()))
    assert metrics[f"{wire.DOMAIN_SCORES}loss"] == pytest.approx(
        [float(errors[::2].mean()), float(errors[1::2].mean())]
    )


def test_areas_of_float_targets_do_not_depend_on_the_order_of_domains() -> None:
    drawn = torch.rand(2, 20, generator=torch.Generator().manual_seed(0))
    images = drawn[0].view(20, 1, 1, 1)
    targets = (drawn[0] + 0.4 * drawn[1] > 0.6).float()
    task = task_of("regression", "bce")
    found = []
    for domains in (None, torch.arange(20) % 3):
        split = Split(images, targets, domains=domains)
        found.append(evaluate(nn.Flatten(), split, 1, "cpu", task=task, metrics=["auc"]))
    assert 0.5 < found[0].by_class["auc"][0] < 1
    assert found[1].by_class == found[0].by_class


def test_a_task_without_classes_may_have_whole_numbers() -> None:
    images = torch.rand(12, 3, 4, 5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 1))
    split = Split(images, torch.arange(12) % 3)
    task = LearningTask(distance, metric="error", has_classes=False)
    client = BNClient(model, split, test=split, num_classes=3, task=task)
    metrics = client.test({wire.ARRAYS: model.state_dict()}, Instruction()).metrics
    with torch.no_grad():
        error = (model(images)[:, 0] - split.labels).abs().mean()
    assert metrics["error"] == pytest.approx(float(error))
    assert metrics["error-personal"] == metrics["error"]
