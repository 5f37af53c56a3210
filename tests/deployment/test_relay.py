"""The relay of a site's SuperNode: what goes in comes out, and the end of one connection is that of
the other.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fedbn_flwr.deployment import supernode
from fedbn_flwr.deployment.relay import start_relay
from tests.helpers.ports import free_ports
from tests.helpers.waiting import wait_until


@pytest.fixture
def recorded() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def ends(recorded: list[tuple[str, int]]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """An app's connection to the relay, and what the server sees of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        port = start_relay("127.0.0.1", target, 0, lambda *event: recorded.append(event))
        with socket.create_connection(("127.0.0.1", port)) as app:
            far, _ = server.accept()
            with far:
                yield app, far


def read(end: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size and (part := end.recv(size - len(content))):
        content += part
    return content


def is_over(end: socket.socket) -> bool:
    """Wait for the end of a connection."""
    with suppress(ConnectionError):
        return end.recv(1) == b""
    return True


def test_bytes_pass_both_ways_and_those_to_the_server_are_recorded(
    ends: tuple[socket.socket, socket.socket], recorded: list[tuple[str, int]]
) -> None:
    app, far = ends
    content = bytes(range(256)) * 1000
    for source, sink in ((app, far), (far, app)):
        source.sendall(content)
        assert read(sink, len(content)) == content
    app.close()
    assert wait_until(lambda: len(recorded) == 2)
    assert recorded == [("opened", 0), ("closed", len(content))]


@pytest.mark.parametrize("first", [0, 1])
def test_the_end_of_one_is_the_end_of_the_other(
    first: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[first].close()
    assert is_over(ends[1 - first])


def test_a_server_that_is_not_there_ends_the_connection(capfd: pytest.CaptureFixture[str]) -> None:
    (closed,) = free_ports(1)
    port = start_relay("127.0.0.1", f"127.0.0.1:{closed}", 0)
    with socket.create_connection(("127.0.0.1", port)) as app:
        assert is_over(app)
    assert (
        f"the server's side channel 127.0.0.1:{closed} cannot be reached" in capfd.readouterr().err
    )


def test_a_side_channel_without_a_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # which `main` replaces
    monkeypatch.setenv("FEDBN_EXCHANGE", "fl.example.org")
    with pytest.raises(SystemExit, match=r"does not start: FEDBN_EXCHANGE must be HOST:PORT"):
        supernode.main()
