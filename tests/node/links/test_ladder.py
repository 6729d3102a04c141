"""Which ways are tried when, what is kept, what is left for its figures: on paper, with a clock of its own."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.links.ladder import (
    ATTEMPT_S,
    COORDINATOR_AWAY,
    DIRECT,
    EXPLORE_S,
    HEAD_START_S,
    JUDGE_S,
    PUNCH,
    RELAY_AFTER_S,
    REVERSE,
    SWITCH_PAUSE_S,
    Figures,
    GiveUp,
    Ladder,
    LadderOrder,
    Stop,
    Try,
    Way,
)
from protocol.base.ids import NodeId

P, X, Y = NodeId("p"), NodeId("x"), NodeId("y")
BY_X, BY_Y = Way("relay", X), Way("relay", Y)
HERE = ("203.0.113.1:1",)


class World:
    """Performs orders: each way works or fails after a while, or never says anything."""

    def __init__(self, *, relays: bool = True, can_punch: bool = True) -> None:
        self.ladder = Ladder()
        self.ladder.set_relays({X: ("x:1",), Y: ("y:1",)} if relays else {})
        self.ladder.set_abilities(can_punch=can_punch, reachable=True)
        self.now = 0.0
        self.outcomes: dict[Way, tuple[str, float]] = {}
        """Way -> (ok, fail or silent; seconds until then); fails at once unless named."""
        self.tried: list[tuple[float, Way]] = []
        self.given_up: list[tuple[float, str]] = []
        self.briefs: list[str] = []
        self.running: dict[Way, int] = {}
        self._due: list[tuple[float, int, Way]] = []
        self._number = 0

    def take(self, orders: list[LadderOrder]) -> None:
        self.ladder.check()
        for order in orders:
            match order:
                case Try():
                    assert order.way not in self.running, f"{order.way} is tried twice at once"
                    self.tried.append((round(self.now, 3), order.way))
                    self._number += 1
                    self.running[order.way] = self._number
                    outcome, delay_s = self.outcomes.get(order.way, ("fail", 0.0))
                    if outcome != "silent":
                        heapq.heappush(self._due, (self.now + delay_s, self._number, order.way))
                case Stop():
                    del self.running[order.way]
                case GiveUp():
                    self.given_up.append((round(self.now, 3), order.sentence))
                    self.briefs.append(order.brief)

    def want(self, addresses: tuple[str, ...] = ()) -> None:
        self.take(self.ladder.want(P, addresses, self.now))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(10_000):
            times = [
                time for time in (self.ladder.wake_at(), self._due[0][0] if self._due else None) if time is not None
            ]
            if not times or min(times) > end:
                self.now = end
                return
            self.now = max(self.now, min(times))
            if self._due and self._due[0][0] <= self.now:
                _, number, way = heapq.heappop(self._due)
                if self.running.get(way) != number:
                    continue  # it was stopped
                del self.running[way]
                if self.outcomes[way][0] == "ok" if way in self.outcomes else False:
                    self.take(self.ladder.opened(P, way, self.now))
                else:
                    self.take(self.ladder.failed(P, way, "no", self.now))
            else:
                self.take(self.ladder.wake(self.now))
        raise AssertionError("it never comes to rest")

    def measure(self, figures: Figures, seconds: float) -> None:
        """A figure every second."""
        for _ in range(int(seconds)):
            self.run(1.0)
            self.take(self.ladder.measured(P, figures, self.now))

    @property
    def up(self) -> Way | None:
        return self.ladder.way_of(P)


def test_a_direct_link_is_dialled_at_once_and_nobody_is_bothered() -> None:
    """Up within the head start: no signal, no relay, nothing later."""
    world = World()
    world.outcomes[DIRECT] = ("ok", 0.1)
    world.want(HERE)
    world.run(1000.0)
    assert world.tried == [(0.0, DIRECT)] and world.up == DIRECT and world.ladder.wake_at() is None


def test_without_an_address_all_that_needs_signals_begins_at_once_and_relays_a_little_later() -> None:
    """The order of the ladder, for a peer behind a NAT whom nothing reaches quickly."""
    world = World()
    world.outcomes |= {REVERSE: ("silent", 0), PUNCH: ("silent", 0), BY_X: ("silent", 0), BY_Y: ("silent", 0)}
    world.want()
    world.run(ATTEMPT_S + 1)
    assert [way for _, way in world.tried] == [REVERSE, PUNCH, BY_X, BY_Y]
    assert [at for at, _ in world.tried][:3] == [0.0, 0.0, RELAY_AFTER_S]
    assert [at for at, _ in world.given_up] == [ATTEMPT_S] and world.running == {}
    assert "punch: no outcome in time" in world.given_up[0][1]


def test_a_peer_that_starts_again_is_dialled_while_relays_wait_for_it() -> None:
    """It was reached directly before, refuses, and is back after two and a half seconds, while a relay waits for it
    for five: the link is up with the next dial, a second after the one before. (It was up after 5.4 s.)"""
    world = World(can_punch=False)
    world.outcomes |= {DIRECT: ("ok", 0.0), BY_X: ("fail", 5.0), BY_Y: ("fail", 5.0)}
    world.want(HERE)
    world.run(100.0)
    world.take(world.ladder.fell(P, world.now))
    fell_at, world.tried = world.now, []
    world.outcomes[DIRECT] = ("fail", 0.0)
    world.want(HERE)
    world.run(2.5)
    world.outcomes[DIRECT] = ("ok", 0.0)
    world.run(1.0)
    assert world.up == DIRECT and world.running == {}
    assert [round(at - fell_at, 1) for at, way in world.tried if way == DIRECT] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("known", ["never", "here, and there are no relays", "elsewhere"])
def test_nobody_is_dialled_again_when_nothing_else_is_tried_or_where_he_was_never_reached(known: str) -> None:
    """An attempt ends as soon as no other way is left, whoever asked for it asks again; and an address at which the
    peer was never reached, a stranger's perhaps, is dialled once."""
    world = World(can_punch=False, relays="relays" not in known)
    world.outcomes |= {BY_X: ("fail", 5.0), BY_Y: ("fail", 5.0)}
    if known != "never":
        world.outcomes[DIRECT] = ("ok", 0.0)
        world.want(HERE)
        world.run(100.0)
        world.take(world.ladder.fell(P, world.now))
        world.outcomes[DIRECT] = ("fail", 0.0)
    world.tried = []
    world.want(("203.0.113.2:1",) if known == "elsewhere" else HERE)
    world.run(20.0)
    assert [way for _, way in world.tried].count(DIRECT) == 1 and len(world.given_up) == 1
    assert world.ladder.wake_at() is None


def test_what_fails_makes_room_for_the_next_at_once() -> None:
    """Nothing waits for a clock while nothing runs."""
    world = World(can_punch=False)
    world.outcomes[BY_Y] = ("ok", 0.2)
    world.want(HERE)
    world.run(0.5)
    assert world.up == BY_Y and [way for _, way in world.tried] == [DIRECT, REVERSE, BY_X, BY_Y]


def test_that_the_coordinator_is_away_explains_the_rest() -> None:
    """One line of a terminal for all that needs signals."""
    ladder = Ladder()
    (attempt,) = ladder.want(P, (), 0.0)
    assert isinstance(attempt, Try)
    (given_up,) = ladder.failed(P, attempt.way, COORDINATOR_AWAY, 0.1)
    assert isinstance(given_up, GiveUp) and given_up.brief == "the coordinator is away"


def test_with_no_way_at_all_it_gives_up_at_once_and_says_what_became_of_each() -> None:
    """And the next request starts a new attempt, with the address tried again at once."""
    world = World(relays=False)
    world.want(HERE)
    world.run(0.0)
    assert world.given_up == [(0.0, "direct: no; reverse: no; punch: no")]
    assert world.briefs == ["all 3 ways failed"]
    world.tried.clear()
    world.run(0.1)
    world.want(HERE)
    assert world.tried[0] == (0.1, DIRECT)


def test_a_relay_that_is_there_first_carries_until_the_punch_is() -> None:
    """The punch goes on under the relayed link and takes it over; the other relay is not needed."""
    world = World()
    world.outcomes |= {REVERSE: ("silent", 0), PUNCH: ("ok", 4.0), BY_X: ("ok", 0.5), BY_Y: ("ok", 3.0)}
    world.want()
    world.run(2.0)
    assert world.up == BY_X and PUNCH in world.running
    world.run(3.0)
    assert world.up == PUNCH


def test_a_relayed_link_looks_for_a_better_way_ever_more_rarely() -> None:
    """Each kind, at the waits of EXPLORE_S; relays are not among them."""
    world = World()
    world.outcomes[BY_X] = ("ok", 0.1)
    world.want()
    world.run(1.0)
    up_at = 0.1
    world.tried.clear()
    world.run(EXPLORE_S[0] + EXPLORE_S[1] + 5.0)
    assert world.tried == [
        (up_at + wait_s, way) for wait_s in (EXPLORE_S[0], EXPLORE_S[0] + EXPLORE_S[1]) for way in (REVERSE, PUNCH)
    ]
    world.outcomes[PUNCH] = ("ok", 0.3)
    world.run(EXPLORE_S[2] + 1)
    assert world.up == PUNCH


def test_a_node_that_can_be_dialled_from_now_on_asks_for_it_at_once() -> None:
    """Its router forwards a port: what went through a relay need not wait for the next look at better ways."""
    world = World(can_punch=False)
    world.ladder.set_abilities(can_punch=False, reachable=False)
    world.outcomes[BY_X] = ("ok", 0.1)
    world.want()
    world.run(1.0)
    assert world.up == BY_X
    world.outcomes[REVERSE] = ("ok", 0.2)
    world.ladder.set_abilities(can_punch=False, reachable=True)
    world.run(0.5)
    assert world.up == REVERSE


def test_a_punched_link_that_fell_is_replaced_by_a_relay_without_waiting() -> None:
    """UDP was blocked: the punch is tried again, but the relay has no head start against it."""
    world = World()
    world.outcomes |= {REVERSE: ("fail", 0.0), PUNCH: ("ok", 0.3), BY_X: ("ok", 0.5)}
    world.want()
    world.run(100.0)
    world.outcomes[PUNCH] = ("silent", 0)
    world.take(world.ladder.fell(P, world.now))
    world.tried.clear()
    world.want()
    world.run(1.0)
    assert world.up == BY_X and (world.tried[0][0], BY_X) in world.tried


def test_a_relay_that_died_is_not_the_first_choice_of_the_next_attempt() -> None:
    """The next relay is up within its own time; the dead one comes last."""
    world = World(can_punch=False)
    world.outcomes |= {REVERSE: ("silent", 0), BY_X: ("ok", 0.2), BY_Y: ("ok", 0.2)}
    world.want()
    world.run(50.0)
    first = world.up
    world.outcomes[BY_X] = ("silent", 0)
    world.take(world.ladder.fell(P, world.now))
    world.want()
    world.run(0.3)
    assert first == BY_X and world.up == BY_Y


def test_where_punching_failed_for_others_relays_do_not_wait_for_it() -> None:
    """A network that drops UDP drops it for every peer."""
    world = World()
    world.outcomes |= {REVERSE: ("silent", 0), PUNCH: ("silent", 0)}
    for _ in range(2):
        world.want()
        world.run(ATTEMPT_S)
    world.tried.clear()
    orders = world.ladder.want(NodeId("q"), (), world.now)
    assert BY_X in [order.way for order in orders if isinstance(order, Try)]


def test_a_path_that_carries_nothing_is_replaced_under_the_living_link() -> None:
    """Every other way is opened at once, the failed one anew, too; the first that works takes the link over."""
    world = World()
    world.outcomes |= {REVERSE: ("fail", 0), PUNCH: ("ok", 0.3), BY_X: ("ok", 0.6)}
    world.want()
    world.run(20.0)
    assert world.up == PUNCH
    world.outcomes[PUNCH] = ("silent", 0)
    world.tried.clear()
    world.take(world.ladder.ails(P, world.now))
    assert {way for _, way in world.tried} == {PUNCH, BY_X, BY_Y, REVERSE}
    world.run(1.0)
    assert world.up == BY_X and world.given_up == []


GOOD, POOR = Figures(0.05, 2.5e6), Figures(0.05, 0.4e6)


def test_a_way_that_became_worse_than_another_was_is_left_for_it() -> None:
    """The relay's figures are known from before; the punched link falls below them."""
    world = World()
    world.outcomes |= {REVERSE: ("fail", 0.0), BY_X: ("ok", 0.1), PUNCH: ("fail", 0.0)}
    world.want()
    world.measure(GOOD, 9)
    world.outcomes[PUNCH] = ("ok", 0.1)
    world.run(EXPLORE_S[0])
    assert world.up == PUNCH
    world.measure(GOOD, JUDGE_S + 2)
    assert world.up == PUNCH
    world.measure(POOR, 2)
    assert world.up == BY_X
    world.measure(GOOD, 5 * SWITCH_PAUSE_S)
    assert world.up == BY_X  # and it is not tempted back by a way that was worse


def test_a_switch_that_did_not_help_is_undone_and_not_repeated_soon() -> None:
    """The whole line is slow, so every way is: pauses grow instead of links jumping about."""
    world = World()
    world.outcomes |= {DIRECT: ("ok", 0.05), BY_X: ("ok", 0.1), BY_Y: ("ok", 0.1), PUNCH: ("ok", 0.1)}
    world.want(HERE)
    world.measure(Figures(0.02, 1e7), 20)
    before = len(world.tried)
    world.measure(Figures(0.3, 0.2e6), 300)
    switches = len(world.tried) - before
    assert switches <= 2 * 300 / SWITCH_PAUSE_S and switches >= 1


def test_figures_that_wobble_change_nothing() -> None:
    """A third up and down is what live links do."""
    world = World()
    world.outcomes |= {DIRECT: ("ok", 0.05), BY_X: ("ok", 0.1)}
    world.want(HERE)
    rng = random.Random(5)
    for _ in range(200):
        world.measure(Figures(0.05 * rng.uniform(0.7, 1.4), 2.5e6 * rng.uniform(0.7, 1.4)), 1)
    assert [way for _, way in world.tried] == [DIRECT]


def test_a_peer_that_nobody_wants_any_more_is_left_alone() -> None:
    """Running attempts are stopped, nothing follows."""
    world = World()
    world.outcomes[PUNCH] = ("silent", 0)
    world.want()
    world.take(world.ladder.forget(P))
    world.tried.clear()
    world.run(1000.0)
    assert world.tried == [] and world.running == {} and world.given_up == []


_OUTCOME = st.tuples(st.sampled_from(["ok", "fail", "silent"]), st.floats(0.0, 6.0))


@given(
    outcomes=st.fixed_dictionaries(dict.fromkeys((DIRECT, REVERSE, PUNCH, BY_X, BY_Y), _OUTCOME)),
    known=st.booleans(),
    can_punch=st.booleans(),
    relays=st.booleans(),
    falls=st.lists(st.floats(0.1, 40.0), max_size=4),
    seed=st.integers(0, 9),
)
def test_every_attempt_ends_and_no_way_that_works_is_missed(
    outcomes: dict[Way, tuple[str, float]],
    known: bool,
    can_punch: bool,
    relays: bool,
    falls: list[float],
    seed: int,
) -> None:
    """A link or a sentence within ATTEMPT_S; whenever some way would work in time, a link, and soon."""
    world = World(relays=relays, can_punch=can_punch)
    world.outcomes = outcomes
    usable = [REVERSE, *((DIRECT,) if known else ()), *((PUNCH,) if can_punch else ())]
    usable += [BY_X, BY_Y] if relays else []
    quickest_s = min((outcomes[way][1] for way in usable if outcomes[way][0] == "ok"), default=None)
    rng = random.Random(seed)
    for fall_s in (*falls, 0.0):
        world.given_up.clear()
        world.want(HERE if known else ())
        begun = world.now
        world.run(ATTEMPT_S)
        assert (world.up is not None) == (not world.given_up), "neither a link nor a word, or both"
        if quickest_s is not None and quickest_s < 2.0:
            assert world.up is not None, f"{world.tried} since {begun}"
        for _ in range(int(fall_s)):
            world.run(1.0)
            figures = Figures(rng.uniform(0.001, 1.0), rng.choice([None, rng.uniform(1e4, 1e8)]))
            if world.up is not None:
                world.take(world.ladder.measured(P, figures, world.now))
        if world.up is not None:
            world.take(world.ladder.fell(P, world.now))
            assert world.running == {}


@pytest.mark.parametrize("known", [True, False])
def test_a_link_by_relay_is_up_within_two_seconds_where_nothing_else_works(known: bool) -> None:
    """Behind a firewall that passes only TCP, with UDP lost in silence."""
    world = World()
    world.outcomes |= {DIRECT: ("silent", 0), REVERSE: ("silent", 0), PUNCH: ("silent", 0), BY_X: ("ok", 0.4)}
    world.want(HERE if known else ())
    world.run(HEAD_START_S + RELAY_AFTER_S + 0.4)
    assert world.up == BY_X
