"""Tests of packed integers, `gi` and `p12`."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.compute.forms import grid, p12
from node.compute.forms.packed import pack, unpack
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import byte_bounds
from protocol.run.run import OptimizerSection, RunConfig

TASKS = 8


@given(st.lists(st.integers(0, 31), min_size=1, max_size=8), st.integers(0, 70), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_packed_integers_come_back(widths: list[int], cut: int, seed: int) -> None:
    """Blocks of any widths, of any length, with the extremes of each width; within the announced bounds."""
    generator = np.random.default_rng(seed)
    blocks = [generator.integers(-(2**width), 2**width, 64) for width in widths]
    values = np.concatenate(blocks).astype(np.int32)[: max(1, 64 * len(widths) - cut)]
    data = pack(values)
    assert np.array_equal(unpack(data, values.size), values)
    least, most = byte_bounds((values.size,), "gi")
    assert least <= len(data) <= most


def test_widths_are_the_smallest() -> None:
    """Two's complement: −1 and 0 take one bit, −2…1 two, zeros none, int32's own limits 32."""
    for low, high, bits in ((0, 0, 0), (-1, 0, 1), (-2, 1, 2), (-8, 7, 4), (-9, 7, 5), (-(2**31), 2**31 - 1, 32)):
        values = np.array([low, high] * 32, dtype=np.int32)
        assert len(pack(values)) == 1 + 8 * bits


@given(st.integers(1, 300), st.binary(max_size=600), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_any_bytes_unpack_or_are_refused(count: int, noise: bytes, seed: int) -> None:
    """Random bytes, and true ones cut, lengthened or changed: an array of the right length or a refusal."""
    rng = random.Random(seed)
    true = pack(np.array([rng.randint(-50, 50) for _ in range(count)], dtype=np.int32))
    true[rng.randrange(len(true))] = rng.randrange(256)
    for data in (noise, true, true[:-1], true + b"\0"):
        try:
            found = unpack(data, count)
        except RemoteProtocolError:
            continue
        assert found.shape == (count,) and found.dtype == np.int32


def gradients(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.rand(count, generator=generator) * 6 - 16)
    return [torch.randn(count, generator=generator) * sizes for _ in range(TASKS)]


@given(st.integers(1, 2000), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_sums_are_the_same_in_any_grouping_and_order(count: int, seed: int) -> None:
    """Tasks dealt out to any number of contributions, summed in any order, packed and folded: one digest."""
    rng = random.Random(seed)
    steps = grid.exponents(grid.first_averages(count, 10**6), TASKS)
    parts = gradients(count, seed)
    digests = set()
    for _ in range(4):
        sums = [torch.zeros(count, dtype=torch.int32) for _ in range(rng.randint(1, TASKS))]
        for task in rng.sample(range(TASKS), TASKS):
            assert grid.add_to_grid(rng.choice(sums), parts[task], steps, grid.task_key(1, 2, task), 77, TASKS)
        rng.shuffle(sums)
        total = sum(torch.from_numpy(unpack(pack(each.numpy()), count)) for each in sums)
        assert isinstance(total, Tensor)
        digests.add(hashlib.blake2b(grid.from_grid(total, steps).numpy().tobytes()).digest())
    assert len(digests) == 1


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 2**34), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_cut_at_a_block_changes_nothing(first: int, blocks: int, begin: int, seed: int) -> None:
    """A shard's part of the integers is what the shard's part of the gradient gives, wherever the vector lies."""
    (whole, *_), count = gradients(2560, seed), 2560
    steps = grid.exponents(grid.first_averages(count, 10**6), TASKS)
    total, part = torch.zeros(count, dtype=torch.int32), slice(256 * first, 256 * (first + blocks))
    grid.add_to_grid(total, whole, steps, b"k" * 32, begin, TASKS)
    alone = torch.zeros(whole[part].numel(), dtype=torch.int32)
    grid.add_to_grid(alone, whole[part], steps[first : first + blocks], b"k" * 32, begin + part.start, TASKS)
    assert torch.equal(total[part], alone)


def test_rounding_has_the_right_mean_and_depends_on_the_task() -> None:
    """A gradient of 0.3 steps becomes 1 in three of ten places, others for another task; the hash is even."""
    count = 1 << 18
    steps = torch.zeros(grid.block_count(count), dtype=torch.int8)
    gradient = torch.full((count,), 0.3)
    found = []
    for task in range(2):
        total = torch.zeros(count, dtype=torch.int32)
        grid.add_to_grid(total, gradient, steps, grid.task_key(1, 0, task), 0, TASKS)
        assert float(total.float().mean()) == pytest.approx(0.3, abs=0.005)
        found.append(total)
    assert float((found[0] == found[1]).float().mean()) == pytest.approx(0.58, abs=0.01)
    shares = torch.histc(grid.uniform(grid.keys_of(b"k" * 32, 123, count), 123, count), 64, 0.0, 1.0) / count
    assert float((shares * 64 - 1).abs().max()) < 0.08
    neighbours = grid.uniform(grid.keys_of(b"k" * 32, 0, count), 0, count) - 0.5
    assert abs(float((neighbours[1:] * neighbours[:-1]).mean()) * 12) < 0.01


def test_sums_cannot_overflow_and_what_is_not_finite_adds_nothing() -> None:
    """Absurd gradients end at the share of int32 that a task has; NaN is told and leaves the sum alone."""
    steps = grid.exponents(grid.first_averages(300, 10**6), TASKS)
    total = torch.zeros(300, dtype=torch.int32)
    for task in range(TASKS):
        assert grid.add_to_grid(total, torch.full((300,), 1e30), steps, grid.task_key(1, 0, task), 0, TASKS)
    assert int(total.min()) > 2**31 - 2**12
    before = total.clone()
    for bad in (float("nan"), float("inf")):
        gradient = torch.zeros(300)
        gradient[299] = bad
        assert not grid.add_to_grid(total, gradient, steps, b"k" * 32, 0, TASKS)
    assert torch.equal(total, before)


def test_steps_follow_the_gradient() -> None:
    """The next power of two above the average over the root of 2n; averages move by a fifth, and have a floor."""
    averages = torch.tensor([4.0, 4.1, 3.9, 1e-30], dtype=torch.float64)
    assert grid.exponents(averages, 8).tolist() == [0, 1, 0, -100]
    used = torch.tensor([0, 1, -2, 0], dtype=torch.int8)
    total = torch.full((800,), 5, dtype=torch.int32)
    found = grid.next_averages(averages, total, used, 10**6)
    expected = [0.8 * 4 + 0.2 * 5, 0.8 * 4.1 + 0.2 * 10, 0.8 * 3.9 + 0.2 * 1.25, 0.2 * 5]
    assert found.tolist() == pytest.approx(expected)
    assert grid.next_averages(averages, total * 0, used, 10**6)[3] == pytest.approx(1e-3 * 0.1 / 1e3)


def test_a_long_vector_is_worked_on_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of the grid, whole numbers of parameters and their changes."""
    generator = torch.Generator().manual_seed(9)
    count = 10 * 256 + 7
    total = torch.randint(-1000, 1000, (count,), generator=generator, dtype=torch.int32)
    averages, used = torch.rand(11, generator=generator, dtype=torch.float64), torch.zeros(11, dtype=torch.int8)
    old, new = (torch.randn(count, generator=generator) * 0.02 for _ in range(2))
    found = []
    for blocks, piece in ((1 << 12, 1 << 20), (3, 1000)):
        monkeypatch.setattr(grid, "_PIECE_BLOCKS", blocks)
        monkeypatch.setattr(p12, "_PIECE", piece)
        after = grid.next_averages(averages, total, used, 10**6)
        found.append((after.tolist(), p12.encode(new, None, 0, 12), p12.encode(new, old, 7, 12)))
    assert found[0] == found[1]


def test_late_in_training_a_sum_of_eight_tasks_takes_five_bits() -> None:
    """The figure that bytes up are planned with: at most 5.2 bits a parameter where blocks are alike inside."""
    generator = torch.Generator().manual_seed(1)
    count = 1 << 16
    sizes = torch.exp2(torch.rand(count // 256, 1, generator=generator) * 6 - 16).expand(-1, 256).reshape(-1)
    averages = (sizes.view(-1, 256)[:, 0] * TASKS**0.5).double()
    steps, total = grid.exponents(averages, TASKS), torch.zeros(count, dtype=torch.int32)
    for task in range(TASKS):
        gradient = torch.randn(count, generator=generator) * sizes
        grid.add_to_grid(total, gradient, steps, grid.task_key(1, 0, task), 0, TASKS)
    assert 8 * len(pack(total.numpy())) / count <= 5.2
    exact = grid.from_grid(total, steps)
    assert float(exact.norm()) == pytest.approx(float((sizes * TASKS**0.5).norm()), rel=0.15)


def test_parameters_come_whole_or_as_what_changed() -> None:
    """Both ways end with the same integers, which depend on the newest weights alone."""
    generator = torch.Generator().manual_seed(4)
    old = torch.randn(5000, generator=generator) * 0.02
    new = old + torch.randn(5000, generator=generator) * 3e-4
    before, after = p12.to_fixed(old, 12), p12.to_fixed(new, 12)
    whole, change = p12.encode(new, None, 0, 12), p12.encode(new, old, 7, 12)
    assert (p12.base_of(whole), p12.base_of(change)) == (p12.WHOLE, 7)
    assert torch.equal(p12.decode(whole, 5000, None), after) and torch.equal(p12.decode(change, 5000, before), after)
    assert 8 * len(change) / 5000 < 3.5 < 8 * len(whole) / 5000 < 10
    assert float((p12.from_fixed(after, 12) - new).abs().max()) <= 2.0**-13
    with pytest.raises(RemoteProtocolError):
        p12.decode(change, 5000, before[1:])
    for data in (b"", b"\xfe" + b"\xff" * 7 + change[8:]):
        with pytest.raises(RemoteProtocolError):
            p12.base_of(data)


def test_places_of_parameters_follow_the_learning_rate() -> None:
    """Half the rate, one binary place more; within what fp32 holds."""
    rates = {1.5e-3: 12, 3e-4: 14, 0.5: 8, 0.0: 22}
    for rate, bits in rates.items():
        assert p12.fixed_bits(RunConfig(optimizer=OptimizerSection(learning_rate=rate))) == bits


def test_integer_forms_stay_what_they_are() -> None:
    """Hash, rounding and packing are part of the arithmetic: whoever changes a bit changes the protocol."""
    steps = torch.arange(-6, -2).to(torch.int8)
    gradient = torch.arange(-500, 500) / 128
    total = torch.zeros(1000, dtype=torch.int32)
    grid.add_to_grid(total, gradient, steps, grid.task_key(5, 6, 7), 2**33 + 65_000, 4)
    assert hashlib.blake2b(pack(total.numpy()), digest_size=8).hexdigest() == "75407e99966c56e4"
