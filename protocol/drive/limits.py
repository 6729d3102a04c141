"""What the owner of a computer lends of the line: bytes a second up and down, and bytes a month (experience.md).

Every way pays here before it moves anything: TCP streams by `Metered`, QUIC for each datagram, a data channel for the
bytes of its stream (for what its helper process adds to them, right afterwards: node/links/punch/helper.py). Counted is
what is handed to sockets and taken from them: payload, records, handshakes, keep-alive, measurements, what is sent
again, and what the kernel's TCP sent again. Not visible from here are the headers of TCP and IP, about three percent
more.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
import trio

from protocol.base.errors import BadInputError
from protocol.base.limits import READ_BYTES, WRITE_BYTES
from protocol.drive.durable import DISK_TROUBLE, replace_durably

BURST_S = 0.05
"""A line that was idle may run ahead by so much of its rate: 0.2 % of half a minute."""
SLICE_S = 0.02
"""One read takes about so much of the rate, so that many links together do not take much at once."""
SLICE_BYTES_MIN = 4096
"""… but a read of less costs more than it smooths."""
SMALL_BYTES = 4096
"""A write up to this size does not queue behind tensors: control messages, keep-alive, handshakes …"""
SMALL_AHEAD_S = 0.3
"""… unless small ones alone have run ahead by so much of the rate: 1 % of half a minute."""
RESERVE_PART = 0.01
"""Of the quota: from there on the node finishes what it has and leaves, so that nothing is cut off in the middle."""
BUFFER_S = 0.1
"""What a limited socket may take in before it is read, in time of the rate (Linux doubles it): a long round trip …"""
BUFFER_BYTES = (32 << 10, 4 << 20)
"""… within these bounds."""
WAIT_FOR_BYTES_MAX = 8 << 10
"""A read waits for no more than this: a line of 20 kbit/s brings it before a link counts as silent."""
CLOCK_S = 30.0
"""How often somebody who waits for the month to turn looks at the clock: it may be set at any time."""
QUOTA_FILE = "transfers.json"
"""In the state folder: what this month has moved."""
_AHEAD_PART = 0.001
_AHEAD_BYTES = 1 << 20

_TCP_INFO_BYTES = 216
_TCP_INFO_SENT = 200
_TCP_INFO_RETRANSMITTED = 208
"""Where Linux puts tcpi_bytes_sent and tcpi_bytes_retrans in struct tcp_info (since 4.19)."""


class QuotaUsedUpError(trio.BrokenResourceError):
    """The month's quota is used up: not a byte more until the month turns."""


class Bucket:
    """A token bucket that may go into debt: what is moved is paid for afterwards, so the mean rate is exact.

    `bytes_per_s` None: no limit. Times in seconds of any clock that does not go back.
    """

    def __init__(self, bytes_per_s: float | None, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = now - BURST_S
        """When everything moved so far would be paid for at exactly the rate."""

    def wait_s(self, now: float, ahead_s: float = 0.0) -> float:
        """How long until more may be moved (0: now); `ahead_s` of debt are forgiven."""
        return 0.0 if self.bytes_per_s is None else max(0.0, self._free_at - ahead_s - now)

    def spend(self, byte_count: float, now: float) -> None:
        """So much was moved."""
        if self.bytes_per_s is not None:
            self._free_at = max(self._free_at, now - BURST_S) + byte_count / self.bytes_per_s


class Quota:
    """Bytes of this calendar month (UTC), both directions together, kept in a file so that a restart forgets none.

    The file runs a little ahead of the truth (a thousandth of the quota, or 1 MiB): a process that is killed has then
    used less than its successor believes, never more. One that says nothing (a power cut left it empty, say) is not
    taken for zero: the month counts as used up, so that the owner pays for nothing, and the next one begins by itself.
    """

    def __init__(self, byte_count: int, file: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises `BadInputError` when the file cannot be used."""
        self.byte_count = byte_count
        self._file = file
        self._wall_clock = wall_clock
        self._month = self._month_now()
        self._used_bytes = 0
        self._warned = False
        self._refused_in = ""
        try:
            self._load()
            self._noted_bytes = self._used_bytes
            self._note_if_possible(self._used_bytes, DISK_TROUBLE)
        except OSError as error:
            raise BadInputError(f"{file}: cannot be used as the record of this month's transfers: {error}") from None

    @property
    def remaining_bytes(self) -> int:
        """What may still be moved this month."""
        month = self._month_now()
        if month > self._month:  # a clock that is set back gives nothing back
            self._month, self._used_bytes = month, 0
            self._note_if_possible(0)
        return max(0, self.byte_count - self._used_bytes)

    @property
    def has_room(self) -> bool:
        """Whether work may begin: more than the reserve is left, and nothing that did not fit was refused this month.
        What is left after a refusal is less than one write; who began again for it would be refused again."""
        enough = self.remaining_bytes > self.byte_count * RESERVE_PART
        return enough and self._refused_in != self._month

    def refuse(self) -> None:
        """Somebody wanted more than is left: that was it for this month."""
        self._refused_in = self._month

    def spend(self, byte_count: int) -> None:
        """So much was moved."""
        self._used_bytes += byte_count
        if self._used_bytes > self._noted_bytes:
            self._note_if_possible(self._used_bytes + max(_AHEAD_BYTES, int(self.byte_count * _AHEAD_PART)))

    def close(self) -> None:
        """Note exactly what was used."""
        self._note_if_possible(self._used_bytes)

    def _month_now(self) -> str:
        return datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m")

    def _load(self) -> None:
        if not self._file.exists():
            return
        try:
            noted = json.loads(self._file.read_bytes())
            month, used_bytes = str(noted["month"]), int(noted["bytes"])
            if datetime.strptime(month, "%Y-%m") and used_bytes < 0:
                raise ValueError("a negative number of bytes")
        except (ValueError, OverflowError, LookupError, TypeError, RecursionError) as error:
            structlog.get_logger("limits").warning(
                "this month's record is lost",
                file=str(self._file),
                reason=str(error),
                detail="the quota counts as used up until the next month; stop, remove the file, and start to count "
                "from nothing",
            )
            month, used_bytes = self._month, self.byte_count
        if month >= self._month:
            self._month, self._used_bytes = month, used_bytes

    def _note_if_possible(self, byte_count: int, forgiven: Set[int] | None = None) -> None:
        """Where the disk is full we count on in memory, and try again when so much was used. Raises `OSError` for what
        is not `forgiven`; None: all is."""
        try:
            self._note(byte_count)
        except OSError as error:
            if forgiven is not None and error.errno not in forgiven:
                raise
            if not self._warned:
                structlog.get_logger("limits").warning("this month's transfers are not noted", reason=str(error))
            self._warned = True

    def _note(self, byte_count: int) -> None:
        """A thousand times a month at most, by how far the file runs ahead: half a minute of waiting for the disk."""
        self._noted_bytes = byte_count
        replace_durably(self._file, (json.dumps({"month": self._month, "bytes": byte_count}) + "\n").encode())


class Limits:
    """The owner's limits of one process, for all its links and ways together; without arguments there are none."""

    def __init__(
        self,
        up_bytes_per_s: float | None = None,
        down_bytes_per_s: float | None = None,
        quota: Quota | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """`clock` must be trio's own or run at its rate."""
        self.up_bytes_per_s = up_bytes_per_s
        self.down_bytes_per_s = down_bytes_per_s
        self._quota = quota
        self._clock = clock
        self._up = Bucket(up_bytes_per_s, float("-inf"))
        self._down = Bucket(down_bytes_per_s, float("-inf"))
        self._up_turn = trio.StrictFIFOLock()
        self._down_turn = trio.StrictFIFOLock()
        self.moved_bytes = 0
        """Both directions together, since the process started."""
        self.low = trio.Event()
        """The quota is down to its reserve: finish and leave."""
        self.used_up = trio.Event()
        """The quota is used up: everything is refused."""

    @property
    def read_bytes(self) -> int:
        """The most that one read should take."""
        rate, remaining_bytes = self.down_bytes_per_s, self.remaining_bytes
        slice_bytes = READ_BYTES if rate is None else min(READ_BYTES, max(SLICE_BYTES_MIN, int(rate * SLICE_S)))
        return slice_bytes if remaining_bytes is None else min(slice_bytes, max(1, remaining_bytes))

    @property
    def receive_buffer_bytes(self) -> int | None:
        """What the kernel should take in before it is read, so that the line keeps the limit too; None: its choice."""
        rate = self.down_bytes_per_s
        return None if rate is None else min(BUFFER_BYTES[1], max(BUFFER_BYTES[0], int(rate * BUFFER_S)))

    @property
    def write_bytes(self) -> int:
        """How much should be handed to `send_all` at once, so that a control message can still come before the rest."""
        rate = self.up_bytes_per_s
        return WRITE_BYTES if rate is None else max(1, min(WRITE_BYTES, int(rate * SLICE_S)))

    @property
    def remaining_bytes(self) -> int | None:
        """What is left of the quota this month; None without a quota."""
        return None if self._quota is None else self._quota.remaining_bytes

    # ---- the owner changes them ----------------------------------------------------------------------------------

    def set_rates(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """From now on; what waits for its turn by the old rate does so once more at most."""
        self.up_bytes_per_s = self._up.bytes_per_s = up_bytes_per_s
        self.down_bytes_per_s = self._down.bytes_per_s = down_bytes_per_s

    def set_quota(self, byte_count: float | None, folder: Path) -> None:
        """Another quota for the month; what was moved while one was set counts. Raises `BadInputError`."""
        wanted_bytes = None if byte_count is None else int(byte_count)
        if wanted_bytes == (None if self._quota is None else self._quota.byte_count):
            return
        self.close()
        self._quota = None if wanted_bytes is None else Quota(wanted_bytes, folder / QUOTA_FILE)
        self.renew()

    @property
    def has_room(self) -> bool | None:
        """Whether the month's quota lets work begin, and go on; None without one."""
        return None if self._quota is None else self._quota.has_room

    def renew(self) -> None:
        """Events that have come begin anew where there is quota (again); somebody may wait for the others."""
        if self._quota is None or self._quota.has_room:
            self.low = trio.Event() if self.low.is_set() else self.low
            self.used_up = trio.Event() if self.used_up.is_set() else self.used_up

    # ---- for streams -------------------------------------------------------------------------------------------

    async def take_up(self, byte_count: int) -> None:
        """Wait for our turn to send so many bytes, and pay. Raises `QuotaUsedUpError`.

        Small ones pay too but hardly wait.
        """
        if byte_count > SMALL_BYTES or self._up.wait_s(self._clock(), SMALL_AHEAD_S):
            await self.turn_up()
        self._check(byte_count)
        self._spend(self._up, byte_count)

    async def take_down(self, byte_count: int) -> None:
        """Wait until so many bytes may be read, and pay. Raises `QuotaUsedUpError`."""
        await self.turn_down()
        self._check(byte_count)
        self._spend(self._down, byte_count)

    async def turn_up(self) -> None:
        """Wait until more may be sent, one after the other; pay with `spend_up`. Raises `QuotaUsedUpError`."""
        await self._turn(self._up, self._up_turn)

    async def turn_down(self) -> None:
        """Wait until more may be read, one after the other; pay with `spend_down`. Raises `QuotaUsedUpError`."""
        await self._turn(self._down, self._down_turn)

    def spend_up(self, byte_count: int) -> None:
        """So many bytes went up."""
        self._spend(self._up, byte_count)

    def spend_down(self, byte_count: int) -> None:
        """So many bytes came down."""
        self._spend(self._down, byte_count)

    # ---- for datagrams -----------------------------------------------------------------------------------------

    def try_take_up(self, byte_count: int) -> bool:
        """Pay for a datagram that is to be sent, or False: keep it for later."""
        return self._try_take(self._up, byte_count)

    def try_take_down(self, byte_count: int) -> bool:
        """Pay for a datagram that came, or False: drop it, and the sender slows down."""
        return self._try_take(self._down, byte_count)

    # ---- the month ---------------------------------------------------------------------------------------------

    async def wait_for_the_month(self) -> None:
        """Until there is quota again."""
        while self._quota is not None and not self._quota.has_room:
            await trio.sleep(CLOCK_S)
        self.low, self.used_up = trio.Event(), trio.Event()

    def check_quota(self) -> None:
        """Set the events if it is time: a process may start with little left."""
        if self._quota is not None:
            if not self._quota.has_room:
                self.low.set()
            if self._quota.remaining_bytes <= 0:
                self.used_up.set()

    def close(self) -> None:
        """The process ends."""
        if self._quota is not None:
            self._quota.close()

    # ---- inside ------------------------------------------------------------------------------------------------

    async def _turn(self, bucket: Bucket, lock: trio.StrictFIFOLock) -> None:
        self._check()
        if bucket.bytes_per_s is None:
            return
        async with lock:
            while (wait_s := bucket.wait_s(self._clock())) > 0:
                await trio.sleep(wait_s)
        self._check()

    def _try_take(self, bucket: Bucket, byte_count: int) -> bool:
        if bucket.wait_s(self._clock()) > 0 or not self._affords(byte_count):
            return False
        self._spend(bucket, byte_count)
        return True

    def _spend(self, bucket: Bucket, byte_count: int) -> None:
        self.moved_bytes += byte_count
        bucket.spend(byte_count, self._clock())
        if self._quota is not None and byte_count:
            self._quota.spend(byte_count)
            self.check_quota()

    def _check(self, byte_count: int = 0) -> None:
        if not self._affords(byte_count):
            raise QuotaUsedUpError("this month's transfer quota is used up")

    def _affords(self, byte_count: int) -> bool:
        """Whether the quota allows so many bytes more; if not, it counts as used up."""
        if self._quota is not None and byte_count > self._quota.remaining_bytes:
            self._quota.refuse()
            self.low.set()
            self.used_up.set()
        return not self.used_up.is_set()


class Metered(trio.abc.Stream):
    """A TCP stream that pays for every byte. Slow reading holds the sender back: its window fills."""

    def __init__(self, stream: trio.SocketStream, limits: Limits) -> None:
        self.inner = stream
        self._limits = limits
        self._resent_bytes = 0
        self._low_water = 1

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when more may be sent, not before: so whoever chooses what comes next chooses late."""
        await self._limits.take_up(len(data) + self._resent())
        await self.inner.send_all(data)
        if len(data) > SMALL_BYTES:
            await self._limits.turn_up()

    def keep_unsent(self, byte_count: int) -> None:
        """Let the kernel take no more while it has so many bytes to send; only where the system can."""
        with suppress(OSError, AttributeError):
            self.inner.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT, byte_count)

    def wait_for(self, byte_count: int) -> None:
        """The next read shall wait until so many bytes are there, within bounds; only where the system can.

        Nothing can be done with a part of a record, and on a line of 20 Mbit/s every packet would wake us for one.
        """
        low_water = max(1, min(byte_count, WAIT_FOR_BYTES_MAX))
        if low_water != self._low_water and sys.platform == "linux":
            with suppress(OSError):
                self.inner.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVLOWAT, low_water)
                self._low_water = low_water

    async def wait_send_all_might_not_block(self) -> None:
        await self.inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        await self._limits.turn_down()
        data = await self.inner.receive_some(min(max_bytes or READ_BYTES, self._limits.read_bytes))
        self._limits.spend_down(len(data))
        return data

    async def aclose(self) -> None:
        await self.inner.aclose()

    @property
    def loss(self) -> float | None:
        """Share of what we sent that the kernel had to send again; None where it does not tell."""
        try:
            info = self.inner.socket.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_INFO, _TCP_INFO_BYTES)
            sent_bytes, again_bytes = struct.unpack_from("=QQ", info, _TCP_INFO_SENT)
        except (OSError, AttributeError, struct.error):
            return None
        return again_bytes / sent_bytes if sent_bytes else None

    def _resent(self) -> int:
        """Bytes that the kernel has sent again since the last call; 0 where it does not tell."""
        if self._limits.up_bytes_per_s is None and self._limits.remaining_bytes is None:
            return 0
        try:
            info = self.inner.socket.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_INFO, _TCP_INFO_BYTES)
            (total_bytes,) = struct.unpack_from("=Q", info, _TCP_INFO_RETRANSMITTED)
        except (OSError, AttributeError, struct.error):
            return 0
        new_bytes, self._resent_bytes = total_bytes - self._resent_bytes, total_bytes
        return int(new_bytes)


@dataclass(frozen=True)
class LineLimits:
    """What the owner says on the command line."""

    up_mbit_per_s: float | None = None
    down_mbit_per_s: float | None = None
    quota_gb: float | None = None
    """Per calendar month, both directions together; a gigabyte is 1e9 bytes."""

    def open(self, folder: Path) -> Limits:
        """The limits of a process whose state is in `folder`. Raises `BadInputError`."""
        quota = None
        if self.quota_gb is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            quota = Quota(int(self.quota_gb * 1e9), folder / QUOTA_FILE)
        return Limits(_bytes_per_s(self.up_mbit_per_s), _bytes_per_s(self.down_mbit_per_s), quota)


def _bytes_per_s(mbit_per_s: float | None) -> float | None:
    return None if mbit_per_s is None else mbit_per_s * 1e6 / 8
