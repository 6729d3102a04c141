"""What audits ask for is kept, and who asks before the order to keep it has come is answered when it has."""

from __future__ import annotations

from node.machine.records import ContributionStored
from node.server.pins import FETCH_WAIT_S, FETCHES_MAX, PIN_STEPS, Pins
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.messages import Audit, Audited, AuditOver, FetchAudited, Ready
from tests.node.server.test_shard import BOTH
from tests.node.server.test_shard import Desk as ShardDesk
from tests.node.server.test_tickets import Desk as ServerDesk
from tests.node.setting import VOLUNTEER, Effects, contribution

AUDITOR = NodeId("f0")


class Desk:
    """The pins of a server whose shard has its part of contribution 0."""

    def __init__(self) -> None:
        self.server = ShardDesk()
        (record,) = self.server.contribute(0).records(ContributionStored)
        self.server.shard.stored(record)
        self.server.take()
        self.pins = Pins(self.server.context, None, None, self.server.shard)

    def take(self) -> Effects:
        self.pins.check()
        return Effects(self.server.context.out)

    def order(self, number: int = 0, step: int = 0) -> list[Audited]:
        self.pins.on_audit(
            Audit(
                ledger_generation=1, contribution=contribution(number), step=step, version=0, tasks=BOTH, losses=(),
                auditor=None, attempt=0,
            )
        )  # fmt: skip
        return self.take().sent(Audited, AUDITOR)

    def ask(self, what: ContributionId | None = None, task: TaskId | None = None) -> list[Audited]:
        what = what or contribution(0)
        self.pins.on_fetch(AUDITOR, FetchAudited(ledger_generation=1, contribution=what, task=task))
        return self.take().sent(Audited, AUDITOR)

    def over(self, number: int = 0) -> list[Audited]:
        self.pins.on_over(AuditOver(ledger_generation=1, contribution=contribution(number), step=0, blamed=()))
        return self.take().sent(Audited, AUDITOR)


def test_who_asks_after_the_order_is_answered_at_once() -> None:
    """With the shard's part."""
    desk = Desk()
    assert desk.order() == []
    (answer,) = desk.ask()
    assert answer.kept == ("part",) and answer.brought_by == (VOLUNTEER,)


def test_who_asks_before_the_order_is_answered_when_it_comes() -> None:
    """Order and question travel on two links, and an audit must not be missed because one was quicker."""
    desk = Desk()
    assert desk.ask() == []
    (answer,) = desk.order()
    assert answer.kept == ("part",) and answer.brought_by == (VOLUNTEER,)
    assert desk.pins.wake_at() is None


def test_a_question_without_an_order_is_answered_in_the_end() -> None:
    """The ledger has another auditor for it, or none: whoever asks is not kept waiting."""
    desk = Desk()
    desk.pins.clock(10.0)
    assert desk.ask() == [] and desk.pins.wake_at() == 10.0 + FETCH_WAIT_S
    desk.pins.wake(9.9 + FETCH_WAIT_S)
    assert desk.take().sent(Audited) == []
    desk.pins.wake(10.0 + FETCH_WAIT_S)
    (answer,) = desk.take().sent(Audited, AUDITOR)
    assert answer.kept == () and desk.pins.wake_at() is None


def test_nobody_waits_for_an_audit_that_is_over() -> None:
    """Neither who asks later, nor who asked before; an order that comes too late is no order."""
    desk = Desk()
    desk.order()
    assert desk.over() == []
    assert [answer.kept for answer in desk.ask()] == [()]
    assert desk.ask(contribution(1)) == []
    assert [answer.kept for answer in desk.over(1)] == [()]
    assert desk.ask(contribution(2)) == []
    desk.server.context.closed = PIN_STEPS
    assert [answer.kept for answer in desk.order(2)] == [()]


def test_questions_that_wait_are_few() -> None:
    """The oldest is answered for a newer one; the same question again is no further one, and who has gone asks none."""
    desk = Desk()
    for number in range(1, FETCHES_MAX + 1):
        assert desk.ask(contribution(number)) == [] and desk.ask(contribution(number)) == []
    assert [answer.contribution for answer in desk.ask(contribution(0))] == [contribution(1)]
    desk.pins.gone(AUDITOR)
    assert desk.pins.wake_at() is None and desk.order() == []


def test_a_server_answers_in_time_and_nobody_who_has_gone() -> None:
    """The whole machine: it wakes when a question has waited long enough, and then only for who is still there."""
    desk, auditor, other = ServerDesk(), NodeId("a1"), NodeId("a2")
    for node in (auditor, other):
        desk.server.link_up(node, "auditor", 1.0)
        desk.say(Ready(ledger_generation=1, hello=True, slots=0), node)
        asked = desk.say(FetchAudited(ledger_generation=1, contribution=contribution(0), task=None), node)
        assert asked.sent(Audited) == []
    desk.server.link_down(other, 2.0)
    desk.take()
    assert desk.server.wake_at() == 1.0 + FETCH_WAIT_S
    desk.server.wake(1.0 + FETCH_WAIT_S)
    assert desk.take().peers(Audited) == [auditor]
