"""What a server brings to an object store, beside the training: one at a time, the newest, and tried again."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import BringManifest, BringPart, TryStore, WriteCheckpoint, WriteManifest
from node.machine.outbox import Outbox
from node.machine.stalls import NAMED_S, Stalls
from node.server.bringing import TRY_AGAIN_S
from node.server.context import StageContext
from node.server.saves import Saves
from protocol.messages import CheckpointPart
from tests.node.setting import Effects, make_context

URL = "memory://a-run"


def at_a_store() -> tuple[StageContext, Saves]:
    context = make_context("f0")
    checkpoint = msgspec.structs.replace(context.config.checkpoint, folder=URL)
    context.written = context.config = msgspec.structs.replace(context.config, checkpoint=checkpoint)
    saves = Saves(context)
    saves.start(())
    (job,) = Effects(context.out).jobs(TryStore)
    assert saves.brought(job)
    return context, saves


def written(saves: Saves, context: StageContext, step: int) -> list[BringPart]:
    """A part lies on the disk. Returns what is ordered of the lane that brings it."""
    saves.part_written(WriteCheckpoint(step, step), f"part-{step}", 10, bytes(32))
    effects = Effects(context.out)
    assert not effects.sent(CheckpointPart), "nobody may count on a part that lies here alone"
    return effects.jobs(BringPart)


def test_a_part_is_announced_when_the_store_has_it() -> None:
    """Its own disk is no place from which others start. A manifest counts when it was brought, too."""
    context, saves = at_a_store()
    (job,) = written(saves, context, 4)
    assert (job.step, job.file, job.byte_count, job.ledger_generation) == (4, "part-4", 10, context.generation)
    assert saves.brought(job)
    (part,) = Effects(context.out).sent(CheckpointPart)
    assert (part.step, part.file) == (4, "part-4") and saves.part == part
    assert not saves.manifest_written(WriteManifest(4, (), 0))
    (brings,) = Effects(context.out).jobs(BringManifest)
    assert brings.step == 4 and saves.brought(brings) and not saves.brought(brings)


def test_a_slow_store_gets_the_newest_only_and_is_an_alert() -> None:
    """What would queue up is left out; the alert ends when the store has caught up."""
    context, saves = at_a_store()
    (first,) = written(saves, context, 4)
    assert not context.alerts
    assert not written(saves, context, 8) and not written(saves, context, 12)
    (alert,) = context.alerts.values()
    assert alert.startswith(f"the part of checkpoint 4 is still on its way to {URL}")
    assert saves.brought(first)
    (last,) = Effects(context.out).jobs(BringPart)
    assert last.step == 12 and not context.alerts


def test_what_a_store_refused_is_an_alert_and_is_tried_again() -> None:
    """Every while, though the version is not in memory any more; a newer one takes its turn."""
    context, saves = at_a_store()
    (job,) = written(saves, context, 4)
    saves.not_brought(job, "s3://b: cannot be written: refused", 10.0)
    assert list(context.alerts.values()) == [
        "checkpoint 4 cannot be brought to the object store: s3://b: cannot be written: refused"
    ]
    Effects(context.out)
    assert saves.wake_at() == 10.0 + TRY_AGAIN_S
    saves.wake(10.0 + TRY_AGAIN_S / 2, 9)
    assert not Effects(context.out).jobs(BringPart)
    saves.wake(10.0 + TRY_AGAIN_S, 9)
    assert Effects(context.out).jobs(BringPart) == [job] and saves.wake_at() is None
    saves.not_brought(job, "refused", 30.0)
    (newer,) = written(saves, context, 8)
    saves.wake(30.0 + TRY_AGAIN_S, 9)
    assert not Effects(context.out).jobs(BringPart), "the older one is not wanted any more"
    assert saves.brought(newer) and not context.alerts


def test_whether_a_store_lets_us_in_is_known_before_the_first_checkpoint() -> None:
    """The server's own sentence stands in the status from its start, until the operator has mended it."""
    context = make_context("f0")
    checkpoint = msgspec.structs.replace(context.config.checkpoint, folder=URL)
    context.written = context.config = msgspec.structs.replace(context.config, checkpoint=checkpoint)
    saves = Saves(context)
    saves.start(())
    (job,) = Effects(context.out).jobs(TryStore)
    saves.not_brought(job, "refused", 1.0)
    assert list(context.alerts.values()) == ["checkpoints cannot be brought to the object store: refused"]
    saves.wake(1.0 + TRY_AGAIN_S, 0)
    (job,) = Effects(context.out).jobs(TryStore)
    assert saves.brought(job) and not context.alerts


def test_what_earlier_ledgers_ordered_counts_for_nothing() -> None:
    """A part of a history that was undone is not announced as one of this."""
    context, saves = at_a_store()
    (job,) = written(saves, context, 4)
    older = BringPart(**{name: getattr(job, name) for name in BringPart.__slots__} | {"ledger_generation": 0})
    assert not saves.brought(older) and saves.part is None
    saves.not_brought(older, "refused", 1.0)
    assert not context.alerts and saves.wake_at() is None


@pytest.mark.parametrize("job", [TryStore, BringPart, BringManifest])
def test_a_store_that_hangs_is_no_server_that_hangs(job: type) -> None:
    """Nothing of the training waits for it, so no spare takes the server's place."""
    stalls = Stalls()
    context = make_context("f0")
    out = Outbox(context.node, iter(range(9)), stalls)  # type: ignore[arg-type]
    made = job(**{name: getattr(context, name, 0) for name in job.__slots__})  # type: ignore[attr-defined]
    out.compute(made)
    for now in range(0, int(10 * NAMED_S), 2):
        stalls.look(float(now))
    assert stalls.seconds == 0.0 and stalls.sentence() == ""
    out.compute(WriteCheckpoint(4, 4))
    stalls.ended(made)
    for now in range(int(10 * NAMED_S), int(20 * NAMED_S), 2):
        stalls.look(float(now))
    assert "the writing of a checkpoint" in stalls.sentence(), "and what it does end is not another lane's job"
