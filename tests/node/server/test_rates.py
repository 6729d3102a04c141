"""A volunteer says as much as its leases bring about, and asks for what is new; whoever does more is hung up on."""

from __future__ import annotations

import pytest

from node.server.rates import (
    FETCHES_BURST,
    MESSAGES_BURST,
    MESSAGES_PER_LEASE,
    MESSAGES_PER_S,
    MESSAGES_SAVED_MAX,
    REMEMBERED_MAX,
    Rates,
)
from protocol.base.ids import NodeId
from protocol.base.machine import HangUp, LinkUp, Received
from protocol.messages import FetchParameters, Message, Ping, Pong, Ready, ServerReady
from tests.node.server.test_tickets import Desk, hung_up
from tests.node.setting import VOLUNTEER, make_plan
from tests.node.test_core import Desk as Node

FETCH = FetchParameters(ledger_generation=1, version=0)


def test_asking_for_parameters_in_a_loop_ends_the_link() -> None:
    """The shard's part is sent a few times, and not 308 times as much as was asked; calling again changes nothing, and
    another volunteer is served as before."""
    desk = Desk()
    reasons = [hung_up(desk.say(FETCH)) for _ in range(int(FETCHES_BURST) + 1)]
    assert not any(reasons[:-1]) and "over and over" in reasons[-1][0]
    desk.server.link_down(VOLUNTEER, 2.0)
    desk.server.link_up(VOLUNTEER, "volunteer", 3.0)
    assert hung_up(desk.say(FETCH))
    other = NodeId("v2")
    desk.server.link_up(other, "volunteer", 3.0)
    assert not hung_up(desk.say(FETCH, other))


@pytest.mark.parametrize("step_s", [0.1, 60.0, 600.0])
def test_an_honest_volunteer_gets_every_version(step_s: float) -> None:
    """It comes when the run is old, asks for the two versions of the open steps, once more when its device could not
    take one, and then for each new one; its link breaks now and then, and it asks again for what it was waiting for.
    At 8 B the first download takes longer than a step may."""
    rates, now = Rates(), 1000.0
    assert all(rates.may_fetch(VOLUNTEER, 5000, now) for _ in range(3))
    for version in range(5001, 5400):
        now += step_s
        assert rates.may_fetch(VOLUNTEER, version, now)
        assert version % 3 or rates.may_fetch(VOLUNTEER, version, now)


def test_whoever_floods_is_hung_up_on_and_whoever_works_is_not() -> None:
    """A tiny run gives a hundred leases a second, each with its messages; without leases the same is a flood."""
    busy, idle = NodeId("busy"), NodeId("idle")
    rates = Rates()
    for lease in range(2000):
        rates.leased(busy, lease / 100)
        assert all(rates.may_speak(busy, lease / 100) for _ in range(5))
    said = sum(rates.may_speak(idle, moment / 1000) for moment in range(10_000))
    assert said <= MESSAGES_BURST + 10 * MESSAGES_PER_S
    for _ in range(10_000):
        rates.leased(busy, 20.0)
    assert sum(rates.may_speak(busy, 20.0) for _ in range(10_000)) <= MESSAGES_SAVED_MAX + MESSAGES_PER_LEASE


def test_strangers_without_number_are_forgotten() -> None:
    """What is remembered of them is bounded."""
    rates = Rates()
    for number in range(REMEMBERED_MAX + 100):
        rates.may_speak(NodeId(f"n{number}"), 0.0)
    assert len(rates._nodes) == REMEMBERED_MAX


def serving() -> Node:
    """A server of the last stage, as a whole node, with a volunteer and a fellow linked."""
    node = Node("b1")
    node.join()
    node.plan(make_plan(), stage=1)
    node.feed(LinkUp(VOLUNTEER, "volunteer"))
    node.feed(LinkUp(NodeId("f1"), "server"))
    return node


@pytest.mark.parametrize("message", [Ping(number=7), Ready(ledger_generation=9, hello=False, slots=1)])
def test_a_flood_of_any_small_message_ends_in_a_refusal(message: Message) -> None:
    """Pings are answered until the bucket is empty; then the link is ended, with a reason. Servers are not counted."""
    node = serving()
    answers, reasons = 0, []
    for _ in range(int(MESSAGES_BURST) + 1):
        node.feed(Received(VOLUNTEER, message))
        answers += len(node.sent(Pong))
        reasons += [effect.reason for effect in node.of(HangUp) if "more messages" in effect.reason and effect.fault]
    assert len(reasons) == 1 and answers in (0, MESSAGES_BURST)
    for _ in range(int(MESSAGES_BURST) + 1):
        node.feed(Received(NodeId("f0"), ServerReady(ledger_generation=1, version=0)))
    assert not node.of(HangUp)
