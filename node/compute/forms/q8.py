"""`q8`: activations and their gradients in 8.125 bits a value. Blocks of 64, nearest even, outliers apart.

A value 16 times as large as all but one of its block would leave the others four bits: one or two such values travel
apart, in fp32 with their place, and the block is scaled by the rest.

Bytes: head (8) | a scale byte for each block | a code (int8) for each value | places (uint32), then values (fp32) of
outliers. A value is code · scale / 128; a finite code never is −128.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from node.compute.forms import scales
from node.compute.forms.heads import SHIFT
from node.compute.forms.scales import Apart, Upload
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, HEAD_BYTES, blocks_of_row

_FIT = 128 / 127 * (1 + 2**-22)
"""Times the largest magnitude, rounded: a scale of at least this brings the largest code to 127, not 128."""
_LARGE = 7
"""Codes above this are within a factor of 16 of the largest."""


def encode(tensor: Tensor) -> bytearray:
    """Any tensor; one with a value that is not finite is marked, and comes out as NaN throughout."""
    blocks = scales.as_blocks(tensor)
    width = tensor.shape[-1] if tensor.dim() else 1
    count = math.prod(tensor.shape)
    if count == 0:
        return bytearray()
    peaks = scales.largest(blocks)
    finite = bool(torch.isfinite(peaks.max()))  # a maximum hands on NaN
    if not finite:
        blocks, peaks = torch.zeros_like(blocks), torch.zeros_like(peaks)
    codes = scales.scale_codes(peaks * _FIT)
    top = scales.top_exponent(codes)
    scale = scales.scale_bytes(codes, top)
    quantized = torch.empty(blocks.shape, dtype=torch.int8, device=blocks.device)
    found_blocks, found_columns = [], []
    step = scales.chunk_blocks(blocks.device)
    for begin in range(0, blocks.shape[0], step):
        part = slice(begin, begin + step)
        quantized[part] = _quantize(blocks[part], scale[part], top)
        large = quantized[part].abs() > _LARGE
        few = scales.few_large(large)
        if bool(few.any()):
            where, columns = torch.nonzero(large & few[:, None], as_tuple=True)
            found_blocks.append(where + begin)
            found_columns.append(columns)
    apart = Apart(torch.empty(0, dtype=torch.int64), torch.empty(0))
    if found_blocks:
        apart = _send_apart(blocks, scale, quantized, top, torch.cat(found_blocks), torch.cat(found_columns), width)
    rows = scales.from_blocks(quantized, (count // width, width))
    return scales.joined(scales.write_head(top, finite, apart), [scale, rows], scales.write_apart(apart))


def _quantize(blocks: Tensor, scale: Tensor, top: int) -> Tensor:
    codes = blocks * scales.reciprocals(scale, top, SHIFT)[:, None]
    return codes.round_().clamp_(-127, 127).to(torch.int8)


def _send_apart(
    blocks: Tensor, scale: Tensor, quantized: Tensor, top: int, where: Tensor, columns: Tensor, width: int
) -> Apart:
    """Takes the named values out of their blocks and codes the rest anew; blocks with nothing left stay as they are."""
    touched, inverse = torch.unique_consecutive(where, return_inverse=True)
    rest = blocks[touched]
    rest[inverse, columns] = 0.0
    peaks = scales.largest(rest)
    worth = peaks > 0
    finer = scales.scale_bytes(scales.scale_codes(peaks * _FIT), top)
    scale[touched[worth]] = finer[worth]
    quantized[touched[worth]] = _quantize(rest[worth], finer[worth], top)
    kept = worth[inverse]
    where, columns = where[kept], columns[kept]
    return Apart(scales.flat_places(where, columns, width), blocks[where, columns])


def decode(buffer: bytes | bytearray | memoryview, shape: tuple[int, ...], upload: Upload = scales.here) -> Tensor:
    """The fp32 tensor in `buffer`, made on the device that `upload` brings its parts to. Raises `RemoteProtocolError`
    for bytes that no encoder makes."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    count = math.prod(shape)
    if count == 0:
        return upload(torch.empty(shape))
    width = shape[-1] if shape else 1
    block_count = count // width * blocks_of_row(width)
    begin = HEAD_BYTES + block_count
    if data.size < begin + count:
        raise RemoteProtocolError("shape", f"{data.size} bytes for q8 of shape {shape}")
    top, finite, apart = scales.read_head(data, "q8", begin + count, count)
    if not finite:
        return upload(torch.full(shape, torch.nan))
    factors = scales.scales(upload(scales.part_of(data, HEAD_BYTES, begin)), top, SHIFT)
    codes = upload(scales.part_of(data, begin, begin + count)).view(torch.int8)
    if width % BLOCK:
        codes = torch.nn.functional.pad(codes.view(-1, width), (0, -width % BLOCK))
    codes = codes.view(-1, BLOCK)
    values = torch.empty(codes.shape, device=codes.device)
    step = scales.chunk_blocks(codes.device)
    for first in range(0, codes.shape[0], step):
        part = slice(first, first + step)
        values[part].copy_(codes[part]).mul_(factors[part, None])
    flat = scales.from_blocks(values, shape).reshape(-1)
    if apart.places.numel():
        flat[upload(apart.places)] = upload(apart.values)
    return flat.view(shape)
