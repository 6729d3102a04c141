"""The grid of a stage's gradients: the same integers however the model is cut, and exact sums in any order."""

from __future__ import annotations

import hashlib
import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from node.compute.forms import grid, p12, packed
from node.compute.layout import StageLayout
from node.compute.shard import ShardWorker
from node.compute.side_by_side import SideBySide
from node.compute.stage_grid import StageGrid
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import NOT_FINITE
from protocol.run.run import WireSection
from tests.node.compute.small import VOCABULARY, small_run

CONFIG = small_run(wire=WireSection(gradients="gi"))
WHOLE = StageLayout.whole(CONFIG, VOCABULARY)


def gradient(seed: int) -> Tensor:
    """[parameters of the model] fp32, of very different sizes along the vector."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 0, WHOLE.parameter_count)
    return torch.randn(WHOLE.parameter_count, generator=generator) * sizes


def rounded(grid: StageGrid, values: Tensor, microbatch: int) -> Tensor:
    """One task's gradient on the grid of version 0."""
    total = torch.zeros(grid.element_count, dtype=torch.int32)
    grid.add(total, values, grid.steps(grid.first_averages()), 0, microbatch)
    return total


@pytest.mark.parametrize("cuts", [(2,), (1, 5), (1, 2, 3, 4, 5, 6, 7)])
def test_a_gradient_is_rounded_alike_however_the_model_is_cut(cuts: tuple[int, ...]) -> None:
    """Stages, and their shards, round to the integers that one process has: steps, hash and all."""
    values = gradient(1)
    whole = rounded(StageGrid.of(WHOLE), values, 2)
    begin = 0
    for blocks in itertools.pairwise((0, *cuts, CONFIG.block_count)):
        layout = StageLayout(CONFIG, VOCABULARY, *blocks)
        for shard in range(2):
            first, last = layout.shard_range(shard, 2)
            grid = StageGrid.of(layout).cut(first, last)
            part = rounded(grid, values[begin + first : begin + last], 2)
            assert torch.equal(part, whole[begin + first : begin + last])
        begin += layout.parameter_count


def test_any_grouping_and_order_of_contributions_has_the_same_digest() -> None:
    """Forty random ways to share twelve tasks out among contributions, and to add these up: one new version."""
    layout = StageLayout(CONFIG, VOCABULARY, 1, 5)
    grid = StageGrid.of(layout)
    tasks = [rounded(grid, gradient(number)[: layout.parameter_count], number) for number in range(12)]
    rng = random.Random(7)
    digests = set()
    for _ in range(40):
        shard = ShardWorker(layout, 0, 1)
        shard.initial()
        order = rng.sample(range(12), 12)
        edges = sorted({0, 12, *(rng.randrange(12) for _ in range(rng.randrange(8)))})
        for first, last in itertools.pairwise(edges):
            contribution = torch.zeros(layout.parameter_count, dtype=torch.int32)
            for number in order[first:last]:
                contribution += tasks[number]
            shard.fold_packed(0, packed.pack(contribution.numpy()))
        total, square_norm, finite = shard.reduce(0)
        assert finite
        shard.apply(0, total, 0, 1.0)
        floats = total.floats(slice(0, layout.parameter_count))
        digests.add((shard.digest(1), square_norm, hashlib.sha256(floats.numpy().tobytes()).hexdigest()))
    assert len(digests) == 1


def test_any_part_of_a_sum_has_the_floats_that_the_whole_has() -> None:
    """Wherever it begins and ends, in the middle of a block or across chunks: a shard makes them piece by piece."""
    whole = StageGrid.of(WHOLE)
    steps, total = whole.steps(whole.first_averages()), rounded(whole, gradient(1), 0)
    expected, rng = whole.value(total, steps), random.Random(3)
    for _ in range(200):
        begin, end = sorted(rng.sample(range(WHOLE.parameter_count + 1), 2))
        assert torch.equal(whole.value(total, steps, begin, end), expected[begin:end])


def test_a_shard_in_pieces_is_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large pieces are, and however many threads share them: the same norm, the same weights and averages of
    the next version, and the same bytes of it."""
    found = []
    for piece, threads in ((1 << 20, 1), (1 << 16, 1), (1 << 17, 1), (1 << 16, 3)):
        monkeypatch.setattr("node.compute.shard.PIECE", piece)
        monkeypatch.setattr("node.compute.forms.p12._PIECE", piece >> 2)
        monkeypatch.setattr("node.compute.forms.packed._TURNED", piece >> 10)
        side_by_side = SideBySide(threads)
        layout = StageLayout.whole(small_run(wire=WireSection(gradients="gi")), 3000)
        shard = ShardWorker(layout, 0, 1, side_by_side)
        assert shard.end > 1 << 17, "all in one piece"
        shard.initial()
        values = torch.randn(shard.end, generator=torch.Generator().manual_seed(2)) * 1e-3
        for microbatch in range(2):
            part = rounded(StageGrid.of(layout), values, microbatch)
            shard.fold_packed(0, packed.pack(part.numpy(), side_by_side))
        total, square_norm, _ = shard.reduce(0)
        digest = shard.apply(0, total, 0, 0.5)
        assert digest == shard.digest(1)
        served = p12.encode(shard.params(1), shard.params(0), 0, 12, side_by_side)
        found.append((digest, square_norm, shard.snapshot(1)["averages"].numpy().tobytes(), served))
    assert all(each == found[0] for each in found)


def test_a_part_that_is_no_packed_vector_changes_no_sum() -> None:
    """Neither as the first one of a step nor after a good one."""
    shard, good = ShardWorker(WHOLE, 0, 1), packed.pack(torch.ones(WHOLE.parameter_count, dtype=torch.int32).numpy())
    shard.initial()
    for parts in (0, 1):
        for bad in (b"", good[:-1], bytes(good) + b"1"):
            with pytest.raises(RemoteProtocolError):
                shard.fold_packed(parts, bad)
        total = shard.reduce(parts)[0].exact
        assert bool((total == parts).all())
        shard.fold_packed(1, good)


def test_the_grid_follows_the_gradient() -> None:
    """After some steps with small gradients the steps of the grid are small; a skipped step leaves them as they are."""
    (shard,) = (ShardWorker(WHOLE, 0, 1),)
    shard.initial()
    grid = StageGrid.of(WHOLE)
    before = shard.grid_steps(0)
    assert before is not None
    for step in range(12):
        steps = shard.grid_steps(CONFIG.version_of(step))
        assert steps is not None
        total = torch.zeros(WHOLE.parameter_count, dtype=torch.int32)
        grid.add(total, gradient(step) * 1e-3, steps, step, 0)
        shard.fold_packed(step, packed.pack(total.numpy()))
        value, _, _ = shard.reduce(step)
        shard.apply(step, value, step, 1.0)
    after = shard.grid_steps(12)
    assert after is not None and int(after[0]) <= int(before[0]) - 3
    shard.reduce(12)
    shard.skip(12)
    skipped = shard.grid_steps(13)
    assert skipped is not None and torch.equal(skipped, after)


def test_a_step_may_be_summed_up_before_the_version_that_it_is_applied_to_is_there() -> None:
    """With a delayed update step 1 runs on version 0, and may be complete before step 0 is applied."""
    digests = []
    for early in (True, False):
        shard = ShardWorker(WHOLE, 0, 1)
        shard.initial()
        sums = []
        for step in range(2):
            shard.fold_packed(step, packed.pack(rounded(StageGrid.of(WHOLE), gradient(step), 0).numpy()))
            sums.append(shard.reduce(step)[0])
            if not early:
                shard.apply(step, sums[step], step, 1.0)
        if early:
            for step in range(2):
                shard.apply(step, sums[step], step, 1.0)
        averages = shard.snapshot(2)["averages"]
        digests.append((shard.digest(2), averages.numpy().tobytes()))
    assert digests[0] == digests[1]


def test_a_gradient_that_is_not_finite_makes_the_step_one_to_skip() -> None:
    """One infinity in one task's gradient: every shard says that the sum is not finite, whatever else is folded, before
    it or after; the step after is as if nothing had been, and so it is where all sums lie in one process."""
    whole, values = StageGrid.of(WHOLE), gradient(3)
    values[-1] = torch.inf
    steps = whole.steps(whole.first_averages())
    total = torch.zeros(WHOLE.parameter_count, dtype=torch.int32)
    for microbatch, each in enumerate((gradient(1), values, gradient(2))):
        whole.add(total, each, steps, 0, microbatch)
    assert bool(whole.value(total, steps).isnan().all())
    fine = rounded(StageGrid.of(WHOLE), gradient(1), 0)
    for index in range(2):
        shard = ShardWorker(WHOLE, index, 2)
        before = shard.initial()
        here = slice(shard.begin, shard.end)
        bad = packed.pack(grid.short(total[here]).numpy())
        assert packed.first(bad, shard.end - shard.begin) == NOT_FINITE and len(bad) < 500 + shard.end // 50
        for part in (packed.pack(fine[here].numpy()), bad, packed.pack(fine[here].numpy())):
            shard.fold_packed(0, part)
        _, square_norm, finite = shard.reduce(0)
        assert not finite and math.isnan(square_norm)
        assert shard.skip(0) == before
        shard.fold_packed(1, packed.pack(fine[here].numpy()))
        assert shard.reduce(1)[2]


def test_the_first_of_packed_integers_is_found_without_the_others() -> None:
    """Whatever widths the blocks have."""
    generator = torch.Generator().manual_seed(5)
    for count in (1, 64, 1000):
        for _ in range(20):
            bits = torch.randint(0, 32, (-(-count // 64), 1), generator=generator).expand(-1, 64).reshape(-1)[:count]
            array = (torch.randint(-(2**31), 2**31, (count,), generator=generator) >> (31 - bits)).to(torch.int32)
            assert packed.first(packed.pack(array.numpy()), count) == int(array[0])
    assert packed.first(packed.pack(torch.zeros(0, dtype=torch.int32).numpy()), 0) == 0


def test_a_vector_is_within_a_bound_exactly_if_all_of_it_is() -> None:
    """Whichever block the largest value lies in, however wide the others are."""
    generator = torch.Generator().manual_seed(6)
    for count in (1, 65, 1000):
        for _ in range(40):
            bits = torch.randint(0, 32, (-(-count // 64), 1), generator=generator).expand(-1, 64).reshape(-1)[:count]
            array = (torch.randint(-(2**31), 2**31, (count,), generator=generator) >> (31 - bits)).to(torch.int32)
            largest = int(array.long().abs().max())
            data = packed.pack(array.numpy())
            assert packed.all_within(data, count, largest)
            assert not largest or not packed.all_within(data, count, largest - 1)


def test_a_part_is_measured_without_being_unpacked() -> None:
    """Never less than it is, and at most six times as long, in its own unit on every block's own step: whoever makes
    one block a thousand times larger is a thousand times longer."""
    for index in range(2):
        shard = ShardWorker(WHOLE, index, 2)
        shard.initial()
        cut = StageGrid.of(WHOLE).cut(shard.begin, shard.end)
        here = slice(shard.begin, shard.end)
        for seed, factor in ((1, 1e3), (2, 1e-3), (3, 1.0)):
            values = torch.randn(WHOLE.parameter_count, generator=torch.Generator().manual_seed(seed)) * factor
            part = rounded(cut, values[here], 0)
            data = packed.pack(part.numpy())
            true = float(cut.value(part, cut.steps(cut.first_averages())).double().norm())
            assert true <= math.sqrt(shard.measure(0, "gi", data)) <= 6 * true
        part[100] = 2**30
        assert math.sqrt(shard.measure(0, "gi", packed.pack(part.numpy()))) > 1e3 * true
        part[:] = NOT_FINITE
        assert shard.measure(0, "gi", packed.pack(grid.short(part).numpy())) == math.inf
        assert shard.measure(0, "gi", packed.pack(torch.zeros_like(part).numpy())) == 0.0


def test_what_is_no_packed_vector_of_the_shard_is_refused() -> None:
    """Bytes that say other widths than they have, or too few."""
    (shard,) = (ShardWorker(WHOLE, 0, 1),)
    good = packed.pack(torch.ones(WHOLE.parameter_count, dtype=torch.int32).numpy())
    assert packed.is_whole(good, WHOLE.parameter_count)
    for bad in (good[:-1], good + b"\0", bytes(len(good)), b""):
        assert not packed.is_whole(bad, WHOLE.parameter_count)
        with pytest.raises(RemoteProtocolError):
            shard.fold_packed(0, bad)
