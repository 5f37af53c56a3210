"""FixBN."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from logging import INFO, WARNING
from typing import Annotated, Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common import log

from fedbn_flwr import wire
from fedbn_flwr.server.lr_schedule import moment
from fedbn_flwr.wire import FREEZES, Instruction

from .fedavg import FedAvg
from .registry import register_strategy


@register_strategy("fixbn")
class FixBN(FedAvg):
    """Two stages: BN as usual up to round T, then BN with frozen statistics.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, section 6.

        t <= T:  h' = gamma (h - mu_batch) / sqrt(var_batch + eps) + beta     statistics accumulated and averaged
        t >  T:  h' = gamma (h - mu_T) / sqrt(var_T + eps) + beta             gamma and beta still learn

    `freeze_round` is T: a number of rounds, a fraction of the run between 0 and 1, or `auto`, the sliding window of
    appendix B.6: T is the first round in which the variance of each client's last `window` reported changes of its
    mini-batch statistics, averaged over the clients that have so many, is below `threshold`. `freeze` says what stands
    still: `statistics`, `affine` or `both` (Table H). The server keeps the frozen entries, clients stop sending them,
    so they are bit-identical from the freeze on; `send_frozen=True` keeps sending them, as the paper counts. With
    `freeze_round` at or above the number of rounds this is FedAvg.
    """

    def __init__(
        self,
        *,
        freeze_round: Annotated[
            float | str, "freeze after this many rounds, or this fraction of the run, or by the rule auto"
        ] = 0.5,
        freeze: Annotated[str, "what stands still after the freeze: statistics, affine or both"] = "statistics",
        send_frozen: Annotated[bool, "keep sending frozen entries, as the papers count bytes"] = False,
        window: Annotated[int, "how many changes of a client's statistics auto looks at"] = 10,
        threshold: Annotated[float, "variance of the statistics' changes below which auto freezes"] = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if freeze not in FREEZES[1:]:
            raise ValueError(f"unknown freeze {freeze!r}; known: {', '.join(FREEZES[1:])}")
        if window < 2 or threshold < 0:
            raise ValueError(f"window must be at least 2 and threshold not negative, got {window} and {threshold}")
        self.freeze_at = None if freeze_round == "auto" else moment(str(freeze_round))
        self.freeze, self.send_frozen = freeze, send_frozen
        self.watch = SlidingWindow(window, threshold)

    def instruct(self, instruction: Instruction) -> Instruction:
        """Freeze, in the rounds of the second stage."""
        if self.freeze_at is not None:
            self.frozen_after = self.freeze_at.after(self.num_rounds)
        instruction = super().instruct(instruction)
        if self.frozen_after is None:
            return instruction.with_rule(report_change=True)
        if instruction.server_round <= self.frozen_after:
            return instruction
        kept = "none" if self.send_frozen else {"both": "bn"}.get(self.freeze, self.freeze)
        return replace(instruction, freeze=self.freeze, omit=kept)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; with `auto`, also watch how much the statistics still change."""
        result = super().aggregate_train(server_round, replies)
        if self.frozen_after is None:
            self._watch(server_round)
        return result

    def _watch(self, server_round: int) -> None:
        for reply in self.train_replies:
            if wire.STATISTICS_CHANGE in reply.metrics:
                self.watch.add(reply.node, float(reply.metrics[wire.STATISTICS_CHANGE]))
        variance = self.watch.variance()
        if variance is not None:
            self.measured["statistics-change-variance"] = variance
            if variance < self.watch.threshold and server_round != self.num_rounds:
                self.frozen_after = self.measured["frozen-after"] = server_round
                log(INFO, "FixBN: frozen after round %d", server_round)
                return
        if server_round == self.num_rounds:
            log(
                WARNING,
                "FixBN: the rule freeze_round=auto never fired in %d rounds (variance %s, threshold %g): this run was "
                "FedAvg",
                server_round,
                variance,
                self.watch.threshold,
            )


class SlidingWindow:
    """The last values of every client; a client that is absent keeps its own."""

    def __init__(self, length: int, threshold: float) -> None:
        self._length, self.threshold = length, threshold
        self._values: dict[int, deque[float]] = {}

    def add(self, node: int, value: float) -> None:
        """Note a client's value."""
        self._values.setdefault(node, deque(maxlen=self._length)).append(value)

    def variance(self) -> float | None:
        """The mean, over clients with a full window, of the variance within it."""
        full = [values for values in self._values.values() if len(values) == self._length]
        return float(np.mean([np.var(values) for values in full])) if full else None
