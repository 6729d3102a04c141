"""`d4`: what a stage has added to an activation, or to the gradient of one, in 4.125 bits a value.

A block of 64 is rotated before it is rounded to 15 levels: the Hadamard matrix spreads each value over the whole block,
so no level is lost to what only few values need. Rotated are whole numbers, so that every sum is exact, in whatever
order a device adds: the block's values in units of its largest over 2^15, which come to at most 2^21. One or two values
that are eight times as large as all others of their block travel apart, as in `q8`.

Bytes: head (8) | a scale byte for each block | 32 bytes of codes for each block, the first of two in the lower bits |
places (uint32), then values (fp32) of outliers. A value is the sum of its block's codes (-8 to 7, finite ones at least
-7) with the signs of its row of the matrix, times scale / 64: 9 bits times 4, exact in fp32.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from node.compute.forms import scales
from node.compute.forms.heads import D4_SHIFT
from node.compute.forms.scales import Apart, Upload
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, HEAD_BYTES, blocks_of_row, byte_bounds

_UNIT_BITS = 15
"""A block's largest value is less than so many bits of its units."""
_LOWEST = 33
"""The exponent of the smallest scale there is: values below it become zeros."""
_LARGE = 8.0
"""One or two values that are so many times all others of their block travel apart: beside one of 20 standard deviations
the others have twice the error that they have alone."""
_LEVELS = 7
_FIT = 1 / 7.5
"""Times the largest of a rotated block is the least scale: the last level takes what lies up to half a step beyond it.
10.5 % of normal values are lost; 1/7 loses 11.3 %, and 1/8 10.3 % and twice as much of a block that is constant."""


def hadamard() -> Tensor:
    """[64, 64] of ones and minus ones: its own inverse, but for a factor of 64."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


_HADAMARD = hadamard()


def rotate(whole: Tensor) -> Tensor:
    """[n, 64] fp32 of whole numbers up to 2^17, times the matrix: exact. Devices may multiply in fewer bits than fp32
    has, so only a processor does it as one product."""
    return whole @ _HADAMARD if whole.device.type == "cpu" else by_pairs(whole)


def by_pairs(whole: Tensor) -> Tensor:
    """The same with sums alone."""
    length = 1
    while length < BLOCK:
        pairs = whole.view(-1, BLOCK // (2 * length), 2, length)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        whole = torch.stack((first + second, first - second), 2).view(-1, BLOCK)
        length *= 2
    return whole


def encode(tensor: Tensor) -> bytearray:
    """Any tensor; one with a value that is not finite is marked, and comes out as NaN throughout."""
    count = math.prod(tensor.shape)
    if count == 0:
        return bytearray()
    blocks = scales.as_blocks(tensor)
    width = tensor.shape[-1] if tensor.dim() else 1
    peaks = scales.largest(blocks)
    finite = bool(torch.isfinite(peaks.max()))  # a maximum hands on NaN
    if not finite:
        blocks, peaks = torch.zeros_like(blocks), torch.zeros_like(peaks)
    rotated = torch.empty_like(blocks)
    exponents = torch.empty(peaks.shape, dtype=torch.int32, device=blocks.device)
    found_blocks, found_columns, found_values = [], [], []
    step = scales.chunk_blocks(blocks.device)
    for begin in range(0, blocks.shape[0], step):
        part = slice(begin, begin + step)
        here = blocks[part]
        large = here.abs().mul_(_LARGE) > peaks[part, None]
        few = scales.few_large(large)
        if bool(few.any()):
            where, columns = torch.nonzero(large & few[:, None], as_tuple=True)
            found_blocks.append(where + begin)
            found_columns.append(columns)
            found_values.append(here[where, columns])
            here = here.index_put((where, columns), torch.zeros_like(found_values[-1]))
            peaks[part] = scales.largest(here)
        exponents[part] = (peaks[part].view(torch.int32) >> 23).clamp_(min=_LOWEST)
        units = scales.power(2 * 127 + _UNIT_BITS - 1 - exponents[part])
        torch.mul(here, units[:, None], out=rotated[part])
        rotated[part] = rotate(rotated[part].round_())
    apart = Apart(torch.empty(0, dtype=torch.int64), torch.empty(0))
    if found_blocks:
        places = scales.flat_places(torch.cat(found_blocks), torch.cat(found_columns), width)
        apart = Apart(places, torch.cat(found_values))
    # In units of the block 2^-14 times its largest power of two; a scale may reach 2^112.
    limits = scales.largest(rotated) * _FIT
    codes = scales.scale_codes(limits * scales.power(exponents - (_UNIT_BITS - 1)))
    top = scales.top_exponent(codes)
    scale = scales.scale_bytes(codes, top)
    pieces = [scale]
    for begin in range(0, blocks.shape[0], step):
        part = slice(begin, begin + step)
        pieces.append(_round(rotated[part], exponents[part], scale[part], top))
    return scales.joined(scales.write_head(top, finite, apart), pieces, scales.write_apart(apart))


def _round(rotated: Tensor, exponents: Tensor, scale: Tensor, top: int) -> Tensor:
    """[n, 32] uint8: two codes in each byte. Overwrites `rotated`."""
    steps = scale.to(torch.int32)
    # How many powers of two a block's unit lies over its scale's.
    over = exponents - (_UNIT_BITS - 1) - (top - (steps >> 3))
    factors = scales.RECIPROCALS.to(scale.device)[steps & 7] * scales.power(over.clamp_(-126, 127) + 127)
    codes = rotated.mul_(factors[:, None]).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8).view(torch.uint8)
    return (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)


def decode(buffer: bytes | bytearray | memoryview, shape: tuple[int, ...], upload: Upload = scales.here) -> Tensor:
    """The fp32 tensor in `buffer`, made on the device that `upload` brings its parts to. Raises `RemoteProtocolError`
    for bytes that no encoder makes."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    count = math.prod(shape)
    if count == 0:
        return upload(torch.empty(shape))
    width = shape[-1] if shape else 1
    begin, end = HEAD_BYTES + count // width * blocks_of_row(width), byte_bounds(shape, "d4")[0]
    if data.size < end:
        raise RemoteProtocolError("shape", f"{data.size} bytes for d4 of shape {shape}")
    top, finite, apart = scales.read_head(data, "d4", end, count)
    if not finite:
        return upload(torch.full(shape, torch.nan))
    factors = scales.scales(upload(scales.part_of(data, HEAD_BYTES, begin)), top, D4_SHIFT)
    pairs = upload(scales.part_of(data, begin, end)).view(-1, BLOCK // 2)
    values = torch.empty(pairs.shape[0], BLOCK, device=pairs.device)
    step = scales.chunk_blocks(pairs.device)
    for first in range(0, pairs.shape[0], step):
        part = slice(first, first + step)
        # Each half of a byte to the top of one, and back with its sign.
        codes = torch.stack((pairs[part] << 4, pairs[part] & 0xF0), 2).view(torch.int8) >> 4
        values[part] = rotate(codes.view(-1, BLOCK).float()).mul_(factors[part, None])
    flat = scales.from_blocks(values, shape).reshape(-1)
    if apart.places.numel():
        flat[upload(apart.places)] = upload(apart.values)
    return flat.view(shape)
