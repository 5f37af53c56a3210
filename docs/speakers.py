"""Speech of nine speakers, for docs/results.md: `pip install --no-deps aeon` brings the files.

640 utterances of a Japanese vowel (Kudo, Toyama and Shimbo, Pattern Recognition Letters 20, 1999),
each as 25 moments of 12 cepstrum coefficients. Who speaks is the class, so sites with one speaker
each have one class each.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from fedbn_flwr.data import Data, Split


def speakers() -> Data:
    """Return the utterances, normalized by the mean and the deviation of the training data."""
    spec = find_spec("aeon")
    if spec is None or spec.origin is None:
        raise ValueError("the data are in the package aeon: pip install --no-deps aeon")
    folder = Path(spec.origin).parent / "datasets" / "data" / "JapaneseVowels"
    (inputs, labels), (test_inputs, test_labels) = (
        read(folder / f"JapaneseVowels_eq_{n}.ts") for n in ("TRAIN", "TEST")
    )
    mean, deviation = inputs.mean((0, 2), keepdim=True), inputs.std((0, 2), keepdim=True)
    train = Split((inputs - mean) / deviation, labels)
    return Data(
        "speakers", train, Split((test_inputs - mean) / deviation, test_labels), num_classes=9
    )


MICROPHONES = ("close", "telephone", "noisy", "fast")


def microphones() -> Data:
    """Return every utterance four times, as domains: as recorded, through a telephone, in noise,
    and spoken faster.

    A cepstrum is a logarithm, so another microphone adds a constant to each coefficient. Noise
    hides a part of the speech. These are drawn changes of real recordings, the same every time.
    """
    data, generator = speakers(), torch.Generator().manual_seed(0)
    channel = torch.randn(1, 12, 1, generator=generator)
    splits = []
    for split in (data.train, data.test):
        noise = torch.randn(split.inputs.shape, generator=generator)
        faster = interpolate(split.inputs, scale_factor=0.6, mode="linear")
        versions = [
            split.inputs,
            split.inputs + channel,
            0.6 * split.inputs + 0.4 * noise,
            pad(faster, (0, 10)),
        ]
        domains = torch.arange(4).repeat_interleave(len(split))
        splits.append(Split(torch.cat(versions), split.labels.repeat(4), domains))
    return Data("microphones", *splits, num_classes=9, domain_names=MICROPHONES)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Return the series of a file, (N, channels, moments), and their classes from 0 on."""
    rows = [
        line.split(":") for line in path.read_text().splitlines() if line and line[0] not in "#@"
    ]
    series = [
        [[float(value) for value in channel.split(",")] for channel in row[:-1]] for row in rows
    ]
    return torch.tensor(series), torch.tensor([int(row[-1]) - 1 for row in rows])


def network(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return three convolutions over time, each with BN and ReLU, and the mean over time."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((in_channels, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv1d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm1d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, num_classes))
