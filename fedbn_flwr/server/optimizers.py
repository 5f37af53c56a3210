"""Server optimizers that treat the averaged update as a gradient, for parameters only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.server.pooling import Start
from fedbn_flwr.state import Arrays

#: as in Flower's classes
BETA_1 = 0.9
BETA_2 = 0.99
TAU = 1e-3
#: m and v
MomentPair = tuple[NDArray[Any], NDArray[Any]]


class ServerOptimizer:
    """FedAdam, FedYogi, FedAdagrad or FedAvgM, applied to the entries that are parameters.

    Reddi et al., Adaptive Federated Optimization, ICLR 2021; Hsu et al., Measuring the Effects of
    Non-Identical Data Distribution, 2019 (FedAvgM).

        w <- w + rate * step(average - w)

    For parameters the numbers are those of Flower's classes of these names at the same rate. BN
    statistics and counters are averages of measurements, not of directions: they are taken as
    averaged, where Flower's classes act on every array, so that running variances can turn negative
    and counters into fractions.
    """

    def __init__(self, rule: str, rate: float | None = None) -> None:
        self.rule = rule
        if rate is not None:
            self.rate = rate
        elif rule == "momentum":
            self.rate = 1.0
        else:
            self.rate = 0.1

    def apply(self, mean: Arrays, start: Start, memory: dict[str, Any]) -> Arrays:
        """Return the new values: stepped parameters, and everything else as averaged.

        `memory` has the moments m and v of every parameter, in float64.
        """
        parameters, _ = start.parameters("a server optimizer")
        stepped = {}
        for name in [name for name in mean if name in parameters]:
            before = np.asarray(start.state[name], np.float64)
            update = np.asarray(mean[name], np.float64) - before
            moments = memory.get(name, (np.zeros_like(update), np.zeros_like(update)))
            step, memory[name] = self._direction(update, moments, start.server_round)
            stepped[name] = np.asarray(before + self.rate * step, dtype=start.state[name].dtype)
        return {**mean, **stepped}

    def _direction(
        self, update: NDArray[Any], moments: MomentPair, server_round: int
    ) -> tuple[NDArray[Any], MomentPair]:
        """Return the direction of the step, and the moments after it."""
        m, v = moments
        correction = 1.0
        squared = update**2
        match self.rule:
            case "momentum":
                m = BETA_1 * m + update
            case "adagrad":
                m = update
                v = v + squared
            case "adam":
                m = BETA_1 * m + (1 - BETA_1) * update
                v = BETA_2 * v + (1 - BETA_2) * squared
                # Flower's bias correction, one step ahead of Adam's own
                correction = np.sqrt(1 - BETA_2 ** (server_round + 1)) / (
                    1 - BETA_1 ** (server_round + 1)
                )
            case "yogi":
                m = BETA_1 * m + (1 - BETA_1) * update
                v = v - (1 - BETA_2) * squared * np.sign(v - squared)
        if self.rule == "momentum":
            direction = m
        else:
            direction = correction * m / (np.sqrt(v) + TAU)
        return direction, (m, v)
