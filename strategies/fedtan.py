"""FedTAN."""

from typing import Any

from fedbn_flwr import turns
from fedbn_flwr.layerwise import Auto, Corrections, Report, settle
from fedbn_flwr.turns import Content, Turn

from .dialogue import Conversation, Dialogue, Push
from .layerwise import Layerwise, exchanges

EXCHANGES = ("fused", "paper")


class FedTAN(Layerwise):
    """BN statistics and their gradients are, in the first local step, those of all clients' mini-batches together.

    Wang et al., Why Batch Normalization Damage Federated Learning on Non-IID Data?, algorithms 1 to 3. In the first of
    E local steps, with L uses of BN layers, and p_i as for the models,

        forward, each layer:   mean = sum_i p_i mean_i,   variance = sum_i p_i variance_i
        backward, each layer:  dF/dmean = sum_i p_i dF_i/dmean,   dF/dvariance = sum_i p_i dF_i/dvariance

    so that with E = 1 and p_i proportional to the sizes of the mini-batches a round is one step of centralized SGD on
    their union. `exchange="paper"` asks for mean, variance and gradients one after the other: 3L + 1 exchanges a
    round; `fused`, the default, for mean and variance at once: 2L + 1, the same numbers. With one client this is
    FedAvg.

    `sweeps` exchanges all layers at once, so many times each way, by clients that hold nothing between messages (see
    `fedbn_flwr.layerwise.Corrected`): 2 S + 1 exchanges. S = 0 is FedAvg and S >= L is FedTAN; `auto` stops when no
    layer's statistics move by more than `tolerance`, at the latest after `most_sweeps`.

    Deviations: one optimizer for the round, where the authors' code takes the first step with one of its own
    (`fresh_optimizer=True`); p_i is the share of examples, in their code 1 / N (`weighting="uniform"`); the running
    variance is corrected by n / (n - 1), n being the count over all clients, as in PyTorch.
    """

    def __init__(
        self,
        *,
        exchange: str = "fused",
        sweeps: int | str = "none",
        tolerance: float = 0.01,
        most_sweeps: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if exchange not in EXCHANGES:
            raise ValueError(f"unknown exchange {exchange!r}; known: {', '.join(EXCHANGES)}")
        if sweeps != "none" and exchange != "fused":
            raise ValueError(f"sweeps are always fused: exchange={exchange!r} goes without them")
        self.exchange = exchange
        self.sweeps = Auto(tolerance, most_sweeps) if sweeps == "auto" else _count(sweeps)

    def layerwise_mode(self) -> str:
        """Nothing is exchanged in 0 sweeps."""
        if self.sweeps is None:
            return self.exchange
        return "sweeps" if self.sweeps else "none"

    def converse(self, talk: Dialogue) -> Conversation:
        """Layer by layer, or in sweeps."""
        return exchanges(talk) if self.sweeps is None else sweeping(talk, self.sweeps)


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
