"""FixBN."""

from dataclasses import replace
from typing import Any

from fedbn_flwr.schedule import Moment, moment, rounds_of
from fedbn_flwr.wire import FREEZES, Instruction

from .fedavg import FedAvg


class FixBN(FedAvg):
    """Two stages: BN as usual up to round T, then BN with frozen statistics.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, section 6.

        t <= T:  h' = gamma (h - mu_batch) / sqrt(var_batch + eps) + beta     statistics accumulated and averaged
        t >  T:  h' = gamma (h - mu_T) / sqrt(var_T + eps) + beta             gamma and beta still learn

    `freeze_round` is T: a number of rounds, or a fraction of the run between 0 and 1. `freeze` says what stands still:
    `statistics`, `affine` or `both` (Table H). The server keeps the frozen entries, clients stop sending them, so they
    are bit-identical from the freeze on; `send_frozen=True` keeps sending them, as the paper counts. With
    `freeze_round` at or above the number of rounds this is FedAvg.
    """

    def __init__(
        self,
        *,
        freeze_round: float = 0.5,
        freeze: str = "statistics",
        send_frozen: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if freeze not in FREEZES:
            raise ValueError(f"unknown freeze {freeze!r}; known: {', '.join(FREEZES)}")
        self.freeze_at: Moment = moment(str(freeze_round))
        self.freeze = freeze
        self.send_frozen = send_frozen

    def instruct(self, instruction: Instruction) -> Instruction:
        """Freeze, in the rounds of the second stage."""
        if self.freeze_at.fraction is not None:
            self.frozen_after = rounds_of(self.freeze_at.fraction, self.num_rounds)
        else:
            self.frozen_after = self.freeze_at.rounds
        instruction = super().instruct(instruction)
        if self.frozen_after is None or instruction.server_round <= self.frozen_after:
            return instruction
        kept = "none" if self.send_frozen else {"both": "bn"}.get(self.freeze, self.freeze)
        return replace(instruction, freeze=self.freeze, omit=kept)
