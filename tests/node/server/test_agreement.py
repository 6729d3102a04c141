"""A shard applies a step when all of its stage were told the same contributions, and says who was told others."""

from __future__ import annotations

import msgspec

from node.server.agreement import Agreement
from protocol.base.ids import NodeId
from protocol.messages import FrozenList
from protocol.run.plan import Plan
from tests.node.setting import Effects, contribution, make_context, make_plan, same_list

LIST = (contribution(1), contribution(0))


def three_servers() -> Plan:
    """Stage 0 has two fronts and a back."""
    plan = make_plan()
    first = plan.stages[0]
    second = msgspec.structs.replace(first.fronts[0], node=NodeId("g0"))
    stage = msgspec.structs.replace(first, servers=(first.servers[0], second, *first.servers[1:]))
    return msgspec.structs.replace(plan, stages=(stage, *plan.stages[1:]))


class Desk:
    """The agreement of shard 2 of three, on b0."""

    def __init__(self) -> None:
        self.context = make_context("b0", plan=three_servers())
        self.agreement = Agreement(self.context)

    def take(self) -> Effects:
        return Effects(self.context.out)


def test_the_step_waits_until_every_fellow_has_told_the_same() -> None:
    """A fellow may tell before the list is known here."""
    desk = Desk()
    desk.agreement.on_frozen_list(same_list(1, 0, LIST))
    desk.agreement.frozen(0, LIST)
    effects = desk.take()
    assert effects.peers(FrozenList) == ["f0", "g0"]
    assert effects.sent(FrozenList, "g0") == [same_list(2, 0, LIST)]
    assert not desk.agreement.reached(0)
    desk.agreement.on_frozen_list(same_list(0, 0, LIST))
    assert desk.agreement.reached(0) and not desk.context.alerts


def test_another_list_another_order_and_another_step_are_not_the_same() -> None:
    """The order decides the last bits of the sum."""
    for other in (LIST[:1], (*LIST, contribution(2)), LIST[::-1]):
        desk = Desk()
        desk.agreement.frozen(0, LIST)
        desk.agreement.on_frozen_list(same_list(0, 0, LIST))
        desk.agreement.on_frozen_list(same_list(1, 0, other))
        assert not desk.agreement.reached(0)
        (alert,) = desk.context.alerts.values()
        assert alert == (
            "step 1 is not applied: g0 was told to count other contributions than this server; the stage's ledger, f0, "
            "or one of them lies"
        )
    assert same_list(0, 1, LIST).digest != same_list(0, 0, LIST).digest


def test_a_fellow_that_started_anew_tells_again_and_that_counts() -> None:
    """The alert is gone with its reason."""
    desk = Desk()
    desk.agreement.frozen(0, LIST)
    for shard, told in ((0, LIST), (1, LIST[:1])):
        desk.agreement.on_frozen_list(same_list(shard, 0, told))
    assert not desk.agreement.reached(0) and desk.context.alerts
    desk.agreement.on_frozen_list(same_list(1, 0, LIST))
    assert desk.agreement.reached(0) and not desk.context.alerts


def test_who_comes_hears_of_every_step_that_may_not_be_closed() -> None:
    """A fellow that was away could not go on otherwise; nobody else is told."""
    desk = Desk()
    for step in (0, 1, 2):
        desk.agreement.frozen(step, LIST)
    desk.agreement.close_step(0)
    desk.take()
    desk.agreement.sync(NodeId("g0"))
    assert [message.step for message in desk.take().sent(FrozenList, "g0")] == [1, 2]
    for other in ("f1", "b0"):
        desk.agreement.sync(NodeId(other))
    assert desk.take().all == []


def test_steps_that_cannot_be_open_take_no_memory() -> None:
    """Else a fellow could fill it with numbers."""
    desk = Desk()
    desk.context.closed = 0
    for step in (0, 1000):
        desk.agreement.on_frozen_list(same_list(1, step, LIST))
    desk.agreement.on_frozen_list(same_list(1, 1, LIST))
    assert list(desk.agreement._told) == [1]
    desk.agreement.close_step(1)
    assert desk.agreement._told == {}
