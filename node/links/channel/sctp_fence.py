"""DTLS and SCTP by aiortc with bounds on everything a peer can make them hold or do (state-and-trust 2.1, S6).

aiortc reassembles without a limit and in quadratic time, and opens any stream that a peer names. Here one ordered
reliable stream exists, messages have a longest length, and whoever goes beyond a bound has its association aborted.

Runs in the helper process, on asyncio. The classes replace methods of aiortc that are not its public interface;
`check_version` refuses a version that this was not tested with.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Protocol, cast

from aiortc import rtcsctptransport as sctp
from aiortc.rtcdatachannel import RTCDataChannel, RTCDataChannelParameters
from aiortc.rtcdtlstransport import RTCCertificate, RTCDtlsFingerprint, RTCDtlsParameters, RTCDtlsTransport
from aiortc.rtcsctptransport import RTCSctpCapabilities, RTCSctpTransport
from aiortc.utils import uint32_gte
from cryptography.hazmat.primitives.serialization import Encoding

TESTED_VERSIONS = ("1.16.",)
STREAM_ID = 0
PORT = 5000
MESSAGE_BYTES_MAX = 64 << 10
"""The longest message on the wire; ours have at most 16 KiB, so that a lost fragment holds little up."""
FLIGHT_BYTES_MAX = 448 << 10
"""What we send beyond the last acknowledgement, so that an honest peer's fence never closes on us."""
HELD_BYTES_MAX = 512 << 10
"""Bytes that wait behind a hole or for the end of their message."""
HELD_CHUNKS_MAX = 4096
"""Chunks that do; small ones cost more than their bytes."""
RWND_MIN = -(64 << 10)
"""How far a peer may go beyond the window that we announced."""
HOLES_MAX = 512
"""Holes in what arrived. A queue that overflows drops every second packet: an honest flight has 400 large chunks, so
200 holes, and a few more for small ones. (64 cut off every honest peer whose router buffers less than a flight.)"""
GAPS_TOLD_MAX = 240
"""Runs behind holes that one acknowledgement names, the earliest: four bytes each, so it fits into one datagram."""
DUPLICATES_MAX = 1024
"""More than a whole flight sent twice, without anything new in between."""
DUPLICATES_TOLD = 16
"""Duplicates named in one acknowledgement; their number is information for nobody but a tracer."""
GAPS_SPAN_MAX = 4096
"""Chunks that one acknowledgement can speak of; our flight has at most 400 large ones."""
INIT_RETRY_S = 0.5
"""aiortc waits three seconds for an answer to its first packet."""
IDLE_HEARTBEAT_S = 1.0
SILENT_S = 5.0
"""A peer from which nothing came for so long, heartbeats unanswered, is gone (aiortc would notice after 31 s)."""

_DUPLICATE_WEIGHT = 8  # new chunks that make up for so many duplicates


class Carrier(Protocol):
    """What carries datagrams for DTLS: the settled ICE pair."""

    async def receive(self) -> bytes: ...
    async def transmit(self, data: bytes) -> None: ...


def check_version() -> None:
    """Raises `RuntimeError` for an aiortc whose insides were never looked at."""
    found = version("aiortc")
    if not found.startswith(TESTED_VERSIONS):
        raise RuntimeError(f"aiortc {found}: the fence was tested with {', '.join(TESTED_VERSIONS)}*")


class _Pipe:
    """What aiortc's DTLS expects of an ICE transport."""

    state = "completed"

    def __init__(self, carrier: Carrier, role: str) -> None:
        self.role = role
        self._recv = carrier.receive
        self._send = carrier.transmit


class FencedDtls(RTCDtlsTransport):
    """DTLS for data only: no media keys are made."""

    def _setup_srtp(self) -> None:
        """Nothing: there is no media."""

    @property
    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the certificate (DER) that the peer showed; zeros before that."""
        certificate = self._ssl and self._ssl.get_peer_certificate(as_cryptography=True)
        if certificate is None:
            return bytes(32)
        return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


async def open_dtls(
    carrier: Carrier, certificate: RTCCertificate, *, client: bool, fingerprint: bytes
) -> FencedDtls | None:
    """DTLS with the peer whose certificate has `fingerprint`; None when it shows another or none."""
    pipe: Any = _Pipe(carrier, "controlling" if client else "controlled")
    dtls = FencedDtls(pipe, [certificate])
    dtls._set_role("client" if client else "server")
    hexed = ":".join(f"{byte:02X}" for byte in fingerprint)
    await dtls.start(RTCDtlsParameters(fingerprints=[RTCDtlsFingerprint("sha-256", hexed)]))
    if dtls.state != "connected" or not hmac.compare_digest(dtls.peer_fingerprint, fingerprint):
        await dtls.stop()
        return None
    return dtls


class _OneStream:
    """Puts the fragments of the one stream together, each looked at once.

    There is one ordered stream without abandoned messages, so the order of fragments is the order of their numbers.
    """

    def __init__(self, next_tsn: int) -> None:
        self._next_tsn = next_tsn
        self._waiting: dict[int, sctp.DataChunk] = {}
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self.held_bytes = 0
        self.fault = ""

    @property
    def held_chunks(self) -> int:
        return len(self._waiting) + len(self._parts)

    def add_chunk(self, chunk: sctp.DataChunk) -> None:
        self._waiting[chunk.tsn] = chunk
        self.held_bytes += len(chunk.user_data)

    def pop_messages(self) -> Iterator[tuple[int, int, bytes]]:
        while (chunk := self._waiting.pop(self._next_tsn, None)) is not None:
            self._next_tsn = sctp.tsn_plus_one(self._next_tsn)
            first = bool(chunk.flags & sctp.SCTP_DATA_FIRST_FRAG)
            if first == bool(self._parts):
                self.fault = "fragments that do not fit together"
                return
            self._parts.append(chunk.user_data)
            self._part_bytes += len(chunk.user_data)
            if self._part_bytes > MESSAGE_BYTES_MAX:
                self.fault = f"a message of more than {MESSAGE_BYTES_MAX} bytes"
                return
            if chunk.flags & sctp.SCTP_DATA_LAST_FRAG:
                message = b"".join(self._parts)
                self._parts, self._part_bytes = [], 0
                self.held_bytes -= len(message)
                yield chunk.stream_id, chunk.protocol, message

    def prune_chunks(self, tsn: int) -> int:
        """Only a peer that abandons messages causes this, and that one was cut off before."""
        return 0


_WHILE_OPENING = (sctp.InitChunk, sctp.InitAckChunk)
_ALWAYS = (
    sctp.DataChunk,
    sctp.SackChunk,
    sctp.HeartbeatChunk,
    sctp.HeartbeatAckChunk,
    sctp.AbortChunk,
    sctp.ShutdownChunk,
    sctp.ShutdownAckChunk,
    sctp.ShutdownCompleteChunk,
    sctp.CookieEchoChunk,
    sctp.CookieAckChunk,
    sctp.ErrorChunk,
)


class FencedSctp(RTCSctpTransport):
    """One association with one stream.

    Args:
        on_message: gets each whole message, in order.
        on_room: called when the queue of outgoing messages became shorter.
        on_closed: called once, with the reason.
    """

    def __init__(
        self,
        dtls: Any,
        *,
        on_message: Callable[[bytes], None],
        on_room: Callable[[], None],
        on_closed: Callable[[str], None],
    ) -> None:
        super().__init__(dtls, PORT)
        self._local_partial_reliability = False
        self._rto = INIT_RETRY_S
        self._on_message = on_message
        self._on_room = on_room
        self._on_closed = on_closed
        self._stream: _OneStream | None = None
        self._duplicates = 0
        self._window_at_start = self._advertised_rwnd
        self.aborted = ""
        """Why we cut the peer off; empty while we did not."""
        self._told = False
        self._farewell: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.heard_at = asyncio.get_running_loop().time()
        self.opened = asyncio.Event()
        self.channel = RTCDataChannel(
            self, RTCDataChannelParameters(label="barnraise", negotiated=True, id=STREAM_ID, ordered=True)
        )

    async def open(self) -> None:
        """Returns when messages can be sent; the caller sets the deadline. Raises `ConnectionError`."""
        await self.start(RTCSctpCapabilities(maxMessageSize=MESSAGE_BYTES_MAX), PORT)
        self._watch = asyncio.create_task(self._watch_peer())
        await self.opened.wait()
        if self.channel.readyState != "open":
            raise ConnectionError(self.aborted or "the association was refused")

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that wait for room in the flight."""
        return int(self.channel.bufferedAmount)

    @property
    def unacknowledged(self) -> bool:
        """Whether anything that was sent may not have arrived."""
        return bool(self._data_channel_queue or self._outbound_queue or self._sent_queue)

    async def end(self) -> None:
        """Abort the association and end the tasks that belong to it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        with contextlib.suppress(ConnectionError):
            await self.stop()

    def _cut_off(self, reason: str) -> None:
        if not self.aborted:
            self.aborted = reason
            self._stream = None
            self._sack_misordered.clear()
            self._sack_duplicates.clear()
            self._sack_needed = False
            self._farewell = asyncio.ensure_future(self._abort())
            self._set_state(self.State.CLOSED)

    async def _watch_peer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(IDLE_HEARTBEAT_S)
            silent_s = loop.time() - self.heard_at
            if silent_s > SILENT_S:
                self._cut_off(f"nothing came for {silent_s:.0f} s")
                return
            if self._association_state == self.State.ESTABLISHED and silent_s > IDLE_HEARTBEAT_S / 2:
                with contextlib.suppress(ConnectionError):
                    await self._send_chunk(sctp.HeartbeatChunk())

    # ---- what aiortc calls -------------------------------------------------------------------------------------------

    def _set_state(self, state: Any) -> None:
        super()._set_state(state)
        if state in (self.State.ESTABLISHED, self.State.CLOSED):
            self.opened.set()
        if state == self.State.CLOSED and not self._told:
            self._told = True
            self._on_closed(self.aborted or "the peer ended the association")

    async def _handle_data(self, data: bytes) -> None:
        if self.aborted:
            return
        self.heard_at = asyncio.get_running_loop().time()
        try:
            await super()._handle_data(data)
        except ConnectionError:
            raise
        except Exception as error:  # a parser's surprise: whatever it was, this peer sent it
            self._cut_off(f"a packet that cannot be read: {type(error).__name__}")

    async def _receive_chunk(self, chunk: Any) -> None:
        if self.aborted:
            return
        established = self._association_state == self.State.ESTABLISHED
        if isinstance(chunk, _WHILE_OPENING):
            if established:
                return  # a late copy; aiortc would forget what has arrived
        elif not isinstance(chunk, _ALWAYS):
            self._cut_off(f"a {type(chunk).__name__}, which nothing of ours sends")
            return
        await super()._receive_chunk(chunk)

    async def _receive_data_chunk(self, chunk: sctp.DataChunk) -> None:
        if self._last_received_tsn is None:
            return
        if chunk.stream_id != STREAM_ID or chunk.flags & sctp.SCTP_DATA_UNORDERED:
            self._cut_off(f"data outside the one ordered stream (stream {chunk.stream_id})")
            return
        ahead = (chunk.tsn - self._last_received_tsn) % sctp.SCTP_TSN_MODULO
        if HELD_CHUNKS_MAX < ahead < sctp.SCTP_TSN_MODULO // 2:
            self._cut_off(f"a fragment {ahead} ahead of its turn")
            return
        if self._stream is None:
            self._stream = _OneStream(sctp.tsn_plus_one(self._last_received_tsn))
        stream = self._stream
        self._sack_needed = True
        if self._mark_received(chunk.tsn):
            self._duplicates += 1
            if self._duplicates > DUPLICATES_MAX:
                self._cut_off("the same data again and again")
            return
        self._duplicates = max(0, self._duplicates - _DUPLICATE_WEIGHT)
        stream.add_chunk(chunk)
        for _, protocol, message in stream.pop_messages():
            if protocol != sctp.WEBRTC_BINARY:
                self._cut_off(f"a message of kind {protocol}")
                return
            self._on_message(message)
            if self.aborted:
                return
        self._advertised_rwnd = self._window_at_start - stream.held_bytes
        fault = stream.fault
        if stream.held_bytes > HELD_BYTES_MAX or self._advertised_rwnd < RWND_MIN:
            fault = f"{stream.held_bytes} bytes of unfinished messages"
        elif stream.held_chunks > HELD_CHUNKS_MAX:
            fault = f"{stream.held_chunks} fragments of unfinished messages"
        if fault:
            self._cut_off(fault)

    def _mark_received(self, tsn: int) -> bool:
        """Whether the number was here before; keeps the sets small, in constant time where aiortc sorts."""
        last = cast(int, self._last_received_tsn)
        if uint32_gte(last, tsn) or tsn in self._sack_misordered:
            if len(self._sack_duplicates) < DUPLICATES_TOLD:
                self._sack_duplicates.append(tsn)
            return True
        self._sack_misordered.add(tsn)
        while (following := sctp.tsn_plus_one(last)) in self._sack_misordered:
            self._sack_misordered.discard(following)
            last = following
        self._last_received_tsn = last
        return False

    async def _send_sack(self) -> None:
        """What has arrived. aiortc's own names every run, however large the packet, and sorts by numbers that wrap."""
        if self.aborted:
            return
        last = cast(int, self._last_received_tsn)
        runs: list[tuple[int, int]] = []
        for ahead in sorted((tsn - last) % sctp.SCTP_TSN_MODULO for tsn in self._sack_misordered):
            if runs and runs[-1][1] == ahead - 1:
                runs[-1] = runs[-1][0], ahead
            else:
                runs.append((ahead, ahead))
        if len(runs) > HOLES_MAX:
            self._cut_off(f"{len(runs)} holes in what arrived")
            return
        sack = sctp.SackChunk()
        sack.cumulative_tsn = last
        sack.advertised_rwnd = max(0, self._advertised_rwnd)
        sack.duplicates = self._sack_duplicates[:]
        sack.gaps = runs[:GAPS_TOLD_MAX]
        self._sack_duplicates.clear()
        self._sack_needed = False
        await self._send_chunk(sack)

    async def _receive_sack_chunk(self, chunk: sctp.SackChunk) -> None:
        spans = [last - first + 1 for first, last in chunk.gaps]
        if any(span < 1 for span in spans) or sum(spans) > GAPS_SPAN_MAX:
            self._cut_off("an acknowledgement of what was never sent")
            return
        await super()._receive_sack_chunk(chunk)

    async def _transmit(self) -> None:
        self._cwnd = min(self._cwnd, FLIGHT_BYTES_MAX)
        await super()._transmit()

    async def _data_channel_flush(self) -> None:
        await super()._data_channel_flush()
        self._on_room()
