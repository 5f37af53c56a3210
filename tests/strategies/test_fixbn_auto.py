"""FixBN's sliding window, against the quantity computed by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedbn_flwr.strategies import FixBN
from fedbn_flwr.wire import Instruction
from strategies.fixbn import SlidingWindow
from tests.helpers.harness import INSTRUCTION, Federation, distance, make_model, make_split, parts
from tests.helpers.references import Node, mini_batches


class Noting(FixBN):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        notes: list[Any] = self.__dict__.setdefault("notes", [])
        notes.append(({reply.node: dict(reply.metrics) for reply in self.train_replies}, dict(self.measured)))
        return result


def test_the_window_by_hand() -> None:
    window = SlidingWindow(3, 0.1)
    for value in (9.0, 1.0, 2.0, 3.0):
        window.add(0, value)
    window.add(1, 5.0)
    assert window.variance() == pytest.approx(2 / 3)  # of 1, 2, 3; the second client has no full window yet
    window.add(1, 5.0)
    window.add(1, 5.0)
    assert window.variance() == pytest.approx(1 / 3)


def test_the_first_participation_reports_nothing_and_the_second_the_change() -> None:
    strategy = Noting(freeze_round="auto", window=2, threshold=0.0)
    # with a rate of 0 the statistics of a mini-batch depend on the batch alone
    Federation(make_model()).run(strategy, 2, lr=0.0)
    (first, _), (second, _) = strategy.__dict__["notes"]
    assert not any("statistics-change" in metrics for metrics in first.values())
    node = Node(1, parts()[1])
    expected = np.abs(mean_statistics(node, 2) - mean_statistics(node, 1)).sum() / 2
    assert second[1001]["statistics-change"] == pytest.approx(expected, rel=1e-9)


def mean_statistics(node: Node, server_round: int) -> np.ndarray:
    """Variances and means of both BN layers' inputs, averaged over the round's mini-batches."""
    model, rows = make_model(), []
    net = model.net
    assert isinstance(net, torch.nn.Sequential)
    model.train()
    for inputs, _ in mini_batches(make_split(), node, _asked(server_round), True):
        row = []
        for layer in (1, 4):
            values = net[:layer](inputs.double()).transpose(0, 1).flatten(1)
            row += [values.var(1, unbiased=False), values.mean(1)]
        rows.append(torch.cat(row).detach().numpy())
    return np.asarray(np.mean(rows, axis=0))


def _asked(server_round: int) -> Instruction:
    return replace(INSTRUCTION, server_round=server_round, lr=0.0)


def test_fires_when_calm_and_keeps_the_statistics_of_that_round() -> None:
    strategy = Noting(freeze_round="auto", window=2, threshold=1e9)
    late = Federation(make_model()).run(strategy, 5)
    # changes are known from the second participation on, so two of them after round 3
    assert strategy.frozen_after == 3
    assert strategy.__dict__["notes"][2][1]["frozen-after"] == 3
    fixed = Federation(make_model()).run(FixBN(freeze_round=3), 5)
    assert distance(late, fixed) == 0


def test_says_when_it_never_fires(caplog: pytest.LogCaptureFixture) -> None:
    Federation(make_model()).run(FixBN(freeze_round="auto", window=2, threshold=0.0), 4)
    assert any("never fired in 4 rounds" in record.getMessage() for record in caplog.records)


def test_absent_clients_keep_their_last_values() -> None:
    strategy = FixBN(freeze_round="auto", window=2, threshold=0.0, fraction_train=0.5)
    Federation(make_model()).run(strategy, 8)
    assert strategy.watch.variance() is not None


@pytest.mark.parametrize("bad", [{"freeze_round": "soon"}, {"freeze": "none"}, {"window": 1}, {"threshold": -1}])
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(["soon", "none", "window"])):
        FixBN(**bad)


def test_a_fraction_needs_the_number_of_rounds() -> None:
    strategy, nodes = FixBN(freeze_round=0.5), Federation(make_model())
    with pytest.raises(ValueError, match=r"start\(num_rounds"):
        strategy.configure_train(1, nodes.initial, INSTRUCTION.to_config(), nodes.grid)
    config = INSTRUCTION.to_config()
    config["num-rounds"] = 4
    messages: list[Message] = strategy.configure_train(3, nodes.initial, config, nodes.grid)
    assert messages[0].content.config_records["config"]["freeze"] == "statistics"
