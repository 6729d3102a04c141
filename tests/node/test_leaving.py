"""How a node leaves, and how a volunteer leaves its stage: with what it has summed up, and with the reason named."""

from __future__ import annotations

import pytest

from node.machine.drain import DRAIN_S, LAST_NEWS_S
from protocol.base.machine import Exit, Received, Told
from protocol.messages import Leave, News, NodeReport, Verdict
from tests.node.setting import TICKET, backward, make_plan
from tests.node.test_core import COORDINATOR, Desk


def test_a_volunteer_that_has_nothing_drains_at_once() -> None:
    """Told to drain, with no work under way, it tells the coordinator, and leaves with the news that come back: its
    owner reads at once what the run has signed. A coordinator that says nothing is not waited for."""
    for answer in (Received(COORDINATOR, News(step=3)), None):
        desk = Desk("v1", role="volunteer")
        desk.join()
        desk.plan(make_plan(), stage=0)
        desk.feed(Told("drain"))
        assert [report.state for report in desk.sent(NodeReport)] == ["draining"] and not desk.of(Exit)
        if answer is not None:
            desk.feed(answer)
        else:
            desk.effects = list(desk.machine.wake(LAST_NEWS_S))
        assert desk.of(Exit)[0].reason == "drained"


@pytest.mark.parametrize(("seen_s", "until_s"), [(None, 200.0), (70.0, 140.0), (5.0, DRAIN_S)])
def test_who_is_moved_has_as_long_as_its_sums_take(seen_s: float | None, until_s: float) -> None:
    """A sum of a billion parameters in four stages takes 80 s on a line of 20 Mbit/s: after a minute it was given up,
    and others did all of it again. It may have sums of two steps. Before its first verdict it counts on a slow line."""
    desk = Desk("v1", role="volunteer")
    desk.join()
    desk.plan(make_plan(), stage=0)
    device = desk.machine.volunteer
    assert device is not None
    gradients = device.gradients
    gradients.reset(1, device.servers, upload_s=100.0)
    if seen_s is not None:
        gradients.added(gradients.accumulator_for(0, 0), (backward(0, 0),), (), TICKET, 0.0)
        gradients.flush(0, 0.0)
        (number,) = gradients._uploads
        judged = gradients._uploads[number].contribution
        word = Verdict(
            ledger_generation=1, contribution=judged, step=0, tasks=(), accepted=True, number=0, reason=""
        )  # fmt: skip
        assert gradients.on_verdict(word, seen_s)
    for step in (1, 2):
        gradients.added(gradients.accumulator_for(step, 0), (backward(step, 0),), (), TICKET, 0.0)
    desk.plan(make_plan(generation=2), stage=1)
    assert device.stage == 0 and gradients.outstanding == 2
    desk.effects = list(desk.machine.wake(until_s - 1.0))
    assert device.stage == 0
    desk.effects = list(desk.machine.wake(until_s))
    assert device.stage == 1


@pytest.mark.parametrize("role", ["server", "volunteer"])
@pytest.mark.parametrize("told", ["suspend quota", "stop quota"])
def test_a_node_that_has_to_pause_leaves_with_the_reason_named(role: str, told: str) -> None:
    """The coordinator hears that it is the quota, and the process knows that it is to come back."""
    desk = Desk("b1" if role == "server" else "v1", role=role)
    desk.join()
    desk.plan(make_plan(), stage=1)
    desk.feed(Told(told))
    assert desk.of(Exit)[0].reason == "suspended: quota" == desk.sent(Leave)[0].reason


def test_the_owner_who_says_drain_while_it_pauses_ends_it() -> None:
    """The last word counts: after a Ctrl-C the process does not wait for next month."""
    desk = Desk("v1", role="volunteer")
    desk.join()
    desk.plan(make_plan(), stage=0)
    desk.machine._drain.reason = "suspended: quota"
    desk.feed(Told("drain"))
    desk.hear(News(step=3))
    assert desk.of(Exit)[0].reason == "drained"
