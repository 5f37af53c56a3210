"""A Ray cluster of two nodes on this machine, reached through the loopback, and data that tell where they are used."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from fedbn_flwr.data import Data, load
from tests.helpers.checkout import BIN, run
from tests.helpers.processes import end

#: in the environment of the cluster's processes: the folder that they write to
FOLDER = "FEDBN_FLWR_TEST_CLUSTER"
#: one processor each, ports of their own, and nothing that is not needed
OPTIONS = (
    "--num-cpus=1 --num-gpus=0 --object-store-memory=80000000 --min-worker-port=0 --max-worker-port=0 "
    "--disable-usage-stats --include-log-monitor=false"
)


@contextmanager
def cluster(nodes: int = 2) -> Iterator[tuple[str, Path]]:
    """The address of a running cluster, and its folder; its processes, and no others, have ended afterwards."""
    # of a short name, since a socket's path has at most 107 characters
    folder, port = tempfile.mkdtemp(prefix="ray-"), free_port()
    # without RAY_TMPDIR, other commands of this machine would find this cluster and join it
    environment = {**os.environ, FOLDER: folder, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    address = f"127.0.0.2:{port}"
    try:
        for number in range(nodes):
            place = f"--address={address}" if number else f"--head --port={port} --include-dashboard=false"
            # not 127.0.0.1, in the place of which Ray takes the machine's address in its network
            host = f"--node-ip-address=127.0.0.{number + 2}"
            run(BIN / "ray", "start", host, *place.split(), *OPTIONS.split(), env=environment)
        yield address, Path(folder)
    finally:
        end(FOLDER, folder, patience=3)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def digits() -> Data:
    """The digits; a process of a cluster that loads them leaves a file with the name of its Ray node."""
    if FOLDER in os.environ and ray.is_initialized():
        (Path(os.environ[FOLDER]) / f"{ray.get_runtime_context().get_node_id()}.node").touch()
    return load("digits")


def nodes_seen(folder: Path) -> set[str]:
    """The Ray nodes on which clients were."""
    return {path.stem for path in folder.glob("*.node")}
