"""The message-based ClientApp: the reply says what was obeyed, and Flower's own strategies train
it.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedProx as FlowerFedProx

from fedbn_flwr import wire
from fedbn_flwr.clientapp.bn_client_app import SharedRecords, read_message
from tests.helpers.harness import INSTRUCTION, Federation, make_model


def test_flowers_own_strategies_train_it() -> None:
    initial, finals = Federation(make_model()).initial, []
    for strategy in (FlowerFedAvg(), FlowerFedProx(proximal_mu=5.0)):
        config = ConfigRecord({"local-steps": 10, "batch-size": 4, "lr": 0.05})
        result = strategy.start(
            Federation(make_model(), (12, 8)).grid, initial, 2, train_config=config
        )
        # Flower averages counters into floats, and clients take them back as what they are
        assert result.arrays["net.1.num_batches_tracked"].numpy() == 20.0
        losses = [
            result.train_metrics_clientapp[server_round][wire.TRAIN_LOSS] for server_round in (1, 2)
        ]
        assert losses[1] < losses[0]  # type: ignore[operator]
        assert 0 <= result.evaluate_metrics_clientapp[2][wire.ACCURACY] <= 1  # type: ignore[operator]
        finals.append(result.arrays["net.0.weight"].numpy())
    # a strong proximal term keeps the model closer to its start
    start = initial["net.0.weight"].numpy()
    assert np.abs(finals[1] - start).sum() < np.abs(finals[0] - start).sum()


def test_a_record_that_is_gone_is_not_taken_for_another_one() -> None:
    Federation(make_model())  # Flower reads who makes a message
    known = SharedRecords()
    for number in range(50):
        arrays = ArrayRecord({"w": Array(np.full(3, number))})
        message = Message(
            RecordDict({wire.ARRAYS: arrays, wire.CONFIG: INSTRUCTION.to_config()}), 1, "train"
        )
        received, _ = read_message(message, known)
        assert received[wire.ARRAYS]["w"].tolist() == [number] * 3
