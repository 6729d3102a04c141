"""Whom a node dials and when again, whom it asks whether it is there, and whom it gives up."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from node.machine.outbox import Outbox
from node.machine.wanted import BACKOFF_S, DIAL_TIMEOUT_S, LIVED_S, Links
from protocol.base.ids import NodeId
from protocol.base.machine import Dial, HangUp
from protocol.messages import Ping
from tests.node.setting import Effects

A, B = NodeId("a"), NodeId("b")


class Desk:
    def __init__(self) -> None:
        self.out = Outbox(NodeId("me"), count(1))
        self.links = Links(self.out, ping_s=2.0, silent_s=6.0)

    def want(self, now: float = 0.0, **peers: bool) -> Effects:
        self.links.want({NodeId(peer): ((f"{peer}:1",), dials) for peer, dials in peers.items()}, now)
        return self.take()

    def take(self) -> Effects:
        return Effects(self.out)

    def wake(self, now: float) -> Effects:
        self.links.wake(now)
        return self.take()


def dialled(effects: Effects) -> list[str]:
    return [effect.peer for effect in effects.all if isinstance(effect, Dial)]


def hung_up(effects: Effects) -> list[str]:
    return [effect.peer for effect in effects.all if isinstance(effect, HangUp)]


def test_it_dials_those_it_has_to_and_leaves_the_others_to_dial() -> None:
    """Of two servers one dials: never both, so no link is made twice."""
    assert dialled(Desk().want(a=True, b=False)) == ["a"]


def test_a_failed_attempt_is_made_again_ever_later() -> None:
    """The waits are those of `BACKOFF_S`, the last one repeats, and a link that comes up begins anew."""
    desk = Desk()
    desk.want(a=True)
    now = 0.0
    for wait_s in (*BACKOFF_S, BACKOFF_S[-1]):
        desk.links.down(A, now)
        assert desk.links.wake_at() == pytest.approx(now + wait_s)
        assert dialled(desk.wake(now + wait_s - 0.01)) == []
        now += wait_s
        assert dialled(desk.wake(now)) == ["a"]
    desk.links.up(A, now)
    desk.links.down(A, now + LIVED_S)
    assert desk.links.wake_at() == now + LIVED_S + BACKOFF_S[0]


def test_a_peer_that_takes_calls_and_hangs_up_is_called_ever_less_often() -> None:
    desk = Desk()
    desk.want(a=True)
    now, calls = 0.0, 0
    while now < 600.0:
        desk.links.up(A, now)
        desk.links.down(A, now + 0.06)
        at = desk.links.wake_at()
        assert at is not None
        now, calls = at, calls + len(dialled(desk.wake(at)))
    assert calls <= 600.0 / BACKOFF_S[-1] + len(BACKOFF_S)


def test_an_attempt_without_an_outcome_is_made_again() -> None:
    """The driver should have given up long ago."""
    desk = Desk()
    desk.want(a=True)
    assert dialled(desk.wake(DIAL_TIMEOUT_S - 0.1)) == []
    assert dialled(desk.wake(DIAL_TIMEOUT_S)) == ["a"]


def test_who_is_quiet_is_asked_once_and_who_is_silent_is_given_up() -> None:
    """A ping after `ping_s`, the end after `silent_s`; any word in between starts the count anew."""
    desk = Desk()
    desk.want(a=True)
    desk.links.up(A, 0.0)
    assert desk.wake(1.9).all == []
    assert len(desk.wake(2.0).sent(Ping, "a")) == 1
    assert desk.wake(3.0).all == []
    desk.links.heard(A, 5.0)
    assert desk.wake(6.5).all == []
    assert len(desk.wake(7.0).sent(Ping)) == 1
    assert hung_up(desk.wake(11.0)) == ["a"]


def test_a_silent_link_that_parts_of_a_tensor_keep_is_looked_at_again_soon() -> None:
    """These may have been the last: a peer whose address changes is given up within a second of its patience, and not
    after twice as long."""
    desk = Desk()
    desk.want(a=True)
    desk.links.up(A, 0.0)
    desk.wake(2.0)
    assert hung_up(desk.wake(6.0)) == ["a"] and desk.links.wake_at() == 7.0
    assert hung_up(desk.wake(6.9)) == [] and hung_up(desk.wake(7.0)) == ["a"]
    desk.links.heard(A, 7.5)
    assert hung_up(desk.wake(13.0)) == [] and hung_up(desk.wake(13.5)) == ["a"]


def test_who_is_not_wanted_any_more_is_hung_up_on() -> None:
    """A new plan without it ends the link."""
    desk = Desk()
    desk.want(a=True)
    desk.links.up(A, 0.0)
    effects = desk.want(b=True)
    assert hung_up(effects) == ["a"] and dialled(effects) == ["b"]


def test_a_link_that_somebody_else_dials_is_not_dialled_when_it_drops() -> None:
    """The other side comes back by itself."""
    desk = Desk()
    desk.want(a=False)
    desk.links.up(A, 0.0)
    desk.links.down(A, 1.0)
    assert desk.links.wake_at() is None


@pytest.mark.parametrize("seed", range(20))
def test_it_never_oversleeps(seed: int) -> None:
    """Whatever happens, what `wake_at` remembers is never later than what it would find."""
    rng = random.Random(seed)
    desk = Desk()
    desk.want(a=True, b=True)
    now = 0.0
    for _ in range(200):
        due, exact = desk.links.wake_at(), desk.links.next_due()
        looked_up = [at for at in map(desk.links._due_of, (A, B)) if at is not None]
        assert due is not None and due <= min(looked_up) and exact == min(looked_up)
        step_s = rng.uniform(0.0, 2.0)
        if now + step_s >= due:
            now = max(now, due)
            desk.wake(now)
            continue
        now += step_s
        peer = rng.choice([A, B])
        if desk.links.is_up(peer):
            (desk.links.heard if rng.random() < 0.8 else desk.links.down)(peer, now)
        else:
            (desk.links.up if rng.random() < 0.5 else desk.links.down)(peer, now)
        desk.take()


def test_a_wake_looks_at_those_of_whom_something_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of a large run has thousands of links, and every question to one of them is a wake."""
    desk, looks = Desk(), []
    due_of = Links._due_of

    def look(links: Links, peer: NodeId) -> Any:
        looks.append(peer)
        return due_of(links, peer)

    monkeypatch.setattr(Links, "_due_of", look)
    peers = [NodeId(f"v{number}") for number in range(1000)]
    for number, peer in enumerate(peers):
        desk.links.up(peer, number / 1000)
    looks.clear()
    now = desk.links.wake_at()
    assert now == 2.0
    for peer in peers[:100]:
        asked = [effect for effect in desk.wake(now).all if getattr(effect, "peer", None) == peer]
        assert asked, f"{peer} was not asked at {now}"
        now = desk.links.wake_at()
        assert now is not None
    assert len(looks) < 5 * 100


def test_who_is_told_of_each_link_that_ends_asks_nobody_and_gives_nobody_up() -> None:
    """In the world that measures no link falls silent without a word: it dials again, and that is all."""
    desk = Desk()
    desk.links = Links(desk.out, ping_s=2.0, silent_s=6.0, asks=False)
    desk.links.set_limits(1.0, 3.0)
    desk.want(a=True)
    desk.links.up(A, 0.0)
    assert desk.wake(3600.0).all == []
    desk.links.down(A, 3600.0)
    assert desk.links.wake_at() == pytest.approx(3600.0 + BACKOFF_S[0])
    assert dialled(desk.wake(3601.0)) == ["a"]
