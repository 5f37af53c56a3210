"""Nodes in several processes: which process does what, and what becomes of processes that die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.data.prefetch import decode
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from fedbn_flwr.simulation.processes.worker import OwnShare, Worker, WorkerError, WorkerHandle
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.transports import message_records as layerwise_wire
from tests.helpers.checkout import ROOT
from tests.helpers.harness import SIZES, Federation, make_model
from tests.helpers.obedient_nodes import answers, obeying, send
from tests.helpers.processes import MARK, is_alive, kill_processes, processes_with, wait_for_end
from tests.helpers.waiting import wait_until


@pytest.fixture
def two_workers() -> Iterator[WorkersGrid]:
    with WorkersGrid(partial(obeying, 5), 5, 2) as grid:
        yield grid


@pytest.fixture
def grid() -> Iterator[WorkersGrid]:
    """This process and a worker."""
    with WorkersGrid(partial(obeying, 5), 5, 2, here=True) as grid:
        yield grid


# ---- which process does what ---------------------------------------------------------------------


@pytest.mark.parametrize("here", [False, True])
def test_nodes_stay_in_processes_the_first_of_which_may_be_this_one(here: bool) -> None:
    with WorkersGrid(partial(obeying, 5), 5, 2, here=here) as grid:
        told = [reply.content.config_records["answer"] for reply in send(grid, *["threads"] * 5)]
        assert [answer["process"] for answer in told] == [
            grid.process_ids[index % 2] for index in range(5)
        ]
        assert (grid.process_ids[0] == os.getpid()) == here
        assert {answer["threads"] for answer in told if answer["process"] != os.getpid()} == {1}


class Place:
    """A request for images that tells the process that decodes it."""

    def decode(self) -> tuple[Tensor, None]:
        return torch.tensor(os.getpid()), None


def decoding_process() -> int:
    """The process that decodes, where one worker was asked for."""
    ((process, _),) = decode([Place()], 1)  # type: ignore[list-item]
    return int(process)


def decoding(partitions: Sequence[int]) -> InProcessGrid:
    """Make a grid of nodes in a process that decodes images by itself."""
    assert decoding_process() == os.getpid()
    return obeying(2, partitions)


@pytest.mark.parametrize("kind", [OwnShare, Worker])
def test_a_worker_decodes_images_by_itself(kind: type[WorkerHandle]) -> None:
    worker = kind(0, 1)
    worker.ask("open", (decoding, [0]))
    worker.answer()
    worker.end()
    # no worker any more
    assert decoding_process() != os.getpid()


@pytest.mark.slow
def test_a_process_that_has_others_decode_ends_with_them() -> None:
    process = get_context("forkserver").Process(target=decoding_process, daemon=False)
    process.start()
    try:
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_there_are_not_more_processes_than_nodes_and_each_may_have_variables_of_its_own() -> None:
    def start(index: int, threads: int) -> Worker:
        return Worker(index, threads, {"CUDA_VISIBLE_DEVICES": f"{index}"})

    with WorkersGrid(partial(obeying, 2), 2, 7, start=start) as grid:
        assert len(grid.process_ids) == 2
        assert [answer[2] for answer in answers(send(grid, "threads", "threads"))] == ["0", "1"]


# ---- processes that die --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "how"), [("die", "was killed by signal 9"), ("leave", "ended with exit code 3")]
)
def test_a_worker_that_dies_is_an_error_of_its_nodes_and_starts_anew(
    grid: WorkersGrid, flower_log: pytest.LogCaptureFixture, word: str, how: str
) -> None:
    send(grid, *["hello"] * 5)
    before = grid.process_ids
    replies = send(grid, "hello", "hello", "hello", word, "hello")
    assert [reply.has_error() for reply in replies] == [False, True, False, True, False]
    assert replies[1].error.code == ErrorCode.UNKNOWN
    assert replies[1].error.reason == f"the process of worker 1 {how}"
    assert [reply.metadata.src_node_id for reply in replies] == list(grid.get_node_ids())
    said = {record.getMessage() for record in flower_log.records if "orker" in record.getMessage()}
    assert said == {f"Worker 1 {how}: it is started again, its 2 nodes without state"}
    # the others' state is as it was
    assert [answer[0] for answer in answers(send(grid, *["hello"] * 5))] == [3, 1, 3, 1, 3]
    assert not is_alive(before[1])
    assert grid.process_ids[0] == before[0]


def test_the_first_worker_may_die_if_it_is_another_process(two_workers: WorkersGrid) -> None:
    replies = send(two_workers, "hello", "hello", "die", "hello", "hello")
    assert [reply.has_error() for reply in replies] == [True, False, True, False, True]
    assert [answer[0] for answer in answers(send(two_workers, *["hello"] * 5))] == [1, 2, 1, 2, 1]


def test_states_are_saved_without_those_of_a_worker_that_died(
    grid: WorkersGrid, tmp_path: Path
) -> None:
    send(grid, *["hello"] * 5)
    os.kill(grid.process_ids[1], signal.SIGKILL)
    assert wait_until(lambda: not is_alive(grid.process_ids[1]))
    grid.save_states(tmp_path / "half")
    # an idle one is noticed with the next request, and its nodes are there again
    assert not any(reply.has_error() for reply in send(grid, *["hello"] * 5))
    grid.save_states(tmp_path / "whole")
    saved = {
        name: sorted(path.stem for path in (tmp_path / name).iterdir())
        for name in ("half", "whole")
    }
    assert saved == {"half": ["0", "2", "4"], "whole": ["0", "1", "2", "3", "4"]}
    grid.restore_states(tmp_path / "half")
    assert [answer[0] for answer in answers(send(grid, *["hello"] * 5))] == [2, 1, 2, 1, 2]


def test_a_failure_in_this_process_leaves_no_answer_of_another_behind() -> None:
    with WorkersGrid(partial(obeying, 5), 5, 2, here=True) as grid:
        send(grid, *["hello"] * 5)
        own, other = grid._workers
        with pytest.raises(WorkerError, match="worker 0: RuntimeError: it has no layer-wise step"):
            # the other one fails, too, and its answer has to be read
            grid._ask_all("replies", {own: None, other: None})
        assert [answer[0] for answer in answers(send(grid, *["hello"] * 5))] == [2, 2, 2, 2, 2]


class KillsItself:
    """Ends its process, once, in the middle of the first layer-wise step of partition 1."""

    def __init__(self, flag: Path) -> None:
        self.flag, self.app = flag, client_app(Federation(make_model()).client)

    def __call__(self, message: Message, context: Context) -> Message:
        turn: Any = message.content.get(layerwise_wire.POSITION, {})
        if (
            turn.get("index") == 2
            and context.node_config["partition-id"] == 1
            and not self.flag.exists()
        ):
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.app(message, context)


def killed_once(flag: Path, partitions: Sequence[int]) -> InProcessGrid:
    """Nodes of the harness's federation, one of which kills its process."""
    return InProcessGrid(KillsItself(flag), len(SIZES), partitions=partitions)  # type: ignore[arg-type]


def test_a_layerwise_step_goes_on_without_a_worker_that_died(tmp_path: Path) -> None:
    with WorkersGrid(partial(killed_once, tmp_path / "flag"), len(SIZES), 2, here=True) as grid:
        strategy = FedTAN()
        found = Federation(make_model()).run(strategy, grid=grid, rounds=2)
    assert (tmp_path / "flag").exists()
    assert all(torch.isfinite(value).all() for value in found.values())
    # the first round without the nodes of the worker, the second one with all
    assert len(strategy.training.replies) == len(SIZES)


# ---- processes that must not be left -------------------------------------------------------------


@pytest.mark.parametrize("here", [False, True])
def test_a_closed_grid_leaves_no_process_and_answers_no_more(here: bool) -> None:
    grid = WorkersGrid(partial(obeying, 5), 5, 2, here=here)
    send(grid, *["hello"] * 5)
    processes = others(grid)
    assert len(processes) == 2 - here
    assert all(is_alive(process) for process in processes)
    grid.close()
    grid.close()
    assert not any(is_alive(process) for process in processes)
    with pytest.raises(WorkerError, match="the grid is closed"):
        send(grid, "hello")


def test_a_grid_that_is_forgotten_or_interrupted_leaves_no_process() -> None:
    grid = WorkersGrid(partial(obeying, 5), 5, 2, here=True)
    processes = others(grid)
    del grid
    assert wait_until(lambda: not any(is_alive(process) for process in processes))
    grid = WorkersGrid(partial(obeying, 5), 5, 2, here=True)
    processes = others(grid)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    with pytest.raises(KeyboardInterrupt):
        send(grid, f"interrupt {os.getpid()}", "hello")
    signal.signal(signal.SIGALRM, before)
    assert not any(is_alive(process) for process in processes)


def others(grid: WorkersGrid) -> list[int]:
    """The grid's processes but for this one."""
    return [process for process in grid.process_ids if process != os.getpid()]


def failing(partitions: Sequence[int]) -> InProcessGrid:
    raise FileNotFoundError(f"no data for {list(partitions)}")


def leaving(partitions: Sequence[int]) -> InProcessGrid:
    os._exit(4)


def test_a_worker_that_cannot_begin_says_why() -> None:
    with (
        WorkersGrid(failing, 5, 2, here=True) as grid,
        pytest.raises(WorkerError, match=r"worker 0: FileNotFoundErr"),
    ):
        send(grid, "hello")
    with (
        WorkersGrid(failing, 5, 2) as grid,
        pytest.raises(WorkerError, match=r"FileNotFoundError: no data for \[0, 2"),
    ):
        send(grid, "hello")
    with (
        WorkersGrid(leaving, 5, 2) as grid,
        pytest.raises(WorkerError, match="ended with exit code 4 before"),
    ):
        send(grid, "hello")


PARENT = """
import signal
from functools import partial
from fedbn_flwr.simulation.processes.worker import preload
from fedbn_flwr.simulation.processes.process_grid import WorkersGrid
from tests.helpers.obedient_nodes import obeying, question

if __name__ == "__main__":
    # a shell lets what it starts in the background ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preload(["tests.helpers.obedient_nodes"])
    grid = WorkersGrid(partial(obeying, 4), 4, 2, here={here})
    grid.send_and_receive([question(node) for node in grid.get_node_ids()])
    print("ready", flush=True)
    grid.send_and_receive([question({idle}), question({asleep}, "sleep")])
"""


def test_workers_leave_an_interrupt_to_this_process(two_workers: WorkersGrid) -> None:
    send(two_workers, *["hello"] * 5)
    for process in two_workers.process_ids:
        os.kill(process, signal.SIGINT)
    assert answers(send(two_workers, *["hello"] * 5)) == [(2, "hello", index) for index in range(5)]


#: a signal, whether the parent is the first worker, and the node in the middle of its message
ENDS = [
    (signal.SIGKILL, False, 1001),
    pytest.param(signal.SIGINT, False, 1001, marks=pytest.mark.slow),
    pytest.param(signal.SIGKILL, True, 1000, marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, True, 1001, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("number", "here", "asleep"), ENDS)
def test_workers_end_with_their_parent(
    number: signal.Signals, here: bool, asleep: int, tmp_path: Path
) -> None:
    """In the middle of a message. Ctrl-C reaches the whole group of processes."""
    (tmp_path / "parent.py").write_text(PARENT.format(here=here, asleep=asleep, idle=2001 - asleep))
    environment = {**os.environ, MARK: str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        assert parent.stderr is not None
        try:
            assert [parent.stdout.readline() for _ in range(2)] == ["ready\n", "asleep\n"]
            assert len(processes_with(MARK, str(tmp_path))) >= 3
            (os.killpg if number == signal.SIGINT else os.kill)(parent.pid, number)
            ended = wait_for_end(MARK, str(tmp_path))
        finally:
            kill_processes(MARK, str(tmp_path))
        errors = parent.stderr.read()
    assert ended
    # the workers have nothing to say about Ctrl-C
    assert errors.count("Traceback") == (number == signal.SIGINT)
