"""What `q8` and `d4` are made of: blocks of 64 values, a scale byte for each, and values that are sent apart.

A scale is (8 + m) / 8 times a power of two, with m in 0…7: the byte holds m and how far the power lies under the
largest of the tensor (at most 31). Everything is integers on the bits of fp32 numbers, or single operations that IEEE
754 rounds in one way, so encoders agree to the last bit on all devices and in all orders of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.compute.forms import heads
from node.compute.forms.heads import Bytes
from protocol.base.forms import BLOCK, TOP_HIGHEST, TOP_LOWEST, blocks_of_row

Upload = Callable[[Tensor], Tensor]
"""Brings a tensor to a device."""
CHUNK_BLOCKS = 2048
"""Blocks worked on at a time on a CPU: half a MiB of fp32 stays in a core's second-level cache."""
DEVICE_CHUNK_BLOCKS = 1 << 20
"""The same on a device, where a launch costs more than a pass over memory."""
_MANTISSAS = torch.tensor([(8 + m) / 8 for m in range(8)])
RECIPROCALS = torch.tensor([8 / (8 + m) for m in range(8)])
"""Rounded once to fp32."""


@dataclass
class Apart:
    """Values that would spoil their block: their places in the flat tensor, and what they are."""

    places: Tensor
    """[n] int64"""
    values: Tensor
    """[n] fp32"""


def here(tensor: Tensor) -> Tensor:
    """The processor's `Upload`."""
    return tensor


def chunk_blocks(device: torch.device) -> int:
    return CHUNK_BLOCKS if device.type == "cpu" else DEVICE_CHUNK_BLOCKS


def as_blocks(tensor: Tensor) -> Tensor:
    """[blocks, 64] fp32 of the tensor's rows; the last block of a row is filled up with zeros."""
    width = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.detach().to(torch.float32).reshape(-1, width)
    missing = blocks_of_row(width) * BLOCK - width
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.reshape(-1, BLOCK)


def from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of `shape` whose rows were cut into `blocks` [n, 64]; without the filling."""
    width = shape[-1] if shape else 1
    return blocks.reshape(-1, blocks_of_row(width) * BLOCK)[:, :width].reshape(shape)


def largest(blocks: Tensor) -> Tensor:
    """[n] the largest magnitude in each block."""
    return torch.maximum(blocks.amax(1), blocks.amin(1).neg_())


def scale_codes(limits: Tensor) -> Tensor:
    """[n] int32: the smallest scale that is at least `limits` (fp32, not negative), as exponent · 8 + m."""
    return (limits.clamp(max=2.0**112).view(torch.int32) + 0xFFFFF) >> 20


def top_exponent(codes: Tensor) -> int:
    """The exponent that the scales of a tensor lie under."""
    highest = int(codes.max()) >> 3 if codes.numel() else TOP_LOWEST
    return min(max(highest, TOP_LOWEST), TOP_HIGHEST)


def scale_bytes(codes: Tensor, top: int) -> Tensor:
    """[n] uint8; what lies more than 31 powers of two under the top gets the smallest scale there is."""
    under = (top - (codes >> 3)).clamp_(min=0)
    return torch.where(under > 31, 31 << 3, (under << 3) | (codes & 7)).to(torch.uint8)


def power(exponents: Tensor) -> Tensor:
    """fp32 powers of two from biased exponents (1…254), int32."""
    return (exponents << 23).view(torch.float32)


def scales(scale_byte: Tensor, top: int, shift: int) -> Tensor:
    """[n] fp32: the scales times 2^-shift."""
    codes = scale_byte.to(torch.int32)
    return _MANTISSAS.to(codes.device)[codes & 7] * power(top - shift - (codes >> 3))


def reciprocals(scale_byte: Tensor, top: int, shift: int) -> Tensor:
    """[n] fp32: one over `scales`, rounded once."""
    codes = scale_byte.to(torch.int32)
    return RECIPROCALS.to(codes.device)[codes & 7] * power(254 - top + shift + (codes >> 3))


def few_large(large: Tensor) -> Tensor:
    """[n] bool: blocks in which one or two values are large; `large` is bool [n, 64]."""
    words = large.view(torch.uint8).view(torch.int64).sum(1)  # eight counts of at most eight, side by side
    counts = (words * 0x0101010101010101) >> 56
    return (counts > 0) & (counts <= 2)


def flat_places(blocks: Tensor, columns: Tensor, width: int) -> Tensor:
    """Places in the flat tensor of `columns` in `blocks`, for rows of `width` values."""
    per_row = blocks_of_row(width)
    return blocks // per_row * width + blocks % per_row * BLOCK + columns


def joined(head: bytes, pieces: Sequence[Tensor], end: bytes) -> bytearray:
    """The bytes of `pieces`, of one byte a value, between two others. From a device each comes straight into its place:
    a microbatch of 4 MB was copied three times more."""
    out = bytearray(len(head) + sum(piece.numel() for piece in pieces) + len(end))
    out[: len(head)], out[len(out) - len(end) :] = head, end
    whole, begin = torch.frombuffer(out, dtype=torch.uint8), len(head)
    for piece in pieces:
        whole[begin : begin + piece.numel()].view(piece.dtype).view(piece.shape).copy_(piece)
        begin += piece.numel()
    return out


def part_of(data: Bytes, begin: int, end: int) -> Tensor:
    """[end - begin] uint8, only to be read; in the data's own memory where torch can hold that."""
    part = data[begin:end]
    return torch.from_numpy(part if part.flags.writeable else part.copy())


def write_head(top: int, finite: bool, apart: Apart) -> bytes:
    return bytes((top, 0 if finite else 1, 0, 0)) + int(apart.places.numel()).to_bytes(4, "little")


def write_apart(apart: Apart) -> bytes:
    places = apart.places.cpu().numpy().astype("<u4").tobytes()
    return places + apart.values.cpu().numpy().astype("<f4").tobytes()


def read_head(data: Bytes, form: str, fixed_bytes: int, count: int) -> tuple[int, bool, Apart]:
    """As `heads.read_head`, with tensors."""
    top, finite, places, values = heads.read_head(data, form, fixed_bytes, count)
    return top, finite, Apart(torch.from_numpy(places), torch.from_numpy(values))
