"""Tests of `node.compute.shard`."""

from __future__ import annotations

import pytest
import torch

from node.compute.layout import StageLayout
from node.compute.optimizer import AdamWShard
from node.compute.shard import ShardWorker, StepSum
from protocol.run.run import BatchSection
from tests.node.compute.small import VOCABULARY, small_run

CONFIG = small_run()
LAYOUT = StageLayout(CONFIG, VOCABULARY, 2, 6)


def random_gradient(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.parameter_count, generator=torch.Generator().manual_seed(seed))


def shards(count: int) -> list[ShardWorker]:
    made = [ShardWorker(LAYOUT, index, count) for index in range(count)]
    for shard in made:
        shard.initial()
    return made


def summed(shard: ShardWorker, parts: list[torch.Tensor], step: int = 0) -> tuple[StepSum, float, bool]:
    """What `reduce` says of parts that were folded one after the other."""
    for each in parts:
        shard.fold(step, each)
    return shard.reduce(step)


def test_three_shards_update_as_one() -> None:
    """Sum, norm, weights and moments over three steps do not depend on how many shards there are."""
    (one,), three = shards(1), shards(3)
    for step in range(3):
        parts = [random_gradient(10 * step + index) for index in range(4)]
        total, square_norm, finite = summed(one, parts, step)
        one.apply(step, total, step, 0.5)
        reduced = [summed(shard, [part[shard.begin : shard.end] for part in parts], step) for shard in three]
        assert finite and all(each[2] for each in reduced)
        assert sum(each[1] for each in reduced) == pytest.approx(square_norm, rel=1e-12)
        for shard, (part, _, _) in zip(three, reduced, strict=True):
            shard.apply(step, part, step, 0.5)
    for name, tensor in one.snapshot(3).items():
        assert torch.equal(torch.cat([shard.snapshot(3)[name] for shard in three]), tensor), name


def test_sum_does_not_depend_on_the_order_and_keeps_its_inputs() -> None:
    """What a float32 sum would lose to a large intermediate value comes out exactly, in any order."""
    (shard,) = shards(1)
    parts = [torch.full((LAYOUT.parameter_count,), value) for value in (1e8, 1.0, -1e8)]
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2)):
        total = summed(shard, [parts[index] for index in order])[0]
        assert bool((total.floats(slice(0, LAYOUT.parameter_count)) == 1.0).all())
    assert parts[0][0] == 1e8


def test_gradients_that_are_not_finite_are_reported() -> None:
    """A NaN or an overflow of the sum shows in the flag."""
    (shard,) = shards(1)
    huge = torch.full((LAYOUT.parameter_count,), 3e38)
    assert summed(shard, [huge])[2]
    assert not summed(shard, [huge, huge])[2]
    huge[5] = torch.nan
    assert not summed(shard, [huge])[2]


def test_versions_never_change() -> None:
    """An older version stays as it was while newer ones are made, until it is dropped."""
    (shard,) = shards(1)
    before = {name: tensor.clone() for name, tensor in shard.snapshot(0).items()}
    digest = shard.digest(0)
    shard.apply(0, StepSum(random_gradient(1)), 0, 1.0)
    shard.apply(1, StepSum(random_gradient(2)), 1, 1.0)
    assert shard.versions() == (0, 1, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in shard.snapshot(0).items())
    assert shard.digest(0) == digest
    shard.drop_below(1, 2)
    assert shard.versions() == (1, 2)
    with pytest.raises(KeyError):
        shard.params(0)


def test_of_versions_before_the_newest_closed_one_the_weights_are_kept() -> None:
    """The next step still runs on them, and nobody goes on from them: their moments go."""
    (shard,) = shards(1)
    for version in range(2):
        shard.apply(version, StepSum(random_gradient(version)), version, 1.0)
    weights, digest = shard.params(1).clone(), shard.digest(1)
    shard.drop_below(1, 2)
    assert shard.versions() == (1, 2)
    assert torch.equal(shard.params(1), weights) and shard.digest(1) == digest
    assert not shard.is_whole(1) and shard.is_whole(2)
    shard.apply(2, StepSum(random_gradient(2)), 2, 1.0)


def test_digest_is_of_the_content() -> None:
    """Equal updates have equal digests, on another worker too; changed moments show one version later."""
    (one,), (two,) = shards(1), shards(1)
    assert one.digest(0) == two.digest(0)
    assert one.apply(0, StepSum(random_gradient(1)), 0, 1.0) == two.apply(0, StepSum(random_gradient(1)), 0, 1.0)
    state = {name: tensor.clone() for name, tensor in one.snapshot(1).items() if name != "previous"}
    expected = one.apply(1, StepSum(random_gradient(2)), 1, 1.0)
    for name in ("params", "m", "v"):
        changed = {key: tensor.clone() for key, tensor in state.items()}
        changed[name][7] += 1e-3
        assert (two.load(1, **changed) == one.digest(1)) == (name != "params")
        assert two.apply(1, StepSum(random_gradient(2)), 1, 1.0) != expected, name


def test_a_skipped_step_keeps_weights_and_moments() -> None:
    """The next version has the same content, and the one after that goes on from it."""
    (shard,) = shards(1)
    assert shard.skip(0) == shard.digest(0) == shard.digest(1)
    shard.apply(1, StepSum(random_gradient(1)), 1, 1.0)
    assert not torch.equal(shard.params(2), shard.params(1))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_snapshot_goes_on_as_if_nothing_happened(delay: int) -> None:
    """A fresh worker loaded from a snapshot makes the same next version; with delay 1 it also serves the one before."""
    config = small_run(batch=BatchSection(delay=delay))  # type: ignore[arg-type]
    layout = StageLayout(config, VOCABULARY, 2, 6)
    old, fresh = ShardWorker(layout, 1, 2), ShardWorker(layout, 1, 2)
    old.initial()
    size = old.end - old.begin
    old.apply(0, StepSum(random_gradient(1)[:size]), 0, 1.0)
    assert fresh.load(1, **{name: tensor.clone() for name, tensor in old.snapshot(1).items()}) == old.digest(1)
    assert fresh.versions() == ((0, 1) if delay else (1,))
    if delay:
        assert torch.equal(fresh.params(0), old.params(0))
    total = StepSum(random_gradient(2)[:size])
    assert fresh.apply(1, total, 1, 1.0) == old.apply(1, total, 1, 1.0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Gradients and snapshots of another length are refused by name."""
    (shard,) = shards(1)
    with pytest.raises(ValueError, match="gradient of shape"):
        shard.fold(0, torch.zeros(3))
    state = shard.snapshot(0)
    with pytest.raises(ValueError, match=r"^m: "):
        shard.load(0, state["params"], torch.zeros(3), state["v"])


def test_the_update_is_the_optimizers() -> None:
    """A shard's update is `AdamWShard` on the slice of the seeded weights."""
    shard = ShardWorker(LAYOUT, 1, 3)
    shard.initial()
    part = slice(shard.begin, shard.end)
    params = LAYOUT.initial(CONFIG.seed)[part].clone()
    AdamWShard(CONFIG, LAYOUT.decay_mask[part]).apply(params, random_gradient(1)[part], 0, 0.5)
    shard.apply(0, StepSum(random_gradient(1)[part]), 0, 0.5)
    assert torch.equal(shard.params(1), params)
