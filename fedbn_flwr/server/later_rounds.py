"""A strategy whose first round is a later one: Flower's loop counts from 1."""

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def _passed_on(hook: str) -> Callable[..., Any]:
    """Return a method that calls a hook of the strategy with the number of the later round."""
    return lambda self, server_round, *rest: getattr(self._strategy, hook)(server_round + self._done, *rest)


class LaterRounds(Strategy):
    """Calls a strategy with round numbers that go on after `rounds_done`."""

    def __init__(self, strategy: Strategy, rounds_done: int) -> None:
        self._strategy, self._done = strategy, rounds_done

    def start_later(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: Evaluate | None,
    ) -> Result:
        """Run the rounds from `rounds_done` + 1 to `num_rounds`; Flower's result counts them from 1."""
        evaluate = evaluate_fn and (lambda number, state: evaluate_fn(number + self._done if number else 0, state))
        return self.start(grid, arrays, num_rounds - self._done, timeout, train_config, evaluate_config, evaluate)

    configure_train = _passed_on("configure_train")
    aggregate_train = _passed_on("aggregate_train")
    configure_evaluate = _passed_on("configure_evaluate")
    aggregate_evaluate = _passed_on("aggregate_evaluate")

    def summary(self) -> None:
        """Pass on."""
        self._strategy.summary()
