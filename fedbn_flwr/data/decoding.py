"""From an image file to pixels: what one mini-batch asks for, and how it is decoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.data.augmentation import ImageAugmentation, Size, label_map
from fedbn_flwr.plugins import extra

if TYPE_CHECKING:
    from PIL.Image import Image

#: a file, or the bytes of one
Source = str | bytes
#: white in an image of 16 bits
DEEPEST = 2**16 - 1

#: how an image gets its size: `squash` scales both sides, `center` scales the short side to 8/7 of
#: it and cuts the middle out (PyTorch's 256 and 224 for ImageNet), `window` cuts the middle out
#: unscaled, `exact` expects the size
Fit = Literal["squash", "center", "window", "exact"]


class UnreadableImageError(ValueError):
    """An image that cannot be decoded."""


@dataclass(frozen=True)
class DecodeRequest:
    """A mini-batch to be decoded, with everything that it takes: any process may do it."""

    sources: Sequence[Source]
    size: Size
    fit: Fit
    augmentation: ImageAugmentation | None = None
    #: one for each image if there is an augmentation
    seeds: Sequence[int] = ()
    #: the label map of each image, where there are any
    maps: Sequence[Source] = ()
    #: the class of each value of a label map
    classes: Tensor | None = None

    def decode(self) -> tuple[Tensor, Tensor | None]:
        """Return the images, N x 3 x H x W bytes or floats from 0 to 1, and the label maps, N x H x
        W int64.
        """
        raw = self.augmentation is not None and self.augmentation.sizes
        samples: list[tuple[Tensor, ...]] = [(self._image(source, raw),) for source in self.sources]
        if self.maps:
            samples = [
                (*image, self._map(source, raw))
                for image, source in zip(samples, self.maps, strict=True)
            ]
        if self.augmentation is not None:
            samples = self.augmentation.edit(samples, self.seeds, self.size)
        return stack_samples(samples)

    def _image(self, source: Source, raw: bool) -> Tensor:
        image = read_image(source)
        if not raw:
            image = fitted(image, source, self.size, self.fit)
        return pixels(image)

    def _map(self, source: Source, raw: bool) -> Tensor:
        image = _opened(source)
        assert self.classes is not None
        if len(image.getbands()) > 1:
            raise UnreadableImageError(f"{source_name(source)} is not a label map: it has colours")
        if not raw:
            image = fitted(image, source, self.size, self.fit, smooth=False)
        values = np.asarray(image)
        return label_map(self.classes[torch.from_numpy(values.astype(np.int64))])


def read_image(source: Source) -> "Image":
    """Decode an image as RGB, or as floats from 0 to 1 (mode F) if it is grey with 16 bits.

    One that cannot be decoded is an UnreadableImageError of one line, which names the file.
    """
    image = _opened(source)
    if image.mode[0] not in "IF":
        if image.mode == "RGB":
            return image
        return image.convert("RGB")
    from PIL.Image import fromarray

    values = np.asarray(image).astype(np.float32) / np.float32(DEEPEST)
    if image.mode == "F" or values.min() < 0 or values.max() > 1:
        raise UnreadableImageError(
            f"{source_name(source)} has pixels other than whole numbers from 0 to {DEEPEST}"
        )
    return fromarray(values)


def _opened(source: Source) -> "Image":
    with extra("data"):
        from PIL import Image

    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise UnreadableImageError(f"{source_name(source)} cannot be decoded: {reason}") from None


def source_name(source: Source) -> str:
    """Return a file's path, or a description of bytes."""
    if isinstance(source, bytes):
        return f"an image of {len(source)} bytes"
    return source


def pixels(image: "Image") -> Tensor:
    """Return an RGB image as bytes, 3 x H x W; one of floats as floats."""
    values = torch.from_numpy(np.array(image))
    if image.mode == "F":
        return values.expand(3, -1, -1)
    return values.permute(2, 0, 1)


def stack_samples(samples: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor | None]:
    """Return the images of samples as one tensor, and their label maps, where there are any."""
    images, *maps = (torch.stack(_alike(parts)) for parts in zip(*samples, strict=True))
    if maps:
        return images.contiguous(), maps[0].as_subclass(Tensor)
    return images.contiguous(), None


def _alike(images: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the images as floats from 0 to 1 if some of them are."""
    if len({image.dtype for image in images}) == 1:
        return images
    return tuple(image if image.is_floating_point() else image / 255 for image in images)


def fitted(image: "Image", source: Source, size: Size, fit: Fit, smooth: bool = True) -> "Image":
    """Return the image at a size; without `smooth` no value is mixed from several."""
    from PIL.Image import Resampling

    height, width = size
    if image.size == (width, height):
        return image
    how: Any = Resampling.BILINEAR if smooth else Resampling.NEAREST
    if fit == "exact":
        raise UnreadableImageError(
            f"{source_name(source)} is not square or not of the size of the others: give an image "
            "size"
        )
    if fit == "squash":
        return image.resize((width, height), how)
    if fit == "center":
        factor = max(height * 8 / 7 / image.height, width * 8 / 7 / image.width)
        scaled = max(round(image.width * factor), width), max(round(image.height * factor), height)
        image = image.resize(scaled, how)
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
