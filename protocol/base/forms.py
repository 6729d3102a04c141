"""Forms of tensors on the wire, and how many bytes a tensor of a shape may take in each.

Plain forms take the same bytes for every element. The others are smaller, and where their size depends on the values
it is announced and bounded here, before anything is read; `protocol/README.md` says what each holds, byte by byte.

| form | what it is for | bits an element |
| --- | --- | --- |
| `q8` | activations and their gradients: 8-bit codes, a scale for 64 of them | 8.125, and 64 for each outlier |
| `d4` | what a stage adds to activations and to gradients: 4-bit codes, rotated | 4.125, and 64 for each outlier |
| `gi` | weight gradients as integers on a shared grid, packed by width | 0.08 to 32.08, late in training 4 to 5 |
| `p12` | parameters as integers in fixed point, whole or as what changed | as `gi`; changes 2 to 3.3 |
"""

from __future__ import annotations

import math
import struct
from typing import Final, Literal

FormName = Literal["fp64", "fp32", "bf16", "int32", "int61", "q8", "d4", "gi", "p12"]

FORM_ITEM_BYTES: Final = {"fp64": 8, "fp32": 4, "bf16": 2, "int32": 4, "int61": 8}
"""Bytes of one element in each plain form."""
TYPICAL_BITS: Final = {
    "fp64": 64.0, "fp32": 32.0, "bf16": 16.0, "int32": 32.0, "int61": 64.0,
    "q8": 8.13, "d4": 4.13, "gi": 5.0, "p12": 3.3,
}  # fmt: skip
"""Bits of a value in each form, as measured where they depend on the values: for plans and estimates."""
SMALL_FORMS: Final = ("q8", "d4", "gi", "p12")
BLOCK_FORMS: Final = ("q8", "d4")
"""Those with a scale for each block, and values that are sent apart."""
FORMS: Final = (*FORM_ITEM_BYTES, *SMALL_FORMS)

BLOCK: Final = 64
"""Values that share a scale or a width: 8 bits a block are 1/8 bit a value."""
HEAD_BYTES: Final = 8
"""Before the scales of `q8` and `d4`: the exponent that all scales lie under, whether values were finite, and the
number of outliers."""
TOP_LOWEST, TOP_HIGHEST = 64, 240
"""Bounds of that exponent (biased as in fp32): 31 below the lowest, every number is still a normal one, and the largest
code times the highest is finite."""
OUTLIERS_PER_BLOCK_MAX: Final = 2
"""Values that may be sent apart. Models have outliers in a handful of channels; more in one block would leave nothing
that is small beside them."""
OUTLIER_BYTES: Final = 8
"""A place (4 bytes) and a value in fp32."""
GRID_BLOCK: Final = 256
"""Weight gradients that share a step of the grid: one byte of exponent for 256 is 1/32 bit a value on the way down."""
NOT_FINITE: Final = -(2**31)
"""A part of weight gradients in `gi` that begins with this, which no sum of tasks reaches, was not finite."""
GRID_SUM_MOST: Final = 2**31 - 1
"""The largest sum of a step's weight gradients on the grid: each task adds at most its share of it, so that the sum of
all contributions fits into 32 bits with their sign, whoever made them."""
BASE_BYTES: Final = 8
"""Before the integers of `p12`: the version that they are the difference to, or all ones for the values themselves."""
DIFFERENCES_MAX: Final = 3
"""Steps that parameters in `p12` may be behind and still be sent as what changed, one tensor a step. A change takes 2
to 3.3 bits a parameter and the whole about 10, so the third still pays and the fourth does not; and a server keeps
these for every parameter of its shard: 10 bits."""


def blocks_of_row(width: int) -> int:
    """Blocks of `BLOCK` that a row of `width` values is cut into; the last one may be shorter."""
    return -(-width // BLOCK)


def byte_bounds(shape: tuple[int, ...], form: str) -> tuple[int, int]:
    """The fewest and the most bytes that a tensor of `shape` takes in `form`, which is one of `FORMS`.

    A tensor without dimensions counts as one row of one value.
    """
    count = math.prod(shape)
    if form in FORM_ITEM_BYTES:
        exact = count * FORM_ITEM_BYTES[form]
        return exact, exact
    if count == 0:
        return 0, 0
    if form in BLOCK_FORMS:
        width = shape[-1] if shape else 1
        blocks = count // width * blocks_of_row(width)
        # A rotated block has all of its codes, though its row ends in it.
        least = HEAD_BYTES + blocks + (count if form == "q8" else blocks * BLOCK // 2)
        return least, least + blocks * OUTLIERS_PER_BLOCK_MAX * OUTLIER_BYTES
    blocks = -(-count // BLOCK)
    least = width_bytes(blocks) + (BASE_BYTES if form == "p12" else 0)
    return least, least + blocks * BLOCK * 4


def small_is_whole(buffer: bytes | bytearray | memoryview, form: str, shape: tuple[int, ...]) -> bool:
    """Whether one of `BLOCK_FORMS` of a length that `byte_bounds` allows can be decoded, without decoding it.

    A tensor that its sender marked as not finite can be: it stands for NaN, which an honest run that diverges has.
    """
    data = memoryview(buffer)
    if not data.nbytes:
        return True
    outliers = int.from_bytes(data[4:HEAD_BYTES], "little")
    if not TOP_LOWEST <= data[0] <= TOP_HIGHEST or data[1] > 1 or data[2] or data[3]:
        return False
    if outliers * OUTLIER_BYTES != data.nbytes - byte_bounds(shape, form)[0]:
        return False
    apart = struct.unpack(f"<{outliers}I{outliers}f", data[data.nbytes - OUTLIER_BYTES * outliers :])
    return max(apart[:outliers], default=-1) < math.prod(shape) and all(map(math.isfinite, apart[outliers:]))


def width_bytes(blocks: int) -> int:
    """Bytes that the widths of packed blocks take, 5 bits each."""
    return -(-5 * blocks // 8)
