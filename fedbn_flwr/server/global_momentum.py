"""Momentum that nodes send with the weights (FixBN's section 7, `momentum_state="global"`)."""

from collections.abc import Sequence
from typing import Any

from flwr.app import ArrayRecord

from fedbn_flwr import wire
from fedbn_flwr.server.averaging import Arrays, average, record
from fedbn_flwr.server.replies import NodeReply
from fedbn_flwr.wire import MOMENTUM_STATES


class MomentumState:
    """The average of the nodes' optimizer states, for any strategy."""

    def __init__(self, kind: str) -> None:
        if kind not in MOMENTUM_STATES:
            raise ValueError(f"unknown momentum_state {kind!r}; known: {', '.join(MOMENTUM_STATES)}")
        self.kind = kind
        self._mean: Arrays = {}

    def groups(self) -> dict[str, ArrayRecord]:
        """Return the momentum, which is sent to a node beside the weights."""
        return {wire.MOMENTUM: record(self._mean)} if self._mean else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the mean."""
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the mean."""
        self._mean = state["mean"]

    def absorb(self, replies: Sequence[NodeReply], weights: Sequence[float]) -> None:
        """Average what came back, like the weights."""
        sent = [reply.records.get(wire.MOMENTUM, {}) for reply in replies]
        if self.kind == "global" and all(sent):
            self._mean = average(sent, weights)
