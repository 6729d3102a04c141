"""What servers know of the run that this coordinator's database does not, and when their word is taken over.

A coordinator may come back with an old copy of its database, with an empty one, or beside a second one. Servers keep
the plan that they go by and show it when they join; their links prove who they are, and a plan names its servers. The
newest plan wins, first by its ledgers (older ones would throw steps away), then by its changes that wait for nothing,
then by its generation; one that was in force here before is no news. It is taken over unattended where every server
that it names has joined and none shows other contents under its numbers; else the run waits with one sentence that says
what to do, and the servers train on meanwhile. What the operator has ordered of this process counts afterwards
(`Wishes.take_over`), and so says nothing of which plan is the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coordinator.live.first_plan import settled_by
from coordinator.live.roster import Member, Roster
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.run.changes import running
from protocol.run.course import is_asked_for
from protocol.run.plan import Plan
from protocol.run.run import STAGES_MAX, RunConfig

NAMED = 4
"""Servers that one sentence names."""
GENERATION_MAX = 2**53
"""A thousand plans a second make 2.6 thousand million in a month: what is above this is no generation."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done about plans that servers show."""

    sentence: str = ""
    """What the run waits for before it takes a plan over; empty: it does not wait."""
    plan: Plan | None = None
    """The plan to put in force, under a generation above `generation`; None: nothing is to be taken over."""
    generation: int = -1
    """The newest that anybody shows who is ahead of the plan in force, also while nothing is to be taken over."""


def fault_of_shown(plan: Plan) -> str:
    """What no plan of a coordinator looks like, or an empty string."""
    nodes = plan.server_nodes()
    if not -1 <= plan.restore_step < GENERATION_MAX or not (
        0 <= plan.ledger_generation <= plan.generation < GENERATION_MAX and plan.continues < plan.ledger_generation
    ):
        return "shows a plan with generations that cannot be"
    if not 1 <= len(plan.stages) <= STAGES_MAX or not nodes or len(set(nodes)) < len(nodes):
        return "shows a plan with doubled or missing servers"
    return ""


class Adoption:
    """Which plan counts, by what those that are linked show. Reads the roster, changes nothing."""

    def __init__(self, roster: Roster, known: Iterable[int] = (), first: int = 0) -> None:
        """
        Args:
            known: generations of the plans in the database.
            first: generation that this process began with.
        """
        self._roster = roster
        self._issued = dict.fromkeys(known)
        """Generations of plans that have been in force here, by the database: who shows an older one of these shows
        nothing new."""
        self._first = first
        """Below it, what is not among these is of generations that an older database says nothing of: such plans are
        newer than it is, though they stand below what this process has issued."""
        self.is_banned: Callable[[NodeId], bool] = lambda node: False
        self.open = False
        """Whether somebody is ahead of the plan in force, as of the last look."""
        self.forced = False
        """The operator wants the newest plan that is shown, whoever is missing."""

    def issued(self, plan: Plan) -> None:
        """A plan of this coordinator is in force."""
        self._issued[plan.generation] = None

    def taken_over(self) -> None:
        """What servers knew of unknown plans is in force from now on: any that is shown later is older."""
        self._first = 0

    def _is_unknown(self, plan: Plan) -> bool:
        return plan.generation < self._first and plan.generation not in self._issued

    def is_ahead(self, member: Member, plan: Plan | None) -> bool:
        """Whether a server has more than the plan in force explains: it must not be told that plan, nor lose its
        place."""
        if member.join is None or member.role != "server":
            return False
        shown = self._shown(member, plan)
        if plan is None:
            return shown is not None or member.join.held_generation >= 0
        if member.join.held_generation > plan.ledger_generation:
            return True
        if shown is None or shown == plan:
            return False
        same_ledgers = shown.ledger_generation == plan.ledger_generation
        newer = same_ledgers and (_begun_count(shown) > _begun_count(plan) or self._is_unknown(shown))
        return shown.generation >= plan.generation or newer

    def look(self, plan: Plan | None, config: RunConfig, ordered_count: int = 0) -> Verdict:
        """What to do now, with this plan in force. `ordered_count`: of its changes that wait for nothing, those that
        were ordered of this process."""

        def age(other: Plan) -> tuple[int, int, bool, int]:
            """Unknown plans are newer than what this process made of an older database, not than what others issue."""
            outbid = self._is_unknown(other) or (plan is not None and other.generation > plan.generation)
            kept = _begun_count(other) - (ordered_count if other == plan else 0)
            return other.ledger_generation, kept, outbid, other.generation

        joined = self._roster.joined_servers()
        shown = {member.peer: other for member in joined if (other := self._shown(member, plan)) is not None}
        ahead = [member for member in joined if self.is_ahead(member, plan)]
        if plan is not None:  # one that holds what nobody explains stays out, and holds nobody up
            ahead = [member for member in ahead if member.peer in shown and age(shown[member.peer]) != age(plan)]
        self.open = bool(ahead)
        if not ahead:
            self.forced = False
            return Verdict()
        candidates = [*shown.values(), *(() if plan is None else (plan,))]
        newest = max(candidates, key=age, default=None)
        seen = max((other.generation for other in candidates), default=-1)
        if newest is None or (plan is None and any(_held(member) > newest.ledger_generation for member in ahead)):
            member = max(ahead, key=_held)
            return Verdict(f"{_names([member.peer])} {unexplained(member)}", generation=seen)
        if rivals := [node for node, other in shown.items() if _contradicts(other, newest)]:
            backers = [node for node, other in shown.items() if other == newest]
            return Verdict(
                f"{_names(backers)} and {_names(rivals)} show different plans of generation {newest.generation}, which"
                " two coordinators have made: stop the servers whose state shall not count, move their state folders"
                " away, and start them again",
                generation=seen,
            )
        if newest is not plan and (fault := self._fault(newest, config, shown)):
            return Verdict(fault, generation=seen)
        missing = [node for node in newest.server_nodes() if not (self._has_joined(node) or self.is_banned(node))]
        if missing and newest is not plan and not self.forced:
            return Verdict(
                f"servers go by the plan of generation {newest.generation}, which this coordinator's database does not"
                f" know; waiting for {_names(missing)} of the same plan: start them again, or do without them by"
                " `barnraise run adopt`",
                generation=seen,
            )
        return Verdict(plan=newest, generation=seen)

    def _shown(self, member: Member, plan: Plan | None) -> Plan | None:
        """What a server showed when it joined, where it may be news: not if it was told a plan since that counts no
        less, nor if its plan was in force here before the one that is. What came after follows from it, though the list
        of changes became shorter where one came too late or was given up: taken over again, the same is dropped again,
        and so on, plan after plan; and what was ordered since is gone with it."""
        shown = member.shown
        if shown is None or member.told_generation >= shown.generation:
            return None
        old = plan is not None and shown.generation < plan.generation and shown.generation in self._issued
        return None if old else shown

    def _has_joined(self, node: NodeId) -> bool:
        member = self._roster.get(node)
        return member is not None and member.join is not None

    def _fault(self, newest: Plan, config: RunConfig, shown: dict[NodeId, Plan]) -> str:
        """Why the plan cannot be one of this run's file, or nothing."""
        backer = next(node for node, other in shown.items() if other is newest)
        try:
            settled = settled_by(config, newest)
            settled.validate()
            laid_out = running(settled, newest.changes)
            shards = laid_out.stages.front_servers + laid_out.stages.back_servers
            even = all(len(stage.servers) == shards for stage in newest.stages)
            fits = len(newest.stages) == laid_out.stages.count and even and is_asked_for(newest.course, laid_out)
        except (BadInputError, ValueError):
            fits = False
        hashed = self._roster.get(backer)
        same = fits and hashed is not None and settled.has_hash(hashed.shown_hash)
        if same:
            return ""
        return (
            f"{_names([backer])} goes by a plan of generation {newest.generation} of another configuration of this run:"
            " start the coordinator with the RUN.toml that the servers know, or the servers with empty state folders"
        )


def unexplained(member: Member) -> str:
    """What keeps out a server that brings ledgers of which nobody shows the plan, or a plan that two coordinators have
    made; after its name."""
    if member.shown is not None and _held(member) <= member.shown.ledger_generation:
        return (
            f"shows a plan of generation {member.shown.generation} with other contents than the one in force: if two"
            " coordinators have run, stop the other one; start this server again with an empty state folder"
        )
    return (
        f"holds ledgers of generation {_held(member)}, which this coordinator's database does not know and no server's"
        " plan explains: start the run's other servers, or give the coordinator its newest database, or that server an"
        " empty state folder"
    )


def _begun_count(plan: Plan) -> int:
    """Changes that wait for no boundary: only those that do are dropped again while the ledgers are the same."""
    return sum(not change.is_pending for change in plan.changes)


def _held(member: Member) -> int:
    return -1 if member.join is None else member.join.held_generation


def _contradicts(other: Plan, newest: Plan) -> bool:
    """Equal numbers with other contents: one history cannot have made both."""
    if other.ledger_generation != newest.ledger_generation or other == newest:
        return False
    began_elsewhere = (other.restore_step, other.continues, other.course) != (
        newest.restore_step, newest.continues, newest.course
    )  # fmt: skip
    return began_elsewhere or other.generation == newest.generation


def _names(nodes: list[NodeId]) -> str:
    named = [f"server {node[:8]}" for node in nodes[:NAMED]]
    if len(nodes) > NAMED:
        named.append(f"{len(nodes) - NAMED} more")
    return ", ".join(named) or "nobody"
