"""`gi` on a CUDA device in one pass: what `grid` does with twenty tensors of a stage's size, each value in registers.

On a card a pass over memory is what costs: 400 bytes a parameter with one operation of torch after the other, 18 here.
Of a stage of 1 B parameters that was 93 ms on an H200, beside 37 ms for the task's own forward and backward; a gaming
card has a quarter of that memory's speed. Torch compiles the function by itself (`torch.cuda.jiterator`, with the NVRTC
that comes with it: no compiler is needed), but calls that a beta: so it is used where it gives `grid`'s own integers in
a trial, and else `grid` does all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protocol.base.forms import GRID_BLOCK

PAGE_BITS = 16
PAGE = 1 << PAGE_BITS
"""Parameters that share a key of the hash, so that places below it are enough to mix."""
_CHUNK_BLOCKS = 1 << 16
"""Grid blocks in one call: its result, before it goes into the sum, takes 64 MiB."""

# All are float, or torch would turn whole numbers into floats: `place`, the keys and the sum are bits of integers.
# `place` holds that of a block's first parameter in its page, and the exponent of its step in the lowest byte. A block
# may reach into the next page, which has keys of its own. Products and sums are rounded one by one (`__fmul_rn`), as
# torch's are, and not joined.
_SOURCE = """
template <typename T>
T add_to_grid(T total, T gradient, T place, T column, T key, T mix, T next_key, T next_mix, T limit)
{
    int first = __float_as_int(place);
    int exponent = (int)(signed char)(first & 255);
    int at = (first >> 8) + __float_as_int(column);
    bool beyond = at >= 65536;
    unsigned int mixed = (unsigned int)(at & 65535) * 0x9E3779B1u;
    mixed ^= (unsigned int)__float_as_int(beyond ? next_key : key);
    mixed ^= mixed >> 16;
    mixed *= 0x7FEB352Du;
    mixed += (unsigned int)__float_as_int(beyond ? next_mix : mix);
    mixed ^= mixed >> 15;
    mixed *= 0x846CA68Bu;
    mixed ^= mixed >> 16;
    float uniform = __fmul_rn((float)(mixed >> 8), 5.9604644775390625e-8f);
    float scaled = __fadd_rn(__fmul_rn(gradient, __int_as_float((127 - exponent) << 23)), uniform);
    scaled = fminf(fmaxf(floorf(scaled), -limit), limit);
    return __int_as_float(__float_as_int(total) + (int)scaled);
}
"""
Fused = Callable[..., Tensor]


def compiled() -> Fused:
    """The function for tensors on a CUDA device; nothing is compiled before its first call."""
    from torch.cuda.jiterator import _create_jit_fn

    return _create_jit_fn(_SOURCE, limit=0.0)


def add(fused: Fused, total: Tensor, gradient: Tensor, steps: Tensor, keys: Tensor, begin: int, limit: float) -> None:
    """As `grid.add_to_grid`, for whole blocks and a gradient that is finite.

    Args:
        keys: those of all pages that the vector lies in, and of one more.
    """
    device, count = total.device, total.numel()
    column = torch.arange(GRID_BLOCK, dtype=torch.int32, device=device).view(torch.float32)[None, :]
    places = torch.arange(begin, begin + count, GRID_BLOCK, device=device)
    pages, keys = (places >> PAGE_BITS) - (begin >> PAGE_BITS), keys.to(device)
    place = (((places & (PAGE - 1)) << 8) | (steps.to(device).long() & 0xFF)).to(torch.int32)
    parts = (place, *keys[pages].unbind(1), *keys[pages + 1].unbind(1))
    by_block = [part.contiguous().view(torch.float32)[:, None] for part in parts]
    for first in range(0, count // GRID_BLOCK, _CHUNK_BLOCKS):
        rows = slice(first, first + _CHUNK_BLOCKS)
        values = slice(rows.start * GRID_BLOCK, min(rows.stop * GRID_BLOCK, count))
        into = total[values].view(-1, GRID_BLOCK)
        place, *mixed_in = (part[rows] for part in by_block)
        found = fused(
            # In one dtype: torch's kernel else asks for each operand's at every value.
            into.view(torch.float32), gradient[values].view(-1, GRID_BLOCK).float(), place, column, *mixed_in,
            limit=limit,
        )  # fmt: skip
        into.copy_(found.view(torch.int32))
