"""The sweeps of FedTAN: all layers exchanged at once."""

from fedbn_flwr.layerwise import Auto, Corrections, Report, settle
from fedbn_flwr.server.layerwise_round import Conversation, Dialogue, Push
from fedbn_flwr.wire import layerwise as turns
from fedbn_flwr.wire.layerwise import Content, Turn


def sweeping(talk: Dialogue, sweeps: int | Auto) -> Conversation:
    """Let the corrections settle, forward and then backward, and have the step taken under them."""
    nodes = list(talk.start)
    # the weights are known when the nodes have answered for the first time, and not needed before
    weights = [1.0] * len(nodes)
    settled: dict[str, list[Corrections]] = {group: [{} for _ in nodes] for group in turns.CORRECTIONS}
    asked = 0

    def push(phase: str) -> Push:
        nonlocal asked
        corrections = {
            node: _pack({group: settled[group][place] for group in turns.CORRECTIONS})
            for place, node in enumerate(nodes)
        }
        turn = Turn(phase, talk.attempt, asked)
        asked += 1
        return Push(turn, corrections.__getitem__, corrections.__getitem__)

    def ask(phase: str, known: list[Corrections]) -> list[Report]:
        settled[turns.CORRECTIONS[phase == "backward"]] = known
        said = talk.said(talk.ask(push(phase)))
        talk.pooled(said)
        nodes[:], weights[:] = said, (talk.weights[node] for node in said)
        return list(said.values())

    forward, done = settle(lambda known: ask("forward", known), weights, sweeps)
    settled["statistics"] = forward
    settled["gradients"], _ = settle(lambda known: ask("backward", known), weights, done)
    return talk.models((yield from talk.ask_through_flower(push("step"))))


def _pack(corrections: dict[str, Corrections]) -> Content:
    packed: Content = {}
    for group, known in corrections.items():
        packed |= turns.pack_answers(group, known) if known else {}
    return packed


def _count(sweeps: int | str) -> int | None:
    if sweeps == "none":
        return None
    if not isinstance(sweeps, int) or sweeps < 0:
        raise ValueError(f"sweeps must be 'none', 'auto' or a number that is not negative, got {sweeps!r}")
    return sweeps
