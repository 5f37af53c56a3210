"""Flower takes only options that `pyproject.toml` lists: it must list them all, with the defaults of the command."""

import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.clientapp import client_app
from fedbn_flwr.experiments import Config, UsageError, flower_run, resolve, serve
from fedbn_flwr.experiments.checkpoint import checkpoint_round
from fedbn_flwr.experiments.client_side import bound_client_fn, client_fn
from fedbn_flwr.experiments.method import all_options
from fedbn_flwr.experiments.output.run_folder import RunFolder
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.checkout import ROOT
from tests.helpers.runs import OPTIONS


def test_the_run_config_has_every_option_with_the_commands_default_and_type() -> None:
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    shared = Config().to_mapping()
    # a strategy's own option is not given by default
    wanted = {"engine": "auto", **shared, **dict.fromkeys(all_options(), "")}
    # Flower hands values over as they stand there
    there, here = ({key: (type(value), value) for key, value in each.items()} for each in (app["config"], wanted))
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
    monkeypatch.setattr(flower_run, "log", lambda _, text, *values: lines.append(text % values))
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
