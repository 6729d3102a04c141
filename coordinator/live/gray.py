"""Servers that are there and do nothing: a lane or a disk that hangs, told by their own reports.

Such a server answers pings and keeps its links, so nobody misses it, and no step ends without it. It loses its place
like one that is away, when no step has closed for `limits.server_gone_s`, its work has stood still for as long, and
most of its fellows, and a spare, have shown that theirs does not: if all hang at once it is what they share, a
checkpoint folder above all, and no spare would fare better. Where most of the fellows hang, too, so many spares must
show it as there are places to fill: they write to what is shared before they answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.live.roster import Member
from protocol.base.ids import NodeId
from protocol.messages import NodeReport

REPORT_FRESH_S = 10.0
"""A server reports every two seconds and notices a dead link within `limits.silent_s` (6 s): older words prove
nothing."""
AGAIN_S = 3.0
"""From a report to the next one, and the way."""
NAMED_S = 10.0
"""As `node.machine.stalls.NAMED_S`: a report that says less is of a busy server."""


def stalled_s(member: Member, now: float) -> float:
    """For how long a server's work stands still, by its newest report; 0 when it does not, or nobody knows."""
    if member.report is None or now - member.report_at > REPORT_FRESH_S:
        return 0.0
    return member.report.counters.get("stalled_s", 0.0)


def note_hang(member: Member, report: NodeReport, now: float, hanging: dict[NodeId, None]) -> None:
    """Notes whether a member hangs at this moment: `hanging` are those that do."""
    if report.counters.get("stalled_s", 0.0) >= NAMED_S:
        member.hung_at = now
        hanging[member.peer] = None
    else:
        hanging.pop(member.peer, None)


def is_well(member: Member, now: float) -> bool:
    """Whether it has not hung for a while: when what all share goes on again, some hear of it a moment earlier."""
    return now - member.hung_at > REPORT_FRESH_S


class Arbitration:
    """Whom servers hang for, and what their fellows could do meanwhile."""

    def __init__(self) -> None:
        self._asked_at: dict[NodeId, float] = {}
        """Servers that hang for too long, and since when everybody else is asked to look for checkpoints."""
        self._agreed_at: dict[NodeId, float] = {}
        """When enough of them had done so."""

    def is_given_up(
        self, member: Member | None, others: Sequence[Member], fellows: int, quiet_s: float, gone_s: float, now: float
    ) -> bool:
        """Whether a server loses its place, because it hangs and others show that they do not.

        Nobody who has nothing to do can tell whether it hangs; so all others are asked to look for checkpoints, which
        takes the same lane and writes to the same folder. A spare must have answered, and of the places' other holders
        half; or as many spares as there are holders who have not.

        Args:
            member: None when it has no link.
            others: all other linked servers; spares too.
            fellows: how many of them, from the first on, hold places.
            quiet_s: how long no step has closed.
            gone_s: `limits.server_gone_s`.
        """
        if member is None:
            return False
        if quiet_s < gone_s or stalled_s(member, now) < gone_s:
            self._asked_at.pop(member.peer, None)
            self._agreed_at.pop(member.peer, None)
            return False
        asked_at = self._asked_at.setdefault(member.peer, now)
        answered = [other.looked_at >= asked_at for other in others]
        well, spares = sum(answered[:fellows]), sum(answered[fellows:])
        if not spares or (2 * well < fellows and spares < 1 + fellows - well):
            return False
        # What all share may have gone on a moment ago: then the next that it says is that it goes on, too.
        return member.report_at >= self._agreed_at.setdefault(member.peer, now) + AGAIN_S

    def to_ask(self, node: NodeId, others: Sequence[Member]) -> list[Member]:
        """Who is still to be asked because of `node`."""
        asked_at = self._asked_at.get(node, float("inf"))
        return [other for other in others if asked_at < float("inf") and other.look_sent_at < asked_at]


def steps_of(report: NodeReport) -> float:
    """The newest step that a server knows to be closed."""
    return report.counters.get("step", -1.0)


def tasks_of(report: NodeReport) -> float:
    """Tasks that a node has computed since it started."""
    return report.counters.get("tasks_forward", 0.0) + report.counters.get("tasks_backward", 0.0)


def seen_by_fellows(servers: Iterable[Member], node: NodeId, now: float) -> bool:
    """Whether a server that has no link to us is linked with one that has: then only the way to us is broken."""
    return any(
        node in member.report.linked and now - member.report_at <= REPORT_FRESH_S
        for member in servers
        if member.report is not None
    )
