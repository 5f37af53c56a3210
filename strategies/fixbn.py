"""FixBN, both halves."""

from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import Annotated, Any, ClassVar, Literal

import torch
from flwr.common import log
from torch import Tensor

from fedbn_flwr import wire
from fedbn_flwr.client.rules import Rule, Session, register_rule
from fedbn_flwr.client.rules.dynamics import BatchStatistics
from fedbn_flwr.plugins.options import Range
from fedbn_flwr.server.lr_schedule import moment, round_of, share_in_rounds
from fedbn_flwr.server.method_state import BY_NODE, MethodState
from fedbn_flwr.server.pooling import Pooled, Sent
from fedbn_flwr.state import Arrays, State
from fedbn_flwr.wire import Instruction

from .fedavg import FedAvg
from .registry import register_strategy

#: said where clients have a rate that the server does not know
UNBOUNDED = (
    "FixBN: the train config has no `lr`, so frozen statistics do not bound the learning rate; "
    "lower your own at the freeze, or training may diverge"
)
LATE = "%s: BN would freeze after round %d, and the run has %d: nothing is ever frozen"
#: more rounds than any run has
NEVER = 10**9


@dataclass
class FixBNState(MethodState):
    """What `auto` has heard."""

    #: by node: the round of the last participation, and the variance if one was reported
    reports: dict[int, tuple[int, float | None]] = field(default_factory=dict, metadata=BY_NODE)


@register_strategy("fixbn")
class FixBN(FedAvg):
    """Two stages: BN as usual up to round T, then BN with frozen statistics.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, section 6.

        t <= T:  h' = gamma (h - mu_batch) / sqrt(var_batch + eps) + beta
                 statistics are accumulated and averaged
        t >  T:  h' = gamma (h - mu_T) / sqrt(var_T + eps) + beta
                 gamma and beta still learn

    `freeze_round` is T: a number of rounds, a fraction of the run between 0 and 1, or `auto`, the
    sliding window of appendix B.6: client m computes Var_{Delta m,t}, the variance of the changes
    of its mini-batch statistics in the last `window` rounds (`StatisticsChange` below), and T is
    the first round in which this is below `threshold` for every client that reports it, and at
    least half of the clients that took part in the window do. The appendix names neither the scalar
    nor a threshold. Here it is in units of what the choice of samples alone contributes, in the
    layer where it is largest, so that one threshold, 1, serves models of any width and depth.
    Clients whose models drift apart never come below it, so `auto` freezes at the latest after the
    share `latest` of the run; `latest=1` is the rule alone.

    `freeze` says what stands still: `statistics`, `affine` or `both` (Table H). The server keeps
    the frozen entries, clients stop sending them, so they are bit-identical from the freeze on.
    `send_frozen=True` keeps sending them, as the paper counts; their averages may then differ by
    rounding, 3e-16 of a value in float64. With `freeze_round` at or above the number of rounds this
    is FedAvg.

    The paper's equation 6 weighs clients by their data, as the default here, and its Algorithm 1
    all alike (`weighting="uniform"`).

    Under frozen statistics nothing rescales the layers any more, and training can diverge at
    learning rates that work with normal BN. From the freeze on, the learning rate is at most
    `frozen_lr` times the `lr` of the train config, and lower where the schedule is. At the default
    freeze, a schedule that divides by ten, as the paper's, was not enough where the rate was high,
    whichever statistics were frozen: half of that was (docs/results.md). With `freeze_round=0`, for
    a network that was trained before, the rate is as given, unless `frozen_lr` is given, too.
    `frozen_lr=1` leaves the rate to the schedule, as the paper does. A schedule that names the
    freeze (`lr_schedule="=0.01@freeze"`) is followed as it stands. A train config without `lr` gets
    none: the client's own rate holds, and the log says that it should be lowered.
    """

    paper: ClassVar[str] = "Zhong, Chen and Chao, 2023, arXiv:2303.06530"
    state_type: ClassVar[type[MethodState]] = FixBNState
    state: FixBNState
    #: `freeze_round=0` is the same
    replaced: ClassVar[tuple[str, ...]] = ("freeze_bn",)

    def __init__(
        self,
        *,
        freeze_round: Annotated[
            float | Literal["auto"],
            "freeze after this many rounds, or this fraction of the run, or by the rule auto",
        ] = 0.5,
        freeze: Annotated[
            Literal["statistics", "affine", "both"], "what to freeze: statistics, affine or both"
        ] = "statistics",
        frozen_lr: Annotated[
            float, "largest learning rate under frozen statistics, as a share of lr", Range(0)
        ] = 0.05,
        send_frozen: Annotated[
            bool, "keep sending frozen entries, as the papers count bytes"
        ] = False,
        window: Annotated[int, "how many rounds auto looks back", Range(2)] = 10,
        threshold: Annotated[
            float,
            "variance of every client's changes of statistics below which auto freezes",
            Range(0),
        ] = 1.0,
        latest: Annotated[
            float,
            "share of the run after which auto freezes in any case; 1: never",
            Range(0, 1, "low"),
        ] = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if freeze_round == "auto":
            self.freeze_at = None
        else:
            self.freeze_at = moment(str(freeze_round))
        self.reads_replies = self.reads_replies or self.freeze_at is None
        if send_frozen:
            self.let_send(Sent("frozen entries that are sent (send_frozen)"))
        if freeze == "affine":
            self.needs = "affine"
        else:
            self.needs = "all-statistics"
        self.freeze = freeze
        self.frozen_lr = frozen_lr
        self.send_frozen = send_frozen
        self.window = window
        self.threshold = threshold
        self.latest = latest

    def instruct(self, instruction: Instruction) -> Instruction:
        """Freeze, and lower the learning rate, in the rounds of the second stage."""
        asked = instruction.lr
        if self.freeze_at is not None:
            self.state.frozen_after = round_of(self.freeze_at, self.num_rounds)
            if (
                instruction.server_round == 1
                and (self.num_rounds or NEVER) <= self.state.frozen_after < NEVER
            ):
                log(WARNING, LATE, type(self).__name__, self.state.frozen_after, self.num_rounds)
        instruction = super().instruct(instruction)
        frozen_after = self.state.frozen_after
        if frozen_after is None:
            instruction = instruction.with_rule(change_window=self.window)
        if frozen_after is None or instruction.server_round <= frozen_after:
            return replace(
                instruction, later=",".join(filter(None, ("freeze,omit", instruction.later)))
            )
        if self.send_frozen:
            kept = "none"
        else:
            kept = {"both": "bn"}.get(self.freeze, self.freeze)
        instruction = replace(instruction, freeze=self.freeze, omit=kept)
        as_given = not frozen_after and "frozen_lr" not in self.made_with[1]
        if (
            as_given
            or self.freeze == "affine"
            or any(change.when is None for change in self.schedule)
        ):
            return instruction
        if not self.round.has_rate:
            if instruction.server_round == frozen_after + 1:
                log(WARNING, UNBOUNDED)
            return instruction
        rate = min(instruction.lr, self.frozen_lr * asked)
        who = "the schedule"
        if rate < instruction.lr:
            who = f"frozen-lr={self.frozen_lr:g}"
        share = rate / asked if asked else 0.0
        self.round.bound = f"by {who}: try frozen-lr below {share:g}"
        return replace(instruction, lr=rate)

    def update(self, pooled: Pooled) -> Arrays:
        """Update; with `auto`, also watch how much the statistics still change."""
        if self.state.frozen_after is None:
            for reply in pooled.replies:
                variance = reply.metrics.get(wire.STATISTICS_CHANGE)
                self.state.reports[reply.node] = (
                    self.round.number,
                    None if variance is None else float(variance),
                )
            self._watch(self.round.number)
        return super().update(pooled)

    def lose_round(self) -> None:
        """Watch, too, whether it is late."""
        super().lose_round()
        if self.state.frozen_after is None:
            self._watch(self.round.number)

    def _watch(self, server_round: int) -> None:
        recent = [
            variance
            for last, variance in self.state.reports.values()
            if last > server_round - self.window
        ]
        reported = [variance for variance in recent if variance is not None]
        variance = None
        if 0 < len(recent) <= 2 * len(reported):
            variance = max(reported)
        if variance is not None:
            self.round.measured["statistics-change-variance"] = variance
        calm = variance is not None and variance < self.threshold
        late = self.num_rounds is not None and server_round >= share_in_rounds(
            self.latest, self.num_rounds
        )
        if (calm or late) and server_round != self.num_rounds:
            self.state.frozen_after = self.round.measured["frozen-after"] = server_round
            if calm:
                reason = "the statistics are calm"
            else:
                reason = f"{self.latest:g} of the run are over"
            log(INFO, "FixBN: frozen after round %d, as %s", server_round, reason)
        elif server_round == self.num_rounds:
            log(
                WARNING,
                "FixBN: the rule freeze_round=auto never fired in %d rounds (variance %s, "
                "threshold %g): this run was FedAvg",
                server_round,
                variance,
                self.threshold,
            )


@register_strategy("centralized")
class Centralized(FixBN):
    """Training on one node with the union of the data: an upper bound for the others, in the same
    number of steps.

    Trains rounds x E steps on batches as large as all clients' batches together; `batch_size`
    overrides that. With a `freeze_round` below the number of rounds it is Centralized+FixBN; by
    default nothing is frozen.
    """

    paper: ClassVar[str] = ""
    replaced: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        freeze_round: Annotated[
            float | Literal["auto"] | None, "when to freeze, as for fixbn; empty: never"
        ] = None,
        **options: Any,
    ) -> None:
        super().__init__(freeze_round=NEVER if freeze_round is None else freeze_round, **options)
        if self.freeze_bn and freeze_round is not None:
            raise ValueError(
                "freeze_bn freezes statistics from the start on, and freeze_round later: give one "
                "of them"
            )
        if freeze_round is None and not self.freeze_bn:
            if self.statistics == "running":
                self.needs = "none"
            else:
                self.needs = "statistics"


@register_rule
class StatisticsChange(Rule):
    """Report how much the change of the mini-batch statistics varies in a window of rounds, FixBN's
    Var_{Delta m,t}.

    Zhong, Chen, Chao, Making Batch Normalization Great in Federated Deep Learning, appendix B.6:

        Var = (1 / W) sum_{i = t-W+1}^t (DeltaBN_i - mean DeltaBN)^2

    The appendix leaves DeltaBN open. Here S_i are the means and variances of all BN layers,
    averaged over the mini-batches of round i, and DeltaBN_i = S_i - S_j, j being the round before
    in which the client took part. It is taken channel by channel. The variances of all channels of
    a layer are divided by what the choice of samples alone contributes to them, se(S_i)^2 +
    se(S_j)^2. A layer's number is the mean of this ratio for its means and for its variances, and
    the largest layer's is reported. The result has no unit, and depends neither on the number of
    channels nor on that of layers. At 1 no layer's statistics change more than other samples would
    change them. n changes have n - 1 degrees of freedom.

    The window counts rounds, not participations. Nothing is reported before the window lies within
    the time that the client takes part, nor with less than two changes in the window. The node
    keeps the window's changes: W times as many numbers as the model has statistics.
    """

    #: W, in rounds
    change_window: int = 0
    #: what its hooks see inside `torch.func.vmap` cannot be kept
    stacks: ClassVar[bool] = False

    def begin(self, session: Session) -> None:
        """Start to record."""
        self._statistics = BatchStatistics(session.model)

    def finish(self, session: Session) -> None:
        """Stop, add this round's change to the window, and report."""
        now = {f"last/{name}": values for name, values in self._statistics.stop().items()}
        if not now:
            return
        server_round = session.instruction.server_round
        kept = session.memory.recall(wire.STATISTICS_CHANGE)
        rounds, window = _window(kept, server_round - self.change_window)
        if kept:
            rounds = torch.cat([rounds, torch.tensor([server_round])])
            window = {
                name: torch.cat([window[name], _change(kept[name], now[name])]) for name in now
            }
        first = kept.get("first", torch.tensor(server_round))
        if len(rounds) >= 2 and int(first) <= server_round - self.change_window:
            session.metrics[wire.STATISTICS_CHANGE] = _relative_variance(window)
        changes = {name.replace("last/", "window/"): values for name, values in window.items()}
        session.memory.store(
            wire.STATISTICS_CHANGE, {"first": first, "rounds": rounds, **now, **changes}
        )


def _window(kept: State, after: int) -> tuple[Tensor, State]:
    """Return the rounds after a round that have changes, and these changes of every layer."""
    rounds = kept.get("rounds", torch.zeros(0, dtype=torch.int64))
    layers = [name for name in kept if name.startswith("last/")]
    windows = {
        name: kept.get(name.replace("last/", "window/"), kept[name][None][:0]) for name in layers
    }
    return rounds[rounds > after], {
        name: values[rounds > after] for name, values in windows.items()
    }


def _change(before: Tensor, now: Tensor) -> Tensor:
    """Return the change of the statistics, and its squared standard error, as a row of a window,
    (1, 4, C).
    """
    old, old_errors = before.chunk(2)
    new, new_errors = now.chunk(2)
    return torch.cat([new - old, old_errors + new_errors])[None]


def _relative_variance(window: State) -> float:
    """Return the largest layer's variance of the changes, in units of what the choice of samples
    contributes.
    """
    ratios = []
    for values in window.values():
        changes, errors = values.chunk(2, 1)
        # no samples differ where all inputs of a layer are the same, and then nothing changes
        # either
        ratios.append((changes.var(0).sum(1) / errors.mean(0).sum(1).clamp(min=1e-12)).mean())
    return float(torch.stack(ratios).max())
