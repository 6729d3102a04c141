"""Forwards that a volunteer asks for ahead: as many as its device does until the next one is there."""

from __future__ import annotations

from typing import Any

import pytest

from node.machine.jobs import Forward
from node.volunteer.leases import Held
from node.volunteer.lookahead import KEPT, SPARE, Lookahead
from protocol.base.ids import NodeId
from protocol.messages import Ready
from tests.node.volunteer.test_volunteer import FRONT, Desk, forward


def slots_of(effects: Any) -> int:
    """Slots for forwards that were given to the front."""
    return sum(count for ready in effects.sent(Ready, FRONT) for _, count in ready.graph_slots)


def do_one(lookahead: Lookahead, now: float, forward_s: float) -> None:
    """The device does a forward."""
    held = Held(Desk().lease(forward(0, 0)), FRONT, now, None, True, True, 0)
    lookahead.device_is_at(held, now)
    lookahead.device_is_at(None, now + forward_s)


@pytest.mark.parametrize(
    ("way_s", "forward_s", "ahead"), [(0.06, 0.47, SPARE + 1), (0.4, 0.12, SPARE + 4), (1.0, 0.0, None)]
)
def test_as_many_are_asked_for_as_are_done_while_the_next_one_comes(
    way_s: float, forward_s: float, ahead: int | None
) -> None:
    """On the cloud's lines three at 1.1 B parameters, on home lines six; where a forward takes no time that could be
    measured, as many as there is room for."""
    lookahead, now = Lookahead(), 100.0
    assert lookahead.forwards_max == SPARE
    for _ in range(3):
        lookahead.asked(FRONT, 1, now)
        now += way_s
        lookahead.came(FRONT, now)
    do_one(lookahead, now, forward_s)
    assert lookahead.forwards_max == ahead


def test_a_lease_that_was_not_ready_when_it_was_asked_for_does_not_count() -> None:
    """Most are not. What the way takes is seen by the others, and forgotten when it is long past."""
    lookahead = Lookahead()
    do_one(lookahead, 0.0, 0.5)
    for way_s in (30.0, 0.5, 20.0):
        lookahead.asked(FRONT, 1, 0.0)
        lookahead.came(FRONT, way_s)
    assert lookahead.forwards_max == SPARE + 1
    for _ in range(KEPT):
        lookahead.asked(FRONT, 1, 0.0)
        lookahead.came(FRONT, 2.0)
    assert lookahead.forwards_max == SPARE + 4


def test_a_link_that_is_gone_takes_its_slots_along() -> None:
    """A lease by the next one is no answer to a slot that was given to the last."""
    lookahead = Lookahead()
    do_one(lookahead, 0.0, 0.5)
    lookahead.asked(FRONT, 2, 0.0)
    lookahead.link_down(FRONT)
    lookahead.came(FRONT, 50.0)
    lookahead.asked(FRONT, 1, 60.0)
    lookahead.came(NodeId("another"), 60.1)
    assert lookahead.forwards_max == SPARE
    lookahead.came(FRONT, 60.5)
    assert lookahead.forwards_max == SPARE + 1


def test_who_has_enough_to_begin_with_asks_for_no_more() -> None:
    """Two forwards are here, and the device is at one of them: what the front has left is for whoever is idle. When it
    is done, one more is asked for."""
    desk = Desk()
    desk.load()
    first = desk.say(FRONT, desk.lease(forward(0, 0)))
    assert slots_of(first) + slots_of(desk.say(FRONT, desk.lease(forward(0, 1)))) == 0
    desk.now += 0.5
    (job,) = first.jobs(Forward)
    assert slots_of(desk.done(job, desk.tensor())) == 1


def test_forwards_that_wait_for_their_version_hold_nothing_up() -> None:
    """They can only wait, for minutes on a home line, and work for the version that is here may still come: it is asked
    for while there is room for it, which is for four."""
    desk = Desk()
    desk.load()
    given = [slots_of(desk.say(FRONT, desk.lease(forward(2, number)))) for number in range(3)]
    assert given == [1, 1, 0]
