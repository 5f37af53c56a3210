"""A web server with the certificate of a provisioned federation, which answers from a table."""

import ssl
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Self


class TLSServer:
    """Answers each path of the table with 200, or with 412 to a POST, and 404 or 403 elsewhere.

    Those without the key get 401.
    """

    def __init__(self, folder: Path, pages: Mapping[str, bytes], key: str = "") -> None:
        #: the bytes of every POST's body
        self.received = received = list[int]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(200 if self.path in pages else 404, pages.get(self.path, b""))

            def do_POST(self) -> None:
                received.append(len(self.rfile.read(int(self.headers["Content-Length"] or 0))))
                self._answer(412 if self.path in pages else 403, pages.get(self.path, b""))

            def _answer(self, status: int, content: bytes) -> None:
                if key and self.headers["Authorization"] != f"Bearer {key}":
                    status, content = 401, b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
