"""Run a Flower app for some rounds: the ServerApp here, each message in a process of its own."""

import os
import re
import signal
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import ServerApp

from fedbn_flwr import wire
from fedbn_flwr.device import count_cores
from fedbn_flwr.doctor.check import ROUNDING
from fedbn_flwr.doctor.node import (
    WatchedAnswer,
    in_one_line,
    load_app,
    message_arrays,
    serve_message,
    weight_of,
)
from fedbn_flwr.doctor.observer import Network, NetworkObserver
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.server.grids import identify
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.worker import preload
from fedbn_flwr.state import Arrays

RunConfig = dict[str, Any]
#: what stands between spaces that are in no quotes
_PAIR = re.compile(r"""(?:[^ '"]|'[^']*'?|"[^"]*"?)+""")
#: functions that wait for nodes, and their variable that says for how many
WAITING = {
    "sample_nodes": "min_available_nodes",
    "wait_for": "num_clients",
    "wait_for_nodes": "wanted",
}


@dataclass(eq=False)
class Visit:
    """A message to a node, and what its process left."""

    node: int
    received: Arrays
    sent: Arrays = field(default_factory=dict)
    weight: float = 0.0
    network: Network | None = None
    error: str = ""


@dataclass
class AppRound:
    """The messages of a round."""

    trained: list[Visit] = field(default_factory=list)
    evaluated: list[Visit] = field(default_factory=list)
    #: the networks that the server called since the round's training began
    on_server: list[Network] = field(default_factory=list)
    #: what the server sent next, of whatever kind
    averaged: Arrays = field(default_factory=dict)
    #: of the largest number of an entry, what sending makes of it
    rounding: float = ROUNDING

    @property
    def visits(self) -> list[Visit]:
        """All messages to nodes."""
        return [*self.trained, *self.evaluated]

    @property
    def is_talk(self) -> bool:
        """Whether nothing was trained, sent or lost: SecAgg+ agrees on keys in such messages."""
        return not any(
            visit.network or visit.sent or visit.received or visit.error for visit in self.visits
        )

    @property
    def networks(self) -> list[tuple[Visit, Network]]:
        """What was trained."""
        return [(visit, visit.network) for visit in self.trained if visit.network]

    @property
    def evaluations(self) -> list[tuple[Network, str]]:
        """What was evaluated, and where."""
        on_nodes = [
            (visit.network, f" on node {visit.node}") for visit in self.evaluated if visit.network
        ]
        return on_nodes + [(network, " on the server") for network in self.on_server]


@dataclass
class AppHistory:
    """What was seen of an app."""

    rounds: list[AppRound]
    #: why the ServerApp ended before its rounds did; empty if it did not
    stopped: str = ""


class EndedError(BaseException):
    """The doctor has seen enough: no `except Exception` of an app may keep it."""


@dataclass(frozen=True)
class FlowerApp:
    """A folder with a `[tool.flwr.app]`."""

    folder: Path
    server: str
    client: str
    run_config: RunConfig

    @classmethod
    def read(cls, folder: Path, overrides: str = "") -> "FlowerApp":
        """Read pyproject.toml; `overrides` are those of `flwr run --run-config`."""
        path = folder / "pyproject.toml"
        if not path.is_file():
            raise UsageError(f"there is no {path}: name the folder of a Flower app")
        try:
            app = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]
            components = app["components"]
            server = str(components["serverapp"])
            client = str(components["clientapp"])
            config = dict(_flat(app.get("config", {})))
        except KeyError as error:
            raise UsageError(f"{path} has no {error} of [tool.flwr.app.components]") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is none of a Flower app: {in_one_line(error)}") from error
        for key, value in _overrides(overrides).items():
            if key not in config:
                raise UsageError(
                    f"--run-config: the app has no {key!r}; it has {', '.join(config) or 'no keys'}"
                )
            config[key] = value
        return cls(folder.resolve(), server, client, config)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _overrides(text: str) -> RunConfig:
    if text.endswith(".toml"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise UsageError(f"--run-config: there is no {path}")
        content = path.read_bytes()
    else:
        content = "\n".join(_PAIR.findall(text)).encode()
    try:
        return dict(_flat(tomllib.loads(content.decode())))
    except ValueError as error:
        raise UsageError(
            f"--run-config must be KEY=VALUE KEY=VALUE with TOML's values, or a .toml file: {error}"
        ) from error


def run_app(app: FlowerApp, nodes: int, rounds: int, seconds: float) -> AppHistory:
    """Run an app until its nodes have trained for some rounds, and return what was seen."""
    # the first optimizer of a process imports the second one, which takes as long as torch itself
    preload([serve_message.__module__, "torch._dynamo"])
    grid = WatchingGrid(app, nodes, rounds)

    def end(_: int, frame: FrameType | None) -> None:
        if not grid.ended:
            grid.stopped = f"it takes longer than {seconds / 60:g} minutes: pass --minutes"
        grid.end_processes()  # threads wait for them, and this one for the threads
        raise EndedError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with grid.observer:
            server: ServerApp = load_app(app.folder, app.server, ServerApp)
            server(grid, Context(1, 0, {}, RecordDict(), dict(app.run_config)))
    except EndedError:
        pass
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        grid.stopped = f"the ServerApp stopped: {in_one_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        grid.end_processes()
    return grid.history()


class WatchingGrid(InProcessGrid):
    """Answers each message in a process of its own, and takes note of what is sent.

    A round begins with a training message after other arrays came back, or to a node that the round
    has trained; older ServerApps send messages one by one, from threads.
    """

    def __init__(self, app: FlowerApp, nodes: int, rounds: int) -> None:
        super().__init__(ClientApp(), nodes, app.run_config)
        self.observer = NetworkObserver()
        #: why the ServerApp ended before its rounds did
        self.stopped = ""
        self.ended = False
        self._app = app
        self._rounds = rounds
        self._processes = get_context("forkserver")
        self._running = list[BaseProcess]()
        self._lock = Lock()
        self._history = list[AppRound]()
        self._underway = 0

    def history(self) -> AppHistory:
        """Return what was seen."""
        self._take_server()
        return AppHistory(self._history, self.stopped)

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes; ends the run if the app waits for more of them."""
        if self.ended:  # Flower's older interface has a thread that looks on
            return []
        nodes = list(super().get_node_ids())
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            wanted = frame.f_locals.get(WAITING.get(frame.f_code.co_name, ""), 0)
            if isinstance(wanted, int) and wanted > len(nodes):
                self._end(f"it waits for {wanted} nodes: pass --nodes {wanted}")
            frame = frame.f_back
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the messages, and keep the replies."""
        pushed = list(messages)
        ids = [identify(message) for message in pushed]
        with self._lock:
            visits = []
            for message in pushed:
                visits.append(self._begin(message))
                self._underway += 1  # the next one belongs to the same round
        with ThreadPoolExecutor(count_cores()) as threads:
            replies = list(threads.map(self._answer_apart, pushed, visits))
        with self._lock:
            self._replies |= zip(ids, replies, strict=True)
            self._underway -= len(pushed)
        return ids

    def _begin(self, message: Message) -> Visit:
        """Take note of a message before it is delivered."""
        arrays = message_arrays(message.content)
        visit = Visit(message.metadata.dst_node_id, arrays)
        kind = message.metadata.message_type.partition(".")[0]
        if message.metadata.message_type == wire.LAYERWISE:
            self._end(
                "exchanges inside a step need nodes whose processes stay, and here each message "
                "has a process of its own: pass another method"
            )
        if message.metadata.message_type == wire.GATHER:
            kind = "pass"
        if self._history and not self._underway and self._history[-1].is_talk:
            self._history.pop()
        now = None
        if self._history:
            now = self._history[-1]
        if now and now.trained and arrays and not now.averaged and not self._underway:
            begun = now.trained[0].received
            if kind != "train" or _differ(begun, arrays) or _is_in(now, visit.node):
                now.averaged = arrays
        if kind == "train":
            if now is None or now.averaged or _is_in(now, visit.node):
                self._take_server()
                if len(self._history) == self._rounds:
                    self._end("")
                now = AppRound()
                self._history.append(now)
            now.trained.append(visit)
        elif kind == "evaluate" and now is not None:
            now.evaluated.append(visit)
        return visit

    def _answer_apart(self, message: Message, visit: Visit) -> Message:
        """Let a process answer a message, and note what it leaves."""
        if self.ended:
            raise EndedError
        here, there = self._processes.Pipe()
        context = self.context(visit.node)
        arguments = (there, self._app.folder, self._app.client, message, context)
        process = self._processes.Process(target=serve_message, args=arguments)
        process.start()
        self._running.append(process)
        there.close()
        try:
            left: WatchedAnswer = here.recv()
        except EOFError:
            left = WatchedAnswer(None, RecordDict(), None, "its process died")
        process.join()
        visit.network = left.network
        if left.reply is None:
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, left.error)
            reply = Message(error, reply_to=message)
        else:
            reply = left.reply
            self._keep(visit.node, replace(context, state=left.state))
        if reply.has_content():
            visit.sent = message_arrays(reply.content)
            visit.weight = weight_of(reply.content)
        else:
            visit.error = str(reply.error.reason)
        identify(reply)
        return reply

    def end_processes(self) -> None:
        """End the processes of messages, and start no more."""
        self.ended = True
        for process in self._running:
            process.kill()

    def _take_server(self) -> None:
        """Note the networks that the server has called; those before any training are left out."""
        networks = self.observer.take()
        if self._history:
            self._history[-1].on_server += [network.of_layers() for network in networks]

    def _end(self, reason: str) -> None:
        """End the ServerApp, in the main thread, which may wait for this one."""
        self.ended = True
        self.stopped = reason
        if threading.current_thread() is threading.main_thread():
            raise EndedError
        os.kill(os.getpid(), signal.SIGALRM)


def _is_in(now: AppRound, node: int) -> bool:
    return any(visit.node == node for visit in now.trained)


def _differ(left: Arrays, right: Arrays) -> bool:
    if left.keys() != right.keys():
        return True
    return any(not np.array_equal(left[name], right[name], equal_nan=True) for name in left)
