"""Drawn streets with label maps, by city: small data for segmentation with a shift between clients,
without a download.

No paper uses these data. They stand in for Cityscapes: cities differ in light, in colours and in
what stands along the road, and the hood of the car that takes the picture has no class. Images go
the way of files: they are encoded in memory, decoded batch by batch, and cut together with their
label maps.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbn_flwr.data.augmentation import Size
from fedbn_flwr.data.file_split import EncodedImages, FileSplit
from fedbn_flwr.data.sets.cityscapes import class_of_value
from fedbn_flwr.data.splits import Data
from fedbn_flwr.plugins import extra
from fedbn_flwr.randomness import numpy_generator

#: height of an image; the width is twice that
SIDE = 32
CLASSES = ("road", "sidewalk", "building", "sky", "car")
ROAD, SIDEWALK, BUILDING, SKY, CAR = range(len(CLASSES))
#: colour of each class in plain light; the last is that of the hood
COLOURS = np.array(
    [[90, 80, 90], [170, 130, 160], [120, 100, 80], [110, 150, 190], [60, 40, 130], [40, 40, 40]]
)
HOOD = len(CLASSES)
#: the value of the hood in a label map
UNLABELLED = 255
#: light of the darkest and of the brightest city, and how far a city's colours are from plain light
LIGHT = (0.6, 1.3)
TINT = 0.2
#: standard deviation of the noise of a pixel, in grey levels
NOISE = 12.0

#: what is drawn at each pixel: a class, or the hood
Drawing = NDArray[np.uint8]


def streets(side: int, cities: int, images: int, test: int, seed: int) -> Data:
    """Draw `images` training and `test` test images of each city.

    Training images are windows of `side` x `side` pixels, cut as those of Cityscapes; test images
    have twice the width.
    """
    if side < 16 or min(cities, images, test) < 1:
        raise ValueError(
            "streets: the image size must be at least 16; cities, images and test at least 1"
        )
    train = _split(_draw(side, cities, images, seed, "train"), (side, side))
    tested = _split(_draw(side, cities, test, seed, "test"), (side, 2 * side))
    names = tuple(f"city-{number}" for number in range(cities))
    return Data("streets", train, tested, len(CLASSES), names, CLASSES, "segmentation")


def _draw(
    side: int, cities: int, count: int, seed: int, role: str
) -> list[list[tuple[bytes, bytes]]]:
    drawn = []
    for city in range(cities):
        # all classes are under the light of the city, whose brightness goes from city to city
        tint = 1 + TINT * numpy_generator(seed, "streets", "city", city).uniform(-1, 1, 3)
        colours = COLOURS * np.linspace(*LIGHT, cities)[city] * tint
        generator = numpy_generator(seed, "streets", role, city)
        pairs = []
        # noise is drawn after all streets of the city
        for drawing in [_drawing(side, city / cities, generator) for _ in range(count)]:
            photograph = colours[drawing] + generator.normal(0, NOISE, (*drawing.shape, 3))
            label_map = np.where(drawing == HOOD, UNLABELLED, drawing)
            pairs.append((_encoded(photograph.clip(0, 255).round()), _encoded(label_map)))
        drawn.append(pairs)
    return drawn


def _split(drawn: Sequence[Sequence[tuple[bytes, bytes]]], size: Size) -> FileSplit:
    images, maps = zip(*(pair for city in drawn for pair in city), strict=True)
    domains = [number for number, city in enumerate(drawn) for _ in city]
    return FileSplit.of(
        EncodedImages(images),
        [0] * len(images),
        size,
        domains=domains,
        fit="window",
        maps=EncodedImages(maps),
        classes=class_of_value(range(len(CLASSES))),
        workers=0,
    )


def _drawing(side: int, density: float, generator: np.random.Generator) -> Drawing:
    """Draw a street: sky above, houses, sidewalks, a road to the horizon, cars upon it, the hood
    below.

    A city of higher density has more houses and more cars.
    """
    width = 2 * side
    horizon = int(side * generator.uniform(0.3, 0.45))
    drawing = np.full((side, width), SKY, dtype=np.uint8)
    for _ in range(2 + int(6 * density)):
        left = int(generator.uniform(-4, width - 4))
        top = int(horizon * generator.uniform(0.1, 0.8))
        drawing[top:horizon, max(left, 0) : left + int(width * generator.uniform(0.08, 0.25))] = (
            BUILDING
        )
    drawing[horizon:] = SIDEWALK
    middle = width * generator.uniform(0.4, 0.6)
    for row in range(horizon, side):
        half = width * (0.04 + 0.42 * (row - horizon) / (side - horizon))
        drawing[row, max(int(middle - half), 0) : int(middle + half)] = ROAD
    for _ in range(1 + int(3 * density)):
        bottom = int(generator.uniform(horizon + 3, side - 3))
        high = max(int(0.5 * (bottom - horizon)), 2)
        left = int(middle + (bottom - horizon) * generator.uniform(-1.2, 0.6))
        drawing[bottom - high : bottom, max(left, 0) : max(left + int(1.6 * high), 0)] = CAR
    drawing[side - side // 16 :, width // 4 : -width // 4] = HOOD
    return drawing


def _encoded(pixels: NDArray[Any]) -> bytes:
    with extra("data"):
        from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
