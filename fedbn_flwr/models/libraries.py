"""The networks of timm and torchvision by name, `timm:resnet18` and `torchvision:resnet18`, and
their own weights.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from fedbn_flwr.models.weights import load_weights
from fedbn_flwr.plugins import Own, did_you_mean, extra
from fedbn_flwr.plugins.options import UsageError


@dataclass(frozen=True)
class Published:
    """A network of a library, and the images that it was trained with."""

    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: where its weights are, and the library's folder for them
    source: str
    folder: str
    #: takes the number of classes, the channels, the side of the images, and whether the network
    #: has its weights
    make: Callable[[int, int, int, bool], nn.Module]


@cache
def _timm(name: str) -> Published:
    with extra("timm"):
        import timm
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    try:
        about: Any = timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:  # no weights of this network have such a tag
        network = name.partition(".")[0]
        tagged = timm.list_models(f"{network}.*", pretrained=True)
        raise UsageError(
            f"timm has no model {name!r}; known: {', '.join([network, *tagged])}"
        ) from error

    def make(num_classes: int, in_channels: int, image_size: int, pretrained: bool) -> nn.Module:
        # transformers are made for one size
        options: dict[str, Any] = {"img_size": image_size} if about.fixed_input_size else {}
        if not pretrained:
            options["num_classes"] = num_classes
        model: Any = timm.create_model(name, pretrained, in_chans=in_channels, **options)
        if num_classes != model.num_classes:
            model.reset_classifier(num_classes)
        return model  # type: ignore[no-any-return]

    channels, side, _ = about.input_size
    if about.hf_hub_id:
        source = f"model.safetensors of huggingface.co/{about.hf_hub_id}"
    else:
        source = str(about.url)
    return Published(side, channels, about.mean, about.std, source, "~/.cache/huggingface", make)


@cache
def _torchvision(name: str) -> Published:
    with extra("models"):
        from torchvision import models
    if name not in (names := models.list_models(models)):
        raise _unknown("torchvision", name, names)
    weights = models.get_model_weights(name).DEFAULT

    def make(num_classes: int, in_channels: int, image_size: int, pretrained: bool) -> nn.Module:
        del in_channels, image_size  # any size, and three channels
        model: nn.Module = models.get_model(name, num_classes=num_classes)
        if pretrained:
            load_weights(
                model, weights.get_state_dict(progress=False), f"torchvision:{name}", num_classes
            )
        return model

    images = weights.transforms()
    mean, std = (tuple(values) for values in (images.mean, images.std))
    return Published(
        images.crop_size[0], 3, mean, std, weights.url, "~/.cache/torch/hub/checkpoints", make
    )


def _unknown(library: str, name: str, known: Iterable[str]) -> UsageError:
    return UsageError(
        f"{library} has no model {name!r}; "
        f"{did_you_mean(name, known, shown=f'{library}.list_models()')}"
    )


#: the libraries by name, each with what it says of a network of its own
LIBRARIES = {"timm": _timm, "torchvision": _torchvision}


def published(model: str | Own) -> Published | None:
    """Return what a library has under a name `LIBRARY:NAME`; None if the name is none of a
    library.
    """
    library, _, name = str(model).partition(":")
    if library in LIBRARIES and not isinstance(model, Own):
        return LIBRARIES[library](name)
    return None


def make_published(
    found: Published, pretrained: bool, classes: int, channels: int, image_size: int
) -> nn.Module:
    """Make a library's network; a FileNotFoundError says where the file of its weights may lie."""
    try:
        return found.make(classes, channels, image_size, pretrained)
    except OSError as error:
        where = f"in {found.folder}, and cannot be downloaded"
        raise FileNotFoundError(
            f"its weights are not {where}: give {found.source} as init-from=FILE"
        ) from error
