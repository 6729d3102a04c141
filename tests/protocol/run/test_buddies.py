"""Who keeps copies of whose shard, and when that is worth its bytes."""

from __future__ import annotations

import msgspec
import pytest

from protocol.run.buddies import COPY_BYTES_MAX, boundary_bytes, buddy_place, copy_bytes, keeps_copies
from protocol.run.run import BatchSection, CheckpointSection, ModelSection, RunConfig, StagesSection


def run(buddy: str, microbatches: int = 8) -> RunConfig:
    """A model of 1.1 B parameters, whose samples have 2,048 tokens."""
    return RunConfig(
        model=ModelSection(layers=22, hidden=2048, heads=32, kv_heads=4, feed_forward=5632, context=2048),
        batch=BatchSection(microbatches=microbatches, samples=1),
        stages=StagesSection(count=8),
        checkpoint=CheckpointSection(buddy=buddy),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("counts", [[2, 2], [3], [1, 1], [1, 3, 2], [1, 1, 1]])
def test_every_shard_has_a_buddy_on_another_server_that_is_of_its_stage_where_it_can(counts: list[int]) -> None:
    """And no server keeps more than two shards' copies: its neighbour's, and that of a stage with one server."""
    keeps: dict[tuple[int, int], int] = {}
    for stage, count in enumerate(counts):
        for shard in range(count):
            found = buddy_place(stage, shard, counts)
            assert found is not None and found != (stage, shard) and found[1] < counts[found[0]]
            assert found[0] == stage or count == 1
            keeps[found] = keeps.get(found, 0) + 1
    assert max(keeps.values()) <= 2


def test_a_run_of_one_server_has_no_buddy() -> None:
    """Nobody is there to keep anything."""
    assert buddy_place(0, 0, [1]) is None


def test_copies_are_kept_where_they_are_small_beside_what_a_step_sends_anyway() -> None:
    """At 1.1 B parameters on 8 stages of two servers: with a million tokens a step, not with 16,384."""
    elements = 1_100_000_000 // 16
    assert copy_bytes(run("auto"), elements) == pytest.approx(1.1e9)
    assert boundary_bytes(run("auto", 512)) == pytest.approx(4.4e9, rel=0.01)
    assert keeps_copies(run("auto", 512), elements) and not keeps_copies(run("auto", 8), elements)
    assert keeps_copies(run("always", 8), elements) and not keeps_copies(run("never", 512), elements)


def test_no_buddy_is_asked_for_more_than_its_memory() -> None:
    """Whatever the run's file says."""
    assert not keeps_copies(run("always", 65_536), COPY_BYTES_MAX // 16 + 1)


def test_the_key_is_no_part_of_what_is_computed() -> None:
    """Runs that differ by it alone are the same run."""
    one, other = run("never"), run("always")
    assert one.config_hash() == other.config_hash() and one.hashes() == other.hashes()
    assert msgspec.structs.replace(one, seed=2).config_hash() != one.config_hash()
