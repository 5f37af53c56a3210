"""Three sites that answer only under masks, with pinned keys, as processes on the loopback."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr.experiments.output.run_folder import read_rounds
from tests.helpers.federation import OPTIONS, command
from tests.helpers.loopback import LoopbackFederation, has_proxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("deployment"),
    pytest.mark.skipif(not has_proxy(), reason="nginx is not installed"),
]


def test_runs_are_those_in_the_clear_and_nothing_else_leaves_a_site(tmp_path: Path) -> None:
    sites = ("north", "south", "west")
    with LoopbackFederation(tmp_path, sites, secure=True) as federation:
        federation.register()
        for method in ("fedavg", "fedtan"):
            options: dict[str, Any] = {**OPTIONS, "method": method, "model": "small-cnn", "rounds": 2, "clients": 3}
            number = federation.submit({**options, "secure": True})
            assert federation.await_end(number) == "finished:completed"
            words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
            command("run", *words, "--engine", "inprocess", "--device", "cpu", "--results-dir", tmp_path / method)
            assert len(read_rounds(federation.results(number))) == 2
            hidden, plain = (
                load_file(folder / "model.safetensors") for folder in (federation.results(number), tmp_path / method)
            )
            assert all(torch.allclose(hidden[name], plain[name], atol=1e-5) for name in plain)
        number = federation.submit({**OPTIONS, "method": "fedavg", "rounds": 1, "clients": 3})
        assert federation.await_end(number) == "finished:failed"
        assert "this site answers only under masks: secure=true" in federation.log(number)
    for site in sites:
        for line in (federation.kit(site) / "log" / "sent.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert set(row.get("arrays", {})) <= {"masked"}
            assert row.get("metrics", {}).get("num-examples", 0) == 0
