"""Server optimizers that treat the averaged update as a gradient, for parameters only."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.server.averaging import Arrays

Float = NDArray[np.float64]


@dataclass
class Memory:
    """The state of an optimizer for one array."""

    m: Float
    v: Float


@dataclass
class ServerOptimizer:
    """FedAdam, FedYogi, FedAdagrad or FedAvgM, applied to the entries that are parameters.

    Reddi et al., Adaptive Federated Optimization, ICLR 2021; Hsu et al., Measuring the Effects of Non-Identical Data
    Distribution, 2019 (FedAvgM).

        w <- w + rate * step(average - w)

    For parameters the numbers are those of Flower's classes of these names at the same rate. BN statistics and
    counters are averages of measurements, not of directions: they are taken as averaged, where Flower's classes act on
    every array, so that running variances can turn negative and counters into fractions.
    """

    rule: str
    rate: float | None = None
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3
    _memory: dict[str, Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate is None:
            self.rate = 1.0 if self.rule == "momentum" else 0.1

    def state_dict(self) -> dict[str, Any]:
        """Return both moments of every array."""
        return {name: (memory.m, memory.v) for name, memory in self._memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up both moments of every array."""
        self._memory = {name: Memory(*moments) for name, moments in state.items()}

    def step(
        self,
        server_round: int,
        current: Mapping[str, NDArray[Any]],
        averaged: Arrays,
        parameters: Collection[str],
    ) -> Arrays:
        """The new values: stepped parameters, and everything else as averaged."""
        stepped = {}
        for name in averaged:
            if name in parameters:
                stepped[name] = self._step(server_round, name, current[name], averaged[name])
        return {**averaged, **stepped}

    def _step(self, server_round: int, name: str, current: NDArray[Any], averaged: NDArray[Any]) -> NDArray[Any]:
        before = np.asarray(current, np.float64)
        memory = self._memory.setdefault(name, Memory(np.zeros_like(before), np.zeros_like(before)))
        step = RULES[self.rule](self, memory, np.asarray(averaged, np.float64) - before, server_round)
        return np.asarray(before + float(self.rate or 0.0) * step, dtype=current.dtype)


def _adagrad(optimizer: ServerOptimizer, memory: Memory, update: Float, _: int) -> Float:
    memory.v = memory.v + update**2
    return update / (np.sqrt(memory.v) + optimizer.tau)


def _adam(optimizer: ServerOptimizer, memory: Memory, update: Float, server_round: int) -> Float:
    memory.m = optimizer.beta_1 * memory.m + (1 - optimizer.beta_1) * update
    memory.v = optimizer.beta_2 * memory.v + (1 - optimizer.beta_2) * update**2
    # Flower's bias correction, one step ahead of Adam's own
    correction = np.sqrt(1 - optimizer.beta_2 ** (server_round + 1)) / (1 - optimizer.beta_1 ** (server_round + 1))
    step: Float = correction * memory.m / (np.sqrt(memory.v) + optimizer.tau)
    return step


def _yogi(optimizer: ServerOptimizer, memory: Memory, update: Float, _: int) -> Float:
    memory.m = optimizer.beta_1 * memory.m + (1 - optimizer.beta_1) * update
    memory.v = memory.v - (1 - optimizer.beta_2) * update**2 * np.sign(memory.v - update**2)
    return memory.m / (np.sqrt(memory.v) + optimizer.tau)


def _momentum(optimizer: ServerOptimizer, memory: Memory, update: Float, _: int) -> Float:
    memory.m = optimizer.beta_1 * memory.m + update
    return memory.m


RULES: dict[str, Callable[[ServerOptimizer, Memory, Float, int], Float]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "yogi": _yogi,
    "momentum": _momentum,
}
