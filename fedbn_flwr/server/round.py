"""A round of training or evaluation: what its messages ask of which nodes, and what became of
it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from math import isfinite
from time import perf_counter
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedbn_flwr import wire
from fedbn_flwr.layerwise.exchange import Why
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.grids import ask_nodes
from fedbn_flwr.server.method_state import MethodState
from fedbn_flwr.server.replies import (
    CannotTrainError,
    DivergedError,
    Expected,
    NodeReply,
    NotObeyedError,
    Refusal,
    log_refused,
    mean_metrics,
    parse_replies,
)
from fedbn_flwr.state import Arrays, arrays_of
from fedbn_flwr.wire import Instruction


@dataclass(eq=False)
class Round:
    """A round as strategies see it; what it has brought is filled in when replies come."""

    number: int = 0
    #: the way to the nodes, which hooks may also ask; there is none before the first round
    grid: Grid = None  # type: ignore[assignment]
    #: when it began, by `perf_counter`, and how long it took when it has ended
    began: float = field(default_factory=perf_counter)
    seconds: float = 0.0
    #: the global state that the round starts from, and the one that it ends with
    current: Arrays = field(default_factory=dict)
    after: ArrayRecord = field(default_factory=ArrayRecord)
    #: the user's options, and from `instruct` on the method's orders
    instruction: Instruction = field(default_factory=Instruction)
    #: whether the user's options have a learning rate; without one, clients have their own
    has_rate: bool = True
    #: what bounded the learning rate under frozen statistics, and what to try, in words
    bound: str = ""
    #: what messages hold beside the instruction, such as a user's own keys
    other_config: Mapping[str, Any] = field(default_factory=dict)
    #: the binding keys, and the arrays whose shapes replies must have
    expected: Expected = field(default_factory=lambda: Expected((), {}))
    #: the nodes that get a message, and the messages
    nodes: Sequence[int] = ()
    messages: list[Message] = field(default_factory=list)
    #: whether the loop over the rounds has called `ask` and `gather`
    was_asked: bool = False
    was_gathered: bool = False
    #: whether the exchanges of a layer-wise step go by messages
    by_messages: bool = False
    #: by node, the number of samples that it named before it trained, in a layer-wise step
    counted: dict[int, float] = field(default_factory=dict)
    #: the usable replies, and why others are not
    replies: list[NodeReply] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    #: numbers that the method measured, for the results
    measured: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Self:
        """Return a round with the user's options, to which its number is added."""
        config["server-round"] = number
        order_keys = Instruction.wire_keys()
        other_config = {key: value for key, value in config.items() if key not in order_keys}
        now = cls(
            number, grid, current=arrays_of(arrays), instruction=Instruction.from_config(config)
        )
        for name, array in now.current.items():
            if array.dtype.kind == "c":
                raise UsageError(
                    f"the entry {name!r} is {array.dtype}: only real numbers are averaged (keep "
                    "torch.view_as_real of it, and use its torch.view_as_complex)"
                )
        now.has_rate = "lr" in config
        now.other_config = other_config
        return now

    @property
    def answered(self) -> set[int]:
        """The nodes whose replies are usable."""
        return {node for reply in self.replies for node in reply.nodes}

    def end(self, after: ArrayRecord) -> Self:
        """Take note of the state that the round ends with; return the round."""
        self.after = after
        self.seconds = perf_counter() - self.began
        return self

    def ask_pass(
        self,
        instruction: Instruction,
        models: Mapping[int, ArrayRecord],
        timeout: float,
        expected: Expected,
    ) -> tuple[list[NodeReply], list[Refusal]]:
        """Ask nodes for a pass over their data, each with a model; return what can be used, and
        why the rest cannot.
        """
        config = ConfigRecord({**self.other_config, **instruction.to_config()})
        messages = [
            Message(RecordDict({wire.ARRAYS: model, wire.CONFIG: config}), node, wire.GATHER)
            for node, model in models.items()
        ]
        answers = ask_nodes(self.grid, messages, timeout)
        return parse_replies(answers.values(), messages, expected)

    def read(
        self, messages: Iterable[Message], state: MethodState, ends: bool = False
    ) -> list[NodeReply]:
        """Read and return the usable replies; if there is none and that `ends` the run, its error
        says why.

        NotObeyedError if no client has ever done what the method asks for.
        """
        self.replies, refused = parse_replies(messages, self.messages, self.expected)
        self.refused += refused
        last_words = None
        if refused and ends and not self.replies:
            last_words = refused[0].reason
        log_refused([refusal for refusal in refused if refusal.reason != last_words])
        deaf = next((each for each in refused if each.why is Why.NOT_OBEYED), None)
        if deaf and not self.replies and set(self.expected.binding) - state.obeyed.keys():
            raise NotObeyedError(f"node {deaf.node} {deaf.reason.removeprefix('it ')}")
        return self.replies

    def lose(self, state: MethodState) -> None:
        """Take note that nothing could be used; an error if the run cannot go on."""
        reason = self.refused[0] if self.refused else "no node answered"
        all_infinite = bool(self.refused) and all(
            refusal.why is Why.INFINITE for refusal in self.refused
        )
        if not state.ever_trained:
            if all_infinite:
                raise DivergedError(
                    self.number, f"no node could train ({reason}); {self.circumstances(state)}"
                )
            raise CannotTrainError(f"no node could train in round {self.number}: {reason}")
        new = sorted(set(self.expected.binding) - state.obeyed.keys())
        if new and self.refused and not all_infinite:
            asked = ", ".join(new)
            raise CannotTrainError(
                f"no node could train in round {self.number}, the first that asks for {asked}: "
                f"{reason}"
            )
        log(WARNING, "Round %d brought no usable reply: the model stays as it was", self.number)
        state.lost.add(
            self.number, self.refused, self._count_connected(), self.circumstances(state)
        )

    def refuse_infinite_losses(self, state: MethodState) -> None:
        """End the run if no node's loss is finite, unless this is one node among others."""
        sent = [
            loss
            for reply in self.replies
            if isinstance(loss := reply.metrics.get(wire.TRAIN_LOSS), float)
        ]
        if sent and not any(map(isfinite, sent)) and len(sent) >= min(self._count_connected(), 2):
            raise DivergedError(
                self.number, f"no node's training loss is finite; {self.circumstances(state)}"
            )

    def mean_metrics(self, mean: Callable[..., MetricRecord], weighted_by: str) -> MetricRecord:
        """Return the mean of the replies' metrics, weighted by one of them, as Flower or the user's
        function has it.
        """
        if mean is not aggregate_metricrecords:
            return mean([reply.content for reply in self.replies], weighted_by)
        # a metric that some nodes lack has no mean over all
        shared = set.intersection(*(set(reply.metrics) for reply in self.replies)) - {
            wire.PARTITION_ID,
            weighted_by,
        }
        return mean_metrics(self.replies, sorted(shared))

    def circumstances(self, state: MethodState) -> str:
        """Return what may have made training diverge in this round, and what to try, in words."""
        rate = f"the learning rate is {self.instruction.lr:g}"
        frozen = ""
        if state.frozen_after is not None and self.instruction.freeze != "none":
            frozen = f"BN is frozen after round {state.frozen_after}, "
        if not self.has_rate:
            tried = "try a lower learning rate"
        elif self.bound:
            tried = f"{rate}, {self.bound}"
        else:
            tried = f"{rate}: try a lower learning rate"
        later = ", or a later freeze" if frozen else ""
        return f"{frozen}{tried}{later}"

    def _count_connected(self) -> int:
        if self.grid:
            return len(list(self.grid.get_node_ids()))
        return 0
