"""Which ways to a peer are tried, in what order, side by side, and which one is kept. A machine: facts in, orders out.

    direct   we dial the peer by TCP                  at once, when an address is known
    reverse  the peer is asked to dial us             when nothing has come of that for a moment, or at once
    punch    both open their NATs for UDP             together with reverse
    relay    through a server of the run              a little later; at once where the others failed before

The first that works carries the link. One that is there later and usually better takes it over; from then on measured
figures decide: a way that has become worse than what another one gave before is left for that one, and when that does
not help it is gone back to, with ever longer pauses (transport.md, section 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.base.ids import NodeId

HEAD_START_S = 0.3
"""Of a direct connection over everything that takes signals: most are up by then, and nobody is bothered."""
RELAY_AFTER_S = 1.2
"""Of punching over relays: a punch that works takes 0.05 to 0.5 s."""
NEXT_RELAY_S = 1.5
"""Between two relays that are tried side by side."""
RELAYS_TRIED_MAX = 4
"""In one attempt: each costs the peer a connection."""
ATTEMPT_S = 9.0
"""Until an attempt is given up; below the 10 s after which the node's machine asks again."""
BACK_OFF_S = {
    "direct": (0.0,),
    "reverse": (0.0, 0.0, 2.0, 5.0),
    "punch": (0.0, 3.0, 10.0, 30.0, 60.0),
    "relay": (1.0, 3.0, 10.0, 30.0),
}
"""How long a way that failed so many times in a row is tried last. A dial costs nothing, so it never waits."""
REDIAL_S = 1.0
"""A peer that was reached at these addresses before, and refuses, is most likely starting again, which takes two to
three seconds; a relay waits five for it, and nobody dialled meanwhile: a stage stood for 5.8 s when its server was
killed. Where nobody has proven to be the peer, others may have named a stranger's address: that is dialled once."""
EXPLORE_S = (10.0, 30.0, 120.0, 600.0)
"""Waits of a relayed link before the ways that spare the relay are tried again."""
JUDGE_S = 8.0
"""After a switch, until the new way's figures count: buffers fill, windows open."""
SWITCH_PAUSE_S = 30.0
"""Between two switches for figures' sake; doubled with every one that had to be undone."""
SWITCH_PAUSE_MAX_S = 3600.0
WORSE = 1.5
"""A way is left when it costs so much more than another one gave: figures of live links wobble by a third."""
DEGRADED = 4.0
"""A way that costs so much more than its own best is left for one that nobody has measured."""
FIGURES_S = 600.0
"""Age at which another way's figures say nothing any more."""
TYPICAL_BYTES = 1_000_000.0
"""What a way is judged by: the time for a message of this size, so that round trip and rate both count."""
TYPICAL_BYTES_PER_S = 2_500_000.0
"""20 Mbit/s: where no rate was measured."""
COORDINATOR_AWAY = "the coordinator, which carries signals, is away"
"""Why a way that needs the peer's word comes to nothing just now."""


class Way(NamedTuple):
    """One way to a peer."""

    kind: str
    """direct, reverse, punch or relay"""
    via: NodeId = NodeId("")
    """The relay."""

    def __str__(self) -> str:
        return f"relay {self.via[:8]}" if self.kind == "relay" else self.kind


DIRECT, REVERSE, PUNCH = Way("direct"), Way("reverse"), Way("punch")
_RANK = {"direct": 0, "reverse": 0, "punch": 1, "relay": 2}
"""What is usually better, before anything is measured."""


class Figures(NamedTuple):
    """What a link was seen to give."""

    round_trip_s: float
    bytes_per_s: float | None = None
    """None: too little went through to tell."""

    @property
    def cost_s(self) -> float:
        """Time for a typical message."""
        return self.round_trip_s + TYPICAL_BYTES / (self.bytes_per_s or TYPICAL_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class Try:
    """Open a link this way. Answered by `opened` or `failed`, once, unless `Stop` comes first."""

    peer: NodeId
    way: Way
    addresses: tuple[str, ...]
    """Of the peer, or of the relay; empty for the other ways."""
    switch: bool
    """A link is up: it is to be taken over by the new one."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a `Try`; nothing is to be said about it any more."""

    peer: NodeId
    way: Way


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No way led to the peer; `sentence` says what became of each, `brief` the same for a line of a terminal."""

    peer: NodeId
    sentence: str
    brief: str


LadderOrder = Try | Stop | GiveUp


@dataclass(slots=True)
class _Memory:
    """What is remembered of one way to one peer."""

    failures: int = 0
    not_before: float = -math.inf
    worked_at: float = -math.inf
    figures: Figures | None = None
    figures_at: float = -math.inf
    best_cost_s: float = math.inf

    def fresh_cost_s(self, now: float) -> float | None:
        """What it cost lately, or None."""
        return self.figures.cost_s if self.figures is not None and now - self.figures_at <= FIGURES_S else None


@dataclass(slots=True)
class _Peer:
    """One peer that a link is wanted to."""

    addresses: tuple[str, ...] = ()
    up: Way | None = None
    up_at: float = 0.0
    running: dict[Way, bool] = field(default_factory=dict)
    """Way -> whether it is to take over a link."""
    planned: list[tuple[float, Way]] = field(default_factory=list)
    """What follows in the present attempt, by time."""
    ends_at: float | None = None
    """Of the present attempt; None: there is none, or the link is up."""
    reached: tuple[str, ...] = ()
    """The addresses at which it was dialled last with success."""
    redial_at: float | None = None
    """When it is dialled once more in the present attempt, if other ways are still tried."""
    reasons: dict[Way, str] = field(default_factory=dict)
    memory: dict[Way, _Memory] = field(default_factory=dict)
    explored: int = 0
    explore_at: float | None = None
    left: Way | None = None
    """The way that was left for its figures, until the new one is judged."""
    left_cost_s: float = math.inf
    switch_pause_s: float = SWITCH_PAUSE_S
    switch_after: float = -math.inf

    def of(self, way: Way) -> _Memory:
        return self.memory.setdefault(way, _Memory())


class Ladder:
    """All peers of one node."""

    def __init__(self) -> None:
        self._peers: dict[NodeId, _Peer] = {}
        self._relays: dict[NodeId, tuple[str, ...]] = {}
        self._can_punch = False
        self._reachable = False
        self._punches_failed = 0
        """In a row, to whomever: a network that drops UDP drops it for all."""

    # ---- facts ---------------------------------------------------------------------------------------------------

    def set_relays(self, relays: dict[NodeId, tuple[str, ...]]) -> None:
        """Servers that may carry a link, with their addresses, best first."""
        self._relays = {node: addresses for node, addresses in relays.items() if addresses}

    def set_abilities(self, *, can_punch: bool, reachable: bool) -> None:
        """`reachable`: this node can name an address at which it may be dialled."""
        news = reachable and not self._reachable
        self._can_punch, self._reachable = can_punch, reachable
        for state in self._peers.values():
            if news and state.explore_at is not None:
                state.explore_at = -math.inf  # peers can dial us from now on, so no relay need go on

    def want(self, peer: NodeId, addresses: tuple[str, ...], now: float) -> list[LadderOrder]:
        """A link is to be opened. Nothing happens while one is up or an attempt goes on."""
        state = self._peers.setdefault(peer, _Peer())
        state.addresses = addresses
        if state.up is not None or state.ends_at is not None:
            return []
        state.ends_at = now + ATTEMPT_S
        state.reasons = {}
        state.planned = self._plan(peer, state, now)
        return self._go_on(peer, state, now)

    def forget(self, peer: NodeId) -> list[LadderOrder]:
        """Nobody wants a link to this peer any more; what was learnt of it stays."""
        state = self._peers.get(peer)
        if state is None:
            return []
        orders = self._stop(peer, state)
        state.up = state.ends_at = state.redial_at = state.explore_at = state.left = None
        state.planned = []
        return orders

    def failed(self, peer: NodeId, way: Way, reason: str, now: float) -> list[LadderOrder]:
        """A `Try` came to nothing."""
        state = self._peers[peer]
        if way not in state.running:
            return []
        switch = state.running.pop(way)
        self._remember_failure(state, way, now)
        state.reasons[way] = reason
        if way == PUNCH:
            self._punches_failed += 1
        if switch and way.kind != "relay":
            self._explore_later(state, now)
        if way == DIRECT and state.ends_at is not None and state.addresses == state.reached:
            state.redial_at = now + REDIAL_S
        return self._go_on(peer, state, now)

    def opened(self, peer: NodeId, way: Way, now: float) -> list[LadderOrder]:
        """The link is up this way. Also said of links that the peer opened without being asked (`REVERSE`)."""
        state = self._peers.setdefault(peer, _Peer())
        state.running.pop(way, None)
        memory = state.of(way)
        memory.failures, memory.not_before, memory.worked_at = 0, -math.inf, now
        if way == PUNCH:
            self._punches_failed = 0
        if way == DIRECT:
            state.reached = state.addresses
        state.up, state.up_at = way, now
        state.ends_at, state.redial_at, state.planned = None, None, []
        orders: list[LadderOrder] = []
        for other in list(state.running):
            if _RANK[other.kind] < _RANK[way.kind]:
                state.running[other] = True  # it may still take over
            else:
                del state.running[other]
                orders.append(Stop(peer, other))
        state.explore_at = None
        if _RANK[way.kind] == 0:
            state.explored = 0
        elif not state.running:
            self._explore_later(state, now)
        return orders

    def fell(self, peer: NodeId, now: float) -> list[LadderOrder]:
        """The link is gone. Whoever wants it back says so with `want`."""
        state = self._peers.get(peer)
        if state is None or state.up is None:
            return []
        way, state.up = state.up, None
        if now - state.up_at < ATTEMPT_S or way.kind != "direct":
            # It broke as soon as it was there, or what it leaned on is gone: a mapping, a relay.
            self._remember_failure(state, way, now)
        state.explore_at = state.left = None
        return self._stop(peer, state)

    def ails(self, peer: NodeId, now: float) -> list[LadderOrder]:
        """The path of the link carries nothing; the link lives on for a moment, and moves to whatever opens."""
        state = self._peers.get(peer)
        if state is None or state.up is None:
            return []
        self._remember_failure(state, state.up, now)
        state.left = state.explore_at = None
        ways = [DIRECT] if state.addresses else []
        ways += [PUNCH] if self._can_punch else []
        relays = sorted((Way("relay", node) for node in self._relays if node != peer), key=lambda way: way == state.up)
        ways += relays[:2]
        orders: list[LadderOrder] = []
        for way in (*ways, REVERSE):
            # The present way, too, may be opened anew: a relay that was started again, a new mapping of the gateway.
            if way not in state.running:
                orders += self._switch(peer, state, way)
        return orders

    def measured(self, peer: NodeId, figures: Figures, now: float) -> list[LadderOrder]:
        """Live figures of the link that is up."""
        state = self._peers.get(peer)
        if state is None or state.up is None or now - state.up_at < JUDGE_S:
            return []
        way, memory = state.up, state.of(state.up)
        memory.figures, memory.figures_at = figures, now
        memory.best_cost_s = min(memory.best_cost_s, figures.cost_s)
        if state.left is not None:
            left, cost_s, state.left = state.left, state.left_cost_s, None
            if figures.cost_s > cost_s and left != way:
                # It did not help, so back, and longer patience from now on.
                state.switch_pause_s = min(SWITCH_PAUSE_MAX_S, 2 * state.switch_pause_s)
                state.switch_after = now + state.switch_pause_s
                return self._switch(peer, state, left)
            state.switch_pause_s = SWITCH_PAUSE_S
            return []
        if now < state.switch_after or any(state.running.values()):
            return []
        rival = self._rival(peer, state, figures.cost_s, now)
        if rival is None:
            return []
        state.left, state.left_cost_s = way, figures.cost_s
        state.switch_after = now + state.switch_pause_s
        return self._switch(peer, state, rival)

    # ---- time ----------------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        """When something is due."""
        times: list[float] = []
        for state in self._peers.values():
            times += [time for time in (state.ends_at, state.redial_at, state.explore_at) if time is not None]
            if state.planned:
                times.append(state.planned[0][0])
        return min(times, default=None)

    def wake(self, now: float) -> list[LadderOrder]:
        orders: list[LadderOrder] = []
        for peer, state in self._peers.items():
            if state.explore_at is not None and now >= state.explore_at:
                state.explore_at = None
                orders += self._explore(peer, state, now)
            if state.ends_at is not None:
                orders += self._go_on(peer, state, now)
        return orders

    def way_of(self, peer: NodeId) -> Way | None:
        """The way of the link that is up."""
        state = self._peers.get(peer)
        return None if state is None else state.up

    def knows(self, peer: NodeId) -> bool:
        """Whether a link to this peer was ever wanted."""
        return peer in self._peers

    def is_running(self, peer: NodeId, way: Way) -> bool:
        """Whether a `Try` still counts."""
        state = self._peers.get(peer)
        return state is not None and way in state.running

    def takes_over(self, peer: NodeId, way: Way) -> bool:
        """Whether a way that is being tried shall take over a link that is up by now."""
        state = self._peers.get(peer)
        return state is not None and state.running.get(way, False)

    def check(self) -> None:
        """Raises if an invariant is broken."""
        for peer, state in self._peers.items():
            assert state.up is None or state.ends_at is None, f"{peer}: an attempt goes on under a link"
            assert state.ends_at is not None or not state.planned, f"{peer}: something is planned for nobody"
            assert state.ends_at is not None or state.redial_at is None, f"{peer}: somebody is dialled for nobody"
            assert state.up is not None or not any(state.running.values()), f"{peer}: nothing to take over"
            assert state.ends_at is None or state.planned or state.running, f"{peer}: an attempt waits for nothing"
            assert all(way.via != peer for way in state.running), f"{peer}: relayed through itself"

    # ---- the present attempt -------------------------------------------------------------------------------------

    def _plan(self, peer: NodeId, state: _Peer, now: float) -> list[tuple[float, Way]]:
        """What to try when. Ways that failed lately come last, but they come: everything else may fail too."""
        plan: list[tuple[float, Way]] = []
        # A peer that was never reached directly, though its address was known, is not waited for.
        hopeless = state.of(DIRECT).failures > 0 and state.of(DIRECT).worked_at == -math.inf
        signalled_at = now + (HEAD_START_S if state.addresses and not hopeless else 0.0)
        if state.addresses:
            plan.append((now, DIRECT))
        plan.append((signalled_at, REVERSE))
        punch_hopes = self._can_punch and state.of(PUNCH).not_before <= now
        if self._can_punch:
            plan.append((signalled_at if punch_hopes else signalled_at + RELAY_AFTER_S, PUNCH))
        relays = sorted(
            (Way("relay", node) for node in self._relays if node != peer),
            key=lambda way: (state.of(way).not_before > now, -state.of(way).worked_at, state.of(way).failures),
        )
        trusted = punch_hopes and self._punches_failed < 2 and state.of(PUNCH).failures == 0
        first_at = signalled_at + (RELAY_AFTER_S if trusted else 0.0)
        for place, way in enumerate(relays[:RELAYS_TRIED_MAX]):
            plan.append((first_at + place * NEXT_RELAY_S, way))
        return sorted(plan, key=lambda item: item[0])

    def _go_on(self, peer: NodeId, state: _Peer, now: float) -> list[LadderOrder]:
        """Starts what is due, or next when nothing runs; ends the attempt when nothing is left."""
        orders: list[LadderOrder] = []
        if state.ends_at is None:
            return orders
        if now >= state.ends_at:
            for way in list(state.running):
                state.reasons.setdefault(way, "no outcome in time")
                self._remember_failure(state, way, now)
                if way == PUNCH:
                    self._punches_failed += 1
            orders += self._stop(peer, state)
            state.planned = []
        while state.planned and (state.planned[0][0] <= now or not state.running):
            _, way = state.planned.pop(0)
            if way not in state.running:
                state.running[way] = False
                orders.append(self._try(peer, state, way))
        if state.running and state.redial_at is not None and now >= state.redial_at:
            state.redial_at = None
            if DIRECT not in state.running:
                state.running[DIRECT] = False
                orders.append(self._try(peer, state, DIRECT))
        if not state.running:
            state.ends_at = state.redial_at = None
            told = "; ".join(f"{way}: {reason}" for way, reason in state.reasons.items())
            orders.append(GiveUp(peer, told or "no way to the peer is known", _in_brief(list(state.reasons.values()))))
        return orders

    def _try(self, peer: NodeId, state: _Peer, way: Way) -> Try:
        addresses = state.addresses if way == DIRECT else self._relays.get(way.via, ())
        return Try(peer, way, addresses, state.running[way])

    def _stop(self, peer: NodeId, state: _Peer) -> list[LadderOrder]:
        orders: list[LadderOrder] = [Stop(peer, way) for way in state.running]
        state.running.clear()
        return orders

    def _remember_failure(self, state: _Peer, way: Way, now: float) -> None:
        memory, waits = state.of(way), BACK_OFF_S[way.kind]
        memory.not_before = now + waits[min(memory.failures, len(waits) - 1)]
        memory.failures += 1

    # ---- better ways ---------------------------------------------------------------------------------------------

    def _explore_later(self, state: _Peer, now: float) -> None:
        """The link is up by a way that others may beat."""
        if state.up is not None and state.up.kind == "relay":
            state.explore_at = now + EXPLORE_S[min(state.explored, len(EXPLORE_S) - 1)]

    def _explore(self, peer: NodeId, state: _Peer, now: float) -> list[LadderOrder]:
        """Tries the ways that spare the relay, unless their figures were worse."""
        state.explored += 1
        present = state.of(state.up).fresh_cost_s(now) if state.up is not None else None
        orders: list[LadderOrder] = []
        for way in (*((DIRECT,) if state.addresses else ()), REVERSE, *((PUNCH,) if self._can_punch else ())):
            known = state.of(way).fresh_cost_s(now)
            if way in state.running or (known is not None and present is not None and known > present):
                continue
            orders += self._switch(peer, state, way)
        if not orders:
            self._explore_later(state, now)
        return orders

    def _rival(self, peer: NodeId, state: _Peer, cost_s: float, now: float) -> Way | None:
        """A way that is worth leaving the present one for, or None."""
        known = [
            (memory.figures.cost_s, way)
            for way, memory in state.memory.items()
            if way != state.up and memory.figures is not None and self._usable(peer, state, way, now)
        ]
        if known:
            best_s, way = min(known)
            if best_s * WORSE < cost_s and now - state.memory[way].figures_at <= FIGURES_S:
                return way
        assert state.up is not None
        if cost_s < DEGRADED * state.of(state.up).best_cost_s:
            return None
        candidates = [DIRECT, PUNCH, *(Way("relay", node) for node in self._relays)]
        usable = [way for way in candidates if way != state.up and self._usable(peer, state, way, now)]
        return min(usable, key=lambda way: (state.of(way).failures, _RANK[way.kind]), default=None)

    def _usable(self, peer: NodeId, state: _Peer, way: Way, now: float) -> bool:
        if state.of(way).not_before > now or way.via == peer or way in state.running:
            return False
        match way.kind:
            case "direct":
                return bool(state.addresses)
            case "punch":
                return self._can_punch
            case "relay":
                return way.via in self._relays
        return self._reachable

    def _switch(self, peer: NodeId, state: _Peer, way: Way) -> list[LadderOrder]:
        state.running[way] = True
        return [self._try(peer, state, way)]


def _in_brief(reasons: list[str]) -> str:
    """What ways have failed for, in few words."""
    if any(reason == COORDINATOR_AWAY for reason in reasons):
        return "the coordinator is away"
    if len(reasons) > 1:
        return f"all {len(reasons)} ways failed"
    return reasons[0] if reasons else "no way to the peer is known"
