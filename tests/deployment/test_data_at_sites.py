"""A deployment whose sites have folders of data: the bits of a run on all data together, and what
is refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedbn_flwr import state
from fedbn_flwr.deployment.sent_log import read_log
from fedbn_flwr.experiments.sites.own_model import load_own_model
from tests.helpers.checkout import copy_checkout
from tests.helpers.federation import app_hash, command
from tests.helpers.loopback import LoopbackFederation
from tests.helpers.runs import run_in
from tests.helpers.site_folders import CLASSES, write_sites

SITES = ("north", "south", "west")
OPTIONS: dict[str, Any] = {"model": "small-cnn", "local-steps": 2, "batch-size": 4, "seed": 3}
PARTITION = "dirichlet:0.5"
#: the server averages no BN that sites keep, unless it has test data for it
METHOD = "fedbn:mean-personal=false"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]

Deployment = tuple[LoopbackFederation, Path]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    whole, folders = write_sites(
        tmp_path_factory.mktemp("images"), PARTITION, len(SITES), OPTIONS["seed"]
    )
    data = dict(zip(SITES, folders, strict=True))
    folder = tmp_path_factory.mktemp("data-at-sites")
    with LoopbackFederation(folder, SITES, data, only_own_app=True) as federation:
        federation.register()
        yield federation, whole


def test_a_run_has_the_bits_of_one_on_all_data(deployment: Deployment, tmp_path: Path) -> None:
    federation, whole = deployment
    at_sites = {"dataset": "sites", "classes": ",".join(CLASSES), "class-metrics": "f1,auc"}
    options = {**OPTIONS, "method": METHOD, "rounds": 2}
    number = federation.submit({**options, **at_sites})
    assert federation.await_end(number) == "finished:completed"
    shared = {**options, "dataset": f"folder:{whole}", "partition": PARTITION, "clients": 3}
    words = [word for key, value in shared.items() for word in (f"--{key}", value)]
    command("run", *words, "--engine", "inprocess", "--device", "cpu", "--results-dir", tmp_path)
    one, other = (
        folder / "model.safetensors" for folder in (federation.results(number), run_in(tmp_path))
    )
    assert one.read_bytes() == other.read_bytes()
    sent = _sent(federation, number)
    assert {row["app"] for row in sent} == {app_hash(federation.app)}
    assert {row["round"] for row in sent if row["message"] == "train"} <= {1, 2}
    groups = [row["arrays"]["arrays"]["names"] for row in sent if "arrays" in row.get("arrays", {})]
    # BN stays at the sites
    assert [any("running_mean" in name for name in names) for names in groups] == [False, False]
    own = load_own_model(federation.kit("south") / "models" / number / "south.safetensors")
    shared = load_file(one)
    bn = state.group_keys(own.model, "bn")
    # the model of the last round, and the BN that the server has never seen
    for name, value in own.model.state_dict().items():
        assert torch.equal(value, shared[name]) == (name not in bn), name


def _sent(federation: LoopbackFederation, number: str) -> list[dict[str, Any]]:
    """Return what the site south has sent in a run."""
    command("site", "log", federation.kit("south"))
    return [
        row
        for row in read_log(federation.kit("south") / "log" / "sent.jsonl")
        if row["run"] == number
    ]


def test_another_app_does_not_run(deployment: Deployment, tmp_path: Path) -> None:
    federation, _ = deployment
    other = copy_checkout(tmp_path / "fedbn-flwr")
    with (other / "apps" / "client.py").open("a") as file:
        file.write("# changed\n")
    number = federation.submit({**OPTIONS, "dataset": "sites", "classes": ",".join(CLASSES)}, other)
    assert federation.await_end(number) == "finished:failed"
    reason = f"this site does not allow the app {app_hash(other)}"
    assert [row["error"] for row in _sent(federation, number)] == [reason]
    assert reason in " ".join(federation.log(number).split())
