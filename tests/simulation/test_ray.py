"""On Ray, of one's own or a cluster that is there already: the bits of one process, and machines
that die.

`--engine ray` is Flower's simulation; workers in a cluster are processes of this project. All with
one torch thread: sums are formed in another order by several.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from flwr.common.constant import ErrorCode

from fedbn_flwr.experiments import main, resolve
from fedbn_flwr.experiments.engines import run_on_ray
from fedbn_flwr.simulation.processes import ray_worker
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import WorkerError
from tests.helpers.checkout import ROOT
from tests.helpers.engine_comparison import memories, memory_difference
from tests.helpers.harness import SIZES, Federation, distance, make_model
from tests.helpers.obedient_nodes import answers, obeying, send
from tests.helpers.processes import kill
from tests.helpers.ray_cluster import Cluster, ray_cluster
from tests.helpers.runs import model_bytes, rounds, run_in
from tests.helpers.waiting import wait_until
from tests.simulation.test_engines import ended, nodes_of
from tests.strategies.test_contract import make

pytestmark = pytest.mark.xdist_group("ray")

#: three clients in two workers: a node's state goes from worker to worker
SHARED = [
    "--clients",
    "3",
    "--partition",
    "classes:4",
    "--rounds",
    "3",
    "--evaluate-every",
    "2",
    "--threads",
    "1",
]
#: what travels from worker to worker or is drawn
METHOD = ["--method", "fedbn", "--model", "small-cnn", "--augmentation", "crop"]
ALL_AT_ONCE = [*METHOD, "--fraction-train", "0.7", "--momentum", "0.9"]


def assert_same_files(options: Sequence[str], folder: Path) -> None:
    """Run on both engines, and compare every round's numbers and the model."""
    for engine in ("inprocess", "ray"):
        assert (
            main(["run", *options, "--engine", engine, "--results-dir", str(folder / engine)]) == 0
        )
    assert rounds(folder / "ray") == rounds(folder / "inprocess")
    assert model_bytes(folder / "ray") == model_bytes(folder / "inprocess")


@pytest.mark.usefixtures("only_composed")
def test_ray_gives_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster(1, processors=2) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert_same_files([*SHARED, *ALL_AT_ONCE], tmp_path)


# ---- a cluster that is there already -------------------------------------------------------------


@pytest.fixture(autouse=True)
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # Flower puts `sys.path` there for Ray's workers
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def asked_of_flower(
    address: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What `--engine ray` would have Flower do with this address in the environment."""
    found: list[dict[str, Any]] = []
    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(
        "flwr.simulation.run_simulation", lambda *_, **options: found.append(options)
    )
    with pytest.raises(IndexError):  # nothing was run, so there is no result
        run_on_ray(resolve({"clients": 3}), folder)
    return found[0]


@pytest.mark.parametrize("address", [None, "auto", "host:port"])
def test_a_run_has_ray_for_itself_or_joins_the_cluster_in_the_environment(
    address: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By itself, Ray would join whatever cluster was last started on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        options = asked_of_flower(
            there if address == "host:port" else address, tmp_path, monkeypatch
        )
    wanted = {None: "local", "auto": "auto", "host:port": there}[address]
    assert options["num_supernodes"] == 3
    assert options["backend_config"]["init_args"] == {"address": wanted}


@pytest.mark.parametrize("named", [True, False], ids=["port", "no number"])
def test_a_cluster_that_is_not_there(
    named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # bound, and so nobody else's, but nobody listens
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1]) if named else "door"
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert main(["run", "--engine", "ray", "--results-dir", str(tmp_path)]) == 2
    assert f"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:{port}: " in capsys.readouterr().err


@pytest.mark.slow
def test_clients_run_on_all_nodes_and_leave_the_cluster_for_the_next_run(
    joined: Cluster, tmp_path: Path
) -> None:
    options = [
        "--dataset",
        "tests.helpers.ray_cluster:digits",
        "--clients",
        "4",
        "--replacement",
        "true",
    ]
    assert_same_files(
        [*SHARED, *options, "--method", "fixbn:freeze-round=1", "--model", "mlp"], tmp_path
    )
    assert len(joined.nodes_seen()) == 2
    assert len(joined.processes("raylet")) == 2


# ---- workers in a cluster ------------------------------------------------------------------------


@contextmanager
def room(cluster: Cluster, workers: int = 2) -> Iterator[ray_worker.Cluster]:
    with ray_worker.joined(cluster.address):
        reserved = ray_worker.Cluster(workers, threads=1, gpu=False)
        yield reserved
        reserved.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbn", "fed3r", "fedtan"])
def test_ray_workers_give_the_bits_of_one_process(
    name: str, joined: Cluster, tmp_path: Path
) -> None:
    with (
        room(joined) as start,
        WorkersGrid(partial(nodes_of, "bn"), len(SIZES), 2, start=start) as grid,
    ):
        found = Federation(make_model()).run(make(name), 3, grid, momentum=0.9)
        kept = memories(grid)
        # the workers' machines have no such folder: what nodes keep comes and goes over the
        # connection
        grid.save_states(tmp_path / "states")
        saved = sorted(path.name for path in (tmp_path / "states").glob("*"))
        grid.restore_states(tmp_path / "none")
        assert not any(memories(grid))
        grid.restore_states(tmp_path / "states")
        assert memory_difference(memories(grid), kept) == 0
        assert {worker.where().partition(" ")[2] for worker in start.workers} == {
            "(127.0.0.2), CPU",
            "(127.0.0.3), CPU",
        }
    assert distance(found, ended(name).model) == memory_difference(kept, ended(name).kept) == 0
    assert len(saved) == sum(map(bool, kept))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error_of_its_nodes_and_starts_anew(
    joined: Cluster, flower_log: pytest.LogCaptureFixture
) -> None:
    with room(joined) as start, WorkersGrid(partial(obeying, 5), 5, 2, start=start) as grid:
        send(grid, *["hello"] * 5)
        where = start.workers[1].where()
        replies = send(grid, "hello", "hello", "hello", "die", "hello")
        assert [reply.has_error() for reply in replies] == [False, True, False, True, False]
        assert replies[1].error.code == ErrorCode.UNKNOWN
        assert replies[1].error.reason == f"the process of worker 1 on {where} has ended"
        # nobody waits for the new worker: its nodes are there again once it is
        assert wait_until(lambda: not send(grid, "hello", "hello")[1].has_error(), pause=0.5)
        assert [answer[0] for answer in answers(send(grid, *["hello"] * 5))][1::2] == [2, 1]
    assert (
        f"Worker 1 on {where} has ended: it is started again, its 2 nodes without state"
        in flower_log.messages
    )


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(
    joined: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def listen(self, *_: object) -> None:
            raise ImportError("no module named 'medical'")

    monkeypatch.setattr(ray_worker, "_Actor", ray.remote(Broken))
    with room(joined) as start, WorkersGrid(partial(obeying, 2), 2, 2, start=start) as grid:
        assert [worker.where() for worker in start.workers] == ["not started"] * 2
        with pytest.raises(
            WorkerError,
            match=r"^worker 0: its Ray actor failed before .*: .*no module named 'medical'$",
        ):
            send(grid, "hello", "hello")


@pytest.mark.slow
def test_a_cluster_without_room_is_one_line(
    joined: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["run", "--workers", "3", "--clients", "4", "--results-dir", str(tmp_path / "results")]
        )
        == 2
    )
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "fedbn-flwr: the Ray cluster has 2 CPU free, and 3 workers need 1 CPU each"


#: runs the command as its own process, which can be killed
COMMAND = "import sys; from fedbn_flwr.experiments import main; sys.exit(main(sys.argv[1:]))"


def start_run(cluster: Cluster, folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "run",
        "--workers",
        "3",
        "--clients",
        "6",
        "--model",
        "small-cnn",
    ]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    return subprocess.Popen(
        [*command, "--results-dir", str(folder), *options],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def rounds_done(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob("*/rounds.jsonl"))


@pytest.mark.slow
def test_machines_that_go_away_in_mid_run(tmp_path: Path) -> None:
    with ray_cluster(3) as cluster:
        options = [
            "--rounds",
            "200",
            "--evaluate-every",
            "1",
            "--checkpoint-every",
            "1",
            "--method",
            "fedbn",
        ]
        run = start_run(cluster, tmp_path, *options)
        # not the first: it is the head, which the cluster cannot do without
        for number in (1, 2):
            done = rounds_done(tmp_path)
            assert wait_until(lambda done=done: rounds_done(tmp_path) > done + 3)  # type: ignore[misc]
            raylets = cluster.processes("raylet")
            kill(raylets[-1:])
            assert wait_until(lambda number=number: len(cluster.processes("raylet")) == 3 - number)  # type: ignore[misc]
        _, errors = run.communicate()
    assert run.returncode == 0, errors
    seconds = [
        json.loads(line)["seconds"]
        for line in (run_in(tmp_path) / "rounds.jsonl").read_text().splitlines()
    ]
    assert len(seconds) == 200
    # there is no room to start a worker again, and no round waits for it
    assert max(seconds) < ray_worker.STARTING / 2
    assert errors.count("has ended: it is started again, its 2 nodes without state") == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_actor_is_left_of_a_run_that_is_stopped(how: signal.Signals, tmp_path: Path) -> None:
    with ray_cluster(2, processors=3) as cluster:
        run = start_run(cluster, tmp_path, "--rounds", "10000", "--evaluate-every", "1")
        assert wait_until(lambda: rounds_done(tmp_path) > 3)
        assert cluster.processes("ray::_Listening")
        run.send_signal(how)
        run.communicate()
        assert wait_until(lambda: not cluster.processes("ray::_Listening"))
        with ray_worker.joined(cluster.address) as has:
            assert wait_until(lambda: ray_worker.free().get("CPU") == has["CPU"] == 6)
