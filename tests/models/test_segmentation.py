"""Networks that give each pixel a class."""

from collections.abc import Sequence

import pytest
import torch

from fedbn_flwr.models import MODELS, build
from fedbn_flwr.norm import bn_layers

NAMES = [name for name, entry in MODELS.items() if entry.task == "segmentation"]


def outputs_of(name: str, shape: Sequence[int], **options: str) -> torch.Size:
    model = build(name, num_classes=7, image_size=32, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        size: torch.Size = model(torch.randn(*shape)).shape
    return size


@pytest.mark.parametrize("name", NAMES)
def test_each_pixel_has_logits(name: str) -> None:
    if name.startswith("deeplab"):
        pytest.importorskip("segmentation_models_pytorch")
    assert outputs_of(name, (2, 3, 32, 64)) == (2, 7, 32, 64)
    assert outputs_of(name, (2, 3, 32, 32), norm="gn") == (2, 7, 32, 32)


def test_the_papers_networks_have_their_encoders_and_stride() -> None:
    pytest.importorskip("segmentation_models_pytorch")
    for name, parameters, channels in (
        ("deeplabv3plus-mobilenetv2", 4_379_541, 1280),
        ("deeplabv3plus-resnet50", 26_678_613, 2048),
    ):
        model = build(name, num_classes=5, image_size=768)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        features = model.encoder(torch.randn(1, 3, 64, 64))[-1]  # type: ignore[operator]
        assert features.shape == (1, channels, 4, 4)  # an output stride of 16
        assert len(bn_layers(model)) > 50
