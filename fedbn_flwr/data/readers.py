"""The data sets that there are: each registered name with the function that reads it."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fedbn_flwr.data.dataset_registry import SITES, DatasetRequest, register_dataset
from fedbn_flwr.data.digits import digits
from fedbn_flwr.data.domains import digits_domains, image_domains
from fedbn_flwr.data.files import TORCHVISION, from_folder, from_torchvision
from fedbn_flwr.data.sets.cityscapes import cityscapes
from fedbn_flwr.data.sets.digits_five import SAMPLES, digits_five
from fedbn_flwr.data.sets.domain_lists import DOMAINNET, OFFICE, read_domains
from fedbn_flwr.data.sets.hugging_face import Choice, hugging_face
from fedbn_flwr.data.sets.imagenet import imagenet, tiny_imagenet
from fedbn_flwr.data.splits import Data
from fedbn_flwr.data.streets import SIDE, streets
from fedbn_flwr.data.synthetic import synthetic


@register_dataset("digits")
def _digits(request: DatasetRequest) -> Data:
    """1,797 real handwritten digits of 8x8 pixels, which scikit-learn ships."""
    request.options()
    return digits()


@register_dataset("digits-domains")
def _digits_domains(request: DatasetRequest) -> Data:
    """Digits in five domains: real, of fonts, before photographs, inverted, sheared."""
    request.options()
    return digits_domains()


@register_dataset("synthetic")
def _synthetic(request: DatasetRequest) -> Data:
    """Random images of given number, classes and size, for timing."""
    return synthetic(**request.options(n=10_000, test=1_000, classes=10, size=8, channels=3, seed=0))


@register_dataset("streets")
def _streets(request: DatasetRequest) -> Data:
    """Drawn streets with label maps by city, for segmentation."""
    return streets(request.image_size or SIDE, **request.options(cities=6, images=32, test=8, seed=0))


def _torchvision(request: DatasetRequest) -> Data:
    """torchvision's data set of this name, from files in `data-root`."""
    request.options()
    return from_torchvision(request.name, request.root)


for _name in TORCHVISION:
    register_dataset(_name)(_torchvision)


@register_dataset("fashion-domains")
def _fashion_domains(request: DatasetRequest) -> Data:
    """Fashion-MNIST in four domains: real, before photographs, inverted, sheared."""
    request.options()
    return image_domains(request.name, from_torchvision("fashion-mnist", request.root))


@register_dataset(SITES)
def _sites(request: DatasetRequest) -> Data:
    """Data that the sites of a deployment have, each its own."""
    raise ValueError(f"the data set {SITES!r} is at the sites of a deployment; there is none here")


@register_dataset("folder")
def _folder(request: DatasetRequest) -> Data:
    """Images in a folder with a folder for each class: `folder:PATH`."""
    if not request.argument:
        raise ValueError("folder: needs a path, as in folder:/data/images")
    return from_folder(Path(request.argument).expanduser(), request.image_size, request.image_workers)


@register_dataset("digits-five")
def _digits_five(request: DatasetRequest) -> Data:
    """MNIST, SVHN, USPS, SynthDigits and MNIST-M as domains, in FedBN's archive or as they were published."""
    options = request.options_after_path(samples=SAMPLES)
    return digits_five(request.home("digits-five", "."), request.image_size or 28, **options)


def _register(name: str, folder: str, side: int, read: Callable[..., Data], about: str, **defaults: int) -> None:
    """Register a data set of images in a folder of `data-root`, or elsewhere: `NAME[:PATH][:key=value]...`."""

    def read_folder(request: DatasetRequest) -> Data:
        options = request.options_after_path(**defaults)
        return read(request.home(folder), request.image_size or side, request.image_workers, **options)

    read_folder.__doc__ = about
    register_dataset(name)(read_folder)


for _lists in (OFFICE, DOMAINNET):
    _about = f"{_lists.about} with FedBN's lists of files, from `{_lists.folder}` in `data-root`."
    _register(_lists.name, _lists.folder, 256, partial(read_domains, _lists), _about, samples=0)
_register("imagenet", "imagenet", 224, imagenet, "ImageNet-1K, from `imagenet` in `data-root`.")
_register(
    "tiny-imagenet", "tiny-imagenet-200", 64, tiny_imagenet, "Tiny-ImageNet, from `tiny-imagenet-200` in `data-root`."
)
_about = "Street scenes with label maps by city, from `cityscapes` in `data-root`, for segmentation."
_register("cityscapes", "cityscapes", 768, cityscapes, _about)


@register_dataset("hf")
def _hugging_face(request: DatasetRequest) -> Data:
    """A data set of images of the Hugging Face Hub, or saved from there: `hf:NAME`."""
    name, options = request.path, request.options_after_path(**asdict(Choice()))
    if not name:
        raise ValueError("hf: needs a name, as in hf:uoft-cs/cifar10")
    return hugging_face(name, request.root, request.image_size, request.image_workers, Choice(**options))
