"""The sweeps of FedTAN: all layers exchanged at once, in place of one exchange after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flwr.app import Message

from fedbn_flwr.layerwise import Auto, Corrections, Report, settle_corrections
from fedbn_flwr.server.layerwise_attempt import Broadcast, LayerwiseAttempt
from fedbn_flwr.wire.layerwise import CORRECTIONS, Content, StepPosition, pack_answers

#: by node, the corrections of statistics and of gradients that its first sweeps start from
Start = Mapping[int, tuple[Corrections, Corrections]]


@dataclass(frozen=True)
class SweptStep:
    """The end of a step in sweeps."""

    replies: list[Message]
    #: by node and kind, the local values in the last sweep of the kind
    reports: dict[int, dict[str, Report]]


def take_sweeps(
    attempt: LayerwiseAttempt, sweeps: int | Auto, weigh: Callable[[], Sequence[float]], start: Start
) -> SweptStep:
    """Take all nodes through the step under corrections, and return their replies.

    The corrections settle in forward sweeps (statistics), and then in backward sweeps (gradients); see
    `fedbn_flwr.layerwise.Corrected`. Nodes hold nothing between two sweeps.
    """
    nodes, asking = len(attempt.contents), _Sweeps(attempt)

    def begin(kind: int) -> list[Corrections]:
        return [start[node][kind] if node in start else {} for node in asking.nodes]

    try:
        statistics, number = settle_corrections(partial(asking.ask, "forward"), nodes, weigh, sweeps, start=begin(0))
        asking.corrections["statistics"] = statistics
        gradients, _ = settle_corrections(partial(asking.ask, "backward"), nodes, weigh, number, start=begin(1))
        asking.corrections["gradients"] = gradients
        return SweptStep(attempt.final_replies(attempt.ask(asking.broadcast("step"))), asking.reports)
    except Exception:
        attempt.abandon()
        raise


def parse_sweeps(sweeps: int | str, auto: Auto) -> int | Auto | None:
    """Return the number of sweeps, or `auto`; None where layers are exchanged one after the other."""
    if sweeps == "none":
        return None
    if sweeps == "auto":
        return auto
    if not isinstance(sweeps, int) or sweeps < 0:
        raise ValueError(f"sweeps must be 'none', 'auto' or a number that is not negative, got {sweeps!r}")
    return sweeps


class _Sweeps:
    """The messages of all sweeps of one attempt."""

    def __init__(self, attempt: LayerwiseAttempt) -> None:
        self._attempt, self._index = attempt, 0
        #: by group, each node's corrections, in the order of `nodes`
        self.corrections: dict[str, list[Corrections]] = {
            group: [{} for _ in attempt.contents] for group in CORRECTIONS
        }
        self.reports: dict[int, dict[str, Report]] = {node: {} for node in attempt.contents}

    @property
    def nodes(self) -> list[int]:
        """The nodes in the order of the participants; before the first replies, in that of the messages."""
        return [participant.node for participant in self._attempt.participants] or list(self._attempt.contents)

    def ask(self, phase: str, corrections: list[Corrections]) -> list[Report]:
        """Send every node its corrections, and return the nodes' requests of all layers."""
        group = CORRECTIONS[phase == "backward"]
        self.corrections[group] = corrections
        requests = self._attempt.read_requests(self._attempt.ask(self.broadcast(phase)))
        for node, report in requests.items():
            self.reports[node][group] = report
        return list(requests.values())

    def broadcast(self, phase: str) -> Broadcast:
        """Return the messages of one sweep."""
        contents = {node: self._pack(place) for place, node in enumerate(self.nodes)}
        position = StepPosition(phase, self._attempt.attempt, self._index)
        self._index += 1
        return Broadcast(position, contents.__getitem__, contents.__getitem__)

    def _pack(self, place: int) -> Content:
        content: Content = {}
        for group in CORRECTIONS:
            if corrections := self.corrections[group][place]:
                content |= pack_answers(group, corrections)
        return content
