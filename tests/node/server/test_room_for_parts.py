"""A shard takes so many parts of one node and step, and nobody takes another's room."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from node.server import shard
from node.server.context import StageContext, stage_tasks
from protocol.base.ids import NodeId, TaskId
from protocol.messages import Verdict
from protocol.run.course import course_of
from tests.node.server.test_shard import Desk, reused
from tests.node.setting import VOLUNTEER, contribution, make_config, make_plan


def test_a_node_fills_its_own_share_and_nobody_elses() -> None:
    """After four times the parts of an honest step it is refused by name, whether they still count or not; nobody
    else is touched by it."""
    desk = Desk()
    for number in range(8):
        assert desk.shard.on_contribute(VOLUNTEER, reused(number, step=0, fence=number, key=100 + number)) == ""
        desk.shard.on_verdict(
            Verdict(
                ledger_generation=1,
                contribution=contribution(number),
                step=0,
                tasks=(),
                accepted=False,
                reason="late",
                number=-1,
            )
        )
    assert desk.shard.on_contribute(VOLUNTEER, reused(9, step=0, fence=9, key=109)).startswith("size")
    other = msgspec.structs.replace(reused(10, step=0, fence=10, key=110), contribution=contribution(10, NodeId("v2")))
    assert desk.shard.on_contribute(NodeId("v2"), other) == ""


def test_a_stage_that_is_visited_twice_has_room_for_twice_the_parts() -> None:
    """A volunteer alone in it writes one for each visit, and once more when a server of the stage was replaced: the
    new one knew of no lease, and its fellows keep what nobody will ask for (seed 119884 of the world)."""
    config = make_config()
    stages = msgspec.structs.replace(config.stages, chunks=2, placement="interleaved")
    course = course_of(msgspec.structs.replace(config, stages=stages))
    twice = msgspec.structs.replace(make_plan(), course=course)
    assert [shard_room(Desk(plan=plan)) for plan in (make_plan(), twice)] == [8, 16]


def shard_room(desk: Desk) -> int:
    """Parts of one node that are taken for step 0, one microbatch and visit a part."""
    for number in range(100):
        if desk.shard.on_contribute(VOLUNTEER, reused(number, step=0, fence=number, key=100 + number)):
            return number
    raise AssertionError("a node fills the disk")


def test_a_part_is_looked_at_beside_no_more_tasks_than_its_node_has_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks of the step were listed for each part: a fifth of the time of a world of ten thousand, and as much of a
    server's with 1,600 microbatches."""
    listed: list[TaskId] = []

    def counted(context: StageContext, step: int) -> Iterator[TaskId]:
        for task in stage_tasks(context, step):
            listed.append(task)
            yield task

    monkeypatch.setattr(shard, "stage_tasks", counted)
    desk, seen = Desk(), []
    for number in range(8):
        listed.clear()
        assert desk.shard.on_contribute(VOLUNTEER, reused(number, step=0, fence=number, key=100 + number)) == ""
        seen.append(len(listed))
    assert seen == [1] * 4 + [2] * 4
