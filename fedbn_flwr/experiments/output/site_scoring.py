"""Scores of a round by the sites' own evaluations, each on its own test data; the server needs none."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedbn_flwr import wire
from fedbn_flwr.experiments.output.scoring import Score, score_nodes
from fedbn_flwr.strategies import BaseStrategy, NodeReply


class SiteScorer:
    """Computes the scores of a round.

    - `accuracy`, `accuracy-personal`, `loss`: means over the sites, see `Scorer`.
    - `sites`: by the site's number its `accuracy`, its `loss`, and each metric that is asked for, by class.
    - `class-f1`, `class-auc`, ...: by class the mean over the sites whose test data have the class.
    """

    #: the score by which methods are compared
    metric = "accuracy"

    def __init__(self, class_names: Sequence[str], metrics: Sequence[str]) -> None:
        self._class_names, self._metrics = class_names, metrics

    def score(self, strategy: BaseStrategy, arrays: ArrayRecord) -> Score:
        """Return the scores of the state after a round."""
        replies = strategy.evaluate_replies
        if not replies:
            return {}
        means = {wire.CLASS + name: self._mean(name, replies) for name in self._metrics}
        return {
            **score_nodes(replies),
            **means,
            # the mean of several sites is none of them
            "sites": {str(reply.partition): self._row(reply.metrics) for reply in replies if len(reply.nodes) == 1},
        }

    def _row(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        by_class = {
            name: {key: value for key, value in self._by_class(name, metrics).items() if not isnan(value)}
            for name in self._metrics
        }
        return {"accuracy": metrics[wire.ACCURACY], "loss": metrics[wire.EVAL_LOSS], **by_class}

    def _mean(self, metric: str, replies: Sequence[NodeReply]) -> dict[str, float]:
        """Return the mean by class; a class that no site can measure is left out."""
        table = [self._by_class(metric, reply.metrics) for reply in replies]
        known = {key: [row[key] for row in table if not isnan(row[key])] for key in self._class_names}
        return {key: float(np.mean(values)) for key, values in known.items() if values}

    def _by_class(self, metric: str, metrics: Mapping[str, Any]) -> dict[str, float]:
        return dict(zip(self._class_names, metrics[wire.CLASS + metric], strict=True))
