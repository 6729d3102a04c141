"""Tests of `node.compute.optimizer`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from node.compute.optimizer import PIECE, AdamWShard, partial_square_norm, squares_of
from node.machine.numbers import learning_rate
from tests.node.compute.small import small_run

SIZE = 200_003
"""More than three chunks, and odd, so that vector units end in a tail."""


def gradients(steps: int, size: int = SIZE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(size, generator=generator) * 10.0 ** (step - 2) for step in range(steps)]


def test_updates_are_those_of_torch() -> None:
    """Five clipped steps agree with torch.optim.AdamW with the same groups and rates."""
    config = small_run()
    section = config.optimizer
    mask = torch.arange(1000) % 3 > 0
    mine = torch.linspace(-1, 1, 1000)
    theirs = [mine[mask].clone().requires_grad_(True), mine[~mask].clone().requires_grad_(True)]
    decays = (section.weight_decay, 0.0)
    oracle = torch.optim.AdamW(
        [{"params": [part], "weight_decay": decay} for part, decay in zip(theirs, decays, strict=True)],
        betas=(section.beta1, section.beta2),
        eps=section.eps,
    )
    shard = AdamWShard(config, mask)
    for step, grad in enumerate(gradients(5, 1000)):
        shard.apply(mine, grad, step, 0.25)
        for group in oracle.param_groups:
            group["lr"] = learning_rate(config, step)
        for part, where in zip(theirs, (mask, ~mask), strict=True):
            part.grad = grad[where] * 0.25
        oracle.step()
    torch.testing.assert_close(mine[mask], theirs[0].detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mine[~mask], theirs[1].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("edges", [(1,), (65536,), (7, 100_001), (3, 5, 66_000, 199_999)])
def test_cutting_into_shards_changes_no_bit(edges: tuple[int, ...]) -> None:
    """Weights and moments of the shards, side by side, are the uncut vector's, bit for bit."""
    config = small_run()
    mask = torch.arange(SIZE) % 5 > 1
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    whole, whole_params = AdamWShard(config, mask), start.clone()
    parts = [0, *edges, SIZE]
    ranges = [slice(begin, end) for begin, end in itertools.pairwise(parts)]
    shards = [AdamWShard(config, mask[part]) for part in ranges]
    cut_params = [start[part].clone() for part in ranges]
    for step, grad in enumerate(gradients(3)):
        whole.apply(whole_params, grad, step, 0.3)
        for shard, params, part in zip(shards, cut_params, ranges, strict=True):
            shard.apply(params, grad[part].clone(), step, 0.3)
    assert torch.equal(torch.cat(cut_params), whole_params)
    assert torch.equal(torch.cat([shard.m for shard in shards]), whole.m)
    assert torch.equal(torch.cat([shard.v for shard in shards]), whole.v)


def test_gradient_is_not_written() -> None:
    """The summed gradient can be used again after the update."""
    (grad,) = gradients(1, 100)
    before = grad.clone()
    AdamWShard(small_run(), torch.ones(100, dtype=torch.bool)).apply(torch.zeros(100), grad, 0, 0.5)
    assert torch.equal(grad, before)


def test_square_norms_of_parts_add_up() -> None:
    """Parts give the whole's square norm, and agree with plain float64 arithmetic."""
    (grad,) = gradients(1)
    parts = [partial_square_norm(part) for part in torch.split(grad, 33_333)]
    assert math.fsum(parts) == pytest.approx(float(grad.double().square().sum()), rel=1e-13)


def test_a_norm_of_pieces_is_the_norm_to_the_last_bit() -> None:
    """All that a shard has of its gradient at a time is a piece."""
    grad = torch.randn(3 * PIECE + 5, generator=torch.Generator().manual_seed(8))
    pieces = [squares_of(piece) for piece in torch.split(grad, PIECE)]
    assert math.fsum(itertools.chain.from_iterable(reversed(pieces))) == partial_square_norm(grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_shows_in_the_norm(bad: float) -> None:
    """The square norm of a slice with a NaN or an infinity is not finite, wherever it stands."""
    for place in (0, 70_000, SIZE - 1):
        grad = torch.zeros(SIZE)
        grad[place] = bad
        assert not math.isfinite(partial_square_norm(grad))
    assert math.isfinite(partial_square_norm(torch.full((9,), 3e38)))
