"""A run that died at any moment and is resumed has the files of a run that did not."""

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbn_flwr.experiments import main
from tests.helpers.deaths import Death, dying, going_on, run_in_process
from tests.helpers.runs import command, results, run_in

#: methods and options that keep something on the server, on the nodes, or both
CASES: dict[str, dict[str, Any]] = {
    "nodes' BN and momentum": {
        "method": "fedbn",
        "momentum": "0.9",
        "momentum_state": "local",
        "engine": "inprocess",
        "record_dynamics": "2",
    },
    "nodes' states in files": {"method": "fedbn", "engine": "inprocess", "state_dir": "states"},
    "control variates": {"method": "scaffold", "engine": "stacked", "clients": "4", "fraction_train": "0.5"},
    "server optimizer": {"method": "fedavg", "server_optimizer": "yogi", "engine": "stacked"},
    "freeze round": {"method": "fixbn:freeze-round=2", "engine": "stacked"},
    "unseen domain": {
        "method": "fedbn",
        "dataset": "digits-domains",
        "unseen": "real",
        "partition": "domain",
        "clients": "4",
        "engine": "stacked",
    },
    "layer-wise": {"method": "fedtan", "engine": "stacked", "momentum": "0.9", "momentum_state": "global"},
}
#: what nodes keep, what the server keeps, and both
USUAL = ["nodes' states in files", "server optimizer", "layer-wise"]
MORE_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in USUAL]
SMALL = {"model": "mlp", "rounds": "5", "checkpoint_every": "2"}


class Whole(NamedTuple):
    """A run that did not die: its results, and how many moments it had to die at."""

    case: str
    results: dict[str, Any]
    moments: int


def words(case: str, folder: Path) -> Sequence[str]:
    options = {**SMALL, **CASES[case]}
    if "state_dir" in options:
        options["state_dir"] = str(folder.parent / options["state_dir"])
    return command("run", results_dir=str(folder), **options)


def written(folder: Path) -> dict[str, Any]:
    """Return what is in a run's folder, without times and the folder's own name."""
    folder = run_in(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("results-dir", "state-dir"):
        del config["options"][key]
    # a run's own, and the test's program where it runs in its process
    assert config.pop("command")
    dynamics = [path.read_text() for path in folder.glob("dynamics.jsonl")]
    return {**results(folder), "config": config, "dynamics": dynamics}


@pytest.fixture(scope="module", params=[*USUAL, *MORE_CASES])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with dying(0) as moments:
        assert main(words(request.param, folder)) == 0
    return Whole(request.param, written(folder), moments.count)


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deaths=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_the_moment_of_death_does_not_matter(uninterrupted: Whole, tmp_path: Path, deaths: list[float]) -> None:
    case, expected, count = uninterrupted
    shutil.rmtree(tmp_path)
    folder = tmp_path / "run"
    arguments = words(case, folder)
    for share in deaths:
        with dying(1 + int(share * count)):
            try:
                assert main(arguments) == 0
                break
            except Death:
                arguments = going_on(folder, words(case, folder))
    else:
        assert main(arguments) == 0
    assert written(folder) == expected


def test_a_run_goes_on_where_its_checkpoint_is(tmp_path: Path) -> None:
    # not from its start: that would have the same results
    case, folder = "nodes' BN and momentum", tmp_path / "run"
    with dying(0) as whole:
        assert main(words(case, tmp_path / "whole")) == 0
    with dying(int(0.9 * whole.count)), pytest.raises(Death):
        main(words(case, folder))
    with dying(0) as rest:
        assert main(["run", "--resume", str(folder)]) == 0
    assert rest.count < whole.count / 2
    assert written(folder) == written(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_killed_simulation_of_flowers(tmp_path: Path) -> None:
    # its nodes keep their states themselves
    options = {**SMALL, "method": "fedbn", "momentum": "0.9", "momentum_state": "local", "engine": "ray"}
    code, count = run_in_process(0, command("run", results_dir=str(tmp_path / "whole"), **options))
    assert code == 0
    killed = run_in_process(int(0.8 * count), command("run", results_dir=str(tmp_path / "run"), **options))
    assert killed == (-signal.SIGKILL, 0)
    assert (run_in(tmp_path / "run") / "checkpoint-4").exists()
    assert run_in_process(0, ["run", "--resume", str(tmp_path / "run")])[0] == 0
    assert written(tmp_path / "run") == written(tmp_path / "whole")
