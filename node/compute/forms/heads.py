"""What can be read off a `q8` or `d4` without decoding it or loading torch: daemons look at what they pass on."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import (
    BLOCK,
    HEAD_BYTES,
    OUTLIER_BYTES,
    TOP_HIGHEST,
    TOP_LOWEST,
    blocks_of_row,
    byte_bounds,
)

Bytes = npt.NDArray[np.uint8]
SHIFT = 7
"""A value of `q8` is code * scale * 2^-SHIFT."""
D4_SHIFT = 6
"""One of `d4` is a sum of the block's codes with signs, times scale * 2^-D4_SHIFT."""
_BIAS = 127
"""Of the exponents of fp32 numbers (IEEE 754), which the top of a head is."""


def read_head(
    data: Bytes, form: str, fixed_bytes: int, count: int
) -> tuple[int, bool, npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The top exponent, whether the values were finite, and places [n] and values [n] of what was sent apart;
    `fixed_bytes` is all before that.

    Refuses what `forms.small_is_whole` does. Raises `RemoteProtocolError`.
    """
    outliers = int.from_bytes(data[4:HEAD_BYTES].tobytes(), "little")
    if data.size != fixed_bytes + outliers * OUTLIER_BYTES:
        raise RemoteProtocolError("shape", f"{data.size} bytes of {form} with {outliers} outliers")
    top = int(data[0])
    if not TOP_LOWEST <= top <= TOP_HIGHEST or data[2] or data[3] or data[1] > 1:
        raise RemoteProtocolError("decode", f"{form} begins with {data[:4].tobytes().hex()}")
    tail = data[fixed_bytes:].tobytes()
    places = np.frombuffer(tail, "<u4", outliers).astype(np.int64)
    values = np.frombuffer(tail, "<f4", outliers, offset=4 * outliers).astype(np.float32)
    if outliers and int(places.max()) >= count:
        raise RemoteProtocolError("decode", f"{form}: an outlier at {int(places.max())} of {count}")
    if not np.isfinite(values).all():
        raise RemoteProtocolError("not_finite", f"{form}: an outlier that is not finite")
    return top, not data[1], places, values


def square_norm_most(buffer: bytes | bytearray | memoryview, form: str, shape: tuple[int, ...]) -> float:
    """What the sum of squares of a `q8` or `d4` that is whole cannot exceed, without decoding it: of Gaussian values it
    is about six times that. Infinite for one that is marked as not finite."""
    count = math.prod(shape)
    if count == 0:
        return 0.0
    data = np.frombuffer(buffer, dtype=np.uint8)
    width = shape[-1] if shape else 1
    begin = HEAD_BYTES + count // width * blocks_of_row(width)
    top, finite, _, values = read_head(data, form, byte_bounds(shape, form)[0], count)
    if not finite:
        return math.inf
    codes = data[HEAD_BYTES:begin].astype(np.int64)
    # A rotation of 64 makes squares 64 times as large.
    shift, most = (SHIFT, 127**2) if form == "q8" else (D4_SHIFT, BLOCK * 8**2)
    factors = np.ldexp((8 + (codes & 7)) / 8, top - shift - (codes >> 3) - _BIAS)
    return float(np.square(factors).sum() * BLOCK * most + np.square(values.astype(np.float64)).sum())
