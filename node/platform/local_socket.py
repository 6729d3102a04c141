"""The door of a running daemon for its owner alone: a Unix socket of mode 0600, or a port on loopback with a token.

Where it is stands in `control.json` in the state folder (mode 0600), with the process's id; clients read it there. A
Unix socket's path may be short only (104 bytes on macOS), so a long state folder gets its socket in a private folder
for temporary files.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from node.platform.places import CONTROL_FILE, note_running
from protocol.drive.durable import replace_durably

PATH_BYTES_MAX = 100
LINE_BYTES_MAX = 1 << 20
ANSWER_S = 10.0
SOCKET = "control.sock"
TEMPORARY = "barnraise-"
"""How the folder of a socket begins that cannot lie in the state folder."""
HAS_UNIX = hasattr(socket, "AF_UNIX") and os.name == "posix"


class NotRunningError(Exception):
    """No daemon has this state folder."""


class NotWellError(Exception):
    """There is one, and it does not answer as it should."""


@dataclass(frozen=True)
class Door:
    """An open one."""

    listener: trio.SocketListener
    token: str
    """Asked of whoever comes where the system cannot keep others out; empty with a Unix socket."""
    _file: Path
    _socket: Path | None
    _note: Path

    def close(self) -> None:
        for path in (self._file, self._socket, self._note):
            if path is not None:
                with suppress(OSError):
                    path.unlink()
        if self._socket is not None:
            _take_away(self._socket)


async def open_door(folder: Path, unix: bool = HAS_UNIX, **more: Any) -> Door:
    """Listens, and writes `control.json` with `more` in it. The state folder is locked, so what lies there is old."""
    token, path, older = "", None, None
    with suppress(OSError, ValueError, KeyError, TypeError):
        older = Path(str(json.loads((folder / CONTROL_FILE).read_text())["address"]).removeprefix("unix:"))
    if unix:
        path = folder / SOCKET
        if len(os.fsencode(path.absolute())) > PATH_BYTES_MAX:
            path = Path(tempfile.mkdtemp(prefix=TEMPORARY)) / SOCKET
        with suppress(FileNotFoundError):
            path.unlink()
        raw = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        before = os.umask(0o177)  # from the first moment nobody else may connect
        try:
            await raw.bind(str(path))
        finally:
            os.umask(before)
        raw.listen(16)
        listener = trio.SocketListener(raw)
        address = f"unix:{path.absolute()}"
    else:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address, token = f"127.0.0.1:{listener.socket.getsockname()[1]}", secrets.token_urlsafe(32)
    file = folder / CONTROL_FILE
    papers = {"address": address, "token": token, "pid": os.getpid(), **more}
    replace_durably(file, json.dumps(papers).encode(), 0o600)
    if older is not None and older != path:  # of one that was killed, or of one that hands over to this one
        _take_away(older)
    return Door(listener, token, file, path, note_running(folder))


def _take_away(path: Path) -> None:
    """The folder that was made for this socket, and it; nothing where it lies in a state folder."""
    folder = path.parent
    if path.name == SOCKET and folder.name.startswith(TEMPORARY) and folder.parent == Path(tempfile.gettempdir()):
        with suppress(OSError):
            path.unlink(missing_ok=True)
            folder.rmdir()  # one that holds anything else stays


def tell_more(folder: Path, **more: Any) -> None:
    """Adds to `control.json`, say the page's address."""
    file = folder / CONTROL_FILE
    replace_durably(file, json.dumps({**json.loads(file.read_text()), **more}).encode(), 0o600)


def is_ours(token: str, given: object) -> bool:
    """Whether the caller showed the token, where one is needed."""
    return not token or hmac.compare_digest(token.encode(), str(given).encode())


def ask(folder: Path, order: dict[str, Any], within_s: float = ANSWER_S) -> dict[str, Any]:
    """One order to the daemon of a state folder, and its answer.

    Raises:
        NotRunningError: nobody has the folder.
        NotWellError: somebody has, and does not answer in time or answers nonsense.
    """
    try:
        papers = json.loads((folder / CONTROL_FILE).read_text())
        address, token, pid = str(papers["address"]), papers["token"], int(papers["pid"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRunningError(f"nobody works from {folder}") from error
    try:
        with _connect(address, within_s) as connection:
            connection.sendall(json.dumps({**order, "token": token}).encode() + b"\n")
            answer = _read_line(connection)
        found = json.loads(answer)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise NotRunningError(f"nobody works from {folder} (process {pid} has ended)") from error
    except TimeoutError as error:
        silent = f"process {pid}, which works from {folder}, does not answer within {within_s:g} s"
        raise NotWellError(
            f"{silent}: it is stopped, or the computer is very busy; what it was told counts as soon as it goes on"
        ) from error
    except (OSError, ValueError) as error:
        raise NotWellError(f"process {pid}, which works from {folder}, does not answer: {error}") from error
    if not isinstance(found, dict):
        raise NotWellError(f"process {pid}, which works from {folder}, answers nonsense")
    return found


def _connect(address: str, within_s: float) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(within_s)
        try:
            connection.connect(address.removeprefix("unix:"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=within_s)


def _read_line(connection: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        more = connection.recv(65536)
        if not more or len(data) > LINE_BYTES_MAX:
            raise ValueError("the answer is cut off")
        data += more
    return bytes(data)
