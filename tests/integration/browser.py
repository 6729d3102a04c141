"""Headless Chromium for a test, by its debugging protocol: pages, screenshots, what the console says, frame times."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Request, TextMessage

PATIENCE_S = 60.0


class Browser:
    """One tab. `complaints` collects errors of scripts and of the content policy."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._numbers = itertools.count(1)
        self._text = ""
        self._messages: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self._write(Request(host=f"127.0.0.1:{port}", target=path))
        self._accepted = False
        while not self._accepted:
            self._read()
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one order; what happens meanwhile is noted."""
        number = next(self._numbers)
        self._write(TextMessage(data=json.dumps({"id": number, "method": method, "params": parameters})))
        while True:
            for message in self._messages:
                if message.get("id") == number:
                    self._messages.remove(message)
                    assert "error" not in message, f"{method}: {message['error']}"
                    result: dict[str, Any] = message["result"]
                    return result
            self._read()

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self.look(width, height, dark=dark)
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def look(self, width: int, height: int, *, dark: bool) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The first true value of an expression."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.ask(expression)):
            assert time.monotonic() < deadline, f"waited in vain for {expression}; {self.complaints[:3]}"
            time.sleep(0.1)
        return value

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._socket.close()

    def _write(self, event: Any) -> None:
        self._socket.sendall(self._connection.send(event))

    def _read(self) -> None:
        data = self._socket.recv(1 << 20)
        assert data, "the browser is gone"
        self._connection.receive_data(data)
        for event in self._connection.events():
            if isinstance(event, AcceptConnection):
                self._accepted = True
            elif isinstance(event, TextMessage):
                self._text += event.data
                if event.message_finished:
                    self._take(json.loads(self._text))
                    self._text = ""
            elif isinstance(event, Ping):
                self._write(event.response())
            else:
                assert not isinstance(event, CloseConnection | BytesMessage), event

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            exception = message["params"]["exceptionDetails"].get("exception", {})
            self.complaints.append(str(exception.get("description", exception))[:500])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])
        elif "id" in message:
            self._messages.append(message)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium for as long as the block lasts; the test is skipped, with a message, where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed, so NO page is looked at here: ./deploy/test-deps installs it")
    profile = folder / "chromium"
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    found = None
    try:
        port = int(_eventually(profile / "DevToolsActivePort").split()[0])
        found = Browser(port, _tab(port))
        yield found
    finally:
        if found is not None:
            found.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _eventually(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().count("\n")):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)
    return path.read_text()


def _tab(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET /json/list HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        text = b""
        while chunk := plain.recv(1 << 16):
            text += chunk
            if b'"page"' in text and b"webSocketDebuggerUrl" in text and text.rstrip().endswith(b"]"):
                break
    found = re.search(rb"ws://[^/]+(/devtools/page/\w+)", text)
    assert found, text
    return found[1].decode()
