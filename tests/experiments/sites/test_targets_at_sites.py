"""Sites whose samples have label maps, float targets, or nothing but channels: runs have the bits of
those on all data together.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from sklearn.metrics import confusion_matrix, roc_auc_score
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from apps.client import app
from fedbn_flwr import state
from fedbn_flwr.data import Data, Split
from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.experiments import UsageError, serve
from fedbn_flwr.experiments.output.run_folder import read_rounds
from fedbn_flwr.models import build
from fedbn_flwr.simulation.in_process import InProcessGrid
from tests.helpers.runs import model_bytes
from tests.helpers.site_folders import SitesInProcess

HERE = __name__
OPTIONS: dict[str, Any] = {
    "clients": 3,
    "node-timeout": 20,
    "rounds": 2,
    "local-steps": 2,
    "batch-size": 4,
    "evaluate-every": 1,
    "device": "cpu",
    "seed": 3,
}
ORGANS = ("none", "liver", "spleen")
#: the names of one site are in another order
ORDER = (2, 0, 1)


def scans(site: int, role: str) -> tuple[Tensor, Tensor]:
    """Images whose classes differ in brightness; some pixels have no class."""
    generator = torch.Generator().manual_seed(10 * site + len(role))
    maps = torch.randint(3, (9, 8, 8), generator=generator)
    noise = torch.rand(9, 2, 8, 8, generator=generator)
    images = maps[:, None] - 1 + noise + site / 4
    maps[:, 0, :3] = IGNORED
    return images, maps


def data_of(name: str, splits: Sequence[Split], names: Sequence[str], task: str) -> Data:
    train, test = splits
    return Data(name, train, test, len(names), class_names=tuple(names), task=task)


def scans_at(site: int) -> Data:
    splits = [Split(*scans(site, role)) for role in ("train", "test")]
    return data_of("scans", splits, ORGANS, "segmentation")


def first_scans() -> Data:
    return scans_at(0)


def second_scans() -> Data:
    """The same as of `scans_at(1)`, with classes in another order."""
    splits = []
    for role in ("train", "test"):
        images, maps = scans(1, role)
        changed = maps.clone()
        for new, old in enumerate(ORDER):
            changed[maps == old] = new
        splits.append(Split(images, changed.short()))
    return data_of("scans", splits, [ORGANS[old] for old in ORDER], "segmentation")


def third_scans() -> Data:
    return scans_at(2)


def findings_at(site: int) -> Data:
    """Findings in signals: float targets of several classes at once."""
    splits = []
    for role in ("train", "test"):
        generator = torch.Generator().manual_seed(10 * site + len(role))
        signals = torch.randn(9, 2, 16, generator=generator) + site
        found = (signals.amax(2) > 2 + site).float()
        splits.append(Split(signals, found))
    return data_of("findings", splits, ("left", "right"), "regression")


def first_findings() -> Data:
    return findings_at(0)


def second_findings() -> Data:
    data = findings_at(1)
    splits = [Split(split.inputs, split.labels.flip(1)) for split in (data.train, data.test)]
    return data_of("findings", splits, ("right", "left"), "regression")


def one_finding() -> Data:
    data = findings_at(1)
    splits = [Split(split.inputs, split.labels[:, :1]) for split in (data.train, data.test)]
    return data_of("findings", splits, ("left",), "regression")


def third_findings() -> Data:
    return findings_at(2)


def together(parts: Sequence[Data]) -> Data:
    """All data in one place, a domain for each site."""
    splits = []
    for split in ([part.train for part in parts], [part.test for part in parts]):
        inputs = torch.cat([each.inputs for each in split])
        labels = torch.cat([each.labels for each in split])
        splits.append(Split(inputs, labels, torch.arange(3).repeat_interleave(len(split[0]))))
    domains = ("0", "1", "2")
    return replace(parts[0], name="all", train=splits[0], test=splits[1], domain_names=domains)


def pictures_at(site: int) -> Data:
    """Noisy images and what they were: targets that have no names."""
    splits = []
    for role in ("train", "test"):
        generator = torch.Generator().manual_seed(10 * site + len(role))
        clean = torch.rand(9, 1, 8, 8, generator=generator) + site
        splits.append(Split(clean + torch.randn(9, 1, 8, 8, generator=generator), clean))
    return Data("pictures", splits[0], splits[1], 64, task="regression")


def first_pictures() -> Data:
    return pictures_at(0)


def second_pictures() -> Data:
    return pictures_at(1)


def third_pictures() -> Data:
    return pictures_at(2)


def all_pictures() -> Data:
    return together([pictures_at(site) for site in range(3)])


def denoiser(in_channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 1, 1),
    )


def all_scans() -> Data:
    return together([scans_at(site) for site in range(3)])


def all_findings() -> Data:
    return together([findings_at(site) for site in range(3)])


def blood() -> Data:
    """Ten numbers a sample, of which each is below zero, and has a deviation of exactly 1."""
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    inputs = (signs[:, None] - 3).repeat(1, 10)
    split = Split(inputs, torch.arange(8) % 2)
    return data_of("blood", [split, split], ("ill", "well"), "classification")


def more_blood() -> Data:
    data = blood()
    split = Split(data.train.inputs + 2.0**-20, data.train.labels)
    return replace(data, train=split, test=split)


def no_blood() -> Data:
    labels = torch.arange(8) % 2
    test = Split(torch.ones(8, 10, dtype=torch.uint8), labels)
    return data_of(
        "blood", [Split(test.inputs[:0], labels[:0]), test], ("ill", "well"), "classification"
    )


def first_words() -> Data:
    return words_at(0)


def second_words() -> Data:
    return words_at(1)


def words_at(site: int) -> Data:
    """Sentences as the ids of five words out of twenty."""
    splits = []
    for role in ("train", "test"):
        generator = torch.Generator().manual_seed(10 * site + len(role))
        ids = torch.randint(20, (96, 5), generator=generator)
        splits.append(Split(ids, (ids.sum(1) > 47).long()))
    return data_of("words", splits, ("short", "long"), "classification")


class Reader(torch.nn.Module):
    """Takes ids only."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of sentences."""
        return self.head(self.norm(self.words(ids).mean(1)))  # type: ignore[no-any-return]


def mean_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(outputs, targets)


def conv(num_classes: int, in_channels: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv1d(in_channels, 8, 3, bias=False),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool1d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, num_classes),
    )


def at_sites(
    folder: Path,
    functions: Sequence[str],
    classes: Sequence[str],
    make_grid: type[SitesInProcess] = SitesInProcess,
    /,
    **options: Any,
) -> dict[str, Any]:
    """Run with these functions as data of the sites; returns the summary."""
    given = {**OPTIONS, "dataset": "sites", "classes": ",".join(classes)}
    given |= {"results-dir": str(folder), "clients": len(functions), **options}
    sites = [f"{HERE}:{function}" for function in functions]
    return serve(make_grid(sites, given), given)


def on_all(folder: Path, function: str, agreed: Mapping[str, Any], **options: Any) -> None:
    """Run on all data in one place, normalized as the sites have agreed."""
    given = {**OPTIONS, "dataset": f"{HERE}:{function}", "partition": "domain"}
    given |= {"mean": agreed["mean"], "std": agreed["std"], "results-dir": str(folder), **options}
    serve(InProcessGrid(app, 3, given), given)


def agreed_in(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((folder / "config.json").read_text())["options"]
    return options


SCANS = ("first_scans", "second_scans", "third_scans")
PICTURES = ("first_pictures", "second_pictures", "third_pictures")
FINDINGS = ("first_findings", "second_findings", "third_findings")
TARGETS = [
    (SCANS, "all_scans", ORGANS, {"model": "small-fcn"}),
    (
        FINDINGS,
        "all_findings",
        ("left", "right"),
        {"model": f"{HERE}:conv", "objective": f"{HERE}:mean_error"},
    ),
    (PICTURES, "all_pictures", (), {"model": f"{HERE}:denoiser", "objective": "mse"}),
]


@pytest.mark.parametrize("method", ["fixbn", "fedtan"])
@pytest.mark.parametrize(("functions", "whole", "classes", "options"), TARGETS)
def test_models_have_the_bits_of_runs_on_all_data(
    functions: Sequence[str],
    whole: str,
    classes: Sequence[str],
    options: Mapping[str, Any],
    method: str,
    tmp_path: Path,
) -> None:
    at_sites(tmp_path / "sites", functions, classes, method=method, **options)
    on_all(tmp_path / "all", whole, agreed_in(tmp_path / "sites"), method=method, **options)
    assert model_bytes(tmp_path / "sites") == model_bytes(tmp_path / "all")
    losses = [
        [row["train-loss"] for row in read_rounds(tmp_path / name)] for name in ("sites", "all")
    ]
    assert losses[0] == losses[1]


def test_normalization_and_mean_iou_are_of_the_sites_own_data(tmp_path: Path) -> None:
    summary = at_sites(tmp_path, SCANS, ORGANS, model="small-fcn", **{"class-metrics": "iou,f1"})
    options = agreed_in(tmp_path)
    inputs = torch.cat([scans(site, "train")[0] for site in range(3)]).double()
    mean, std = (
        torch.tensor([float(part) for part in options[key].split(",")]) for key in ("mean", "std")
    )
    assert torch.allclose(mean.double(), inputs.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(std.double(), inputs.std((0, 2, 3), correction=0), atol=1e-6)
    assert summary["metric"] == "mean-iou"
    model = build("small-fcn", num_classes=3, in_channels=2, image_size=8, seed=0).eval()
    state.load(model, load_file(tmp_path / "model.safetensors"))
    measured = []
    for site in range(3):
        images, maps = scans(site, "test")
        with torch.no_grad():
            predicted = model((images - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)).argmax(1)
        there = maps != IGNORED
        counts = confusion_matrix(maps[there], predicted[there], labels=[0, 1, 2])
        hits = np.diag(counts)
        union = counts.sum(0) + counts.sum(1) - hits
        measured.append(float((hits[union > 0] / union[union > 0]).mean()))
        row = summary["sites"][str(site)]
        assert set(row) == {"accuracy", "mean-iou", "loss", "iou", "f1"}
        assert row["iou"] == pytest.approx(dict(zip(ORGANS, hits / union, strict=True)))
        dice = 2 * hits / (counts.sum(0) + counts.sum(1))
        assert row["f1"] == pytest.approx(dict(zip(ORGANS, dice, strict=True)))
        assert row["mean-iou"] == pytest.approx(measured[-1], abs=1e-12)
        assert row["accuracy"] == pytest.approx(hits.sum() / counts.sum(), abs=1e-12)
    assert summary["mean-iou"] == pytest.approx(sum(measured) / 3, abs=1e-12)
    table = json.loads((tmp_path / "config.json").read_text())["sites"]
    assert table[1] == {"site": 1, "shape": [2, 8, 8], "samples": [9, 9]}


def test_an_impossible_mean_iou_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lying(SitesInProcess):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                key = (reply.metadata.message_type, reply.metadata.src_node_id)
                if key == ("evaluate", 1001):
                    reply.content.metric_records["metrics"]["score-mean-iou"] = 1000.0
            return replies

    summary = at_sites(tmp_path, SCANS, ORGANS, Lying, model="small-fcn")
    assert list(summary["sites"]) == ["0", "2"]
    assert 0 <= summary["mean-iou"] <= 1
    assert "Node 1001 is left out of the scores: its 'score-mean-iou' is 1000.0" in caplog.messages


def test_float_targets_are_scored_by_their_error(tmp_path: Path) -> None:
    options = {"model": f"{HERE}:conv", "objective": "mse", "stop-at": 1e-9}
    summary = at_sites(tmp_path, FINDINGS, ("left", "right"), **options)
    assert summary["metric"] == "mse"
    errors = [summary["sites"][str(site)]["mse"] for site in range(3)]
    assert summary["mse"] == pytest.approx(sum(errors) / 3)
    assert len(read_rounds(tmp_path)) == 2


def test_float_targets_that_are_0_or_1_have_an_area_each(tmp_path: Path) -> None:
    options = {"model": f"{HERE}:conv", "objective": "bce", "class-metrics": "auc"}
    summary = at_sites(tmp_path, FINDINGS, ("left", "right"), **options)
    agreed = agreed_in(tmp_path)
    mean, std = (
        torch.tensor([float(part) for part in agreed[key].split(",")])[:, None]
        for key in ("mean", "std")
    )
    model = build(f"{HERE}:conv", num_classes=2, in_channels=2, image_size=16, seed=0).eval()
    state.load(model, load_file(tmp_path / "model.safetensors"))
    measured: dict[str, list[float]] = {"left": [], "right": []}
    for site, data in enumerate([first_findings(), second_findings(), third_findings()]):
        with torch.no_grad():
            outputs = model((data.test.inputs - mean) / std)
        row = summary["sites"][str(site)]["auc"]
        for column, name in enumerate(("left", "right")):
            labels = data.test.labels[:, data.class_names.index(name)]
            if len(labels.unique()) == 2:
                wanted = roc_auc_score(labels, outputs[:, column])
                assert row[name] == pytest.approx(wanted, abs=1e-6)
                measured[name].append(wanted)
            else:
                assert name not in row
    assert all(measured.values())
    assert summary["class-auc"] == {
        name: pytest.approx(np.mean(areas), abs=1e-6) for name, areas in measured.items()
    }


def test_channels_below_zero_keep_their_deviation_and_samples_their_form(tmp_path: Path) -> None:
    summary = at_sites(tmp_path, ("blood", "more_blood"), ("ill", "well"), model="mlp")
    options = agreed_in(tmp_path)
    assert {round(float(part), 5) for part in options["mean"].split(",")} == {-3.0}
    assert {round(float(part), 9) for part in options["std"].split(",")} == {1.0}
    assert summary["accuracy"] == 1.0


def test_inputs_may_be_ids_which_have_no_moments(tmp_path: Path) -> None:
    options = {"model": f"{HERE}:Reader", "method": "fixbn:freeze-round=0.5", "lr": 0.5}
    words = ("first_words", "second_words")
    summary = at_sites(
        tmp_path, words, ("short", "long"), rounds=40, **{**options, "batch-size": 16}
    )
    assert (summary["mean"], summary["std"]) == ((), ())
    assert summary["accuracy"] > 0.75


MISTAKES = [
    (("first_scans", "blood"), ("none", "liver", "spleen", "ill", "well"), {}, "for segmentation"),
    (
        ("first_scans",),
        ORGANS,
        {"model": "small-fcn", "class-metrics": "auc"},
        "class-metrics=auc is of samples, and scans has label maps",
    ),
    (("first_scans",), ORGANS, {"model": "small-fcn", "augmentation": "crop"}, "label maps"),
    (("first_findings",), ("left", "right"), {"model": f"{HERE}:conv"}, "which need objective="),
    (
        ("first_findings", "one_finding"),
        ("left", "right"),
        {"model": f"{HERE}:conv", "objective": "mse"},
        "findings: its samples have no target 'right'",
    ),
    (("blood",), ("ill", "well"), {"model": "mlp", "objective": "mse"}, "is for float targets"),
    (("blood", "no_blood"), ("ill", "well"), {"model": "mlp"}, "have no training samples"),
    (("blood",), ("ill", "well"), {"model": "mlp", "stop-at": 90}, "stop-at must be at most 1"),
]


@pytest.mark.parametrize(("functions", "classes", "options", "reason"), MISTAKES)
def test_what_does_not_fit_ends_the_run_before_round_1(
    functions: Sequence[str],
    classes: Sequence[str],
    options: Mapping[str, Any],
    reason: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError) as error:
        at_sites(tmp_path / "results", functions, classes, **options)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "results").exists()
