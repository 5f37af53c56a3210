"""One message of a Flower app, in a process of its own."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SType
from numpy.typing import NDArray

from fedbn_flwr.doctor.observer import Network, NetworkObserver, main_network, match
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.state import Arrays


@dataclass
class WatchedAnswer:
    """What a node's process leaves."""

    reply: Message | None
    state: RecordDict
    network: Network | None
    error: str = ""


def load_app(folder: Path, reference: str, kind: type[Any]) -> Any:
    """Return an app's `package.module:attribute`, from its folder."""
    os.chdir(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module, _, attribute = reference.partition(":")
    loaded = getattr(import_module(module), attribute, None)
    if not isinstance(loaded, kind):
        raise UsageError(f"{reference!r} in the app's pyproject.toml is no {kind.__name__}")
    return loaded


def serve_message(
    parent: Connection, folder: Path, reference: str, message: Message, context: Context
) -> None:
    """Answer a message, and hand over to the parent what is left."""
    torch.set_num_threads(1)  # as many messages as cores are answered at once
    parent.send(answer_watched(folder, reference, message, context))


def answer_watched(
    folder: Path, reference: str, message: Message, context: Context
) -> WatchedAnswer:
    """Answer a message as the app does, and tell what was seen of its network."""
    received = message_arrays(message.content)
    with NetworkObserver() as observer:
        try:
            app: ClientApp = load_app(folder, reference, ClientApp)
            reply = app(message, context)
        except Exception as error:
            return WatchedAnswer(None, RecordDict(), None, in_one_line(error))
        networks = observer.take()
    sent: Arrays = {}
    if reply.has_content():
        sent = message_arrays(reply.content)
    network = main_network(networks, received, sent)
    if network:
        network.received = match(received, network.start, network.parameters)
        network.sent = match(sent, network.end, network.parameters)
        _compare_with_sent(network, received, sent)
        network.statistics_share = _statistics_share(network)
        network = network.of_layers()
    return WatchedAnswer(reply, context.state, network)


def in_one_line(error: BaseException) -> str:
    """Return what an app has raised."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def named_arrays(content: RecordDict) -> dict[str, Array]:
    """Return the arrays of a message by name, with the record's name where two are alike."""
    arrays: dict[str, Array] = {}
    for record_name, record in content.array_records.items():
        for name, array in record.items():
            key = f"{record_name}.{name}" if name in arrays else name
            arrays[key] = array
    return arrays


def message_arrays(content: RecordDict) -> Arrays:
    """Return the numbers of a message's arrays by their names; other bytes are left out."""
    return {
        name: array.numpy()
        for name, array in named_arrays(content).items()
        if array.stype == SType.NUMPY
    }


def weight_of(content: RecordDict) -> float:
    """Return the number of samples that a reply names; 0 without one."""
    for record in content.metric_records.values():
        for name, value in record.items():
            if name.replace("_", "-") == "num-examples" and isinstance(value, int | float):
                return float(value)
    return 0.0


def _compare_with_sent(network: Network, received: Arrays, sent: Arrays) -> None:
    """Note what is left of the parameters' change in what is sent, and whether the change is."""
    names = sorted(network.parameters & network.sent.keys() & network.received.keys())
    if not names:
        return
    start = _joined(received[network.received[name]] for name in names)
    told = _joined(sent[network.sent[name]] for name in names)
    way = _joined(network.end[name] for name in names) - start
    if not way.any():
        return
    close = 1e-3 * np.abs(way).max()
    network.sends_changes = bool(np.abs(told - way).max() <= close)
    gone = told - start
    part = float(way @ gone / (way @ way))
    network.kept_change = None
    if np.abs(gone - part * way).max() <= close:
        network.kept_change = part


def _joined(arrays: Iterable[NDArray[Any]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in arrays])


def _statistics_share(network: Network) -> float:
    """Return the share of the squared norm of what training changed that is not the parameters'."""
    squares = {
        name: float(((network.end[name].astype(float) - value.astype(float)) ** 2).sum())
        for name, value in network.start.items()
    }
    whole = sum(squares.values())
    own = sum(square for name, square in squares.items() if name in network.parameters)
    return 1 - own / whole if whole else 0.0
