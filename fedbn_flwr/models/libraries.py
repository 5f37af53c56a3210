"""The networks of timm and torchvision by name, `timm:resnet18` and `torchvision:resnet18`, and their own weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from fedbn_flwr.models.weights import load_weights
from fedbn_flwr.plugins import did_you_mean, extra


@dataclass(frozen=True)
class Published:
    """A network of a library, and the images that it was trained with."""

    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: where the weights are published, and the library's cache of them
    source: str
    cache: str
    #: makes the network of the number of classes, the channels, the side of the images, and whether it has its weights
    make: Callable[[int, int, int, bool], nn.Module]


@cache
def _timm(name: str) -> Published:
    with extra("timm"):  # takes seconds to import: only who needs it pays
        import timm
    if not timm.is_model(name):
        raise ValueError(
            f"timm has no model {name!r}; {did_you_mean(name, timm.list_models(), shown='timm.list_models()')}"
        )
    about = timm.models.get_pretrained_cfg(name)

    def make(num_classes: int, in_channels: int, image_size: int, pretrained: bool) -> nn.Module:
        # transformers are made for one size
        size: dict[str, Any] = {"img_size": image_size} if about.fixed_input_size else {}
        classes = {} if pretrained else {"num_classes": num_classes}
        model: Any = timm.create_model(name, pretrained, in_chans=in_channels, **classes, **size)
        if pretrained and num_classes != model.num_classes:
            model.reset_classifier(num_classes)
        return model  # type: ignore[no-any-return]

    channels, side, _ = about.input_size
    source = f"model.safetensors of huggingface.co/{about.hf_hub_id}" if about.hf_hub_id else about.url
    return Published(side, channels, about.mean, about.std, source, "~/.cache/huggingface", make)


@cache
def _torchvision(name: str) -> Published:
    with extra("models"):
        from torchvision import models
    names = models.list_models(models)
    if name not in names:
        raise ValueError(f"torchvision has no model {name!r}; {did_you_mean(name, names)}")
    weights = models.get_model_weights(name).DEFAULT

    def make(num_classes: int, in_channels: int, image_size: int, pretrained: bool) -> nn.Module:
        del in_channels, image_size  # any size, and three channels
        model: nn.Module = models.get_model(name, num_classes=num_classes)
        if pretrained:
            load_weights(model, weights.get_state_dict(progress=False), f"torchvision:{name}", num_classes)
        return model

    images = weights.transforms()
    mean, std = (tuple(values) for values in (images.mean, images.std))
    return Published(images.crop_size[0], 3, mean, std, weights.url, "~/.cache/torch/hub/checkpoints", make)


LIBRARIES = {"timm": _timm, "torchvision": _torchvision}


def published(model: str) -> Published | None:
    """Return what a library has under a name `LIBRARY:NAME`; None if the name is none of a library."""
    library, _, name = model.partition(":")
    return LIBRARIES[library](name) if library in LIBRARIES else None


def make_published(model: str, pretrained: bool, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Make a library's network; a FileNotFoundError says where the file of its weights may lie."""
    found = published(model)
    assert found
    try:
        return found.make(num_classes, in_channels, image_size, pretrained)
    except OSError as error:
        raise FileNotFoundError(
            f"the weights of {model} are not in {found.cache}, and cannot be downloaded: give {found.source} "
            f"as init-from=FILE ({error})"
        ) from error
