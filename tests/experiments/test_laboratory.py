"""Experiments from Python: the bits of the command, objects in the place of names, and nothing else
changed.
"""

import gc
import json
import logging
import random
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar
from unittest.mock import Mock

import matplotlib
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from fedbn_flwr import compare, run
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data import Split, load
from fedbn_flwr.experiments import UsageError
from fedbn_flwr.experiments.laboratory import UNSET, given_options, study_of
from fedbn_flwr.experiments.output.run_folder import RunFolder
from fedbn_flwr.experiments.study import write_study
from fedbn_flwr.norm import bn_keys
from fedbn_flwr.strategies import REGISTRY, DivergedError, FedAvg, FedProx, FixBN
from fedbn_flwr.wire import Instruction
from tests.helpers.checkout import ROOT, environment
from tests.helpers.checkout import run as run_program
from tests.helpers.image_sets import paint
from tests.helpers.other_shapes import growing
from tests.helpers.registered import registries_restored
from tests.helpers.runs import DATA, OPTIONS, results, rounds, run_in
from tests.helpers.runs import run as command
from tests.helpers.toys import CLASSES

pytestmark = pytest.mark.usefixtures("registered")
SMALL: dict[str, Any] = {
    key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "dataset"
}


class Pull(FedAvg):
    """FedProx by another name."""

    def __init__(self, *, mu: Annotated[float, "weight of the term"] = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.mu = mu

    def instruct(self, instruction: Instruction) -> Instruction:
        """Add the proximal term."""
        return super().instruct(instruction).with_rule(proximal_mu=self.mu)


WIDTH = 4


def make_net(num_classes: int, in_channels: int) -> nn.Module:
    """Return a convolution with BN, whose width is this module's, for images of 8 x 8 pixels."""
    layers = (
        nn.Conv2d(in_channels, WIDTH, 3),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(WIDTH * 36, num_classes))


def quick(method: Any = "fedavg", folder: Path | None = None, **options: Any) -> Any:
    return run(method, folder=folder, **{**SMALL, "data": DATA, **options})


def weights(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {
        name: value.tolist()
        for name, value in quick(*arguments, **options).model().state_dict().items()
    }


# ---- the command and Python ----------------------------------------------------------------------


def test_compare_is_the_command(tmp_path: Path) -> None:
    methods = ["fedavg", "fixbn:freeze-round=1"]
    there, here = tmp_path / "command", tmp_path / "python"
    assert (
        command("compare", "--methods", ",".join(methods), "--seeds", "2", results_dir=str(there))
        == 0
    )
    found = compare(
        [methods[0], FixBN(freeze_round=1)], folder=here, seeds=2, **{**SMALL, "data": DATA}
    )
    folders = sorted(path.name for path in there.glob("*-seed*"))
    assert len(folders) == 4
    for name in folders:
        assert results(here / name) == results(there / name)
    table = [(row["method"], row["seed"]) for row in found.summaries]
    assert table == [(method, seed) for method in methods for seed in (0, 1)]
    asked = [json.loads((folder / "study.json").read_text())["runs"] for folder in (here, there)]
    assert asked[0] == asked[1]


# ---- objects -------------------------------------------------------------------------------------


def test_a_strategy_of_ones_own_with_its_options() -> None:
    found = compare(
        [Pull(mu=0.1), "fedprox:mu=0.1", Pull, FedProx(mu=0.5)], **{**SMALL, "data": DATA}
    )
    methods = [row["method"] for row in found.summaries]
    assert methods == ["pull:mu=0.1", "fedprox:mu=0.1", "pull", "fedprox:mu=0.5"]
    states = [
        {name: value.tolist() for name, value in found.model(method).state_dict().items()}
        for method in methods
    ]
    assert states[0] == states[1]
    assert states[2] == states[3]
    assert states[0] != states[2]
    # an option that all strategies share
    assert (
        weights(FedAvg(fraction_train=0.5))
        == weights("fedavg:fraction-train=0.5")
        != weights("fedavg")
    )
    assert found.model(Pull(mu=0.1)).state_dict().keys() == states[0].keys()


class Aging(nn.Module):
    """Writes a buffer in every pass, also in those that do not learn."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
        self.layers(torch.zeros(1, 1, 8, 8))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        out: torch.Tensor = self.layers(inputs)
        return out


class OwnMessages(FedAvg):
    """Makes its messages by itself, as tutorials of Flower show."""

    seen: ClassVar[list[float]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        if "passes" in arrays:
            self.seen.append(float(arrays["passes"].numpy()))
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, node, "train") for node in grid.get_node_ids()]


def test_a_run_begins_with_the_model_as_it_was_made_and_counts_its_rounds_by_itself(
    tmp_path: Path,
) -> None:
    with registries_restored():
        run(
            OwnMessages,
            model=Aging,
            data=DATA,
            folder=tmp_path,
            **{**SMALL, "rounds": 2, "workers": 1},
        )
        told = {"clip_norm": 0.1, "clip_factor": 0.1, "freeze_bn": True, "momentum_state": "local"}
        for key, value in told.items():
            with pytest.raises(
                ValueError, match=f"clients are not told of {key}: change the messages"
            ):
                run(OwnMessages, model=make_net, data=DATA, **{**SMALL, "rounds": 1, key: value})
    assert OwnMessages.seen[0] == 0
    assert [row["round"] for row in results(run_in(tmp_path))["rounds"]] == [1, 2]


@pytest.mark.parametrize("method", ["fedbn", "silobn", "mtfl", "standalone"])
def test_models_of_the_nodes_are_no_one_model(method: str, tmp_path: Path) -> None:
    found = quick(method, tmp_path)
    with pytest.raises(
        UsageError,
        match=rf"^'{method}' has a model for each node: `models` returns them, or `adapt` fits their mean$",
    ):
        found.model()
    assert list(found.models()) == [0, 1]
    assert found.summaries[0]["model-for-each-node"]
    with safe_open(run_in(tmp_path) / "model.safetensors", "pt") as file:
        assert "the mean of what nodes keep" in json.loads(file.metadata()["about"])["note"]


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("fedbn:momentum=0.9:momentum-state=local", {"engine": "inprocess"}),
        pytest.param(
            "fedbn:momentum=0.9:momentum-state=local", {"workers": 2}, marks=pytest.mark.slow
        ),
        pytest.param("fednorm", {"engine": "stacked"}, marks=pytest.mark.slow),
    ],
)
def test_the_nodes_models_have_the_accuracy_of_the_summary(
    method: str, engine: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        **SMALL,
        "data": "digits-domains",
        "partition": "domain",
        "clients": 5,
        "local_steps": 8,
        **engine,
    }
    found, data = run(method, folder=tmp_path, **options), load("digits-domains")
    own = found.models()
    assert list(own) == list(data.domain_names)
    scores = [
        evaluate(model, data.test, 10, "cpu").by_domain()[data.domain_names.index(str(domain))]
        for domain, model in own.items()
    ]
    assert np.mean(scores) == pytest.approx(found.summaries[0]["accuracy-personal"], rel=1e-12)
    assert len(set(scores)) > 1
    assert found.preprocess()(data.test.inputs[:2]).dtype == torch.float32
    # files hold what is each node's own, and fit into the model
    model = next(iter(own.values()))
    for path in (run_in(tmp_path) / "personal").iterdir():
        assert model.load_state_dict(load_file(path), strict=False).unexpected_keys == []
        assert load_file(path).keys() == (
            model.state_dict().keys() if method == "fednorm" else set(bn_keys(model))
        )


def test_a_node_that_never_trained_has_the_servers_model(tmp_path: Path) -> None:
    found = quick("fedbn", tmp_path, clients=3, fraction_train=0.7, rounds=1, evaluate_every=1)
    shared = load_file(run_in(tmp_path) / "model.safetensors")
    trained = {int(path.stem) for path in (run_in(tmp_path) / "personal").iterdir()}
    assert len(trained) == 2
    for number, model in found.models().items():
        same = all(torch.equal(value, shared[name]) for name, value in model.state_dict().items())
        assert same == (number not in trained)


def test_where_there_are_no_models_of_nodes(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^'fedavg' has one model for all nodes: `model` returns it$"
    ):
        quick().models()
    found = quick("fedbn", tmp_path)
    shutil.rmtree(run_in(tmp_path) / "personal")
    with pytest.raises(
        UsageError,
        match="is missing or empty: with the engine ray and in deployments nodes keep their models",
    ):
        found.models()


def test_a_model_of_ones_own() -> None:
    named = weights(model=f"{__name__}:make_net")
    assert weights(model=make_net) == weights(model=partial(make_net)) == named
    assert quick(model=make_net).summaries[0]["model"] == "make_net"
    model = make_net(4, 1)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trained = quick(model=model, lr=0.0).model().state_dict()
    assert torch.equal(trained["0.weight"], start["0.weight"])
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_data_of_ones_own() -> None:
    loaded = load(DATA)
    train, test = loaded.train, loaded.test
    known = weights()
    assert weights(data=loaded) == weights(data=lambda: loaded) == known
    pairs = (train.inputs, train.labels), (test.inputs.numpy(), test.labels.tolist())
    sets = TensorDataset(train.inputs, train.labels), TensorDataset(test.inputs, test.labels)
    assert (
        weights(data=pairs) == weights(data=sets) == weights(data=(Split(*pairs[0]), test)) == known
    )
    assert weights(data=loaded, workers=2) == weights(workers=2)


def test_what_another_process_cannot_import_stays_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = weights("fedprox:mu=0.1", workers=1)
    monkeypatch.setattr("fedbn_flwr.experiments.engines.count_workers", lambda *_: 2)
    assert weights(Pull(mu=0.1)) == alone != weights("fedprox:mu=0.1")
    with pytest.raises(
        UsageError,
        match="the strategy Pull stays in this process, so workers and side-by-side must be 1",
    ):
        quick(Pull(), workers=2)
    with pytest.raises(UsageError, match="the model '<lambda>' stays in this process"):
        quick(model=lambda: make_net(4, 1), engine="ray")
    with pytest.raises(UsageError, match="the strategy Pull stays in this process"):
        compare([Pull()], side_by_side=2, **{**SMALL, "data": DATA})
    assert weights(model=make_net, workers=2) == weights(model=f"{__name__}:make_net", workers=2)


# ---- what is kept --------------------------------------------------------------------------------


def name_of(method: Any = "fedavg", model: Any = UNSET, **options: Any) -> str:
    """Return the name of the folder of a run."""
    study = study_of(
        [method], given_options(model, UNSET, None, {**OPTIONS, **options}), 1, {}, 1, "stacked"
    )
    (one,) = study.runs(Path("nowhere"))
    return one.folder.name


def test_numbers_of_other_libraries_and_mappings_are_options(tmp_path: Path) -> None:
    """They make the same runs as Python's own, and as text."""
    counts: dict[str, Any] = {"seeds": np.int64(2), "grid_seeds": np.int32(1)}
    given: list[tuple[Any, Any, Any]] = [
        ({"lr": np.array([0.25, 0.5], np.float32)}, {"r_max": np.float32(3)}, np.int64(2)),
        ({"lr": [0.25, 0.5]}, [("r-max", 3)], 2),
        ({"lr": [0.25, 0.5]}, ["r_max=3"], 2),
        ({"lr": [torch.tensor(0.25), np.float64(0.5)]}, "r_max=3", "2"),
    ]
    for grid, norm_options, clients in given:
        options = {**SMALL, "norm_options": norm_options, "clients": clients}
        study = study_of(
            ["fedavg+brn"],
            given_options(UNSET, DATA, tmp_path, options),
            grid=grid,
            engine="stacked",
            **counts,
        )
        write_study(tmp_path, study, runs := study.runs(tmp_path))
        assert [run.experiment.config.model.norm_options for run in runs] == [(("r_max", 3.0),)] * 2
    assert quick("fedavg", rounds=np.int64(1), lr=np.float32(0.5)).summaries[0]["lr"] == 0.5


def test_changed_files_are_another_run_with_other_data(tmp_path: Path) -> None:
    """An initial model counts by its content, as do the files of a data set."""

    def name(**options: Any) -> str:
        given_options(UNSET, UNSET, None, {})  # as in a later call, or in another process
        return name_of(**options)

    model, images = tmp_path / "model.pt", tmp_path / "images"
    for part, kind in product(("train", "test"), ("cat", "dog")):
        (images / part / kind).mkdir(parents=True)
        paint(images / part / kind / "1.png")
    data = f"folder:{images}"
    torch.save({"a": torch.zeros(1)}, model)
    first = [name(), name(**{"init-from": str(model)}), name(dataset=data)]
    assert len({*first}) == 3
    assert len(load(data).train) == 2
    model.touch()
    assert first == [name(), name(**{"init-from": str(model)}), name(dataset=data)]
    torch.save({"a": torch.ones(1)}, model)
    paint(images / "train" / "cat" / "2.png")
    again = [name(), name(**{"init-from": str(model)}), name(dataset=data)]
    assert [one == other for one, other in zip(first, again, strict=True)] == [True, False, False]
    assert len(load(data).train) == 3


@pytest.mark.parametrize("links", [False, True])
def test_images_of_equal_sizes_are_other_data(tmp_path: Path, links: bool) -> None:
    """Of bitmaps every image of a shape has the same size; a class may be a link."""
    images = tmp_path / "images"
    for part, kind in product(("train", "test"), ("cat", "dog")):
        paint(images / part / kind / "1.bmp")
    if links:
        (images / "train" / "cat").rename(tmp_path / "cats")
        (images / "train" / "cat").symlink_to(tmp_path / "cats")

    def seen() -> tuple[str, float]:
        given_options(UNSET, UNSET, None, {})  # as in a later call
        data = f"folder:{images}"
        return name_of(dataset=data), float(load(data).train.inputs.float().mean())

    first = seen()
    # what a run leaves beside the images, and pictures in it
    paint(images / "results" / "curves.png")
    paint(images / ".thumbnails" / "1.png")
    assert seen() == first
    paint(images / "train" / "cat" / "1.bmp", seed=1)
    second = seen()
    assert second[0] != first[0]
    assert second[1] != first[1]
    paint(images / "train" / "cat" / "1.bmp")
    assert seen() == first


def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = quick()
    assert found.folder.is_dir()
    del found
    gc.collect()
    with pytest.raises(UsageError, match="clients"):
        quick(clients=-1)
    monkeypatch.setattr(RunFolder, "round", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quick()
    assert list(tmp_path.iterdir()) == []


#: a module of a user's own, and a script without a guard beside it
MODULE = """
import os
import torch
from fedbn_flwr.strategies import FedAvg

class Mine(FedAvg):
    def weigh(self, replies):
        return [1.0 for _ in replies]

def make_net(num_classes):
    width = int(os.environ.get("WIDTH", 8))
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width),
                               torch.nn.BatchNorm1d(width), torch.nn.Linear(width, num_classes))
"""
SCRIPT = """
import os
import torch
from fedbn_flwr import compare, run
from mine import Mine, make_net

data = (torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)
options = dict(clients=2, rounds=2, partition="iid", progress=False)
found = compare(["fedavg", Mine()], model=make_net, data=(data, data), folder="out", reuse=True, **options)
print([run["seconds"] for run in found.summaries])
print(run("fedavg", data=(data, data), workers=2, **options).summaries[0]["accuracy"])
os.environ["WIDTH"] = "5"  # after the first process was started
for count in (1, 2):
    found = compare(["fedavg", "fedbn"], model=make_net, side_by_side=count, **options)
    print([(run["accuracy"], run["payload-bytes"]) for run in found.summaries])
"""


@pytest.mark.slow
def test_a_script_goes_on_in_another_process_and_needs_no_guard(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    path = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    first, second = (
        run_program(sys.executable, "script.py", cwd=tmp_path, env=path).splitlines()
        for _ in range(2)
    )
    assert "2 of 2 runs finished" in second[0]
    assert second[1:] == first
    assert first[-1] == first[-2]


# ---- errors --------------------------------------------------------------------------------------


def test_a_strategy_whose_name_or_options_are_taken() -> None:
    class Seeded(FedAvg):
        def __init__(self, *, model: int = 3, **options: Any) -> None:
            super().__init__(**options)

    with pytest.raises(
        UsageError, match="the option 'model' of its constructor is one of all commands"
    ):
        quick(Seeded())
    assert "seeded" not in REGISTRY
    quick()


def test_a_start_of_ones_own_that_ends_early_is_no_finished_run() -> None:
    class Short(FedAvg):
        def start(self, grid: Any, arrays: Any, rounds: int, *more: Any, **named: Any) -> Any:  # type: ignore[override]
            return super().start(grid, arrays, rounds - 1, *more, **named)

    found = compare([Short], **{**SMALL, "data": DATA, "rounds": 3})
    assert found.failures == {
        ("short", 0): "the strategy's `start` ended after round 2 of 3",
    }


def test_one_method_needs_no_list() -> None:
    for one in ("fedavg", FedAvg(), FedAvg):
        assert [row["method"] for row in compare(one, data=DATA, **SMALL).summaries] == ["fedavg"]


def test_a_method_that_fails_does_not_stop_the_others() -> None:
    found = compare(["fedavg:lr=1e30", "fedavg"], **{**SMALL, "data": DATA})
    assert list(found.failures) == [("fedavg:lr=1e30", 0)]
    assert list(found.differences) == ["fedavg"]
    assert "diverged" in repr(found)
    assert "<td>failed" in found._repr_html_() or "diverged" in found._repr_html_()
    with pytest.raises(UsageError, match="there is no model of 'fedavg:lr=1e30'"):
        found.model("fedavg:lr=1e30")
    with pytest.raises(DivergedError):
        quick("fedavg:lr=1e30")


# ---- the process ---------------------------------------------------------------------------------


def process_state() -> list[Any]:
    logger = logging.getLogger("flwr")
    return [
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        [item.tolist() if isinstance(item, np.ndarray) else item for item in np.random.get_state()],
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        list(warnings.filters),
        (logger.level, list(logger.filters), list(logger.handlers)),
        list(sys.path),
        matplotlib.get_backend(auto_select=False),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    ]


def test_the_process_is_as_before(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    matplotlib.use("svg")
    torch.set_num_threads(3)
    try:
        before = process_state()
        found = compare(
            ["fedavg", "fedbn", "fedtan"],
            model=make_net,
            folder=tmp_path,
            **{**SMALL, "data": DATA},
        )
        found.model()
        quick(augmentation="crop-flip")
        with pytest.raises(UsageError):
            quick(model=3)
        assert process_state() == before
    finally:
        torch.set_num_threads(threads)
        matplotlib.use("agg")


@contextmanager
def in_float64() -> Iterator[None]:
    """Make floats of 64 bits, unless something else is said."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "another type": in_float64,
    "another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.inference_mode,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_torch_does_in_this_process_changes_no_run(setting: str) -> None:
    options = {**SMALL, "model": make_net, "data": DATA, "progress": False}
    wanted = run("fedtan", **options).curves("train-loss")
    with SETTINGS[setting]():
        before = torch.get_default_dtype()
        assert run("fedtan", **options).curves("train-loss") == wanted
        assert torch.get_default_dtype() == before


def test_threads_take_turns() -> None:
    wanted = [quick(seed=seed).curves("train-loss") for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda seed: quick(seed=seed).curves("train-loss"), range(3))
        assert list(found) == wanted


def test_the_import_brings_no_torch() -> None:
    code = "import sys, fedbn_flwr; print('torch' in sys.modules, hasattr(fedbn_flwr, 'nothing'))"
    assert run_program(sys.executable, "-c", code).split() == ["False", "False"]


# ---- what is returned ----------------------------------------------------------------------------


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "on [bold] :smile: data"
    found = compare("fedavg", data=DATA, folder=folder, **SMALL)
    assert repr(found).endswith(f"Results: {folder}")


@pytest.mark.usefixtures("drawn")
def test_results(tmp_path: Path) -> None:
    found = compare(
        ["fedavg", "fedprox:mu=0.5"], folder=tmp_path, seeds=2, **{**SMALL, "data": DATA}
    )
    key = ("fedprox:mu=0.5", 1)
    assert list(found.curves()) == [
        (method, seed) for method in ("fedavg", key[0]) for seed in (0, 1)
    ]
    rows = rounds(run_in(tmp_path, "fedprox_mu=0.5", 1))
    assert found.curves()[key] == {
        row["round"]: row["accuracy"] for row in rows if "accuracy" in row
    }
    assert found.curves("train-loss")[key] == {row["round"]: row["train-loss"] for row in rows}
    with pytest.raises(UsageError, match=r"no run has recorded 'loses'; recorded: .*loss"):
        found.curves("loses")
    scores = {(row["method"], row["seed"]): row["accuracy"] for row in found.summaries}
    gaps = [scores[key[0], seed] - scores["fedavg", seed] for seed in (0, 1)]
    assert found.differences[key[0]].difference == pytest.approx(sum(gaps) / 2)
    frame = found.to_pandas()
    assert (
        dict(zip(zip(frame["method"], frame["seed"], strict=True), frame["accuracy"], strict=True))
        == scores
    )
    model = found.model(*key)
    assert not model.training
    result = evaluate(model, load(DATA).test, CLASSES, torch.device("cpu"))
    assert result.accuracy == scores[key]
    with pytest.raises(UsageError, match="there is no model of 'fedavg', seed 7; of: "):
        found.model("fedavg", 7)
    path = run_in(tmp_path, "fedavg", 0) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=re.escape(f"{path} is neither safetensors nor")):
        found.model("fedavg", 0)
    found.plot().save(tmp_path / "copy.png")
    assert (tmp_path / "copy.png").read_bytes() == found.plot()._repr_png_()
    picture = found.plot()
    picture.axes[0].set_ylabel("share of the test images")
    for ending, begin in (("pdf", b"%PDF"), ("svg", b"<?xml")):
        picture.save(tmp_path / f"copy.{ending}")
        assert (tmp_path / f"copy.{ending}").read_bytes().startswith(begin)
    assert "share of the test images" in (tmp_path / "copy.svg").read_text()
    assert "fedprox:mu=0.5" in found._repr_html_().replace("<wbr>", "")
    assert repr(found).count("fedprox:mu=0.5") == 1


# ---- progress ------------------------------------------------------------------------------------


def test_without_a_terminal_it_prints_a_line_a_tenth_or_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    quick(progress=False)
    assert capfd.readouterr() == ("", "")
    quick()
    assert capfd.readouterr().out.count("round ") == 3


def test_a_notebook_has_a_bar_under_the_cell(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            shown.append(content["text/html"])

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        return Handle()

    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    compare(["fedavg", "fedbn"], **{**SMALL, "data": DATA})
    assert len(shown) == 7
    assert '<progress value="4" max="6"></progress> fedbn, seed 0' in shown[3]
    assert shown[-1] == ""
    quick(progress=False)
    assert len(shown) == 7
    assert capfd.readouterr() == ("", "")


def test_a_model_that_makes_entries_in_its_first_pass_is_handed_over_after_it() -> None:
    """As docs/questions.md says of layers that quantize."""
    size = {"num_classes": 4, "in_channels": 1, "image_size": 8}
    model = growing(**size)
    with pytest.raises(UsageError, match="changes its entries in its first pass"):
        run("fedavg", model=model, data=DATA, **SMALL)
    model(torch.zeros(2, 1, 8, 8))
    assert "1.largest" in run("fedavg", model=model, data=DATA, **SMALL).model().state_dict()
