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

_CLASS_NAMES = "class-names"
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
    class_names: tuple[str, ...]
    #: the number of samples of each class
    train: tuple[int, ...]
    test: tuple[int, ...]
    #: channels, height and width of an image
    shape: tuple[int, ...]
    #: of every channel of the training images, for pixels from 0 to 1; the biased variance
    mean: tuple[float, ...]
    variance: tuple[float, ...]

    def pack(self) -> RecordDict:
        """Return the content of the site's answer."""
        numbers = {_TRAIN: list(self.train), _TEST: list(self.test), _SHAPE: list(self.shape)}
        moments = {_MEAN: list(self.mean), _VARIANCE: list(self.variance)}
        metrics: dict[str, Any] = {PARTITION_ID: self.site, **numbers, **moments}
        report = ConfigRecord({_CLASS_NAMES: list(self.class_names)})
        return RecordDict({METRICS: MetricRecord(metrics), REPORT: report})

    @classmethod
    def read(cls, content: RecordDict) -> Self:
        """Read an answer; a ValueError says why a site's data cannot be used."""
        report: Mapping[str, Any] = content.config_records.get(REPORT) or {}
        if PROBLEM in report:
            raise ValueError(printable(str(report[PROBLEM])))
        metrics: Mapping[str, Any] = content.metric_records.get(METRICS) or {}
        try:
            numbers = [tuple(metrics[key]) for key in (_TRAIN, _TEST, _SHAPE, _MEAN, _VARIANCE)]
            site = cls(metrics[PARTITION_ID], tuple(report[_CLASS_NAMES]), *numbers)
            [*zip(dict.fromkeys(site.class_names), site.train, site.test, strict=True)]
            whole = (site.site, *site.train, *site.test, *site.shape)
            moments = (*site.mean, *site.variance)
            # pixels are from 0 to 1, other samples as they are; of ids there are no means
            largest = 1 if len(site.shape) == 3 else LARGEST
            channels = site.shape[0] if site.mean else 0
            if not (
                1 <= len(site.shape) <= 4
                and all(len(name) <= 500 for name in site.class_names)
                and all(category(sign) != "Cc" for sign in "".join(site.class_names))
                and all(isinstance(number, int) and 0 <= number <= MOST for number in whole)
                and all(0 <= number <= largest for number in moments)
                and len(site.mean) == len(site.variance) == channels
            ):
                raise ValueError("numbers or names that are none")
            return site
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError("its app does not say what its data are") from error


def problem(reason: str) -> RecordDict:
    """Return the content of the answer of a site whose data cannot be used."""
    return RecordDict({REPORT: ConfigRecord({PROBLEM: reason})})
