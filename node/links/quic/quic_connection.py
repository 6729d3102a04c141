"""aioquic's connection with fences: what we change about it, in this one file.

aioquic keeps QUIC's rules, but it raises its flow-control windows by what arrived, not by what was read (each window
doubles when half of it is used), so a peer could make us hold any amount. It also takes a rate for its pacer from
the window over the round trip, acknowledges without bound of ranges, and offers no way to read the peer's
certificate. All this is reached through underscored names: the tests of this file break when a new version moves
them, and the version is pinned.
"""

from __future__ import annotations

import hashlib

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    NetworkAddress,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import QuicErrorCode, QuicProtocolVersion
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from node.links.quic.bbr import NAME as CONTROLLER
from node.links.quic.bbr import ModelController, ModelPacer
from node.links.quic.certificate import Certificate

ALPN = "barnraise/1"
"""What both sides must speak inside (RFC 7301): a QUIC server of anything else ends the handshake."""
STREAM_ID = 0
"""The one stream: the first that a client opens for both directions (RFC 9000 section 2.1)."""
DATAGRAM_BYTES = 1200
"""Bytes of UDP payload that every path of the internet carries (RFC 9000 section 14)."""
CONNECTION_ID_BYTES = 8
RECEIVE_WINDOW_BYTES = 4 << 20
"""Stream bytes that the peer may have sent and we did not read: 100 Mbit/s for a third of a second."""
ACK_RANGES_MAX = 32
"""Ranges in one acknowledgement (RFC 9000 section 13.2.3 lets a receiver forget the oldest); a peer that leaves
holes on purpose could otherwise make it longer than a packet."""
HOLES_MAX = 1024
"""Pieces of a stream that came ahead of what is missing and do not adjoin: aioquic looks at all of them with every
frame. The worst that random loss makes of the 3,500 datagrams of a window is a quarter as many."""
PATHS_MAX = 4
"""Addresses of the peer that are remembered: the present one, and the newest."""

_VERIFY_NONE = 0  # ssl.CERT_NONE
_TYPE_MASK = 0xF0
_INITIAL = 0xC0
_VERSION_1 = QuicProtocolVersion.VERSION_1.to_bytes(4, "big")


class FencedConnection(QuicConnection):
    """A QUIC connection that carries one stream and holds a bounded number of bytes for it."""

    def __init__(self, configuration: QuicConfiguration, *, original_destination: bytes | None = None) -> None:
        """`original_destination`: the connection id in the client's first packet, None for a client."""
        super().__init__(configuration=configuration, original_destination_connection_id=original_destination)
        self.heard_at = float("inf")
        """When the last packet of the peer was deciphered."""
        self._granted_bytes = configuration.max_stream_data
        # Who reads datagrams gathers them first, so each batch is acknowledged at once and needs no timer for it.
        self._ack_delay = 0.0
        controller = self._loss._cc
        assert isinstance(controller, ModelController), "the configuration names it"
        self.controller = controller
        self._loss._pacer = ModelPacer(controller, max_datagram_size=configuration.max_datagram_size)
        for limit, value in (
            (self._local_max_streams_bidi, 0 if configuration.is_client else 1),
            (self._local_max_streams_uni, 0),
        ):
            limit.value = limit.sent = value

    # ---- what the driver asks ----

    @property
    def started(self) -> bool:
        """Whether a packet of the peer has been deciphered: only then does the connection belong to anybody."""
        return self._state is not QuicConnectionState.FIRSTFLIGHT

    @property
    def ending(self) -> ConnectionTerminated | None:
        """How the connection ends, as soon as that is known: aioquic tells only when its draining is over."""
        return self._close_event

    @property
    def peer_certificate_sha256(self) -> bytes:
        """Of the certificate whose key signed the handshake; empty before that."""
        certificate: x509.Certificate | None = self.tls._peer_certificate
        return b"" if certificate is None else hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()

    @property
    def unsent_bytes(self) -> int:
        """Stream bytes that were accepted and never left; those sent and lost do not count."""
        stream = self._streams.get(STREAM_ID)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender.highest_offset

    @property
    def unacknowledged_bytes(self) -> int:
        """Stream bytes that the peer does not have for certain; they are in our memory."""
        stream = self._streams.get(STREAM_ID)
        return 0 if stream is None else len(stream.sender._buffer)

    def held_back(self, now: float) -> bool:
        """Whether the pacer lets nothing leave now, and there is nothing to acknowledge, which it always lets."""
        waits = self._pacing_at is not None and now < self._pacing_at
        return waits and self._loss.spaces[-1].ack_at is None

    @property
    def has_room(self) -> bool:
        """Whether neither pacer nor window keeps anything back: then whoever sends little has little to send."""
        room = self.controller.congestion_window - self.controller.bytes_in_flight
        return self._pacing_at is None and room >= self.configuration.max_datagram_size

    def challenge_again(self) -> None:
        """Let the next packet ask a new path to prove itself once more: aioquic asks once, and packets get lost."""
        path = self._network_paths[0]
        if not path.is_validated:
            path.local_challenge_sent = False

    def owns(self, connection_id: bytes) -> bool:
        """Whether a packet to `connection_id` may be for this connection."""
        return any(connection_id == ours.cid for ours in self._host_cids)

    def grant(self, offset: int) -> bool:
        """Let the peer send up to this offset of the stream; True when it is told soon."""
        if offset - self._granted_bytes < self.configuration.max_stream_data // 4:
            return False
        self._granted_bytes = offset
        return True

    # ---- fences ----

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        super().receive_datagram(data, addr, now)
        # Anybody's address may stand on a packet, so those that are not in use go, the oldest first.
        del self._network_paths[1 : 1 - PATHS_MAX]
        for space in self._loss.spaces:
            # Nothing is due to be said about packets that ask for no answer, so they would gather here.
            while len(space.ack_queue) > ACK_RANGES_MAX:
                space.ack_queue.shift()

    def _handle_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        super()._handle_stream_frame(context, frame_type, buf)
        stream = self._streams.get(STREAM_ID)
        if stream is not None:
            _check_holes(stream, frame_type)

    def _handle_crypto_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        stream = self._crypto_streams[context.epoch]
        super()._handle_crypto_frame(context, frame_type, buf)
        _check_holes(stream, frame_type)

    def _payload_received(
        self, context: QuicReceiveContext, plain: bytes, crypto_frame_required: bool = False
    ) -> tuple[bool, bool]:
        self.heard_at = context.time
        return super()._payload_received(context, plain, crypto_frame_required)

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        limits = (self._local_max_data, self._local_max_streams_bidi, self._local_max_streams_uni)
        self._local_max_data.value = self._granted_bytes
        if all(limit.value == limit.sent for limit in limits):
            return
        used = [limit.used for limit in limits]
        for limit in limits:
            limit.used = 0  # nothing is used: nothing is doubled
        try:
            super()._write_connection_limits(builder, space)
        finally:
            for limit, value in zip(limits, used, strict=True):
                limit.used = value

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        stream.max_stream_data_local = self._granted_bytes
        if stream.max_stream_data_local_sent == self._granted_bytes:
            return
        highest = stream.receiver.highest_offset
        stream.receiver.highest_offset = 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            stream.receiver.highest_offset = highest

    def _write_ack_frame(self, builder: QuicPacketBuilder, space: QuicPacketSpace, now: float) -> None:
        while len(space.ack_queue) > ACK_RANGES_MAX:
            space.ack_queue.shift()
        super()._write_ack_frame(builder, space, now)


def _check_holes(stream: QuicStream, frame_type: int) -> None:
    """Raises `QuicConnectionError`, which ends the connection, where a peer leaves more holes than losses do."""
    if len(stream.receiver._ranges) > HOLES_MAX:
        raise QuicConnectionError(
            error_code=QuicErrorCode.INTERNAL_ERROR, frame_type=frame_type, reason_phrase="too many holes in a stream"
        )


def quic_configuration(*, client: bool, certificate: Certificate | None, idle_s: float) -> QuicConfiguration:
    """What both sides run with; a server shows `certificate` and proves that it has its key."""
    configuration = QuicConfiguration(
        is_client=client,
        alpn_protocols=[ALPN],
        congestion_control_algorithm=CONTROLLER,
        connection_id_length=CONNECTION_ID_BYTES,
        idle_timeout=idle_s,
        max_data=RECEIVE_WINDOW_BYTES,
        max_stream_data=RECEIVE_WINDOW_BYTES,
        max_datagram_size=DATAGRAM_BYTES,
        supported_versions=[QuicProtocolVersion.VERSION_1],
        # No authority signed it: the driver compares its digest. That the server has its key is checked all the same.
        verify_mode=_VERIFY_NONE,
    )
    if not client and certificate is not None:
        configuration.certificate = certificate.certificate
        configuration.private_key = certificate.key
    return configuration


def first_destination(datagram: bytes) -> bytes | None:
    """The connection id to which a client's first packet goes, or None for anything that is not one.

    RFC 9000 section 17.2.2: an Initial packet of version 1, to an id of 8 to 20 bytes, in a datagram of full size.
    """
    version, ids = datagram[1:5], datagram[5:]
    if len(datagram) < DATAGRAM_BYTES or datagram[0] & _TYPE_MASK != _INITIAL or version != _VERSION_1:
        return None
    return ids[1 : 1 + ids[0]] if 8 <= ids[0] <= 20 else None
