"""Predictions by domain and class, from which every accuracy of the papers follows, and the mean
IoU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.client.batch_plan import pass_sizes
from fedbn_flwr.client.image_order import channels_last
from fedbn_flwr.client.learning_task import (
    CLASSIFICATION,
    LearningTask,
    Measure,
    class_counts,
)
from fedbn_flwr.client.training import LossFunction, logits_of, model_loss, output_loss
from fedbn_flwr.data import Split
from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.plugins import extra

#: values of a batch of images in an evaluation: 500 images of 32 x 32 pixels
MOST_VALUES = 500 * 3 * 32 * 32
#: pixels of one on a CPU, whose caches do not hold what layers make of more
MOST_PIXELS = 128 * 32 * 32
#: images in it that are not too many, however large they are
LARGE_IMAGES = 4
#: of what `class_counts` returns
OF_COUNTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "f1": lambda hits, labelled, predicted: 2 * hits / (labelled + predicted),
    "iou": lambda hits, labelled, predicted: hits / (labelled + predicted - hits),
    "precision": lambda hits, labelled, predicted: hits / predicted.clamp(min=1),
    "recall": lambda hits, labelled, predicted: hits / labelled,
}
#: the area under the ROC curve of one class against all others, or of a float target that is 0 or
#: 1, which needs all outputs
AUC = "auc"
CLASS_METRICS = (*OF_COUNTS, AUC)


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, and one confusion matrix (true class x predicted class) a domain.

    It counts predictions: one for each image in classification, one for each pixel with a class in
    segmentation. If there are predictions of no class (a model may have more outputs), a last
    column counts them. In regression, accuracies are mean losses: a domain's matrix has the sum of
    its losses and the number of its samples.
    """

    loss: float
    confusion: Tensor
    #: further metrics by name, each with a number for every class
    by_class: Mapping[str, list[float]] = field(default_factory=dict)
    #: scores of the task beside the accuracy
    scores: Mapping[str, float] = field(default_factory=dict)
    has_classes: bool = True

    @property
    def tested(self) -> Tensor:
        """Whether domains have samples."""
        return (self.confusion != 0).flatten(1).any(1)

    @property
    def accuracy(self) -> float:
        """The share of correct predictions among all."""
        return self._measure(self.confusion.sum(0))

    def by_domain(self, measure: Measure | None = None) -> list[float]:
        """Return a score, or the accuracy, on every domain; one number where the data have no
        domains.
        """
        measure = measure or self._measure
        return [measure(matrix) for matrix in self.confusion]

    def accuracy_for(self, domain_share: Tensor, class_share: Tensor) -> float:
        """The expected accuracy on a node's own distribution: of its domains, or without domains of
        its classes, if there are any, as far as they are tested.
        """
        by_class = self.has_classes and len(class_share) > 0
        if len(domain_share) > 1 or not by_class:
            return self.score_for(self._measure, domain_share)
        matrix = self.confusion.sum(0).double()
        labelled = matrix.sum(1)
        tested = class_share * (labelled > 0)
        if not tested.any():
            return self.accuracy
        recall = matrix.diagonal() / labelled.clamp(min=1)
        return float(recall @ tested / (tested.sum() / class_share.sum()))

    def score_for(self, measure: Measure, domain_share: Tensor) -> float:
        """A score's mean over a node's own domains, by their shares; of all test data where none of
        them is tested.
        """
        tested = domain_share * self.tested
        # none is tested in Cityscapes, whose test cities are others
        if len(domain_share) < 2 or not tested.any():
            return measure(self.confusion.sum(0))
        scores = [
            measure(matrix) if share else 0.0
            for matrix, share in zip(self.confusion, tested, strict=True)
        ]
        return float(
            torch.tensor(scores, dtype=tested.dtype) @ tested / (tested.sum() / domain_share.sum())
        )

    def _measure(self, matrix: Tensor) -> float:
        if self.has_classes:
            return int(matrix.diagonal().sum()) / max(int(matrix.sum()), 1)
        return float(matrix[0, 0] / matrix[0, 1].clamp(min=1))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    num_classes: int,
    device: torch.device | str,
    batch_size: int = 500,
    num_domains: int = 0,
    task: LearningTask = CLASSIFICATION,
    metrics: Sequence[str] = (),
) -> Evaluation:
    """Evaluate with the running statistics that the model holds.

    `metrics` are some of `CLASS_METRICS`, and there may be more domains than the split has samples
    of.
    """
    if split.domains is None:
        domains = torch.zeros(len(split), dtype=torch.int64)
    else:
        domains = split.domains.cpu()
    num_classes, dtype = (num_classes, torch.int64) if task.has_classes else (1, torch.float64)
    confusion = torch.zeros(
        max(int(domains.max()) + 1, num_domains), num_classes, num_classes + 1, dtype=dtype
    )
    was_training = model.training
    losses = list[Tensor]()
    kept = list[Tensor]()
    model.eval()
    try:
        order = torch.arange(len(split))
        sizes = evaluation_sizes(split, len(split), batch_size, device)
        if not task.has_classes:
            # a batch's loss is one number, so each batch is of one domain
            order = domains.argsort(stable=True)
            counts = domains.unique(return_counts=True)[1].tolist()
            sizes = [
                size
                for count in counts
                for size in evaluation_sizes(split, count, batch_size, device)
            ]
        batches = split.batches(order, sizes, device)
        for (inputs, targets), rows in zip(batches, domains[order].split(sizes), strict=True):
            outputs = model(channels_last(inputs, model))
            loss = output_loss(outputs, targets, task.loss)
            losses.append(loss)
            if AUC in metrics:
                kept.append(logits_of(outputs).float().cpu())
            if not task.has_classes:
                confusion[rows[0], 0] += len(rows) * torch.tensor([float(loss), 1.0], dtype=dtype)
                continue
            logits = logits_of(outputs)
            # counts by domain, class and predicted class; a GPU is waited for once
            cells = targets * (num_classes + 1) + logits.argmax(1).clamp(max=num_classes)
            cells = cells.where(targets != IGNORED, -1).cpu()
            places = rows.view(-1, *[1] * (targets.dim() - 1)) * confusion[0].numel() + cells
            confusion += torch.bincount(places[cells >= 0], minlength=confusion.numel()).view_as(
                confusion
            )
    finally:
        model.train(was_training)
    if not confusion[..., -1].any():
        confusion = confusion[..., :-1]
    of_all = confusion.sum(0)
    by_class = {name: counted(name, of_all) for name in metrics if name != AUC}
    if AUC in metrics:
        by_class[AUC] = areas(torch.cat(kept), split.labels.cpu()[order], num_classes)
    scores = {name: measure(of_all) for name, measure in task.measures.items()}
    return Evaluation(_mean(losses, sizes), confusion, by_class, scores, task.has_classes)


def counted(name: str, confusion: Tensor) -> list[float]:
    """Return one of `OF_COUNTS` by class, NaN of a class that no label has."""
    hits, labelled, predicted = class_counts(confusion)
    measured = OF_COUNTS[name](hits, labelled, predicted)
    return measured.where(labelled > 0, math.nan).tolist()


def areas(outputs: Tensor, targets: Tensor, num_classes: int) -> list[float]:
    """Return `AUC` by class, or by float target that is 0 or 1; NaN of what all samples have, or
    none.
    """
    if targets.is_floating_point():
        # in their order, and from 0 to 1, as torchmetrics would make them with a sigmoid
        scores = (F.softsign(outputs.double()) + 1).view(len(targets), -1) / 2
        has = targets.view(len(targets), -1) > 0
    else:
        scores = outputs.softmax(1)[:, :num_classes]
        has = F.one_hot(targets, num_classes) > 0
    return [_area(*columns) for columns in zip(scores.T, has.T, strict=True)]


def _area(scores: Tensor, has: Tensor) -> float:
    with extra("cli"):
        # imported here because it takes seconds
        from torchmetrics.functional.classification import binary_auroc

    if has.all() or not has.any():
        return math.nan
    return float(binary_auroc(scores, has.long()))


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    split: Split,
    indices: np.ndarray,
    device: torch.device | str,
    loss_function: LossFunction = F.cross_entropy,
    batch_size: int = 500,
) -> float:
    """Return the mean loss on some samples, under the running statistics that the model holds."""
    was_training = model.training
    losses = list[Tensor]()
    model.eval()
    try:
        sizes = evaluation_sizes(split, len(indices), batch_size, device)
        for inputs, targets in split.batches(torch.from_numpy(indices), sizes, device):
            images = channels_last(inputs, model)
            losses.append(model_loss(model, images, targets, loss_function))
    finally:
        model.train(was_training)
    return _mean(losses, sizes)


def evaluation_sizes(split: Split, count: int, most: int, device: torch.device | str) -> list[int]:
    """Return sizes of batches of at most `most` samples; of large images fewer, so that a batch has
    6 MB, and never a last one of one sample, which BN without running statistics cannot take.
    """
    values = max(split.inputs[:1].numel(), 1)
    most = min(most, MOST_VALUES // values)
    if torch.device(device).type == "cpu":
        pixels = max(math.prod(split.inputs.shape[2:]), 1)
        most = min(most, max(MOST_PIXELS // pixels, LARGE_IMAGES))
    return pass_sizes(count, max(most, 1), merge_single=True)


def shares(
    split: Split, indices: np.ndarray, num_classes: int, num_domains: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the shares of a node's samples in the domains and in the classes.

    Targets that are no classes of samples have no shares.
    """
    chosen = torch.from_numpy(indices)
    classes = torch.zeros(0, dtype=torch.float64)
    if not split.targets:
        classes = torch.bincount(split.labels[chosen].cpu(), minlength=num_classes).double()
    if split.domains is None:
        return torch.ones(1, dtype=torch.float64), classes / classes.sum()
    domains = torch.bincount(
        split.domains[chosen].cpu(), minlength=max(int(split.domains.max()) + 1, num_domains)
    ).double()
    return domains / domains.sum(), classes / classes.sum()


def _mean(losses: Sequence[Tensor], sizes: Sequence[int]) -> float:
    """Return the mean over all samples of the mean losses of batches; a GPU is waited for once."""
    values: list[float] = torch.stack(list(losses)).flatten().tolist()
    total: float = sum(map(mul, values, sizes))
    return total / sum(sizes)
