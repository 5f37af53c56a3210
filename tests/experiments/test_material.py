"""Data, partition, model and rounds of an experiment, and what is checked and warned of before the
first round.
"""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedbn_flwr import device
from fedbn_flwr.data import Data, Split
from fedbn_flwr.experiments import Config, UsageError, material, resolve
from fedbn_flwr.experiments.checks import checked_material
from fedbn_flwr.experiments.material import Material, load_data, rounds_within_budget
from tests.helpers.runs import DATA, results, run, run_in
from tests.helpers.toys import assert_same_state

TINY = "synthetic:n=200:test=20:classes=4:size=8:channels=1"


def config(**options: object) -> Config:
    return Config().but(**{"dataset": TINY, "model": "small-cnn", "partition": "iid", **options})


# ---- the process ---------------------------------------------------------------------------------


def test_the_device_of_a_run_is_the_current_one_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [0]
    cuda = SimpleNamespace(current_device=lambda: current[-1], set_device=current.append)
    monkeypatch.setattr(material, "pick_device", torch.device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: cuda)
    monkeypatch.setattr(device, "started", lambda: cuda)
    for name in ("cpu", "cuda", "cuda:1"):
        with device.settings_restored():
            material.set_up_process(config(device=name).engine)
            assert torch.get_deterministic_debug_mode() == (name != "cpu")
    assert current == [0, 1, 0]
    assert torch.get_deterministic_debug_mode() == 0


# ---- a budget of epochs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "clients", "rounds"),
    [
        ({"rounds": 7}, 5, 7),
        # a round of 5 clients sees 5 * 2 * 4 = 40 of 200 samples, a fifth of an epoch
        ({"budget_epochs": 3, "local_steps": 2, "batch_size": 4}, 5, 15),
        # half of the clients see half of that
        ({"budget_epochs": 3, "local_steps": 2, "batch_size": 4, "fraction_train": 0.5}, 10, 15),
        # as many clients take part as the strategy draws: the whole number below 5 * 0.5
        ({"budget_epochs": 3, "local_steps": 2, "batch_size": 5, "fraction_train": 0.5}, 5, 30),
        # with epochs, every client sees all of its own
        ({"budget_epochs": 12, "local_epochs": 2}, 5, 6),
        ({"budget_epochs": 12, "local_epochs": 2, "fraction_train": 0.4}, 5, 15),
        # never none
        ({"budget_epochs": 0.01, "local_epochs": 2}, 5, 1),
        # the validation samples are not trained on: 160 are left
        ({"budget_epochs": 2, "local_steps": 4, "batch_size": 4, "validation": 0.2}, 5, 4),
    ],
)
def test_a_budget_of_epochs_sets_the_rounds(
    options: dict[str, float], clients: int, rounds: int
) -> None:
    given = config(**options)
    assert rounds_within_budget(given, clients, len(load_data(given.data).train)).rounds == rounds


def test_the_centralized_reference_has_the_same_budget() -> None:
    shared = {"dataset": TINY, "budget-epochs": 3, "local-steps": 2, "batch-size": 4, "clients": 5}
    federated, central = (
        resolve({**shared, "method": method}).config for method in ("fedavg", "centralized")
    )
    assert (
        rounds_within_budget(federated, 5, 200).rounds
        == rounds_within_budget(central, 1, 200).rounds
        == 15
    )


# ---- models --------------------------------------------------------------------------------------


def test_a_model_fits_the_data_and_is_a_function_of_the_seed() -> None:
    first, again, other = (Material.of(config(seed=seed)).model.state_dict() for seed in (1, 1, 2))
    assert_same_state(first, again)
    assert not torch.equal(next(iter(first.values())), next(iter(other.values())))
    assert next(iter(first.values())).shape[1] == 1
    assert Material.of(config()).model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)


# ---- data ----------------------------------------------------------------------------------------


def test_validation_takes_the_test_datas_place_and_is_not_trained_on() -> None:
    whole, held_out = load_data(config().data), load_data(config(validation=0.25).data)
    assert (len(held_out.train), len(held_out.test)) == (150, 50)
    assert held_out is load_data(config(validation=0.25, seed=3).data)

    def rows(inputs: torch.Tensor) -> set[bytes]:
        return {row.numpy().tobytes() for row in inputs}

    assert rows(held_out.train.inputs) | rows(held_out.test.inputs) == rows(whole.train.inputs)
    assert rows(held_out.test.inputs).isdisjoint(rows(whole.test.inputs))


# ---- checks --------------------------------------------------------------------------------------


def test_only_a_federation_that_is_there_knows_how_many_it_is() -> None:
    there = resolve({"dataset": TINY}, federation=True)
    material = checked_material(there, there.make_strategy(0))
    assert material
    assert not material.partition
    assert [
        resolve({"dataset": TINY}, federation=there).config.clients for there in (True, False)
    ] == [0, 5]


def test_missing_weights_are_said_before_sites_are_asked() -> None:
    at_sites = resolve(
        {"dataset": "sites", "classes": "a,b", "init-from": "/nowhere/weights.pth"}, federation=True
    )
    with pytest.raises(
        UsageError, match=r"no weights: there is no file /nowhere/weights\.pth for init-from"
    ):
        checked_material(at_sites, at_sites.make_strategy(0))


def test_sharing_leaves_a_users_array_its_memory() -> None:
    """The array is a view of the tensor's memory, which nobody else may free."""
    inputs = torch.rand(6, 3)
    array, view, split = inputs.numpy(), inputs[:3], Split(inputs, torch.arange(6) % 2)
    place = array.ctypes.data
    assert Data("own", split, split, 2).share()
    assert split.inputs.is_shared()
    assert split.inputs.data_ptr() != place
    assert torch.equal(torch.from_numpy(array), split.inputs)
    # what else views the memory is where it was, which sharing in place would have moved
    assert (view.data_ptr(), view.is_shared()) == (place, False)


# ---- checks before the first round, and warnings -------------------------------------------------


HERE = "tests.helpers.other_shapes"


@pytest.mark.parametrize(
    "options", [{"method": "fedavg", "model": f"{HERE}:functional"}, {"method": "centralized+gn"}]
)
def test_a_method_that_does_without_bn_layers_takes_any_model(
    options: dict[str, str], tmp_path: Path
) -> None:
    assert run("run", rounds="1", results_dir=str(tmp_path), **options) == 0


def test_weights_that_are_standardized_as_batches_are_no_batch_normalization(
    tmp_path: Path,
) -> None:
    chosen = {"method": "fedbn", "model": f"{HERE}:standardized"}
    assert run("run", rounds="1", results_dir=str(tmp_path), **chosen) == 0


@pytest.mark.parametrize(
    ("method", "engine"),
    [("fedtan", "inprocess"), ("fedtan", "stacked"), ("fixbn:freeze-round=15", "stacked")],
)
def test_rows_of_numbers_are_trained_on(method: str, engine: str, tmp_path: Path) -> None:
    chosen = {
        "dataset": f"{HERE}:rows_of_numbers",
        "model": f"{HERE}:perceptron",
        "rounds": "20",
        "lr": "0.3",
    }
    assert run("run", engine=engine, method=method, results_dir=str(tmp_path), **chosen) == 0
    assert results(tmp_path)["summary"]["accuracy"] > 0.5


@pytest.mark.parametrize(("method", "times"), [("fedavg", 1), ("fedtan", 2)])
@pytest.mark.parametrize("engine", ["stacked", "inprocess"])
def test_what_no_node_can_do_is_said_without_a_traceback(
    method: str,
    times: int,
    engine: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flower_log: pytest.LogCaptureFixture,
) -> None:
    """A layer-wise step also says in the log which nodes failed in it."""
    given = {"method": method, "model": "mlp", "batch_size": "1", "engine": engine}
    assert run("run", results_dir=str(tmp_path), **given) == 1
    said = [*dict.fromkeys(flower_log.messages), capsys.readouterr().err.splitlines()[-1]]
    assert (
        "".join(said).count("batch normalization cannot train on a mini-batch of 1 sample") == times
    )
    assert not [record for record in flower_log.records if record.exc_info]
    folder = run_in(tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "rounds.jsonl",
        "summary.json",
    }
    assert (folder / "rounds.jsonl").read_text() == ""
    assert "mini-batch of 1 sample" in json.loads((folder / "summary.json").read_text())["failed"]


@pytest.mark.parametrize("method", ["fedbn", "hbn"])
def test_a_command_does_not_warn_of_what_stays_on_nodes(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert run("run", method=method, rounds="1", results_dir=str(tmp_path)) == 0
    assert not [record for record in caplog.records if "not trained" in record.getMessage()]


def test_outputs_of_no_class_are_said_once_and_count_as_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    chosen = {
        "model": f"{HERE}:wide",
        "methods": "fedavg,fedprox",
        "class_metrics": "f1,auc",
        "lr": "0",
    }
    assert run("compare", results_dir=str(tmp_path), **chosen) == 0
    line = (
        f"model '{HERE}:wide' has 7 outputs for 4 classes: a prediction of none of them counts "
        "as wrong"
    )
    assert caplog.messages.count(line) == 1
    summary = results(run_in(tmp_path, "fedavg"))["summary"]
    config = Config().but(dataset=DATA, model=f"{HERE}:wide")
    material = Material.of(config)
    inputs, labels = material.data.test.batch(torch.arange(40))
    with torch.no_grad():
        predicted = material.model(inputs).argmax(1)
    assert int(predicted.max()) > 3
    assert summary["accuracy"] == float((predicted == labels).double().mean())


def test_classes_that_nobody_has_and_a_single_seed_are_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    chosen = {"dataset": "digits", "partition": "classes:2", "clients": "3", "rounds": "1"}
    assert run("compare", "--methods", "fedavg,fedbn", results_dir=str(tmp_path), **chosen) == 0
    config = Config().but(partition="classes:2", clients=3)
    material = Material.of(config)
    held = set(material.data.train.labels[np.concatenate(material.partition)].tolist())
    few = ", ".join(str(number) for number in range(10) if number not in held)
    assert len(held) == 6
    line = f"no client has samples of some classes: {few} (classes:2 with 3 clients)"
    assert [record.getMessage() for record in caplog.records].count(line) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(f"Caution: {line}.") == 1
    assert shown.count("One seed: a difference may be chance.") == 1
    assert (
        run(
            "compare",
            methods="fedavg,fedbn",
            seeds="2",
            rounds="1",
            results_dir=str(tmp_path / "all"),
        )
        == 0
    )
    assert not {"Caution:", "One"} & set(capsys.readouterr().out.split())
