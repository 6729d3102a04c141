"""Integers packed by width: for every 64 of them 5 bits that say how wide they are, then their two's complement.

Blocks of one width lie together, bit by bit: for each width w from 1 upwards, for each bit from the lowest, 8 bytes of
every block of that width. So packing is a few passes over bytes for each bit, with nothing that depends on a block's
place. Width code 31 stands for 32 bits, whatever needs more than 30.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from node.compute.side_by_side import ALONE, SideBySide
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, width_bytes

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
"""Numbers of blocks."""
Planes = npt.NDArray[np.uint8]
"""[bits, blocks, 8 bytes]."""
_CHUNK = 1 << 15
"""Blocks whose widths are looked at together. A multiple of 8, so that widths of 5 bits begin at a whole byte. What
only looks at a vector takes no memory by its length: where it comes from outside, a byte may stand for 102 integers."""
_TURNED = 1 << 12
"""Blocks turned at a time: their integers are a megabyte, and stay in a core's second-level cache with words and
copies. (2^9 take twice as long a value, for the calls; 2^14 as long.)"""
_SQUARES = tuple(
    (np.uint64(side), np.uint64(mask))
    for side, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F))
)
"""Side, and the bits of a byte that leave for the square in the other word."""
_BITS_OF = np.array([*range(31), 32])
"""[32] bits that values of each width code take."""


def pack(values: Ints, threads: SideBySide = ALONE) -> bytearray:
    """Bytes of a vector of int32. The same vector always gives the same bytes."""
    blocks = _as_blocks(values)
    widths = _widths(blocks, threads)
    head = _pack_widths(widths)
    out = bytearray(len(head) + 8 * int(_bits(widths).sum()))
    out[: len(head)] = head
    pieces = _pieces(np.frombuffer(out, dtype=np.uint8), widths)
    threads.all(lambda piece: _to_planes(blocks, *piece), pieces)
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
    return int(_from_planes(planes[:, :1])[0, 0])


def begins_with(buffer: bytes | bytearray | memoryview, count: int, integer: int) -> bool:
    """Whether the first integer of a packed vector that `is_whole` is this one; for one that needs more bits than the
    first block has, a look at a byte says no."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    needed = int(_widths(np.full((1, BLOCK), integer, dtype=np.int32))[0])
    return count > 0 and int(_unpack_widths(data[:1], 1)[0]) >= needed and first(buffer, count) == integer


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
        if len(planes) <= bound.bit_length():  # so many bits, with the sign's, hold up to 2^(bits - 1)
            continue
        for begin in range(0, planes.shape[1], _TURNED):
            values = _from_planes(planes[:, begin : begin + _TURNED]).astype(np.int64)
            if bool((np.abs(values) > bound).any()):
                return False
    return True


def unpack(buffer: bytes | bytearray | memoryview, count: int, threads: SideBySide = ALONE) -> Ints:
    """The vector of `count` integers. Raises `RemoteProtocolError` for bytes that `pack` cannot have made."""
    _widths_of(buffer, -(-count // BLOCK))  # before memory is taken for what they may not stand for
    values = np.zeros(padded(count), dtype=np.int32)
    add(buffer, values, threads)
    return values[:count]


def padded(count: int) -> int:
    """Integers in as many whole blocks as `count` of them take."""
    return -(-count // BLOCK) * BLOCK


def add(buffer: bytes | bytearray | memoryview, total: Ints, threads: SideBySide = ALONE) -> None:
    """Adds a packed vector to `total`, which has whole blocks, in place and with no second vector beside it. Raises
    `RemoteProtocolError` for bytes that `pack` cannot have made, and adds nothing of them."""
    blocks = total.reshape(-1, BLOCK)
    pieces = _pieces(np.frombuffer(buffer, dtype=np.uint8), _widths_of(buffer, len(blocks)))

    def put(piece: tuple[Rows, Planes]) -> None:
        blocks[piece[0]] += _from_planes(piece[1])

    threads.all(put, pieces)


def _widths_of(buffer: bytes | bytearray | memoryview, block_count: int) -> npt.NDArray[np.uint8]:
    """[blocks] codes that the bytes begin with. Raises `RemoteProtocolError` where they stand for other bytes."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    offset = width_bytes(block_count)
    if data.size < offset:
        raise RemoteProtocolError("shape", f"{data.size} bytes for {block_count} blocks of packed integers")
    widths = _unpack_widths(data[:offset], block_count)
    expected = offset + 8 * int(_bits(widths).sum())
    if data.size != expected:
        raise RemoteProtocolError("shape", f"{data.size} bytes of packed integers whose widths say {expected}")
    return widths


def _as_blocks(values: Ints) -> Ints:
    missing = -values.size % BLOCK
    whole = np.concatenate((values, np.zeros(missing, dtype=np.int32))) if missing else np.ascontiguousarray(values)
    return whole.reshape(-1, BLOCK)


def _pieces(data: npt.NDArray[np.uint8], widths: npt.NDArray[np.uint8]) -> list[tuple[Rows, Planes]]:
    """Blocks that are turned together, some of one width at a time, with the place of their bits in `data`."""
    found: list[tuple[Rows, Planes]] = []
    for code, planes in _by_width(data, len(widths), np.bincount(widths, minlength=32)):
        rows = np.flatnonzero(widths == code)
        found += [
            (rows[begin : begin + _TURNED], planes[:, begin : begin + _TURNED])
            for begin in range(0, rows.size, _TURNED)
        ]
    return found


def _widths(blocks: Ints, threads: SideBySide = ALONE) -> npt.NDArray[np.uint8]:
    """[blocks] codes: 0 where all values are zero, else bits with the sign's, 31 for more than 30."""
    found = np.empty(len(blocks), dtype=np.uint32)

    def look(begin: int) -> None:
        piece = blocks[begin : begin + _TURNED]
        zigzag = (piece << 1) ^ (piece >> 31)  # 0, -1, 1, -2, … are 0, 1, 2, 3, …
        found[begin : begin + _TURNED] = np.bitwise_or.reduce(zigzag.view(np.uint32), axis=1)

    threads.all(look, range(0, len(blocks), _TURNED))
    bits = np.frexp(found.astype(np.float64))[1]  # exact: frexp gives the bit length of a whole number
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


def _to_planes(blocks: Ints, rows: Rows, planes: Planes) -> None:
    """Writes the bits of these blocks to `planes` [bits, rows, 8]."""
    bits, words = len(planes), np.empty((8, rows.size), dtype=np.uint64)
    # [rows, 8 bytes of a word, 8 bits of a byte, 4 lanes]
    cells = blocks[rows].view(np.uint8).reshape(-1, 8, 8, 4)
    found = words.view(np.uint8).reshape(8, -1, 8)
    for low in range(0, bits, 8):
        found[...] = cells[..., low // 8].transpose(2, 0, 1)
        _turn(words)
        planes[low : low + 8] = found[: bits - low]


def _from_planes(planes: Planes) -> Ints:
    """[blocks, 64] integers out of their bits [bits, blocks, 8]; the highest bit is the sign."""
    bits, rows = planes.shape[:2]
    values = np.empty((rows, BLOCK), dtype=np.int32)
    cells, lanes = values.reshape(rows, 8, 8), values.view(np.uint8).reshape(rows, 8, 8, 4)
    words = np.empty((8, rows), dtype=np.uint64)
    found = words.view(np.uint8).reshape(8, rows, 8)
    highest = (bits - 1) // 8
    for lane in range(highest, -1, -1):
        have = min(8, bits - 8 * lane)
        found[:have] = planes[8 * lane : 8 * lane + have]
        found[have:] = found[have - 1]  # the sign
        _turn(words)
        if lane < highest:
            lanes[..., lane] = found.transpose(1, 2, 0)
        else:
            cells[...] = found.view(np.int8).transpose(1, 2, 0)
            if lane:
                values <<= np.int32(8 * lane)
    return values


def _turn(words: npt.NDArray[np.uint64]) -> None:
    """Turns [8, n] words about the diagonal, each of whose bytes is a square of 8 times 8 bits with the same byte of
    the other seven: what was bit `b` of a byte in word `a` is bit `a` of it in word `b`. Twice changes nothing.

    Squares of half, a quarter and an eighth of the side change places (Warren, Hacker's Delight, 7-3), here between
    words and not within one, so that nothing need be brought together first.
    """
    for side, mask in _SQUARES:
        pairs = words.reshape(4 // int(side), 2, int(side), -1)
        upper, lower = pairs[:, 0], pairs[:, 1]
        differs = upper >> side
        differs ^= lower
        differs &= mask
        lower ^= differs
        differs <<= side
        upper ^= differs
