"""Runs that are killed and go on, with methods, partitions and participation drawn by seed: the bits of whole runs."""

import random
import signal
from pathlib import Path

import pytest

from fedbn_flwr.experiments import main
from tests.helpers.deaths import dying, going_on, run_in_process
from tests.helpers.runs import command, results

METHODS = (
    *(
        "fedavg",
        "fedavg:server-optimizer=yogi",
        "fedavg:momentum-state=local",
        "fedavg:secure=true",
        "fedprox",
        "fedbn",
    ),
    *(
        "fixbn:freeze-round=0.3",
        "fixbn:freeze-round=auto:window=2",
        "silobn:momentum-state=global",
        "scaffold",
        "fedbs",
    ),
    *("fedtan", "fedtan:carry=true", "fedtan:secure=true", "feddna:carry=true", "fedwon"),
)
ENGINES = (("stacked",), ("inprocess",), ("stacked", "--workers", "2"))
PARTITIONS = ("dirichlet:0.1", "dirichlet:0.3", "dirichlet:1", "classes:2", "iid")
#: a run in four is killed twice: 20 kills
TWICE = 4


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
def test_a_killed_run_goes_on_to_the_same_bits(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(number)
    options = {
        "method": METHODS[number],
        "dataset": "synthetic:n=600:test=40:classes=4:size=8:channels=1",
        "model": chance.choice(("mlp", "small-cnn")),
        "partition": chance.choice(PARTITIONS),
        "clients": "8",
        "fraction_train": chance.choice(("0.5", "0.7", "1")),
        "rounds": "12",
        "local_steps": str(chance.randint(2, 8)),
        "batch_size": "32",
        "momentum": "0.9" if "momentum-state" in METHODS[number] else "0",
        "checkpoint_every": str(chance.randint(1, 3)),
        "seed": str(number),
    }
    engine, folder = ENGINES[number % len(ENGINES)], tmp_path / "killed"
    whole, words = tmp_path / "whole", [*command("run", **options), "--engine", *engine, "--results-dir"]
    monkeypatch.setattr("fedbn_flwr.experiments.output.plots.plot_curves", lambda *_: None)  # most of a run's time
    with dying(0) as moments:
        assert main([*words, str(whole)]) == 0
    # in the first process at any time but the end; in a second one, soon
    for latest in (int(0.9 * moments.count), 10)[: 2 if number % TWICE == 0 else 1]:
        assert run_in_process(chance.randint(1, latest), going_on(folder, [*words, str(folder)]))[0] == -signal.SIGKILL
    assert main(going_on(folder, [*words, str(folder)])) == 0
    assert results(folder) == results(whole)
