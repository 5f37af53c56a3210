"""A server and two sites as plain processes on the loopback, from the compose file: TLS, node keys,
same bits.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedbn_flwr.models import build
from tests.helpers.federation import OPTIONS, assert_same_results
from tests.helpers.loopback import LoopbackFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


def test_a_run_has_the_bits_of_one_in_process(loopback: LoopbackFederation, tmp_path: Path) -> None:
    assert_same_results(
        *loopback.both(
            {**OPTIONS, "method": "fedavg", "statistics": "exact", "rounds": 1}, tmp_path
        )
    )


def test_the_head_of_a_trained_network_is_solved_at_sites(
    loopback: LoopbackFederation, tmp_path: Path
) -> None:
    """Of timm, with weights of a file here, and a head of each site's own."""
    weights = tmp_path / "network.safetensors"
    start = build("timm:test_efficientnet", num_classes=10, in_channels=3, seed=5).state_dict()
    save_file(start, weights)
    asked = {
        "method": "fed3r-personal",
        "model": "timm:test_efficientnet",
        "image-size": 32,
        "init-from": str(weights),
    }
    there, here = loopback.both({**OPTIONS, **asked, "rounds": 3}, tmp_path)
    assert_same_results(there, here)
    end = load_file(there / "model.safetensors")
    changed = {name for name in end if not torch.equal(end[name], start[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert len((there / "rounds.jsonl").read_text().splitlines()) == 1
