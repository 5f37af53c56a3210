"""FedNorm."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from flwr.app import ArrayRecord

from fedbn_flwr.server.method_state import MethodState
from fedbn_flwr.server.pooling import Pooled, Sent, average
from fedbn_flwr.server.replies import NodeReply, RefusedError
from fedbn_flwr.state import Arrays, arrays_to_record
from fedbn_flwr.state.records import make_record

from .fedavg import FedAvg
from .registry import register_strategy


@dataclass
class FedNormState(MethodState):
    """The BN entries of each domain."""

    by_domain: dict[int, Arrays] = field(default_factory=dict)


@register_strategy("fednorm")
class FedNorm(FedAvg):
    """Averaging with a set of BN layers for each domain: its nodes share BN, all nodes share the
    rest.

    Bernecker et al., FedNorm: Modality-Based Normalization in Federated Learning for Multi-Modal
    Liver Segmentation, 2022.

        w <- sum_k p_k w_k  over all nodes;   BN_d <- sum_{k in d} p_k BN_k / sum_{k in d} p_k

    A node says its domain when asked (`describe`). A node whose samples are not of exactly one
    domain is refused; only such nodes are an error. With a single domain this is FedAvg. Unlike
    FedBN nothing stays on a node, so a node that comes late gets its domain's BN.
    """

    paper: ClassVar[str] = "Bernecker et al., 2022, arXiv:2205.11096"
    sends: ClassVar[tuple[Sent, ...]] = (Sent("means of BN over few nodes", is_robust=False),)
    reads_replies: bool = True
    state_type: ClassVar[type[MethodState]] = FedNormState
    state: FedNormState
    needs: str = "bn"
    personal: ClassVar[bool] = True
    evaluated_with: ClassVar[tuple[str, ...]] = ("running", "own")
    replaced: ClassVar[tuple[str, ...]] = ("server_optimizer", "server_lr")

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """The state with the BN entries of each node's domain."""
        packages = super().package(nodes, arrays)
        described = self.describe(self.round.grid, list(nodes))
        for node, groups in packages.items():
            own = self.state.by_domain.get(described[node].domain)
            if own:
                groups[self.arrayrecord_key] = make_record(
                    {**groups[self.arrayrecord_key], **arrays_to_record(own)}
                )
        return packages

    def check(self, reply: NodeReply) -> None:
        """Refuse what was trained by a node without a domain."""
        super().check(reply)
        described = self.describe(self.round.grid, [reply.node])
        if described[reply.node].domain < 0:
            raise RefusedError(
                "FedNorm needs one domain a node, and this one names none: its samples must all "
                "come from one domain of a data set that has domains (for example digits-domains "
                "with the partition domain:1)"
            )

    def update(self, pooled: Pooled) -> Arrays:
        """Average BN within domains.

        The global state holds the mean over all nodes, for a node without a domain.
        """
        described = self.describe(self.round.grid, [reply.node for reply in pooled.replies])
        names = set(Counter(node.bn_entries for node in described.values()).most_common(1)[0][0])
        members: dict[int, list[NodeReply]] = {}
        for reply in pooled.replies:
            if pooled.weights[reply.node]:
                members.setdefault(described[reply.node].domain, []).append(reply)
        for domain, replies in sorted(members.items()):
            entries = []
            for reply in replies:
                entries.append(
                    {name: value for name, value in reply.arrays.items() if name in names}
                )
            self.state.by_domain[domain] = average(
                entries, [pooled.weights[reply.node] for reply in replies]
            )
        sets = [own for _, own in sorted(self.state.by_domain.items())]
        self.state.personal |= average(sets, [1.0] * len(sets))
        return super().update(pooled)
