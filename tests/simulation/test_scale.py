"""Thousands of clients: what is in memory does not grow with them, and what they remember is the
same on disk.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.client import BNClient
from fedbn_flwr.clientapp import client_app
from fedbn_flwr.data import Data
from fedbn_flwr.experiments import UsageError, resolve, serve
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.config import DataOptions
from fedbn_flwr.experiments.material import load_data
from fedbn_flwr.experiments.output.run_folder import RunFolder
from fedbn_flwr.server.sampling import ASKED_AT_ONCE, Roster
from fedbn_flwr.simulation.in_process import FIRST_NODE_ID, InProcessGrid
from tests.helpers.checkout import ROOT
from tests.helpers.runs import results, run
from tests.helpers.toys import toy_cnn, toy_split


def remembering() -> ClientApp:
    """Stores the word that it is told, and says what it knew; `forget` empties its state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        known = (
            str(context.state.config_records["known"]["word"]) if "known" in context.state else ""
        )
        word = str(message.content.config_records["config"]["word"])
        context.state["known"] = ConfigRecord({"word": word})
        if word == "forget":
            context.state.clear()
        return Message(RecordDict({"answer": ConfigRecord({"known": known})}), reply_to=message)

    return app


def tell(grid: InProcessGrid, partition: int, word: str) -> str:
    content = RecordDict({"config": ConfigRecord({"word": word})})
    (reply,) = grid.send_and_receive([Message(content, FIRST_NODE_ID + partition, "train")])
    return (
        str(reply.error.reason)
        if reply.has_error()
        else str(reply.content.config_records["answer"]["known"])
    )


def stored(grid: InProcessGrid) -> int:
    return len(grid._states)


@pytest.fixture(params=["memory", "folder"])
def grid(request: pytest.FixtureRequest, tmp_path: Path) -> InProcessGrid:
    """So many nodes that none of them may cost anything."""
    return InProcessGrid(
        remembering(), 10**9, state_dir=tmp_path if request.param == "folder" else None
    )


def test_only_what_nodes_store_is_kept(grid: InProcessGrid) -> None:
    assert stored(grid) == 0
    assert tell(grid, 7, "seven") == ""
    assert tell(grid, 10**9 - 1, "last") == ""
    assert tell(grid, 7, "again") == "seven"
    assert stored(grid) == 2
    assert grid.context(FIRST_NODE_ID + 7).state.config_records["known"]["word"] == "again"
    assert grid.context(FIRST_NODE_ID + 8).node_config == {
        "partition-id": 8,
        "num-partitions": 10**9,
    }
    assert stored(grid) == 2


def test_an_emptied_state_is_not_kept(grid: InProcessGrid) -> None:
    tell(grid, 7, "seven")
    assert tell(grid, 7, "forget") == "seven"
    assert stored(grid) == 0
    assert tell(grid, 7, "seven") == ""
    assert tell(grid, 8, "forget") == ""


@pytest.mark.parametrize("partitions", [range(2, 8, 3), [2, 5], (5, 2)])
def test_a_grid_may_hold_some_of_the_nodes(partitions: Any) -> None:
    grid = InProcessGrid(remembering(), 8, partitions=partitions)
    assert list(grid.get_node_ids()) == [FIRST_NODE_ID + partition for partition in partitions]
    assert grid.context(FIRST_NODE_ID + 5).node_config == {"partition-id": 5, "num-partitions": 8}
    assert tell(grid, 5, "five") == ""
    assert tell(grid, 3, "three").startswith("KeyError")


# ---- on disk -------------------------------------------------------------------------------------


def test_every_kind_of_record_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    grid = InProcessGrid(remembering(), 3, state_dir=tmp_path)
    context = grid.context(FIRST_NODE_ID)
    arrays = {
        "weight": torch.randn(3, 2, dtype=torch.float64),
        "count": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }
    context.state["arrays"] = ArrayRecord(arrays)
    context.state["numbers"] = MetricRecord({"loss": 0.1, "several": [1, 2]})
    context.state["words"] = ConfigRecord({"yes": True, "bytes": b"\0", "text": "ä"})
    grid.remember(FIRST_NODE_ID, context.state)
    found = grid.context(FIRST_NODE_ID).state
    assert found == context.state
    assert found is not context.state


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = InProcessGrid(remembering(), 3, state_dir=tmp_path)
    tell(grid, 1, "first")

    def full(path: Path, content: bytes) -> int:
        path.open("wb").write(content[:3])
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="no space left"):
            tell(grid, 1, "second")
    assert tell(grid, 1, "third") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["1.records"]


def test_a_new_run_begins_with_nothing_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    first = InProcessGrid(remembering(), 4, state_dir=tmp_path)
    for partition in range(4):
        tell(first, partition, "old")
    (tmp_path / "1.records.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    # another process may hold the other partitions of the same run
    second = InProcessGrid(remembering(), 4, partitions=[0, 1], state_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2.records",
        "3.records",
        "notes.txt",
    ]
    assert tell(second, 0, "new") == ""
    assert tell(first, 3, "new") == "old"


@pytest.mark.slow
def test_runs_whose_folders_have_the_same_name_do_not_share_what_nodes_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comparison trains between two rounds of the first."""

    def train(folder: Path, states: str, **options: str) -> None:
        options |= {"state_dir": str(tmp_path / states), "partition": "classes:2", "workers": "1"}
        assert run("compare", "--methods", "fedbn", results_dir=str(folder), **options) == 0

    train(tmp_path / "alone", "states of one")
    record, other = RunFolder.round, tmp_path / "other"

    def one_between(folder: RunFolder, row: Mapping[str, Any]) -> None:
        record(folder, row)
        if row["round"] == 1 and not other.exists():
            train(other, "shared", lr="0.3")

    monkeypatch.setattr(RunFolder, "round", one_between)
    train(tmp_path / "first", "shared")
    assert other.exists()
    assert results(tmp_path / "first") == results(tmp_path / "alone")


def test_a_state_dir_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", results_dir=str(tmp_path), state_dir=f"{__file__}/states") == 2
    assert "state-dir" in capsys.readouterr().err


def test_a_state_dir_is_refused_where_flower_keeps_the_state(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only works with the engines 'stacked' and 'inprocess'"):
        serve(InProcessGrid(remembering(), 2), {"state-dir": str(tmp_path / "states")})
    assert not (tmp_path / "states").exists()


# ---- who takes part ------------------------------------------------------------------------------


def test_thousands_are_asked_some_at_a_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Watched(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            ids = super().push_messages(messages)
            asked.append(len(self._replies))
            return ids

    model, split = toy_cnn(), toy_split()

    def client(context: Context) -> BNClient:
        return BNClient(model, split, partition_id=int(context.node_config["partition-id"]))

    nodes, roster = ASKED_AT_ONCE + 20, Roster(5)
    grid = Watched(client_app(client), nodes)
    found = roster.describe(grid, list(grid.get_node_ids()))
    assert asked == [ASKED_AT_ONCE, 20]
    assert [item.partition for item in found.values()] == list(range(nodes))
    assert stored(grid) == 0
    # what all say alike is in memory once
    assert len({id(item.parameters) for item in found.values()}) == 1
    assert roster.describe(grid, list(grid.get_node_ids())) == found
    assert len(asked) == 2


def test_options_are_read_once_for_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def counted(options: DataOptions) -> Data:
        calls.append(options)
        return load_data(options)

    monkeypatch.setattr("fedbn_flwr.experiments.material.load_data", counted)
    options = {"dataset": "synthetic:n=90:test=10", "clients": 9, "partition": "iid", "seed": 123}
    make = bound_client_fn(resolve(options).config)
    grid = InProcessGrid(remembering(), 9)
    assert [len(make(grid.context(node)).indices) for node in grid.get_node_ids()] == [10] * 9
    assert len(calls) == 1


# ---- a whole run, in a process of its own --------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from fedbn_flwr.experiments import main
assert main(sys.argv[1:]) == 0
# not `ru_maxrss`, which begins with the peak of the process that started this one
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) / 1024)
"""


def peak_of(folder: Path, *options: str) -> float:
    """Return the peak memory of a run in a process and a folder of its own, in MiB."""
    shared = [
        "--partition",
        "iid",
        "--local-steps",
        "1",
        "--batch-size",
        "20",
        "--evaluate-every",
        "100",
    ]
    words = [sys.executable, "-c", PROGRAM, "run", *shared, *options, "--results-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_ten_thousand_clients_take_little_more_memory_than_a_hundred(tmp_path: Path) -> None:
    many = [
        "--dataset",
        "synthetic:n=200000",
        "--clients",
        "10000",
        "--fraction-train",
        "0.01",
        "--rounds",
        "10",
    ]
    few = ["--dataset", "synthetic:n=200000", "--clients", "100", "--rounds", "10"]
    fewest = ["--dataset", "synthetic:n=2000", "--clients", "100", "--rounds", "10"]
    cases = {"large": many, "same data": few, "small": fewest}
    large, same_data, small = (
        peak_of(tmp_path / name, *options) for name, options in cases.items()
    )
    assert large < 1.5 * small
    assert large < 1.2 * same_data


@pytest.mark.slow
def test_what_clients_remember_on_disk_is_not_in_memory(tmp_path: Path) -> None:
    """SCAFFOLD's control variates, 60 kB a client."""
    shared = [
        "--method",
        "scaffold",
        "--dataset",
        "synthetic:n=8000",
        "--clients",
        "4000",
        "--rounds",
        "15",
    ]
    shared += ["--fraction-train", "0.025"]
    in_memory = peak_of(tmp_path / "memory", *shared)
    on_disk = peak_of(tmp_path / "disk", *shared, "--state-dir", str(tmp_path / "states"))
    files = list((tmp_path / "states").glob("*/*.records"))
    assert len(files) > 1000
    assert in_memory - on_disk > 0.6 * sum(file.stat().st_size for file in files) / 2**20
