"""Domains of the same ten classes, for feature shift: of digits that the dependencies ship, and of
a user's images.

No paper uses these data. They stand in for sets such as Digits-Five, without a download. Four
domains show the real digits of scikit-learn, the fifth shows digits of fonts. A real digit of the
test set is in the test set of all four domains, and four of the twenty fonts are in the test set
only. So no domain trains on a digit that a test image shows.

`image_domains` makes four domains of any grey images of 28x28 pixels, in the same four ways.
"""

from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedbn_flwr.data.splits import Data, Split, stratified
from fedbn_flwr.plugins import extra
from fedbn_flwr.randomness import numpy_generator, torch_generator

#: number of digits in the test set
HELD_OUT = 360
SIDE = 28
#: fonts that matplotlib ships, with digits of the common form
TRAIN_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmti10",
)
TEST_FONTS = ("DejaVuSans-Oblique", "DejaVuSerif-Italic", "STIXGeneralBol", "cmtt10")
#: drawings of every digit in every font: 1,440 for training and 360 for testing
DRAWINGS = 9
Draw = Callable[[Tensor, torch.Generator], Tensor]
DOMAINS = ("real", "fonts", "photos", "inverted", "sheared")


def digits() -> Data:
    """Load the digits; the test set is always the same 360, a fifth of every class."""
    images, labels, test = real_digits()
    inputs = torch.from_numpy(images).unsqueeze(1)
    everything = Split(inputs, torch.from_numpy(labels))
    return Data(
        "digits",
        everything.select(np.flatnonzero(~test)),
        everything.select(np.flatnonzero(test)),
        10,
    )


def real_digits() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the images (N x 8 x 8, from 0 to 1), their labels, and a mask of the test set."""
    images, labels = _read()
    test = np.zeros(len(labels), dtype=np.bool_)
    test[stratified(labels, HELD_OUT, numpy_generator(0, "digits", "test"))] = True
    return (images / 16).astype(np.float32).reshape(-1, 8, 8), labels, test


def _read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read scikit-learn's file without importing scikit-learn, which takes 3.4 CPU seconds.

    The file takes 0.1.
    """
    with extra("data"):
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


def digits_domains() -> Data:
    """Make the domains, 28x28 RGB; the images are the same every time."""
    images, labels, test = real_digits()
    small = torch.from_numpy(images).unsqueeze(1)
    upscaled = F.interpolate(small, size=(SIDE, SIDE), mode="bicubic").clamp(0, 1)
    splits = []
    for role, chosen, fonts in (("train", ~test, TRAIN_FONTS), ("test", test, TEST_FONTS)):
        originals = upscaled[chosen]
        original_labels = torch.from_numpy(labels[chosen])
        parts = {
            name: (
                draw(originals, torch_generator(0, "digits-domains", name, role)),
                original_labels,
            )
            for name, draw in REAL_DOMAINS.items()
        }
        parts["fonts"] = drawn(fonts, torch_generator(0, "digits-domains", "fonts", role))
        splits.append(_stack([parts[name] for name in DOMAINS]))
    return Data("digits-domains", splits[0], splits[1], 10, DOMAINS)


def image_domains(name: str, data: Data) -> Data:
    """Show grey 28x28 images in the four ways, each image in one of them; they are the same every
    time.
    """
    splits = []
    for role, split in (("train", data.train), ("test", data.test)):
        parts = []
        for place, (domain, draw) in enumerate(REAL_DOMAINS.items()):
            chosen = slice(place, None, len(REAL_DOMAINS))
            originals = split.inputs[chosen].float() / 255
            generator = torch_generator(0, name, domain, role)
            parts.append((draw(originals, generator), split.labels[chosen]))
        splits.append(_stack(parts))
    return Data(name, splits[0], splits[1], data.num_classes, tuple(REAL_DOMAINS))


def real(originals: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images unchanged, light on dark."""
    return originals


def photos(originals: Tensor, generator: torch.Generator) -> Tensor:
    """Return the absolute difference from patches of scikit-learn's two photographs, as MNIST-M is
    made.

    Ganin and Lempitsky, Unsupervised Domain Adaptation by Backpropagation, ICML 2015; MNIST-M has
    patches of BSDS500.
    """
    with extra("data"):
        from sklearn.datasets import load_sample_images

    photographs = torch.from_numpy(np.stack(load_sample_images().images))  # channels last
    count = len(originals)
    height, width = photographs.shape[1:3]
    which = torch.randint(len(photographs), (count, 1, 1), generator=generator)
    rows = (
        torch.randint(height - SIDE, (count, 1, 1), generator=generator)
        + torch.arange(SIDE)[:, None]
    )
    columns = torch.randint(width - SIDE, (count, 1, 1), generator=generator) + torch.arange(SIDE)
    patches = photographs[which, rows, columns].permute(0, 3, 1, 2) / 255
    return (patches - originals).abs()


def inverted(originals: Tensor, generator: torch.Generator) -> Tensor:
    """Invert the images to dark on light, and add Gaussian noise, another in every channel."""
    noise = torch.randn(len(originals), 3, SIDE, SIDE, generator=generator)
    return 1 - originals + 0.2 * noise


def sheared(originals: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate the images by up to 35 degrees and shear them by up to 0.4, each way."""
    return _warp(originals, generator, degrees=35, shear=0.4, scale=(0.7, 0.9), shift=0.0)


def drawn(fonts: tuple[str, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw digits of fonts, a little shifted, scaled and rotated, in a light colour on a dark
    one.
    """
    glyphs = torch.from_numpy(
        np.stack([_glyph(font, digit) for font in fonts for digit in range(10)])
    )
    glyphs = glyphs.unsqueeze(1).repeat_interleave(DRAWINGS, dim=0)
    labels = torch.arange(10).repeat_interleave(DRAWINGS).repeat(len(fonts))
    ink = _warp(glyphs, generator, degrees=15, shear=0.1, scale=(0.7, 1.05), shift=0.15)
    light, dark = (
        torch.rand(len(ink), 3, 1, 1, generator=generator) * 0.4 + low for low in (0.6, 0.0)
    )
    return dark + (light - dark) * ink, labels


REAL_DOMAINS: dict[str, Draw] = {
    "real": real,
    "photos": photos,
    "inverted": inverted,
    "sheared": sheared,
}


def _glyph(font: str, digit: int) -> NDArray[np.float32]:
    """Draw one digit of a font, 22 pixels high and centred."""
    with extra("data"):
        import matplotlib
        from PIL import Image, ImageDraw, ImageFont

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
    # draw the digit large, cut it to the ink and then reduce it: fonts of one size have digits of
    # different heights
    canvas = Image.new("L", (200, 200))
    ImageDraw.Draw(canvas).text((50, 30), str(digit), fill=255, font=ImageFont.truetype(path, 96))
    ink = canvas.crop(canvas.getbbox())
    ink = ink.resize((max(1, round(ink.width * 22 / ink.height)), 22), Image.Resampling.BOX)
    image = Image.new("L", (SIDE, SIDE))
    image.paste(ink, ((SIDE - ink.width) // 2, (SIDE - ink.height) // 2))
    return np.asarray(image, dtype=np.float32) / np.float32(255)


def _warp(
    images: Tensor,
    generator: torch.Generator,
    degrees: float,
    shear: float,
    scale: tuple[float, float],
    shift: float,
) -> Tensor:
    """Rotate, shear, scale and shift every image by random amounts, uniform between the bounds."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(len(images), generator=generator) * (high - low) + low

    angle = uniform(-degrees, degrees).deg2rad()
    slope = uniform(-shear, shear)
    size = uniform(*scale)
    cos = angle.cos() / size
    sin = angle.sin() / size
    # the matrix maps the place of a pixel in the result to its place in the original
    matrix = torch.stack(
        [
            torch.stack([cos, slope * cos - sin, uniform(-shift, shift)], dim=1),
            torch.stack([sin, slope * sin + cos, uniform(-shift, shift)], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _stack(parts: list[tuple[Tensor, Tensor]]) -> Split:
    inputs = [
        (images.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
        for images, _ in parts
    ]
    domains = [torch.full_like(labels, domain) for domain, (_, labels) in enumerate(parts)]
    return Split(torch.cat(inputs), torch.cat([labels for _, labels in parts]), torch.cat(domains))
