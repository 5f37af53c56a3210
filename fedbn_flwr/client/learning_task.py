"""What a data set is learnt for: the loss, what models are compared by, and which augmentations its
targets allow.

A data set names its task (`Data.task`). Training, evaluation and scoring ask the task, and know no
data set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.client.training import LossFunction, logits_of
from fedbn_flwr.data.augmentation import AUGMENTATIONS, IGNORED, Crop, parse_augmentation
from fedbn_flwr.plugins import Own, add, import_function

#: of a confusion matrix, true class x predicted class; a last column counts predictions of none, if
#: there are any
Measure = Callable[[Tensor], float]
#: the scores of which less is better; all others are shares
LOWER_IS_BETTER = ("mse", "mae", "bce", "loss", "error")


@dataclass(frozen=True)
class LearningTask:
    """A task: its loss, its scores, and whether a target is a picture that moves with the image.

    Accuracy, the share of predictions that are correct, is reported in every task with classes: of
    images in classification, of pixels in segmentation.
    """

    #: of what the model returns and the targets
    loss: LossFunction = F.cross_entropy
    #: scores beside the accuracy, by name
    measures: Mapping[str, Measure] = field(default_factory=dict)
    #: the score by which models are compared
    metric: str = "accuracy"
    #: whether targets are classes, whose predictions are counted; otherwise the error that is
    #: reported is the loss
    has_classes: bool = True
    #: whether targets have the places of the image, so that an augmentation must change both
    #: together
    placed: bool = False

    def __post_init__(self) -> None:
        if not self.has_classes and self.metric not in LOWER_IS_BETTER:
            raise ValueError(
                f"a task without classes is scored by its error: metric {self.metric!r} is none "
                f"of {', '.join(LOWER_IS_BETTER)}"
            )

    @property
    def basic_score(self) -> str:
        """The score that each evaluation has: the accuracy, or the error by its name."""
        if self.has_classes:
            return "accuracy"
        return self.metric

    @property
    def measure(self) -> Measure | None:
        """What gives the score by which models are compared, unless that is the basic one."""
        return self.measures.get(self.metric)

    def with_loss(self, loss: LossFunction, name: str = "loss") -> "LearningTask":
        """Return the task with another loss, which without classes is the error by this name."""
        metric = self.metric if self.has_classes else name
        return replace(self, loss=loss, metric=metric)

    def check_augmentation(self, spec: str) -> None:
        """Refuse an augmentation that would change the images and leave their targets where they
        were.
        """
        if not self.placed or not isinstance(parse_augmentation(spec), Crop):
            return
        able = ", ".join(
            name for name in AUGMENTATIONS if not isinstance(parse_augmentation(name), Crop)
        )
        raise ValueError(
            f"augmentation {spec!r} would move the images and not their label maps; there are: "
            f"{able}"
        )


#: the tasks by name; `register_task` adds one
TASKS: dict[str, LearningTask] = {}


def register_task(name: str, task: LearningTask) -> LearningTask:
    """Register a task under the name that `Data.task` takes.

    A name that another task has is a ValueError.
    """
    add(TASKS, "task", name, task)
    return task


@dataclass(frozen=True)
class Objective:
    """The loss that the option `objective` names: a function of outputs and targets, of which the
    mean counts.
    """

    function: LossFunction

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss; outputs come in the shape of float targets, if they are as many."""
        values = logits_of(outputs)
        if targets.is_floating_point():
            dtype = torch.promote_types(values.dtype, targets.dtype)
            values = values.to(dtype)
            targets = targets.to(dtype)
            # or (N, 1) and (N,) would become (N, N)
            if values.numel() == targets.numel():
                values = values.reshape(targets.shape)
        return self.function(values, targets).mean()


#: the losses of float targets by name
OBJECTIVES: dict[str, LossFunction] = {
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


def task_of(name: str, objective: str | Own = "") -> LearningTask:
    """Return a task by its name, with the loss that `objective` names in place of its own."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; there are: {', '.join(TASKS)}")
    task = TASKS[name]
    if not objective:
        return task
    error = "loss"
    if isinstance(objective, str) and objective in OBJECTIVES:
        if task.has_classes:
            raise ValueError(f"objective {objective!r} is for float targets, not for {name}")
        function = OBJECTIVES[objective]
        error = objective
    else:
        function = import_function("objective", objective, OBJECTIVES)
    return task.with_loss(Objective(function), error)


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the pixels that have a class; 0 if all are `IGNORED`.

    Outputs are N x classes x H x W, targets N x H x W. Without operations that `torch.func.vmap`
    has no rule for.
    """
    counted = targets != IGNORED
    chosen = targets.where(counted, 0).unsqueeze(1)
    losses = -logits_of(outputs).log_softmax(1).gather(1, chosen).squeeze(1)
    return losses.where(counted, 0.0).sum() / counted.sum().clamp(min=1)


def class_counts(confusion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each class how many predictions of it are right, how many labels it has, and how
    many predictions.
    """
    matrix = confusion.double()
    return matrix.diagonal(), matrix.sum(1), matrix[:, : len(matrix)].sum(0)


def mean_iou(confusion: Tensor) -> float:
    """Return the mean over classes of intersection over union; classes that are neither there nor
    predicted do not count.

    The pixels are those of the whole test set, as the Cityscapes benchmark counts.
    """
    hits, labelled, predicted = class_counts(confusion)
    union = labelled + predicted - hits
    there = union > 0
    return float((hits[there] / union[there]).sum()) / max(int(there.sum()), 1)


CLASSIFICATION = register_task("classification", LearningTask())
REGRESSION = register_task(
    "regression", LearningTask(Objective(F.mse_loss), metric="mse", has_classes=False)
)
SEGMENTATION = register_task(
    "segmentation",
    LearningTask(pixel_cross_entropy, {"mean-iou": mean_iou}, metric="mean-iou", placed=True),
)
