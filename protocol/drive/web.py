"""Serves pages and answers over HTTP, and lets nobody who has stopped reading keep the process.

hypercorn speaks HTTP; its own server sends an answer behind a shield without an end, so one reader that takes nothing
held its connection for ever, and the whole process when that was to stop, with the lock of its run. Here a send ends
when nothing of it was taken for `TAKEN_S`, and all sends end soon after the server is told to.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import hypercorn
import trio
from hypercorn.events import Event, RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

TAKEN_S = 30.0
"""A reader that takes not a byte for so long is gone; one on a slow line, which takes a few now and then, is not."""
END_S = 1.0
"""What a reader may still take when the process stops: an answer that is on its way, not a long one."""


async def serve_app(
    app: Any,
    listening: socket.socket,
    *,
    read_s: float | None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves an ASGI application on a listening socket until it is cancelled; says its address as a URL when it begins.

    `read_s`: a connection on which nothing was read for so long is closed; None: only one that waits for nothing.
    """
    settings = hypercorn.Config()
    settings.errorlog = None
    settings.include_server_header = False
    settings.read_timeout = None if read_s is None else int(read_s)
    context = WorkerContext(None)
    connection = partial(_Connection, wrap_app(app, settings.wsgi_max_body_size, "asgi"), settings, context)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    host, port = listening.getsockname()[:2]
    task_status.started(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    async with trio.open_nursery() as callers:
        try:
            await trio.serve_listeners(partial(connection, ConnectionState({})), [listener], handler_nursery=callers)
        finally:
            await context.terminated.set()  # while they are still there


class _Connection(TCPServer):
    """One caller's connection."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._life = trio.CancelScope()
        self._ends_at = float("inf")
        """When all is over, whoever reads."""

    async def run(self) -> None:
        with self._life:
            await super().run()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            if not await self._taken(memoryview(event.data)):
                self._life.cancel()

    async def _taken(self, left: memoryview) -> bool:
        """Sends; False when the other end is gone or takes nothing. Who is cancelled still says what it has begun to
        say, so that an answer is whole, but for `END_S` at most."""
        taken_at = trio.current_time()
        while left:
            now = trio.current_time()
            if self.context.terminated.is_set():
                self._ends_at = min(self._ends_at, now + END_S)
            give_up_at = min(taken_at + TAKEN_S, self._ends_at)
            if now >= give_up_at:
                return False
            try:
                with trio.move_on_at(min(give_up_at, now + END_S), shield=True):  # looks whether the server stops
                    left = left[await self.stream.socket.send(left) :]
                    taken_at = trio.current_time()
            except (OSError, trio.ClosedResourceError):
                return False
        return True
