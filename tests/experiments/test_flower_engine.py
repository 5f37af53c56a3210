"""The engine of `flwr run`: which one is taken, what is refused, and the same run as the command's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import UsageError, serve
from fedbn_flwr.experiments.client_side import client_fn
from fedbn_flwr.experiments.flower_run import RESULTS_VARIABLE
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.experiments.output.run_folder import read_json
from fedbn_flwr.server.round import Round
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.flower_simulation import InMemoryGrid
from tests.helpers.runs import OPTIONS, results, run

NODES = 3


def flower_run(folder: Path, grid: type[InProcessGrid] = InMemoryGrid, **changes: Any) -> Any:
    """Serve a run whose nodes are those of a simulation, or with another grid, of a deployment."""
    options: dict[str, Any] = {**OPTIONS, "clients": "0", "results-dir": str(folder)}
    options |= {key.replace("_", "-"): value for key, value in changes.items()}
    return serve(grid(client_app(client_fn), NODES, options), options)


def engine_of(folder: Path) -> str:
    return str(read_json(folder / "config.json")["asked"]["engine"])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog


@pytest.mark.parametrize(("method", "engine"), [("fedbn", "stacked"), ("fedtan:carry=true", "inprocess")])
def test_the_bits_are_those_of_the_command(method: str, engine: str, tmp_path: Path) -> None:
    flower_run(tmp_path / "flower", method=method, engine=engine)
    here: dict[str, Any] = {"clients": str(NODES), "results_dir": str(tmp_path / "here")}
    assert run("run", "--method", method, "--engine", engine, **here) == 0
    there, command = results(tmp_path / "flower"), results(tmp_path / "here")
    assert there == command
    personal = sorted((tmp_path / "flower" / "personal").glob("*"))
    assert (method == "fedbn") == bool(personal)


@pytest.mark.parametrize(
    ("method", "wanted", "why"),
    [
        ("fedtan", "stacked", "with exchanges at every BN layer: worker processes of this package"),
        ("fedavg", "ray", "without exchanges at every BN layer: Flower's simulation"),
    ],
)
def test_layerwise_methods_train_on_workers_by_default_and_a_run_keeps_its_engine(
    method: str, wanted: str, why: str, tmp_path: Path, shown: pytest.LogCaptureFixture
) -> None:
    flower_run(tmp_path, method=method)
    assert engine_of(tmp_path) == wanted
    assert f"Engine {wanted}, the default {why}" in shown.text
    # what another would bring
    assert f"; engine='{'ray' if wanted == 'stacked' else 'stacked'}' is " in shown.text
    assert ("client-resources do not apply" in shown.text) == (wanted == "stacked")
    # each round has a line with what there is to tell
    assert "Round 2 of 3: train-loss" in shown.text
    assert "accuracy" in next(line for line in shown.messages if line.startswith("Round 2 of 3"))
    shown.clear()
    flower_run(tmp_path, method=method)
    assert f"Engine {wanted}, as the run began" in shown.text
    other = {"ray": "stacked", "stacked": "ray"}[wanted]
    with pytest.raises(UsageError, match=f"its engine is '{wanted}', not '{other}'"):
        flower_run(tmp_path, method=method, engine=other)


@pytest.mark.parametrize("key", ["", "resume"])
def test_an_unfinished_run_goes_on_with_its_engine(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"method": "fedavg", "checkpoint_every": "1"}
    flower_run(tmp_path / "whole", engine="stacked", **options)
    record = Journal.record

    def fails(journal: Journal, now: Round, score: Any) -> Any:
        if now.number == 3:
            raise OSError("the disk is full")
        return record(journal, now, score)

    monkeypatch.setattr(Journal, "record", fails)
    with pytest.raises(OSError, match="the disk is full"):
        flower_run(tmp_path / "part", engine="stacked", **options)
    monkeypatch.setattr(Journal, "record", record)
    flower_run(tmp_path / "part", **{**options, **({key: str(tmp_path / "part")} if key else {})})
    assert engine_of(tmp_path / "part") == "stacked"
    assert results(tmp_path / "part") == results(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["stacked", "inprocess", "ray"])
def test_a_deployment_has_messages_only(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(UsageError, match=f"engine='{engine}' is for simulations: .* leave engine out")
    with refused:
        flower_run(tmp_path / "none", InProcessGrid, engine=engine)
    assert not (tmp_path / "none").exists()
    # nor a link to the run that would have gone on
    (tmp_path / "kept" / "7").mkdir(parents=True)
    with monkeypatch.context() as patched, refused:
        patched.setenv(RESULTS_VARIABLE, str(tmp_path / "kept"))
        flower_run(tmp_path / "none", InProcessGrid, engine=engine, resume="7")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["7"]
    flower_run(tmp_path / "some", InProcessGrid, engine="auto", method="fedtan")
    assert engine_of(tmp_path / "some") == "flower"


def test_names_and_clusters_are_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"unknown engine 'stakked'; did you mean 'stacked'\?"):
        flower_run(tmp_path / "none", engine="stakked")
    with pytest.raises(UsageError, match="workers=2 only works with the engines 'stacked' and 'inprocess'"):
        flower_run(tmp_path / "none", workers="2")
    with pytest.raises(UsageError, match="sites='north' chooses sites of a deployment, and a simulation has none"):
        flower_run(tmp_path / "none", engine="stacked", sites="north")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UsageError, match=r"RAY_ADDRESS=10.0.0.1:6379: .* use `fedbn-flwr run`"):
        flower_run(tmp_path / "none", engine="stacked")
    assert not (tmp_path / "none").exists()
    flower_run(tmp_path / "some", method="fedtan")
    assert engine_of(tmp_path / "some") == "ray"
    assert "Engine ray, the default with RAY_ADDRESS: " in shown.text
    # nor does a run go on there that began without the cluster
    monkeypatch.delenv("RAY_ADDRESS")
    flower_run(tmp_path / "begun", method="fedtan")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UsageError, match="engine='stacked' with RAY_ADDRESS"):
        flower_run(tmp_path / "begun", method="fedtan")


def test_the_nodes_are_counted_when_all_have_connected(tmp_path: Path) -> None:
    flower_run(tmp_path, engine="ray")
    assert json.loads((tmp_path / "summary.json").read_text())["clients"] == NODES
