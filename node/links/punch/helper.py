"""The daemon's end of the punching helper: starts the process when it is first wanted, and outlives it.

Everything here runs on trio's thread. The helper is believed in nothing that a peer could have told it: sizes and
order of its frames are checked, and who the peer is gets proven over the stream, by the daemon.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

import structlog
import trio

from node.links.punch.helper_frames import (
    CONNECTIONS_MAX,
    WINDOW_BYTES,
    AskCensus,
    Census,
    ChannelReady,
    Close,
    Connect,
    Credit,
    Ended,
    FrameReader,
    Gather,
    Gathered,
    Order,
    SocketReady,
    Traffic,
    data_frame,
    order_frame,
)
from node.links.quic.quic import ByteLimits
from node.platform.pairs import HelperSockets, receive_sockets
from protocol.base.errors import RemoteProtocolError

READ_BYTES = 256 << 10
WRITE_BYTES = 256 << 10
WATCH_S = 2.0
"""The helper is asked whether it is well this often."""
START_S = 20.0
"""For a process to start and import what it needs, until its first word; a busy small computer takes a few seconds."""
HUNG_S = 10.0
"""One that has spoken and then says nothing for so long is killed: its timers would be useless by then anyway."""
END_S = 1.0
"""From closing its socket pair until it is killed."""


Direction = Literal["up", "down"]

_UDP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class HelperGoneError(Exception):
    """The helper process has ended, and with it whatever went through it."""


class _Debt:
    """Bytes that the helper has moved in one direction and that no stream pays for: DTLS, SCTP, checks, what is sent
    again.

    Streams pay for their own bytes before they move them, so the line is used evenly. (When they waited instead for
    all to be paid that had been moved, line and limit took turns in resting.) The helper cannot wait for tokens
    datagram by datagram; so the rest is paid afterwards, and the streams wait meanwhile, as their tokens are gone.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._more = trio.Event()

    def add(self, byte_count: int) -> None:
        self._bytes += byte_count
        self._more.set()

    async def pay(self, take: Callable[[int], Awaitable[None]]) -> None:
        """Until cancelled. Raises what `take` raises."""
        while True:
            while not self._bytes:
                self._more = trio.Event()
                await self._more.wait()
            due = self._bytes
            await take(due)
            self._bytes -= due


class Connection:
    """One connection in the helper, from sockets to stream. `close` it in any case; that can be done at any time."""

    def __init__(self, process: _Process, number: int) -> None:
        self.number = number
        self.gathered: Gathered | None = None
        self.outcome: SocketReady | ChannelReady | None = None
        self.handle: socket.socket | None = None
        """The punched socket, until somebody takes it out of here."""
        self.ended = ""
        """Why it is over; empty while it is not."""
        self.clean = False
        """Whether the peer closed it, after everything that it sent."""
        self.credit_bytes = 0
        self.inbox = bytearray()
        self._unreported: dict[Direction, int] = {"up": 0, "down": 0}
        """Bytes that are the stream's to pay for, and that the helper has yet to report as moved."""
        self._process = process
        self._closed = False
        self._changed = trio.Event()

    async def wait(self) -> None:
        """Returns when anything about it has changed."""
        await self._changed.wait()

    def changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_gathered(self) -> Gathered:
        """Where we can be reached. Raises `HelperGoneError` with the reason when it ended."""
        while self.gathered is None:
            if self.ended:
                raise HelperGoneError(self.ended)
            await self.wait()
        return self.gathered

    async def wait_outcome(self) -> SocketReady | ChannelReady:
        """What came of `Connect`. Raises `HelperGoneError` with the reason when nothing did."""
        while self.outcome is None:
            if self.ended:
                raise HelperGoneError(self.ended)
            await self.wait()
        return self.outcome

    def tell(self, order: Connect | Credit) -> None:
        """Does nothing once it is over."""
        if not self._closed and not self.ended:
            self._process.post(order_frame(self.number, order))

    @property
    def receive_buffer_bytes(self) -> int | None:
        """What may wait here under the owner's limit; None: as much as it likes."""
        return None if self._process.limits is None else self._process.limits.receive_buffer_bytes

    async def pay(self, direction: Direction, byte_count: int) -> None:
        """Returns when the owner's limits let so many bytes of the stream pass; raises what they raise."""
        limits = self._process.limits
        if limits is not None and direction == "up":
            await limits.take_up(byte_count)
            self._unreported["up"] += byte_count
        elif limits is not None:
            await limits.take_down(byte_count)

    def moved(self, direction: Direction, byte_count: int) -> None:
        """For the process: so many bytes went over the line; what the stream does not pay for is a debt of all."""
        known = min(byte_count, self._unreported[direction])
        self._unreported[direction] -= known
        self._process.debts[direction].add(byte_count - known)

    def received(self, data: bytes) -> None:
        """For the process: bytes of the stream came, which it pays for when it takes them."""
        self.inbox += data
        self._unreported["down"] += len(data)
        if len(self.inbox) > WINDOW_BYTES:
            raise RemoteProtocolError("size", f"{len(self.inbox)} bytes that we gave no credit for")

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes of the stream, at most as many as there is credit."""
        assert len(data) <= self.credit_bytes, "more than the credit"
        self.credit_bytes -= len(data)
        if not self._closed and not self.ended:
            self._process.post(data_frame(self.number, data))

    def close(self) -> None:
        """End it; what was sent is still delivered as far as the peer takes it within seconds."""
        if self._closed:
            return
        self._closed = True
        if not self.ended:
            self._process.post(order_frame(self.number, Close()))
            self.ended = "closed by us"
        self._process.leave(self)
        self._process.debts["down"].add(len(self.inbox))  # nobody takes these any more
        self.inbox.clear()
        if self.handle is not None:
            self.handle.close()
            self.handle = None
        self.changed()

    def end(self, reason: str, *, clean: bool = False) -> None:
        """For the process: it is over."""
        if not self.ended:
            self.ended, self.clean = reason, clean
            self.changed()


class _Process:
    """One run of the helper."""

    def __init__(self, log: Any, limits: ByteLimits | None) -> None:
        self.connections: dict[int, Connection] = {}
        self._left: dict[int, Connection] = {}
        """Closed last: the helper may still report what they moved, of which their streams have paid a part."""
        self.debts: dict[Direction, _Debt] = {"up": _Debt(), "down": _Debt()}
        self.limits = limits
        self.pid = 0
        self._census: Census | None = None
        self._asked = 0
        self._answered = 0
        self.over = False
        self._log = log
        self._numbers = 0
        self._outbox: deque[bytes] = deque()
        self._wake = trio.Event()
        self._heard_at = trio.current_time()
        self._has_spoken = False
        self._census_came = trio.Event()
        self._sockets: socket.socket

    def open(self, order: Gather) -> Connection:
        self._numbers += 1
        connection = self.connections[self._numbers] = Connection(self, self._numbers)
        self.post(order_frame(connection.number, order))
        return connection

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        if self.connections.pop(connection.number, None) is not None:
            self._left[connection.number] = connection
            while len(self._left) > CONNECTIONS_MAX:
                del self._left[next(iter(self._left))]

    def post(self, frame: bytes) -> None:
        """Queue a frame. The queue is bounded by the streams' credit and by the few orders of each connection."""
        if not self.over:
            self._outbox.append(frame)
            self._wake.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the process, talk to it until it ends or we are cancelled, leave nothing behind."""
        pairs = HelperSockets.open()
        self._sockets = pairs.sockets
        process: trio.Process | None = None
        reason = "the punching helper ended"

        async def pay(debt: _Debt, take: Callable[[int], Awaitable[None]]) -> None:
            nonlocal reason
            try:
                await debt.pay(take)
            except trio.BrokenResourceError as error:  # the quota is used up: a process that goes on moves more
                reason = str(error)
                nursery.cancel_scope.cancel()

        try:
            command = [
                sys.executable,
                "-P",
                "-m",
                "node.links.punch.ice_process",
                *(str(number) for number in pairs.their_numbers),
                str(os.getpid()),
            ]
            process = await pairs.start(command)
            self.pid = process.pid
            self._log.info("punching helper started", pid=process.pid)
            task_status.started()
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(pairs.frames))
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream)
                nursery.start_soon(self._watch, process)
                if self.limits is not None:
                    nursery.start_soon(pay, self.debts["up"], self.limits.take_up)
                    nursery.start_soon(pay, self.debts["down"], self.limits.take_down)
                try:
                    await self._read(stream)
                except RemoteProtocolError as error:
                    reason = f"the punching helper does not speak as it should: {error}"
                nursery.cancel_scope.cancel()
        finally:
            self.over = True
            self._census_came.set()
            self._outbox.clear()
            pairs.close()
            for connection in list(self.connections.values()):
                connection.end(reason)
            if process is not None:
                await _reap(process)
                self._log.info("punching helper ended", pid=process.pid, reason=reason, status=process.returncode)

    async def _write(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                pieces, total = [], 0
                while self._outbox and total < WRITE_BYTES:
                    pieces.append(self._outbox.popleft())
                    total += len(pieces[-1])
                if pieces:
                    await stream.send_all(b"".join(pieces))
                else:
                    await self._wake.wait()
                    self._wake = trio.Event()

    async def _read(self, stream: trio.SocketStream) -> None:
        reader = FrameReader(daemon=True)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await stream.receive_some(READ_BYTES):
                self._heard_at, self._has_spoken = trio.current_time(), True
                for number, frame in reader.receive(data):
                    self._take(number, frame)

    async def _watch(self, process: trio.Process) -> None:
        while True:
            self.post(order_frame(0, AskCensus(False)))
            await trio.sleep(WATCH_S)
            if trio.current_time() - self._heard_at > (HUNG_S if self._has_spoken else START_S):
                self._log.warning("punching helper hangs and is killed", pid=process.pid)
                process.kill()

    async def ask_census(self) -> Census:
        """What the helper holds now."""
        self._asked += 1
        number = self._asked
        self.post(order_frame(number, AskCensus(True)))
        while self._answered < number:
            if self.over:
                raise HelperGoneError("the punching helper ended")
            await self._census_came.wait()
        assert self._census is not None
        return self._census

    def _take(self, number: int, frame: Order | bytes) -> None:
        if isinstance(frame, Census):
            if number:  # the answer to a question of `ask_census`, not of the watch
                self._census, self._answered = frame, number
            self._census_came.set()
            self._census_came = trio.Event()
            return
        if isinstance(frame, Traffic):  # also what a connection moved that is gone by now
            mover = self.connections.get(number) or self._left.get(number)
            moved: dict[Direction, int] = {"up": frame.up_bytes, "down": frame.down_bytes}
            for direction, byte_count in moved.items():
                if mover is None:
                    self.debts[direction].add(byte_count)
                else:
                    mover.moved(direction, byte_count)
            return
        if isinstance(frame, SocketReady):
            self._take_handles()
        connection = self.connections.get(number)
        if connection is None or connection.ended:
            return  # it was closed while this was on its way
        if isinstance(frame, bytes):
            connection.received(frame)
        elif isinstance(frame, Gathered):
            connection.gathered = frame
        elif isinstance(frame, SocketReady):
            if connection.handle is None:
                raise RemoteProtocolError("unexpected", "a socket that did not come")
            connection.outcome = frame
        elif isinstance(frame, ChannelReady):
            connection.outcome = frame
        elif isinstance(frame, Credit):
            connection.credit_bytes += frame.byte_count
        elif isinstance(frame, Ended):
            connection.end(frame.reason, clean=frame.clean)
        connection.changed()

    def _take_handles(self) -> None:
        """Take all punched sockets that lie there; one that nobody waits for any more is closed."""
        while True:
            try:
                data, fds = receive_sockets(self._sockets, 4)
            except BlockingIOError:
                return
            handles = [socket.socket(fileno=fd) for fd in fds]
            connection = self.connections.get(int.from_bytes(data, "big"))
            wanted = connection is not None and connection.handle is None and len(handles) == 1
            if wanted and handles[0].type == socket.SOCK_DGRAM and handles[0].family in _UDP_FAMILIES:
                assert connection is not None
                connection.handle = handles.pop()
            for handle in handles:
                handle.close()


async def _reap(process: trio.Process) -> None:
    """Wait for the process, whose socket pair is closed; kill it when it takes too long."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(END_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


class Helper:
    """Starts the helper process when a connection is wanted and none runs."""

    def __init__(self, nursery: trio.Nursery, limits: ByteLimits | None) -> None:
        """`nursery`: lives as long as the daemon; the process ends with it. `limits`: the owner's."""
        self._nursery = nursery
        self._limits = limits
        self._log = structlog.get_logger("punch")
        self._process: _Process | None = None
        self._starting = trio.Lock()

    @property
    def pid(self) -> int | None:
        """The process, while one runs."""
        return None if self._process is None or self._process.over else self._process.pid

    async def start(self) -> None:
        """Returns when a process runs that answers. Raises `OSError` or `HelperGoneError` when none can be had."""
        async with self._starting:
            if self._process is None or self._process.over:
                process = _Process(self._log, self._limits)
                with trio.move_on_after(START_S):
                    await self._nursery.start(process.run)
                    self._process = process
                    await process.ask_census()
                    return
                raise HelperGoneError(f"the punching helper did not start within {START_S:.0f} s")

    def open(self, order: Gather) -> Connection:
        """A new connection, which is gathering its candidates. Raises `HelperGoneError` when no process runs."""
        if self._process is None or self._process.over:
            raise HelperGoneError("the punching helper ended")
        return self._process.open(order)

    async def ask_census(self) -> Census | None:
        """What the running helper holds; None when none runs."""
        if self._process is None or self._process.over:
            return None
        return await self._process.ask_census()
