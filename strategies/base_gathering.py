"""Gathering BN statistics from the clients in an exchange of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import ClassVar

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import why_unusable
from fedbn_flwr.norm import Moments
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.server.method_state import MethodState
from fedbn_flwr.server.pooling import Sent
from fedbn_flwr.server.replies import (
    CannotTrainError,
    Expected,
    RefusedError,
    log_refused,
    parse_replies,
    read_each,
)
from fedbn_flwr.state import Arrays, arrays_to_record
from fedbn_flwr.wire import Instruction, moments

from .fedavg import FedAvg


@dataclass
class GatheringState(MethodState):
    """Whether nodes have ever answered."""

    has_gathered: bool = False


class Gathering(FedAvg):
    """Base of strategies whose BN statistics are not averaged but measured with the new global model.

    Every asked node runs its data through the model without learning, and reports count, mean and biased variance of
    what each BN layer saw; the server pools them, exactly:

        mean = sum n_k m_k / N,   var = sum n_k (v_k + (m_k - mean)^2) / N,   N = sum n_k

    The model gets N / (N - 1) var, as in PyTorch.
    """

    sends: ClassVar[tuple[Sent, ...]] = (Sent("gathered statistics"),)
    needs: str = "statistics"
    state_type: ClassVar[type[MethodState]] = GatheringState
    state: GatheringState

    def gather(self, state: Arrays, nodes: Sequence[int], instruction: Instruction) -> dict[str, Moments]:
        """Gather from the nodes in one exchange; nodes that fail are left out, and named in the log."""
        arrays, config = arrays_to_record(state), ConfigRecord({**self.round.other_config, **instruction.to_config()})
        messages = []
        for node, groups in self.package(nodes, arrays).items():
            content = RecordDict({wire.ARRAYS: groups[self.arrayrecord_key], wire.CONFIG: config})
            messages.append(Message(content, dst_node_id=node, message_type=wire.GATHER))
        answers = ask_nodes(self.round.grid, messages, self.exchange_timeout)
        # all with moments of the same layers
        replies, refused = parse_replies(answers.values(), messages, Expected((), {}, groups=(wire.MOMENTS,)))
        sent_moments = [(reply.node, reply.records[wire.MOMENTS]) for reply in replies]
        seen, unusable = read_each(sent_moments, lambda _, arrays: _read_moments(arrays, state))
        refused += unusable
        if not seen and not self.state.has_gathered:
            raise CannotTrainError(f"no node could gather BN statistics: {next(iter(refused), 'none answered')}")
        self.state.has_gathered = True
        log_refused(refused)
        return self.averager.unite(list(seen.values()), self.round.number)

    def installed(self, state: Arrays, pooled: Mapping[str, Moments]) -> Arrays:
        """The state with pooled moments as its running statistics."""
        if not pooled:
            log(WARNING, "BN statistics stay as they were: nodes' answers could not be pooled")
        entries = moments.running_statistics(pooled)
        return {**state, **{name: value.numpy().astype(state[name].dtype) for name, value in entries.items()}}


def _read_moments(arrays: Mapping[str, np.ndarray], state: Arrays) -> dict[str, Moments]:
    """Return a node's moments by layer; RefusedError if they cannot be pooled.

    Moments are in float64, but the pool becomes running statistics of the model, which may be in float32.
    """
    seen = moments.unpack(arrays)
    for layer, values in seen.items():
        entries = moments.running_statistics({layer: values})
        own = [state[name] for name in entries if name in state and state[name].shape == entries[name].shape]
        if len(own) < len(entries) or values.count < 1:
            raise RefusedError(f"its moments are not of a BN layer {layer!r} of the model")
        dtype: torch.dtype = getattr(torch, str(own[0].dtype))
        if fault := why_unusable("statistics", torch.stack(list(entries.values())).to(dtype)):
            raise RefusedError(f"the statistics of BN layer {layer!r} {fault.words}", fault.why)
    return seen
