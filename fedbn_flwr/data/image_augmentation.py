"""Augmentation of one image at a time with torchvision, before it is scaled and normalized.

Every image has a seed of its own, drawn from the generator of seed, node and round. So an image looks the same in
whichever process it is decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedbn_flwr.data.pixels import Channels, normalize
from fedbn_flwr.plugins import extra
from fedbn_flwr.plugins.options import Range

#: height and width in pixels
Size = tuple[int, int]
BLACK = (0.0,)


@dataclass(frozen=True)
class ImageAugmentation:
    """An augmentation that changes each image by itself."""

    #: whether it makes the final size itself, out of the image as it is on disk
    sizes: ClassVar[bool] = False

    def transform(self, size: Size, fill: Sequence[float]) -> Any:
        """Return the transform of torchvision; `fill` is the value of added pixels."""
        raise NotImplementedError

    def edit(
        self, images: Sequence[Tensor], seeds: Sequence[int], size: Size, fill: Sequence[float] = BLACK
    ) -> list[Tensor]:
        """Change every image (C x H x W) under its own seed. PyTorch's global stream stays as it was."""
        return [image for (image,) in self.edit_together([(image,) for image in images], seeds, size, fill)]

    def edit_together(
        self, samples: Sequence[tuple[Tensor, ...]], seeds: Sequence[int], size: Size, fill: Sequence[float] = BLACK
    ) -> list[tuple[Tensor, ...]]:
        """Change every sample, an image alone or with its label map, in the same way for both."""
        transform, edited = self.transform(size, list(fill)), []
        with torch.random.fork_rng(devices=[]):  # transforms of torchvision draw from the global stream
            for sample, seed in zip(samples, seeds, strict=True):
                torch.default_generator.manual_seed(seed)
                result = transform(*sample)
                edited.append(result if len(sample) > 1 else (result,))
        return edited

    def __call__(self, inputs: Tensor, generator: torch.Generator, mean: Channels, std: Channels) -> Tensor:
        """Change a normalized batch N x C x H x W that is in memory."""
        black = normalize(torch.zeros(1, inputs.shape[1], 1, 1), mean, std).flatten().tolist()
        seeds = draw_seeds(len(inputs), generator).tolist()
        return torch.stack(self.edit(inputs.unbind(), seeds, (inputs.shape[-2], inputs.shape[-1]), black))


@dataclass(frozen=True)
class Edits:
    """An augmentation of single images, and the seeds of the samples that it changes."""

    augmentation: ImageAugmentation
    seeds: Tensor

    def __getitem__(self, samples: slice | Tensor) -> "Edits":
        return replace(self, seeds=self.seeds[samples])


def draw_seeds(count: int, generator: torch.Generator) -> Tensor:
    """Draw a seed for each of `count` samples."""
    seeds = torch.randint(2**62, (count,), generator=generator, device=generator.device)
    return seeds.cpu()


@dataclass(frozen=True)
class ResizedCropFlip(ImageAugmentation):
    """A random part of the image, scaled to the image size; half of them are mirrored.

    As PyTorch's training script for ImageNet, which FixBN follows for ImageNet and Tiny-ImageNet (appendix A.1).
    `scale` is the smallest share of the image's area; the sides' ratio is from 3/4 to 4/3.
    """

    scale: Annotated[float, Range(1e-6, 1)] = 0.08
    sizes: ClassVar[bool] = True

    def transform(self, size: Size, fill: Sequence[float]) -> Any:
        """Return RandomResizedCrop and RandomHorizontalFlip."""
        v2 = _transforms()
        return v2.Compose([v2.RandomResizedCrop(size, (self.scale, 1.0), antialias=True), v2.RandomHorizontalFlip()])


@dataclass(frozen=True)
class FlipRotate(ImageAugmentation):
    """Mirrors half of the images and rotates all by up to `degrees` each way; added corners are black.

    As FedBN's published code for Office-Caltech-10 and DomainNet, whose setting FedTAN and FedWon take over. Corners of
    a label map are `IGNORED`.
    """

    degrees: Annotated[float, Range(0, 180)] = 30.0

    def transform(self, size: Size, fill: Sequence[float]) -> Any:
        """Return RandomHorizontalFlip and RandomRotation."""
        v2 = _transforms()
        return v2.Compose([v2.RandomHorizontalFlip(), v2.RandomRotation(self.degrees, fill=_by_kind(fill))])


@dataclass(frozen=True)
class RandomCrop(ImageAugmentation):
    """A window of the image size at a random place of the image, which is not scaled.

    As FixBN's 768 x 768 crops of Cityscapes (appendix A.1). A label map is cut at the same place.
    """

    sizes: ClassVar[bool] = True

    def transform(self, size: Size, fill: Sequence[float]) -> Any:
        """Return RandomCrop; an image smaller than the window is padded with black, its label map with `IGNORED`."""
        return _transforms().RandomCrop(size, pad_if_needed=True, fill=_by_kind(fill))


#: the label of pixels without a class, which torch's cross entropy leaves out
IGNORED = -100


def _by_kind(fill: Sequence[float]) -> dict[type, Any]:
    """Return the value of added pixels in an image and in a label map."""
    from torchvision import tv_tensors

    return {Tensor: fill, tv_tensors.Mask: IGNORED}


def _transforms() -> Any:
    with extra("data"):  # imported here because it takes seconds
        from torchvision.transforms import v2

    return v2
