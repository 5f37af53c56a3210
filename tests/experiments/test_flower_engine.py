"""`flwr run`: its options, which engine is taken, what is refused, and the same run as the
command's.
"""

import json
import logging
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import Config, UsageError, resolve, serve
from fedbn_flwr.experiments.checkpoint import checkpoint_round
from fedbn_flwr.experiments.client_side import bound_client_fn, client_fn
from fedbn_flwr.experiments.flower_run import RESULTS_VARIABLE
from fedbn_flwr.experiments.method import all_options
from fedbn_flwr.experiments.output.recorder import Journal
from fedbn_flwr.experiments.output.run_folder import RunFolder, read_json
from fedbn_flwr.server.round import Round
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import ROOT
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
def shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog


@pytest.mark.parametrize(
    ("method", "engine"), [("fedbn", "stacked"), ("fedtan:carry=true", "inprocess")]
)
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
@pytest.mark.sampled(1)
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
@pytest.mark.sampled(1)
def test_an_unfinished_run_goes_on_with_its_engine(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_deployment_has_messages_only(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = pytest.raises(
        UsageError, match=f"engine='{engine}' is for simulations: .* leave engine out"
    )
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
    for grid in (InMemoryGrid, InProcessGrid):
        with pytest.raises(
            UsageError, match="workers=2 only works with the engines 'stacked' and 'inprocess'"
        ):
            flower_run(tmp_path / "none", grid, workers="2")
    with pytest.raises(
        UsageError, match="sites='north' chooses sites of a deployment, and a simulation has none"
    ):
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


# ---- the run configuration -----------------------------------------------------------------------


def test_the_run_config_has_every_option_with_the_commands_default_and_type() -> None:
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    shared = Config().to_mapping()
    # a strategy's own option is not given by default
    wanted = {
        "engine": "auto",
        "reuse": False,
        "anew": False,
        **shared,
        **dict.fromkeys(all_options(), ""),
    }
    # Flower hands values over as they stand there
    there, here = (
        {key: (type(value), value) for key, value in each.items()}
        for each in (app["config"], wanted)
    )
    assert there == here


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"method": "fedtan", "batch-size": "31"}, True),
        ({"method": "feddna", "batch-size": "8"}, True),
        ({"method": "fedtan", "batch-size": "32"}, False),
        ({"method": "fedavg", "batch-size": "8"}, False),
    ],
)
def test_statistics_of_small_batches_are_warned_about(
    options: dict[str, str], warned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "fedbn_flwr.experiments.flower_run.log",
        lambda _, text, *values: lines.append(text % values),
    )
    run_config = {**OPTIONS, **options, "rounds": "1", "results-dir": str(tmp_path)}
    serve(InProcessGrid(client_app(bound_client_fn(resolve(run_config).config)), 2), run_config)
    warnings = [line for line in lines if "FedTAN's authors advise at least 32" in line]
    assert len(warnings) == warned
    assert all(f"(batch-size={options['batch-size']})" in line for line in warnings)


def test_results_of_flwr_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # three rounds, as soon as it is known how many nodes there are
    work = {"clients": "0", "local-epochs": "1", "budget-epochs": "3", "rounds": "9"}
    options: dict[str, Any] = {
        **OPTIONS,
        **work,
        "checkpoint-every": "1",
        "results-dir": str(tmp_path),
    }

    def start(**changes: str) -> Any:
        app = client_app(bound_client_fn(resolve(options, federation=True).config))
        return serve(InProcessGrid(app, 2), {**options, **changes})

    with monkeypatch.context() as stopped:
        stopped.setattr(RunFolder, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start()
    assert checkpoint_round(tmp_path) == 3
    assert start()["rounds"] == 3
    first = (tmp_path / "summary.json").read_bytes()
    monkeypatch.setattr(RunFolder, "finish", Mock(side_effect=KeyboardInterrupt))
    start()
    with pytest.raises(UsageError, match=r"its lr is 0.1, not 0.3 \(give another results-dir\)"):
        start(lr="0.3")
    assert (tmp_path / "summary.json").read_bytes() == first


def test_equal_numbers_of_other_types_are_other_options() -> None:
    def start(replacement: Any) -> None:
        given: dict[str, Any] = {**OPTIONS, "replacement": replacement}
        client_fn(Context(1, 0, {"partition-id": 0, "num-partitions": 2}, RecordDict(), given))

    start(True)
    for wrong in (1, 1.0):
        with pytest.raises(UsageError, match="replacement must be true or false"):
            start(wrong)
