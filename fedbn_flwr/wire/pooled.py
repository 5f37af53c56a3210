"""A reply that is the mean of several: what engines and the server have in common."""

from collections.abc import Mapping

from flwr.app import RecordDict


class Summed(RecordDict):
    """The content of a reply that is the mean of several nodes' replies.

    Nothing that was received is one.
    """

    #: by node, the partition that it named, and the number of its examples
    nodes: Mapping[int, int] = {}
    counts: Mapping[int, float] = {}
