"""Worker processes: their number follows from options, cores, GPUs and the model, and changes no
bit.
"""

import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fedbn_flwr.data import Data, Split
from fedbn_flwr.experiments import Config, engines, resolve
from fedbn_flwr.experiments.engines import count_workers, work_of
from fedbn_flwr.experiments.material import Material
from fedbn_flwr.layerwise import Answer, SuspendedStep
from fedbn_flwr.simulation import sizing
from fedbn_flwr.simulation.in_process import InProcessGrid
from fedbn_flwr.simulation.processes.worker import Worker
from fedbn_flwr.simulation.sizing import visible_gpus
from fedbn_flwr.transports import message_client
from tests.helpers.runs import DATA, results, run, run_in

#: multiplications of a sample: 64 x 30 and 30 x 4
MLP = 64 * 30 + 30 * 4


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are worth their start."""
    monkeypatch.setattr(engines, "count_cores", lambda: 4)
    monkeypatch.setattr(sizing, "WORTH_STARTING", 0)


def config(**options: Any) -> Config:
    """Return a run of 10 clients, each with a step of one sample a round."""
    short = {"dataset": DATA, "model": "mlp", "partition": "iid", "clients": 10, "device": "cpu"}
    return Config().but(**{**short, "local_steps": 1, "batch_size": 1, "rounds": 1, **options})


def material(**options: Any) -> Material:
    """Return what such a run works with, as far as the number of processes depends on it."""
    return replace(Material.of(config()), config=config(**options))


@pytest.mark.usefixtures("_four_cores")
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # one sample a client and round: just enough for 10 rounds
        ({"rounds": 10}, 2),
        ({"rounds": 9}, 1),
        ({"rounds": 5, "batch_size": 2}, 2),
        ({"rounds": 5, "local_steps": 2}, 2),
        ({"rounds": 20, "fraction_train": 0.5}, 1),
        ({"rounds": 10, "clients": 15}, 3),
        ({"rounds": 10, "clients": 100}, 4),
        ({"rounds": 9, "workers": 3}, 3),
        ({"rounds": 10, "workers": 1}, 1),
        ({"workers": 20}, 10),
    ],
)
def test_a_long_run_has_a_process_for_every_five_clients_of_a_round(
    options: dict[str, Any], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "WORTH_STARTING", 10 * 10 * MLP)
    assert [count_workers(material(**options), layerwise) for layerwise in (False, True)] == [
        wanted
    ] * 2


@pytest.mark.usefixtures("_four_cores")
def test_a_run_has_one_process_beside_others_and_all_in_a_child_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of a benchmark, or a user's own pool
    monkeypatch.setattr("multiprocessing.process._parent_process", Mock())
    assert count_workers(material()) == 2
    monkeypatch.setattr("fedbn_flwr.experiments.engines.SIDE_BY_SIDE", beside := Event())
    beside.set()
    assert count_workers(material()) == 1


@pytest.mark.usefixtures("_four_cores")
def test_of_a_model_that_is_not_stacked_every_client_can_have_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing, "largest_useful_stack", lambda *_: 1)
    for layerwise in (False, True):
        assert [count_workers(material(clients=clients), layerwise) for clients in (1, 3, 5)] == [
            1,
            3,
            4,
        ]


@pytest.mark.usefixtures("_four_cores")
def test_a_gpu_has_one_process() -> None:
    assert count_workers(replace(material(), device=torch.device("cuda"))) == 1


@pytest.mark.parametrize(
    ("device", "named", "wanted"),
    [
        ("auto", None, ["0", "1", "2"]),
        ("cuda", "", ["0", "1", "2"]),
        ("cuda", "2,GPU-7", ["2", "GPU-7"]),
        # torch counts those that there are, before the first name of none
        ("cuda", "2,GPU-7,5,9", ["2", "GPU-7", "5"]),
        ("cuda:1", None, []),
        ("cpu", None, []),
    ],
)
def test_each_of_several_gpus_has_a_process(
    device: str, named: str | None, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    asked = config(device=device, clients=9)
    assert visible_gpus(asked.engine.device) == wanted
    assert count_workers(material(device=device, clients=9)) == max(len(wanted), 1)
    assert count_workers(material(device=device, clients=1)) == 1
    assert count_workers(material(device=device, clients=9, workers=5)) == 5


def test_multiplications_are_those_of_convolutions_and_linear_layers() -> None:
    assert work_of(Material.of(config()), False).multiplications() == MLP
    # three 3x3 convolutions of 16, 32 and 32 channels on 8x8, 4x4 and 2x2 positions, and a linear
    # layer
    convolutions = 9 * (1 * 16 * 64 + 16 * 32 * 16 + 32 * 32 * 4)
    assert (
        work_of(Material.of(config(model="small-cnn")), False).multiplications()
        == convolutions + 32 * 4
    )


def test_any_number_of_workers_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, started = {*active_children()}, Mock(wraps=Worker)
    monkeypatch.setattr(engines, "Worker", started)
    for workers in "13":
        folder = str(tmp_path / workers)
        assert (
            run(
                "run",
                engine="inprocess",
                clients="4",
                workers=workers,
                method="fedtan",
                results_dir=folder,
            )
            == 0
        )
    assert results(tmp_path / "3") == results(tmp_path / "1")
    assert (
        json.loads((run_in(tmp_path / "3") / "config.json").read_text())["options"]["workers"] == 3
    )
    # one of the three is this process
    assert started.call_count == 2
    assert {*active_children()} <= before  # other tests' processes may still run


def test_a_worker_sees_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more workers than GPUs, they share them in turn.

    The first one is this process, and uses the first GPU.
    """
    started: list[tuple[int, dict[str, str]]] = []
    monkeypatch.setattr(engines, "visible_gpus", lambda _: ["4", "6"])
    monkeypatch.setattr(
        engines, "Worker", lambda index, _, variables: started.append((index, variables))
    )
    monkeypatch.setattr(
        engines, "WorkersGrid", lambda *_, start, **__: [start(index, 1) for index in (1, 2)]
    )
    engines.spread_over(3, InProcessGrid, resolve({}).config)  # type: ignore[arg-type]
    assert started == [(1, {"CUDA_VISIBLE_DEVICES": "6"}), (2, {"CUDA_VISIBLE_DEVICES": "4"})]


def test_a_run_holds_the_layer_wise_steps_that_fit_and_the_next_run_as_many_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_client, "MAX_STEPS", 1)
    monkeypatch.setattr(engines, "clients_that_fit", lambda *_: 3)
    made, advance = list[str](), SuspendedStep.advance

    def noting(step: SuspendedStep[Any], answer: Answer | None = None) -> Any:
        made.extend(["step"] * (answer is None))
        return advance(step, answer)

    monkeypatch.setattr(SuspendedStep, "advance", noting)
    options = {
        "method": "fedtan",
        "engine": "inprocess",
        "rounds": "1",
        "local_steps": "1",
        "clients": "3",
    }
    assert run("run", results_dir=str(tmp_path), **options) == 0
    assert len(made) == 3  # and none of them again
    assert message_client.MAX_STEPS == 1


# ---- data that worker processes map, and do not load ---------------------------------------------

SHARED = Config().but(dataset="synthetic:n=2000:seed=9", validation=0.1, clients=5, partition="iid")


def changed_in_a_worker(material: Material) -> dict[str, Any]:
    """Return what a worker has of data that it has not loaded; it writes into the memory that it
    maps.
    """
    train = material.data.train
    inputs, _ = train.batch(torch.arange(5))
    is_mapped = train.inputs.is_shared()
    train.inputs[0] = 7
    return {"samples": len(train), "inputs": inputs.numpy(), "mapped": is_mapped}


def test_workers_map_the_data_of_the_process_that_they_work_for() -> None:
    material = Material.of(SHARED)
    alone = material.data
    wanted, _ = alone.train.batch(torch.arange(5))
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        found = pool.submit(changed_in_a_worker, material).result()
    assert found["samples"] == len(alone.train) == 1800
    assert found["mapped"]
    assert torch.equal(torch.from_numpy(found["inputs"]), wanted)
    assert set(alone.train.inputs[0].unique().tolist()) == {7}


def test_images_in_files_are_left_to_each_process() -> None:
    split = Split(torch.empty(4, 3, 8, 8, dtype=torch.uint8, device="meta"), torch.arange(4))
    material = replace(Material.of(SHARED), data=Data("files", split, split, 4))
    assert pickle.loads(pickle.dumps(material)).data.name == Material.of(SHARED).data.name


def test_data_without_room_in_shared_memory_are_left_to_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.Tensor, "share_memory_", Mock(side_effect=RuntimeError("no space left"))
    )
    material = Material.of(
        Config().but(dataset="synthetic:n=100:test=10", clients=2, partition="iid")
    )
    assert not pickle.loads(pickle.dumps(material)).data.train.inputs.is_shared()
