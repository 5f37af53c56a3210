"""A head in closed form: Fed3R and FedNCM. The clients' half is `fedbn_flwr/client/passes.py`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr import wire
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.head_from_sums import (
    HEAD,
    Head,
    read_head_moments,
    solve,
)
from fedbn_flwr.server.method_state import BY_NODE, MethodState
from fedbn_flwr.server.pooling import Pooled, Sent, average
from fedbn_flwr.server.replies import NodeReply, RefusedError
from fedbn_flwr.state import Arrays, arrays_to_record
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.closed_form import (
    CROSS,
    LAST,
    MEANS_PASS,
    MOMENTS_PASS,
    OWN_PASS,
    RIDGE,
    HeadMoments,
)

from .fedavg import FedAvg
from .registry import register_strategy

#: how often a node is asked that fails or does not answer
ATTEMPTS = 3


@dataclass
class SumsState(MethodState):
    """The sums of all nodes that have taken part."""

    #: means over the nodes' samples
    moments: Arrays = field(default_factory=dict)
    #: by node, the number of its samples
    counted: dict[int, float] = field(default_factory=dict, metadata=BY_NODE)
    samples: float = 0.0
    #: by node, how often it was asked for its sums
    asked: dict[int, int] = field(default_factory=dict, metadata=BY_NODE)
    #: by class, how much a sample counts, once it is known
    class_weights: Arrays = field(default_factory=dict)


class ClosedForm(FedAvg):
    """A head from sums over the nodes' data: each node is asked once, and counts once."""

    sends: ClassVar[tuple[Sent, ...]] = (HEAD,)
    state_type: ClassVar[type[MethodState]] = SumsState
    state: SumsState
    #: there is no training, and a mean by numbers of samples is the method
    replaced: ClassVar[tuple[str, ...]] = (
        "weighting",
        "weighted_by_key",
        "momentum_state",
        "server_optimizer",
        "server_lr",
        "clip_norm",
        "clip_factor",
        "freeze_bn",
        "gather_samples",
    )
    evaluated_with: ClassVar[tuple[str, ...]] = ("running",)
    #: the pass over the nodes' data
    gathers: ClassVar[str]

    def __init__(self, *, closed_form: str = LAST, **options: Any) -> None:
        super().__init__(closed_form=closed_form, **options)

    def solution(self, moments: HeadMoments, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's weight and bias."""
        raise NotImplementedError

    def kind(self) -> str:
        """Return the pass that nodes are asked for."""
        return self.gathers

    def head(self) -> Head:
        """Return the layer that is solved."""
        return Head(self.round.current, self.closed_form)

    def begin(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> ArrayRecord:
        """Return the initial state: rounds solve the head."""
        return arrays

    def instruct(self, instruction: Instruction) -> Instruction:
        """Ask for a pass in the place of training."""
        instruction = super().instruct(instruction)
        return replace(instruction, gather=self.head().orders(self.kind()))

    def check(self, reply: NodeReply) -> None:
        """Refuse moments which no samples have, as their classes weigh."""
        weights = self.state.class_weights.get(wire.CLASS_WEIGHTS, 1.0)
        self.head().check(self.kind(), reply, weights)
        known = self.state.moments
        if known and known.keys() != reply.records[wire.MOMENTS].keys():
            raise RefusedError(f"its moments are not {' and '.join(known)}, as those of others")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask nodes that have not been asked."""
        messages = super().configure_train(server_round, arrays, config, grid)
        if not self.state.counted:
            self.head().say_cost(self.kind())
        for node in self.round.nodes:
            self.state.asked[node] = self.state.asked.get(node, 0) + 1
        return messages

    def eligible(self, nodes: list[int]) -> list[int]:
        """Return the nodes whose sums are not there yet, but those that never send any."""
        if self.round is self.evaluation:
            return nodes
        return self._open(nodes)

    def _open(self, nodes: Iterable[int]) -> list[int]:
        state = self.state
        return [
            node
            for node in nodes
            if node not in state.counted and state.asked.get(node, 0) < ATTEMPTS
        ]

    def update(self, pooled: Pooled) -> Arrays:
        """Add the nodes' sums, and solve the layer."""
        state = self.state
        new = pooled.groups[wire.MOMENTS]
        count = sum(pooled.weights.values())
        if state.moments:
            new = average([state.moments, new], [state.samples, count])
        state.moments = new
        state.samples += count
        state.counted |= pooled.weights
        log(
            INFO,
            "The head has the sums of %d nodes with %d samples",
            len(state.counted),
            state.samples,
        )
        self.round.measured["samples-in-head"] = state.samples
        head = self.head()
        return head.put(self.round.current, *self.solution(read_head_moments(state.moments), head))

    def is_finished(self, grid: Grid) -> bool:
        """Return whether there is a head, and no connected node is left to be asked."""
        return bool(self.state.counted) and not self._open(grid.get_node_ids())


@register_strategy("fed3r")
class Fed3R(ClosedForm):
    r"""Ridge regression of the last layer from sums over all nodes' data, in one exchange.

    Fani, Camoriano, Caputo and Ciccone, Accelerating Heterogeneous Federated Learning with
    Closed-form Classifiers, ICML 2024.

        A = sum_k sum_i x_i x_i^T,   b = sum_k sum_i x_i y_i^T,   W = (A + lambda I)^-1 b

    x are the features of a network that was already trained, in evaluation mode, with BN as it is;
    y are one-hot labels, or numbers. The result is that of all data in one place, however they are
    split. Here, moments are centred, so that the layer's bias is not penalized, and lambda is
    `ridge` times the mean variance of the features. A node counts once; one that comes in a later
    round adds to the sums. A run ends when the sums of all connected nodes are there.

    With `balanced`, a first exchange counts the classes, and samples of a class weigh N / (C N_c)
    in a second one.
    """

    paper: ClassVar[str] = "Fani et al., ICML 2024"
    gathers: ClassVar[str] = MOMENTS_PASS

    def __init__(
        self,
        *,
        ridge: Annotated[
            float, "weight of the penalty, as a share of the features' mean variance", Range(0)
        ] = RIDGE,
        balanced: Annotated[
            bool, "let all classes weigh the same; takes an exchange more, to count them"
        ] = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.ridge = ridge
        self.balanced = balanced

    def kind(self) -> str:
        """Return the pass that nodes are asked for."""
        if self.balanced and not self.state.class_weights:
            return MEANS_PASS
        return self.gathers

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """Add the weights of the classes."""
        packages = super().package(nodes, arrays)
        if self.state.class_weights:
            weights = arrays_to_record(self.state.class_weights)
            for groups in packages.values():
                groups[wire.CLASS_WEIGHTS] = weights
        return packages

    def update(self, pooled: Pooled) -> Arrays:
        """Count the classes if they are to weigh the same; then add sums, and solve the layer."""
        if self.kind() == self.gathers:
            return super().update(pooled)
        shares = pooled.groups[wire.MOMENTS][CROSS[True]][-1]
        present = shares > 0
        weights = np.divide(1.0, present.sum() * shares, out=np.zeros_like(shares), where=present)
        # of classes that only nodes of later rounds may have
        weights[~present] = weights.max()
        self.state.class_weights = {wire.CLASS_WEIGHTS: weights}
        self.state.asked = {}
        return dict(self.round.current)

    def solution(self, moments: HeadMoments, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight and the bias of ridge regression."""
        return solve(moments, self.ridge, head)


@register_strategy("fed3r-personal")
class PersonalFed3R(Fed3R):
    r"""Fed3R, and for each node a head in which its own samples weigh more.

    The global model is Fed3R's. Before a node is evaluated, it solves

        W_k = (A + w A_k + lambda I)^-1 (b + w b_k)

    from the sums of all nodes, which it gets, and its own, which count once more with the weight w,
    `own_weight`; with 0 it is Fed3R. This is no method of the paper.
    """

    paper: ClassVar[str] = ""
    personal: ClassVar[bool] = True

    def __init__(
        self,
        *,
        own_weight: Annotated[
            float, "how much a node's own samples count beside all nodes'", Range(0)
        ] = 10.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.own_weight = own_weight

    def instruct_evaluation(self, instruction: Instruction) -> Instruction:
        """Let nodes solve heads of their own first, once there are sums."""
        instruction = super().instruct_evaluation(instruction)
        if not self.state.moments:
            return instruction
        return replace(instruction, gather=self.head().orders(OWN_PASS))

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """Add the sums of all nodes, for an evaluation."""
        packages = super().package(nodes, arrays)
        if self.round is self.evaluation and self.state.moments:
            numbers = {
                "samples": self.state.samples,
                "own-weight": self.own_weight,
                "ridge": self.ridge,
            }
            single = {name: np.array(number) for name, number in numbers.items()}
            moments = arrays_to_record({**self.state.moments, **single})
            for groups in packages.values():
                groups[wire.MOMENTS] = moments
        return packages


@register_strategy("fedncm")
class FedNCM(ClosedForm):
    r"""The nearest class mean of features, in one exchange.

    Legate et al., Guiding the Last Layer in Federated Learning with Pre-trained Models, NeurIPS
    2023.

        m_c = sum_k sum_{i: y_i = c} x_i / N_c,   class of x: argmin_c |x - m_c|

    which is a linear layer with weights m_c and bias -|m_c|^2 / 2. Nodes send d numbers a class, in
    place of the d x d of Fed3R. The paper divides means by their lengths, and sets no bias; here
    the class is that of the nearest mean.
    """

    paper: ClassVar[str] = "Legate et al., NeurIPS 2023"
    gathers: ClassVar[str] = MEANS_PASS

    def solution(self, moments: HeadMoments, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the class means, and what makes them a linear layer."""
        return moments.class_means()
