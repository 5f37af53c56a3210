"""What is checked before the first round: data, shapes, layers; and what needs no warning."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbn_flwr.experiments import Config
from fedbn_flwr.experiments.checks import _warn_once
from fedbn_flwr.experiments.material import Material
from tests.helpers.runs import DATA, results, run, run_in

HERE = "tests.helpers.other_shapes"


@pytest.mark.parametrize("options", [{"method": "fedavg", "model": f"{HERE}:functional"}, {"method": "centralized+gn"}])
def test_a_method_that_does_without_bn_layers_takes_any_model(options: dict[str, str], tmp_path: Path) -> None:
    assert run("run", rounds="1", results_dir=str(tmp_path), **options) == 0


@pytest.mark.parametrize(("method", "engine"), [("fedtan", "inprocess"), ("fixbn:freeze-round=15", "stacked")])
def test_rows_of_numbers_are_trained_on(method: str, engine: str, tmp_path: Path) -> None:
    chosen = {"dataset": f"{HERE}:rows_of_numbers", "model": f"{HERE}:perceptron", "rounds": "20", "lr": "0.3"}
    assert run("run", engine=engine, method=method, results_dir=str(tmp_path), **chosen) == 0
    assert results(tmp_path)["summary"]["accuracy"] > 0.5


@pytest.mark.parametrize(("method", "times", "engine"), [("fedavg", 1, "stacked"), ("fedtan", 2, "inprocess")])
def test_what_no_node_can_do_is_said_without_a_traceback(
    method: str,
    times: int,
    engine: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flower_log: pytest.LogCaptureFixture,
) -> None:
    """A layer-wise step also says in the log which nodes failed in it."""
    given = {"method": method, "model": "mlp", "batch_size": "1", "engine": engine}
    assert run("run", results_dir=str(tmp_path), **given) == 1
    said = [*dict.fromkeys(flower_log.messages), capsys.readouterr().err.splitlines()[-1]]
    assert "".join(said).count("batch normalization cannot train on a mini-batch of 1 sample") == times
    assert not [record for record in flower_log.records if record.exc_info]


@pytest.mark.parametrize("method", ["fedbn", "hbn"])
def test_a_command_does_not_warn_of_what_stays_on_nodes(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert run("run", method=method, rounds="1", results_dir=str(tmp_path)) == 0
    assert not [record for record in caplog.records if "not trained" in record.getMessage()]


def test_outputs_of_no_class_are_said_once_and_count_as_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    _warn_once.cache_clear()
    chosen = {"model": f"{HERE}:wide", "methods": "fedavg,fedprox", "class_metrics": "f1,auc", "lr": "0"}
    assert run("compare", results_dir=str(tmp_path), **chosen) == 0
    line = f"model '{HERE}:wide' has 7 outputs for 4 classes: a prediction of none of them counts as wrong"
    assert caplog.messages.count(line) == 1
    summary = results(run_in(tmp_path, "fedavg"))["summary"]
    config = Config(dataset=DATA, model=f"{HERE}:wide")
    material = Material.of(config)
    inputs, labels = material.data.test.batch(torch.arange(40))
    with torch.no_grad():
        predicted = material.model(inputs).argmax(1)
    assert int(predicted.max()) > 3
    assert summary["accuracy"] == float((predicted == labels).double().mean())


def test_classes_that_nobody_has_and_a_single_seed_are_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    _warn_once.cache_clear()
    chosen = {"dataset": "digits", "partition": "classes:2", "clients": "3", "rounds": "1"}
    assert run("compare", "--methods", "fedavg,fedbn", results_dir=str(tmp_path), **chosen) == 0
    config = Config(partition="classes:2", clients=3)
    material = Material.of(config)
    held = set(material.data.train.labels[np.concatenate(material.partition)].tolist())
    few = ", ".join(str(number) for number in range(10) if number not in held)
    assert len(held) == 6
    line = f"no client has samples of 4 classes ({few}): classes:2 with 3 clients"
    assert [record.getMessage() for record in caplog.records].count(line) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(f"Caution: {line}.") == 1
    assert shown.count("One seed: a difference may be chance.") == 1
    assert run("compare", methods="fedavg,fedbn", seeds="2", rounds="1", results_dir=str(tmp_path / "all")) == 0
    assert not {"Caution:", "One"} & set(capsys.readouterr().out.split())
