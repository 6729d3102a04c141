"""A volunteer asks for what changed since the newest version that its device was given, and for the whole otherwise."""

from __future__ import annotations

from itertools import count

from node.machine.jobs import DropParameters, LoadParameters
from node.machine.outbox import Outbox
from node.volunteer.versions import Versions
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import FetchParameters, Parameters
from tests.node.setting import VOLUNTEER, Effects

SERVERS = (NodeId("f0"), NodeId("b0"))


class Desk:
    """The versions of a volunteer with two servers, which answer as they are told."""

    def __init__(self, by_changes: bool = True) -> None:
        self.out = Outbox(VOLUNTEER, count(1))
        self.versions = Versions(self.out, by_changes)
        self.versions.reset(1, SERVERS)
        self._keys = count(1000)

    def want(self, number: int) -> list[int]:
        """The bases that the servers are told, one a server."""
        self.versions.want(number, SERVERS)
        return [fetch.base for fetch in Effects(self.out).sent(FetchParameters) if fetch.version == number]

    def answer(self, version: int, *bases: int) -> list[LoadParameters]:
        """Each shard answers with the changes since its base."""
        for shard, base in enumerate(bases):
            steps = 1 if base < 0 else version - base
            tensors = tuple(TensorRef(next(self._keys), (8,), "p12", 20) for _ in range(steps))
            grid = TensorRef(next(self._keys), (1,), "gi", 9)
            self.versions.on_parameters(
                Parameters(ledger_generation=1, version=version, shard=shard, base=base, tensors=(*tensors, grid))
            )
        return Effects(self.out).jobs(LoadParameters)


def test_the_first_version_comes_whole_and_the_next_one_as_a_change() -> None:
    """As soon as the device was given the first, without waiting until it has loaded it."""
    desk = Desk()
    assert desk.want(0) == [-1, -1]
    (first,) = desk.answer(0, -1, -1)
    assert first.lengths == (1, 1) and len(first.grids) == 2
    assert desk.want(1) == [0, 0]
    (second,) = desk.answer(1, 0, 0)
    assert second.lengths == (1, 1) and second.keep_from == 1
    assert desk.want(4) == [1, 1]
    (third,) = desk.answer(4, 1, -1)
    assert third.lengths == (3, 1) and len(third.shards) == 4 and third.keep_from == 4


def test_a_base_stays_while_an_answer_may_name_it() -> None:
    """Two versions are asked for at once: the device keeps what the slower answer starts from."""
    desk = Desk()
    desk.want(0)
    desk.answer(0, -1, -1)
    assert desk.want(1) == [0, 0] and desk.want(2) == [0, 0]
    (second,) = desk.answer(2, 0, 0)
    assert second.keep_from == 0
    (first,) = desk.answer(1, 0, 0)
    assert first.keep_from == 2
    assert desk.want(3) == [2, 2]


def test_without_changes_in_the_run_nothing_is_said_of_them() -> None:
    """`parameters = "fp32"`."""
    desk = Desk(by_changes=False)
    desk.want(0)
    (job,) = desk.answer(0, -1, -1)
    assert job.lengths == () and desk.want(1) == [-1, -1]


def test_whatever_the_device_could_not_use_is_asked_for_whole() -> None:
    """Its base may be what is wrong."""
    desk = Desk()
    desk.want(0)
    desk.answer(0, -1, -1)
    assert desk.want(1) == [0, 0]
    (job,) = desk.answer(1, 0, 0)
    desk.versions.failed(job)
    assert sorted(Effects(desk.out).dropped) == sorted(ref.key for ref in (*job.shards, *job.grids))
    assert desk.want(1) == [-1, -1]


def test_other_ledgers_begin_with_the_whole() -> None:
    """A run that went back to a checkpoint has other versions under the same numbers."""
    desk = Desk()
    desk.want(5)
    desk.answer(5, -1, -1)
    desk.versions.reset(2, SERVERS)
    assert [job.version for job in Effects(desk.out).jobs(DropParameters)] == [5]
    assert desk.want(6) == [-1, -1]


def test_an_answer_to_a_question_of_before_is_let_go() -> None:
    """It names a base that the device may not have any more; the newer question's answer is on its way."""
    desk = Desk()
    desk.want(0)
    desk.answer(0, -1, -1)
    desk.want(3)
    assert desk.answer(3, 1, 1) == []
    desk.versions.drop_below(None)
    assert len(desk.versions) == 0


def test_parts_that_are_no_use_any_more_are_dropped_with_their_grids() -> None:
    """The step closed while one server's answer was missing."""
    desk = Desk()
    desk.want(0)
    desk.answer(0, -1)
    desk.versions.drop_below(1)
    assert len(Effects(desk.out).dropped) == 2
