"""Where published data sets are to be had, under which licence, and which files they need."""

from dataclasses import dataclass

from fedbn_flwr.data.sets.fedbn_archives import DIGITS, DOMAINNET, OFFICE, Lists

#: alternatives of one requirement
OR = "|"


@dataclass(frozen=True)
class Published:
    """A published data set."""

    licence: str
    #: addresses, each after what is there
    sources: tuple[str, ...]
    #: paths in its folder that must exist, with alternatives after `OR`; torchvision names what its data sets lack
    needs: tuple[str, ...] = ()


_RESEARCH = "non-commercial research and education only, after agreeing to its terms"
_FEDBN = "https://github.com/med-air/FedBN#dataset--pretrained-modeel"


def _lists(lists: Lists) -> tuple[str, ...]:
    return tuple(f"{domain}{end}" for domain in lists.domains for end in ("_train.pkl", "_test.pkl", ""))


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
        tuple(f"{folder}/test.pkl" for folder in DIGITS.values()),
    ),
    "office-caltech-10": Published(
        "none is stated; Caltech-256, of which a part is, is CC BY 4.0",
        (f"FedBN's lists and images, office_caltech_10_dataset.zip: {_FEDBN}",),
        _lists(OFFICE),
    ),
    "domainnet": Published(
        "images of many owners, for non-commercial research under fair use",
        (
            f"FedBN's lists, domainnet_dataset.zip: {_FEDBN}",
            "images, the cleaned version: http://ai.bu.edu/M3SDA/",
        ),
        _lists(DOMAINNET),
    ),
    "imagenet": Published(
        _RESEARCH,
        (
            "ILSVRC 2012: https://image-net.org/download.php",
            "or Kaggle's archive: https://www.kaggle.com/c/imagenet-object-localization-challenge",
        ),
        (f"train{OR}ILSVRC/Data/CLS-LOC/train", f"val{OR}ILSVRC/Data/CLS-LOC/val"),
    ),
    "tiny-imagenet": Published(
        "ImageNet's: non-commercial research and education only",
        ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        ("wnids.txt", "train", "val/images", "val/val_annotations.txt"),
    ),
    "cityscapes": Published(
        _RESEARCH,
        ("leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip: https://www.cityscapes-dataset.com/downloads/",),
        ("leftImg8bit/train", "leftImg8bit/val", "gtFine/train", "gtFine/val"),
    ),
    "folder": Published("that of your images", ("your own images",)),
    "hf": Published("on the data set's page", ("https://huggingface.co/datasets",)),
}
