"""Scores of a round: the global model on the server, or the nodes' own models as the nodes report.

Sites evaluate on their own test data.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedbn_flwr import state, wire
from fedbn_flwr.client.evaluation import evaluate, mean_loss
from fedbn_flwr.client.learning_task import CLASSIFICATION, LOWER_IS_BETTER, LearningTask
from fedbn_flwr.experiments.material import Material, unlabeled_inputs
from fedbn_flwr.norm import adapt
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.server.replies import RefusedError, log_refused, read_each
from fedbn_flwr.strategies import BaseStrategy, NodeReply

Score = dict[str, Any]


def merit(metric: str, score: float) -> float:
    """Return a number that is larger for a better score."""
    if metric in LOWER_IS_BETTER:
        return -score
    return score


class Scorer:
    """Computes the accuracies of a round, each under a name of its own.

    - `accuracy`: of the global model on the whole test set; where nodes have models of their own,
      the mean of the models' accuracies on the whole test set (FedTAN). In segmentation it is the
      share of pixels.
    - `mean-iou`, in segmentation: the mean over classes of intersection over union, of the same
      models (FixBN).
    - `accuracy-personal`, `mean-iou-personal`: the mean of the nodes' scores on their own domain or
      label distribution (FedBN, FedWon).
    - `train-loss-global`, if asked for: the global model's loss on the union of the clients'
      training data; where nodes have models of their own, the mean of each model's loss on its
      node's data (FedTAN, Fig. 4 and 7).
    - `class-f1`, `class-auc`, ..., if asked for: by class, of the models that `accuracy` is of.

    Others are of the score by which methods are compared, here the accuracy. Of float targets it is
    the error, as `mse`, which stands for the accuracy in all names.

    - `accuracy-mean-bn`: of one model with the mean of the entries that stay on the nodes, over the
      nodes that took part in the last round (FedBS).
    - `domain-accuracy`: of the global model on every domain; where nodes have models of their own,
      of the models of the nodes that hold the domain.
    - `node-domain-accuracy`: every node's model on every domain (FedTAN, Fig. 8).
    - `accuracy-adapted-20`, `-100`, `-all`, of a domain that nobody trains with: of the one model,
      or of that with the mean of what stays on the nodes, after `adapt` to so many of the domain's
      training samples.
    """

    def __init__(self, material: Material) -> None:
        config = material.config
        data = material.data
        self._model = material.model.to(material.device)
        self._data = data
        self._device = material.device
        self._task = material.task
        self._metrics = config.results.class_metrics
        self._class_names = data.class_names or [str(number) for number in range(data.num_classes)]
        #: the score by which methods are compared
        self.metric = self._task.metric
        #: the training samples of all clients, if the loss on them is asked for
        self._trained = (
            np.concatenate(material.partition) if config.results.train_loss_global else None
        )
        #: by their number, batches of the tested domain to adapt to before it is tested
        self._unlabeled = unlabeled_inputs(material)

    def score(self, strategy: BaseStrategy, arrays: ArrayRecord) -> Score:
        """Return the scores of the state after a round."""
        replies = strategy.evaluation.replies
        scores = score_nodes(replies, self._data.domain_names, self._task)
        if not strategy.personal:
            asked = {key: value for key, value in scores.items() if key.endswith("-personal")}
            values = state.from_record(arrays)
            return {**self.score_global(values), **self._train_loss(values), **asked}
        if self._unlabeled:  # no node has the domain that is tested
            scores.pop(wire.DOMAIN_SCORES + self.metric, None)
        scores |= class_means(
            [reply.metrics for reply in replies], self._metrics, self._class_names
        )
        mean = strategy.state.personal
        if mean:
            own = {name: torch.from_numpy(value) for name, value in mean.items()}
            averaged = self.score_global({**state.from_record(arrays), **own})
            scores[f"{self.metric}-mean-bn"] = averaged[self.metric]
            scores |= {
                name: score
                for name, score in averaged.items()
                if name.startswith(f"{self.metric}-adapted")
            }
        return scores

    def score_global(self, values: state.State) -> Score:
        """Return the scores of one model on the test split, and after it was adapted if there is
        what to adapt to.
        """
        state.load(self._model, values)
        data = self._data
        basic = self._task.basic_score
        domains = len(self._data.domain_names)
        rest = data.test, data.num_classes, self._device, 500, domains, self._task, self._metrics
        result = evaluate(self._model, *rest)
        scores: Score = {basic: result.accuracy, **result.scores, "loss": result.loss}
        by_class = {wire.CLASS + name: values for name, values in result.by_class.items()}
        scores |= class_means([by_class], self._metrics, self._class_names)
        if domains:
            by_domain = result.by_domain(self._task.measure)
            by_name = zip(data.domain_names, by_domain, result.tested.tolist(), strict=True)
            scores[wire.DOMAIN_SCORES + self.metric] = {
                name: score for name, score, there in by_name if there
            }
        for count, batches in self._unlabeled.items():
            adapted = evaluate(adapt(self._model, batches), *rest)
            score = adapted.scores.get(self.metric, adapted.accuracy)
            scores[f"{self.metric}-adapted-{count}"] = score
        return scores

    def _train_loss(self, values: state.State) -> Score:
        if self._trained is None:
            return {}
        state.load(self._model, values)
        loss = mean_loss(
            self._model, self._data.train, self._trained, self._device, self._task.loss
        )
        return {"train-loss-global": loss}


class SiteScorer:
    """Computes the scores of a round.

    - `accuracy`, `accuracy-personal`, `loss`, and in segmentation `mean-iou` and
      `mean-iou-personal`: means over the sites, see `Scorer`. Of float targets there is the error,
      as `mse`, in place of the accuracy.
    - `sites`: by the site's name, else its number, the same scores of the site, but for its own
      distribution, and each metric that is asked for, by class.
    - `class-f1`, `class-auc`, ...: by class the mean over the sites whose test data have the class.
    """

    def __init__(
        self,
        task: LearningTask,
        class_names: Sequence[str],
        metrics: Sequence[str],
        grid: PassingGrid,
    ) -> None:
        self._task = task
        #: the score by which methods are compared
        self.metric = task.metric
        self._class_names = class_names
        self._metrics = metrics
        self._grid = grid

    def score(self, strategy: BaseStrategy, arrays: ArrayRecord) -> Score:
        """Return the scores of the state after a round."""
        named = [(reply.node, reply) for reply in strategy.evaluation.replies]
        rows, refused = read_each(named, lambda _, reply: self._row(reply.metrics))
        log_refused(refused, "left out of the scores")
        replies = [reply for node, reply in named if node in rows]
        names = self._grid.names
        if not replies:
            return {}
        # the mean of several sites is none of them
        alone = [reply for reply in replies if len(reply.nodes) == 1]
        return {
            **score_nodes(replies, task=self._task),
            **class_means([reply.metrics for reply in replies], self._metrics, self._class_names),
            "sites": {names.get(each.node, str(each.partition)): rows[each.node] for each in alone},
        }

    def _row(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        by_class = class_means([metrics], self._metrics, self._class_names)
        named = {}
        for name, values in by_class.items():
            named[name.removeprefix(wire.CLASS)] = {
                key: _possible(name, value) for key, value in values.items()
            }
        scores = _scores(metrics, False, self._task)
        of_site = {
            name: score
            for name, score in scores.items()
            if not name.endswith(("-personal", "-global"))
        }
        return {**of_site, **named}


def score_nodes(
    replies: Sequence[NodeReply],
    domain_names: Sequence[str] = (),
    task: LearningTask = CLASSIFICATION,
) -> Score:
    """Return means of the nodes' own evaluations; there are none if no evaluation can be read."""
    named = ((reply.node, reply.metrics) for reply in replies)
    read, refused = read_each(named, lambda _, metrics: _scores(metrics, bool(domain_names), task))
    log_refused(refused, "left out of the scores")
    rows = list(read.values())
    if not rows:
        return {}
    scores: Score = {}
    for key in rows[0]:
        if key not in ("domain", "domains", "own") and all(key in row for row in rows):
            scores[key] = float(np.mean([row[key] for row in rows]))
    if domain_names:
        scores[f"node-domain-{task.metric}"] = [row["domains"] for row in rows]
        # the models of the nodes that hold a domain
        by_domain = {}
        for domain, name in enumerate(domain_names):
            own = [row["own"] for row in rows if row["domain"] == domain]
            if own:
                by_domain[name] = float(np.mean(own))
        if by_domain:
            scores[wire.DOMAIN_SCORES + task.metric] = by_domain
    return scores


def class_means(
    rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], class_names: Sequence[str]
) -> Score:
    """Return by metric and class the mean over the rows that can measure it.

    A class that none can is left out.
    """
    scores: Score = {}
    if not rows:
        return scores
    for name in (wire.CLASS + metric for metric in metrics):
        columns = zip(*(row[name] for row in rows), strict=True)
        means = {}
        for key, column in zip(class_names, columns, strict=True):
            known = [value for value in column if not isnan(value)]
            if known:
                means[key] = float(np.mean(known))
        scores[name] = means
    return scores


def _scores(metrics: Mapping[str, Any], has_domains: bool, task: LearningTask) -> Score:
    """Return what a node's evaluation says, by the names of scores.

    Anything missing or impossible is an error.
    """
    basic = task.basic_score
    of_task = {key: key.removeprefix(wire.SCORE) for key in metrics if key.startswith(wire.SCORE)}
    # the names of all tasks are last: a node's `score-accuracy` is not the accuracy
    keys = {**of_task, basic: basic, (own := f"{basic}-personal"): own, wire.EVAL_LOSS: "loss"}
    if wire.LOCAL_LOSS in metrics:
        keys[wire.LOCAL_LOSS] = "train-loss-global"
    scores: Score = {name: _possible(key, metrics[key]) for key, name in keys.items()}
    if has_domains:
        domain = int(metrics[wire.DOMAIN])
        row = [float(each) for each in metrics[wire.DOMAIN_SCORES + task.metric]]
        scores |= {"domain": domain, "domains": row, "own": _possible(task.metric, row[domain])}
    return scores


def _possible(key: str, score: Any) -> float:
    """Return a score; RefusedError if it is not finite, or is to be a share, up to rounding, and is
    none.
    """
    name = key.removeprefix(wire.SCORE).removesuffix("-personal")
    is_error = name in (*LOWER_IS_BETTER, wire.EVAL_LOSS, wire.LOCAL_LOSS)
    if not isfinite(score) or not (is_error or 0 <= score <= 1 + 1e-6):
        raise RefusedError(f"its {key!r} is {score}")
    return float(score)
