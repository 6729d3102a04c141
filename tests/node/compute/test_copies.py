"""A shard's state goes to its buddy and back without losing a bit, or is refused."""

from __future__ import annotations

import pytest
import torch

from node.compute import copies
from node.compute.layout import StageLayout
from node.compute.shard import ShardWorker
from protocol.run.run import WireSection
from tests.node.compute.small import VOCABULARY, small_run


def trained(gradients: str, steps: int) -> ShardWorker:
    """A shard after some steps of made-up gradients."""
    config = small_run(wire=WireSection(gradients=gradients))  # type: ignore[arg-type]
    shard = ShardWorker(StageLayout(config, VOCABULARY, 2, 6), 1, 2)
    shard.initial()
    for step in range(steps):
        noise = torch.Generator().manual_seed(step)
        part = torch.randn(shard.end - shard.begin, generator=noise)
        if gradients == "gi":
            shard._sums[step] = (part * 9).int()
        else:
            shard.fold(step, part)
        total, _, _ = shard.reduce(step)
        shard.apply(step, total, step, 1.0)
    return shard


@pytest.mark.parametrize("gradients", ["fp32", "gi"])
@pytest.mark.parametrize("version", [0, 2])
def test_a_copy_in_pieces_is_the_same_state(gradients: str, version: int) -> None:
    """Weights, moments, the version before and the grid's averages; and the next version comes out the same."""
    shard = trained(gradients, version)
    words = copies.words_of(shard.snapshot(version))
    digest, size = copies.digest_of(words, version), 1000
    count = copies.pieces_in(words, size)
    pieces = [copies.piece_of(words, number, size).tobytes() for number in range(count)]
    assert count > 2 and {len(piece) for piece in pieces[:-1]} == {4 * size}
    state = copies.state_of(pieces, version, digest, shard.end - shard.begin, shard.grid_blocks)
    again = shard.snapshot(version)
    assert list(state) == [name for name in copies.UNITS if name in again]
    assert all(torch.equal(state[name], again[name]) for name in again)
    other = ShardWorker(shard.layout, 1, 2)
    assert other.load(version, **state) == shard.digest(version) and other.is_whole(version)


def test_another_state_version_or_shard_is_refused() -> None:
    """A flipped bit, a copy that is said to be of the version after, one of a larger shard."""
    shard = trained("fp32", 1)
    words = copies.words_of(shard.snapshot(1))
    digest, elements = copies.digest_of(words, 1), shard.end - shard.begin
    whole = copies.piece_of(words, 0, 10**9)
    assert copies.state_of([whole.tobytes()], 1, digest, elements, None)
    with pytest.raises(copies.CopyError, match="digest"):
        copies.state_of([whole.tobytes()], 2, digest, elements, None)
    with pytest.raises(copies.CopyError, match="no state"):
        copies.state_of([whole.tobytes()], 1, digest, elements - 1, None)
    whole[17] ^= 1
    with pytest.raises(copies.CopyError, match="digest"):
        copies.state_of([whole.tobytes()], 1, digest, elements, None)
