"""Nodes that end, stop or describe their process when a message says so.

A new process imports little for them.
"""

import os
import signal
import time
from collections.abc import Sequence

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.waiting import PATIENCE


def counting_app() -> ClientApp:
    """Return an app that counts its messages in its context, and fails at the word `fail` after
    counting.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        known = context.state.metric_records.get("count", MetricRecord({"messages": 0}))
        count = int(known["messages"]) + 1  # type: ignore[arg-type]
        context.state["count"] = MetricRecord({"messages": count})
        word = message.content.config_records["config"]["word"]
        if word == "fail":
            raise LookupError("I was told to")
        answer = {"count": count, "word": word, "partition": context.node_config["partition-id"]}
        return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)

    return app


def question(node: int, word: str = "hello", kind: str = "train") -> Message:
    return Message(
        RecordDict({"config": ConfigRecord({"word": word})}), dst_node_id=node, message_type=kind
    )


def answers(replies: list[Message]) -> list[tuple[object, ...]]:
    return [tuple(reply.content.config_records["answer"].values()) for reply in replies]


def send(grid: Grid, *words: str) -> list[Message]:
    """Send a word to each node, from the first one on."""
    nodes = list(grid.get_node_ids())
    return list(
        grid.send_and_receive(
            [question(node, word) for node, word in zip(nodes, words, strict=False)]
        )
    )


def app_that_obeys() -> ClientApp:
    """Return an app that counts, and ends, stops, interrupts or describes its process when a
    message says so.

    `sleep` says so on the console, and `interrupt 17` sends process 17 an alarm; then both wait for
    longer than a test.
    """
    app, counting = ClientApp(), counting_app()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        word = str(message.content.config_records["config"]["word"])
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "leave":
            os._exit(3)
        if word == "sleep":
            print("asleep", flush=True)
            time.sleep(2 * PATIENCE)
        if word.startswith("interrupt "):
            os.kill(int(word.split()[1]), signal.SIGALRM)
            time.sleep(2 * PATIENCE)
        if word == "threads":
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            told = ConfigRecord(
                {"threads": torch.get_num_threads(), "process": os.getpid(), "gpus": gpus}
            )
            return Message(RecordDict({"answer": told}), reply_to=message)
        return counting(message, context)

    return app


def obeying(nodes: int, partitions: Sequence[int]) -> InProcessGrid:
    """Return the nodes of `app_that_obeys` for some partitions."""
    return InProcessGrid(app_that_obeys(), nodes, {"lr": 0.5}, partitions)
