"""A look at packed integers: true to what is in them, and no dearer than their bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.compute.forms import packed
from protocol.base.forms import BLOCK, width_bytes

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def _wider(values: list[int], code: int) -> bytes:
    """Packed with all blocks of this width code, though they need less."""
    blocks = np.zeros((-(-len(values) // BLOCK), BLOCK), dtype=np.int32)
    blocks.reshape(-1)[: len(values)] = values
    rows = np.arange(len(blocks))
    planes = np.empty((packed._BITS_OF[code], len(blocks), 8), dtype=np.uint8)
    packed._to_planes(blocks, rows, planes)
    return packed._pack_widths(np.full(len(blocks), code, dtype=np.uint8)) + planes.tobytes()


@given(st.lists(st.integers(0, 31).flatmap(lambda bits: st.integers(-(2**bits), 2**bits - 1)), max_size=300))
def test_a_look_finds_what_unpacking_finds(values: list[int]) -> None:
    """Of any integers: whole as they were packed, the first of them, and the smallest bound that none exceeds."""
    array = np.array(values, dtype=np.int32)
    data = packed.pack(array)
    assert packed.is_whole(data, len(values)) and np.array_equal(packed.unpack(data, len(values)), array)
    assert packed.first(data, len(values)) == (values[0] if values else 0)
    most = max(map(abs, values), default=0)
    assert packed.all_within(data, len(values), most)
    assert not most or not packed.all_within(data, len(values), most - 1)


@pytest.mark.parametrize("value", [0, -1, 1, -2, 5, -(2**29), 2**29 - 1, 2**29, 2**30, _LOWEST, _HIGHEST])
def test_blocks_that_are_wider_than_they_need_are_refused(value: int) -> None:
    """They mean the same, and would have every integer of theirs unpacked for nothing."""
    values = [0] * BLOCK + [value] * BLOCK
    needed = int(packed._widths(np.full((1, BLOCK), value, dtype=np.int32))[0])
    for code in range(max(1, needed), 32):
        data = packed.pack(np.full(BLOCK, value, dtype=np.int32)) if code == needed else _wider([value] * BLOCK, code)
        assert np.array_equal(packed.unpack(data, BLOCK), np.full(BLOCK, value))
        assert packed.is_whole(data, BLOCK) == (code == needed), code
    assert packed.is_whole(packed.pack(np.array(values, dtype=np.int32)), len(values))


def test_a_look_takes_memory_by_the_piece() -> None:
    """A megabyte that says it holds a hundred million zeros took 16 MB, and 64 MiB took a gigabyte."""
    blocks = (1 << 20) * 8 // 5
    data, count = bytes(width_bytes(blocks)), blocks * BLOCK
    packed.is_whole(data[:5], 8 * BLOCK)
    tracemalloc.start()
    assert packed.is_whole(data, count) and packed.first(data, count) == 0 and packed.all_within(data, count, 0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
