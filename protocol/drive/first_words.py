"""Reading a stream on which there is no link yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import trio

from protocol.link.frames import Hello
from protocol.link.paths import Path, take_hello


class StreamEndedError(Exception):
    """The peer closed the connection in the middle of the handshake."""


async def receive(stream: trio.abc.Stream) -> bytes:
    """What comes next. Raises `StreamEndedError`, and what a stream raises that breaks."""
    data = await stream.receive_some(4096)
    if not data:
        raise StreamEndedError
    return bytes(data)


async def first_frame(
    stream: trio.abc.Stream, records: Path, trailing: bytes
) -> tuple[Hello, Iterator[tuple[int, bytes]]]:
    """The peer's HELLO, and the frames that came with it: take them all before the next read."""
    data = trailing
    while True:
        frames = records.feed(data)
        for kind, plain in frames:
            return take_hello(kind, plain), frames
        data = await receive(stream)


@asynccontextmanager
async def closing_unless_kept(stream: trio.abc.Stream) -> AsyncIterator[list[trio.abc.Stream]]:
    """Closes the stream at the end, also while being cancelled, unless it was put into the list."""
    kept: list[trio.abc.Stream] = []
    try:
        yield kept
    finally:
        if not kept:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
