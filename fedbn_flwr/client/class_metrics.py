"""Metrics of each class, by torchmetrics."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.plugins import extra

#: by name, the function of `torchmetrics.functional.classification`
CLASS_METRICS = {
    "f1": "multiclass_f1_score",
    "auc": "multiclass_auroc",
    "precision": "multiclass_precision",
    "recall": "multiclass_recall",
}


def class_metrics(names: Sequence[str], logits: Tensor, labels: Tensor, num_classes: int) -> dict[str, list[float]]:
    """Return each metric's numbers by class.

    `auc` is the area under the ROC curve of one class against all others. A class that no label has is NaN, and so is
    `auc` of the only class.
    """
    if not names:
        return {}
    counts = torch.bincount(labels, minlength=num_classes)
    measured = {}
    for name in names:
        present = (counts > 0) & (counts < len(labels)) if name == "auc" else counts > 0
        values = _function(name)(logits.softmax(1), labels, num_classes=num_classes, average=None)
        measured[name] = [
            float(value) if here else math.nan for value, here in zip(values, present.tolist(), strict=True)
        ]
    return measured


def _function(name: str) -> Any:
    with extra("cli"):
        from torchmetrics.functional import classification  # imported here because it takes seconds

    return getattr(classification, CLASS_METRICS[name])
