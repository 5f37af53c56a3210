"""A Ray cluster of two nodes on this machine, reached through the loopback, and data that tell
where they are used.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.data import Data, load
from tests.helpers.checkout import BIN, run
from tests.helpers.ports import free_ports
from tests.helpers.processes import kill, kill_processes, processes_with
from tests.helpers.waiting import PATIENCE, wait_until

#: in the environment of the cluster's processes: the folder that they write to
FOLDER = "FEDBN_FLWR_TEST_CLUSTER"
#: ports of their own, and nothing that is not needed
OPTIONS = (
    "--num-gpus=0 --object-store-memory=80000000 --min-worker-port=0 --max-worker-port=0 "
    "--disable-usage-stats --include-log-monitor=false"
)
#: Ray takes a process that a busy machine leaves waiting for a minute for dead
PATIENT_RAY = {
    "RAY_worker_register_timeout_seconds": f"{PATIENCE:.0f}",
    "RAY_health_check_timeout_ms": f"{1000 * PATIENCE:.0f}",
    "RAY_gcs_server_request_timeout_seconds": f"{PATIENCE:.0f}",
    "RAY_agent_register_timeout_ms": f"{1000 * PATIENCE:.0f}",
}


@dataclass(frozen=True)
class Cluster:
    """A running cluster of `ray start`."""

    address: str
    folder: Path

    def processes(self, program: str = "") -> list[int]:
        """Return the ids of the cluster's processes whose program's name begins so."""
        return [
            one
            for one in processes_with(FOLDER, str(self.folder))
            if _program(one).startswith(program)
        ]

    def workers(self) -> list[int]:
        """Return the processes in which Flower's nodes answer."""
        return self.processes("ray::ClientAppActor")

    def end_workers(self) -> None:
        """End the workers of an earlier run: a run leaves the cluster some seconds before they end
        by themselves.
        """
        kill(self.workers())
        assert wait_until(lambda: not self.workers()), self.workers()

    def nodes_seen(self) -> set[str]:
        """Return the ids of the Ray nodes on which clients loaded `digits`."""
        return {path.stem for path in self.folder.glob("*.node")}


@contextmanager
def ray_cluster(nodes: int = 2, processors: int = 1) -> Iterator[Cluster]:
    """Start a cluster; its processes, and no others, have ended afterwards."""
    # of a short name, since a socket's path has at most 107 characters
    folder, port = tempfile.mkdtemp(prefix="ray-"), free_ports(1)[0]
    # without RAY_TMPDIR, other commands of this machine would find this cluster and join it
    own = {FOLDER: folder, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **PATIENT_RAY, **own}
    environment.pop("RAY_ADDRESS", None)
    address = f"127.0.0.2:{port}"
    try:
        for number in range(nodes):
            place = (
                f"--address={address}"
                if number
                else f"--head --port={port} --include-dashboard=false"
            )
            # not 127.0.0.1, in the place of which Ray takes the machine's address in its network
            host = f"--node-ip-address=127.0.0.{number + 2}"
            run(
                BIN / "ray",
                "start",
                host,
                *place.split(),
                f"--num-cpus={processors}",
                *OPTIONS.split(),
                env=environment,
            )
        yield Cluster(address, Path(folder))
    finally:
        kill_processes(FOLDER, folder)
        shutil.rmtree(folder, ignore_errors=True)


def digits() -> Data:
    """Load the digits; a process of a cluster that loads them leaves a file with the name of its
    Ray node.
    """
    import ray  # an extra, which tests of workers without it do not need

    if FOLDER in os.environ and ray.is_initialized():
        (Path(os.environ[FOLDER]) / f"{ray.get_runtime_context().get_node_id()}.node").touch()
    return load("digits")


def _program(process: int) -> str:
    try:
        return Path(Path(f"/proc/{process}/cmdline").read_text().split("\0")[0]).name
    except OSError:
        return ""
