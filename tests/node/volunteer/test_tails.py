"""When a volunteer knows that a step has no more work for it."""

from __future__ import annotations

from node.volunteer.tails import Tails
from protocol.base.ids import NodeId

FRONT, BACK = NodeId("f0"), NodeId("b0")


def test_a_tail_has_come_when_both_servers_have_said_so_and_all_that_they_gave_is_here() -> None:
    """The word of a server may overtake the last of its leases."""
    tails = Tails()
    tails.leased(0, FRONT)
    tails.told(0, FRONT, 2)
    tails.told(0, BACK, 0)
    assert not tails.has_come(0, (FRONT, BACK))
    tails.leased(0, FRONT)
    assert tails.has_come(0, (FRONT, BACK)) and not tails.has_come(1, (FRONT, BACK))


def test_a_lease_after_the_word_makes_it_void() -> None:
    """A leaver's tasks are given again, as many as there are slots at a time: the first ones were sent alone, as a
    whole vector, and the rest had to wait for its verdict and was another."""
    tails = Tails()
    for server in (FRONT, BACK):
        tails.told(0, server, 0)
    assert tails.has_come(0, (FRONT, BACK))
    tails.leased(0, BACK)
    assert not tails.has_come(0, (FRONT, BACK))
    tails.leased(0, BACK)
    tails.told(0, BACK, 2)
    assert tails.has_come(0, (FRONT, BACK))
    tails.forget(0)
    assert not tails.has_come(0, (FRONT, BACK))
