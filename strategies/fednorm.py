"""FedNorm."""

from collections import Counter
from collections.abc import Sequence
from logging import WARNING
from typing import Any, ClassVar

from flwr.app import ArrayRecord
from flwr.common import log

from fedbn_flwr.server.averaging import Arrays, arrays_to_record, average
from fedbn_flwr.server.replies import CannotTrainError, Group, NodeReply
from fedbn_flwr.state.records import make_record

from .fedavg import FedAvg
from .registry import register_strategy


@register_strategy("fednorm")
class FedNorm(FedAvg):
    """Averaging with a set of BN layers for each domain: its nodes share BN, all nodes share the rest.

    Bernecker et al., FedNorm: Modality-Based Normalization in Federated Learning for Multi-Modal Liver Segmentation,
    2022.

        w <- sum_k p_k w_k  over all nodes;   BN_d <- sum_{k in d} p_k BN_k / sum_{k in d} p_k

    A node says its domain when asked (`describe`). A node whose samples are not of exactly one domain has no weight,
    which is logged; only such nodes are an error. With a single domain this is FedAvg. Unlike FedBN nothing stays on a
    node, so a node that comes late gets its domain's BN.
    """

    paper: ClassVar[str] = "Bernecker et al., 2022, arXiv:2205.11096"
    leaves: ClassVar[str] = "everything; BN is averaged within a domain"
    use: ClassVar[str] = "several nodes per domain or modality"
    pools: ClassVar[tuple[Group, ...]] = (Group("means of BN over few nodes", can_be_robust=False),)
    needs: str = "bn"
    personal: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("_by_domain",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.server_optimizer:
            raise ValueError("fednorm averages BN within domains: server_optimizer must be none")
        self._by_domain: dict[int, Arrays] = {}

    def package(self, node: int, arrays: ArrayRecord) -> dict[str, ArrayRecord]:
        """The state with the BN entries of the node's domain."""
        groups = super().package(node, arrays)
        own = self._by_domain.get(self.describe_node(node).domain)
        if own:
            whole = groups[self.arrayrecord_key]
            groups[self.arrayrecord_key] = make_record({**whole, **arrays_to_record(own)})
        return groups

    def weigh(self, replies: Sequence[NodeReply]) -> list[float]:
        """Return the weights of models, 0 for a node without a domain."""
        stray = [reply.node for reply in replies if self.describe_node(reply.node).domain < 0]
        if len(stray) == len(replies):
            raise CannotTrainError(
                f"FedNorm needs one domain a node, and node {stray[0]} names none: its samples must all come from one "
                "domain of a data set that has domains (for example digits-domains with the partition domain:1)"
            )
        for node in stray:
            log(WARNING, "FedNorm: node %d names no domain, so it has no weight in this round", node)
        weights = zip(replies, super().weigh(replies), strict=True)
        return [0.0 if reply.node in stray else weight for reply, weight in weights]

    def merge(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> Arrays:
        """Average BN within domains; the global state holds the mean over all nodes, for a node without a domain."""
        merged = super().merge(replies, weights)
        names = set(Counter(self.describe_node(reply.node).bn_entries for reply in replies).most_common(1)[0][0])
        domains = [self.describe_node(reply.node).domain for reply in replies]
        for domain in sorted({each for each, weight in zip(domains, weights, strict=True) if weight}):
            members = [index for index, each in enumerate(domains) if each == domain]
            entries = [
                {name: value for name, value in replies[index].arrays.items() if name in names} for index in members
            ]
            self._by_domain[domain] = average(entries, [weights[index] for index in members])
        return merged

    def personal_mean(self) -> Arrays:
        """The domains' BN, averaged."""
        sets = [self._by_domain[domain] for domain in sorted(self._by_domain)]
        return average(sets, [1.0] * len(sets)) if sets else {}
