"""A port of the loopback that leads to another address: a published port, a cable that can be cut,
or a long way.
"""

import socket
import time
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread

#: seconds for a connection on this machine
_CONNECT_TIMEOUT = 30.0


class Relay:
    """Passes every connection on, and holds back all data while it is cut."""

    def __init__(self, port: int, target: tuple[str, int], source: str = "") -> None:
        self._target, self._source = target, (source, 0) if source else None
        #: seconds that data take, each way
        self.delay = 0.0
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
                    server = socket.create_connection(self._target, _CONNECT_TIMEOUT, self._source)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for source, sink in ((client, server), (server, client)):
                    Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_its_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        Thread(target=self._send, args=(on_its_way, source, sink), daemon=True).start()
        data = b"-"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            on_its_way.put((time.monotonic() + self.delay, data))

    def _send(
        self,
        on_its_way: "SimpleQueue[tuple[float, bytes]]",
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        """Send what has come, each piece when it is due; the last one is empty."""
        with suppress(OSError):
            while data := self._next(on_its_way):
                self._whole.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _next(self, on_its_way: "SimpleQueue[tuple[float, bytes]]") -> bytes:
        due, data = on_its_way.get()
        time.sleep(max(due - time.monotonic(), 0))
        return data
