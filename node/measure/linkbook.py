"""What a node knows of its links: from measurements at the join, then from the traffic itself. Pure.

A rate shows in live traffic only while a line is full: when bytes waited for it at both ends of a second, what left in
that second is what the line takes. Each end sees that for its own direction, so both report, and the newest of a pair
counts. What arrives shows only that a line carries at least so much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from node.measure.meter import Figures, Spread
from protocol.base.ids import NodeId
from protocol.messages import LinkFigures, LinkReport

SAMPLE_S = 1.0
"""Between two looks at a link's counters."""
FULL_BYTES = 256 << 10
"""So many bytes must wait at both looks: below, the line may have run dry between."""
REPORT_S = 10.0
"""Between two reports to the coordinator."""
RETRY_S = 5.0
"""Twice this after a measurement that did not find both rates, then twice as long each time."""
RETRIES_MAX = 6
LINKS_MAX = 1024
"""Links of one report: the run's limit on volunteers is lower."""


@dataclass(frozen=True, slots=True)
class Look:
    """A link's counters at one moment."""

    sent_bytes: int
    received_bytes: int
    queued_bytes: int
    round_trip_s: float | None
    """None: the link has not asked yet."""
    loss: float | None = None
    """Share of packets that were lost, where the way counts them."""


@dataclass(slots=True)
class Known:
    """One link."""

    path: str
    look: Look | None = None
    look_at: float = 0.0
    probe_round_trip_s: float = -1.0
    sent: Spread = field(default_factory=Spread)
    received: Spread = field(default_factory=Spread)
    measured: bool = False
    """Whether a measurement has found both rates."""
    again_at: float = 0.0
    """When to try again; one that found nothing is not repeated at once: the line may be full of work."""
    tries: int = 0

    @property
    def round_trip_s(self) -> float:
        """-1: not known."""
        if self.look is not None and self.look.round_trip_s is not None:
            return self.look.round_trip_s
        return self.probe_round_trip_s


class LinkBook:
    """Figures of every link of a node. Those of a lost link are kept: they help to choose when it comes back."""

    def __init__(self) -> None:
        self._links: dict[NodeId, Known] = {}
        self._up: dict[NodeId, None] = {}

    def up(self, peer: NodeId, path: str) -> Known:
        """A link is there; another path makes all figures of the old one void."""
        self._up[peer] = None
        known = self._links.get(peer)
        if known is None or known.path != path:
            if len(self._links) >= 4 * LINKS_MAX:
                self._links = {each: self._links[each] for each in self._links if each in self._up}
            known = self._links[peer] = Known(path)
        known.look = None
        return known

    def down(self, peer: NodeId) -> None:
        self._up.pop(peer, None)

    def get(self, peer: NodeId) -> Known | None:
        return self._links.get(peer)

    def measured(self, peer: NodeId, figures: Figures | None, now: float) -> None:
        """A measurement is over; None: it found nothing."""
        known = self._links.get(peer)
        if known is None:
            return
        known.tries += 1
        known.again_at = now + RETRY_S * 2 ** min(known.tries, RETRIES_MAX)
        if figures is None:
            return
        known.measured = figures.sent_bytes_per_s > 0 and figures.received_bytes_per_s > 0
        known.probe_round_trip_s = figures.round_trip_s
        if figures.sent_bytes_per_s > 0:
            known.sent.add(figures.sent_bytes_per_s, now)
        if figures.received_bytes_per_s > 0:
            known.received.add(figures.received_bytes_per_s, now)

    def due(self, now: float) -> list[NodeId]:
        """Links whose rates are not known yet, and that may be measured again."""
        return [peer for peer in self._up if not self._links[peer].measured and 0 < self._links[peer].again_at <= now]

    def look(self, peer: NodeId, look: Look, now: float) -> None:
        """The counters of a link, about once a second."""
        known = self._links.get(peer)
        if known is None:
            return
        before, elapsed_s = known.look, now - known.look_at
        known.look, known.look_at = look, now
        if before is None or elapsed_s < SAMPLE_S / 2:
            return
        if min(before.queued_bytes, look.queued_bytes) >= FULL_BYTES:
            known.sent.add((look.sent_bytes - before.sent_bytes) / elapsed_s, now)
        received_per_s = (look.received_bytes - before.received_bytes) / elapsed_s
        if received_per_s > known.received.value > 0:
            known.received.add(received_per_s, now)

    def report(self, now: float) -> LinkReport | None:
        """All links that are up; None when there is none."""
        links = [self._figures(peer, self._links[peer], now) for peer in list(self._up)[:LINKS_MAX]]
        return LinkReport(links=tuple(links)) if links else None

    @staticmethod
    def _figures(peer: NodeId, known: Known, now: float) -> LinkFigures:
        newest = max(known.sent.at, known.received.at)
        loss = known.look.loss if known.look is not None else None
        return LinkFigures(
            peer=peer,
            path=cast("Literal['tcp', 'quic', 'channel', 'relay']", known.path),
            round_trip_s=known.round_trip_s,
            loss=-1.0 if loss is None else loss,
            sent_bytes_per_s=known.sent.value,
            received_bytes_per_s=known.received.value,
            age_s=max(0.0, now - newest) if known.sent.values or known.received.values else 0.0,
            spread=max(known.sent.spread, known.received.spread),
        )
