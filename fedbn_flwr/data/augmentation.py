"""Augmentations by name, and those of a whole batch on the batch's device.

An explicit generator makes every random choice. Some augmentations change one image at a time with
torchvision, before it is scaled and normalized. Each image then has a seed of its own, drawn from
the generator of seed, node and round. So an image looks the same in whichever process it is
decoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbn_flwr.data.pixels import Channels, normalize
from fedbn_flwr.plugins import did_you_mean, extra
from fedbn_flwr.plugins.options import Range, UsageError, options_of, read_options, read_pairs

#: height and width in pixels
Size = tuple[int, int]
#: the label of pixels without a class, which torch's cross entropy leaves out
IGNORED = -100


@dataclass(frozen=True)
class ImageAugmentation:
    """An augmentation that changes each image by itself."""

    #: whether it makes the final size itself, out of the image as it is on disk
    sizes: ClassVar[bool] = False

    def transform(self, size: Size) -> Any:
        """Return the transform of torchvision."""
        raise NotImplementedError

    def edit(
        self, samples: Sequence[tuple[Tensor, ...]], seeds: Sequence[int], size: Size
    ) -> list[tuple[Tensor, ...]]:
        """Change every sample under its own seed: an image (C x H x W) alone, or in the same way
        with its label map.

        PyTorch's global stream stays as it was.
        """
        transform = self.transform(size)
        edited = []
        # transforms of torchvision draw from the global stream
        with torch.random.fork_rng(devices=[]):
            for sample, seed in zip(samples, seeds, strict=True):
                torch.default_generator.manual_seed(seed)
                result = transform(*sample)
                edited.append(result if len(sample) > 1 else (result,))
        return edited


@dataclass(frozen=True)
class Edits:
    """An augmentation of single images, and the seeds of the samples that it changes."""

    augmentation: ImageAugmentation
    seeds: Tensor

    def __getitem__(self, samples: slice | Tensor) -> "Edits":
        return replace(self, seeds=self.seeds[samples])


@dataclass(frozen=True)
class ResizedCropFlip(ImageAugmentation):
    """A random part of the image, scaled to the image size; half of them are mirrored.

    As PyTorch's training script for ImageNet, which FixBN follows for ImageNet and Tiny-ImageNet
    (appendix A.1). `scale` is the smallest share of the image's area; the sides' ratio is from 3/4
    to 4/3.
    """

    scale: Annotated[float, Range(1e-6, 1)] = 0.08
    sizes: ClassVar[bool] = True

    def transform(self, size: Size) -> Any:
        """Return RandomResizedCrop and RandomHorizontalFlip."""
        v2 = _transforms()
        return v2.Compose(
            [
                v2.RandomResizedCrop(size, (self.scale, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
            ]
        )


@dataclass(frozen=True)
class FlipRotate(ImageAugmentation):
    """Mirrors half of the images and rotates all by up to `degrees` each way.

    Added corners are black.

    As FedBN's published code for Office-Caltech-10 and DomainNet, whose setting FedTAN and FedWon
    take over. Corners of a label map are `IGNORED`.
    """

    degrees: Annotated[float, Range(0, 180)] = 30.0

    def transform(self, size: Size) -> Any:
        """Return RandomHorizontalFlip and RandomRotation."""
        v2 = _transforms()
        return v2.Compose(
            [v2.RandomHorizontalFlip(), v2.RandomRotation(self.degrees, fill=_fill())]
        )


@dataclass(frozen=True)
class RandomCrop(ImageAugmentation):
    """A window of the image size at a random place of the image, which is not scaled.

    As FixBN's 768 x 768 crops of Cityscapes (appendix A.1). A label map is cut at the same place.
    """

    sizes: ClassVar[bool] = True

    def transform(self, size: Size) -> Any:
        """Return RandomCrop; an image smaller than the window is padded with black, its label map
        with `IGNORED`.
        """
        return _transforms().RandomCrop(size, pad_if_needed=True, fill=_fill())


def label_map(classes: Tensor) -> Tensor:
    """Return a label map, H x W, as one that transforms of torchvision know as such."""
    from torchvision import tv_tensors

    return cast(Tensor, tv_tensors.Mask(classes))


def _fill() -> dict[type, Any]:
    """Return the value of added pixels in an image and in a label map."""
    from torchvision import tv_tensors

    return {Tensor: [0.0], tv_tensors.Mask: IGNORED}


def _transforms() -> Any:
    with extra("data"):  # imported here because it takes seconds
        from torchvision.transforms import v2

    return v2


@dataclass(frozen=True)
class Crop:
    """Pads every image and cuts it back to its size at a random place.

    `flip` then mirrors half of the images.

    `padding` is in pixels on each side. By default it is an eighth of the side, the usual 4 on 32 x
    32 images. `fill` is the value of the added pixels before normalization, from 0 (black) to 1
    (white). By default the added pixels are 0 after normalization, the mean of the data. FixBN pads
    by 2 pixels (appendix A.1), which torchvision's RandomCrop leaves black:
    `crop-flip:padding=2:fill=0`.
    """

    flip: bool
    padding: Annotated[int | None, Range(0)] = None
    fill: Annotated[float | Literal["mean"], Range(0, 1)] = "mean"

    def draw(self, count: int, size: Sequence[int], generator: torch.Generator) -> Tensor:
        """Draw for every image the first row and column of its crop, and whether it is mirrored:
        count x 3.
        """
        offsets = [2 * self._border(side) + 1 for side in size]
        drawn = [torch.randint(most, (count, 1), generator=generator) for most in offsets]
        if self.flip:
            drawn.append((torch.rand(count, 1, generator=generator) < 0.5).long())
        return torch.cat(drawn, 1)

    def cut(self, inputs: Tensor, drawn: Tensor, mean: Channels, std: Channels) -> Tensor:
        """Crop a batch as it was drawn."""
        row, column, *mirrored = drawn.to(inputs.device, non_blocking=True).split(1, 1)
        rows, columns = (
            first + torch.arange(side, device=inputs.device)
            for first, side in zip((row, column), inputs.shape[-2:], strict=True)
        )
        if self.flip:
            columns = torch.where(mirrored[0] > 0, columns.flip(1), columns)
        padded = self._padded(inputs, mean, std)
        images = torch.arange(inputs.shape[0], device=inputs.device)[:, None, None, None]
        channels = torch.arange(inputs.shape[1], device=inputs.device)[None, :, None, None]
        return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]

    def _border(self, side: int) -> int:
        if self.padding is None:
            return max(1, side // 8)
        return self.padding

    def _padded(self, inputs: Tensor, mean: Channels, std: Channels) -> Tensor:
        height, width = inputs.shape[-2:]
        above = self._border(height)
        left = self._border(width)
        if isinstance(self.fill, str):
            return F.pad(inputs, (left, left, above, above))
        fill = torch.full((1, inputs.shape[1], 1, 1), self.fill, device=inputs.device)
        shape = (*inputs.shape[:2], height + 2 * above, width + 2 * left)
        padded = normalize(fill, mean, std).to(inputs.dtype).expand(shape).clone()
        padded[..., above : above + height, left : left + width] = inputs
        return padded


#: None leaves images as they are
Augmentation = ImageAugmentation | Crop | None


def _no_augmentation() -> Augmentation:
    """Images as they are."""
    return None


#: makes an augmentation from its options
AUGMENTATIONS: dict[str, Callable[..., Augmentation]] = {
    "none": _no_augmentation,
    "crop": partial(Crop, False),
    "crop-flip": partial(Crop, True),
    "resized-crop-flip": ResizedCropFlip,
    "flip-rotate": FlipRotate,
    "random-crop": RandomCrop,
}


@lru_cache(maxsize=64)
def parse_augmentation(spec: str) -> Augmentation:
    """Read `NAME[:option=VALUE]...`; a name or option that does not exist is a UsageError."""
    name, *items = spec.split(":")
    if name not in AUGMENTATIONS:
        raise UsageError(f"unknown augmentation {name!r}; {did_you_mean(name, AUGMENTATIONS)}")
    owner = f"augmentation {name!r}"
    make = AUGMENTATIONS[name]
    return make(**read_options(owner, options_of(make), read_pairs(owner, items)))
