"""The sites' door, as real nginx: what those without a key can take from the others."""

import os
import signal
import socket
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPSConnection
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import grpc
import pytest

from fedbn_flwr.deployment.federation import Federation
from fedbn_flwr.deployment.provision import provision
from fedbn_flwr.transports.side_channel_frames import METHOD, SERVICE, TOKEN
from fedbn_flwr.transports.side_channel_grid import SideChannel
from tests.helpers.loopback import has_proxy
from tests.helpers.ports import free_ports
from tests.helpers.relay import Relay
from tests.helpers.tls_server import TLSServer
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.skipif(not has_proxy(), reason="nginx is not installed")

PUSH = "/v1/fleet/push-object"
#: addresses of the loopback: one floods, and the other is a site
FLOOD, SITE = "127.0.0.2", "127.0.0.3"
#: so many half-sent requests ended a run
HALF_SENT = 1039


class Door(NamedTuple):
    port: int
    exchange_port: int
    ca: Path
    superlink: TLSServer
    channel: SideChannel

    def connect(self, address: str) -> HTTPSConnection:
        """Return a connection from an address of the loopback."""
        context = ssl.create_default_context(cafile=self.ca)
        return HTTPSConnection(
            "127.0.0.1", self.port, timeout=20, source_address=(address, 0), context=context
        )

    def ask(self, method: str, path: str, body: object = None, address: str = SITE) -> int:
        """Return the status of an answer."""
        connection = self.connect(address)
        connection.request(method, path, body)  # type: ignore[arg-type]
        return connection.getresponse().status


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    """A proxy in front of a server that answers some paths, and of a side channel."""
    ports, out = free_ports(3), tmp_path / "federation"
    provision(Federation("x", "127.0.0.1", ("a",), (), *ports), out)
    channel = SideChannel((1,), "127.0.0.1:0", None)
    config = out / "server" / "nginx.conf"
    text = (
        config.read_text()
        .replace("/srv/home", str(tmp_path))
        .replace("superexec:8445", f"127.0.0.1:{channel.port}")
    )
    with TLSServer(out / "server", {"/health": b"", PUSH: b""}) as superlink:
        config.write_text(text.replace("superlink:8000", f"127.0.0.1:{superlink.port}"))
        more = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
        with subprocess.Popen(
            ["nginx", "-p", f"{out / 'server'}/", "-c", "nginx.conf", "-g", more]
        ) as nginx:
            opened = Door(ports[0], ports[2], out / "ca" / "ca.crt", superlink, channel)
            try:
                assert wait_until(lambda: answers(opened), 0.1, 20)
                yield opened
            finally:
                nginx.send_signal(signal.SIGTERM)
    channel.close()


def answers(door: Door) -> bool:
    with suppress(OSError):
        return door.ask("GET", "/health") == 200
    return False


def test_a_body_as_large_as_flowers_goes_through_and_a_larger_one_does_not(door: Door) -> None:
    # the server of this test answers 412 to what reaches it
    assert door.ask("POST", PUSH, b"-" * 5_300_000) == 412
    connection = door.connect(SITE)
    connection.putrequest("POST", PUSH)
    connection.putheader("Content-Length", str(10**9))
    connection.endheaders()
    assert connection.getresponse().status == 413
    assert door.ask("POST", PUSH, iter([b"-" * 1_000_000] * 9)) == 413
    assert door.superlink.received == [5_300_000]


@pytest.mark.parametrize("path", ["/v1/control/list-runs", "/v1/runtime/acquire-task", "/results/"])
def test_it_leads_to_the_fleet_api_only(path: str, door: Door) -> None:
    assert door.ask("POST", path) == 403
    assert door.superlink.received == []


def test_half_sent_handshakes_keep_no_site_out(door: Door) -> None:
    halves = [
        socket.create_connection(("127.0.0.1", door.port), 20, (FLOOD, 0)) for _ in range(HALF_SENT)
    ]
    for half in halves:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
    assert door.ask("POST", PUSH, b"-") == 412
    for half in halves:
        with suppress(ConnectionResetError):
            assert half.recv(1) == b""  # the proxy has given up
        half.close()


def test_half_sent_bodies_keep_no_other_address_out(door: Door) -> None:
    halves = [door.connect(FLOOD) for _ in range(260)]
    for half in halves:
        half.putrequest("POST", PUSH)
        half.putheader("Content-Length", "1000000")
        half.endheaders(b"-")
    assert door.ask("POST", PUSH, b"-") == 412
    # after which a node tries again
    assert door.ask("POST", PUSH, b"-", FLOOD) == 503
    for half in halves:
        half.close()


def test_who_tries_tokens_keeps_no_site_out(door: Door) -> None:
    flood = Relay(0, ("127.0.0.1", door.exchange_port), FLOOD)
    credentials = grpc.ssl_channel_credentials(door.ca.read_bytes())
    streams = [
        grpc.secure_channel(f"127.0.0.1:{port}", credentials).stream_stream(f"/{SERVICE}/{METHOD}")
        for port in (flood.port, door.exchange_port)
    ]
    calls = [
        streams[0](iter(()), metadata=((TOKEN, str(number)),), timeout=60) for number in range(1000)
    ]
    site = streams[1](
        iter(SimpleQueue().get, None), metadata=((TOKEN, door.channel.tokens[1]),), timeout=20
    )
    assert site.initial_metadata() is not None
    assert door.channel.links[1].is_connected
    codes = Counter(call.code() for call in calls)
    # most do not come as far as the server
    assert codes[grpc.StatusCode.UNAUTHENTICATED] < 500
    assert grpc.StatusCode.OK not in codes
    flood.close()


def test_without_a_superlink_the_answer_is_one_after_which_nodes_try_again(door: Door) -> None:
    door.superlink.__exit__()
    assert door.ask("POST", PUSH, b"-" * 5_300_000) in (502, 503, 504)
