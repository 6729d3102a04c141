"""Which links a node should have: whom it dials, when again, and when a silent one counts as gone.

Of two servers the one with the smaller id dials; a volunteer dials every server of its stage; everybody dials the
coordinator. Whoever is quiet for `ping_s` is asked, whoever is silent for `silent_s` is hung up on. Silent *paths* are
the transport's affair (`protocol.drive.link`): it knows sooner, and may mend the link before this gives up the peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf

from node.machine.outbox import Outbox
from protocol.base.ids import NodeId
from protocol.base.machine import Dial, HangUp
from protocol.messages import Ping

BACKOFF_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0)
"""Wait before each further attempt; the last one repeats. A server that restarts is back within seconds."""
LIVED_S = 10.0
"""A link that was up for less counts as one more failed attempt: a peer that takes calls and hangs up is no better than
one that does not answer."""
DIAL_TIMEOUT_S = 10.0
"""An attempt without an outcome for so long is made again: the driver's own limit (9 s) has failed."""

AGAIN_S = 1.0
"""A link that was hung up on for its silence and is still there is looked at again: what came of a tensor kept it, and
may have been the last of it."""


@dataclass(slots=True)
class _Wanted:
    """A peer that this node keeps a link to."""

    addresses: tuple[str, ...]
    we_dial: bool
    number: int
    """Order in which they came to be wanted; of those that are due together the first is dialled first."""
    attempts: int = 0
    dial_at: float | None = None
    dialling_since: float | None = None
    up_since: float | None = None


class Links:
    """The part of a node that decides about links. Facts in, `Dial` and `HangUp` out."""

    def __init__(self, out: Outbox, ping_s: float, silent_s: float, asks: bool = True) -> None:
        """`asks`: as in `NodeFacts`."""
        self._out = out
        self._asks = asks
        self._ping_s, self._silent_s = (ping_s, silent_s) if asks else (inf, inf)
        self._wanted: dict[NodeId, _Wanted] = {}
        self._heard: dict[NodeId, float] = {}
        """When something last came, for every live link."""
        self._up_number: dict[NodeId, int] = {}
        """In which order the live links came up; who is due together is asked in this order."""
        self._pinged: dict[NodeId, float] = {}
        self._ping_number = 0
        self._numbers = 0
        self._alarms: list[tuple[float, NodeId]] = []
        """A heap: for every peer of which something may be due one entry, never later than that is. A server has
        thousands of links, and nearly all alarms are put off by what comes in: an entry is only looked at when it is
        the first."""
        self._alarm_of: dict[NodeId, float] = {}
        """The entry of each peer that counts; others of it in the heap are void."""
        self._due: float | None = None
        """When something is to be done at the earliest; it may be too early, never too late."""
        self._due_known = True

    def set_limits(self, ping_s: float, silent_s: float) -> None:
        if not self._asks:
            return
        self._ping_s, self._silent_s = ping_s, silent_s
        self._due_known = False
        for peer in self._heard:
            self._set_alarm(peer)

    def want(self, peers: dict[NodeId, tuple[tuple[str, ...], bool]], now: float) -> None:
        """Keeps links to exactly these: peer -> (addresses, whether we dial). Others are hung up on."""
        self._due_known = False
        for peer in [peer for peer in self._wanted if peer not in peers]:
            del self._wanted[peer]
            if peer in self._heard:
                self._out.add(HangUp(peer, "not needed any more"))
        for peer, (addresses, we_dial) in peers.items():
            known = self._wanted.get(peer)
            if known is None:
                self._wanted[peer] = _Wanted(addresses, we_dial, self._next_number())
                if we_dial and peer not in self._heard:
                    self._dial(peer, now)
            else:
                known.addresses, known.we_dial = addresses, we_dial
                if we_dial and peer not in self._heard and known.dial_at is None and known.dialling_since is None:
                    self._dial(peer, now)

    def _soon(self, at: float) -> None:
        """Something more is due then. Not to look at all links for each that opens or ends matters where they are
        hundreds."""
        if self._due_known:
            self._due = at if self._due is None else min(self._due, at)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def up(self, peer: NodeId, now: float) -> None:
        self._soon(now + self._ping_s)
        if peer not in self._heard:
            self._up_number[peer] = self._next_number()
        self._heard[peer] = now
        self._pinged.pop(peer, None)
        wanted = self._wanted.get(peer)
        if wanted is not None:
            wanted.dial_at, wanted.dialling_since, wanted.up_since = None, None, now
        self._set_alarm(peer)

    def down(self, peer: NodeId, now: float) -> None:
        """A link is gone, or an attempt has failed: try again after a while."""
        self._heard.pop(peer, None)
        self._up_number.pop(peer, None)
        self._pinged.pop(peer, None)
        wanted = self._wanted.get(peer)
        if wanted is not None and wanted.up_since is not None:
            if now - wanted.up_since >= LIVED_S:
                wanted.attempts = 0
            wanted.up_since = None
        if wanted is not None and wanted.we_dial:
            wanted.dialling_since = None
            wanted.dial_at = now + BACKOFF_S[min(wanted.attempts, len(BACKOFF_S) - 1)]
            self._soon(wanted.dial_at)
            self._set_alarm(peer)
            wanted.attempts += 1

    def heard(self, peer: NodeId, now: float) -> None:
        if peer in self._heard:
            self._heard[peer] = now
            if self._pinged.pop(peer, None) is not None:
                self._set_alarm(peer)
                if self._due is not None:
                    self._due = min(self._due, now + self._ping_s)

    def is_up(self, peer: NodeId) -> bool:
        return peer in self._heard

    @property
    def live(self) -> tuple[NodeId, ...]:
        return tuple(self._heard)

    def wake_at(self) -> float | None:
        """Asked after every input, so what was found last time is kept until something could come before it."""
        if not self._due_known:
            self._due, self._due_known = self.next_due(), True
        return self._due

    def next_due(self) -> float | None:
        """When the next attempt, question or end of patience is due."""
        alarms = self._alarms
        while alarms:
            at, peer = alarms[0]
            if self._alarm_of.get(peer) != at:
                heappop(alarms)
                continue
            due = self._due_of(peer)
            if due is None:
                heappop(alarms)
                del self._alarm_of[peer]
            elif due > at:
                heapreplace(alarms, (due, peer))
                self._alarm_of[peer] = due
            else:
                return due
        return None

    def _due_of(self, peer: NodeId) -> float | None:
        """When something is due of one peer."""
        due = None
        heard = self._heard.get(peer)
        if heard is not None:
            due = heard + (self._silent_s if peer in self._pinged else self._ping_s)
        wanted = self._wanted.get(peer)
        if wanted is not None:
            if wanted.dial_at is not None and (due is None or wanted.dial_at < due):
                due = wanted.dial_at
            if wanted.dialling_since is not None and (due is None or wanted.dialling_since + DIAL_TIMEOUT_S < due):
                due = wanted.dialling_since + DIAL_TIMEOUT_S
        return due

    def _set_alarm(self, peer: NodeId) -> None:
        """What is due of a peer may be due earlier than it was."""
        due = self._due_of(peer)
        at = self._alarm_of.get(peer)
        if due is not None and (at is None or due < at):
            self._alarm_of[peer] = due
            heappush(self._alarms, (due, peer))

    def _take_alarms(self, now: float) -> list[NodeId]:
        """The peers whose alarms have rung; each has another one to be set."""
        rung = []
        while self._alarms and self._alarms[0][0] <= now:
            at, peer = heappop(self._alarms)
            if self._alarm_of.get(peer) == at:
                del self._alarm_of[peer]
                rung.append(peer)
        return rung

    def wake(self, now: float) -> None:
        if self._due_known and (self._due is None or now < self._due):
            return  # something else of the node was due
        self._due_known = False
        rung = self._take_alarms(now)
        for peer in sorted((peer for peer in rung if peer in self._wanted), key=lambda peer: self._wanted[peer].number):
            wanted = self._wanted[peer]
            late = wanted.dialling_since is not None and now >= wanted.dialling_since + DIAL_TIMEOUT_S
            if peer not in self._heard and (late or (wanted.dial_at is not None and now >= wanted.dial_at)):
                self._dial(peer, now)
        for peer in sorted((peer for peer in rung if peer in self._heard), key=lambda peer: self._up_number[peer]):
            heard = self._heard[peer]
            if now >= heard + self._silent_s:
                self._out.add(HangUp(peer, f"silent for {self._silent_s:g} s", silent_s=self._silent_s))
                # Until `LinkDown` comes there is nothing to say on it; if none comes soon, parts of something have.
                self._heard[peer] = now - self._silent_s + AGAIN_S
            elif now >= heard + self._ping_s and peer not in self._pinged:
                self._ping_number += 1
                self._pinged[peer] = now
                self._out.send(peer, Ping(number=self._ping_number))
        for peer in rung:
            self._set_alarm(peer)

    def _dial(self, peer: NodeId, now: float) -> None:
        wanted = self._wanted[peer]
        wanted.dial_at, wanted.dialling_since = None, now
        self._soon(now + DIAL_TIMEOUT_S)
        self._set_alarm(peer)
        self._out.add(Dial(peer, wanted.addresses))
