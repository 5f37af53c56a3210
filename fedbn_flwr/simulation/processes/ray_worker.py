"""Workers in a Ray cluster: actors that answer over a connection of their own, as a process of this
machine does.

Ray places the actors, gives each its processors or its GPU, and ends them with the run. What the
grid asks and they answer passes Ray by: an exchange of a layer-wise step is as fast as between
processes of one machine.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedbn_flwr.device import accelerator_name
from fedbn_flwr.plugins.options import UsageError
from fedbn_flwr.simulation.processes.pipe import ObjectPipe
from fedbn_flwr.simulation.processes.worker import (
    WorkerDiedError,
    WorkerError,
    WorkerHandle,
    serve_grid,
)

#: seconds that a cluster has to reserve what all workers need, and to start a worker again
RESERVING = 10
STARTING = 120
#: seconds after which a machine that sends nothing at all is taken for dead
SILENCE = 20


class Place(NamedTuple):
    """Where a worker is, and what it works with."""

    address: tuple[str, int]
    host: str
    device: str


@contextmanager
def joined(address: str) -> Iterator[Mapping[str, float]]:
    """Join the cluster at an address, and leave it afterwards.

    Yields all that it has, such as `CPU` and `GPU`.
    """
    # otherwise Ray hides the GPU from workers that reserve no part of it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def free() -> dict[str, float]:
    """Return what the cluster has that nobody uses."""
    return dict(ray.available_resources())


class Cluster:
    """Room for workers in the cluster that this process has joined, reserved together.

    Each worker has a GPU (`gpu`), or else as many processors as it has threads.
    """

    def __init__(self, workers: int, threads: int, gpu: bool) -> None:
        if gpu:
            self.needs = {"CPU": 1.0, "GPU": 1.0}
        else:
            self.needs = {"CPU": float(max(threads, 1))}
        self.workers: list[RayWorker] = []
        self.room = placement_group([self.needs] * workers, strategy="SPREAD")
        if not self.room.wait(RESERVING):
            remove_placement_group(self.room)
            there = _listed({name: free().get(name, 0.0) for name in self.needs})
            raise UsageError(
                f"the Ray cluster has {there} free, and {workers} workers need "
                f"{_listed(self.needs)} each"
            )

    def __call__(self, index: int, threads: int) -> "RayWorker":
        """Start the worker of this number."""
        self.workers.append(RayWorker(index, threads, self))
        return self.workers[-1]

    def close(self) -> None:
        """Give the room back; the workers end with it."""
        remove_placement_group(self.room)


class RayWorker(WorkerHandle):
    """A Ray actor, in its part of the room that a `Cluster` has reserved.

    When it ends, or its machine, Ray finds another place with such a part. Nobody waits for that
    while others work.
    """

    def __init__(self, index: int, threads: int, cluster: Cluster) -> None:
        self._cluster = cluster
        self._proved = False
        self._alive = False
        #: requests to a worker that has not started yet
        self._held: list[tuple[str, Any]] = []
        super().__init__(index, threads)

    def ask(self, name: str, payload: Any) -> None:
        """Send a request, and do not wait, but for a worker that has not started yet and is
        needed.
        """
        self._held.append((name, payload))
        if self._connected or self._connect():
            while self._held:
                super().ask(*self._held.pop(0))

    def answer(self) -> Any:
        """Wait for the answer to the latest request."""
        if self._held:
            raise self._died()
        return super().answer()

    def restart(self) -> bool:
        """Start an actor in place of one that ended.

        One that waits for its place goes on waiting.
        """
        self._held.clear()
        return not isinstance(self._failure, GetTimeoutError) and super().restart()

    def end(self) -> None:
        """End the process."""
        self.hang_up()
        with suppress(RayError):
            ray.kill(self._actor)

    def where(self) -> str:
        """Say where this worker is."""
        if self._failure:
            return "not started"
        place: Place = ray.get(self._answer, timeout=STARTING)
        return f"{place.host}, {place.device}"

    def _start(self) -> ObjectPipe:
        self._proved |= self._alive
        self._alive = self._connected = False
        self._failure: Exception | None = None
        self._key = secrets.token_bytes(32)
        strategy = PlacementGroupSchedulingStrategy(self._cluster.room, self.index)
        needs = self._cluster.needs
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_restarts": 0}
        self._actor = _Actor.options(scheduling_strategy=strategy, **options).remote()
        self._answer = self._actor.listen.remote(self._key, sys.path)
        return ObjectPipe(Pipe()[0])  # until there is a connection

    def _connect(self) -> bool:
        """Connect with the worker, once it has started; return whether it has."""
        at_once = self._proved and any(other._connected for other in self._cluster.workers)
        try:
            place = ray.get(self._answer, timeout=0 if at_once else STARTING)
            self._actor.serve.remote(self._threads, logging.getLogger("flwr").level)
            connection = Client(place.address, authkey=self._key)
        except (RayError, OSError, EOFError) as error:
            self._failure = error
            return False
        _notice_silence(connection)
        self._pipe.close()
        self._pipe = ObjectPipe(connection)
        self._connected = True
        self._failure = None
        return True

    def _died(self) -> RuntimeError:
        if self._alive:
            return WorkerDiedError(f"on {self.where()} has ended")
        if isinstance(self._failure, GetTimeoutError):
            return WorkerDiedError("has not started yet: Ray may have no place for it")
        reason = str(self._failure or "it ended").strip().splitlines()[-1]
        if self._proved:
            return WorkerDiedError(f"could not start again: {reason}")
        return WorkerError(
            f"worker {self.index}: its Ray actor failed before it could do anything: {reason}"
        )


class _Listening:
    """What runs in the actor."""

    def listen(self, key: bytes, path: Sequence[str]) -> Place:
        """Wait for one connection from now on, at a port that only the holder of the key can use.

        Modules are also looked for in the folders of `path`.
        """
        sys.path += [folder for folder in path if folder not in sys.path]
        host = ray.util.get_node_ip_address()
        self._listener = Listener((host, 0), authkey=key)
        device = accelerator_name() or "CPU"
        address: Any = self._listener.address
        return Place(address, f"{socket.gethostname()} ({host})", device)

    def serve(self, threads: int, level: int) -> None:
        """Answer requests over this connection until it is closed."""
        with self._listener, self._listener.accept() as connection:
            _notice_silence(connection)
            serve_grid(connection, threads, level)


_Actor: Any = ray.remote(_Listening)


def _notice_silence(connection: Connection) -> None:
    """Send at once what is small, and take a machine that has gone without a word for dead."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 5),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", SILENCE // 5 - 1),
        ):
            if hasattr(socket, name):  # Linux has them
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE)


def _listed(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
