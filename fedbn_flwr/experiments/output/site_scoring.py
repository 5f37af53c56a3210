"""Scores of a round by the sites' own evaluations, each on its own test data; the server needs none."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord

from fedbn_flwr import wire
from fedbn_flwr.experiments.output.scoring import Score, class_means, score_nodes
from fedbn_flwr.server.replies import log_refused, read_each
from fedbn_flwr.strategies import BaseStrategy


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
        named = [(reply.node, reply) for reply in strategy.evaluate_replies]
        rows, refused = read_each(named, lambda _, reply: self._row(reply.metrics))
        log_refused(refused, "left out of the scores")
        replies = [reply for node, reply in named if node in rows]
        if not replies:
            return {}
        return {
            **score_nodes(replies),
            **class_means([reply.metrics for reply in replies], self._metrics, self._class_names),
            # the mean of several sites is none of them
            "sites": {str(reply.partition): rows[reply.node] for reply in replies if len(reply.nodes) == 1},
        }

    def _row(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        by_class = class_means([metrics], self._metrics, self._class_names)
        named = {name.removeprefix(wire.CLASS): values for name, values in by_class.items()}
        return {"accuracy": metrics[wire.ACCURACY], "loss": metrics[wire.EVAL_LOSS], **named}
