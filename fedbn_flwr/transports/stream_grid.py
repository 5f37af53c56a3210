"""A grid that takes nodes through layer-wise steps over a side channel; all other messages pass on."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.server.passing_grid import PassingGrid
from fedbn_flwr.transports.message_records import ADDRESS, SIDE_CHANNEL, TOKEN
from fedbn_flwr.transports.stream_server import SideChannel
from fedbn_flwr.transports.stream_transport import StreamTransport, UnreachableError

#: where a deployment's server names what a run does not: the port to listen on, the address by which sites reach it,
#: and certificate and private key, or `none` if a proxy in front of it has them
PORT_VARIABLE, ADDRESS_VARIABLE = "FEDBN_FLWR_EXCHANGE_PORT", "FEDBN_FLWR_EXCHANGE_ADDRESS"
CERTIFICATE_VARIABLE, KEY_VARIABLE = "FEDBN_FLWR_EXCHANGE_CERTIFICATE", "FEDBN_FLWR_EXCHANGE_KEY"


@dataclass(frozen=True)
class StreamOptions:
    """Where the server listens, and how long it waits."""

    port: int
    #: host and port as sites see them
    address: str
    #: private key and certificate chain; None where a proxy ends TLS
    certificates: tuple[bytes, bytes] | None
    #: seconds that nodes have to connect, and for one exchange
    connect_timeout: float
    exchange_timeout: float

    @classmethod
    def of(cls, port: int, address: str, connect_timeout: float, exchange_timeout: float) -> "StreamOptions | None":
        """Return the options of a run, completed from the environment; None if there is to be no channel.

        `port` is -1 where the environment decides, and 0 for none. ValueError names what is missing.
        """
        port = int(os.environ.get(PORT_VARIABLE, 0)) if port < 0 else port
        if not port:
            return None
        address = address or os.environ.get(ADDRESS_VARIABLE, "")
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal():
            raise ValueError(f"exchange-address must be HOST:PORT as the sites see the server, got {address!r}")
        return cls(port, address, _certificates(), connect_timeout, exchange_timeout)


class StreamGrid(PassingGrid):
    """A grid in front of Flower's own, which must run all nodes at the same time.

    It listens while a layer-wise step lasts. If no node reaches it, or the port cannot be had, the step is left to
    messages, and the log says once why.
    """

    def __init__(self, grid: Grid, options: StreamOptions) -> None:
        super().__init__(grid)
        self._options = options
        self._why_not = ""

    def open_step(self, messages: Sequence[Message]) -> StreamTransport | None:
        """Send the messages, and wait until the nodes have connected; None if none can.

        NodesFailedError names the nodes that did not connect where others did.
        """
        nodes = [message.metadata.dst_node_id for message in messages]
        options = self._options
        try:
            channel = SideChannel(nodes, f"[::]:{options.port}", options.certificates)
        except RuntimeError:
            self._leave_to_messages(f"port {options.port} cannot be had")
            return None
        for message in messages:
            access = {ADDRESS: options.address, TOKEN: channel.tokens[message.metadata.dst_node_id]}
            message.content[SIDE_CHANNEL] = ConfigRecord(dict(access))
        step = StreamTransport(self._grid, messages, channel, options.exchange_timeout)
        try:
            step.connect(options.connect_timeout)
        except UnreachableError as error:
            step.abandon()
            self._leave_to_messages(str(error))
            return None
        except BaseException:
            step.abandon()
            raise
        if self._why_not:
            log(INFO, "The side channel can be used again")
        self._why_not = ""
        return step

    def _leave_to_messages(self, reason: str) -> None:
        if not self._why_not:
            log(WARNING, "Layer-wise steps go by messages, the side channel cannot be used: %s", reason)
        self._why_not = reason


def _certificates() -> tuple[bytes, bytes] | None:
    certificate, key = (os.environ.get(name, "") for name in (CERTIFICATE_VARIABLE, KEY_VARIABLE))
    if certificate == "none":
        return None
    try:
        return Path(key).read_bytes(), Path(certificate).read_bytes()
    except OSError as error:
        raise ValueError(
            f"exchange-port needs {CERTIFICATE_VARIABLE} and {KEY_VARIABLE} in the ServerApp's environment, the files "
            f"of its certificate and private key ({CERTIFICATE_VARIABLE}=none where a proxy has them): {error}"
        ) from error
