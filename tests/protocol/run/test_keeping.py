"""Old checkpoints thin out: few are kept, and one of about every age."""

from __future__ import annotations

import msgspec
import pytest

from protocol.run.keeping import kept_steps
from protocol.run.run import AuditSection, CheckpointSection, RunConfig

CONFIG = RunConfig(checkpoint=CheckpointSection(keep=3), audit=AuditSection(rate=0.05))


@pytest.mark.parametrize("every", [5, 7, 100])
def test_whatever_the_age_of_a_step_a_checkpoint_before_it_is_kept(every: int) -> None:
    """At most seven times as old; at most sixteen of a thousand; and deleting one by one comes to the same as looking
    at all of them at once."""
    kept: frozenset[int] = frozenset()
    for number in range(1, 1001):
        newest = number * every
        kept = kept_steps({*kept, newest}, CONFIG)
        assert len(kept) <= 16 and {newest, newest - every} & set(range(every, newest + 1)) <= kept
        if number % 90 == 0:
            assert kept == kept_steps({each * every for each in range(1, number + 1)}, CONFIG)
            for step in range(every, newest, every):
                before = max(each for each in kept if each <= step)
                assert newest - before <= 7 * (newest - step)


def test_without_audits_only_the_newest_are_kept() -> None:
    """Nobody is found out later."""
    plain = msgspec.structs.replace(CONFIG, audit=AuditSection(rate=0.0))
    assert kept_steps(range(100, 2000, 100), plain) == {1700, 1800, 1900}
