"""Flower takes only options that `pyproject.toml` lists: it must list them all, with the defaults of the command."""

import json
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import Config, UsageError, resolve, serve, server_side
from fedbn_flwr.experiments.checkpoint import checkpoint_round
from fedbn_flwr.experiments.client_side import bound_client_fn
from fedbn_flwr.experiments.config import FEDERATION
from fedbn_flwr.experiments.method import all_options
from fedbn_flwr.experiments.output.run_folder import RunFolder
from fedbn_flwr.plugins.options import Value
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import ROOT
from tests.helpers.runs import OPTIONS


@pytest.fixture(scope="module")
def wanted() -> dict[str, Value]:
    shared = {key: FEDERATION.get(key, value) for key, value in Config().to_mapping().items()}
    # a strategy's own option is not given by default
    return {**shared, **dict.fromkeys(all_options(), "")}


@pytest.fixture(scope="module")
def run_config() -> dict[str, Any]:
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return dict(app["config"])


def test_every_option_is_in_the_run_config_and_nothing_else(
    run_config: dict[str, Any], wanted: dict[str, Value]
) -> None:
    missing = [f"{key} = {json.dumps(value)}" for key, value in wanted.items() if key not in run_config]
    assert not missing, "[tool.flwr.app.config] lacks:\n" + "\n".join(missing)
    unknown = sorted(set(run_config) - set(wanted))
    assert not unknown, f"[tool.flwr.app.config] has options that do not exist: {unknown}"


def test_defaults_are_those_of_the_command(run_config: dict[str, Any], wanted: dict[str, Value]) -> None:
    # with their types: Flower hands values over as they stand here
    there = {key: (type(value), value) for key, value in wanted.items() if key in run_config}
    assert {key: (type(value), value) for key, value in run_config.items()} == there


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
    monkeypatch.setattr(server_side, "log", lambda _, text, *values: lines.append(text % values))
    run_config = {**OPTIONS, **options, "rounds": "1", "results-dir": str(tmp_path)}
    serve(InProcessGrid(client_app(bound_client_fn(resolve(run_config).config)), 2), run_config)
    warnings = [line for line in lines if "FedTAN's authors advise at least 32" in line]
    assert len(warnings) == warned
    assert all(f"mini-batches of {options['batch-size']} samples" in line for line in warnings)


def test_results_of_flwr_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # three rounds, as soon as it is known how many nodes there are
    work = {"clients": "0", "local-epochs": "1", "budget-epochs": "3", "rounds": "9"}
    options: dict[str, Any] = {**OPTIONS, **work, "checkpoint-every": "1", "results-dir": str(tmp_path)}

    def start(**changes: str) -> Any:
        app = client_app(bound_client_fn(resolve(options).config))
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
