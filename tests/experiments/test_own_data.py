"""Users' own data: what a model takes can be made from raw data, mistakes are one line, and sites
are seen.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedbn_flwr import compare, run
from fedbn_flwr.data import load
from fedbn_flwr.data.own_data import READ_TWICE, own_data, preprocess
from fedbn_flwr.experiments import UsageError, main
from tests.helpers.image_sets import paint
from tests.helpers.runs import run_in

QUICK: dict[str, Any] = {
    "clients": 2,
    "rounds": 4,
    "local_steps": 4,
    "batch_size": 16,
    "lr": 0.05,
    "device": "cpu",
}
#: words of the command for one round
ONE = ("--rounds", "1", "--local-steps", "1", "--batch-size", "8", "--device", "cpu")


def pair(count: int, seed: int, side: int = 8) -> tuple[Tensor, Tensor]:
    """Return images around 100, far from what a model takes, whose class shows in a part of
    them.
    """
    labels, noise = (
        torch.arange(count) % 3,
        torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed)),
    )
    images = 100 + 20 * noise
    images[:, :, :2] += 25 * labels.view(-1, 1, 1, 1)
    return images, labels


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor]:
    ids, labels = (
        torch.randint(3, 40, (count, 6), generator=torch.Generator().manual_seed(seed)),
        torch.arange(count) % 3,
    )
    ids[::2, 0] = labels[::2]
    return ids, labels


class Words(nn.Module):
    """An embedding, which takes nothing but integers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = (
            nn.Embedding(40, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, num_classes),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of N x 6 ids."""
        logits: Tensor = self.last(self.norm(self.embedding(ids).transpose(1, 2)).amax(2))
        return logits


def as_bytes(images: Tensor) -> Tensor:
    return images.clamp(0, 255).to(torch.uint8)


RAW: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "floats": (lambda inputs: inputs, {}),
    "a float64 array": (lambda inputs: inputs.double().numpy(), {}),
    "bytes": (as_bytes, {}),
    "16 bits": (lambda inputs: (inputs.clamp(0, 255) * 16).numpy().astype(np.uint16), {}),
    "another size": (lambda inputs: as_bytes(inputs), {"image_size": 12}),
    "given moments": (as_bytes, {"mean": (0.4, 0.4, 0.4), "std": (0.1, 0.2, 0.3)}),
}


@pytest.mark.parametrize("kind", RAW)
def test_the_reported_accuracy_by_hand_from_raw_data(kind: str, tmp_path: Path) -> None:
    change, options = RAW[kind]
    (images, labels), (tested, truth) = pair(60, 1), pair(41, 2)
    raw, given = change(tested), ((change(images), labels), (change(tested), truth))
    found = run("fedavg", data=given, partition="iid", folder=tmp_path, **QUICK, **options)
    before = np.asarray(raw).copy()
    with torch.no_grad():
        predicted = found.model()(found.preprocess("fedavg", 0)(raw)).argmax(1)
    assert float((predicted == truth).sum()) / len(truth) == found.summaries[0]["accuracy"] > 0.4
    assert np.array_equal(np.asarray(raw), before)
    with safe_open(run_in(tmp_path) / "model.safetensors", "pt") as file:
        kept = json.loads(file.metadata()["about"])
    summary = json.loads((run_in(tmp_path) / "summary.json").read_text())
    assert kept == {
        "mean": summary["mean"],
        "std": summary["std"],
        "image-size": options.get("image_size", 8),
    }
    assert len(kept["mean"]) == 3
    assert all(value > 0 for value in kept["std"])


def test_says_that_test_data_have_another_scale(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    images, labels = pair(40, 1)
    for scale in (1, 255):
        run("fedavg", data=((images, labels), (images * scale, labels)), partition="iid", **QUICK)
        assert ("are they on one scale?" in flower_log.text) == (scale == 255)


def test_raw_data_on_another_scale_than_in_training_are_refused() -> None:
    images, labels = pair(40, 1)
    raw = as_bytes(images)

    def trained_on(inputs: Tensor) -> Callable[[Any], Tensor]:
        given = (inputs, labels), (inputs, labels)
        return run("fedavg", data=given, model="mlp", partition="iid", **QUICK).preprocess()

    preprocess = trained_on(raw)
    wanted = preprocess(raw)
    # floats from 0 to 1 are the same
    torch.testing.assert_close(preprocess(raw.numpy() / np.float32(255)), wanted)
    for other in (raw.float(), raw.long()):
        message = (
            f"inputs are {other.dtype}, and those of training torch.uint8: give them in that type"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            preprocess(other)
    torch.testing.assert_close(trained_on(raw / 255)(raw), wanted)
    with pytest.raises(
        ValueError, match=r"inputs are torch\.uint8, and those of training torch\.float32"
    ):
        trained_on(raw.float())(raw)


class Drawn(Dataset[Any]):
    """Images with a draw of torch's in those from a place on, as a random transform has it."""

    def __init__(self, start: int) -> None:
        self.start, (self.images, self.labels) = start, pair(24, 1)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) if place >= self.start else 0
        return self.images[place] + noise, self.labels[place]


@pytest.mark.parametrize(("start", "warned"), [(0, True), (READ_TWICE - 1, True), (24, False)])
def test_random_transforms_of_a_dataset_are_said(
    start: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = own_data((Drawn(24), Drawn(start)))
    assert data.test.inputs.shape == (24, 3, 8, 8)
    text = (
        "the test data change with each read, and are read once: leave random transforms to "
        "`augmentation`"
    )
    assert caplog.messages == [text] * warned


def test_ids_reach_the_model_as_they_are() -> None:
    (ids, labels), (tested, truth) = tokens(60, 1), tokens(41, 2)
    given = (ids.numpy().astype(np.int32), labels), TensorDataset(tested, truth)
    found = run("fedavg", data=given, model=Words, partition="iid", **QUICK)
    assert torch.equal(found.preprocess()(tested), tested)
    predicted = found.model()(tested).argmax(1)
    assert float((predicted == truth).sum()) / len(truth) == found.summaries[0]["accuracy"]
    assert (found.summaries[0]["mean"], found.summaries[0]["std"]) == ((), ())


def test_bn_that_cannot_take_one_sample_is_evaluated() -> None:
    def make_net(num_classes: int) -> nn.Module:
        statistics = nn.BatchNorm1d(4, track_running_stats=False)
        return nn.Sequential(nn.Linear(5, 4), statistics, nn.Linear(4, num_classes))

    # batches of 500, of which one sample is left over
    vectors, labels = torch.rand(501, 5), torch.arange(501) % 3
    split = vectors, labels
    result = run("fedavg", model=make_net, data=(split, split), **QUICK | {"rounds": 1})
    assert 0 < result.summaries[0]["accuracy"] < 1


def test_arrays_of_any_order_and_lists_of_pairs_are_taken() -> None:
    images, labels = pair(12, 1)
    array = images.numpy()
    forms: list[Any] = [
        (array[:, ::-1][:, ::-1], labels.numpy()[::-1][::-1]),
        (array[..., ::-1].copy()[..., ::-1], labels.tolist()),
        (array.astype(">f4"), labels.numpy().astype(">i8")),
        (images, labels.unsqueeze(1)),
        list(zip(images, labels.tolist(), strict=True)),
        list(zip(images, labels.numpy()[:, None], strict=True)),
    ]
    for form in forms:
        train = own_data((form, (images, labels))).train
        assert torch.equal(train.inputs, images)
        assert torch.equal(train.labels, labels)


def test_inputs_of_a_graph_are_taken_without_it() -> None:
    images, labels = pair(12, 1)
    images.requires_grad_()
    for inputs in (images, list(images)):
        assert not own_data(((inputs, labels), (inputs, labels))).train.inputs.requires_grad
    # of a trained model's inputs, such as for a map of what it looks at
    assert preprocess(images, images.detach()).requires_grad


def test_a_data_frame_of_inputs_is_an_array() -> None:
    images, labels = pair(40, 1)
    frame = pd.DataFrame(images.flatten(1).numpy())
    accuracies = [
        run(
            "fedavg",
            data=((inputs, labels), (inputs, labels)),
            model="mlp",
            partition="iid",
            **QUICK,
        ).summaries[0]
        for inputs in (frame, np.array(frame))
    ]
    assert accuracies[0]["loss"] == accuracies[1]["loss"]


# ---- sites ---------------------------------------------------------------------------------------


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Write three sites of two classes, with five images each, and no split for testing."""
    for site in range(3):
        for label, name in enumerate(("cat", "dog")):
            for number in range(5):
                paint(
                    tmp_path / f"site-{site}" / name / f"{number}.png",
                    100 * site + 10 * label + number,
                )
    return tmp_path


def test_sites_are_clients_unless_a_partition_is_given(sites: Path, tmp_path: Path) -> None:
    data, quick = f"folder:{sites}", {**QUICK, "rounds": 1}
    del quick["clients"]

    def chosen(results: Any) -> tuple[str, int]:
        return results.summaries[0]["partition"], results.summaries[0]["clients"]

    found = compare(["fedavg", "centralized"], data=data, **quick)
    assert [(run["partition"], run["clients"]) for run in found.summaries] == [
        ("domain", 3),
        ("union", 1),
    ]
    assert chosen(run("fedavg", data=load(data), clients=6, **quick)) == ("domain", 6)
    assert chosen(run("fedavg", data=data, partition="domain", **quick)) == ("domain", 3)
    assert chosen(run("fedavg", data=data, partition="iid", **quick)) == ("iid", 5)
    with pytest.raises(UsageError, match="3 domains with 1 each need 3 clients, not 4"):
        run("fedavg", data=data, clients=4, **quick)
    assert chosen(run("fedavg", data="digits", **quick)) == ("classes", 5)


@pytest.mark.parametrize(
    "command", [["run"], ["compare", "--methods", "fedavg"], ["diagnose", "--batches", "1"]]
)
def test_commands_see_sites_and_say_what_the_data_are(
    command: list[str], sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ONE if command != ["diagnose", "--batches", "1"] else ONE[4:]
    assert (
        main(
            [
                *command,
                "--dataset",
                f"folder:{sites}",
                "--results-dir",
                str(tmp_path / "out"),
                *words,
            ]
        )
        == 0
    )
    sizes = (
        "24 training and 6 test samples; 2 classes (cat, dog); 3 domains (site-0 8, site-1 8, "
        "site-2 8)"
    )
    assert f"{sites.name}: {sizes}\n" in capsys.readouterr().out
    written = json.loads(next((tmp_path / "out").rglob("[cd]*i*.json")).read_text())["options"]
    assert (written["partition"], written["clients"]) == ("domain", 3)


def test_classes_that_differ_by_upper_case_only_are_named(
    sites: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sites / "site-1" / "cat").rename(sites / "site-1" / " Cat")
    run("fedavg", data=f"folder:{sites}", rounds=1, device="cpu")
    assert (
        "classes differ only by upper case or spaces, and count as different ones:  Cat, cat"
        in caplog.text
    )
