"""Nodes that answer at the same time, as in a deployment: a process for every message, and one at a
time for a node.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from torch import nn

from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.server.grids import identify
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.transports.message_client import STEPS
from fedbn_flwr.transports.side_channel_client import CERTIFICATES_VARIABLE, SITE_ADDRESS_VARIABLE
from tests.helpers.harness import CLASSES, Double, Federation

#: is called in the process of a node before it answers, with the message
Fault = Callable[[Message], None]


def dropout_model() -> nn.Module:
    """Return a model with two BN layers and two dropouts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Double(
            nn.Sequential(
                nn.Flatten(),
                nn.Linear(16, 8),
                nn.BatchNorm1d(8),
                nn.Dropout(0.5),
                nn.ReLU(),
                nn.Linear(8, 8, bias=False),
                nn.BatchNorm1d(8),
                nn.Dropout(0.5),
                nn.Linear(8, CLASSES),
            )
        )


def make_client(context: Context) -> BNClient:
    """Return a client of the harness's federation with `dropout_model`."""
    return Federation(dropout_model()).client(context)


@dataclass
class Site:
    """A node's surroundings."""

    #: what the node's processes have in their environment
    environment: Mapping[str, str] = field(default_factory=lambda: {CERTIFICATES_VARIABLE: "none"})
    fault: Fault | None = None
    make_client: Callable[[Context], BNClient] = make_client


class ConcurrentNodes(InProcessGrid):
    """A grid whose nodes answer at the same time.

    `sites` are those of single nodes, by partition.
    """

    def __init__(self, num_nodes: int, sites: Mapping[int, Site] | None = None) -> None:
        super().__init__(ClientApp(), num_nodes)
        self._sites = {number: (sites or {}).get(number, Site()) for number in range(num_nodes)}
        self._answering: dict[str, tuple[Message, Connection, BaseProcess]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Start a process for every message."""
        start = get_context("forkserver")
        ids = []
        for message in messages:
            message_id = identify(message)
            self._finish_earlier(message.metadata.dst_node_id)
            context = self.context(message.metadata.dst_node_id)
            site = self._sites[int(context.node_config["partition-id"])]
            here, there = start.Pipe()
            packed = pickle.dumps((message, context, site))
            process = start.Process(target=_work, args=(there, packed), daemon=True)
            process.start()
            there.close()
            self._answering[message_id] = (message, here, process)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there; an error for a process that has died."""
        return [reply for item in message_ids if (reply := self._reply(item)) is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Deliver, and wait for all replies."""
        ids, replies = self.push_messages(messages), list[Message]()
        while len(replies) < len(ids):
            replies += self.pull_messages(ids)
            time.sleep(0.02)
        return replies

    def processes(self) -> list[BaseProcess]:
        """Return the processes that were started for messages."""
        return [process for _, _, process in self._answering.values()]

    def close(self) -> None:
        """End every process."""
        for process in self.processes():
            process.kill()
            process.join()

    def _finish_earlier(self, node: int) -> None:
        """Wait for what a node does already: a SuperNode answers the messages of a run one after
        the other.
        """
        for message_id, (message, connection, _) in self._answering.items():
            if message.metadata.dst_node_id == node and not connection.closed:
                connection.poll(60)
                self._reply(message_id)

    def _reply(self, message_id: str) -> Message | None:
        message, connection, process = self._answering[message_id]
        if connection.closed:
            return None
        with suppress(EOFError, ConnectionError):
            if not connection.poll():
                return None
            answer, context = pickle.loads(connection.recv_bytes())
            self.remember(message.metadata.dst_node_id, context.state)
            connection.close()
            if isinstance(answer, str):
                return Message(
                    Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, answer), reply_to=message
                )
            return answer  # type: ignore[no-any-return]
        connection.close()
        process.join()
        return Message(
            Error(ErrorCode.CLIENT_APP_CRASHED, "the process has ended"), reply_to=message
        )


def _work(connection: Connection, packed: bytes) -> None:
    """Answer one message in the new process."""
    torch.set_num_threads(1)
    assert len(STEPS) == 0
    message, context, site = pickle.loads(packed)
    os.environ.pop(SITE_ADDRESS_VARIABLE, None)
    os.environ.update(site.environment)
    if site.fault is not None:
        site.fault(message)
    answer: Any
    kept: Context = context
    try:
        answer = client_app(site.make_client)(message, context)
    except Exception as error:
        answer, kept = f"{type(error).__name__}: {error}", pickle.loads(packed)[1]
    connection.send_bytes(pickle.dumps((answer, kept)))
