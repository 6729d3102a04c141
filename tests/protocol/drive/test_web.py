"""Who has stopped reading holds neither its connection nor the process that answers; who reads slowly gets it all."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import hypercorn
import pytest
import trio
import trio.testing
from hypercorn.events import RawData
from hypercorn.trio.worker_context import WorkerContext

from protocol.drive import web
from protocol.drive.process import listening_socket

ANSWER_BYTES = 32 << 20
"""More than a system keeps for a reader that takes nothing: a few megabytes at both ends."""
PATIENCE_S = 20.0
SHORT_S = 0.2


async def large(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """One answer that no buffer holds."""
    headers = [(b"content-length", b"%d" % ANSWER_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(ANSWER_BYTES)})


class Served:
    """A server in a task of its own, and a caller that has got the first byte of its answer."""

    def __init__(self) -> None:
        self.stop = trio.CancelScope()
        self.ended = trio.Event()
        self.caller: trio.SocketStream

    async def serve(self, task_status: trio.TaskStatus[str]) -> None:
        listening = listening_socket("127.0.0.1", (0,))
        with self.stop:
            async with trio.open_nursery() as nursery:
                task_status.started(await nursery.start(partial(web.serve_app, large, listening, read_s=None)))
        self.ended.set()

    async def is_over(self) -> bool:
        """Whether the server ends by itself while its caller is still there."""
        with trio.move_on_after(PATIENCE_S):
            await self.ended.wait()
        return self.ended.is_set()

    async def read_all(self) -> int:
        """How many bytes come until the other end closes."""
        count = 0
        with contextlib.suppress(trio.BrokenResourceError):  # closed with something unsaid
            while data := await self.caller.receive_some(1 << 20):
                count += len(data)
        return count


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    async with trio.open_nursery() as nursery:
        here = Served()
        url = await nursery.start(here.serve)
        async with await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2])) as here.caller:
            await here.caller.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await here.caller.receive_some(1) == b"H"
            await trio.testing.wait_all_tasks_blocked(0.05)  # what the buffers hold is sent
            yield here
            here.stop.cancel()


async def test_a_reader_that_stopped_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is never taken; told to end, the server waits `END_S` for it and is gone."""
    monkeypatch.setattr(web, "END_S", SHORT_S)
    async with served() as here:
        here.stop.cancel()
        assert await here.is_over()


async def test_a_reader_that_goes_on_a_little_does_not_keep_it_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a piece now and then, which is enough while the server runs, and not when it ends."""
    monkeypatch.setattr(web, "END_S", SHORT_S)

    async def sip() -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await here.caller.receive_some(1 << 16):
                await trio.sleep(SHORT_S / 4)

    async with served() as here, trio.open_nursery() as nursery:
        nursery.start_soon(sip)
        here.stop.cancel()
        over = await here.is_over()
        nursery.cancel_scope.cancel()
        assert over


async def test_a_reader_that_stopped_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the answer is taken for `TAKEN_S`: the server closes, and the rest is never said."""
    monkeypatch.setattr(web, "TAKEN_S", SHORT_S)
    async with served() as here:
        await trio.sleep(2 * SHORT_S)  # longer than its patience, as is all that follows
        with trio.fail_after(PATIENCE_S):
            assert await here.read_all() < ANSWER_BYTES


class SlowSocket:
    """Has room for one byte, and for the next after almost as long as that may take."""

    taken_bytes = 0
    room_at = 0.0

    async def send(self, data: memoryview) -> int:
        await trio.sleep_until(self.room_at)
        self.room_at = trio.current_time() + 0.9 * web.TAKEN_S
        self.taken_bytes += 1
        return 1


class SlowStream:
    def __init__(self) -> None:
        self.socket = SlowSocket()


async def test_a_reader_that_is_slow_gets_all_of_its_answer(autojump_clock: trio.testing.MockClock) -> None:
    """The whole takes many times `TAKEN_S`, no piece of it does."""
    stream = SlowStream()
    connection = web._Connection(large, hypercorn.Config(), WorkerContext(None), {}, stream)
    await connection.protocol_send(RawData(bytes(10)))
    assert stream.socket.taken_bytes == 10 and trio.current_time() > 8 * web.TAKEN_S
