"""The message-based ClientApp: names and dtypes survive, and the reply says what was obeyed."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedProx as FlowerFedProx

from fedbn_flwr import state, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.clientapp.bn_client_app import SharedRecords, read_message
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.wire import Instruction
from tests.helpers.toys import CLASSES, assert_same_state, random_state, toy_cnn, toy_split

INSTRUCTION = Instruction(local_steps=2, batch_size=4, lr=0.05, seed=3)
PARTS = [np.arange(0, 12), np.arange(12, 20)]


def toy_client(context: Context) -> BNClient:
    index = int(context.node_config["partition-id"])
    return BNClient(
        toy_cnn(),
        toy_split(20),
        test=toy_split(12, seed=1),
        num_classes=CLASSES,
        indices=PARTS[index],
        partition_id=index,
        memory=context.state,
        device="cpu",
    )


def ask(grid: InProcessGrid, kind: str, records: dict[str, Any], **options: Any) -> list[RecordDict]:
    """Send the same to both nodes."""
    config = Instruction(**{**vars(INSTRUCTION), **options}).to_config()
    content = {**records, wire.CONFIG: config}
    messages = [Message(RecordDict(content), dst_node_id=node, message_type=kind) for node in grid.get_node_ids()]
    return [reply.content for reply in grid.send_and_receive(messages)]


def test_training_over_messages_is_the_clients_training() -> None:
    grid = InProcessGrid(client_app(toy_client), num_nodes=2)
    sent = random_state(toy_cnn())
    replies = ask(grid, "train", {wire.ARRAYS: state.to_record(sent)}, server_round=4, freeze="statistics")
    for index, reply in enumerate(replies):
        client = BNClient(
            toy_cnn(), toy_split(20), num_classes=CLASSES, indices=PARTS[index], partition_id=index, device="cpu"
        )
        instruction = Instruction(**{**vars(INSTRUCTION), "server_round": 4, "freeze": "statistics"})
        wanted = client.train({wire.ARRAYS: sent}, instruction)
        assert_same_state(state.from_record(reply.array_records[wire.ARRAYS]), wanted.records[wire.ARRAYS])
        metrics = reply.metric_records[wire.METRICS]
        assert metrics == {wire.NUM_EXAMPLES: len(PARTS[index]), **wanted.metrics}
        assert metrics[wire.PARTITION_ID] == index


def test_the_reply_says_what_was_obeyed() -> None:
    grid = InProcessGrid(client_app(toy_client), num_nodes=2)
    arrays = {wire.ARRAYS: state.to_record(toy_cnn().state_dict())}
    options = {"freeze": "statistics", "omit": "statistics", "rule_keys": (("proximal-mu", 0.1),)}
    for reply in ask(grid, "train", arrays, **options):
        assert reply.config_records[wire.REPORT][wire.OBEYED] == ["freeze", "omit", "proximal-mu"]
    for reply in ask(grid, "train", arrays):
        assert wire.OBEYED not in reply.config_records[wire.REPORT]
    for reply in ask(grid, "evaluate", arrays, keep_local="bn", send_personal=True):
        assert reply.config_records[wire.REPORT][wire.OBEYED] == ["keep-local", "send-personal"]


def test_flowers_own_strategies_train_it() -> None:
    initial, finals = state.to_record(toy_cnn().state_dict()), []
    for strategy in (FlowerFedAvg(), FlowerFedProx(proximal_mu=5.0)):
        grid = InProcessGrid(client_app(toy_client), num_nodes=2)
        config = ConfigRecord({"local-steps": 10, "batch-size": 4, "lr": 0.05})
        result = strategy.start(grid, initial, num_rounds=2, train_config=config)
        # Flower averages counters into floats, and clients take them back as what they are
        assert result.arrays["1.num_batches_tracked"].numpy() == 20.0
        losses = [result.train_metrics_clientapp[server_round][wire.TRAIN_LOSS] for server_round in (1, 2)]
        assert losses[1] < losses[0]  # type: ignore[operator]
        assert 0 <= result.evaluate_metrics_clientapp[2][wire.ACCURACY] <= 1  # type: ignore[operator]
        finals.append(result.arrays["0.weight"].numpy())
    # a strong proximal term keeps the model closer to its start
    start = initial["0.weight"].numpy()
    assert np.abs(finals[1] - start).sum() < np.abs(finals[0] - start).sum()


def test_a_record_that_is_gone_is_not_taken_for_another_one() -> None:
    InProcessGrid(client_app(toy_client), 1)  # Flower reads who makes a message
    known = SharedRecords()
    for number in range(50):
        arrays = ArrayRecord({"w": Array(np.full(3, number))})
        message = Message(RecordDict({wire.ARRAYS: arrays, wire.CONFIG: INSTRUCTION.to_config()}), 1, "train")
        received, _ = read_message(message, known)
        assert received[wire.ARRAYS]["w"].tolist() == [number] * 3
