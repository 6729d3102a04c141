"""Parts of sums in whole numbers: measured where their grid is, before anything else."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import (
    DropVersions,
    Measure,
)
from node.machine.records import ContributionStored, ShardStarted
from node.server.buddy import BuddyRole, Copies
from node.server.shard import ShardRole
from protocol.base.ids import TensorRef
from protocol.messages import (
    Contribute,
    Stored,
)
from protocol.run.run import WireSection
from tests.node.server.test_shard import Desk
from tests.node.setting import (
    ELEMENTS,
    VOLUNTEER,
    backward,
    part,
)

BOTH = (backward(0, 0), backward(0, 1))


def on_the_grid(desk: Desk, number: int, step: int, key: int) -> Contribute:
    """A part of a run whose gradients are whole numbers."""
    config = desk.context.config
    desk.context.config = msgspec.structs.replace(config, wire=WireSection(gradients="gi"))
    return msgspec.structs.replace(part(number, step, BOTH, 1, key), tensors=(TensorRef(key, (ELEMENTS,), "gi", 13),))


def test_a_part_on_the_grid_is_measured_before_it_is_written() -> None:
    """The ledger must hear how large it is, also after a restart, when the version that it is measured by may be gone.
    A gradient of whole numbers that are as large as they can be was believed before, unmeasured."""
    desk = Desk()
    message = on_the_grid(desk, 1, 0, 101)
    assert desk.shard.on_contribute(VOLUNTEER, message) == ""
    again = msgspec.structs.replace(message, tensors=(TensorRef(102, (ELEMENTS,), "gi", 13),))
    desk.shard.on_contribute(VOLUNTEER, again)
    effects = desk.take()
    (measure,) = effects.jobs(Measure)
    assert (measure.version, measure.part) == (0, message.tensors[0])
    assert effects.records(ContributionStored) == [] and effects.dropped == [102]
    desk.shard.measured(measure, 1e40)
    desk.shard.measured(measure, 1.0)
    (record,) = desk.take().records(ContributionStored)
    assert record.square_norm == 1e40
    desk.shard.stored(record)
    (said,) = desk.take().sent(Stored)
    assert said.square_norm == 1e40
    back = ShardRole(desk.context, BuddyRole(desk.context, Copies(desk.context.out)))
    back.start([ShardStarted(
        ledger_generation=1, step=0, stage=0, shard=1, shard_count=2, checkpoint_step=-1, config_hash=b""
    ), record])  # fmt: skip
    back.set_elements(ELEMENTS)
    back.on_contribute(VOLUNTEER, again)
    assert desk.take().sent(Stored) == [], "who does not know its version yet announces nothing"
    back.base_loaded(b"digest 0")
    back.sync(desk.context.ledger)
    effects = desk.take()
    assert effects.jobs(Measure) == [] and [said.square_norm for said in effects.sent(Stored)] == [1e40]


def test_a_part_of_a_version_that_is_not_here_is_left_where_it_is() -> None:
    """Its grid is not here either: the server measured it all the same, failed, and ended, at each start anew."""
    desk = Desk(delay=0)
    like = part(5, 2, (backward(2, 0),), 1, 500, 2)
    early = msgspec.structs.replace(like, tensors=on_the_grid(desk, 5, 2, 500).tensors)
    assert desk.shard.on_contribute(VOLUNTEER, early) == ""
    effects = desk.take()
    assert effects.jobs(Measure) == [] and effects.records(ContributionStored) == [] and effects.dropped == [500]


@pytest.mark.parametrize("measured_first", [True, False])
def test_a_part_that_is_durable_when_its_step_is_closed_is_let_go(measured_first: bool) -> None:
    """It came between the commit of its step and the disk's word on that. The server measured it by the grid of a
    version that was dropped when the step closed, and ended (seen once in two hours of real processes)."""
    desk = Desk(delay=0)
    committed = desk.commit(0)
    late = on_the_grid(desk, 5, 0, 500)
    assert desk.shard.on_contribute(VOLUNTEER, late) == ""
    (measure,) = desk.take().jobs(Measure)
    if measured_first:
        desk.shard.measured(measure, 1.0)
        (record,) = desk.take().records(ContributionStored)
    desk.shard.committed(committed)
    desk.context.closed = 0
    desk.shard.close_step(0)
    effects = desk.take()
    (drop,) = effects.jobs(DropVersions)
    assert drop.version == 1
    if measured_first:
        desk.shard.stored(record)
    else:
        desk.shard.measured(measure, 1.0)
    after = desk.take()
    assert after.jobs(Measure) == [] and after.sent(Stored) == [] and after.records(ContributionStored) == []
    assert [*effects.dropped, *after.dropped].count(500) == 1 and desk.shard.part_count == 0
