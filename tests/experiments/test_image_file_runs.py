"""Runs that segment streets: from files, and in stacks."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.image_sets import write_cityscapes
from tests.helpers.runs import run


def test_a_run_on_cityscapes_files_streams_them_and_reports_the_mean_iou(tmp_path: Path) -> None:
    home = write_cityscapes(tmp_path / "streets")
    options = {"dataset": f"cityscapes:{home}", "image-size": "16", "partition": "city", "clients": "2"}
    how = {"model": "small-fcn", "augmentation": "random-crop", "optimizer": "adam", "image-workers": "1"}
    assert run("run", **options, **how, results_dir=str(tmp_path / "results")) == 0
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert 0 < summary["mean-iou"] < summary["accuracy"] < 1
    assert list(summary["domain-accuracy"]) == ["frankfurt"]  # the cities of training are not tested


def test_stacked_clients_segment_streets_as_each_does_alone(tmp_path: Path) -> None:
    options = {"dataset": "streets:cities=3:images=8", "partition": "city", "clients": "3", "model": "small-fcn"}
    how = {"augmentation": "random-crop", "rounds": "2", "batch-size": "4", "method": "fixbn:freeze-round=1"}
    models, scores = [], []
    for engine in ("inprocess", "stacked"):
        folder = tmp_path / engine
        assert run("run", **options, **how, engine=engine, results_dir=str(folder)) == 0
        models.append(load_file(folder / "model.safetensors"))
        scores.append(json.loads((folder / "summary.json").read_text())["mean-iou"])
    for name, value in models[0].items():
        np.testing.assert_allclose(models[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
