"""Augmentations move whole pixels, differently for every sample, and draw from the given generator alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.data import AUGMENTATIONS, augment


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference_crop_flip(inputs: torch.Tensor, chances: torch.Generator, flip: bool) -> torch.Tensor:
    """The slow, obvious way: pad, cut and mirror one image after the other."""
    border = max(1, inputs.shape[-1] // 8)
    rows = torch.randint(2 * border + 1, (len(inputs), 1), generator=chances)
    columns = torch.randint(2 * border + 1, (len(inputs), 1), generator=chances)
    mirrored = torch.rand(len(inputs), 1, generator=chances) < 0.5 if flip else torch.zeros(len(inputs), 1)
    images = []
    for image, row, column, mirror in zip(inputs, rows, columns, mirrored, strict=True):
        side = image.shape[-1]
        padded = torch.nn.functional.pad(image, (border,) * 4)
        cut = padded[:, int(row) : int(row) + side, int(column) : int(column) + side]
        images.append(cut.flip(-1) if mirror else cut)
    return torch.stack(images)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from([4, 8, 28, 32]), st.integers(0, 99))
def test_equal_to_one_image_after_the_other(count: int, channels: int, side: int, seed: int) -> None:
    inputs = torch.randn(count, channels, side, side, generator=generator(seed))
    for name, flip in (("crop", False), ("crop-flip", True)):
        expected = reference_crop_flip(inputs, generator(seed), flip)
        assert torch.equal(augment(name, inputs, generator(seed)), expected)


def test_a_crop_of_32_pixels_moves_by_at_most_four() -> None:
    inputs = torch.zeros(2000, 1, 32, 32)
    inputs[:, :, 16, 16] = 1
    moved = augment("crop", inputs, generator()).nonzero()
    assert len(moved) == 2000
    for axis in (2, 3):
        assert sorted(set(moved[:, axis].tolist())) == list(range(12, 21))


def test_every_sample_has_a_crop_of_its_own() -> None:
    same = torch.randn(1, 3, 32, 32, generator=generator()).expand(64, -1, -1, -1)
    cropped = augment("crop", same, generator())
    assert len({tuple(image.flatten().tolist()) for image in cropped}) > 32


def test_about_half_of_the_images_are_mirrored() -> None:
    ramp = torch.arange(8.0).expand(4000, 1, 8, 8) + 1
    middle = augment("crop-flip", ramp, generator())[:, 0, 4]
    mirrored = (middle[:, 3] > middle[:, 4]).float().mean()
    assert 0.47 < mirrored < 0.53


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_function_of_the_generator_only(name: str) -> None:
    inputs = torch.randn(16, 3, 8, 8, generator=generator())
    before = torch.random.get_rng_state()
    first, again, other = (augment(name, inputs, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (name == "none")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_none_gives_the_inputs_and_draws_nothing() -> None:
    inputs, chances = torch.randn(2, 1, 8, 8), generator()
    before = chances.get_state()
    assert augment("none", inputs, chances) is inputs
    assert torch.equal(chances.get_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_cpu_generator_gives_the_same_on_a_gpu(name: str) -> None:
    inputs = torch.randn(16, 3, 8, 8, generator=generator())
    on_gpu = augment(name, inputs.cuda(), generator(1))
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), augment(name, inputs, generator(1)))


def test_an_unknown_augmentation_is_named() -> None:
    with pytest.raises(ValueError, match="unknown augmentation 'cutout'; there are: none, crop, crop-flip"):
        augment("cutout", torch.zeros(1, 1, 8, 8), generator())
