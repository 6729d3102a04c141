"""A full disk costs a checkpoint and no step: an alert, and another attempt while it is worth one."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import WriteCheckpoint, WriteManifest, WriteSnapshot
from node.machine.readable import ReadableCheckpoints
from node.server.saves import TRY_AGAIN_S, Saves
from tests.node.setting import Effects, make_config, make_context, make_plan


@pytest.mark.parametrize(
    ("job", "later", "again"),
    [
        (WriteManifest(4, (), 0), 9, True),
        (WriteCheckpoint(4, 4), 4, True),
        (WriteCheckpoint(4, 4), 5, False),
        (WriteSnapshot(4), 4, False),
    ],
)
def test_what_failed_is_an_alert_and_is_tried_again_while_it_can_be(
    job: WriteManifest | WriteCheckpoint | WriteSnapshot, later: int, again: bool
) -> None:
    """A manifest needs only what is on disk; a part needs its version in memory; the next snapshot does as well."""
    context = make_context("f0")
    saves = Saves(context)
    saves.failed(job, "No space left on device", 10.0)
    (alert,) = context.alerts.values()
    assert alert.endswith("4 cannot be written: No space left on device")
    Effects(context.out)
    saves.wake(10.0 + TRY_AGAIN_S / 2, later)
    assert not Effects(context.out).jobs(type(job))
    saves.wake(10.0 + TRY_AGAIN_S, later)
    assert Effects(context.out).jobs(type(job)) == ([job] if again else [])
    assert saves.wake_at() is None


def test_an_alert_ends_with_the_next_success() -> None:
    """The operator has made room."""
    context = make_context("f0")
    saves = Saves(context)
    saves.failed(WriteCheckpoint(4, 4), "No space left on device", 10.0)
    saves.part_written(WriteCheckpoint(8, 8), "file", 1, b"d")
    assert not context.alerts


def test_a_part_of_ones_own_says_which_checkpoints_are_complete() -> None:
    """By that older parts go: what this server was told of, also meanwhile and under earlier ledgers, and what its
    ledgers began from. Where all share a folder the manifests say it."""
    for folder, complete in (("checkpoints", ((4, 8), (4, 8, 12))), ("/shared", ((), ()))):
        config, plan = make_config(every_steps=1, folder=folder, steps=40), make_plan(restore_step=8)
        context = make_context("f0", config, plan)
        context.readable = ReadableCheckpoints(context.out, (4,))
        saves = Saves(context)
        saves.checkpoint_if_due(16)
        context.readable.add((12,))
        saves.failed(WriteCheckpoint(16, 16, complete[0]), "No space left on device", 10.0)
        saves.wake(10.0 + TRY_AGAIN_S, 16)
        assert Effects(context.out).jobs(WriteCheckpoint) == [WriteCheckpoint(16, 16, each) for each in complete]


def test_ledgers_that_began_in_memory_began_from_no_checkpoint() -> None:
    """They go on from a version that no disk may have."""
    plan = msgspec.structs.replace(make_plan(restore_step=8), continues=0)
    context = make_context("f0", make_config(every_steps=1, steps=40), plan)
    Saves(context).checkpoint_if_due(16)
    assert Effects(context.out).jobs(WriteCheckpoint) == [WriteCheckpoint(16, 16)]
