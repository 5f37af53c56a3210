"""Where published data sets are to be had, and under which licence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published data set."""

    licence: str
    #: addresses, each after what is there
    sources: tuple[str, ...]


_RESEARCH = "non-commercial research and education only, after agreeing to its terms"
_FEDBN = "https://github.com/med-air/FedBN#dataset--pretrained-modeel"


#: by the name of the data set
CATALOG: dict[str, Published] = {
    "mnist": Published("CC BY-SA 3.0", ("MNIST: https://ossci-datasets.s3.amazonaws.com/mnist/",)),
    "fashion-mnist": Published(
        "MIT", ("https://github.com/zalandoresearch/fashion-mnist", "in Debian's package dataset-fashion-mnist")
    ),
    "svhn": Published("non-commercial use only", ("SVHN, format 2: http://ufldl.stanford.edu/housenumbers/",)),
    "usps": Published(
        "none is stated", ("USPS: https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",)
    ),
    "cifar10": Published("none is stated", ("https://www.cs.toronto.edu/~kriz/cifar.html",)),
    "cifar100": Published("none is stated", ("https://www.cs.toronto.edu/~kriz/cifar.html",)),
    "digits-five": Published(
        "MNIST: CC BY-SA 3.0; SVHN: non-commercial use only; none is stated for the others (MNIST-M is made of MNIST "
        "and of photographs of BSDS500)",
        (f"FedBN's archive, digit_dataset.zip: {_FEDBN}",),
    ),
    "office-caltech-10": Published(
        "none is stated; Caltech-256, of which a part is, is CC BY 4.0",
        (f"FedBN's lists and images, office_caltech_10_dataset.zip: {_FEDBN}",),
    ),
    "domainnet": Published(
        "images of many owners, for non-commercial research under fair use",
        (
            f"FedBN's lists, domainnet_dataset.zip: {_FEDBN}",
            "images, the cleaned version: http://ai.bu.edu/M3SDA/",
        ),
    ),
    "imagenet": Published(
        _RESEARCH,
        (
            "ILSVRC 2012: https://image-net.org/download.php",
            "or Kaggle's archive: https://www.kaggle.com/c/imagenet-object-localization-challenge",
        ),
    ),
    "tiny-imagenet": Published(
        "ImageNet's: non-commercial research and education only",
        ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
    ),
    "cityscapes": Published(
        _RESEARCH,
        ("leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip: https://www.cityscapes-dataset.com/downloads/",),
    ),
    "folder": Published("that of your images", ("your own images",)),
    "hf": Published("on the data set's page", ("https://huggingface.co/datasets",)),
}
