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
from typing import Annotated, Any, ClassVar, Literal

from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import Combiner, combine
from fedbn_flwr.server.averaging import Arrays, average, is_floating
from fedbn_flwr.server.base_strategy import BaseStrategy
from fedbn_flwr.server.privacy import Privacy
from fedbn_flwr.server.replies import CannotTrainError, Group, NodeReply, Pooled
from fedbn_flwr.server.robust import Robust, States
from fedbn_flwr.wire.pooled import Terms, deviation, is_countable

from .registry import register_strategy

Weighting = Literal["examples", "uniform"]
#: what `momentum_state="global"` pools
MOMENTUM = Group("the optimizer's state", wire.MOMENTUM, is_required=False, can_be_robust=False)
#: the hooks that see replies; a method that overrides one gets those of single nodes
SEEING = ("weigh", "merge", "pool", "mean", "aggregate_train", "aggregate_evaluate")


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
    use: ClassVar[str] = "the baseline; also `fedavg+gn` and other normalizers"

    def __init__(
        self,
        *,
        weighting: Annotated[Weighting, "how much a client counts: examples or uniform"] = "examples",
        robust: Annotated[str, "rule in place of means: none, median, trimmed:B, multi-krum:F or norm:C"] = "none",
        privacy: Privacy | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.weighting, self.privacy = weighting, privacy
        self.robust = Robust.parse(robust)
        if self.privacy and self.robust:
            raise ValueError("privacy needs the mean, to which its noise is scaled: robust must be none")
        if self.privacy and self.weighting != "uniform":
            raise ValueError("privacy needs weighting='uniform': noise is scaled for nodes of equal weight")
        for group in [*self._named("pools"), *[MOMENTUM] * (self.momentum_state == "global")]:
            self.add_group(group)

    def add_group(self, group: Group) -> None:
        """Pool a group, too; ValueError if that leaves a node around clipping and noise, or around a robust rule."""
        if self.privacy:
            raise ValueError(f"privacy would not protect {group.what}, which {type(self).__name__} shares")
        if self.robust and not group.can_be_robust:
            raise ValueError(f"a robust rule would not reach {group.what}, which {type(self).__name__} shares")
        self.groups += (group,)

    @property
    def why_single(self) -> str:
        """Why means of replies do not suffice, for workers that average their nodes' replies."""
        for group in self.groups:
            if group.by_node:
                return f"it needs single replies for {group.what}"
        for hook in SEEING:
            if getattr(type(self), hook) is not getattr(FedAvg, hook):
                return f"its own `{hook}` may look at single replies"
        if self.privacy:
            return "privacy clips each node's update"
        if self.robust:
            return "robust compares the nodes' replies"
        return "" if self.weighted_by_key == wire.NUM_EXAMPLES else f"it weighs by {self.weighted_by_key!r}"

    @property
    def combiner(self) -> Combiner:
        """Return what combines nodes' statistics and gradients of a BN layer."""
        return combine if self.robust is None else self.robust.combine

    def terms(self) -> Terms:
        """By numbers of examples, or uniformly."""
        return Terms(self.weighting)

    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return p_k for each reply, up to a common factor: as `terms` says, which workers follow, too."""
        terms = self.terms()
        if terms.weighting == "uniform":
            return [float(len(reply.nodes)) for reply in replies]
        if terms.weighting == "examples":
            return [float(reply.num_examples) for reply in replies]
        return self._weigh_by_metric(replies, terms.tally)

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Return the new global state, made of single replies where a method overrides this."""
        return self.update(self.pool(replies, weights))

    def update(self, pooled: Pooled) -> Arrays:
        """Return the new global state, made of what was pooled; entries that nobody sent stay as they are."""
        averaged = pooled.groups[wire.ARRAYS]
        self.momentum = pooled.groups.get(wire.MOMENTUM) or self.momentum
        if self.server_optimizer:
            parameters = self.describe_node(self.train_replies[0].node).parameters
            if not parameters:
                raise ValueError("a server optimizer needs clients that say which entries are parameters (`describe`)")
            averaged = self.server_optimizer.step(self.server_round, self.current, averaged, frozenset(parameters))
        return {**self.current, **averaged}

    def pool(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Pooled:
        """Pool the model, and the method's groups."""
        groups = {wire.ARRAYS: self._pool_model([reply.arrays for reply in replies], weights)}
        for name in [group.name for group in self.groups if group.name]:
            states = [reply.records.get(name, {}) for reply in replies]
            groups[name] = self.mean(states, weights) if all(states) else {}
        by_node = {
            node: weight / len(reply.nodes)
            for reply, weight in zip(replies, weights, strict=True)
            for node in reply.nodes
        }
        metric = self.terms().tally
        return Pooled(groups, by_node, deviation(reply.metrics.get(metric) for reply in replies))

    def mean(self, states: States, weights: Sequence[float], current: Arrays | None = None) -> Arrays:
        """Return the weighted mean of states that began from `current`, or what a robust rule takes in its place."""
        return average(states, weights) if self.robust is None else self.robust.average(states, current)

    def _pool_model(self, states: States, weights: Sequence[float]) -> Arrays:
        if self.privacy is None:
            return self.mean(states, weights, self.current)
        node = self.describe_node(self.train_replies[0].node)
        parameters, tied = frozenset(node.parameters), dict(zip(node.tied[::2], node.tied[1::2], strict=True))
        if not parameters:
            raise ValueError("privacy needs clients that say which entries are parameters (`describe`)")
        if bare := sorted(name for name in states[0] if name not in parameters and is_floating(states[0][name])):
            log(WARNING, "Round %d: privacy does not cover %s", self.server_round, ", ".join(bare))
        return self.privacy.average(states, self.current, parameters, tied, self.server_round)

    def _weigh_by_metric(self, replies: Sequence[NodeReply], key: str) -> list[float]:
        name, values = type(self).__name__, [reply.metrics.get(key) for reply in replies]
        if all(value is None for value in values):
            known = ", ".join(sorted(replies[0].metrics))
            remedy = "; name the one that holds it: ClientApp(..., loss_key=...)" if key == wire.TRAIN_LOSS else ""
            raise CannotTrainError(
                f"{name} weighs by the metric {key!r}, which no node sent; node {replies[0].node} sent {known}{remedy}"
            )
        for reply, value in zip(replies, values, strict=True):
            if not (is_countable(value) and value):
                reason = "%s: node %d reports the %s %r, so it has no weight in this round"
                log(WARNING, reason, name, reply.node, key, value)
        weights = [float(value) if is_countable(value) else 0.0 for value in values]
        if any(weights):
            return weights
        log(WARNING, "%s: no %s of this round is above 0, so all clients count equally", name, key)
        return [1.0] * len(replies)
