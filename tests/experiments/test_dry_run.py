"""`--dry-run`: what would run, and what is not there."""

from pathlib import Path

import pytest
import torch

from fedbn_flwr.experiments import main
from tests.helpers.runs import run


def test_a_comparison_says_what_it_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    words = ["--methods", "fedavg,centralized,fedtan", "--seeds", "2", "--dry-run"]
    assert run("compare", *words, results_dir=str(folder)) == 0
    shown = capsys.readouterr().out
    # 2 seeds x 3 rounds x 2 steps x (2 clients + 1 node with all data + 2 clients)
    assert "3 cells, 60 client steps" in shown
    assert "?" not in shown
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [["compare", "--methods", "fedavg"], ["reproduce", "fixbn/table5"]])
def test_a_device_that_is_not_there_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*words, "--dry-run", "--device", "cuda"]
    assert main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "device 'cuda' is not available here" in line


def test_a_data_set_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--methods", "fedavg", "--dry-run", "--data-root", str(tmp_path), "--model", "mlp"]
    assert run("compare", *words, dataset="cifar10", results_dir=str(tmp_path / "results")) == 0
    shown = capsys.readouterr().out
    assert "data set 'cifar10' is not there: " in shown
    assert "?" not in shown.partition("data set")[0]
    assert run("compare", *words, "--local-epochs", "1", dataset="cifar10", results_dir=str(tmp_path / "results")) == 0
    assert "0 client steps where known" in capsys.readouterr().out
