"""The encrypted stream after the handshake: libsodium's secretstream, one for each direction (state-and-trust 2.2).

A direction starts with the 24-byte header of the stream. Then records: kind (1 byte), length of the ciphertext
(3 bytes, big endian), ciphertext. The record's number (8 bytes) and its 4-byte head are authenticated with it, so
none can be changed, dropped, repeated, reordered or moved to the other direction. TAG_REKEY changes the key; the
last record carries TAG_FINAL, and a stream that ends without it was cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import nacl.exceptions
from nacl import bindings as sodium

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.limits import RECORD_BYTES_MAX, REKEY_BYTES

_State = sodium.crypto_secretstream_xchacha20poly1305_state
_init = sodium.crypto_secretstream_xchacha20poly1305_init_pull
_push = sodium.crypto_secretstream_xchacha20poly1305_push
_pull = sodium.crypto_secretstream_xchacha20poly1305_pull
_TAG_MESSAGE = sodium.crypto_secretstream_xchacha20poly1305_TAG_MESSAGE
_TAG_REKEY = sodium.crypto_secretstream_xchacha20poly1305_TAG_REKEY
_TAG_FINAL = sodium.crypto_secretstream_xchacha20poly1305_TAG_FINAL
_OVERHEAD_BYTES = sodium.crypto_secretstream_xchacha20poly1305_ABYTES

STREAM_HEADER_BYTES = 24
HEAD_BYTES = 4
_CIPHERTEXT_BYTES_MAX = RECORD_BYTES_MAX + _OVERHEAD_BYTES


class RecordWriter:
    """The sending half of a direction."""

    def __init__(self, key: bytes, header: bytes, *, rekey_bytes: int = REKEY_BYTES) -> None:
        """`header`: 24 random bytes; send them before the first record.

        libsodium draws a header itself in `init_push`; `init_pull` sets up the very same state from a given one,
        which keeps this module free of randomness.
        """
        self.header = header
        self._state = _State()
        _init(self._state, header, key)
        self._number = 0
        self._rekey_bytes = rekey_bytes
        self._since_rekey_bytes = 0
        self._rekey_wanted = False
        self._final = False

    def rekey(self) -> None:
        """The next record changes the key (the driver asks once an hour; every GiB happens by itself)."""
        self._rekey_wanted = True

    def seal(self, kind: int, plain: bytes, *, final: bool = False) -> bytes:
        """The record that carries `plain` (at most RECORD_BYTES_MAX bytes)."""
        if self._final or len(plain) > RECORD_BYTES_MAX:
            raise LocalProtocolError("records: nothing comes after the final record, and none is longer than the bound")
        tag = _TAG_MESSAGE
        self._since_rekey_bytes += len(plain)
        if final:
            tag = _TAG_FINAL
            self._final = True
        elif self._rekey_wanted or self._since_rekey_bytes >= self._rekey_bytes:
            tag = _TAG_REKEY
            self._rekey_wanted = False
            self._since_rekey_bytes = 0
        head = bytes((kind,)) + (len(plain) + _OVERHEAD_BYTES).to_bytes(3, "big")
        record = head + _push(self._state, plain, self._number.to_bytes(8, "big") + head, tag)
        self._number += 1
        return record


class RecordReader:
    """The receiving half: feed it bytes of the stream, take whole records."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._state: _State | None = None
        self._number = 0
        self._head = b""
        self._pending = bytearray()
        self._wanted_bytes = STREAM_HEADER_BYTES
        self.finished = False
        """The peer's final record was read: the stream ended cleanly."""

    @property
    def mid_record(self) -> bool:
        """Whether a record has begun and not ended."""
        return bool(self._pending or self._head)

    @property
    def missing_bytes(self) -> int:
        """How many bytes must still come before anything can be handed out, or its length be known."""
        return self._wanted_bytes - len(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[int, bytes]]:
        """(kind, plain bytes) of every record that `data` completes; take all of them before the next call.

        Raises `RemoteProtocolError` ("size" or "signature"); the stream is dead after that.
        """
        view = memoryview(data)
        while view:
            if self.finished:
                raise RemoteProtocolError("size", "bytes behind the final record")
            part = view[: self._wanted_bytes - len(self._pending)]
            view = view[len(part) :]
            if len(part) == self._wanted_bytes:
                piece = bytes(part)  # it lies whole in `data`: copied once
            else:
                self._pending += part
                if len(self._pending) < self._wanted_bytes:
                    return
                piece = bytes(self._pending)
                self._pending.clear()
            if self._state is None:
                self._state = _State()
                _init(self._state, piece, self._key)
                self._key = b""
                self._wanted_bytes = HEAD_BYTES
            elif not self._head:
                self._head = piece
                self._wanted_bytes = int.from_bytes(piece[1:], "big")
                if not _OVERHEAD_BYTES <= self._wanted_bytes <= _CIPHERTEXT_BYTES_MAX:
                    raise RemoteProtocolError("size", f"a record of {self._wanted_bytes} bytes")
            else:
                head, self._head = self._head, b""
                self._wanted_bytes = HEAD_BYTES
                yield head[0], self._open(head, piece)

    def _open(self, head: bytes, sealed: bytes) -> bytes:
        assert self._state is not None
        try:
            plain, tag = _pull(self._state, sealed, self._number.to_bytes(8, "big") + head)
        except nacl.exceptions.RuntimeError:
            raise RemoteProtocolError("signature", f"record {self._number} was changed or is out of order") from None
        self._number += 1
        if tag == _TAG_FINAL:
            self.finished = True
        elif tag not in (_TAG_MESSAGE, _TAG_REKEY):
            raise RemoteProtocolError("signature", f"record {self._number} has the unknown tag {tag}")
        return plain
