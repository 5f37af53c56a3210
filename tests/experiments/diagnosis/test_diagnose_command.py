"""The command `diagnose`: what it concludes, what it writes, and its mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from fedbn_flwr.diagnosis import Diagnosis, Measurement
from fedbn_flwr.experiments import main
from fedbn_flwr.experiments.diagnose import suggestion
from fedbn_flwr.models import build
from tests.helpers.runs import run


def diagnosis(folder: Path, **options: str) -> dict[str, Any]:
    """What the command writes about the default model and digits."""
    assert (
        main(
            [
                "diagnose",
                *(f"--{key}={value}" for key, value in options.items()),
                f"--results-dir={folder}",
            ]
        )
        == 0
    )
    written: dict[str, Any] = json.loads((folder / "diagnosis.json").read_text())
    return written


def fedavg_error(written: dict[str, Any], column: str = "actual") -> float:
    return float(written[column]["errors"]["nothing"])


# ---- what it concludes ---------------------------------------------------------------------------


@pytest.mark.slow
def test_on_iid_digits_bn_is_fine_and_on_one_class_a_client_it_is_not(tmp_path: Path) -> None:
    common = {"clients": "10", "batches": "2"}
    alike = [
        diagnosis(tmp_path / f"iid{seed}", partition="iid", seed=str(seed), **common)
        for seed in range(2)
    ]
    apart = diagnosis(tmp_path / "one class", partition="classes:1", **common)
    assert all("BN is fine as it is (fedavg)" in written["suggestion"] for written in alike)
    assert "FedTAN (fedtan)" in apart["suggestion"]
    # samples dealt out at random are what i.i.d. clients have, whoever had them before: all are
    # draws of one error
    chance = [fedavg_error(written, "shuffled") for written in (*alike, apart)]
    mean = np.mean(chance)
    assert np.std(chance, ddof=1) < 0.1 * mean
    assert [fedavg_error(written) for written in alike] == pytest.approx([mean] * 2, rel=0.2)
    assert fedavg_error(apart) > 5 * mean


@pytest.mark.slow
def test_a_trained_model_keeps_its_layers(tmp_path: Path) -> None:
    save_file(
        dict(build("small-cnn", in_channels=1, image_size=8).state_dict()),
        tmp_path / "weights.safetensors",
    )
    common = {"partition": "classes:1", "init-from": str(tmp_path / "weights.safetensors")}
    for size, steps in ((32, 20), (4, 5)):
        options = {"batch-size": str(size), "local-steps": str(steps), **common}
        said = diagnosis(tmp_path / str(size), **options)["suggestion"]
        assert "This suggests the last layer in closed form (fed3r), in one exchange, or BN" in said
        assert "FedWon" not in said


@pytest.mark.parametrize(
    ("size", "error", "chance", "steps", "domains", "wanted"),
    [
        (8, 0.1, 0.1, 5, 0, "FedWon (fedwon), which needs none, if the layers may change"),
        (32, 0.5, 0.5, 5, 0, "BN is fine"),
        (32, 0.4, 0.5, 5, 0, "BN is fine"),
        (32, 0.41, 0.1, 5, 0, "BN is fine"),
        (32, 0.42, 0.1, 5, 0, "FedTAN (fedtan)"),
        (32, 0.5, 0.4, 1, 0, "BN is fine"),
        (32, 0.9, 0.4, 5, 0, "FedTAN (fedtan)"),
        (32, 0.9, 0.4, 20, 0, "With 20 local steps this suggests FedWon (fedwon) if"),
        (32, 0.9, 0.4, 20, 0, "else carried corrections (fedtan:carry=true) if"),
        (32, 0.9, 0.4, 5, 5, "fedbn, or standalone"),
        (32, 0.9, 0.4, 5, 1, "FedTAN (fedtan)"),
        (32, 0.1, 0.1, 5, 5, "BN is fine"),
    ],
)
def test_suggestion(
    size: float, error: float, chance: float, steps: int, domains: int, wanted: str
) -> None:
    found, shuffled = (
        Measurement([], {"nothing": value}, [], [], 1.0, [value] * 2) for value in (error, chance)
    )
    line = suggestion(Diagnosis([1.0], [size], found, shuffled), domains, steps)
    assert wanted in line
    assert "his suggests" in line


@pytest.mark.parametrize(
    ("domains", "can_solve", "has_head"), [(0, True, True), (5, True, False), (0, False, False)]
)
def test_a_network_that_was_trained_gets_a_head_where_targets_differ(
    domains: int, can_solve: bool, has_head: bool
) -> None:
    found, shuffled = (
        Measurement([], {"nothing": value}, [], [], 1.0, [value] * 2) for value in (0.9, 0.4)
    )
    diagnosed = Diagnosis([1.0], [32], found, shuffled)
    line = suggestion(diagnosed, domains, is_trained=True, can_solve=can_solve)
    assert "fedavg:freeze-bn=true" in line
    assert ("fed3r" in line) == has_head


@pytest.mark.parametrize(
    # by hand: 0.5^2 is 0.09 above the threshold's square, and so is the mean of 0.1^2 and 0.7^2,
    # plus or minus 0.24
    ("draws", "is_certain"),
    [([0.5], False), ([0.5, 0.5], True), ([0.1, 0.7], False), ([0.1, 0.7] * 20, True)],
)
def test_mini_batches_that_disagree_suggest_nothing(draws: list[float], is_certain: bool) -> None:
    error = math.sqrt(sum(value**2 for value in draws) / len(draws))
    found = Measurement([], {"nothing": error}, [], [], 1.0, draws)
    shuffled = Measurement([], {"nothing": 0.0}, [], [], 1.0, [0.0] * len(draws))
    line = suggestion(Diagnosis([1.0], [32], found, shuffled))
    assert ("his suggests" in line) == is_certain
    assert (f"more mini-batches than {len(draws)} are needed" in line) != is_certain


@pytest.mark.parametrize(("partition", "is_suggested"), [("domain:1", True), ("classes:2", False)])
@pytest.mark.sampled(1)
def test_clients_of_one_domain_each_get_models_of_their_own(
    tmp_path: Path, partition: str, is_suggested: bool
) -> None:
    common = {"dataset": "digits-domains", "model": "mlp", "batches": "4"}
    line = diagnosis(tmp_path, partition=partition, clients="5", **common)["suggestion"]
    assert all((name in line) == is_suggested for name in ("fedbn", "standalone", "fednorm"))


@pytest.mark.usefixtures("drawn")
def test_the_command_writes_numbers_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for batches in ("1", "2"):
        assert (
            run(
                "diagnose",
                batches=batches,
                clients="3",
                fraction_train="0.7",
                results_dir=str(tmp_path),
            )
            == 0
        )
        found.append(json.loads((tmp_path / "diagnosis.json").read_text()))
    one, written = found
    assert (one["batches"], written["batches"]) == (1, 2)
    assert one["batch-sizes"] == written["batch-sizes"]
    assert fedavg_error(one) != fedavg_error(written)
    assert len(written["clients"]) == len(written["weights"]) == 2
    assert sum(written["weights"]) == pytest.approx(1)
    assert written["actual"]["errors"]["nothing"] > 0.01
    assert written["actual"]["errors"]["both"] < 1e-10
    assert {"layers", "errors", "deviation", "heterogeneity", "gradient-norm", "by-draw"} == set(
        written["shuffled"]
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert written["suggestion"] in shown
    assert "heterogeneity V" in shown
