"""A grid that says what becomes of BN in the run that goes through it."""

import weakref
from logging import INFO, WARNING

from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.doctor.check import COUNTER, MEAN, VARIANCE, SentRound, layers_by_name, look_at
from fedbn_flwr.doctor.findings import Finding, worst_first
from fedbn_flwr.doctor.node import named_arrays, weight_of
from fedbn_flwr.doctor.observer import layer_of
from fedbn_flwr.server.grids import PassingGrid
from fedbn_flwr.state import Arrays
from fedbn_flwr.wire.pooled import Summed

_STATISTICS = (MEAN, VARIANCE, COUNTER)


def watched(grid: Grid) -> "WatchedGrid":
    """Return a grid that passes all messages on as they are, and compares the nodes' running
    statistics with what the server makes of them.

    Each finding is logged once, when it is first seen, and all of them when the run ends. It is for
    entries that are sent under their names (`ArrayRecord(model.state_dict())`), by strategies of
    the message API: those of `server_fn` make their messages themselves, and `fedbn-flwr doctor`
    looks at them. Simulated nodes whose replies are added up before they come are not compared.
    """
    return WatchedGrid(grid)


class WatchedGrid(PassingGrid):
    """Keeps the running statistics of the present round."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._before: Arrays = {}
        self._after: list[Arrays] = []
        self._weights: list[float] = []
        self._findings: list[Finding] = []
        weakref.finalize(self, _say_all, self._findings)

    @property
    def findings(self) -> list[Finding]:
        """Return what was found up to now, worst first."""
        return worst_first(self._findings)

    def outgoing(self, messages: list[Message]) -> list[Message]:
        """Look at what was made of the replies of the round before."""
        for message in messages[:1]:
            sent = _batch_norm(message)
            if self._after and sent:
                self._compare(sent)
            if message.metadata.message_type.partition(".")[0] == "train":
                self._before = sent
        return messages

    def incoming(self, replies: list[Message]) -> list[Message]:
        """Keep the statistics of replies to training messages."""
        for reply in replies:
            kind = reply.metadata.message_type.partition(".")[0]
            if kind == "train" and reply.has_content() and not isinstance(reply.content, Summed):
                self._after.append(_batch_norm(reply))
                self._weights.append(weight_of(reply.content))
        return replies

    def _compare(self, averaged: Arrays) -> None:
        layers = layers_by_name([self._before, *self._after])
        seen = SentRound(self._before, self._after, averaged, self._weights)
        known = {finding.name for finding in self._findings}
        for finding in look_at(seen, layers, len(layers)):
            if finding.name not in known:
                self._findings.append(finding)
                log(WARNING if finding.level == "wrong" else INFO, "BN: %s", finding)
        self._after = []
        self._weights = []


def _say_all(findings: list[Finding]) -> None:
    if not findings:
        log(INFO, "BN: nothing was found")
    for finding in worst_first(findings):
        log(INFO, "BN, %s: %s", finding.level, finding.saw)


def _batch_norm(message: Message) -> Arrays:
    """Return copies of the entries of layers that have running statistics."""
    arrays = named_arrays(message.content)
    layers = set(layers_by_name([arrays]))
    kinds = (*_STATISTICS, "weight")
    return {
        name: array.numpy()
        for name, array in arrays.items()
        if layer_of(name) in layers and name.rpartition(".")[2] in kinds
    }
