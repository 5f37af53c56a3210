"""Drive a headless Chromium over its own pipe: no driver, no network, no package."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a browser, by the DevTools protocol."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = os.fdopen(send, "wb", 0), os.fdopen(receive, "rb")
        self._session, self._number = "", 0
        #: what the page wrote to the console, and its uncaught errors
        self.console: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> Any:
        """Return the result of one command."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        self._send.write(json.dumps(message).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            pass
        assert "error" not in reply, f"{method}: {reply['error']}"
        return reply["result"]

    def open(self, path: Path, width: int) -> None:
        """Load a page in a window of this width."""
        phone = width < 600
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        self("Page.navigate", url=path.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression."""
        result = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, code: str, text: str) -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            number = {"windowsVirtualKeyCode": ord(text)}
            down = {"text": text} if kind == "keyDown" else {}
            self("Input.dispatchKeyEvent", type=kind, key=key, code=code, **number, **down)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Close the pipe."""
        self._send.close()
        self._receive.close()

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (letter := self._receive.read(1)) != b"\0":
            assert letter, "the browser ended"
            text += letter
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(json.dumps(message["params"]))
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it with all of its processes."""
    assert PROGRAM
    (there, send), (receive, back) = os.pipe(), os.pipe()
    os.set_inheritable(there, True)
    os.set_inheritable(back, True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the browser reads its file 3 and writes its file 4
        words = [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]
        script = f'exec "$@" 3<&{there} 4>&{back}'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(there, back),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(there)
        os.close(back)
        page = None
        try:
            page = Browser(send, receive)
            yield page
        finally:
            if page:
                page.close()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
