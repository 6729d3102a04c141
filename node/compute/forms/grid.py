"""`gi`: weight gradients as integers on a grid that everybody shares, so that sums are exact in any grouping and order.

A block of 256 parameters has one step, a power of two, made from what the gradient there was lately. Each task's
gradient is rounded to whole steps, up or down at random with the right mean, where "random" is a hash of the task and
of the parameter's place: whoever does the task, and the reference, gets the same integers. Sums are sums of int32.

(Stochastic rounding: Gupta et al., arXiv:1502.02551. The hash's mixing is C. Wellons' "lowbias32".)
"""

from __future__ import annotations

import hashlib
import math
import warnings
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from node.compute.forms import fused_grid
from protocol.base.forms import GRID_BLOCK, GRID_SUM_MOST, NOT_FINITE

FIRST_NORM = 0.1
"""Before any step was sealed, the gradient counts as one of this norm, spread evenly: the first steps' gradients are
larger, and only take some bits more."""
FLOOR = 1e-3
"""Blocks whose gradient was smaller than this share of `FIRST_NORM`'s count as that: an embedding's row that is seen
again after a long time then takes ten bits, and not thirty."""
MEMORY = 0.8
"""What is kept of the average when a step is sealed."""
COARSE = 1.0
"""Steps in units of the average over the root of twice the number of tasks (1 cost no loss, 2 cost 0.037 nats)."""
EXPONENT_LEAST, EXPONENT_MOST = -100, 27
"""Of a step; one byte holds it."""
_PAGE = fused_grid.PAGE
_DEVICE_PAGES = 256
"""Pages worked on at a time on a device, where launches cost more than memory."""
_PIECE_BLOCKS = 1 << 12
"""Blocks worked on at a time where each value becomes fp64 for a moment: a million parameters, 16 MiB; a whole shard of
500 M would be 8 GB."""


def first_averages(count: int, model_parameters: int) -> Tensor:
    """[blocks] fp64: the averages that version 0 of a chunk with `count` of the model's parameters has."""
    return torch.full((block_count(count),), FIRST_NORM / math.sqrt(model_parameters), dtype=torch.float64)


def block_count(count: int) -> int:
    """Grid blocks of a vector; the last one may be shorter."""
    return -(-count // GRID_BLOCK)


def exponents(averages: Tensor, tasks: int) -> Tensor:
    """[blocks] int8: the steps, as powers of two, on which a step of `tasks` microbatches is summed."""
    steps = averages * (COARSE / math.sqrt(2 * tasks))
    fraction, power = torch.frexp(steps)
    # the next power of two from above; an exact one stays
    return torch.where(fraction == 0.5, power - 1, power).clamp(EXPONENT_LEAST, EXPONENT_MOST).to(torch.int8)


def next_averages(averages: Tensor, total: Tensor, used: Tensor, model_parameters: int) -> Tensor:
    """[blocks] fp64: the averages after a step was sealed with the sum `total` (int32) on the steps `used` (int8).

    Sums of squares of whole numbers below 2^53 are exact in fp64, hence the same in every order.
    """
    squares = torch.empty(used.numel(), dtype=torch.float64)
    for first in range(0, used.numel(), _PIECE_BLOCKS):
        piece = total[first * GRID_BLOCK : (first + _PIECE_BLOCKS) * GRID_BLOCK]
        torch.sum(_padded(piece).double().square_(), 1, out=squares[first : first + _PIECE_BLOCKS])
    counts = torch.full(squares.shape, float(GRID_BLOCK), dtype=torch.float64)
    counts[-1] = total.numel() - GRID_BLOCK * (used.numel() - 1)
    size = torch.sqrt(squares / counts) * _power(used).double()
    floor = FLOOR * FIRST_NORM / math.sqrt(model_parameters)
    return (averages * MEMORY + size * (1 - MEMORY)).clamp(min=floor)


def task_key(seed: int, step: int, microbatch: int) -> bytes:
    """32 bytes that stand for a task's gradient in the hash."""
    text = b"".join(number.to_bytes(8, "little") for number in (seed, step, microbatch))
    return hashlib.blake2b(text, digest_size=32, person=b"br-round").digest()


def most(tasks: int) -> int:
    """The largest integer of one task: sums of `tasks` of them stay within int32."""
    return GRID_SUM_MOST // tasks


def spoil(total: Tensor) -> None:
    """Makes a sum, in place, one that stands for NaN: every part of it says so, however it is cut."""
    total.fill_(NOT_FINITE)


def is_spoilt(total: Tensor) -> bool:
    """Whether a sum, or a part of one, stands for NaN: it begins with a number that no sum of tasks reaches."""
    return total.numel() > 0 and int(total[0]) == NOT_FINITE


def short(part: Tensor) -> Tensor:
    """What is sent of a part of a sum: it, or as few bytes as say that it stands for NaN."""
    if not is_spoilt(part):
        return part
    found = torch.zeros_like(part)
    found[0] = NOT_FINITE
    return found


EDGE_PARTS = 255
"""Of a step: how finely an audit remembers how near a gradient was to being rounded otherwise."""


def add_to_grid(
    total: Tensor, gradient: Tensor, steps: Tensor, key: bytes, begin: int, tasks: int, edges: Tensor | None = None
) -> bool:
    """Adds a task's gradient, in whole steps, to `total` in place; whether all of it was finite.

    Args:
        total: [n] int32, the sum so far.
        gradient: [n] floats on the same device; stays as it is.
        steps: [blocks] int8 of `exponents`, for blocks that begin with the vector.
        key: the task's, of `task_key`.
        begin: the model's number of the first parameter: the hash depends on the place in the model, not in the vector.
        tasks: of the whole step, as for `exponents`.
        edges: [2, n] uint8 on the processor, or nothing: made smaller, in place, where this gradient would have been
            rounded one step lower, or higher, had it been so many `EDGE_PARTS` of a step smaller, or larger.

    A gradient that is not finite adds nothing.
    """
    if not is_finite(gradient):
        return False
    add_finite(total, gradient, steps, keys_of(key, begin, gradient.numel()), begin, tasks, edges)
    return True


def is_finite(gradient: Tensor) -> bool:
    """Whether every value is; a sum in fp64 would say it, too, and on a device take four times the gradient's bytes."""
    if not gradient.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(gradient))).all())  # both are NaN where a value is


def keys_of(key: bytes, begin: int, count: int) -> Tensor:
    """[pages, 2] int32 on the processor: the keys of all pages that places `begin` to `begin + count` (exclusive)
    lie in, and of one more. Of a billion places it takes 20 ms: ask for them while a device is busy."""
    keyed = hashlib.blake2b(digest_size=8, key=key, person=b"br-page")

    def digest(page: int) -> bytes:
        found = keyed.copy()  # a third cheaper than one that begins with the key
        found.update(page.to_bytes(8, "little"))
        return found.digest()

    digests = b"".join([digest(page) for page in range(begin // _PAGE, (begin + count) // _PAGE + 2)])
    return torch.from_numpy(np.frombuffer(digests, "<i4").reshape(-1, 2).copy())


def add_finite(
    total: Tensor, gradient: Tensor, steps: Tensor, keys: Tensor, begin: int, tasks: int, edges: Tensor | None = None
) -> None:
    """As `add_to_grid` of a gradient that is known to be finite, with the keys of `keys_of`."""
    limit = float(most(tasks) & ~0xFF)  # a number that fp32 has
    done = 0
    if edges is None and gradient.device.type == "cuda" and (fused := one_pass(gradient.device)) is not None:
        done = gradient.numel() // GRID_BLOCK * GRID_BLOCK
        fused_grid.add(fused, total[:done], gradient[:done], steps[: done // GRID_BLOCK], keys, begin, limit)
    if done < gradient.numel():
        rest = steps[done // GRID_BLOCK :]
        _add_plainly(total[done:], gradient[done:], rest, keys, begin, begin + done, limit, edges)


@lru_cache
def one_pass(device: torch.device) -> fused_grid.Fused | None:
    """What adds in one pass on a CUDA device, compiled and tried; None where it cannot, or comes to other integers than
    torch's own operations do."""
    generator = torch.Generator().manual_seed(5)
    count, begin = 3 * GRID_BLOCK * 300, _PAGE - 100  # into the next pages, and blocks that lie across
    gradient = torch.randn(count, generator=generator) * torch.logspace(-9, 3, count)
    steps = torch.randint(-40, 8, (block_count(count),), generator=generator, dtype=torch.int8)
    keys = keys_of(b"t" * 32, begin, count)
    try:
        fused, limit = fused_grid.compiled(), float(most(8) & ~0xFF)
        for there in (gradient.to(device), gradient.to(device, torch.bfloat16)):
            sums = [torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2)]
            for _ in range(2):
                fused_grid.add(fused, sums[0], there, steps, keys, begin, limit)
                _add_plainly(sums[1], there, steps, keys, begin, begin, limit, None)
            if not torch.equal(*sums):
                raise RuntimeError("it came to other integers than torch's own operations do")
    except torch.OutOfMemoryError:
        raise  # it can be tried again when there is room
    except Exception as error:  # of a compiler that somebody else installed
        warnings.warn(f"gradients are rounded by many operations, not by one: {error}", RuntimeWarning, stacklevel=2)
        return None
    return fused


def _add_plainly(
    total: Tensor,
    gradient: Tensor,
    steps: Tensor,
    keys: Tensor,
    keys_begin: int,
    begin: int,
    limit: float,
    edges: Tensor | None,
) -> None:
    """By operations of torch, some pages at a time. `keys` begin with those of the page of `keys_begin`."""
    inverse = _power(-steps.to(gradient.device))
    table = keys.to(gradient.device)
    pages = 4 if gradient.device.type == "cpu" else _DEVICE_PAGES
    # Chunks begin where blocks and pages do, as far as the vector's own beginning lets them.
    for first in range(0, gradient.numel(), pages * _PAGE):
        part = gradient[first : first + pages * _PAGE]
        blocks = inverse[first // GRID_BLOCK : block_count(first + part.numel())]
        scaled = _times_blocks(part, blocks)
        page = (begin + first) // _PAGE - keys_begin // _PAGE
        scaled.add_(uniform(table[page:], begin + first, part.numel()))
        if edges is not None:
            inside = edges[:, first : first + part.numel()]
            above = (scaled - scaled.floor()) * EDGE_PARTS
            for which, distance in enumerate((above, EDGE_PARTS - above)):
                torch.minimum(inside[which], distance.to(torch.uint8).cpu(), out=inside[which])
        scaled.floor_().clamp_(-limit, limit)
        total[first : first + part.numel()] += scaled.to(torch.int32)


def from_grid(total: Tensor, steps: Tensor) -> Tensor:
    """[n] fp32: the sum in its own unit. Exact for sums below 2^24 steps."""
    return _times_blocks(total.float(), _power(steps))


def uniform(keys: Tensor, begin: int, count: int) -> Tensor:
    """[count] fp32 in [0, 1), multiples of 2^-24: the hash of a key and the places `begin` and after.

    Args:
        keys: [pages, 2] int32 of `keys_of`, the first place's page first.
    """
    head = begin % _PAGE
    keys = keys[: -(-(head + count) // _PAGE)]
    mixed = _places(keys.device) ^ keys[:, :1]
    mixed ^= (mixed >> 16) & 0xFFFF
    mixed *= 0x7FEB352D
    mixed += keys[:, 1:]
    mixed ^= (mixed >> 15) & 0x1FFFF
    mixed *= -0x7B935975  # 0x846CA68B as a signed number
    mixed ^= (mixed >> 16) & 0xFFFF
    return ((mixed >> 8) & 0xFFFFFF).view(-1)[head : head + count].float().mul_(2.0**-24)


_PLACES: dict[torch.device, Tensor] = {}


def _places(device: torch.device) -> Tensor:
    """[1, page] int32: places below a page, spread over 32 bits; made once for each device."""
    if device not in _PLACES:
        places = torch.arange(_PAGE, dtype=torch.int64) * 0x9E3779B1
        _PLACES[device] = places.to(torch.int32).view(1, -1).to(device)
    return _PLACES[device]


def _power(steps: Tensor) -> Tensor:
    """fp32 powers of two, exact on every device: `exp2` need not be."""
    return ((steps.to(torch.int32) + 127) << 23).view(torch.float32)


def _padded(vector: Tensor) -> Tensor:
    missing = -vector.numel() % GRID_BLOCK
    return torch.nn.functional.pad(vector, (0, missing)).view(-1, GRID_BLOCK)


def _times_blocks(vector: Tensor, factors: Tensor) -> Tensor:
    """A new vector in fp32: each block of `vector` times its factor."""
    whole = vector.numel() // GRID_BLOCK
    out = torch.empty(vector.numel(), dtype=torch.float32, device=vector.device)
    edge = whole * GRID_BLOCK
    torch.mul(vector[:edge].view(-1, GRID_BLOCK), factors[:whole, None], out=out[:edge].view(-1, GRID_BLOCK))
    if edge < vector.numel():
        torch.mul(vector[edge:], factors[whole], out=out[edge:])
    return out
