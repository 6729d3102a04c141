"""The daemon's end of a data channel: a `trio.abc.Stream` over a connection of the punching helper."""

from __future__ import annotations

import trio

from node.links.punch.helper import Connection
from node.links.punch.helper_frames import DATA_BYTES_MAX, WINDOW_BYTES, Credit

CREDIT_STEP_BYTES = WINDOW_BYTES // 32
"""Consumed bytes after which the helper is told."""
READ_BYTES = 64 << 10
ROOM_BYTES = 3 * CREDIT_STEP_BYTES
"""What the peer may always have under way, in steps in which we, our helper and it hear of credit."""
ROOM_BUFFERS = 2
"""Under a limit, so many buffers of it more: enough for a long round trip, and no more than a control message may
find before itself. (The whole window would be eight seconds of 1 Mbit/s.)"""


class _Turn:
    """Lets one task at a time in; for a second one it is a mistake of ours."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._taken = False

    def __enter__(self) -> None:
        if self._taken:
            raise trio.BusyResourceError(f"another task {self._doing} on this stream")
        self._taken = True

    def __exit__(self, *_exception: object) -> None:
        self._taken = False


class ChannelStream(trio.abc.Stream):
    """Bytes both ways, as much as the peer takes and the owner's limits let pass."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._consumed_bytes = 0
        """Since the helper was told; below 0 at first where credit is kept back for good."""
        self._read_bytes = READ_BYTES
        buffer_bytes = connection.receive_buffer_bytes
        if buffer_bytes is not None:
            self._consumed_bytes = min(0, ROOM_BYTES + ROOM_BUFFERS * buffer_bytes - WINDOW_BYTES)
            self._read_bytes = min(READ_BYTES, buffer_bytes)
        self._closed = False
        self._send_turn = _Turn("sends")
        self._receive_turn = _Turn("receives")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when everything lies with the helper, a few milliseconds of the line at most."""
        with self._send_turn:
            view = memoryview(data)
            await self._room()
            paid_bytes = 0
            while view:
                if not paid_bytes:
                    paid_bytes = min(len(view), DATA_BYTES_MAX)
                    await self._connection.pay("up", paid_bytes)
                await self._room()
                piece = view[: min(paid_bytes, self._connection.credit_bytes)]
                self._connection.send(piece)
                paid_bytes -= len(piece)
                view = view[len(piece) :]

    async def wait_send_all_might_not_block(self) -> None:
        with self._send_turn:
            await self._room()

    async def _room(self) -> None:
        await trio.lowlevel.checkpoint()
        while True:
            if self._closed:
                raise trio.ClosedResourceError("closed by us")
            if self._connection.ended:
                raise trio.BrokenResourceError(self._connection.ended)
            if self._connection.credit_bytes and not self._connection.ended and not self._closed:
                return
            if not self._connection.ended and not self._closed:
                await self._connection.wait()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Raises `trio.BrokenResourceError` when the connection was lost; b"" is an end that the peer meant."""
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        with self._receive_turn:
            await trio.lowlevel.checkpoint()
            while not self._connection.inbox:
                if self._closed:
                    raise trio.ClosedResourceError("closed by us")
                if self._connection.clean:
                    return b""
                if self._connection.ended:
                    raise trio.BrokenResourceError(self._connection.ended)
                await self._connection.wait()
            if self._closed:
                raise trio.ClosedResourceError("closed by us")
            size = min(len(self._connection.inbox), max_bytes or READ_BYTES, self._read_bytes)
            await self._connection.pay("down", size)
            if self._closed:
                raise trio.ClosedResourceError("closed by us")
            data = bytes(self._connection.inbox[:size])
            del self._connection.inbox[: len(data)]
            self._consumed_bytes += len(data)
            if self._consumed_bytes >= CREDIT_STEP_BYTES:
                self._connection.tell(Credit(self._consumed_bytes))
                self._consumed_bytes = 0
            return data

    async def aclose(self) -> None:
        """What was sent is still delivered as far as the peer takes it within seconds."""
        self._closed = True
        self._connection.close()
        await trio.lowlevel.checkpoint()
