"""Scores of a round: the global model on the server, or the nodes' own models as the nodes report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client.evaluation import evaluate, mean_loss
from fedbn_flwr.client.learning_task import task_of
from fedbn_flwr.data import Data
from fedbn_flwr.strategies import BaseStrategy, NodeReply

Score = dict[str, Any]


class Scorer:
    """Computes the accuracies of a round, each under a name of its own.

    - `accuracy`: of the global model on the whole test set; where nodes have models of their own, the mean of the
      models' accuracies on the whole test set (FedTAN). In segmentation it is the share of pixels.
    - `mean-iou`, in segmentation: the mean over classes of intersection over union, of the same models (FixBN).
    - `accuracy-personal`: the mean of the nodes' accuracies on their own domain or label distribution (FedBN, FedWon).
    - `mean-iou-personal`, in segmentation: the mean of the nodes' mean IoU on their own domains, such as cities.
    - `accuracy-mean-bn`: of one model with the mean of the entries that stay on the nodes, over the nodes that took
      part in the last round (FedBS).
    - `domain-accuracy`: of the global model on every domain; where nodes have models of their own, of the models of
      the nodes that hold the domain.
    - `train-loss-global`, if asked for: the global model's loss on the union of the clients' training data; where nodes
      have models of their own, the mean of each model's loss on its node's data (FedTAN, Fig. 4 and 7).
    - `node-domain-accuracy`: every node's model on every domain (FedTAN, Fig. 8).
    """

    def __init__(
        self, model: nn.Module, data: Data, device: torch.device, trained: NDArray[np.int64] | None = None
    ) -> None:
        self._model, self._data, self._device = model.to(device), data, device
        self._task = task_of(data.task)
        #: the score by which methods are compared
        self.metric = self._task.metric
        #: the training samples of all clients, if the loss on them is asked for
        self._trained = trained

    def score(self, strategy: BaseStrategy, arrays: ArrayRecord) -> Score:
        """Return the scores of the state after a round."""
        scores = score_nodes(strategy.evaluate_replies, self._data.domain_names)
        if not strategy.personal:
            asked = {key: value for key, value in scores.items() if key.endswith("-personal")}
            values = state.from_record(arrays)
            return {**self.score_global(values), **self._train_loss(values), **asked}
        if mean := strategy.personal_mean():
            own = {name: torch.from_numpy(value) for name, value in mean.items()}
            averaged = self.score_global({**state.from_record(arrays), **own})
            scores["accuracy-mean-bn"] = averaged["accuracy"]
        return scores

    def score_global(self, values: state.State) -> Score:
        """Return the scores of one model on the test split."""
        state.load(self._model, values)
        result = evaluate(
            self._model,
            self._data.test,
            self._data.num_classes,
            self._device,
            num_domains=len(self._data.domain_names),
            task=self._task,
        )
        scores: Score = {"accuracy": result.accuracy, **result.scores, "loss": result.loss}
        if self._data.domain_names:
            tested = (result.confusion.sum((1, 2)) > 0).tolist()
            by_name = zip(self._data.domain_names, result.domain_accuracy, tested, strict=True)
            scores["domain-accuracy"] = {name: accuracy for name, accuracy, there in by_name if there}
        return scores

    def _train_loss(self, values: state.State) -> Score:
        if self._trained is None:
            return {}
        state.load(self._model, values)
        loss = mean_loss(self._model, self._data.train, self._trained, self._device, self._task.loss)
        return {"train-loss-global": loss}


def score_nodes(replies: Sequence[NodeReply], domain_names: Sequence[str] = ()) -> Score:
    """Return means of the nodes' own evaluations; nothing if no node evaluated."""
    if not replies:
        return {}
    scores: Score = {
        "accuracy": _mean(replies, wire.ACCURACY),
        "accuracy-personal": _mean(replies, wire.ACCURACY_PERSONAL),
        **{key.removeprefix(wire.SCORE): _mean(replies, key) for key in _task_scores(replies)},
        "loss": _mean(replies, wire.EVAL_LOSS),
    }
    if all(wire.LOCAL_LOSS in reply.metrics for reply in replies):
        scores["train-loss-global"] = _mean(replies, wire.LOCAL_LOSS)
    if domain_names:
        matrix = [list(_numbers(reply.metrics, wire.DOMAIN_ACCURACY)) for reply in replies]
        scores["node-domain-accuracy"] = matrix
        domains = [int(_numbers(reply.metrics, wire.DOMAIN)[0]) for reply in replies]
        # the models of the nodes that hold a domain
        scores["domain-accuracy"] = {
            name: float(np.mean([row[index] for row, domain in zip(matrix, domains, strict=True) if domain == index]))
            for index, name in enumerate(domain_names)
            if index in domains
        }
    return scores


def _task_scores(replies: Sequence[NodeReply]) -> list[str]:
    return [key for key in replies[0].metrics if key.startswith(wire.SCORE)]


def _mean(replies: Sequence[NodeReply], key: str) -> float:
    return float(np.mean([_numbers(reply.metrics, key)[0] for reply in replies]))


def _numbers(metrics: Mapping[str, Any], key: str) -> list[float]:
    value = metrics[key]
    return [float(item) for item in value] if isinstance(value, list) else [float(value)]
