"""Augmentations move whole pixels, differently for every sample, and draw from the given generator
alone.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.data import AUGMENTATIONS, parse_augmentation
from fedbn_flwr.data.augmentation import Crop


def augment(
    spec: str, inputs: torch.Tensor, chances: torch.Generator, *moments: tuple[float, ...]
) -> torch.Tensor:
    augmentation, size = parse_augmentation(spec), (inputs.shape[-2], inputs.shape[-1])
    if augmentation is None:
        return inputs
    if isinstance(augmentation, Crop):
        mean, std = moments or ((), ())
        return augmentation.cut(inputs, augmentation.draw(len(inputs), size, chances), mean, std)
    seeds = torch.randint(2**62, (len(inputs),), generator=chances).tolist()
    edited = augmentation.edit([(image,) for image in inputs.cpu()], seeds, size)
    return torch.stack([image for (image,) in edited]).to(inputs.device)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference_crop_flip(
    inputs: torch.Tensor, chances: torch.Generator, flip: bool, border: int, fill: float
) -> torch.Tensor:
    """The slow, obvious way: pad, cut and mirror one image after the other."""
    rows = torch.randint(2 * border + 1, (len(inputs), 1), generator=chances)
    columns = torch.randint(2 * border + 1, (len(inputs), 1), generator=chances)
    mirrored = (
        torch.rand(len(inputs), 1, generator=chances) < 0.5 if flip else torch.zeros(len(inputs), 1)
    )
    images = []
    for image, row, column, mirror in zip(inputs, rows, columns, mirrored, strict=True):
        side = image.shape[-1]
        padded = torch.nn.functional.pad(image, (border,) * 4, value=fill)
        cut = padded[:, int(row) : int(row) + side, int(column) : int(column) + side]
        images.append(cut.flip(-1) if mirror else cut)
    return torch.stack(images)


@settings(max_examples=40)
@given(
    st.sampled_from(["crop", "crop-flip"]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([4, 8, 28, 32]),
    st.sampled_from([None, 0, 1, 5]),
    st.sampled_from([None, 0.0, 0.3, 1.0]),
    st.integers(0, 99),
)
def test_equal_to_one_image_after_the_other(
    name: str,
    count: int,
    channels: int,
    side: int,
    padding: int | None,
    fill: float | None,
    seed: int,
) -> None:
    """A fill of one value for all channels, in images that were not normalized, is what padding
    with it gives.
    """
    inputs = torch.rand(count, channels, side, side, generator=generator(seed))
    given = [
        f":{key}={value}"
        for key, value in (("padding", padding), ("fill", fill))
        if value is not None
    ]
    border = max(1, side // 8) if padding is None else padding
    expected = reference_crop_flip(
        inputs, generator(seed), name == "crop-flip", border, fill or 0.0
    )
    assert torch.equal(augment(name + "".join(given), inputs, generator(seed)), expected)


def test_fixbn_pads_two_black_pixels() -> None:
    """Black, which is 0 before normalization, is -mean / std after it, channel by channel."""
    mean, std = (0.5, 0.25), (0.25, 0.5)
    white = ((1 - torch.tensor(mean)) / torch.tensor(std)).view(1, 2, 1, 1).expand(500, 2, 32, 32)
    cropped = augment("crop:padding=2:fill=0", white, generator(), mean, std)
    for channel, (lightest, black) in enumerate([(2.0, -2.0), (1.5, -0.5)]):
        assert sorted(set(cropped[:, channel].flatten().tolist())) == [black, lightest]
        # an image that moved by 2 both ways shows 2 x 32 + 2 x 30 added pixels
        assert int((cropped[:, channel] == black).sum(dim=(1, 2)).max()) == 2 * 32 + 2 * 30
    mean_of_the_data = augment("crop:padding=2:fill=mean", white, generator(), mean, std)
    assert sorted(set(mean_of_the_data[:, 0].flatten().tolist())) == [0.0, 2.0]


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_function_of_the_generator_only(name: str) -> None:
    inputs = torch.randn(16, 3, 8, 8, generator=generator())
    before, chances = torch.random.get_rng_state(), generator()
    augment(name, inputs, chances)
    assert torch.equal(chances.get_state(), generator().get_state()) == (name == "none")
    first, again, other = (augment(name, inputs, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    # the only window of the image size in an image of this size is the image
    assert torch.equal(first, other) == (name in ("none", "random-crop"))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_cpu_generator_gives_the_same_on_a_gpu(name: str) -> None:
    inputs = torch.randn(16, 3, 8, 8, generator=generator())
    on_gpu = augment(name, inputs.cuda(), generator(1))
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), augment(name, inputs, generator(1)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none:padding=2", "augmentation 'none': unknown option 'padding'; known: none"),
        ("crop:size=2", "augmentation 'crop': unknown option 'size'; known: padding, fill"),
        ("crop:padding", "augmentation 'crop': 'padding' is not of the form key=value"),
        ("crop-flip:padding=-1", "augmentation 'crop-flip': padding must be at least 0, got -1"),
        ("crop:fill=black", "augmentation 'crop': fill must be a number or mean, got 'black'"),
        ("crop:fill=255", "augmentation 'crop': fill must be between 0 and 1, got 255.0"),
    ],
)
def test_an_option_that_cannot_be_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_augmentation(spec)
