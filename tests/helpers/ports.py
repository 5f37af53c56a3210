"""Ports for the servers that tests start."""

import socket
from contextlib import suppress
from random import SystemRandom


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, below those that a system gives to connections on their
    way out.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] if port not in ports else []
    return ports
