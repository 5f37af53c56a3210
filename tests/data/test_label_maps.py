"""Label maps in memory: the batches of the same images and maps in files, and runs of a user's
own images.
"""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_jaccard_index

from fedbn_flwr import compare, run, wire
from fedbn_flwr.client import BNClient
from fedbn_flwr.client.batch_plan import BatchLoader
from fedbn_flwr.client.evaluation import shares
from fedbn_flwr.data import Data, Split, partition, renumbered
from fedbn_flwr.data.augmentation import IGNORED
from fedbn_flwr.data.file_split import EncodedImages, FileSplit
from fedbn_flwr.data.own_data import own_data
from fedbn_flwr.data.sets.cityscapes import class_of_value
from fedbn_flwr.experiments import UsageError
from fedbn_flwr.wire import Instruction

COUNT, HEIGHT, WIDTH, CLASSES = 12, 10, 14, 3


def pictures(count: int = COUNT, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images whose pixels are bright where the class is high; a corner has no class."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randint(CLASSES, (count, HEIGHT, WIDTH), generator=generator)
    noise = torch.randint(40, (count, 3, HEIGHT, WIDTH), generator=generator)
    images = (60 * maps[:, None] + noise).to(torch.uint8)
    maps[:, :2, :3] = IGNORED
    return images, maps


def encoded(images: Tensor) -> EncodedImages:
    """The images as files of PNG."""
    files = []
    for values in images.to(torch.uint8).numpy():
        file = BytesIO()
        Image.fromarray(values).save(file, "PNG")
        files.append(file.getvalue())
    return EncodedImages(files)


def in_files(images: Tensor, maps: Tensor) -> FileSplit:
    """The same images and maps as files, where 255 is what has no class."""
    values = maps.where(maps != IGNORED, 255)
    return FileSplit.of(
        encoded(images.permute(0, 2, 3, 1)),
        [0] * len(images),
        (HEIGHT, WIDTH),
        maps=encoded(values),
        classes=class_of_value(range(CLASSES)),
        workers=0,
    )


@pytest.mark.parametrize(
    "augmentation", ["none", "flip-rotate:degrees=45", "resized-crop-flip", "random-crop"]
)
def test_batches_are_those_of_the_files(augmentation: str) -> None:
    images, maps = pictures()
    samples = torch.tensor([4, 1, 1, 11, 0, 7])
    both = []
    for split in (Split(images, maps), in_files(images, maps)):
        generator = torch.Generator().manual_seed(3)
        device = torch.device("cpu")
        loaded = BatchLoader(split, device, augmentation, samples, [4, 2], generator)
        both.append([*loaded])
    for (own_images, own_maps), (their_images, their_maps) in zip(*both, strict=True):
        assert torch.equal(own_images, their_images)
        assert torch.equal(own_maps, their_maps)
        assert type(own_maps) is Tensor


def test_maps_are_resized_with_their_images() -> None:
    corners = torch.tensor([[0, 1], [2, IGNORED]])
    maps = corners.repeat_interleave(6, 0).repeat_interleave(6, 1)[None]
    images = maps.clamp(min=0).to(torch.float32)[:, None]
    split = Split(images, maps).resized(5)
    # the pixels in which the middles of the larger ones lie
    nearest = torch.tensor([1, 3, 6, 8, 10])
    assert torch.equal(split.labels, maps[:, nearest][:, :, nearest])
    assert split.inputs.shape == (1, 1, 5, 5)


def pixelwise(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, num_classes, 1)
    )


def test_a_pair_with_maps_is_segmentation_and_is_learnt() -> None:
    data = pictures(), pictures(4, seed=1)
    results = compare(
        ["fedavg", "fedbn", "fixbn:freeze-round=2"],
        model=pixelwise,
        data=data,
        clients=2,
        rounds=4,
        local_steps=4,
        batch_size=6,
        lr=0.1,
        optimizer="adam",
        augmentation="flip-rotate:degrees=10",
        progress=False,
    )
    assert not results.failures
    table = results.to_pandas().set_index("method")
    # a third by chance
    assert table.loc["fedavg", "mean-iou"] > 0.6
    assert table.loc["fedbn", "mean-iou-personal"] > 0.6


class Fcn(nn.Module):
    """A network that returns a dictionary, as torchvision's for segmentation do."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = pixelwise(num_classes)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        return {"out": logits, "aux": logits}


def half(num_classes: int) -> nn.Module:
    return nn.Sequential(pixelwise(num_classes), nn.MaxPool2d(2))


def test_models_of_torchvision_return_a_dictionary() -> None:
    data = pictures(), pictures(4, seed=1)
    options: dict[str, Any] = {
        "data": data,
        "clients": 2,
        "rounds": 1,
        "local_steps": 2,
        "progress": False,
    }
    named = run("fedtan", model=Fcn, **options).model("fedtan").state_dict()
    plain = run("fedtan", model=pixelwise, **options).model("fedtan").state_dict()
    for key, values in plain.items():
        torch.testing.assert_close(named[f"layers.{key}"], values, atol=1e-6, rtol=0)


def test_a_model_of_another_size_than_the_maps_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"outputs of the shape \(3, 5, 7\) for a sample, not \(3, 10, 14\)$"
    ):
        run("fedavg", model=half, data=(pictures(), pictures(4)), clients=2, rounds=1)


def test_maps_with_a_channel_and_of_truth_values_are_read() -> None:
    images, maps = pictures()
    data = own_data(((images, maps[:, None] == 1), (images, maps[:, None].numpy() == 1)))
    assert data.task == "segmentation"
    assert data.num_classes == 2
    assert torch.equal(data.train.labels, (maps == 1).short())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64])
def test_maps_are_kept_in_16_bits_where_these_have_their_classes(dtype: type) -> None:
    images, maps = pictures()
    given: np.ndarray = maps.clamp(min=0).numpy().astype(dtype)
    split = own_data(((images, given), (images, given))).train
    assert split.labels.dtype == torch.int16
    chosen = torch.tensor([3, 0])
    assert torch.equal(split.batch(chosen)[1], maps.clamp(min=0)[chosen])
    if dtype != np.uint8:
        given[0, 0, 0] = 2**15
        assert own_data(((images, given), (images, given))).train.labels.dtype == torch.int64


VOLUMES: dict[str, tuple[tuple[int, ...], type[nn.Module], type[nn.Module]]] = {
    "volumes": ((4, 6, 8), nn.Conv3d, nn.BatchNorm3d),
    "signals": ((40,), nn.Conv1d, nn.BatchNorm1d),
}


@pytest.mark.parametrize("kind", VOLUMES)
def test_volumes_and_signals_have_maps_too(kind: str) -> None:
    shape, convolution, norm = VOLUMES[kind]

    def scans(count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        maps = torch.randint(CLASSES, (count, *shape), generator=generator)
        noise = 0.2 * torch.rand(count, 1, *shape, generator=generator)
        values = maps[:, None] / CLASSES + noise
        maps[:, 0] = IGNORED
        return values, maps

    def model(num_classes: int) -> nn.Module:
        layers = convolution(1, 8, 1), norm(8), nn.ReLU(), convolution(8, num_classes, 1)
        return nn.Sequential(*layers)

    options: dict[str, Any] = {
        "model": model,
        "data": (scans(24, 0), scans(8, 1)),
        "clients": 3,
        "rounds": 4,
        "local_steps": 6,
        "lr": 0.05,
        "optimizer": "adam",
        "progress": False,
    }
    results = compare(["fedavg", "fedbn", "fedtan"], **options)
    assert not results.failures
    table = results.to_pandas().set_index("method")
    # a fifth by chance
    assert table.loc["fedavg", "mean-iou"] > 0.5
    assert table.loc["fedtan", "mean-iou"] > 0.5
    assert table.loc["fedbn", "mean-iou-personal"] > 0.5
    with pytest.raises(UsageError, match="augmentation 'flip-rotate' is for images, not for"):
        compare(["fedavg"], augmentation="flip-rotate", **options)


def test_a_client_knows_its_task_by_its_targets() -> None:
    """Without domains, its own images are like all others."""
    images, maps = pictures()
    client = BNClient(
        pixelwise(CLASSES), Split(images, maps), test=Split(images, maps), num_classes=CLASSES
    )
    received = {wire.ARRAYS: client.model.state_dict()}
    metrics = client.test(received, Instruction()).metrics
    with torch.no_grad():
        predicted = client.model.eval()(images / 255).argmax(1)
    wanted = multiclass_jaccard_index(predicted, maps, CLASSES, ignore_index=IGNORED)
    accuracy = (predicted == maps).sum() / (maps != IGNORED).sum()
    assert metrics["accuracy"] == pytest.approx(float(accuracy))
    assert metrics["accuracy-personal"] == metrics["accuracy"]
    assert metrics[wire.SCORE + "mean-iou"] == pytest.approx(float(wanted))
    assert metrics[wire.SCORE + "mean-iou-personal"] == pytest.approx(float(wanted))


def test_maps_are_no_classes_of_samples() -> None:
    data = own_data((pictures(), pictures()))
    assert data.train.targets == "label maps"
    assert data.validation_split(0.25, 0).test.labels.shape == (3, HEIGHT, WIDTH)
    with pytest.raises(ValueError, match="own data has label maps and no labels: take iid"):
        partition("dirichlet:1", data, clients=2, seed=0)
    domains, classes = shares(data.train, np.arange(5), CLASSES)
    assert domains.tolist() == [1.0]
    assert len(classes) == 0


def test_classes_of_maps_are_numbered_by_name_in_memory_and_in_files() -> None:
    images, maps = pictures()
    short = Split(images, maps.short())
    names = ("a", "b", "c")
    data = Data("named", short, in_files(images, maps), CLASSES, (), names, "segmentation")
    assert renumbered(data, names) is data
    other = renumbered(data, ("c", "d", "a", "b"))
    wanted = torch.full_like(maps, IGNORED)
    for old, new in ((0, 2), (1, 3), (2, 0)):
        wanted[maps == old] = new
    for split in (other.train, other.test):
        assert torch.equal(split.batch(torch.arange(COUNT))[1], wanted)
    assert (other.train.labels.dtype, other.num_classes) == (torch.int16, 4)


def test_maps_of_floats_are_no_classes() -> None:
    images, maps = pictures()
    data = ((images, maps.double()),) * 2
    with pytest.raises(UsageError, match=r"has float targets, .*; classes are integers from 0"):
        run("fedavg", data=data, model=pixelwise(CLASSES), clients=2)


def test_float_targets_are_put_in_order_by_name() -> None:
    targets = torch.arange(12.0).view(4, 3)
    split = Split(torch.zeros(4, 5), targets)
    data = Data("named", split, split, 3, (), ("a", "b", "c"), "regression")
    other = renumbered(data, ("c", "a", "b"))
    assert torch.equal(other.test.labels, targets[:, [2, 0, 1]])
    assert other.class_names == ("c", "a", "b")
    with pytest.raises(ValueError, match="named: its samples have no target 'd'"):
        renumbered(data, ("a", "b", "c", "d"))


def wrong_maps() -> list[tuple[Tensor, str]]:
    _, maps = pictures()
    white = maps.where(maps != IGNORED, 255)
    return [
        (
            maps[:, 1:],
            r"labels must be int64 or int16 for each pixel, \(12, 10, 14\), not \(12, 9, 14\)",
        ),
        (white, "have the value 255 and not 254: number the classes from 0, and give -100 to"),
        (maps.where(maps == IGNORED, maps + 1), "labels are 1 to 3, .* give labels - 1"),
        (maps - 1, "labels must be from 0 to 1, not -101 to 1"),
    ]


@pytest.mark.parametrize(("maps", "words"), wrong_maps())
def test_what_is_no_label_map_is_said(maps: Tensor, words: str) -> None:
    images, _ = pictures()
    with pytest.raises(ValueError, match=words):
        own_data(((images, maps), (images, maps)))


def test_maps_are_for_tasks_that_have_them() -> None:
    images, maps = pictures()
    split = Split(images, maps)
    with pytest.raises(ValueError, match="labels of 3 for classification cannot be"):
        Data("mine", split, split, CLASSES)
    plain = Split(images, torch.arange(COUNT) % CLASSES)
    with pytest.raises(ValueError, match="labels of 3 for segmentation cannot be"):
        Data("mine", plain, plain, CLASSES, task="segmentation")
