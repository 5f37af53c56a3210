"""The same seed gives the same model, bit for bit, in one process and on Flower's Ray simulation.

With one torch thread on both: sums are formed in another order by several.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedbn_flwr.experiments import main
from tests.helpers.runs import model_bytes, rounds

pytestmark = pytest.mark.xdist_group("ray")

#: three clients in two workers: a node's state goes from worker to worker
SHARED = ["--clients", "3", "--partition", "classes:4", "--rounds", "3", "--evaluate-every", "2", "--threads", "1"]
#: by what travels from worker to worker or is drawn: options of a method, a model and its training
CASES = {
    "node memory": ["--method", "fedbn", "--model", "small-cnn", "--augmentation", "crop"],
    "drawn nodes": ["--method", "scaffold:fraction-train=0.7", "--model", "mlp"],
    "a deep model": ["--model", "resnet20", "--fraction-train", "0.7", "--momentum", "0.9"],
}
#: of each of them something, in the time of one run
ALL_AT_ONCE = [*CASES["node memory"], "--fraction-train", "0.7", "--momentum", "0.9"]


def assert_same_files(options: Sequence[str], folder: Path) -> None:
    """Run on both engines, and compare every round's numbers and the model."""
    for engine in ("inprocess", "ray"):
        assert main(["run", *options, "--engine", engine, "--results-dir", str(folder / engine)]) == 0
    assert rounds(folder / "ray") == rounds(folder / "inprocess")
    assert model_bytes(folder / "ray") == model_bytes(folder / "inprocess")


@pytest.mark.usefixtures("nothing_left_of_ray", "only_composed")
def test_ray_gives_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert_same_files([*SHARED, *ALL_AT_ONCE], tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("case", CASES)
def test_more_methods_give_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    assert_same_files([*SHARED, *CASES[case]], tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_a_run_in_which_no_client_can_train_fails_on_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "ray", "--model", "mlp", "--batch-size", "1", "--results-dir", str(tmp_path)]
    assert main(["run", *SHARED, *options]) == 1
    assert "batch normalization cannot train on a mini-batch of 1 sample" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()
