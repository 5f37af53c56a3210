"""FedAvg. The clients' half is `fedbn_flwr/client/training.py`: plain local steps.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017, algorithm 1:

    for each round t = 1, 2, ...:
        S_t <- random set of m = max(C K, 1) clients
        for each client k in S_t in parallel:
            w_k <- ClientUpdate(k, w_t):   for each local batch b:  w <- w - eta grad l(w; b)
        w_{t+1} <- sum_{k in S_t} (n_k / n) w_k,   n = sum_{k in S_t} n_k
"""

from collections.abc import Sequence
from logging import WARNING
from typing import Annotated, Any, ClassVar, Literal, get_args

from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import Combiner, combine
from fedbn_flwr.plugins import is_foreign
from fedbn_flwr.server.averaging import Arrays, average, is_floating
from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.server.privacy import Privacy
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.server.robust import Robust, States
from fedbn_flwr.wire.masked import Terms

from .registry import register_strategy

Weighting = Literal["examples", "uniform"]
WEIGHTINGS = get_args(Weighting)
#: the hooks that see replies
SEEING = ("weigh", "merge", "aggregate_train", "aggregate_evaluate")


@register_strategy("fedavg")
class FedAvg(BaseStrategy):
    r"""Federated averaging of the whole state, BN statistics included.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

        w <- sum_k p_k w_k,   p_k = n_k / sum n  (`weighting="examples"`)  or  1 / K  (`weighting="uniform"`)

    Floating-point entries are averaged in float64 and keep their dtype; of a counter, the largest is taken. With one
    client and E steps this is plain training.

    `privacy` clips the nodes' updates and adds noise to their mean (see `Privacy`), under uniform weights. It stands in
    place of Flower's wrappers, which take entries by position and add noise to variances.

    `robust` puts a rule in the place of the mean (see `Robust`), in whatever the method pools: models, statistics and
    gradients of exchanges, carried values, gathered statistics and control variates. A round with fewer replies than
    the rule needs leaves the model as it was.
    """

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    leaves: ClassVar[str] = "everything, BN statistics included"
    #: what a method shares beside the model, which `privacy` would not protect
    beside_model: ClassVar[str] = ""
    #: whether a robust rule can stand in the place of every mean that the method takes
    can_be_robust: ClassVar[bool] = True

    def __init__(
        self,
        *,
        weighting: Annotated[Weighting, "how much a client counts: examples or uniform"] = "examples",
        robust: Annotated[str, "rule in place of means: none, median, trimmed:B, multi-krum:F or norm:C"] = "none",
        privacy: Privacy | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if weighting not in WEIGHTINGS:
            raise ValueError(f"unknown weighting {weighting!r}; known: {', '.join(WEIGHTINGS)}")
        self.weighting, self.privacy = weighting, privacy
        self.robust = Robust.parse(robust)
        if privacy:
            self._require_protected()
        if self.robust:
            self._require_rule_that_fits()
            self.fewest_nodes = self.robust.fewest_nodes

    @property
    def combiner(self) -> Combiner:
        """Return what combines nodes' statistics and gradients of a BN layer."""
        return combine if self.robust is None else self.robust.combine

    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return p_k for each reply, up to a common factor."""
        if self.weighting == "uniform":
            return [float(len(reply.nodes)) for reply in replies]
        return [float(reply.num_examples) for reply in replies]

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Average what clients sent; entries that nobody sent stay as they are."""
        return {**self.current, **self.step_server(self._average(replies, weights))}

    def mean(self, states: States, weights: Sequence[float], current: Arrays | None = None) -> Arrays:
        """Return the weighted mean of states that began from `current`, or what a robust rule takes in its place."""
        return average(states, weights) if self.robust is None else self.robust.average(states, current)

    def why_single(self) -> str:
        """Return why the mean of all replies will not do; with it, hooks have one reply."""
        if own := [name for name in SEEING if is_foreign(getattr(type(self), name))]:
            return f"its own `{own[0]}` may look at single replies"
        if self.privacy:
            return "privacy clips each node's update"
        if self.robust:
            return "robust compares the nodes' replies"
        if self.weighted_by_key != wire.NUM_EXAMPLES:
            return f"it weighs by {self.weighted_by_key!r}"
        return ""

    def sum_terms(self) -> Terms:
        """By the weights of models."""
        return Terms(self.weighting)

    def _average(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        states = [reply.arrays for reply in replies]
        if self.privacy is None:
            return self.mean(states, weights, self.current)
        node = self.describe_node(replies[0].node)
        parameters, tied = frozenset(node.parameters), dict(zip(node.tied[::2], node.tied[1::2], strict=True))
        if not parameters:
            raise ValueError("privacy needs clients that say which entries are parameters (`describe`)")
        if bare := sorted(name for name in states[0] if name not in parameters and is_floating(states[0][name])):
            log(WARNING, "Round %d: privacy does not cover %s", self.server_round, ", ".join(bare))
        return self.privacy.average(states, self.current, parameters, tied, self.server_round)

    def _require_protected(self) -> None:
        """Refuse what would leave a node around clipping and noise, or give a node more weight than 1 / K."""
        shared = self.beside_model or ("the optimizer's state" if self.momentum.kind == "global" else "")
        if shared:
            raise ValueError(f"privacy would not protect {shared}, which {type(self).__name__} shares")
        if self.robust:
            raise ValueError("privacy needs the mean, to which its noise is scaled: robust must be none")
        if self.weighting != "uniform":
            raise ValueError("privacy needs weighting='uniform': noise is scaled for nodes of equal weight")

    def _require_rule_that_fits(self) -> None:
        """Refuse a rule where a lying node would have a way around it."""
        around = "" if self.can_be_robust else self.beside_model
        around = around or ("the optimizer's state" if self.momentum.kind == "global" else "")
        if around:
            raise ValueError(f"a robust rule would not reach {around}, which {type(self).__name__} shares")
