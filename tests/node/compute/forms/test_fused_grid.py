"""The grid's one pass on a CUDA device: what it is given, for any place of the vector; on a GPU, what it comes to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.compute.forms import fused_grid, grid
from protocol.base.forms import GRID_BLOCK

TASKS = 8
LIMIT = float(grid.most(TASKS) & ~0xFF)
KEY = b"t" * 32
HAS_CUDA = torch.cuda.is_available()


def as_the_card_does(*given: Tensor, limit: float) -> Tensor:
    """The compiled function, value by value, with numpy's integers that wrap around."""
    wide = np.broadcast_arrays(*(each.float().numpy() for each in given))
    total, gradient, place, column, *keys = (each.copy() for each in wide)
    whole, first, at = (each.view(np.int32) for each in (total, place, column))
    key, mix, next_key, next_mix = (each.view(np.uint32) for each in keys)
    at = (first >> 8) + at
    beyond = at >= fused_grid.PAGE
    mixed = (at & (fused_grid.PAGE - 1)).astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed ^= np.where(beyond, next_key, key)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x7FEB352D)
    mixed += np.where(beyond, next_mix, mix)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    uniform = (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    exponent = (first & 255).astype(np.int8).astype(np.int32)
    scaled = gradient * ((127 - exponent) << 23).astype(np.int32).view(np.float32) + uniform
    found = whole + np.clip(np.floor(scaled), -limit, limit).astype(np.int32)
    return torch.from_numpy(found).view(torch.float32)


def problem(count: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """A sum, a gradient with values of many sizes, and steps."""
    generator = torch.Generator().manual_seed(count)
    total = torch.randint(-999, 999, (count,), generator=generator, dtype=torch.int32)
    gradient = torch.randn(count, generator=generator) * torch.logspace(-9, 3, count)
    steps = torch.randint(-40, 8, (grid.block_count(count),), generator=generator, dtype=torch.int8)
    return total.to(device), gradient.to(device), steps


@pytest.mark.parametrize("begin", [0, 256, fused_grid.PAGE - 100, 7 * fused_grid.PAGE, 2**33 + 65_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_comes_to_what_many_operations_do(begin: int, dtype: torch.dtype) -> None:
    """Wherever the vector begins, in blocks that lie across two pages of the hash's keys, and over several pages."""
    total, gradient, steps = problem(GRID_BLOCK * 900)
    gradient = gradient.to(dtype)
    expected = total.clone()
    assert grid.add_to_grid(expected, gradient, steps, KEY, begin, TASKS)
    keys = grid.keys_of(KEY, begin, gradient.numel())
    fused_grid.add(as_the_card_does, total, gradient, steps, keys, begin, LIMIT)
    assert torch.equal(total, expected)


def test_a_long_vector_is_added_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of blocks; each chunk with its own places and keys."""
    monkeypatch.setattr(fused_grid, "_CHUNK_BLOCKS", 7)
    test_one_pass_comes_to_what_many_operations_do(300, torch.float32)


def test_torch_can_read_the_function() -> None:
    """Its name and parameters: the rest is compiled where there is a GPU."""
    made: Any = fused_grid.compiled()
    assert made.kernel_name == "add_to_grid" and made.kwargs_dict == {"limit": 0.0}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="NO GPU HERE: nothing of what needs one was tried")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_card_adds_what_a_processor_does(dtype: torch.dtype) -> None:
    """In one pass, with a last block that is shorter."""
    count = GRID_BLOCK * 900 + 77
    total, gradient, steps = problem(count)
    there, expected = total.cuda(), total.clone()
    assert grid.add_to_grid(expected, gradient.to(dtype), steps, KEY, 300, TASKS)
    assert grid.add_to_grid(there, gradient.to(dtype).cuda(), steps, KEY, 300, TASKS)
    assert grid.one_pass(there.device) is not None and torch.equal(there.cpu(), expected)
