"""Accuracies by domain and class, against torchmetrics and by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_confusion_matrix,
    multiclass_f1_score,
    multiclass_jaccard_index,
    multiclass_precision,
    multiclass_recall,
)

from fedbn_flwr import state
from fedbn_flwr.client.evaluation import Evaluation, evaluate, evaluation_sizes, shares
from fedbn_flwr.data import Split
from tests.helpers.toys import CLASSES, assert_same_state, toy_cnn, toy_split


def random_task(count: int = 60, domains: int = 3) -> tuple[Tensor, Split]:
    """Logits that mean nothing, as the inputs of a model that only flattens, with labels and
    domains.
    """
    generator = torch.Generator().manual_seed(0)
    labels, places = (
        torch.randint(high, (count,), generator=generator) for high in (CLASSES, domains)
    )
    logits = torch.randn(count, CLASSES, generator=generator)
    return logits, Split(logits[:, :, None, None], labels, places if domains > 1 else None)


@pytest.mark.parametrize("domains", [3, 1])
def test_all_of_it_agrees_with_torchmetrics(domains: int) -> None:
    logits, split = random_task(domains=domains)
    places = torch.zeros(len(split), dtype=torch.int64) if split.domains is None else split.domains
    result = evaluate(nn.Flatten(), split, CLASSES, "cpu")
    predicted = logits.argmax(1)
    assert result.accuracy == pytest.approx(
        float(multiclass_accuracy(predicted, split.labels, CLASSES, average="micro"))
    )
    assert result.loss == pytest.approx(float(F.cross_entropy(logits, split.labels)))
    assert len(result.confusion) == len(result.by_domain()) == domains
    for domain in range(domains):
        here = places == domain
        wanted = multiclass_confusion_matrix(predicted[here], split.labels[here], CLASSES)
        assert torch.equal(result.confusion[domain], wanted)
        accuracy = float(
            multiclass_accuracy(predicted[here], split.labels[here], CLASSES, average="micro")
        )
        assert result.by_domain()[domain] == pytest.approx(accuracy)


@pytest.mark.parametrize("domains", [3, 1])
def test_a_prediction_of_no_class_counts_as_wrong(domains: int) -> None:
    """A pretrained head may have more outputs than the data have classes."""
    width = CLASSES + 3
    generator = torch.Generator().manual_seed(1)
    logits, (_, split) = torch.randn(60, width, generator=generator), random_task(domains=domains)
    found = evaluate(
        nn.Flatten(),
        replace(split, inputs=logits[:, :, None, None]),
        CLASSES,
        "cpu",
        metrics=["f1", "iou", "auc", "precision", "recall"],
    )
    predicted = logits.argmax(1)
    whole = multiclass_confusion_matrix(predicted, split.labels, width)
    assert int(whole[:, CLASSES:].sum()) > 0
    assert torch.equal(found.confusion.sum(0)[:, :CLASSES], whole[:CLASSES, :CLASSES])
    assert torch.equal(found.confusion.sum(0)[:, CLASSES], whole[:CLASSES, CLASSES:].sum(1))
    assert found.accuracy == pytest.approx(float((predicted == split.labels).double().mean()))
    recall = multiclass_recall(predicted, split.labels, width, average=None)[:CLASSES]
    shares_of_classes = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    if domains == 1:
        wanted = float(recall.double() @ shares_of_classes)
        assert found.accuracy_for(torch.ones(1), shares_of_classes) == pytest.approx(wanted)
    references: dict[str, Any] = {
        "f1": multiclass_f1_score,
        "iou": multiclass_jaccard_index,
        "precision": multiclass_precision,
        "recall": multiclass_recall,
    }
    for name, reference in references.items():
        by_class = reference(predicted, split.labels, width, average=None)[:CLASSES].tolist()
        assert found.by_class[name] == pytest.approx(by_class)
    shown = logits.softmax(1)
    auc = [
        float(binary_auroc(shown[:, label], (split.labels == label).long()))
        for label in range(CLASSES)
    ]
    assert found.by_class["auc"] == pytest.approx(auc)


def test_a_class_that_no_label_has_is_not_measured() -> None:
    """Though it is predicted."""
    logits = torch.eye(3)[[0, 1, 2, 2]]
    split = Split(logits[:, :, None, None], torch.tensor([0, 1, 0, 1]))
    names = ["f1", "iou", "precision", "recall", "auc"]
    found = evaluate(nn.Flatten(), split, 3, "cpu", metrics=names).by_class
    assert all(math.isnan(found[name][2]) for name in names)
    assert found["recall"][:2] == [0.5, 0.5]


def test_wide_outputs_without_such_a_prediction_leave_the_matrix_square() -> None:
    logits, split = random_task(domains=1)
    padded = F.pad(logits, (0, 2), value=-9.0)[:, :, None, None]
    found = evaluate(nn.Flatten(), replace(split, inputs=padded), CLASSES, "cpu")
    assert torch.equal(found.confusion, evaluate(nn.Flatten(), split, CLASSES, "cpu").confusion)


@pytest.mark.parametrize("batch_size", [1, 7, 11, 12, 500])
def test_the_batch_size_does_not_matter(batch_size: int) -> None:
    model, split = toy_cnn(), toy_split(12)
    whole = evaluate(model, split, CLASSES, "cpu", batch_size=12)
    result = evaluate(model, split, CLASSES, "cpu", batch_size=batch_size)
    assert result.loss == pytest.approx(whole.loss, rel=1e-6)
    assert torch.equal(result.confusion, whole.confusion)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_uses_running_statistics_and_leaves_the_model_alone(training: bool) -> None:
    model, split = toy_cnn(dropout=0.5).train(training), toy_split(12)
    before = state.snapshot(model)
    result = evaluate(model, split, CLASSES, "cpu")
    assert all(layer.training is training for layer in model.modules())
    assert_same_state(model.state_dict(), before)
    model.eval()
    with torch.no_grad():
        logits = model(split.batch(torch.arange(12))[0])
    assert result.loss == float(F.cross_entropy(logits, split.labels))
    assert not logits.requires_grad


def test_the_mode_is_restored_when_the_model_fails() -> None:
    class Broken(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = Broken().train()
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(model, toy_split(4), CLASSES, "cpu")
    assert model.training


#: domain 0: 3 of 4 correct; domain 1: 1 of 2
TWO_DOMAINS = [[[2, 0], [1, 1]], [[1, 0], [1, 0]]]
#: the same, and a third between them of which nothing is tested
THREE_DOMAINS = [TWO_DOMAINS[0], [[0, 0], [0, 0]], TWO_DOMAINS[1]]
#: class 0: 3 of 4 correct; class 1: 1 of 6
NO_DOMAINS = [[[3, 1], [5, 1]]]
#: the same, and nothing of class 1 is tested
ONE_CLASS = [[[3, 1], [0, 0]]]


@pytest.mark.parametrize(
    ("confusion", "domains", "classes", "wanted"),
    [
        # classes do not count where there are domains
        (TWO_DOMAINS, [0.8, 0.2], [1.0, 0.0], 0.8 * 3 / 4 + 0.2 * 1 / 2),
        (THREE_DOMAINS, [0.2, 0.6, 0.2], [0.0, 0.0], (3 / 4 + 1 / 2) / 2),
        (THREE_DOMAINS, [0.0, 1.0, 0.0], [0.0, 0.0], 4 / 6),
        (NO_DOMAINS, [1.0], [0.25, 0.75], 0.25 * 3 / 4 + 0.75 * 1 / 6),
        (NO_DOMAINS, [1.0], [1.0, 0.0], 3 / 4),
        (ONE_CLASS, [1.0], [0.25, 0.75], 3 / 4),
        (ONE_CLASS, [1.0], [0.0, 1.0], 3 / 4),
    ],
)
def test_a_nodes_own_accuracy_weighs_by_its_shares(
    confusion: list[list[list[int]]], domains: list[float], classes: list[float], wanted: float
) -> None:
    result = Evaluation(loss=0.0, confusion=torch.tensor(confusion))
    assert result.accuracy_for(
        torch.tensor(domains).double(), torch.tensor(classes).double()
    ) == pytest.approx(wanted)


def test_shares_are_those_of_the_nodes_own_samples() -> None:
    split = toy_split(8, domains=[0, 0, 1, 1, 2, 2, 2, 2])  # labels 0 1 2 3 0 1 2 3
    domains, classes = shares(split, np.array([0, 2, 4, 6]), CLASSES)
    assert domains.tolist() == [0.25, 0.25, 0.5]
    assert classes.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert domains.dtype == classes.dtype == torch.float64
    domains, classes = shares(toy_split(8), np.array([1, 5]), CLASSES)
    assert domains.tolist() == [1.0]
    assert classes.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "cpu", "gpu"),
    [
        ((3, 32, 32), [128] * 7 + [104], [500, 500]),
        ((3, 224, 224), [4] * 250, [10] * 100),
        ((3, 400, 400), [3] * 332 + [4], [3] * 332 + [4]),
        ((7,), [500, 500], [500, 500]),
    ],
)
def test_batches_fit_into_memory_and_on_a_cpu_into_caches(
    shape: tuple[int, ...], cpu: list[int], gpu: list[int]
) -> None:
    split = Split(torch.empty(1000, *shape, device="meta"), torch.zeros(1000))
    assert evaluation_sizes(split, 1000, 500, "cpu") == cpu
    assert evaluation_sizes(split, 1000, 500, torch.device("cuda")) == gpu
    assert evaluation_sizes(split, 3, 2, "cpu") == [3]  # none of one sample
