"""The benchmark of image files: it makes ImageNet's layout, and both loaders give as many images."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import image_loading
from fedbn_flwr.data import load


def test_both_loaders_load_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_loading, "CLASSES", 3)
    image_loading.main(["make", str(tmp_path), "--images", "60", "--pixels", "24", "16"])
    data = load(f"imagenet:{tmp_path}", image_size=8)
    assert torch.bincount(data.train.labels).tolist() == [20, 20, 20]
    assert torch.bincount(data.test.labels).tolist() == [1, 1, 1]
    loaders = (image_loading._ours, image_loading._image_folder)
    for begin in (make(tmp_path, 8, 2, 0) for make in loaders):
        assert [inputs.shape for inputs, _ in begin()] == [(20, 3, 8, 8)] * 2
    image_loading.main(["load", str(tmp_path), "--side", "8", "--batches", "2", "--decoders", "1", "--turns", "2"])
    result = json.loads(capsys.readouterr().out)
    assert {name: len(turns) for name, turns in result["turns"].items()} == {"imagefolder": 2, "this": 2}


@pytest.mark.slow
def test_the_peak_of_all_processes_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image_loading, "CLASSES", 2)
    image_loading.main(["make", str(tmp_path), "--images", "20", "--pixels", "16", "16"])
    options = ["--rounds", "1", "--clients", "2", "--partition", "iid", "--results-dir", str(tmp_path / "results")]
    options += ["--local-steps", "1", "--batch-size", "4", "--workers", "1"]
    image_loading.main(["train", str(tmp_path), "--side", "8", *options])
    assert json.loads("{" + capfd.readouterr().out.rpartition("{")[2])["peak-mb"] > 100
    assert (tmp_path / "results" / "summary.json").exists()
    config = json.loads((tmp_path / "results" / "config.json").read_text())["options"]
    assert (config["image-size"], config["workers"]) == (8, 1)
