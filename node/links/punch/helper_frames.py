"""What the daemon and its punching helper say to each other over their socket pair. Pure.

A frame is: length of the rest (4 bytes, big endian), connection number (4 bytes), one byte that says whether the body
is bytes of a stream or an order, and the body. Orders are msgpack, decoded straight into one of the structs below.
Both processes are ours, but the helper faces the network: the daemon takes nothing from it on trust.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.link.candidates import CANDIDATES_MAX, Candidate
from protocol.link.signal import FINGERPRINT_BYTES, Way

DATA_BYTES_MAX = 32 << 10
"""Bytes of a stream in one frame: small enough that streams share the socket pair fairly."""
ORDER_BYTES_MAX = 8 << 10
"""An order: sixteen candidates and a few servers take about 2 KiB."""
SERVERS_MAX = 4
"""STUN servers and TURN servers asked for one connection."""
CONNECTIONS_MAX = 64
"""Connections of one helper at once: a volunteer has a few servers, a server a few tens of volunteers behind NATs."""
WINDOW_BYTES = 1 << 20
"""Bytes of one stream and direction that the receiving daemon has not consumed."""

_HEAD_BYTES = 9
_DATA, _ORDER = 0, 1

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Fingerprint = Annotated[bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
_Candidates = Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=CANDIDATES_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=60)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Any frame but bytes of a stream."""


class StunServer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tells a socket what its address looks like from outside (RFC 8489); over UDP."""

    host: _Text
    port: _Port = 3478


class TurnServer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Relays datagrams (RFC 8656)."""

    host: _Text
    port: _Port = 3478
    username: _Text = ""
    password: _Text = ""
    tcp: bool = False
    """Speak TCP to it: the way out where UDP is blocked."""

    def __repr__(self) -> str:
        return f"TurnServer({self.host}:{self.port}{' by TCP' if self.tcp else ''})"  # no log shows the password


class Gather(Order, frozen=True):
    """Daemon: open sockets for a connection and find out where they can be reached."""

    controlling: bool
    stun: Annotated[tuple[StunServer, ...], msgspec.Meta(max_length=SERVERS_MAX)]
    turn: Annotated[tuple[TurnServer, ...], msgspec.Meta(max_length=SERVERS_MAX)]
    lan: bool
    loopback: bool
    within_s: _Seconds


class Gathered(Order, frozen=True):
    """Helper: here they are."""

    ufrag: _Text
    password: _Text
    dtls_fingerprint: _Fingerprint
    candidates: _Candidates


class Connect(Order, frozen=True):
    """Daemon: punch through to these, and to nobody else."""

    ufrag: _Text
    password: _Text
    dtls_fingerprint: _Fingerprint
    candidates: _Candidates
    ways: tuple[Way, ...]
    same_site: bool
    within_s: _Seconds


class SocketReady(Order, frozen=True):
    """Helper: the punched socket lies in the other socket pair; the peer is at this address. The helper forgets it."""

    host: _Text
    port: _Port


class ChannelReady(Order, frozen=True):
    """Helper: the data channel is open; frames of bytes and credit follow."""

    dtls_fingerprint: _Fingerprint
    """Of the certificate that the peer really showed."""
    host: _Text
    port: _Port
    relayed: bool
    """Whether a TURN server lies in between."""


class Credit(Order, frozen=True):
    """Either side: so many more bytes of the stream may be sent to me."""

    byte_count: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_BYTES)]


class Traffic(Order, frozen=True):
    """Helper: the connection's datagrams since the last time, with IP and UDP headers, retransmissions and all."""

    up_bytes: _Count
    down_bytes: _Count


class Close(Order, frozen=True):
    """Daemon: end the connection; what was sent is still delivered as far as the peer takes it soon."""


class Ended(Order, frozen=True):
    """Helper: the connection is over. `clean`: the peer closed it and everything before that has arrived."""

    reason: _Text
    clean: bool = False


class AskCensus(Order, frozen=True):
    """Daemon: are you well? Answered with `Census`; no answer for long means that the helper hangs."""

    count_sockets: bool
    """Looks through the system's list, which takes milliseconds on a busy server."""


class Census(Order, frozen=True):
    """Helper: what it holds, for the watch and for tests that nothing leaks."""

    connections: _Count
    tasks: _Count
    sockets: _Count
    """Zero when they were not counted."""


FromDaemon = Gather | Connect | Credit | Close | AskCensus
FromHelper = Gathered | SocketReady | ChannelReady | Credit | Traffic | Ended | Census

_encoder = msgspec.msgpack.Encoder()
_from_daemon: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)
_from_helper: msgspec.msgpack.Decoder[FromHelper] = msgspec.msgpack.Decoder(FromHelper)


def order_frame(number: int, order: Order) -> bytes:
    """The frame of an order for connection `number` (0: for the helper as a whole)."""
    body = _encoder.encode(order)
    if len(body) > ORDER_BYTES_MAX:
        raise LocalProtocolError(f"{type(order).__name__} has {len(body)} bytes")
    return _head(number, _ORDER, len(body)) + body


def data_frame(number: int, data: bytes | bytearray | memoryview) -> bytes:
    """The frame of 1 to DATA_BYTES_MAX bytes of a stream."""
    if not 0 < len(data) <= DATA_BYTES_MAX:
        raise LocalProtocolError(f"a frame of {len(data)} bytes")
    return b"".join((_head(number, _DATA, len(data)), data))


def _head(number: int, kind: int, body_bytes: int) -> bytes:
    return (body_bytes + 5).to_bytes(4, "big") + number.to_bytes(4, "big") + bytes((kind,))


class FrameReader:
    """Cuts the bytes that arrive into (connection number, order or bytes)."""

    def __init__(self, *, daemon: bool) -> None:
        """`daemon`: we are the daemon and read what the helper says."""
        self._decoder: msgspec.msgpack.Decoder[FromHelper] | msgspec.msgpack.Decoder[FromDaemon]
        self._decoder = _from_helper if daemon else _from_daemon
        self._inbox = bytearray()

    def receive(self, data: bytes) -> list[tuple[int, Order | bytes]]:
        """The frames that `data` completes. Raises `RemoteProtocolError` (size, decode); the pair is broken then."""
        self._inbox += data
        frames: list[tuple[int, Order | bytes]] = []
        at = 0
        while len(self._inbox) - at >= _HEAD_BYTES:
            length = int.from_bytes(self._inbox[at : at + 4], "big")
            kind = self._inbox[at + 8]
            if kind not in (_DATA, _ORDER):
                raise RemoteProtocolError("decode", f"a frame of kind {kind}")
            if not 0 < length - 5 <= (DATA_BYTES_MAX if kind == _DATA else ORDER_BYTES_MAX):
                raise RemoteProtocolError("size", f"a frame of {length} bytes")
            end = at + 4 + length
            if len(self._inbox) < end:
                break
            number = int.from_bytes(self._inbox[at + 4 : at + 8], "big")
            body = bytes(memoryview(self._inbox)[at + _HEAD_BYTES : end])
            frames.append((number, body if kind == _DATA else self._order(body)))
            at = end
        del self._inbox[:at]
        return frames

    def _order(self, body: bytes) -> Order:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
            raise RemoteProtocolError("decode", f"an order that cannot be read: {error}") from None
