"""`d4`: what a stage added to its input (or took from its output's gradient), in 4.125 bits a value.

64 values are brought to 14-bit integers by a power of two, turned by a Hadamard matrix, which spreads each of them over
all 64, and rounded to 16 levels. Sums inside stay below 2^20, so fp32 is exact in every order of summation and every
kernel gives the same bits; a Hadamard transform in floats does not (2e-6 between butterflies and a matrix product).

Bytes: head (8) | a scale byte for each block | 32 bytes for each block: the code of value 2i low, of 2i + 1 high, two's
complement | places (uint32), then values (fp32) of outliers. Values are Hadamard · codes · scale / 64.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from node.compute.forms import scales
from node.compute.forms.scales import Apart
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, HEAD_BYTES, blocks_of_row

_BITS = 13
"""Magnitudes of the integers are at most 2^13."""
_FIT = 2 / 15 * (1 + 2**-22)
"""The largest rotated value comes to 7.5 steps at most: code 7, half a step off."""
_LARGE = 8
"""Values within this factor of the largest count as large."""
_TINY = 40
"""Exponents of blocks below this count as this one: 2^-87, far under anything that a scale can reach."""


def _hadamard() -> Tensor:
    """Sylvester's matrix of 64: symmetric, and 64 times its own inverse."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


_HADAMARD = _hadamard()


def encode(tensor: Tensor) -> bytearray:
    """Any tensor; one with a value that is not finite is marked, and comes out as NaN throughout."""
    count = math.prod(tensor.shape)
    if count == 0:
        return bytearray()
    width = tensor.shape[-1] if tensor.dim() else 1
    blocks = scales.as_blocks(tensor)
    peaks = scales.largest(blocks)
    finite = bool(torch.isfinite(peaks.max()))
    if not finite:
        blocks, peaks = torch.zeros_like(blocks), torch.zeros_like(peaks)
    # The rotated values' size is known only after rotation; 64 times the largest value bounds it, hence the top.
    top = scales.top_exponent(scales.scale_codes(peaks * (BLOCK * _FIT)))
    scale = torch.empty(blocks.shape[0], dtype=torch.uint8, device=blocks.device)
    packed = torch.empty(blocks.shape[0], BLOCK // 2, dtype=torch.uint8, device=blocks.device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    step = scales.chunk_blocks(blocks.device)
    for begin in range(0, blocks.shape[0], step):
        part = slice(begin, begin + step)
        chunk, peak = blocks[part], peaks[part]
        large = chunk.abs() > (peak / _LARGE)[:, None]
        few = scales.few_large(large)
        if bool(few.any()):
            large &= few[:, None]
            rest = torch.where(large, 0.0, chunk)
            worth = scales.largest(rest) > 0
            large &= worth[:, None]
            chunk = torch.where(large, 0.0, chunk)
            peak = scales.largest(chunk)
            where, columns = torch.nonzero(large, as_tuple=True)
            found.append((where + begin, columns, blocks[where + begin, columns]))
        scale[part], packed[part] = _rotate_and_round(chunk, peak, top)
    apart = Apart(torch.empty(0, dtype=torch.int64), torch.empty(0))
    if found:
        where, columns, values = (torch.cat(each) for each in zip(*found, strict=True))
        apart = Apart(scales.flat_places(where, columns, width), values)
    out = bytearray(scales.write_head(top, finite, apart))
    out += scale.cpu().numpy().tobytes()
    out += packed.cpu().numpy().tobytes()
    out += scales.write_apart(apart)
    return out


def _rotate_and_round(blocks: Tensor, peaks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(scale bytes [n], codes [n, 32] uint8) of blocks [n, 64]."""
    exponents = (peaks.view(torch.int32) >> 23).clamp(_TINY, 253)
    # peak < 2^(exponent - 126), so the integers are at most 2^13.
    integers = (blocks * scales.power(126 + _BITS + 127 - exponents)[:, None]).round_()
    rotated = integers @ _HADAMARD.to(blocks.device)
    unit = scales.power(exponents - 126 - _BITS + 127)  # what one of the integers is worth
    scale = scales.scale_bytes(scales.scale_codes(scales.largest(rotated) * _FIT * unit), top)
    codes = rotated * (scales.reciprocals(scale, top, 0) * unit)[:, None]
    codes = codes.round_().clamp_(-8, 7).to(torch.int8).view(torch.uint8)
    return scale, (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)


def decode(buffer: bytes | bytearray | memoryview, shape: tuple[int, ...]) -> Tensor:
    """The fp32 tensor in `buffer`. Raises `RemoteProtocolError` for bytes that no encoder makes."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape)
    width = shape[-1] if shape else 1
    block_count = count // width * blocks_of_row(width)
    begin = HEAD_BYTES + block_count
    end = begin + block_count * BLOCK // 2
    if data.size < end:
        raise RemoteProtocolError("shape", f"{data.size} bytes for d4 of shape {shape}")
    top, finite, apart = scales.read_head(data, "d4", end, count)
    if not finite:
        return torch.full(shape, torch.nan)
    # 1/64 undoes the product of the matrix with itself.
    factors = scales.scales(torch.from_numpy(data[HEAD_BYTES:begin].copy()), top, 6)
    packed = torch.from_numpy(data[begin:end].copy()).view(-1, BLOCK // 2)
    values = torch.empty(block_count, BLOCK)
    for first in range(0, block_count, scales.CHUNK_BLOCKS):
        part = slice(first, first + scales.CHUNK_BLOCKS)
        codes = torch.empty(packed[part].shape[0], BLOCK, dtype=torch.int8)
        codes[:, 0::2] = (packed[part] << 4).view(torch.int8) >> 4
        codes[:, 1::2] = packed[part].view(torch.int8) >> 4
        # codes are at most 8, so their sums are below 2^10 and exact
        values[part] = (codes.float() @ _HADAMARD).mul_(factors[part, None])
    flat = scales.from_blocks(values, shape).reshape(-1)
    flat[apart.places] = apart.values
    return flat.view(shape)
