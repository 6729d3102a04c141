"""Parameters as what changed: made with each version, kept for a few, and given to those whose base they start from."""

from __future__ import annotations

import msgspec

from node.machine.jobs import ServeParameters
from node.server.serving import Serving
from protocol.base.forms import DIFFERENCES_MAX
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import FetchParameters, Parameters
from protocol.run.run import WireSection
from tests.node.setting import Effects, make_config, make_context

ELEMENTS = 1000
ALICE, BOB = NodeId("v1"), NodeId("v2")


class Desk:
    """What a shard hands out; versions 0 to `newest` were made here, and the lane has made what it was asked for."""

    def __init__(self, newest: int = 0, change_bytes: int = 400) -> None:
        config = msgspec.structs.replace(make_config(), wire=WireSection(gradients="gi", parameters="p12"))
        self.context = make_context("b0", config)
        self.serving = Serving(self.context)
        self.newest, self.change_bytes = 0, change_bytes
        for _ in range(newest):
            self.grow()

    def take(self) -> Effects:
        return Effects(self.context.out)

    def grow(self) -> Effects:
        self.newest += 1
        self.serving.new_version(self.newest)
        return self.work()

    def work(self) -> Effects:
        """The lane does what it was ordered to."""
        effects = self.take()
        for job in effects.jobs(ServeParameters):
            self.made(job)
        more = self.take()
        more.all = [*effects.all, *more.all]
        return more

    def made(self, job: ServeParameters) -> None:
        byte_count = 1200 if job.base is None else self.change_bytes
        assert job.grid is not None
        tensors = TensorRef(job.key, (ELEMENTS,), "p12", byte_count), TensorRef(job.grid, (4,), "gi", 9)
        self.serving.served(job, tensors, oldest=max(0, self.newest - 1))

    def ask(self, version: int, base: int, peer: NodeId = ALICE) -> None:
        fetch = FetchParameters(ledger_generation=1, version=version, base=base)
        self.serving.on_fetch(peer, fetch, max(0, self.newest - 1), self.newest)


def told(effects: Effects) -> list[tuple[int, int]]:
    """(base, tensors) of each answer; the last tensor is the grid."""
    return [(message.base, len(message.tensors)) for message in effects.sent(Parameters)]


def test_who_is_a_few_versions_behind_gets_one_change_for_each() -> None:
    """Up to `DIFFERENCES_MAX`; who is further behind, ahead, or has nothing gets the whole."""
    for behind in range(1, 6):
        desk = Desk(newest=6)
        desk.ask(6, 6 - behind)
        expected = (6 - behind, behind + 1) if behind <= DIFFERENCES_MAX else (-1, 2)
        assert told(desk.work()) == [expected]
    for base in (-1, 6, 7):
        desk = Desk(newest=6)
        desk.ask(6, base)
        assert told(desk.work()) == [(-1, 2)]


def test_a_change_is_made_once_and_with_its_version() -> None:
    """The version before is in memory then, and may be gone when somebody asks."""
    desk = Desk()
    desk.serving.new_version(1)
    (job,) = desk.take().jobs(ServeParameters)
    assert (job.version, job.base) == (1, 0)
    desk.newest = 1
    desk.ask(1, 0)
    desk.ask(1, 0, BOB)
    assert desk.take().all == []
    desk.made(job)
    assert desk.take().peers(Parameters) == [ALICE, BOB]


def test_who_waits_for_a_version_gets_the_change_when_it_is_there() -> None:
    """Asked for before its commit."""
    desk = Desk(newest=2)
    desk.ask(3, 2)
    desk.ask(3, -1, BOB)
    assert desk.take().all == []
    assert sorted(told(desk.grow())) == [(-1, 2), (2, 2)]


def test_a_restored_version_has_no_change_and_goes_out_whole() -> None:
    """What was before it is not in memory."""
    desk = Desk()
    desk.serving.new_version(1, made_from_here=False)
    desk.newest = 1
    desk.ask(1, 0)
    effects = desk.work()
    assert [job.base for job in effects.jobs(ServeParameters)] == [None] and told(effects) == [(-1, 2)]


def test_changes_that_are_larger_than_the_whole_are_not_sent() -> None:
    """A rate so high that weights move by as much as they are."""
    desk = Desk(newest=3, change_bytes=1500)
    desk.ask(3, 1)
    assert told(desk.work()) == [(-1, 2)]
    desk.ask(3, 2)
    assert told(desk.work()) == [(2, 2)]


def test_as_many_changes_are_kept_as_can_be_sent() -> None:
    """And none at the end."""
    desk = Desk()
    dropped = [key for _ in range(9) for key in desk.grow().dropped]
    assert len(dropped) == 2 * (9 - DIFFERENCES_MAX)
    desk.serving.end()
    assert len(desk.take().dropped) == 2 * DIFFERENCES_MAX


def test_a_change_that_comes_too_late_leaves_nobody_waiting() -> None:
    """The lane was so slow that newer versions have pushed it out: its tensors go, and who waits gets the whole."""
    desk = Desk(newest=1)
    desk.serving.new_version(2)
    (late,) = desk.take().jobs(ServeParameters)
    desk.newest = 2
    desk.ask(2, 1)
    for newer in range(3, 3 + DIFFERENCES_MAX):
        desk.serving.new_version(newer)
    desk.take()
    desk.made(late)
    effects = desk.work()
    assert sorted(effects.dropped) == sorted(key for key in (late.key, late.grid) if key is not None)
    assert [job.base for job in effects.jobs(ServeParameters)] == [None] and told(effects) == [(-1, 2)]
