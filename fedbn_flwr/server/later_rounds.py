"""A strategy whose first round is a later one: Flower's loop counts from 1."""

from collections.abc import Callable, Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


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

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pass on."""
        return self._strategy.configure_train(server_round + self._done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass on."""
        return self._strategy.aggregate_train(server_round + self._done, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pass on."""
        return self._strategy.configure_evaluate(server_round + self._done, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pass on."""
        return self._strategy.aggregate_evaluate(server_round + self._done, replies)

    def summary(self) -> None:
        """Pass on."""
        self._strategy.summary()
