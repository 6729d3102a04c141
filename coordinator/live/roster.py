"""Who is linked to the coordinator right now: members, the quiet of their links, and why they leave.

A member is a link. It appears with `LinkUp`, says what it is with `Join`, is welcomed once its admission is durable,
and is gone at the moment its link closes: nothing here outlives a link but the place of a server (`slots.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.base.ids import NodeId
from protocol.base.limits import SIGNALS_BURST
from protocol.link.reach import dialable, host_of
from protocol.messages import Join, NodeReport, Ping, Relay
from protocol.run.plan import Plan
from protocol.run.run import LimitsSection
from protocol.trust.membership import JoinRole

LeaveReason = Literal["graceful", "timeout", "evicted", "banned"]
"""graceful: it said so; timeout: silence or a link cut without a word; evicted: we hung up; banned: by the operator."""

MEMBERS_MAX = 16384
"""Links that one coordinator holds: each costs a socket and some kilobytes; beyond, new links are closed."""

SWEEP_S_MAX = 7.5
"""Places and stages are looked after at each look at the links, also where these may be silent for minutes."""


@dataclass(slots=True, eq=False)
class Member:
    """One linked node and what it said."""

    peer: NodeId
    role: JoinRole
    public_key: bytes
    credential: bytes
    number: int
    """Order of arrival; breaks ties."""
    linked_at: float
    heard_at: float
    pinged_at: float = 0.0
    ping_number: int = -1
    """Of the newest ping sent; its pong is the one whose delay counts."""
    look_number: int = -1
    """Of the newest ping that asked to look for checkpoints."""
    look_sent_at: float = float("-inf")
    looked_at: float = float("-inf")
    """When the newest look was asked for that has been answered; what was found has been said before the answer."""
    closed_before: tuple[int, int] = (-1, -1)
    """The ledger generation when its link came up, and its newest closed step."""
    join: Join | None = None
    shown: Plan | None = None
    """The plan that a server went by when it joined (`adoption.py`)."""
    shown_hash: bytes = b""
    """Of the run that this plan is of."""
    membership: bytes = b""
    """Signed; empty until the admission is durable."""
    renew_at: float = 0.0
    welcomed: bool = False
    stage: int = -1
    """The stage that a volunteer or an auditor was given, or -1. A server's place is in the slot table."""
    stage_reason: str = ""
    stage_since: float = 0.0
    told_generation: int = -1
    """The newest plan that this link was sent."""
    told_ledger: int = -1
    """The ledger generation under which a server was sent a plan with its own stage, on this link."""
    report: NodeReport | None = None
    report_at: float = 0.0
    hung_at: float = float("-inf")
    """When it last reported that its work stands still (`gray.py`)."""
    address: str = ""
    """HOST:PORT that the link comes from; empty where there is no network."""
    signals_left: float = SIGNALS_BURST
    """Signals that it may send at once, as of `signalled_at`."""
    signalled_at: float = 0.0
    help_again_at: float = float("inf")
    """When it gets new TURN credentials."""
    news_at: float = float("-inf")
    """When it was last told how the run goes."""
    told_relays: tuple[Relay, ...] = ()
    """The spares that it was last told to relay through."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach it, as far as that can be told from here; empty before it has joined."""
        if self.join is None:
            return ()
        return dialable(self.join.addresses, self.join.local_addresses, host_of(self.address))

    def must_know(self, ledger_generation: int, newest_step: int) -> int:
        """The newest closed step that its join must know of: its words about its disk may have been on their way when
        a later one was closed."""
        before_generation, before_step = self.closed_before
        return min(newest_step, before_step) if before_generation == ledger_generation else newest_step

    def next_ping(self, now: float) -> Ping:
        """The ping to send now."""
        self.pinged_at = now
        self.ping_number += 1
        return Ping(number=self.ping_number)

    def next_look(self, now: float) -> Ping:
        """The ping that asks which checkpoints the peer can read."""
        ping = self.next_ping(now)
        self.look_number, self.look_sent_at = ping.number, now
        return Ping(number=ping.number, look=True)

    def answer(self, number: int) -> bool:
        """A pong has come. Returns whether it ends a look."""
        looked = number == self.look_number
        if looked:
            self.looked_at = self.look_sent_at
        return looked

    @property
    def state(self) -> str:
        """What the status page shows: the node's own word where there is one."""
        if self.report is not None:
            return self.report.state
        return "joining" if self.join is not None else "linked"


class Roster:
    """The members, in order of arrival."""

    def __init__(self) -> None:
        self._members: dict[NodeId, Member] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, peer: NodeId) -> bool:
        return peer in self._members

    def get(self, peer: NodeId) -> Member | None:
        return self._members.get(peer)

    def add(
        self, peer: NodeId, role: JoinRole, public_key: bytes, credential: bytes, now: float, address: str = ""
    ) -> Member:
        """A new link; the caller has removed an earlier one of the same node."""
        assert peer not in self._members, f"{peer} is linked twice"
        self._arrivals += 1
        member = Member(
            peer, role, public_key, credential, self._arrivals, linked_at=now, heard_at=now, address=address,
            signalled_at=now,
        )  # fmt: skip
        self._members[peer] = member
        return member

    def remove(self, member: Member) -> None:
        del self._members[member.peer]

    def is_current(self, member: Member) -> bool:
        """Whether the link that `member` stands for is still open."""
        return self._members.get(member.peer) is member

    def all(self) -> list[Member]:
        """Every link, in order of arrival."""
        return list(self._members.values())

    def servers(self) -> list[Member]:
        """Welcomed servers, in order of arrival."""
        return [member for member in self._members.values() if member.welcomed and member.role == "server"]

    def joined_servers(self) -> list[Member]:
        """Servers that have said what they hold, welcomed or not, in order of arrival."""
        return [member for member in self._members.values() if member.role == "server" and member.join is not None]

    def volunteers(self) -> list[Member]:
        """Welcomed volunteers that work, in order of arrival."""
        return [
            member
            for member in self._members.values()
            if member.welcomed and member.role == "volunteer" and not (member.join is not None and member.join.visit)
        ]

    def auditors(self) -> list[Member]:
        """Welcomed auditors, in order of arrival."""
        return [member for member in self._members.values() if member.welcomed and member.role == "auditor"]

    def waiting_volunteers(self) -> list[Member]:
        """Volunteers that have joined to work and have no vocabulary yet, in order of arrival."""
        return [
            member
            for member in self._members.values()
            if member.role == "volunteer" and not member.welcomed and member.join is not None and not member.join.visit
        ]

    def check(self) -> None:
        """Raises if an invariant is broken."""
        numbers = [member.number for member in self._members.values()]
        assert numbers == sorted(set(numbers)), "members are not in order of arrival"
        for peer, member in self._members.items():
            assert member.peer == peer
            assert not member.welcomed or (member.join is not None and member.membership), f"{peer} welcomed unjoined"
            assert member.role != "server" or member.stage == -1, f"server {peer} carries a volunteer's stage"


def sweep_s(limits: LimitsSection) -> float:
    """Time between two looks at all links: fine enough that silence is seen within a sixth of its limit."""
    return min(limits.ping_s / 2, limits.silent_s / 6, SWEEP_S_MAX)
