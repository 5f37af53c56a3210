"""A port of the loopback that leads to another address: a container's published port, or a cable that can be cut."""

import socket
from contextlib import suppress
from threading import Event, Thread

#: seconds for a connection on this machine
_CONNECT_TIMEOUT = 30.0


class Relay:
    """Passes every connection on, and holds back all data while it is cut."""

    def __init__(self, port: int, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = Event()
        self._whole.set()
        self._listener = socket.create_server(("127.0.0.1", port))
        Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port on the loopback."""
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Hold all data back, in both directions, without a word to either end."""
        self._whole.clear()

    def mend(self) -> None:
        """Let data through again."""
        self._whole.set()

    def close(self) -> None:
        """Accept no more connections."""
        self.mend()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._whole.wait()
                try:
                    server = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for source, sink in ((client, server), (server, client)):
                    Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
