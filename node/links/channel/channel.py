"""A byte stream over a data channel: messages of at most 16 KiB, credit both ways, a clean end.

Runs in the helper process, on asyncio. A slow reader does not push back in SCTP as aiortc has it, so each side says
how many bytes in all it is willing to take, and whoever sends more is cut off. A message begins with one byte:
0 for bytes of the stream, 1 for a new total (8 bytes, big endian), 2 for the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from aiortc.rtcdtlstransport import RTCCertificate

from node.links.channel.sctp_fence import Carrier, FencedDtls, FencedSctp, open_dtls
from node.links.punch.helper_frames import DATA_BYTES_MAX, WINDOW_BYTES

MESSAGE_BYTES = 16 << 10
"""A message on the wire: fourteen fragments, so one lost fragment holds back little, and overhead stays at one in
a thousand."""
QUEUE_BYTES = 64 << 10
"""Bytes that the daemon may have handed over beyond what is in flight: a control message waits behind no more."""
CREDIT_STEP = WINDOW_BYTES // 32
"""Consumed bytes after which the peer is told."""
LINGER_S = 2.0
"""After a close: for what was sent to arrive. As long as a link may take for its end."""

_DATA, _TOTAL, _END = b"\0", b"\1", b"\2"


class Channel:
    """One open channel.

    Args:
        deliver: gets the peer's bytes, at most DATA_BYTES_MAX at a time.
        grant: told how many more bytes may be handed to `send`.
        ended: told once that the channel is over: the reason, and whether the peer ended it cleanly.
    """

    def __init__(
        self,
        dtls: FencedDtls,
        *,
        deliver: Callable[[bytes], None],
        grant: Callable[[int], None],
        ended: Callable[[str, bool], None],
    ) -> None:
        self._dtls = dtls
        self._deliver = deliver
        self._grant = grant
        self._report = ended
        self._over = False
        self._clean = False
        self._sent_bytes = 0
        self._granted_bytes = 0
        self._peer_takes_bytes = WINDOW_BYTES
        self._received_bytes = 0
        self._we_take_bytes = WINDOW_BYTES
        self._told_bytes = WINDOW_BYTES
        self._sctp = FencedSctp(dtls, on_message=self._message, on_room=self._room, on_closed=self._closed)
        dtls.on("statechange", self._dtls_changed)

    @classmethod
    async def open(
        cls,
        carrier: Carrier,
        certificate: RTCCertificate,
        *,
        client: bool,
        fingerprint: bytes,
        deliver: Callable[[bytes], None],
        grant: Callable[[int], None],
        ended: Callable[[str, bool], None],
    ) -> Channel:
        """Prove the peer's certificate, then open the channel. The caller sets the deadline.

        Raises `ConnectionError`. `grant` may be called before this returns.
        """
        dtls = await open_dtls(carrier, certificate, client=client, fingerprint=fingerprint)
        if dtls is None:
            raise ConnectionError("the peer showed another certificate than it signed, or none")
        channel = cls(dtls, deliver=deliver, grant=grant, ended=ended)
        try:
            await channel._sctp.open()
        except BaseException:
            await channel.end()
            raise
        channel._room()
        return channel

    @property
    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the certificate that the peer showed."""
        return self._dtls.peer_fingerprint

    def send(self, data: bytes) -> None:
        """Queue bytes of the stream. Raises `ValueError` for more than was granted: our own daemon's mistake."""
        if self._over:
            return
        self._sent_bytes += len(data)
        if self._sent_bytes > self._granted_bytes:
            raise ValueError("more bytes than credit")
        for start in range(0, len(data), MESSAGE_BYTES - 1):
            self._sctp.channel.send(_DATA + data[start : start + MESSAGE_BYTES - 1])

    def consumed(self, byte_count: int) -> None:
        """The daemon took so many bytes out of its buffer."""
        self._we_take_bytes += byte_count
        if not self._over and self._we_take_bytes - self._told_bytes >= CREDIT_STEP:
            self._told_bytes = self._we_take_bytes
            self._sctp.channel.send(_TOTAL + self._we_take_bytes.to_bytes(8, "big"))

    async def close(self) -> None:
        """Say that nothing more will come, and wait a little for the peer to have everything."""
        if not self._over:
            self._sctp.channel.send(_END)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while self._sctp.unacknowledged and not self._over:
                        await asyncio.sleep(0.01)
        await self.end()

    async def end(self) -> None:
        """Cut it off."""
        self._over = True
        await self._sctp.end()
        await self._dtls.stop()

    # ---- what happens underneath -------------------------------------------------------------------------------------

    def _message(self, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        if self._clean or len(message) > MESSAGE_BYTES:
            self._sctp._cut_off("a message after the end, or too long a one")
        elif kind == _DATA and body:
            self._received_bytes += len(body)
            if self._received_bytes > self._told_bytes:
                self._sctp._cut_off("more bytes than we said we would take")
                return
            for start in range(0, len(body), DATA_BYTES_MAX):
                self._deliver(body[start : start + DATA_BYTES_MAX])
        elif kind == _TOTAL and len(body) == 8:
            total = int.from_bytes(body, "big")
            if not self._peer_takes_bytes < total <= self._sent_bytes + WINDOW_BYTES:
                self._sctp._cut_off("credit that cannot be")
                return
            self._peer_takes_bytes = total
            self._room()
        elif kind == _END and not body:
            self._clean = True
            self._closed("the peer closed the connection")
        else:
            self._sctp._cut_off("a message of an unknown kind")

    def _room(self) -> None:
        """Tell the daemon how much more it may hand over."""
        handed_on = self._sent_bytes - min(self._sent_bytes, self._sctp.unsent_bytes)
        allowed = min(self._peer_takes_bytes, handed_on + QUEUE_BYTES)
        if allowed > self._granted_bytes and not self._over:
            self._grant(allowed - self._granted_bytes)
            self._granted_bytes = allowed

    def _dtls_changed(self) -> None:
        if self._dtls.state in ("closed", "failed"):
            self._closed("the peer ended the encrypted connection, or its address is gone")

    def _closed(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._report(reason, self._clean)
