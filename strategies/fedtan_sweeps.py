"""The sweeps of FedTAN: all layers exchanged at once, in place of one exchange after the other."""

from collections.abc import Callable, Sequence
from functools import partial

from flwr.app import Message

from fedbn_flwr.layerwise import Auto, Corrections, Report, settle_corrections
from fedbn_flwr.server.layerwise_attempt import Broadcast, LayerwiseAttempt
from fedbn_flwr.wire.layerwise import CORRECTIONS, Content, StepPosition, pack_answers


def take_sweeps(attempt: LayerwiseAttempt, sweeps: int | Auto, weigh: Callable[[], Sequence[float]]) -> list[Message]:
    """Take all nodes through the step under corrections, and return their replies.

    The corrections settle in forward sweeps (statistics), and then in backward sweeps (gradients); see
    `fedbn_flwr.layerwise.Corrected`. Nodes hold nothing between two sweeps.
    """
    nodes, asking = len(attempt.contents), _Sweeps(attempt)
    try:
        statistics, number = settle_corrections(partial(asking.ask, "forward"), nodes, weigh, sweeps)
        asking.corrections["statistics"] = statistics
        gradients, _ = settle_corrections(partial(asking.ask, "backward"), nodes, weigh, number)
        asking.corrections["gradients"] = gradients
        return attempt.final_replies(attempt.ask(asking.broadcast("step")))
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
        #: by group, each node's corrections, in the order of the participants
        self.corrections: dict[str, list[Corrections]] = {
            group: [{} for _ in attempt.contents] for group in CORRECTIONS
        }

    def ask(self, phase: str, corrections: list[Corrections]) -> list[Report]:
        """Send every node its corrections, and return the nodes' requests of all layers."""
        self.corrections[CORRECTIONS[phase == "backward"]] = corrections
        return list(self._attempt.read_requests(self._attempt.ask(self.broadcast(phase))).values())

    def broadcast(self, phase: str) -> Broadcast:
        """Return the messages of one sweep; the first brings no corrections, and its nodes have no order yet."""
        nodes = [participant.node for participant in self._attempt.participants] or list(self._attempt.contents)
        contents = {node: self._pack(place) for place, node in enumerate(nodes)}
        position = StepPosition(phase, self._attempt.attempt, self._index)
        self._index += 1
        return Broadcast(position, contents.__getitem__, contents.__getitem__)

    def _pack(self, place: int) -> Content:
        content: Content = {}
        for group in CORRECTIONS:
            if corrections := self.corrections[group][place]:
                content |= pack_answers(group, corrections)
        return content
