"""Integers packed by width: for every 64 of them 5 bits that say how wide they are, then their two's complement.

Blocks of one width lie together, bit by bit: for each width w from 1 upwards, for each bit from the lowest, 8 bytes of
every block of that width. So packing is a few passes over bytes for each bit, with nothing that depends on a block's
place. Width code 31 stands for 32 bits, whatever needs more than 30.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, width_bytes

Ints = npt.NDArray[np.int32]
_CHUNK = 1 << 15
"""Blocks worked on at a time: their bytes of one lane, 2 MiB, stay in a core's cache."""


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
    """Whether `unpack` would take the bytes, without unpacking them."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    block_count = -(-count // BLOCK)
    offset = width_bytes(block_count)
    if data.size < offset:
        return False
    return data.size == offset + 8 * int(_bits(_unpack_widths(data[:offset], block_count)).sum())


def first(buffer: bytes | bytearray | memoryview, count: int) -> int:
    """The first integer of a packed vector that `is_whole`, without unpacking the others."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    block_count = -(-count // BLOCK)
    offset = width_bytes(block_count)
    widths = _unpack_widths(data[:offset], block_count)
    if not count or not widths[0]:
        return 0
    bits, alike = int(_bits(widths[0])), int(np.count_nonzero(widths == widths[0]))
    offset += 8 * int(_bits(widths[widths < widths[0]]).sum())
    planes = data[offset : offset + 8 * bits * alike].reshape(bits, alike, 8)
    return int(_from_planes(planes[:, :1], bits)[0, 0])


def widest(buffer: bytes | bytearray | memoryview, count: int) -> npt.NDArray[np.int64]:
    """[blocks] for each 64 integers of a packed vector that `is_whole`: the bits that they take (0: all are zero)."""
    block_count = -(-count // BLOCK)
    data = np.frombuffer(buffer, dtype=np.uint8)
    return _bits(_unpack_widths(data[: width_bytes(block_count)], block_count))


def all_within(buffer: bytes | bytearray | memoryview, count: int, bound: int) -> bool:
    """Whether no integer of a packed vector that `is_whole` is larger than `bound`, or smaller than its negative.

    Only blocks that are wide enough to hold a larger one are unpacked: of an honest vector none.
    """
    bits = widest(buffer, count)
    suspects = bits > bound.bit_length()  # so many bits, with the sign's, hold up to 2^(bits - 1)
    if not suspects.any():
        return True
    data = np.frombuffer(buffer, dtype=np.uint8)
    offset = width_bytes(bits.size)
    for width in np.unique(bits):
        rows = int(np.count_nonzero(bits == width))
        planes = data[offset : offset + 8 * int(width) * rows].reshape(int(width), rows, 8)
        offset += planes.size
        for begin in range(0, rows, _CHUNK) if width > bound.bit_length() else ():
            values = _from_planes(planes[:, begin : begin + _CHUNK], int(width)).astype(np.int64)
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
    return np.where(codes == 31, 32, codes).astype(np.int64)


def _pack_widths(widths: npt.NDArray[np.uint8]) -> bytes:
    return np.packbits(np.unpackbits(widths[:, None], axis=1, count=5, bitorder="little"), bitorder="little").tobytes()


def _unpack_widths(data: npt.NDArray[np.uint8], block_count: int) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(data, count=5 * block_count, bitorder="little").reshape(-1, 5)
    widths: npt.NDArray[np.uint8] = np.packbits(bits, axis=1, bitorder="little").reshape(-1)
    return widths


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
