"""What a relaying server takes, whom it brings together, and when it says no."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.links.relay.relay_desk import REFUSED_FOR, Cut, Refuse, RelayDesk, RelayLimits, RelayOrder, Splice
from protocol.base.ids import NodeId
from protocol.link.relay import REFUSALS

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")
MEETING, OTHER = b"m" * 16, b"o" * 16
DAY_S = 86400.0


def test_two_members_with_one_meeting_number_are_spliced() -> None:
    """The first waits; a third, or the same node again, does not get in."""
    desk = RelayDesk(RelayLimits(), 0.0)
    assert desk.arrive(1, A, MEETING, 0.0) == []
    assert desk.arrive(2, A, MEETING, 0.0) == [Refuse(2, "taken")]
    assert desk.arrive(3, B, MEETING, 1.0) == [Splice(1, (1, 3))]
    assert desk.arrive(4, C, MEETING, 1.0) == [Refuse(4, "taken")]
    desk.left(1)
    assert desk.session_count == 0


def test_who_waits_in_vain_is_told_so() -> None:
    """After `wait_s`; the meeting is free again."""
    desk = RelayDesk(RelayLimits(wait_s=5.0), 0.0)
    desk.arrive(1, A, MEETING, 0.0)
    assert desk.wake_at() == 5.0 and desk.wake(4.9) == []
    assert desk.wake(5.0) == [Refuse(1, "alone")] and desk.wake_at() is None
    assert desk.arrive(2, B, MEETING, 6.0) == []


def test_each_bound_has_its_name() -> None:
    """Sessions, one node's share, what waits, the total, the end."""
    desk = RelayDesk(RelayLimits(sessions_max=1, node_sessions_max=1, waiting_max=1), 0.0)
    assert desk.arrive(1, A, MEETING, 0.0) == []
    assert desk.arrive(2, A, OTHER, 0.0) == [Refuse(2, "full")]  # nobody else may wait
    desk.arrive(3, B, MEETING, 0.0)
    assert desk.arrive(4, C, OTHER, 0.0) == [Refuse(4, "full")]
    shared = RelayDesk(RelayLimits(node_sessions_max=1), 0.0)
    shared.arrive(1, A, MEETING, 0.0)
    assert shared.arrive(2, A, OTHER, 0.0) == [Refuse(2, "busy")]
    assert shared.end() == [Refuse(1, "ending")]
    assert shared.arrive(3, B, OTHER, 0.0) == [Refuse(3, "ending")]


def test_a_quota_that_is_used_up_ends_every_session_and_takes_no_other() -> None:
    """What the owner gave away is used up: by name, at once."""
    desk = RelayDesk(RelayLimits(quota_bytes=100), 0.0)
    desk.arrive(1, A, MEETING, 0.0)
    desk.arrive(2, B, MEETING, 0.0)
    desk.move(1, 99, 0.0)
    assert desk.spent() == []
    desk.move(1, 1, 0.0)
    assert desk.spent() == [Cut(1, "quota")]
    assert desk.arrive(3, C, OTHER, 0.0) == [Refuse(3, "quota")]
    nothing = RelayDesk(RelayLimits(quota_bytes=0), 0.0)
    assert nothing.arrive(1, A, MEETING, 1e9) == [Refuse(1, "quota")]


def test_a_quota_grows_back_and_legs_are_taken_again_without_a_restart() -> None:
    """A day's share first, so that no session is cut as soon as it is there; in a month all of it, and never more."""
    desk = RelayDesk(RelayLimits(quota_bytes=30e9), 0.0)
    desk.move(1, 30 * 10**9, 0.0)
    assert desk.arrive(1, A, MEETING, 0.9 * DAY_S) == [Refuse(1, "quota")]
    assert desk.arrive(2, A, MEETING, 1.01 * DAY_S) == []
    assert desk.arrive(3, B, MEETING, 1.01 * DAY_S) == [Splice(2, (2, 3))]
    desk.move(2, 10**9, 1.01 * DAY_S)
    assert desk.spent() == []
    desk.move(2, 10**9, 1.01 * DAY_S)
    assert desk.spent() == [Cut(2, "quota")]
    desk.left(2)
    desk.move(2, 29 * 10**9, 100 * DAY_S)
    assert desk.spent() == [] and desk.arrive(4, A, MEETING, 100 * DAY_S) == []
    desk.move(2, 10**9, 100 * DAY_S)
    assert desk.arrive(5, C, OTHER, 100 * DAY_S) == [Refuse(5, "quota")]


def test_a_volunteer_that_is_relayed_for_months_uses_up_no_server() -> None:
    """As many bytes as come back, a minute's at a time, for a year: nothing is ever refused or cut."""
    desk = RelayDesk(RelayLimits(), 0.0)
    desk.arrive(1, A, MEETING, 0.0)
    desk.arrive(2, B, MEETING, 0.0)
    for hour in range(365 * 24):
        desk.move(1, int(3600 * 386e3), 3600.0 * hour)
        assert desk.spent() == []


def test_bytes_wait_so_that_the_rate_holds() -> None:
    """A burst passes at once; over a long time it is the rate, whatever the size of the pieces."""
    desk = RelayDesk(RelayLimits(bytes_per_s=1000.0, burst_bytes=500.0), 0.0)
    assert desk.move(1, 500, 0.0) == 0.0
    now = 0.0
    for _ in range(100):
        now += desk.move(1, 77, now)
    assert abs(now - 7.7) < 1e-6


def pair(desk: RelayDesk, number: int, networks: tuple[str, str], now: float = 0.0) -> list[RelayOrder]:
    """What the desk orders when the second leg of a session comes; the legs are `2 * number` and the one after it."""
    meeting = number.to_bytes(16, "big")
    for side, network in enumerate(networks):
        orders = desk.arrive(2 * number + side, NodeId(f"{number}-{side}"), meeting, now, network)
        desk.check()
    return orders


def spliced(number: int) -> Splice:
    return Splice(2 * number, (2 * number, 2 * number + 1))


def test_who_holds_every_session_from_one_network_gives_one_to_another_network() -> None:
    """Sixteen members of one house, or thousands: what is used least goes, and none of theirs comes in its place."""
    desk = RelayDesk(RelayLimits(), 0.0)
    for number in range(64):
        assert pair(desk, number, ("house", "house")) == [spliced(number)]
        desk.move(2 * number, 5 if number == 40 else 1000, 1.0)
    assert desk.arrive(128, A, MEETING, 1.0, "house") == [Refuse(128, "full")]
    assert pair(desk, 65, ("", "street"), 2.0) == [Cut(80, "full"), spliced(65)]
    assert desk.session_count == 64 and pair(desk, 66, ("street", "house"), 3.0) == [Refuse(133, "full")]
    desk.left(80)  # the caller has cut it by now
    assert desk.session_count == 64


def test_what_a_session_moved_long_ago_does_not_count() -> None:
    """A burst at the beginning and silence since, beside a little all the time: the silent one goes."""
    desk = RelayDesk(RelayLimits(sessions_max=3), 0.0)
    for number in range(3):
        pair(desk, number, ("house", ""))
        desk.move(2 * number, 10**9 if number == 1 else 1000, 0.0)
    for minute in range(1, 5):
        desk.move(0, 10, 60.0 * minute)
        desk.move(4, 10, 60.0 * minute)
    assert pair(desk, 3, ("street", ""), 241.0) == [Cut(2, "full"), spliced(3)]


def test_networks_with_equal_shares_leave_each_other_alone() -> None:
    """Else they would cut each other for ever; and servers' own sessions are of no network, so nobody cuts those."""
    desk = RelayDesk(RelayLimits(sessions_max=3), 0.0)
    pair(desk, 0, ("house", ""))
    pair(desk, 1, ("house", ""))
    pair(desk, 2, ("street", ""))
    assert pair(desk, 3, ("", "street")) == [Refuse(7, "full")]
    assert pair(desk, 4, ("farm", ""), 6.0) == [Cut(0, "full"), spliced(4)]
    assert pair(desk, 5, ("", "mill"), 12.0) == [Refuse(11, "full")]
    own = RelayDesk(RelayLimits(sessions_max=2), 0.0)
    pair(own, 0, ("", ""))
    pair(own, 1, ("", ""))
    assert own.arrive(4, C, MEETING, 0.0, "street") == [Refuse(4, "full")]


def test_a_leg_that_waits_gives_way_to_another_networks_as_well() -> None:
    """One network calls and calls: the leg of it that has waited longest goes, and its own next one gets no place."""
    desk = RelayDesk(RelayLimits(), 0.0)
    for leg in range(64):
        assert desk.arrive(leg, NodeId(f"n{leg}"), bytes([leg]) * 16, 0.0, "house") == []
    assert desk.arrive(64, A, b"a" * 16, 1.0, "house") == [Refuse(64, "full")]
    assert desk.arrive(65, B, b"b" * 16, 1.0, "street") == [Refuse(0, "full")]
    desk.check()
    assert desk.arrive(66, C, b"b" * 16, 1.0) == [Splice(65, (65, 66))]


def test_every_reason_has_a_byte_on_the_wire() -> None:
    """The desk's words are those of the protocol, in the protocol's order."""
    assert ("", *REFUSED_FOR) == REFUSALS


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from([A, B, C, D]), st.integers(0, 5)),
        st.tuples(st.just("left"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("move"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("pass"), st.integers(0, 7), st.just(0)),
    ),
    max_size=40,
)


_NETWORKS = {A: "house", B: "house", C: "street", D: ""}


@given(_STEPS)
def test_whatever_comes_every_leg_is_answered_once_and_no_bound_is_passed(steps: list[tuple[str, object, int]]) -> None:
    """Each leg is spliced, refused, gone, or waits with a time at which that ends."""
    desk = RelayDesk(RelayLimits(3, 2, 3, 5.0, 10.0, 50.0, 500.0), 0.0)
    now, leg, open_legs, sessions = 0.0, 0, set[int](), set[int]()
    for kind, value, meeting in steps:
        orders = []
        if kind == "arrive":
            assert isinstance(value, str)
            leg += 1
            open_legs.add(leg)
            orders = desk.arrive(leg, NodeId(value), bytes([meeting]) * 16, now, _NETWORKS[NodeId(value)])
        elif kind == "left":
            assert isinstance(value, int)
            desk.left(value)
            open_legs.discard(value)
            sessions.discard(value)
        elif kind == "move":
            assert isinstance(value, int)
            assert desk.move(value // 2, value, now) >= 0.0
            orders = desk.spent()
        else:
            assert isinstance(value, int)
            now += value
            orders = desk.wake(now)
        for order in orders:
            if isinstance(order, Refuse):
                open_legs.remove(order.leg)  # raises when it was answered before
            elif isinstance(order, Splice):
                open_legs -= set(order.legs)
                sessions.add(order.session)
            else:
                assert order.session in sessions
                sessions -= {order.session} if order.reason == "full" else set()  # that one is over at once
        desk.check()
        assert desk.session_count == len(sessions)
        assert bool(open_legs) == (desk.wake_at() is not None)
