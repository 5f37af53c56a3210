"""FedTAN, the server's half of Algorithm 1 of Wang et al.

In the paper's symbols, and where it is done:

    for r = 1, 2, ..., R:                                             BaseStrategy.start
        server sends {w_{r-1}, S_{r-1}} to all clients i              BaseStrategy.configure_train
        for t = 1:
            for l = 1, ..., L (Algorithm 2):                          take_step
                clients upload mu_i^l and (sigma_i^l)^2
                server answers sum_i p_i mu_i^l and sum_i p_i (sigma_i^l)^2             (39), (40)
                (`fused`: each (sigma_i^l)^2 is about the client's own mean,
                and the server adds (mu_i^l - mu^l)^2)
            for l = L, ..., 1 (Algorithm 3):                          take_step
                clients upload dF_i/d(sigma_i^l)^2 and dF_i/dmu_i^l
                server answers their sums, weighted by p_i                              (41)
            clients update {w_i, S_i}                                 BNClient.train    (5b), (6)
        for t = 2, ..., E: clients update {w_i, S_i}                  BNClient.train    (5b), (6)
        clients send {w_i, S_i} to the server                         take_step
        server: {w_r, S_r} = sum_i p_i {w_i, S_i}                     average, in
                                                                      `server/pooling.py`  (7)

Stacked clients train in `fedbn_flwr/simulation/stacked/train_together.py` in place of
`BNClient.train`. `take_step` is in `fedbn_flwr/layerwise/steps.py`, and the mathematics of one
layer, which is the client's half, in `shared_batch_norm.py` beside it. `Layerwise`, which starts
again without the nodes that fail, is in `base_layerwise.py`. What carries the exchanges between the
two halves is in `fedbn_flwr/transports/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Annotated, Any, ClassVar, Literal

from flwr.app import ArrayRecord
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.carried import CarriedValues, Examples, Kept
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.method_state import MethodState
from fedbn_flwr.server.pooling import Pooled
from fedbn_flwr.state import Arrays, arrays_of, arrays_to_record
from fedbn_flwr.transports import Participant

from .base_layerwise import Layerwise
from .fixbn import FixBN
from .registry import register_strategy


@dataclass
class FedTANState(MethodState):
    """What `carry` keeps."""

    carried: Kept = field(default_factory=Kept)


@register_strategy("fedtan")
class FedTAN(Layerwise):
    """BN statistics and their gradients are, in the first local step, those of all clients'
    mini-batches together.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, algorithms 1 to
    3. In the first of E local steps, with L uses of BN layers, and p_i as for the models,

        forward, each layer:   mean = sum_i p_i mean_i,
                               variance = sum_i p_i variance_i
        backward, each layer:  dF/dmean = sum_i p_i dF_i/dmean,
                               dF/dvariance = sum_i p_i dF_i/dvariance

    where variance_i is the mean square about the pooled mean, not about the client's own. So with E
    = 1 and p_i proportional to the sizes of the mini-batches a round is one step of centralized SGD
    on their union. `exchange="paper"` asks for mean, variance and gradients one after the other: 3L
    + 1 exchanges a round; `fused`, the default, for mean and variance at once: 2L + 1, the same
    numbers. With one client this is FedAvg.

    `carry=True` needs one exchange a round, as FedAvg: first steps use corrections from earlier
    rounds. The server keeps each node's local values of every BN layer. From those of a round's
    participants it makes the corrections that go with their models in that round's ordinary
    training message, and their replies bring new values. Statistics are averaged over rounds: after
    j rounds, what was kept counts `memory` to the power of j. `fedbn_flwr.layerwise.carried`
    derives it. A node that was never heard, was not heard for more than `oldest` rounds, or did not
    reply when last drawn, goes without corrections, and is not in the pool. What corrections of
    gradients add because a drawn node is silent, those of the next round take back. Messages carry
    4 numbers a BN channel more, each way (2 without gradients), and each layer's name and 3 sizes.
    Nodes remember nothing. Corrections of statistics are cut to 3 standard deviations, and ratios
    of variances to 1/3 and 3. The server keeps at most 256 megabytes.

    Deviations: the authors' code uses another optimizer for the layer-wise step than for the steps
    after it; here, the same one goes on. p_i is the share of examples, in their code 1 / N
    (`weighting="uniform"`). The running variance is corrected by n / (n - 1), n being the count
    over all clients, as in PyTorch.
    """

    paper: ClassVar[str] = "Wang et al., 2023, arXiv:2301.02982"
    state_type: ClassVar[type[MethodState]] = FedTANState
    state: FedTANState
    #: what is exchanged at a BN layer, or carried in place of exchanges, as the wire says it
    modes: ClassVar[Mapping[str, str]] = {"fused": "fused", "paper": "paper", "carried": "carried"}

    def __init__(
        self,
        *,
        exchange: Annotated[
            Literal["fused", "paper"],
            "fused (mean and variance in one exchange) or paper (in two); the same numbers",
        ] = "fused",
        carry: Annotated[
            bool, "use corrections from earlier rounds in place of exchanges: one exchange a round"
        ] = False,
        memory: Annotated[
            float,
            "share of a node's earlier statistics in what carry=true keeps, after one round; 0 "
            "keeps the last only",
            Range(0, 1, "high"),
        ] = 0.5,
        oldest: Annotated[
            int,
            "rounds after which a node's values are too old for corrections with carry=true; 0 is "
            "no limit",
            Range(0),
        ] = 4,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not carry:
            idle = {"memory", "oldest"} & self.made_with[1].keys()
            if idle:
                raise ValueError(
                    f"{min(idle)} is an option of carried corrections, but carry is false"
                )
        self.carry = carry
        self.reads_replies = self.reads_replies or carry
        self.memory = memory
        self.oldest = oldest
        if self.carry and exchange != "fused":
            raise ValueError(
                f"carried corrections are always fused: exchange={exchange!r} goes without them"
            )
        self.mode = self.modes["carried" if self.carry else exchange]

    @property
    def carried(self) -> CarriedValues:
        """Return what the server makes of the values that it keeps."""
        return CarriedValues(self.memory, self.oldest, self.averager.combiner, self.state.carried)

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """Add the nodes' corrections; evaluations are instructed without them."""
        packages = super().package(nodes, arrays)
        if self.round.instruction.layerwise in wire.CARRIED_MODES:
            # sums run in the order of partitions, because the nodes' ids are random
            ordered = sorted(nodes, key=lambda node: (self.partitions.get(node, -1), node))
            corrections = self.carried.corrections(ordered, self._weigh_examples, self.round.number)
            for node, entries in corrections.items():
                packages[node][wire.CARRIED] = arrays_to_record(entries)
        return packages

    def update(self, pooled: Pooled) -> Arrays:
        """Keep the nodes' values, and update the model."""
        if self.carry:
            sent = {
                message.metadata.dst_node_id: message.content.array_records
                for message in self.round.messages
            }
            corrections = {
                node: arrays_of(groups[wire.CARRIED])
                for node, groups in sent.items()
                if wire.CARRIED in groups
            }
            silent = set(self.round.nodes) - pooled.weights.keys()
            self.carried.settle(corrections, silent, pooled.weights)
            for reply in pooled.replies:
                values = reply.records.get(wire.CARRIED)
                if values is None:
                    continue
                reason = self.carried.hear(
                    reply.node, reply.num_examples, values, self.round.number
                )
                if reason:
                    log(WARNING, "Node %d goes without carried corrections: %s", reply.node, reason)
        return super().update(pooled)

    def _weigh_examples(self, examples: Examples) -> list[float]:
        """Return the weights that the nodes' models will have; none if these are fewer nodes than
        can be pooled.
        """
        if self.averager.refuse_few(len(examples), self.round.number, "carried values"):
            return []
        return self._weigh_participants(
            [Participant(0, node, count) for node, count in examples.items()]
        )


@register_strategy("feddna")
class FedDNA(FedTAN):
    """BN statistics, but not their gradients, are those of all clients' mini-batches in the first
    local step.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 6:
    FedAvg + algorithm 2, their simplified form of FedDNA (Duan et al., FedDNA: Federated Learning
    with Decoupled Normalization-Layer Aggregation for Non-IID Data, ECML PKDD 2021).

        forward, each layer:   mean = sum_i p_i mean_i,   variance = sum_i p_i variance_i

    where variance_i is about the pooled mean. Backward, each client goes on with its own dF_i/dmean
    and dF_i/dvariance. `exchange="paper"` asks for one after the other, as algorithm 2: 2L + 1
    exchanges a round; `fused`, the default, for both at once: L + 1, the same numbers. With one
    client this is FedAvg.

    `carry=True` uses corrections from earlier rounds instead: one exchange a round.
    """

    paper: ClassVar[str] = "Duan et al., 2021, as in Wang et al."
    modes: ClassVar[Mapping[str, str]] = {
        "fused": "forward",
        "paper": "forward-paper",
        "carried": "carried-forward",
    }


@register_strategy("fedtan-ii")
class FedTANII(FedTAN, FixBN):
    """FedTAN for M rounds, then FedAvg with the statistics of the last of them.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, section 5.4.

        t <= M:  FedTAN
        t >  M:  FixBN's second stage, one exchange a round

    `m` is M: a number of rounds, a fraction of the run between 0 and 1, or `auto` (FixBN's rule),
    and takes the place of FixBN's `freeze_round`. With M at or above the number of rounds this is
    FedTAN, with M = 0 it is FixBN frozen from the start. Frozen statistics are not sent; the paper
    counts them (`send_frozen=True`). The paper lowers the learning rate at the freeze by hand, from
    0.5 to 0.01 on CIFAR-10 and to 0.05 on MNIST: see `FixBN` for `frozen_lr`, which is larger here,
    as it was measured (docs/fedtan.md).
    """

    paper: ClassVar[str] = "Wang et al., 2023, arXiv:2301.02982"
    replaced: ClassVar[tuple[str, ...]] = ("freeze_round",)
    state: Any

    def __init__(
        self,
        *,
        m: Annotated[
            float | Literal["auto"],
            "rounds of FedTAN before the statistics are frozen, or their fraction of the run, or "
            "auto",
        ] = 0.5,
        frozen_lr: Annotated[
            float, "largest learning rate under frozen statistics, as a share of lr", Range(0)
        ] = 0.2,
        **options: Any,
    ) -> None:
        # FedTAN passes on what it does not know to FixBN
        passed: Any = {**options, "freeze_round": m, "frozen_lr": frozen_lr}
        super().__init__(**passed)
