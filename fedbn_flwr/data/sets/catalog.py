"""Where published data sets are to be had, under which licence, and which files they need."""

from dataclasses import dataclass, field

#: alternatives of one requirement
OR = "|"


@dataclass(frozen=True)
class Published:
    """A published data set."""

    licence: str
    #: addresses, each after what is there
    sources: tuple[str, ...]
    #: paths in its folder that must exist, with alternatives after `OR`
    needs: tuple[str, ...] = ()
    #: MD5 sums that its publishers or torchvision name, by path in its folder; a file that is absent is not checked
    md5: dict[str, str] = field(default_factory=dict)


_RESEARCH = "non-commercial research and education only, after agreeing to its terms"
_FEDBN = "https://github.com/med-air/FedBN#dataset--pretrained-modeel"
_SVHN = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_USPS = {"usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197", "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118"}
_MNIST = {
    "MNIST/raw/train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "MNIST/raw/train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "MNIST/raw/t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "MNIST/raw/t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_SVHN_AT = "SVHN, format 2: http://ufldl.stanford.edu/housenumbers/"
_USPS_AT = "USPS: https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
_MNIST_AT = "MNIST: https://ossci-datasets.s3.amazonaws.com/mnist/"


def _lists(domains: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{domain}{end}" for domain in domains for end in ("_train.pkl", "_test.pkl", ""))


#: by the name of the data set
CATALOG: dict[str, Published] = {
    "mnist": Published("CC BY-SA 3.0", (_MNIST_AT,), md5=_MNIST),
    "fashion-mnist": Published(
        "MIT", ("https://github.com/zalandoresearch/fashion-mnist", "in Debian's package dataset-fashion-mnist")
    ),
    "svhn": Published("non-commercial use only", (_SVHN_AT,), tuple(_SVHN), _SVHN),
    "usps": Published("none is stated", (_USPS_AT,), tuple(_USPS), _USPS),
    "cifar10": Published("none is stated", ("https://www.cs.toronto.edu/~kriz/cifar.html",), ("cifar-10-batches-py",)),
    "cifar100": Published("none is stated", ("https://www.cs.toronto.edu/~kriz/cifar.html",), ("cifar-100-python",)),
    "digits-five": Published(
        "MNIST: CC BY-SA 3.0; SVHN: non-commercial use only; none is stated for the others (MNIST-M is made of MNIST "
        "and of photographs of BSDS500)",
        (
            f"FedBN's archive, digit_dataset.zip: {_FEDBN}",
            f"or {_MNIST_AT}",
            _SVHN_AT,
            _USPS_AT,
            "MNIST-M and SynthDigits, of Ganin and Lempitsky: http://yaroslav.ganin.net/",
        ),
        (
            f"MNIST/test.pkl{OR}MNIST/raw",
            f"SVHN/test.pkl{OR}SVHN/train_32x32.mat",
            f"SVHN/test.pkl{OR}SVHN/test_32x32.mat",
            f"USPS/test.pkl{OR}USPS/usps.bz2",
            f"USPS/test.pkl{OR}USPS/usps.t.bz2",
            f"SynthDigits/test.pkl{OR}SynthDigits/synth_train_32x32.mat",
            f"SynthDigits/test.pkl{OR}SynthDigits/synth_test_32x32.mat",
            f"MNIST_M/test.pkl{OR}mnist_m/mnist_m_train_labels.txt",
            f"MNIST_M/test.pkl{OR}mnist_m/mnist_m_test_labels.txt",
        ),
        {
            **_MNIST,
            **{f"SVHN/{name}": md5 for name, md5 in _SVHN.items()},
            **{f"USPS/{name}": md5 for name, md5 in _USPS.items()},
        },
    ),
    "office-caltech-10": Published(
        "none is stated; Caltech-256, of which a part is, is CC BY 4.0",
        (f"FedBN's lists and images, office_caltech_10_dataset.zip: {_FEDBN}",),
        _lists(("amazon", "caltech", "dslr", "webcam")),
    ),
    "domainnet": Published(
        "images of many owners, for non-commercial research under fair use",
        (
            f"FedBN's lists, domainnet_dataset.zip: {_FEDBN}",
            "images, the cleaned version: http://ai.bu.edu/M3SDA/",
        ),
        _lists(("clipart", "infograph", "painting", "quickdraw", "real", "sketch")),
    ),
    "imagenet": Published(
        _RESEARCH,
        (
            "ILSVRC 2012: https://image-net.org/download.php",
            "or Kaggle's archive: https://www.kaggle.com/c/imagenet-object-localization-challenge",
        ),
        (f"train{OR}ILSVRC/Data/CLS-LOC/train", f"val{OR}ILSVRC/Data/CLS-LOC/val"),
        {
            "ILSVRC2012_img_train.tar": "1d675b47d978889d74fa0da5fadfb00e",
            "ILSVRC2012_img_val.tar": "29b22e2961454d5413ddabcf34fc5622",
        },
    ),
    "tiny-imagenet": Published(
        "ImageNet's: non-commercial research and education only",
        ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        ("wnids.txt", "train", "val/images", "val/val_annotations.txt"),
        {"../tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
    ),
    "cityscapes": Published(
        _RESEARCH,
        ("leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip: https://www.cityscapes-dataset.com/downloads/",),
        ("leftImg8bit/train", "leftImg8bit/val", "gtFine/train", "gtFine/val"),
    ),
    "folder": Published("that of your images", ("your own images",)),
    "hf": Published("on the data set's page", ("https://huggingface.co/datasets",)),
}
