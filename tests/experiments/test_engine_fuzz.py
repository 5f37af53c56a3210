"""Engines, worker processes and resumed runs have the same results, whatever is asked: drawn by
seed, in float64.
"""

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from fedbn_flwr.experiments import main
from tests.helpers.deaths import Death, dying, going_on
from tests.helpers.runs import command, model_bytes, results, rounds

KINDS_OF_DATA = "tests.helpers.kinds_of_data"
METHODS = (
    "fedavg",
    "fedavg:weighting=uniform",
    "fedavg:server-optimizer=adam",
    "fedavg:robust=median",
    "fedavg:robust=trimmed:0.3",
    "fedavg:clip-norm=0.5",
    "fedavg:freeze-bn=true",
    "fedbn",
    "fbn",
    "fedprox:mu=0.5",
    "fixbn:freeze-round=2",
    "fixbn:freeze-round=1:freeze=both",
    "fixbn:freeze-round=1:freeze=affine",
    "fixbn:freeze-round=auto:window=2",
    "silobn",
    "mtfl",
    "fedbs",
    "fedbs:loss=received",
    "fedbs:loss=running",
    "fedwon:agc=on",
    "scaffold",
    "hbn",
    "heterofl",
    "standalone",
    "fedtan",
    "fedtan:exchange=paper",
    "fedtan:weighting=uniform",
    "fedtan-ii:m=2",
    "fedtan:carry=true",
    "fedtan:carry=true:memory=0",
    "fedtan:carry=true:weighting=uniform",
    "feddna",
    "feddna:carry=true",
    "feddna:exchange=paper",
    "centralized",
    "fed3r",
    "fed3r:balanced=true",
    "fed3r-personal",
    "fedncm",
    "fedavg:closed-form=head",
    "fedavg:statistics=exact",
    "fixbn:freeze-round=2:statistics=exact",
    "fedtan:carry=true:statistics=exact",
    "mtfl:statistics=exact:gather-samples=9",
    "mtfl:statistics=own",
    "fedbn:statistics=own",
    "silobn:statistics=own",
)
#: what any method may be told, each seldom
MORE = ("momentum-state=local", "momentum-state=global", "server-optimizer=momentum")
PARTITIONS = ("iid", "dirichlet:0.1", "dirichlet:0.3", "dirichlet:1", "classes:1", "classes:2")
#: options of data that are no images with a class
KINDS = tuple(
    {"dataset": f"{KINDS_OF_DATA}:{kind}", "model": model, "partition": "iid", **more}
    for kind, model, more in (
        ("label_maps", f"{KINDS_OF_DATA}:each_pixel", {"augmentation": "flip-rotate"}),
        ("two_targets", "tests.helpers.harness:convolutions", {"objective": "mse"}),
        ("pictures", f"{KINDS_OF_DATA}:denoiser", {"objective": "mae"}),
        ("tokens", f"{KINDS_OF_DATA}:OfTokens", {}),
    )
)
COUNTED = ("nodes", "exchanges", "payload-bytes-down", "payload-bytes-up", "paper-bytes")


def drawn(chance: random.Random) -> dict[str, str]:
    images = {
        "dataset": f"synthetic:n={chance.choice((60, 120, 240))}:test=20:classes=4:size=4:channels=1",
        "method": ":".join(
            [chance.choice(METHODS), *(each for each in MORE if chance.random() < 0.15)]
        ),
        "model": f"tests.helpers.harness:{chance.choice(('perceptron', 'convolutions'))}",
        # whoever goes on with a run must trust the code that its folder names
        "plugins": f"tests.helpers.harness,{KINDS_OF_DATA}",
        "norm": chance.choice(("bn", "bn", "bn", "brn")),
        "partition": chance.choice(PARTITIONS),
        "clients": str(chance.randint(3, 9)),
        "fraction-train": chance.choice(("0.4", "0.7", "1")),
        **chance.choice(
            (
                {"local-steps": str(chance.randint(1, 4))},
                {"local-epochs": str(chance.randint(1, 2))},
            )
        ),
        "batch-size": str(chance.choice((4, 7, 16, 32))),
        "replacement": chance.choice(("false", "false", "true")),
        "momentum": chance.choice(("0", "0.9")),
        "weight-decay": chance.choice(("0", "0.01")),
        "augmentation": chance.choice(("none", "none", "crop-flip:padding=1")),
        "chunk": chance.choice(("0", "0", "2", "3")),
        "seed": str(chance.randrange(99)),
        "rounds": "4",
        "lr": "0.02",
        "checkpoint-every": "1",
    }
    if chance.random() < 0.6:
        return images
    return {**images, "augmentation": "none", **chance.choice(KINDS)}


def refused(options: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a configuration is none, which one line must say before anything begins."""
    capsys.readouterr()
    code = main(command("run", **options, results_dir=str(folder), engine="inprocess"))
    said = capsys.readouterr().err.splitlines()
    assert code in (0, 1, 2)
    assert code != 2 or (len(said) == 1 and not (folder / "rounds.jsonl").exists()), said
    assert not any("Traceback" in line for line in said)
    return code > 0


def assert_alike(one: Path, other: Path) -> None:
    for row, too in zip(rounds(one), rounds(other), strict=True):
        assert [row[key] for key in COUNTED] == [too[key] for key in COUNTED]
        assert too == pytest.approx(row, rel=1e-9, abs=1e-9)
    mine, theirs = load(model_bytes(one)), load(model_bytes(other))
    assert torch.float64 in {value.dtype for value in mine.values()}
    torch.testing.assert_close(theirs, mine, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("only_composed")
@pytest.mark.parametrize("number", range(24))
def test_engines_agree_and_runs_go_on(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, whole = random.Random(number), tmp_path / "0"
    while refused(options := drawn(chance), whole, capsys):
        whole = tmp_path / str(int(whole.name) + 1)
    print(options)
    engines = [("stacked",), (chance.choice(("stacked", "inprocess")), "--workers", "2")]
    dies = chance.choice(engines)
    for engine in engines:
        folder = tmp_path / " ".join(engine)
        words = [*command("run", **options, results_dir=str(folder)), "--engine", *engine]
        with dying(0) as moments:
            assert main(words) == 0
        assert_alike(whole, folder)
        if engine == dies:
            expected = results(folder)
            shutil.rmtree(folder)
            with dying(chance.randint(1, moments.count)), pytest.raises(Death):
                main(words)
            # code of one's own may have changed, and only its owner knows that it has not
            assert main([*going_on(folder, words), "--reuse"]) == 0
            assert results(folder) == expected
