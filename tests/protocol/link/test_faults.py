"""Who waits after a fault, for how long, and what its neighbours feel of it."""

from __future__ import annotations

import pytest

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import (
    BACK_OFF_FIRST_S,
    BACK_OFF_FORGOTTEN_S,
    BACK_OFF_MAX_S,
    BACK_OFF_NODES_MAX,
    FAULTS_BURST,
    FAULTS_PER_S,
    LOCAL_FAULTS_BURST,
)
from protocol.link.faults import NO_FAULTS, ComesTooSoonError, Faults

BAD, OTHER = NodeId("b"), NodeId("o")
HERE, FAR, NEIGHBOUR, ELSEWHERE = "127.0.0.1", "203.0.113.7", "203.0.113.9", "198.51.100.1"


def _waits(faults: Faults, node: NodeId, now: float) -> bool:
    try:
        faults.check(node, now)
    except ComesTooSoonError:
        return True
    return False


def _handshake(faults: Faults, host: str, now: float, error: Exception | None = None) -> str:
    """How a handshake ends in which the caller makes this mistake, or none."""
    try:
        with faults.handshake(host, now):
            if error is not None:
                raise error
    except RemoteProtocolError as refused:
        return refused.reason
    return ""


def test_a_member_waits_twice_as_long_after_each_fault_up_to_a_bound() -> None:
    """It may come exactly when its time is over; nobody else waits."""
    faults, now = Faults(), 0.0
    waited: list[float] = []
    for _ in range(10):
        faults.of_member(BAD, "size", now)
        assert _waits(faults, BAD, now) and not _waits(faults, OTHER, now)
        step_s = BACK_OFF_FIRST_S * 2 ** len(waited)
        waited.append(min(BACK_OFF_MAX_S, step_s))
        assert _waits(faults, BAD, now + waited[-1] - 0.01)
        now += waited[-1]
        assert not _waits(faults, BAD, now)
    assert waited[0] == 0.5 and waited[-2:] == [BACK_OFF_MAX_S] * 2


def test_many_faults_at_once_are_one() -> None:
    """Links that were there when the first fault came do not make the time longer, whatever is said on them."""
    faults = Faults()
    for _ in range(64):
        faults.of_member(BAD, "size", 1.0)
    assert not _waits(faults, BAD, 1.0 + BACK_OFF_FIRST_S)


def test_a_fault_is_forgotten_after_quiet_minutes() -> None:
    """Then the first step counts again, and not before."""
    faults = Faults()
    for now in (0.0, 10.0):
        faults.of_member(BAD, "role", now)
    again = 11.0 + BACK_OFF_FORGOTTEN_S
    faults.of_member(BAD, "role", again - 0.1)
    assert _waits(faults, BAD, again - 0.1 + 3 * BACK_OFF_FIRST_S)
    faults.of_member(BAD, "role", again + BACK_OFF_FORGOTTEN_S + 2)
    assert not _waits(faults, BAD, again + BACK_OFF_FORGOTTEN_S + 2 + BACK_OFF_FIRST_S)


@pytest.mark.parametrize("reason", [*sorted(NO_FAULTS), "signature"])
def test_what_may_happen_to_the_honest_makes_nobody_wait(reason: str) -> None:
    """A slow line, a crowd, an old paper, a run that diverges, a record that somebody changed on the way."""
    faults = Faults()
    faults.of_member(BAD, reason, 0.0)
    assert not _waits(faults, BAD, 0.0)


def test_a_network_of_faults_is_heard_no_more_until_it_was_quiet() -> None:
    """Its whole /24, and nobody elsewhere; a second without a fault lets one caller in again."""
    faults = Faults()
    for _ in range(int(FAULTS_BURST)):
        assert faults.may_call(FAR, 0.0)
        assert _handshake(faults, FAR, 0.0, RemoteProtocolError("signature", "")) == "signature"
    assert not faults.may_call(FAR, 0.0) and not faults.may_call(NEIGHBOUR, 0.0)
    assert _handshake(faults, NEIGHBOUR, 0.0) == "busy"
    assert faults.may_call(ELSEWHERE, 0.0)
    assert faults.may_call(NEIGHBOUR, 1.01 / FAULTS_PER_S)


def test_members_that_should_wait_are_faults_of_their_network() -> None:
    """However many keys they have; an honest neighbour's handshake takes nothing from the rest."""
    faults = Faults()
    for _ in range(int(FAULTS_BURST) - 1):
        assert _handshake(faults, FAR, 0.0, ComesTooSoonError(1.0)) == "busy"
    for _ in range(1000):
        assert _handshake(faults, NEIGHBOUR, 0.0) == ""
        assert _handshake(faults, NEIGHBOUR, 0.0, RemoteProtocolError("credential", "expired")) == "credential"
    assert faults.may_call(FAR, 0.0)
    faults.from_host(FAR, "size", 0.0)
    assert not faults.may_call(FAR, 0.0)


def test_two_hundred_members_of_one_computer_come_back_at_once() -> None:
    """After a server's restart, all in the middle of their handshakes, and after a few dozen faults from there."""
    faults = Faults()
    for _ in range(64):
        faults.from_host(HERE, "decode", 0.0)
    began = [faults.handshake(HERE, 0.0) for _ in range(200)]
    for handshake in began:
        handshake.__enter__()
    assert faults.may_call(HERE, 0.0)
    for handshake in began:
        handshake.__exit__(None, None, None)
    assert LOCAL_FAULTS_BURST >= 200 + 64


def test_what_is_remembered_of_members_is_bounded() -> None:
    """The newest faults count."""
    faults = Faults()
    for number in range(2 * BACK_OFF_NODES_MAX):
        faults.of_member(NodeId(str(number)), "size", 0.0)
    assert len(faults._nodes) == BACK_OFF_NODES_MAX
    assert _waits(faults, NodeId(str(2 * BACK_OFF_NODES_MAX - 1)), 0.1) and not _waits(faults, NodeId("0"), 0.1)
