"""What a site says of its own data before round 1, and what it is told that all sites have agreed
on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from unicodedata import category

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.layerwise.exchange import LARGEST, MOST
from fedbn_flwr.wire import METRICS, PARTITION_ID, REPORT, printable

#: the kind of message that asks a site, and the name of its handler
SITE_DATA = "query.data"
#: in a report: why the site's data cannot be used
PROBLEM = "problem"
#: in the configuration of messages: the numbers that images are normalized with, as text, and an
#: image's shape
DATA_MEAN = "data-mean"
DATA_STD = "data-std"
DATA_SHAPE = "data-shape"

_TASK = "task"
_CLASS_NAMES = "class-names"
_SAMPLES = "samples"
_SCALED = "from-0-to-1"
_TRAIN = "train-counts"
_TEST = "test-counts"
_SHAPE = "image-shape"
_MEAN = "pixel-mean"
_VARIANCE = "pixel-variance"


@dataclass(frozen=True)
class SiteData:
    """A site's description of its data."""

    #: the site's number: its `partition-id`
    site: int
    #: what the targets are for
    task: str
    #: the names of the classes, or of float targets
    class_names: tuple[str, ...]
    #: the number of training and of test samples
    samples: tuple[int, int]
    #: the number of samples of each class; empty where targets are no classes of samples
    train: tuple[int, ...]
    test: tuple[int, ...]
    #: channels, height and width of an image
    shape: tuple[int, ...]
    #: whether all inputs are from 0 to 1, as pixels are
    scaled: bool
    #: of every channel of the training images; the biased variance
    mean: tuple[float, ...]
    variance: tuple[float, ...]

    def pack(self) -> RecordDict:
        """Return the content of the site's answer."""
        metrics: dict[str, Any] = {
            PARTITION_ID: self.site,
            _SAMPLES: list(self.samples),
            _TRAIN: list(self.train),
            _TEST: list(self.test),
            _SHAPE: list(self.shape),
            _MEAN: list(self.mean),
            _VARIANCE: list(self.variance),
        }
        report = ConfigRecord({_TASK: self.task, _SCALED: self.scaled})
        report[_CLASS_NAMES] = list(self.class_names)
        return RecordDict({METRICS: MetricRecord(metrics), REPORT: report})

    @classmethod
    def read(cls, content: RecordDict) -> Self:
        """Read an answer; a ValueError says why a site's data cannot be used."""
        report: Mapping[str, Any] = content.config_records.get(REPORT) or {}
        if PROBLEM in report:
            raise ValueError(printable(str(report[PROBLEM])))
        metrics: Mapping[str, Any] = content.metric_records.get(METRICS) or {}
        try:
            training, tested = metrics[_SAMPLES]
            site = cls(
                site=metrics[PARTITION_ID],
                task=report[_TASK],
                class_names=tuple(report[_CLASS_NAMES]),
                samples=(training, tested),
                train=tuple(metrics[_TRAIN]),
                test=tuple(metrics[_TEST]),
                shape=tuple(metrics[_SHAPE]),
                scaled=report[_SCALED],
                mean=tuple(metrics[_MEAN]),
                variance=tuple(metrics[_VARIANCE]),
            )
            names = (site.task, *site.class_names)
            whole = (site.site, *site.samples, *site.train, *site.test, *site.shape)
            lowest = -LARGEST
            highest = LARGEST
            if site.scaled:
                lowest = 0.0
                highest = 1.0
            # of ids there are no means
            channels = site.shape[0] if site.mean else 0
            if not (
                isinstance(site.scaled, bool)
                and 1 <= len(site.shape) <= 4
                and len(set(site.class_names)) == len(site.class_names)
                and len(site.train) == len(site.test)
                and len(site.train) in (0, len(site.class_names))
                and all(len(name) <= 500 for name in names)
                and all(category(sign) != "Cc" for sign in "".join(names))
                and all(isinstance(number, int) and 0 <= number <= MOST for number in whole)
                and all(lowest <= number <= highest for number in site.mean)
                and all(0 <= number <= highest for number in site.variance)
                and len(site.mean) == len(site.variance) == channels
            ):
                raise ValueError("numbers or names that are none")
            return site
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError("its app does not say what its data are") from error


def problem(reason: str) -> RecordDict:
    """Return the content of the answer of a site whose data cannot be used."""
    return RecordDict({REPORT: ConfigRecord({PROBLEM: reason})})
