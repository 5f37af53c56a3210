"""Differential privacy on the server, by entries' names: for parameters, and not for running
statistics.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import filter as filter_names
from math import sqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.server.pooling import Averager, Sent, Start, States, average, is_floating
from fedbn_flwr.state import Arrays


@dataclass(frozen=True)
class Privacy(Averager):
    r"""Clip every node's update of the parameters, and add Gaussian noise to the mean.

    McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, with a
    fixed norm and equal weights. For u_k = w_k - w over all parameters that node k sends, and K
    replies:

        w <- w + (1 / K) sum_k min(1, C / |u_k|) u_k + N(0, (z C / K)^2)

    `clipping_norm` is C, `noise_multiplier` is z. The noise differs in every run, unless a `seed`
    is given.

    Counters and running statistics are averaged as they are: noise would make variances negative
    and counters meaningless. Statistics that leave a node are not protected, so `unprotected` must
    name them, or patterns such as "*.running_var". FedBN and SiloBN send none. Metrics, such as the
    training loss, are not protected either.
    """

    clipping_norm: float
    noise_multiplier: float
    seed: int | None = None
    unprotected: Collection[str] = ()
    reads_replies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.clipping_norm < np.inf or not 0 <= self.noise_multiplier < np.inf:
            raise ValueError(
                "clipping_norm must be positive and noise_multiplier not negative, got "
                f"{self.clipping_norm} and {self.noise_multiplier}"
            )

    def refuse(self, method: str, sent: Sent) -> None:
        """Refuse whatever nodes send beside the model."""
        raise ValueError(f"privacy would not protect {sent.what}, which {method} shares")

    def refuse_weighting(self, weighting: str) -> None:
        """Refuse unequal weights."""
        if weighting != "uniform":
            raise ValueError(
                "privacy needs weighting='uniform': noise is scaled for nodes of equal weight"
            )

    def average(
        self, states: States, weights: Sequence[float], start: Start | None = None
    ) -> Arrays:
        """Return the mean of models, with the parameters clipped and noised.

        Further names of a parameter neither count again nor get other noise.
        """
        assert start is not None, "everything but models is refused"
        parameters, tied = start.parameters("privacy")
        named = {name for pattern in self.unprotected for name in filter_names(states[0], pattern)}
        bare = sorted(
            name for name in states[0].keys() - parameters - named if is_floating(states[0][name])
        )
        if bare:
            remedy = (
                "keep them on the nodes (silobn, fedbn), or name them: Privacy(..., "
                "unprotected=...)"
            )
            raise ValueError(f"privacy does not cover {', '.join(bare)}: {remedy}")
        names = [
            name
            for name in states[0]
            if name in parameters and name not in tied and is_floating(states[0][name])
        ]
        mean = average(
            [self._clipped(state, start.state, names) for state in states], [1.0] * len(states)
        )
        deviation = self.noise_multiplier * self.clipping_norm / len(states)
        draw = np.random.default_rng(None if self.seed is None else [self.seed, start.server_round])
        for name in names:
            noised = mean[name] + draw.normal(0.0, deviation, mean[name].shape)
            mean[name] = np.asarray(noised, mean[name].dtype)
        return mean | {name: mean[first] for name, first in tied.items() if name in mean}

    def _clipped(
        self,
        state: Mapping[str, NDArray[Any]],
        current: Mapping[str, NDArray[Any]],
        names: Sequence[str],
    ) -> Arrays:
        updates = {name: state[name].astype(np.float64) - current[name] for name in names}
        length = sqrt(sum(float(np.vdot(update, update)) for update in updates.values()))
        share = 1.0
        if length:
            share = min(1.0, self.clipping_norm / length)
        moved = {
            name: np.asarray(current[name] + share * updates[name], state[name].dtype)
            for name in names
        }
        return {**state, **moved}
