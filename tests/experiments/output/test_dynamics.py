"""`dynamics.jsonl` against the definitions of FixBN's Figure 3, by hand from the clients'
batches.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn

from fedbn_flwr import state
from fedbn_flwr.client import BNClient
from fedbn_flwr.experiments.output.recorder import dynamics_of
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.server.round import Round
from fedbn_flwr.strategies import NodeReply
from fedbn_flwr.wire import ARRAYS, DYNAMICS, Instruction
from tests.helpers.runs import model_bytes, run, run_in
from tests.helpers.toys import CLASSES, toy_split

OPTIONS = {"record-dynamics": "2", "rounds": "4", "model": "mlp", "workers": "1"}


def rows_of(folder: Path, **options: str) -> list[dict[str, Any]]:
    assert run("run", **{**OPTIONS, "results-dir": str(folder), **options}) == 0
    return read_rounds(run_in(folder), "dynamics.jsonl")


def only_bn() -> nn.Module:
    """BN sees the data themselves, so that its mini-batch statistics are those of the batch."""
    return nn.Sequential(
        nn.BatchNorm2d(1, affine=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1, CLASSES),
    )


def l1(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().sum())


def test_a_client_reports_what_the_figure_defines() -> None:
    split, model = toy_split(12), only_bn()
    client = BNClient(model, split, num_classes=CLASSES, device="cpu")
    received = {name: value.clone() for name, value in model.state_dict().items()}
    received["0.running_mean"] += 0.5
    seen, reports = [], list[list[float]]()
    for server_round in (1, 2, 3, 5):
        instruction = Instruction(
            server_round=server_round, batch_size=4, local_steps=1, dynamics_window=3
        )
        ((inputs, _),) = client.plan(instruction)
        variance, mean = torch.var_mean(inputs.double(), dim=(0, 2, 3), correction=0)
        seen.append(torch.stack([variance, mean]))
        report = client.train({ARRAYS: received}, instruction).metrics[f"{DYNAMICS}0"]
        assert isinstance(report, list)
        reports.append(report)
    start = torch.stack([received["0.running_var"], received["0.running_mean"]]).double()
    for number, (change, distance, _) in enumerate(reports):
        assert distance == pytest.approx(l1(seen[number], start), rel=1e-5)
        assert number == 0 or change == pytest.approx(l1(seen[number], seen[number - 1]), rel=1e-5)
    assert math.isnan(reports[0][0])
    assert math.isnan(reports[0][2])
    # the window of round 3 has the rounds 1 to 3, that of round 5 has 3 and 5
    assert reports[2][2] == pytest.approx(
        float(torch.stack(seen[:3]).var(0, correction=0).sum()), rel=1e-5
    )
    assert reports[3][2] == pytest.approx(
        float(torch.stack(seen[2:]).var(0, correction=0).sum()), rel=1e-5
    )


def test_a_layer_that_received_no_statistics_has_no_distance_from_them() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(1, track_running_stats=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1, CLASSES),
    )
    client = BNClient(model, toy_split(12), num_classes=CLASSES, device="cpu")
    instruction = Instruction(server_round=1, batch_size=4, local_steps=1, dynamics_window=3)
    report = client.train({ARRAYS: state.snapshot(model)}, instruction).metrics[f"{DYNAMICS}0"]
    assert isinstance(report, list)
    assert list(map(math.isnan, report)) == [True] * 3


def test_a_run_has_a_row_for_each_layer_and_round(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, model="small-cnn")
    assert [row["round"] for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert [row["layer"] for row in rows[:3]] == ["1", "4", "7"]
    losses = [row["train-loss"] for row in read_rounds(run_in(tmp_path))]
    assert [row["loss"] for row in rows[::3]] == losses
    assert all(row["batch-change"] is None and row["window-variance"] is None for row in rows[:3])
    numbers = ("global-change", "batch-change", "local-distance", "window-variance")
    assert all(row[name] > 0 for row in rows[3:] for name in numbers)


def test_recording_changes_no_bit_of_the_model(tmp_path: Path) -> None:
    rows_of(tmp_path / "with", engine="inprocess")
    shared = {"rounds": "4", "model": "mlp", "workers": "1", "engine": "inprocess"}
    assert run("run", **shared, results_dir=str(tmp_path / "without")) == 0
    assert not (run_in(tmp_path / "without") / "dynamics.jsonl").exists()
    assert model_bytes(tmp_path / "with") == model_bytes(tmp_path / "without")


def test_frozen_statistics_stand_still_on_the_server(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, method="fixbn:freeze-round=2")
    assert [row["global-change"] > 0 for row in rows] == [True, True, False, False]
    assert all(row["local-distance"] > 0 for row in rows)


def test_the_rows_of_a_round_by_hand() -> None:
    def arrays(variance: list[float], mean: list[float]) -> ArrayRecord:
        return state.to_record(
            {"1.running_var": torch.tensor(variance), "1.running_mean": torch.tensor(mean)}
        )

    replies = [
        NodeReply(node, node, 1, {f"{DYNAMICS}1": [float("nan"), distance, 0.5]}, {}, RecordDict())
        for node, distance in enumerate((1.0, 4.0))
    ]
    before, after = arrays([1.0, 2.0], [0.0, 0.0]), arrays([4.0, 0.0], [0.0, -0.5])
    (row,) = dynamics_of(
        Round(1, current=state.arrays_of(before), after=after, replies=replies), 0.7
    )
    assert (row["global-change"], row["local-distance"], row["window-variance"]) == (5.5, 2.5, 0.5)
    assert math.isnan(row["batch-change"])
