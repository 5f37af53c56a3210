"""Ports for the servers that tests start."""

import socket


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(item.getsockname()[1]) for item in sockets]
    for item in sockets:
        item.close()
    return ports
