r"""Corrections carried from round to round: what every client used before takes the place of
exchanges.

A client's local values of every layer travel with its ordinary reply, and the corrections made of
them with the next round's ordinary message. A round is then one step of a fixed-point iteration
that goes on over the rounds, while the model moves a little in between. In the first local step of
round t, client k uses in every layer, with the local values m_k, v_k, a_k, b_k of this very pass (A
and B: see `SharedBatchNorm`), where v is what the layer divides by, the variance plus its eps,

    mean = m_k + o_k sqrt(v_k),   variance = max(v_k q_k - eps, 0),
    A = a_k + alpha_k,   B = b_k + beta_k

    o_k = (m - m_k') / sqrt(v_k'),   q_k = v / v_k',   alpha_k = a - a_k',   beta_k = b - b_k'

where m_k', v_k', a_k', b_k' are the client's values of earlier rounds, and m, v, a, b their pool
over the participants S of round t:

    m = sum_S p_k m_k',   v = sum_S p_k (v_k' + (m_k' - m)^2),
    a = sum_S p_k a_k',   b = sum_S p_k b_k'

The values of one round are those of one mini-batch, and mostly noise. So m_k' and v_k' are running
means: with a `memory` M, new values of a client that was last heard j rounds ago count 1 - M^j, and
what was kept counts M^j. Values of a client that seldom takes part are old already, and are hardly
averaged. With M = 0, they are the last values. Those of gradients always are: with averages of
both, training loses where labels are most skewed. Values of more than `oldest` rounds ago make no
corrections at all: with ten of 50 clients in each round, training failed.

To correct the current local values, instead of replacing them by the last pooled ones, keeps every
layer normalized however wrong the corrections are; replacing them diverges.

Over S and not over all clients: by SharedBatchNorm's derivation the mean of the clients' gradients
is

    sum_S p_k (gamma r_k g_k + (a_k + alpha_k + 2 (b_k + beta_k) (x - mean_k)) / n_k)

and is that of one loss only if what the corrections add is zero in sum, sum_S p_k alpha_k = sum_S
p_k beta_k = 0: they move gradients between clients and create none. With the pool of S this is an
identity, whatever the age of the values. With any other pool it is not, and the sum is a force on
every layer that is the same in every round.

S must be the clients whose models are averaged. The server knows the clients that it draws, and
some of these may not reply. Over those that do, R_t of round t, the corrections then add the
surplus

    s_t = sum_{R_t} p_k alpha_k / sum_{R_t} p_k

to the mean of A, and the same of beta to that of B. It cannot be taken out of the averaged models,
where each client's lower layers have already multiplied it by another Jacobian. So the corrections
of round t + 1 take it back: with e_t, the sum of all s up to round t, every client gets alpha_k -
e_t. With c the share of those of R_{t+1} that have corrections, and L the mean over these of what
the pool alone would have given them,

    e_{t+1} = (1 - c) e_t + c L

If all have corrections and reply, c = 1, L = 0, and nothing is left. In general e is a weighted
mean of L of this round and of earlier ones: however many rounds there are, and whichever clients
are silent, it is never larger than what the pool of one round can add. (This is said of gradients.
Where a schedule lowers the rate in between, less of the movement is taken back.) Of a client that
was silent when others replied, nothing is kept: until it has replied again it gets no correction
and is not in the pool, so that one that is gone for good adds a surplus once, and old values pool
no statistics.

The corrections of means and variances stay in a trust region, |o| <= c and 1 / c <= q <= c, as r
and d of batch renormalization (Ioffe, Batch Renormalization, NeurIPS 2017) do for the same reason:
values of another model may be far from today's. Those of gradients stay as they are, because to
bound each client's alone would break their sum.

Fixed points. One client, or clients with equal data: o = alpha = beta = 0 and q = 1, FedAvg; only
the n / (n - 1) of running variances counts the values of all clients. A model that stands still,
full batches and M = 0: after l rounds the statistics of l layers are exact, after L of all, then in
as many rounds the gradients from the last layer to the first, so that from round 2 L + 1 on the
gradient is FedTAN's, unless the trust region cuts it. With M > 0, it comes arbitrarily close.

Both halves are in this file: `CorrectedClients` is the clients', `CarriedValues` the server's. They
meet in the group `carried` of an ordinary training message: a node's corrections on the way to it,
its local values on the way back. Its entries are

- `statistics` and `gradients`, (2, C) each (see `Requests`), with the channels of all layers side
  by side, in the layers' alphabetical order,
- `layers`, the layers' names as bytes, separated by newlines,
- `sizes`, (3, L): each layer's number of values of a channel, its channels, and its channels with
  gradients.

They are few, because Flower sends each by a request of its own.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.device import Rows
from fedbn_flwr.layerwise.exchange import (
    MOST,
    Answer,
    Combiner,
    Kind,
    Requests,
    combine,
    why_unusable,
)

#: by kind and layer, what takes each client's local values to the global ones: a row for each
#: client
Corrections = Mapping[Kind, Mapping[str, Answer]]
#: the entries of one node's group, as they travel
Entries = dict[str, np.ndarray]
#: by node, its number of samples, or what else nodes are weighed by
Examples = Mapping[int, float]

#: what is corrected
KINDS: tuple[Kind, Kind] = ("statistics", "gradients")
LAYERS = "layers"
SIZES = "sizes"
EXAMPLES = "examples"
ROUND = "round"
#: the trust region: standard deviations that offsets have at most, and ratios of variances, as in
#: batch renormalization
TRUST = 3.0
#: in place of an eps of 0, because channels may be constant
_LEAST = 1e-12
#: most bytes of nodes' values that the server keeps
LIMIT = 256 * 2**20


# ---- corrections of local values -----------------------------------------------------------------


def carried_corrections(
    kind: Kind, values: Tensor, weights: Sequence[float], combiner: Combiner = combine
) -> Tensor:
    """Return one correction per participant (a row each), computed from the `values` that all of
    them kept.
    """
    corrections = correction(kind, values, combiner(kind, values, weights))
    if kind == "statistics":
        offsets, ratios = corrections.unbind(1)
        offsets.clamp_(-TRUST, TRUST)
        ratios.clamp_(1 / TRUST, TRUST)
    return corrections


def correction(kind: Kind, values: Tensor, pooled: Tensor) -> Tensor:
    """Return what takes clients' local values to the pooled ones, a row for each.

    This is the inverse of `correct`.
    """
    if kind == "gradients":
        return pooled - values
    mean, variance = values.unbind(-2)
    pooled_mean, pooled_variance = pooled
    return torch.stack([(pooled_mean - mean) / variance.sqrt(), pooled_variance / variance], -2)


def correct(kind: Kind, values: Tensor, correction: Tensor) -> Tensor:
    """Return clients' local values, corrected, a row for each; of variances, what BN divides by."""
    if kind == "gradients":
        return values + correction.to(values)
    mean, variance = values.unbind(-2)
    offset, ratio = correction.to(values).unbind(-2)
    return torch.stack([mean + offset * variance.sqrt(), variance * ratio], -2)


# ---- the client ----------------------------------------------------------------------------------


class CorrectedClients:
    """The first step of clients that received corrections, with a row for each: an exchange that
    answers at once, by the corrections, and keeps what it is asked, the clients' local values.

    It reads and writes the same tensors in every step, so that a captured step may ask it.
    """

    def __init__(self, clients: int = 1) -> None:
        self._clients = clients
        #: by kind, where the numbers of the corrections lie in every step
        self._numbers: dict[Kind, Tensor] = {}
        self._corrections: Corrections = {}
        #: by kind and layer, the local values, and of how many numbers; 0 where nothing was asked
        self._asked: dict[tuple[Kind, str], tuple[Tensor, Tensor]] = {}

    def begin(self, received: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Begin a step of clients that received these entries, stacked; there may be none.

        The corrections are brought to the device.
        """
        entries = dict(received)
        for kind in KINDS:
            if kind in received:
                new = received[kind]
                kept = self._numbers.get(kind)
                if kept is None or (kept.shape, kept.dtype) != (new.shape, new.dtype):
                    kept = torch.empty_like(new, device=device)
                    self._numbers[kind] = kept
                entries[kind] = kept.copy_(new)
        self._corrections = read_corrections(entries)
        if self._asked:
            torch._foreach_zero_([counts for _, counts in self._asked.values()])

    def form(self) -> Hashable:
        """Return what a captured step depends on, beside the numbers that it reads."""
        read = [
            (kind, layer, answer.tensor.data_ptr(), answer.tensor.dtype, answer.count)
            for kind, by_layer in self._corrections.items()
            for layer, answer in by_layer.items()
        ]
        return tuple(read), tuple(tensor.data_ptr() for tensor in self.written())

    def written(self) -> list[Tensor]:
        """Return the tensors that a step writes."""
        return [tensor for kept in self._asked.values() for tensor in kept]

    def __call__(self, requests: Requests, rows: Rows = slice(None)) -> Answer:
        """Return the values of the clients in these rows, corrected where there is a correction of
        the layer.

        Clients with equal mini-batch sizes go through the model together.
        """
        values = requests.tensor
        added = torch.zeros_like(values)
        if requests.kind == "statistics":
            added[:, 1] = max(requests.eps, _LEAST)
        self._keep(requests, rows, values + added)
        correction = self._corrections.get(requests.kind, {}).get(requests.layer)
        if correction is None:
            return Answer(values, requests.counts[0])
        own = correction.tensor[rows]
        corrected = correct(requests.kind, values + added, own) - added
        if requests.kind == "statistics":
            corrected[:, 1].clamp_(min=0)
        return Answer(corrected, correction.count)

    def _keep(self, requests: Requests, rows: Rows, values: Tensor) -> None:
        key = requests.kind, requests.layer
        if key not in self._asked:
            kept = values.new_zeros((self._clients, *values.shape[1:]))
            self._asked[key] = kept, kept.new_zeros(self._clients, dtype=torch.int64)
        kept, counts = self._asked[key]
        kept[rows] = values
        counts[rows] = counts.new_full((len(values),), requests.counts[0])

    def local_values(self) -> dict[str, Tensor]:
        """Return the entries of the clients' replies after the step, stacked; none for a model
        without BN layers.
        """
        requests: dict[Kind, dict[str, Requests]] = {kind: {} for kind in KINDS}
        if self._asked:
            counted = torch.stack([counts for _, counts in self._asked.values()]).tolist()
            for (key, (values, _)), counts in zip(self._asked.items(), counted, strict=True):
                if all(counts):
                    kind, layer = key
                    requests[kind][layer] = Requests(kind, layer, values, tuple(counts))
        return pack_values(requests)


def pack_values(requests: Mapping[Kind, Mapping[str, Requests]]) -> dict[str, Tensor]:
    """Return the entries for clients' requests, given by kind and layer, with a row for each
    client.
    """
    statistics = requests["statistics"]
    if not statistics:
        return {}
    layers = sorted(statistics)
    clients = len(statistics[layers[0]].counts)
    values: dict[str, Tensor] = {}
    # (clients, layers) each: what values are computed from, then the channels of each kind
    sizes = [torch.tensor([statistics[layer].counts for layer in layers]).T]
    for kind in KINDS:
        tensors = {layer: own.tensor for layer, own in requests[kind].items()}
        widths = [tensors[layer].shape[-1] if layer in tensors else 0 for layer in layers]
        sizes.append(torch.tensor(widths).expand(clients, -1))
        if tensors:
            values[kind] = torch.cat([tensors[layer] for layer in layers if layer in tensors], -1)
    names = bytearray("\n".join(layers).encode())
    values[LAYERS] = torch.frombuffer(names, dtype=torch.uint8).expand(clients, -1)
    values[SIZES] = torch.stack(sizes, 1)
    return values


def read_corrections(received: Mapping[str, Tensor]) -> Corrections:
    """Return corrections from stacked entries; none where there are none."""
    if not received:
        return {}
    # the layers and the pool are the same for all clients of a stack
    layers = received[LAYERS][0].numpy(force=True).tobytes().decode(errors="replace").split("\n")
    counts, *widths = received[SIZES][0].tolist()
    corrections: dict[Kind, dict[str, Answer]] = {}
    for kind, channels in zip(KINDS, widths, strict=True):
        if kind not in received:
            continue
        corrections[kind] = {}
        parts = received[kind].split(channels, -1)
        for layer, count, part in zip(layers, counts, parts, strict=True):
            if part.shape[-1]:
                corrections[kind][layer] = Answer(part, count)
    return corrections


# ---- the server ----------------------------------------------------------------------------------


@dataclass
class Kept:
    """What the server keeps from round to round."""

    #: as values travel, with the node's number of samples and the round; the most recent last
    by_node: dict[int, Entries] = field(default_factory=dict, metadata={"by node": True})
    #: (2, C), what all corrections so far have added to the mean gradient of the averaged nodes
    surplus: np.ndarray | None = None


class CarriedValues:
    """Each node's local values of every BN layer, by node: the last gradients, and statistics
    averaged over its rounds.

    After a pause of j rounds, kept statistics count `memory` to the power of j. A memory of 0 keeps
    the last ones. A node whose values are more than `oldest` rounds old goes without corrections; 0
    is no limit.

    If all together take more than `LIMIT` bytes, those are forgotten that are not renewed for the
    longest time.

    Corrections of gradients sum to zero over the nodes that get them, and may not over the nodes
    that reply. What is left over is the `surplus`, which the next corrections take back.
    """

    def __init__(
        self,
        memory: float = 0.0,
        oldest: int = 0,
        combiner: Combiner = combine,
        kept: Kept | None = None,
    ) -> None:
        self.memory = memory
        self.oldest = oldest
        self.combiner = combiner
        self.kept = kept or Kept()

    def hear(
        self,
        node: int,
        num_examples: float,
        values: Mapping[str, np.ndarray],
        server_round: int = 0,
    ) -> str:
        """Keep a node's values; return why they are unusable, and then forget the node, or an empty
        string.
        """
        before = self.kept.by_node.pop(node, None)
        now = {name: np.array(value) for name, value in values.items()}
        reason = why_not_carried(now)
        if reason:
            return reason
        if before is not None and _form(before) == _form(now):
            share = self.memory ** max(server_round - before[ROUND].item(), 1)
            mean = share * before["statistics"].astype(np.float64) + (1 - share) * now["statistics"]
            now["statistics"] = mean.astype(now["statistics"].dtype)
        self.kept.by_node[node] = {
            **now,
            EXAMPLES: np.array(num_examples),
            ROUND: np.array(server_round),
        }
        size = sum(value.nbytes for value in self.kept.by_node[node].values())
        while len(self.kept.by_node) > max(LIMIT / size, 1):
            del self.kept.by_node[next(iter(self.kept.by_node))]
        return ""

    def settle(
        self,
        corrections: Mapping[int, Entries],
        silent: Iterable[int],
        averaged: Mapping[int, float],
    ) -> None:
        """Forget the silent nodes of a round, and add up what the corrections of the averaged ones
        leave over.

        `averaged` are the weights of the nodes whose models are averaged.
        """
        for node in silent:
            self.kept.by_node.pop(node, None)
        added = {node: corrections.get(node, {}).get("gradients") for node in averaged}
        given = [each for each in added.values() if each is not None]
        if given:
            rows = [np.zeros_like(given[0]) if each is None else each for each in added.values()]
            values = torch.from_numpy(np.stack(rows).astype(np.float64))
            surplus = self.combiner("gradients", values, list(averaged.values())).numpy()
            self.kept.surplus = surplus + self._surplus_like(surplus)

    def corrections(
        self,
        nodes: Iterable[int],
        weigh: Callable[[Examples], Sequence[float]],
        server_round: int = 0,
    ) -> dict[int, Entries]:
        """Return the entries of each participant's correction.

        A node without recent values has none.

        `weigh` returns the weights of nodes with these numbers of samples, in their order.
        """
        known = {node: self.kept.by_node[node] for node in nodes if node in self.kept.by_node}
        heard = {
            node: values
            for node, values in known.items()
            if not 0 < self.oldest < server_round - values[ROUND].item()
        }
        # a node whose forward pass went another way has other layers
        forms = {node: _form(values) for node, values in heard.items()}
        common = Counter(forms.values()).most_common(1)
        heard = {node: values for node, values in heard.items() if forms[node] == common[0][0]}
        if not heard:
            return {}
        weights = weigh({node: values[EXAMPLES].item() for node, values in heard.items()})
        if not sum(weights) > 0:
            return {}
        first = next(iter(heard.values()))
        sizes = first[SIZES].copy()
        sizes[0] = sum(values[SIZES][0] for values in heard.values())
        corrections = {node: {LAYERS: first[LAYERS], SIZES: sizes} for node in heard}
        for kind in KINDS:
            if kind in first:
                rows = torch.from_numpy(np.stack([values[kind] for values in heard.values()]))
                corrected = carried_corrections(kind, rows, weights, self.combiner).numpy()
                if kind == "gradients":
                    corrected -= self._surplus_like(corrected[0]).astype(corrected.dtype)
                for node, values in zip(heard, corrected, strict=True):
                    corrections[node][kind] = values
        return corrections

    def _surplus_like(self, gradients: np.ndarray) -> np.ndarray:
        """Return the surplus; zeros if there is none, or if the layers' channels have changed."""
        if self.kept.surplus is None or self.kept.surplus.shape != gradients.shape:
            return np.zeros(gradients.shape)
        return self.kept.surplus


def _form(values: Mapping[str, np.ndarray]) -> Hashable:
    """Return the layers, their numbers of channels, and the dtypes."""
    dtypes = tuple(values[kind].dtype for kind in KINDS if kind in values)
    return values[LAYERS].tobytes(), values[SIZES][1:].tobytes(), dtypes


def why_not_carried(values: Mapping[str, np.ndarray]) -> str:
    """Return why these cannot be pooled with other nodes' values of the same BN layers.

    The text is empty if they can.
    """
    if not _are_of_layers(values):
        return "its carried values are not of BN layers"
    for kind in KINDS:
        if kind in values:
            fault = why_unusable(kind, torch.from_numpy(values[kind]))
            if fault:
                return f"the {kind} of its BN layers {fault.words}"
    return ""


def _are_of_layers(values: Mapping[str, np.ndarray]) -> bool:
    """Return whether the entries are there, with the dtypes and shapes of values of BN layers."""
    if not {LAYERS, SIZES, "statistics"} <= values.keys() <= {LAYERS, SIZES, *KINDS}:
        return False
    layers = values[LAYERS]
    sizes = values[SIZES]
    statistics = values["statistics"]
    gradients = values.get("gradients", np.zeros((2, 0), statistics.dtype))
    return (
        layers.dtype == np.uint8
        and {statistics.dtype, gradients.dtype} <= set(map(np.dtype, ("f2", "f4", "f8")))
        and sizes.shape == (3, 1 + np.count_nonzero(layers == ord("\n")))
        and sizes.dtype == np.int64
        and bool((sizes[:2] > 0).all() and (sizes[2] >= 0).all() and (sizes <= MOST).all())
        and statistics.shape == (2, sizes[1].sum())
        and gradients.shape == (2, sizes[2].sum())
    )
