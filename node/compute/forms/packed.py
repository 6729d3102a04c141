"""Integers packed by width: for every 64 of them 5 bits that say how wide they are, then their two's complement.

Blocks of one width lie together, bit by bit: for each width w from 1 upwards, for each bit from the lowest, 8 bytes of
every block of that width. So packing is a few passes over bytes for each bit, with nothing that depends on a block's
place. Width code 31 stands for 32 bits, whatever needs more than 30.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, width_bytes

Ints = npt.NDArray[np.int32]
_CHUNK = 1 << 15
"""Blocks worked on at a time: their bytes of one lane, 2 MiB, stay in a core's cache. A multiple of 8, so that widths
of 5 bits begin at a whole byte. What only looks at a vector takes no memory by its length: where it comes from outside,
a byte may stand for 102 integers."""
_BITS_OF = np.array([*range(31), 32])
"""[32] bits that values of each width code take."""


def pack(values: Ints) -> bytearray:
    """Bytes of a vector of int32. The same vector always gives the same bytes."""
    blocks = _as_blocks(values)
    widths = _widths(blocks)
    out = bytearray(_pack_widths(widths))
    for width in np.unique(widths):
        if width:
            for plane in _planes(blocks, np.flatnonzero(widths == width), int(width)):
                out += plane
    return out


def is_whole(buffer: bytes | bytearray | memoryview, count: int) -> bool:
    """Whether `unpack` would take the bytes, and no block is wider than its integers need, without unpacking them.

    `pack` makes no wider ones, and a sender could have them unpacked one by one (`all_within`) for nothing.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    block_count = -(-count // BLOCK)
    offset = width_bytes(block_count)
    if data.size < offset:
        return False
    alike = _alike(data, block_count)
    if data.size != offset + 8 * int((alike * _BITS_OF).sum()):
        return False
    return all(_needs_its_width(planes, code) for code, planes in _by_width(data, block_count, alike))


def first(buffer: bytes | bytearray | memoryview, count: int) -> int:
    """The first integer of a packed vector that `is_whole`, without unpacking the others."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    code = int(_unpack_widths(data[:1], 1)[0]) if count else 0
    if not code:
        return 0
    block_count = -(-count // BLOCK)
    planes = dict(_by_width(data, block_count, _alike(data, block_count)))[code]
    return int(_from_planes(planes[:, :1], len(planes))[0, 0])


def widest(buffer: bytes | bytearray | memoryview, count: int) -> npt.NDArray[np.int64]:
    """[blocks] for each 64 integers of a packed vector that `is_whole`: the bits that they take (0: all are zero)."""
    block_count = -(-count // BLOCK)
    data = np.frombuffer(buffer, dtype=np.uint8)
    return _bits(_unpack_widths(data[: width_bytes(block_count)], block_count))


def all_within(buffer: bytes | bytearray | memoryview, count: int, bound: int) -> bool:
    """Whether no integer of a packed vector that `is_whole` is larger than `bound`, or smaller than its negative.

    Only blocks that are wide enough to hold a larger one are unpacked: of an honest vector none.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    block_count = -(-count // BLOCK)
    for _, planes in _by_width(data, block_count, _alike(data, block_count)):
        bits, rows = planes.shape[:2]
        if bits <= bound.bit_length():  # so many bits, with the sign's, hold up to 2^(bits - 1)
            continue
        for begin in range(0, rows, _CHUNK):
            values = _from_planes(planes[:, begin : begin + _CHUNK], bits).astype(np.int64)
            if bool((np.abs(values) > bound).any()):
                return False
    return True


def unpack(buffer: bytes | bytearray | memoryview, count: int) -> Ints:
    """The vector of `count` integers. Raises `RemoteProtocolError` for bytes that `pack` cannot have made."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    block_count = -(-count // BLOCK)
    offset = width_bytes(block_count)
    if data.size < offset:
        raise RemoteProtocolError("shape", f"{data.size} bytes for {count} packed integers")
    widths = _unpack_widths(data[:offset], block_count)
    expected = offset + 8 * int(_bits(widths).sum())
    if data.size != expected:
        raise RemoteProtocolError("shape", f"{data.size} bytes of packed integers whose widths say {expected}")
    blocks = np.zeros((block_count, BLOCK), dtype=np.int32)
    for width in np.unique(widths):
        if width:
            rows = np.flatnonzero(widths == width)
            bits = int(_bits(width))
            planes = data[offset : offset + 8 * bits * rows.size].reshape(bits, rows.size, 8)
            offset += planes.size
            for begin in range(0, rows.size, _CHUNK):
                blocks[rows[begin : begin + _CHUNK]] = _from_planes(planes[:, begin : begin + _CHUNK], bits)
    return blocks.reshape(-1)[:count]


def _as_blocks(values: Ints) -> Ints:
    missing = -values.size % BLOCK
    padded = np.concatenate((values, np.zeros(missing, dtype=np.int32))) if missing else np.ascontiguousarray(values)
    return padded.reshape(-1, BLOCK)


def _widths(blocks: Ints) -> npt.NDArray[np.uint8]:
    """[blocks] codes: 0 where all values are zero, else bits with the sign's, 31 for more than 30."""
    highest, lowest = blocks.max(axis=1), blocks.min(axis=1)
    # ~x has the bits of a negative x that differ from its sign
    magnitude = np.maximum(highest, ~lowest).clip(min=0)
    bits = np.frexp(magnitude.astype(np.float64))[1] + 1  # exact: frexp gives the bit length of a whole number
    bits[(highest == 0) & (lowest == 0)] = 0
    codes: npt.NDArray[np.uint8] = np.minimum(bits, 31).astype(np.uint8)
    return codes


def _bits(codes: npt.NDArray[np.uint8] | np.uint8) -> npt.NDArray[np.int64]:
    """Bits that values of these width codes take."""
    bits: npt.NDArray[np.int64] = _BITS_OF[codes]
    return bits


def _pack_widths(widths: npt.NDArray[np.uint8]) -> bytes:
    return np.packbits(np.unpackbits(widths[:, None], axis=1, count=5, bitorder="little"), bitorder="little").tobytes()


def _unpack_widths(data: npt.NDArray[np.uint8], block_count: int) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(data, count=5 * block_count, bitorder="little").reshape(-1, 5)
    widths: npt.NDArray[np.uint8] = np.packbits(bits, axis=1, bitorder="little").reshape(-1)
    return widths


def _alike(data: npt.NDArray[np.uint8], block_count: int) -> npt.NDArray[np.int64]:
    """[32] how many blocks have each width code."""
    counts = np.zeros(32, dtype=np.int64)
    for begin in range(0, block_count, _CHUNK):
        end = min(begin + _CHUNK, block_count)
        codes = _unpack_widths(data[5 * begin // 8 : width_bytes(end)], end - begin)
        counts += np.bincount(codes, minlength=32)
    return counts


def _by_width(
    data: npt.NDArray[np.uint8], block_count: int, alike: npt.NDArray[np.int64]
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Each width code that occurs, but for zeros, with its blocks' bits [bits, blocks, 8], in their order."""
    offset = width_bytes(block_count)
    for code in range(1, 32):
        bits, rows = int(_BITS_OF[code]), int(alike[code])
        if rows:
            yield code, data[offset : offset + 8 * bits * rows].reshape(bits, rows, 8)
            offset += 8 * bits * rows


def _needs_its_width(planes: npt.NDArray[np.uint8], code: int) -> bool:
    """Whether each block [bits, blocks, 8] holds an integer that a smaller code would not."""
    words = planes.view(np.uint64)[:, :, 0]  # [bits, blocks], one bit of each of its 64 integers
    for begin in range(0, words.shape[1], _CHUNK):
        piece = words[:, begin : begin + _CHUNK]
        if code == 1:
            narrower = piece[0] == 0
        elif code < 31:
            narrower = piece[-1] == piece[-2]  # the sign alone once more
        else:  # of 32 bits: those that 30 hold
            narrower = (piece[-1] == piece[-2]) & (piece[-1] == piece[-3])
        if bool(narrower.any()):
            return False
    return True


def _planes(blocks: Ints, rows: npt.NDArray[np.int64], code: int) -> list[bytes]:
    """The bits of these blocks, one byte string for each bit from the lowest."""
    bits = int(_bits(np.uint8(code)))
    planes: list[list[bytes]] = [[] for _ in range(bits)]
    for begin in range(0, rows.size, _CHUNK):
        lanes = blocks[rows[begin : begin + _CHUNK]]
        for bit in range(bits):
            if bit % 8 == 0:
                lane = (lanes >> bit).astype(np.uint8)
            planes[bit].append(np.packbits(lane & np.uint8(1 << bit % 8), axis=1, bitorder="little").tobytes())
    return [b"".join(parts) for parts in planes]


def _from_planes(planes: npt.NDArray[np.uint8], bits: int) -> Ints:
    """[blocks, 64] integers out of their bits [bits, blocks, 8]; the highest bit is the sign."""
    values = np.zeros((planes.shape[1], BLOCK), dtype=np.int32)
    for low in range(0, bits, 8):
        lane = np.zeros(values.shape, dtype=np.uint8)
        for bit in range(low, min(low + 8, bits)):
            lane |= np.unpackbits(planes[bit], axis=1, bitorder="little") << np.uint8(bit - low)
        if low + 8 >= bits:  # the lane with the sign: shift it to the top of a byte and back
            free = 8 - (bits - low)
            signed = (lane << np.uint8(free)).view(np.int8) >> np.int8(free)
            values |= signed.astype(np.int32) << low
        else:
            values |= lane.astype(np.int32) << low
    return values
