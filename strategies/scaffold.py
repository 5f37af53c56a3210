"""SCAFFOLD: the server's half, and below it the clients'.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
algorithm 1, option II with a global step of eta_g = 1:

    server:  x, c;  client i:  c_i = 0               so that c = (1 / N) sum_i c_i = 0
    for each round:
        S <- random set of clients, which get (x, c)
        for each client i in S in parallel:
            y_i <- x
            for k = 1 ... K:
                y_i <- y_i - eta_l (g_i(y_i) - c_i + c)
            c_i+ <- c_i - c + (x - y_i) / (K eta_l)
            send (Delta y_i, Delta c_i) <- (y_i - x, c_i+ - c_i);   c_i <- c_i+
        x <- x + (1 / |S|) sum_{i in S} Delta y_i
        c <- c + (1 / N)   sum_{i in S} Delta c_i
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.rules import Rule, Session, on_device, register_rule
from fedbn_flwr.server.method_state import BY_NODE, MethodState
from fedbn_flwr.server.pooling import Pooled, PooledGroup, Sent, name_dominant
from fedbn_flwr.state import Arrays, State, arrays_to_record
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@dataclass
class ScaffoldState(MethodState):
    """The server's c, and what it counts."""

    #: c, in float64: it is a sum over all rounds
    variate: Arrays = field(default_factory=dict)
    #: the weight of all clients, and of each that has replied
    total: float = 0.0
    weights: dict[int, float] = field(default_factory=dict, metadata=BY_NODE)


@register_strategy("scaffold")
class Scaffold(FedAvg):
    """FedAvg with control variates that correct the drift of local gradients.

    Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.

        local:   y <- y - lr (g(y) - c_i + c)
        server:  c <- c + sum_{i in S} p_i (c_i+ - c_i)

    for parameters only, never buffers: BN statistics have no gradient. p_i is the client's share
    among all N clients: of their examples, or 1 / N as in the paper (`weighting="uniform"`). Nodes
    keep their c_i, which are 0 at first. So c = sum_i p_i c_i over all N clients in every round,
    also if only some of them have taken part yet. This makes the minimum of sum_i p_i F_i the fixed
    point under partial participation. A client that has neither replied nor said how many examples
    it has counts like the mean of the others, until it replies. A node that forgets its c_i, and a
    reply that is lost, leave c off by that c_i or its change.

    Momentum and Adam keep this fixed point: c_i+ is the mean gradient of the round, which for plain
    SGD is the paper's formula (see the clients' half). While all variates are zero, as in the first
    round, this is FedAvg. The variates double the messages.
    """

    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    sends: ClassVar[tuple[Sent, ...]] = (PooledGroup("control variates", wire.CONTROL_VARIATES),)
    state_type: ClassVar[type[MethodState]] = ScaffoldState
    state: ScaffoldState

    def instruct(self, instruction: Instruction) -> Instruction:
        """Let clients correct their gradients by the control variates."""
        return super().instruct(instruction).with_rule(control_variates=True)

    def package(
        self, nodes: Sequence[int], arrays: ArrayRecord
    ) -> dict[int, dict[str, ArrayRecord]]:
        """The model, and c in the dtypes of the model's parameters."""
        packages = super().package(nodes, arrays)
        if self.state.variate:
            sent = {
                name: value.astype(self.round.current[name].dtype)
                for name, value in self.state.variate.items()
            }
            variate = arrays_to_record(sent)
            for groups in packages.values():
                groups[wire.CONTROL_VARIATES] = variate
        return packages

    def update(self, pooled: Pooled) -> Arrays:
        """Move c by the clients' changes, and update the model."""
        state = self.state
        before = self.state.total
        state.total = self._weigh_all(pooled.weights)
        share = sum(pooled.weights.values()) / state.total
        for name, change in pooled.groups[wire.CONTROL_VARIATES].items():
            # c times the weight of all is the sum of p_i c_i, whatever the others are found to
            # weigh
            kept = before / state.total * state.variate.get(name, np.zeros(change.shape))
            state.variate[name] = kept + share * change.astype(np.float64)
        return super().update(pooled)

    def _weigh_all(self, weights: Mapping[int, float]) -> float:
        """Return the weight of all clients.

        Those that nobody knows the weight of weigh as much as the others.
        """
        self.state.weights |= weights
        known = dict(self.state.weights)
        absent = sorted({*self.round.grid.get_node_ids()} - self.state.weights.keys())
        # a node describes itself by its number of examples only, and may not be able to
        if self.weighting == "examples" and self.weighted_by_key == wire.NUM_EXAMPLES:
            described = self.describe(self.round.grid, absent)
            known |= {
                node: each.num_examples for node, each in described.items() if each.num_examples > 0
            }
            name_dominant(known, "the control variates")
        return fsum(known.values()) * (1 + len(set(absent) - known.keys()) / len(known))


@register_rule
class ControlVariates(Rule):
    """Correct every gradient by c - c_i, over the parameters that are shared, never buffers.

    Karimireddy et al., SCAFFOLD, ICML 2020, algorithm 1, option II: after K steps of plain SGD from
    x to y,

        c_i+ = c_i - c + (x - y) / (K lr)

    The client sends c_i+ - c_i. Its c_i is 0 until it first takes part.

    Every step was y <- y - lr (g_k - c_i + c), so option II is the mean of the round's gradients,

        c_i+ = (g_1 + ... + g_K) / K

    and this rule takes that mean itself. For plain SGD the numbers are option II's. With momentum
    or Adam, x - y is no longer K lr times a mean gradient: with momentum m from rest it is larger
    by the factor sum_k (1 - m^k) / (K (1 - m)), 2.6 for m = 0.9 and K = 5, and option II as printed
    diverges. Weight decay is the same function on every client and needs no correction, so c_i is
    without it.
    """

    #: whether gradients are corrected
    control_variates: bool = False
    replays: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True

    def begin(self, session: Session) -> None:
        """Recall c_i, and start the sum of gradients."""
        shared = {
            name: value for name, value in session.learned().items() if name not in session.stays
        }
        zeros = _zeros_like(shared)
        server = {**zeros, **on_device(session.received.get(wire.CONTROL_VARIATES, {}), zeros)}
        self._own = {**zeros, **on_device(session.memory.recall(wire.CONTROL_VARIATES), zeros)}
        learned = [*shared.values()]
        sums = session.keep("sums of gradients", learned)
        corrections = session.keep("corrections", learned)
        if learned:
            torch._foreach_zero_(sums)
            torch._foreach_copy_(corrections, [*_differences(server, self._own).values()])
        self._sums = dict(zip(shared, sums, strict=True))
        self._corrected = [*zip(learned, sums, corrections, strict=True)]

    def adjust(self) -> None:
        """Sum the gradients, and add c - c_i to them."""
        corrected = [
            (value.grad, *rest) for value, *rest in self._corrected if value.grad is not None
        ]
        if corrected:
            gradients, totals, corrections = zip(*corrected, strict=True)
            torch._foreach_add_(totals, gradients)
            torch._foreach_add_(gradients, corrections)

    def finish(self, session: Session) -> None:
        """Store c_i+ and send its change."""
        after = {}
        if self._sums:
            totals = [*self._sums.values()]
            means = torch._foreach_div(totals, _steps(session, totals))
            after = dict(zip(self._sums, means, strict=True))
        session.memory.store(wire.CONTROL_VARIATES, after)
        session.records[wire.CONTROL_VARIATES] = _differences(after, self._own)


def _zeros_like(values: Mapping[str, Tensor]) -> State:
    zeros = {name: torch.empty_like(value) for name, value in values.items()}
    if zeros:
        torch._foreach_zero_(list(zeros.values()))
    return zeros


def _differences(values: State, others: State) -> State:
    if not values:
        return {}
    each = torch._foreach_sub(list(values.values()), [others[name] for name in values])
    return dict(zip(values, each, strict=True))


def _steps(session: Session, totals: list[Tensor]) -> int | list[Tensor]:
    """Return K, as one number or, for stacked clients with different numbers of steps, for each of
    the tensors a number in each row.
    """
    if not isinstance(session.steps, Tensor):
        return max(session.steps, 1)
    steps = session.steps.clamp(min=1)
    return [steps.to(like).reshape(-1, *[1] * (like.dim() - 1)) for like in totals]
