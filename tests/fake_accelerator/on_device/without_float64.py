"""A device without float64, as Apple's: the CPU makes the sums that need it, and the log says so
once.
"""

import pytest
import torch

from fedbn_flwr.device import exact
from fedbn_flwr.experiments import main
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.strategies import REGISTRY
from tests.helpers.engine_comparison import Stacked, watching
from tests.helpers.harness import Federation, distance, make_float32_model
from tests.helpers.runs import command
from tests.strategies.test_contract import TABLE

ROUNDING = 1e-5
#: methods whose devices make such sums, or would
SUMS = ("fedavg", "fedtan", "feddna", "fednorm", "heterofl", "hbn", "fbn", "fedbs", "scaffold")


def test_the_device_has_none() -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, dtype=torch.float64).to("fake")


@pytest.mark.parametrize("grid", [pytest.param(InProcessGrid, marks=pytest.mark.slow), Stacked])
@pytest.mark.parametrize("name", SUMS)
def test_methods_agree_with_the_cpu(name: str, grid: type[InProcessGrid]) -> None:
    with watching() as watch:
        cpu, here = (
            Federation(make_float32_model(TABLE[name][1]), device=device, grid=kind).run(
                REGISTRY[name](**TABLE[name][0]), 2
            )
            for device, kind in (("cpu", InProcessGrid), ("fake", grid))
        )
    assert distance(cpu, here) < ROUNDING
    assert not [
        reason for reason in watch.reasons if "does not work on stacked models" not in reason
    ]
    assert not [text for text in watch.warnings if "go by messages" in text]


def test_the_log_says_so_once() -> None:
    exact.cache_clear()
    with watching() as watch:
        for _ in range(2):
            Federation(make_float32_model(), device="fake").run(REGISTRY["fedtan"](), 2)
    said = [text for text in watch.messages if "float64" in text]
    assert said == ["fake:0 has no float64: sums of moments and of exchanges are made on the CPU"]


def test_it_can_be_diagnosed(tmp_path: object) -> None:
    assert main(command("diagnose", device="auto", results_dir=str(tmp_path), rounds="1")) == 0
