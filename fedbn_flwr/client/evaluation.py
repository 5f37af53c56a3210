"""Accuracy by domain and class, from which every accuracy of the papers follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbn_flwr.client.class_metrics import class_metrics
from fedbn_flwr.client.training import LossFunction, logits_of, model_loss
from fedbn_flwr.data import Split

#: values of a batch of images in an evaluation: 500 images of 64 x 64 pixels
MOST_VALUES = 500 * 3 * 64 * 64


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, and one confusion matrix (true class x predicted class) a domain."""

    loss: float
    confusion: Tensor
    #: further metrics by name, each with a number for every class
    by_class: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """The share of correct predictions among all samples."""
        return _accuracy(self.confusion.sum(0))

    @property
    def domain_accuracy(self) -> list[float]:
        """The accuracy on every domain; one number where the data have no domains."""
        return [_accuracy(matrix) for matrix in self.confusion]

    def accuracy_for(self, domain_share: Tensor, class_share: Tensor) -> float:
        """The expected accuracy on a node's own distribution: of its domains, or without domains of its classes."""
        if len(domain_share) > 1:
            return float(torch.tensor(self.domain_accuracy, dtype=torch.float64) @ domain_share)
        matrix = self.confusion.sum(0).double()
        recall = matrix.diagonal() / matrix.sum(1).clamp(min=1)
        return float(recall @ class_share)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    num_classes: int,
    device: torch.device | str,
    batch_size: int = 500,
    num_domains: int = 0,
    loss_function: LossFunction = F.cross_entropy,
    metrics: Sequence[str] = (),
) -> Evaluation:
    """Evaluate with the running statistics that the model holds; `metrics` are some of `CLASS_METRICS`."""
    was_training, everything = model.training, np.arange(len(split))
    # the loss of logits is in their score
    is_own, own_loss, parts = loss_function is not F.cross_entropy, 0.0, list[Tensor]()
    model.eval()
    try:
        sizes = batch_sizes(split, everything, batch_size)
        for inputs, targets in split.batches(torch.from_numpy(everything), sizes, device):
            outputs = model(inputs)
            parts.append(logits_of(outputs).float().cpu())
            own_loss += float(loss_function(outputs, targets)) * len(targets) if is_own else 0.0
    finally:
        model.train(was_training)
    logits = torch.cat(parts)
    by_class = class_metrics(metrics, logits, split.labels.cpu(), num_classes)
    result = replace(score(logits, split, num_classes, num_domains), by_class=by_class)
    return replace(result, loss=own_loss / len(split)) if is_own else result


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
    was_training, total = model.training, 0.0
    model.eval()
    try:
        sizes = batch_sizes(split, indices, batch_size)
        for inputs, targets in split.batches(torch.from_numpy(indices), sizes, device):
            total += float(model_loss(model, inputs, targets, loss_function)) * len(targets)
    finally:
        model.train(was_training)
    return total / len(indices)


def batch_sizes(split: Split, indices: np.ndarray, most: int) -> list[int]:
    """Return sizes of batches of at most `most` samples; of large images fewer, so that a batch has 25 MB."""
    values = max(split.inputs[:1].numel(), 1)
    size = min(most, max(MOST_VALUES // values, 1))
    return [len(part) for part in torch.from_numpy(indices).split(size)]


def score(logits: Tensor, split: Split, num_classes: int, num_domains: int = 0) -> Evaluation:
    """Compare logits with a split's labels; there may be more domains than the split has samples of."""
    labels = split.labels.cpu()
    domains = torch.zeros_like(labels) if split.domains is None else split.domains.cpu()
    count = max(int(domains.max()) + 1, num_domains)
    cell = (domains * num_classes + labels) * num_classes + logits.argmax(1)
    confusion = torch.bincount(cell, minlength=count * num_classes**2)
    loss = float(F.cross_entropy(logits, labels))
    return Evaluation(loss, confusion.reshape(count, num_classes, num_classes))


def shares(split: Split, indices: np.ndarray, num_classes: int, num_domains: int = 0) -> tuple[Tensor, Tensor]:
    """Return the shares of a node's samples in the domains and in the classes."""
    chosen = torch.from_numpy(indices)
    classes = torch.bincount(split.labels[chosen].cpu(), minlength=num_classes).double()
    if split.domains is None:
        return torch.ones(1, dtype=torch.float64), classes / classes.sum()
    domains = torch.bincount(
        split.domains[chosen].cpu(), minlength=max(int(split.domains.max()) + 1, num_domains)
    ).double()
    return domains / domains.sum(), classes / classes.sum()


def _accuracy(confusion: Tensor) -> float:
    return int(confusion.diagonal().sum()) / max(int(confusion.sum()), 1)
