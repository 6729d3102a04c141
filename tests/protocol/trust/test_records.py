"""Encrypted records: order, integrity, key changes and the clean end (S4)."""

from __future__ import annotations

import random

import pytest

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.limits import RECORD_BYTES_MAX
from protocol.trust.records import RecordReader, RecordWriter

_KEY, _HEADER = b"\x01" * 32, b"\x02" * 24


def _stream(*plains: bytes, final: bool = True) -> list[bytes]:
    writer = RecordWriter(_KEY, _HEADER)
    records = [writer.header] + [writer.seal(2, plain) for plain in plains]
    return [*records, writer.seal(7, b"", final=True)] if final else records


def _read(data: bytes) -> list[tuple[int, bytes]]:
    return list(RecordReader(_KEY).feed(data))


def _refused(data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        _read(data)
    return caught.value.reason


def test_any_cut_of_the_stream_gives_the_same_records() -> None:
    """Records come out whole however the bytes arrive."""
    rng = random.Random(3)
    plains = [rng.randbytes(size) for size in (0, 1, 17, 4000, RECORD_BYTES_MAX, 5)]
    data = b"".join(_stream(*plains))
    for sizes in ((1 << 20,), (1,), (3, 70_000), (24, 4, 100)):
        reader, got, place, turn = RecordReader(_KEY), [], 0, 0
        while place < len(data):
            size = sizes[turn % len(sizes)]
            got += list(reader.feed(data[place : place + size]))
            place, turn = place + size, turn + 1
        assert got == [*((2, plain) for plain in plains), (7, b"")] and reader.finished and not reader.mid_record


def test_a_reader_says_exactly_how_much_is_missing() -> None:
    """Whoever feeds as much as it asks for gets every record with the last byte of it, and none before."""
    plains = [b"a", bytes(RECORD_BYTES_MAX), b"", bytes(1000)]
    stream = b"".join(_stream(*plains))
    reader, position, found = RecordReader(_KEY), 0, []
    while position < len(stream):
        missing_bytes = reader.missing_bytes
        assert 0 < missing_bytes <= len(stream) - position
        assert list(reader.feed(stream[position : position + missing_bytes - 1])) == []
        assert reader.missing_bytes == 1
        found += list(reader.feed(stream[position + missing_bytes - 1 : position + missing_bytes]))
        position += missing_bytes
    assert [plain for _, plain in found] == [*plains, b""]


def test_every_flipped_bit_fails() -> None:
    """No single-bit change of a stream of three records yields the same records."""
    data = b"".join(_stream(b"one", b"two", b"three"))
    honest = _read(data)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        reader = RecordReader(_KEY)
        got = []
        try:
            for record in reader.feed(bytes(changed)):
                got.append(record)
        except RemoteProtocolError:
            pass
        assert got == honest[: len(got)] and len(got) < len(honest), f"bit {bit}"
        assert not reader.finished


def test_order_matters() -> None:
    """Dropped, repeated and swapped records, and those of another key or direction, are refused."""
    header, one, two, end = _stream(b"one", b"two")
    assert _refused(header + two) == "signature"
    assert _refused(header + one + one) == "signature"
    assert _refused(header + two + one) == "signature"
    assert _refused(header + one + end) == "signature"
    assert _refused(RecordWriter(_KEY, b"\x03" * 24).header + one) == "signature"
    with pytest.raises(RemoteProtocolError, match="signature"):
        list(RecordReader(b"\x09" * 32).feed(header + one))


def test_the_end_is_the_end() -> None:
    """Nothing follows the final record, neither written nor read; without it the stream is not finished."""
    data = b"".join(_stream(b"one"))
    assert _refused(data + b"\0") == "size"
    reader = RecordReader(_KEY)
    list(reader.feed(data))
    with pytest.raises(RemoteProtocolError):
        list(reader.feed(b"\0"))
    cut = RecordReader(_KEY)
    list(cut.feed(b"".join(_stream(b"one", final=False))))
    assert not cut.finished
    writer = RecordWriter(_KEY, _HEADER)
    writer.seal(7, b"", final=True)
    with pytest.raises(LocalProtocolError):
        writer.seal(2, b"late")


def test_lengths_are_bounded_before_anything_is_kept() -> None:
    """A head that announces too much or too little is refused at once."""
    assert _refused(_HEADER + b"\x02" + (RECORD_BYTES_MAX + 18).to_bytes(3, "big")) == "size"
    assert _refused(_HEADER + b"\x02" + (16).to_bytes(3, "big")) == "size"
    with pytest.raises(LocalProtocolError):
        RecordWriter(_KEY, _HEADER).seal(2, bytes(RECORD_BYTES_MAX + 1))


def test_keys_change_by_volume_and_on_demand() -> None:
    """A stream whose key changes often reads like any other, and its bytes differ from one that keeps its key."""
    often, never = RecordWriter(_KEY, _HEADER, rekey_bytes=10), RecordWriter(_KEY, _HEADER)
    plains = [bytes([number]) * 7 for number in range(10)]
    changing = [often.seal(2, plain) for plain in plains]
    keeping = [never.seal(2, plain) for plain in plains]
    assert changing[0] == keeping[0] and changing[2:] != keeping[2:]
    assert [plain for _, plain in _read(_HEADER + b"".join(changing))] == plains
    asked = RecordWriter(_KEY, _HEADER)
    asked.rekey()
    assert asked.seal(2, b"x") != never.seal(2, b"x")
