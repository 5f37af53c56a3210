r"""Corrections carried from round to round: what every client used last time takes the place of exchanges.

A client's local values of every layer travel with its ordinary reply, and the corrections made of them with the next
round's ordinary message. A round is then one step of a fixed-point iteration that goes on over the rounds, while the
model moves a little in between. In the first local step of round t, client k uses in every layer, with the local values
m_k, v_k, a_k, b_k of this very pass (A and B: see `SharedBatchNorm`),

    mean = m_k + o_k sqrt(v_k),   variance = v_k q_k,   A = a_k + alpha_k,   B = b_k + beta_k

    o_k = (m - m_k') / sqrt(v_k'),   q_k = v / v_k',   alpha_k = a - a_k',   beta_k = b - b_k'

where m_k', v_k', a_k', b_k' are the client's last values, and m, v, a, b their pool over the participants S of round t:

    m = sum_S p_k m_k',   v = sum_S p_k (v_k' + (m_k' - m)^2),   a = sum_S p_k a_k',   b = sum_S p_k b_k'

To correct the current local values, instead of replacing them by the last pooled ones, keeps every layer normalized
however wrong the corrections are; replacing them diverges.

Over S and not over all clients: by SharedBatchNorm's derivation the mean of the clients' gradients is

    sum_S p_k (gamma r_k g_k + (a_k + alpha_k + 2 (b_k + beta_k) (x - mean_k)) / n_k)

and is that of one loss only if what the corrections add is zero in sum, sum_S p_k alpha_k = sum_S p_k beta_k = 0: they
move gradients between clients and create none. With the pool of S this is an identity, whatever the age of the values.
With any other pool it is not, and the sum is a force on every layer that is the same in every round.

S must be the clients whose models are averaged. The server knows the clients that it draws, and some of these may not
reply. Over those that do, R_t of round t, the corrections then add the surplus

    s_t = sum_{R_t} p_k alpha_k / sum_{R_t} p_k

to the mean of A, and the same of beta to that of B. It cannot be taken out of the averaged models, where each client's
lower layers have already multiplied it by another Jacobian. So the corrections of round t + 1 take it back: with e_t,
the sum of all s up to round t, every client gets alpha_k - e_t. With c the share of those of R_{t+1} that have
corrections, and L the mean over these of what the pool alone would have given them,

    e_{t+1} = (1 - c) e_t + c L

If all have corrections and reply, c = 1, L = 0, and nothing is left. In general e is a weighted mean of L of this round
and of earlier ones: however many rounds there are, and whoever is silent, it is never larger than what the pool of one
round can add. (This is said of gradients. Where a schedule lowers the rate in between, less of the movement is taken
back.) Of a client that was silent when others replied, nothing is kept: until it has replied again it gets no
correction and is not in the pool, so that one that is gone for good adds a surplus once, and old values pool no
statistics.

The corrections of means and variances stay in a trust region, |o| <= c and 1 / c <= q <= c, as r and d of batch
renormalization (Ioffe, Batch Renormalization, NeurIPS 2017) do for the same reason: values of another model may be far
from today's. Those of gradients stay as they are, because to bound each client's alone would break their sum.

Fixed points. One client, or clients with equal data: o = alpha = beta = 0 and q = 1, FedAvg; only the n / (n - 1) of
running variances counts the values of all clients. A model that stands still
and full batches: after l rounds the statistics of l layers are exact, after L of all, then in as many rounds the
gradients from the last layer to the first, so that from round 2 L + 1 on the gradient is FedTAN's, unless the trust
region cuts it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbn_flwr.layerwise.exchange import Answer, Kind, Request, combine

#: by layer, what takes one client's local tensor to the global tensor
Corrections = Mapping[str, Answer]

# Added to a variance before it divides: a client whose channel is constant has none.
_FLOOR = 1e-5


class Corrected:
    """An exchange on the client that answers at once, by the received corrections, and keeps the requests."""

    def __init__(self, statistics: Corrections, gradients: Corrections) -> None:
        self._corrections: dict[str, Corrections] = {"statistics": statistics, "gradients": gradients}
        #: by kind and layer, the requests so far: the client's local values, in the order of its pass
        self.requests: dict[str, dict[str, Request]] = {"statistics": {}, "gradients": {}}

    def __call__(self, request: Request) -> Answer:
        """Return the request's tensor, corrected if there is a correction of its layer."""
        self.requests[request.kind][request.layer] = request
        correction = self._corrections[request.kind].get(request.layer)
        return Answer(request.tensor, request.count) if correction is None else correct(request, correction)


def carried_corrections(kind: Kind, values: Tensor, weights: Sequence[float], trust: float) -> Tensor:
    """Return the participants' corrections from all participants' last values of one kind, a row for each.

    Channels of several layers may stand side by side. With a `trust` of 0 the region is unbounded.
    """
    pooled = Answer(combine(kind, values.unbind(), weights), 1)
    corrections = correction(Request(kind, "", values, 1), pooled).tensor
    if kind == "statistics" and trust:
        offsets, ratios = corrections.unbind(1)
        offsets.clamp_(-trust, trust)
        ratios.clamp_(1 / trust, trust)
    return corrections


def correction(request: Request, pooled: Answer) -> Answer:
    """Return what takes the client's local tensor to the global tensor; the inverse of `correct`.

    Several clients' tensors may have a row each.
    """
    if request.kind == "gradients":
        return Answer(pooled.tensor - request.tensor, pooled.count)
    (mean, variance), shared = request.tensor.unbind(-2), pooled.tensor
    offset = (shared[0] - mean) / (variance + _FLOOR).sqrt()
    ratio = (shared[1] + _FLOOR) / (variance + _FLOOR)
    return Answer(torch.stack([offset, ratio], -2), pooled.count)


def correct(request: Request, correction: Answer) -> Answer:
    """Return the client's local tensor, corrected; stacked clients' tensors have a row for each client."""
    if request.kind == "gradients":
        return Answer(request.tensor + correction.tensor.to(request.tensor), correction.count)
    mean, variance = request.tensor.unbind(-2)
    offset, ratio = correction.tensor.to(request.tensor).unbind(-2)
    mean = mean + offset * (variance + _FLOOR).sqrt()
    variance = ((variance + _FLOOR) * ratio - _FLOOR).clamp(min=0)
    return Answer(torch.stack([mean, variance], -2), correction.count)
