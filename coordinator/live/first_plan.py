"""From "all servers are here" to the first plan: they measure each other, a planner works on it, its answer counts.

    gather ─▶ survey (`Survey` to every server) ─▶ `StartPlanning` ─▶ `PlanReady` ─▶ a decision

Every wait has an end. Where the survey takes too long, what is missing is guessed; where the planner fails or is late,
the run begins with the even plan and says so. Who leaves meanwhile begins it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from coordinator.live.measured_links import NetworkBook
from coordinator.live.outbox import Outbox
from coordinator.live.problem import Problem, Proposal
from coordinator.live.roster import Member, Roster
from coordinator.live.survey import is_surveyed, surveyed_network
from protocol.base.ids import NodeId
from protocol.base.limits import FELLOWS_MAX
from protocol.messages import Fellow, Survey
from protocol.run.changes import LAYOUT, settled_as
from protocol.run.plan import Plan
from protocol.run.run import RunConfig, possible_counts

GATHER_S = 10.0
"""With `stages.count = "auto"` nobody says how many servers come: planning begins when none has come for so long."""
SURVEY_S = 20.0
"""A measurement takes 3 s at the most (`MEASURE_S`) and a server's links are measured side by side; those that nobody
could open within 9 s are tried once more."""
PLANNING_S = 40.0
"""The planner itself stops after 15 s (`planner.BUDGET_S`, `planner.ORDER_BUDGET_S`); the rest is for a computer under
load to start it."""
VOLUNTEER_LINKS_MAX = 10_000
"""Links of volunteers who count in a plan, two with each server: the first 312 beside 16 servers, 78
beside 64. Making 30,000 of them held the loop for 120 ms, and the API must answer within 100."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How the run begins: by a planner's proposal, or evenly with as many stages as there are servers for."""

    stage_count: int
    proposal: Proposal | None
    sentence: str
    """Why the even plan, where there is no proposal."""


class FirstPlanner:
    """One coordinator's way to its first plan. `sentence` says what is waited for."""

    def __init__(self, config: RunConfig, roster: Roster, network: NetworkBook, outbox: Outbox) -> None:
        self._config = config
        self._roster = roster
        self._network = network
        self._outbox = outbox
        self.flops_per_s: Callable[[Member], float] = lambda member: 0.0
        """A member's measured power; set by whoever knows the model's arithmetic."""
        self.sentence = ""
        self._gathered: tuple[NodeId, ...] = ()
        self._gathered_at = 0.0
        self._surveyed: tuple[NodeId, ...] = ()
        """Who was asked to measure; nothing: nobody yet."""
        self._surveyed_at = 0.0
        self._pairs: list[tuple[NodeId, NodeId]] = []
        """Directions between servers that were asked for."""
        self._number = 0
        """Of the newest problem."""
        self._problem: Problem | None = None
        """What a planner works on."""
        self._asked_at = 0.0
        self._decision: Decision | None = None

    @property
    def is_planning(self) -> bool:
        """Whether servers measure, or a planner works."""
        return bool(self._surveyed) or self._problem is not None

    @property
    def servers_per_stage(self) -> int:
        return self._config.stages.front_servers + self._config.stages.back_servers

    def too_few(self, linked: Mapping[NodeId, Member], now: float) -> str:
        """With an open number of stages: why planning cannot begin yet, as a sentence, or nothing."""
        here = tuple(sorted(linked))
        if here != self._gathered:
            self._gathered, self._gathered_at = here, now
        wanted = self.servers_per_stage
        if len(here) < wanted:
            count = f"{len(here)} server{' is' if len(here) == 1 else 's are'} here"
            return (
                f'stages.count = "auto": {count}, and one stage alone takes {wanted}'
                " (stages.front_servers and stages.back_servers)"
            )
        counts = possible_counts(self._config, len(here) // wanted)
        if not counts:
            return f'stages.count = "auto": no number of stages that {len(here)} servers can make fits the run\'s keys'
        if now - self._gathered_at < GATHER_S:
            return f'stages.count = "auto": {len(here)} servers are here; waiting {GATHER_S:g} s for more of them'
        return ""

    def look(self, servers: Sequence[Member], now: float) -> Decision | None:
        """What to begin with, once that is known. `servers`: all that are linked, those with a place first."""
        names = {member.peer for member in servers}
        if self._problem is not None:
            if self._decision is None and now - self._asked_at >= PLANNING_S:
                self._give_up(f"the planner has not answered within {PLANNING_S:g} s", now)
            decision, self._decision = self._decision, None
            if decision is None:
                return None
            self._problem, self._surveyed = None, ()
            lost = decision.proposal is not None and not names.issuperset(
                chain.from_iterable(decision.proposal.servers)
            )
            if not lost:
                return decision
            self._outbox.log("info", "planning begins anew", detail="a server of the plan has left meanwhile")
        if not names.issuperset(self._surveyed) or not self._surveyed:
            self._begin_survey(servers, now)
        directions = self._network.directions(now)
        asked = [member for member in servers if member.peer in self._surveyed]
        surveyed = is_surveyed(asked, self._pairs, directions)
        if not surveyed and now - self._surveyed_at < SURVEY_S:
            self.sentence = f"{len(asked)} servers measure the lines between them, and themselves"
            return None
        if not surveyed:
            self._outbox.log("warning", "survey incomplete", detail="what is missing counts as the others' median")
        waiting = self._roster.waiting_volunteers()
        self._number += 1
        self._problem = problem_now(self._config, servers, waiting, self._network, self.flops_per_s, now)
        self._asked_at = now
        self.sentence = "a planner works on how to cut the model, and on which server serves which stage"
        self._outbox.start_planning(self._number, self._problem)
        return None

    def answered(self, number: int, proposal: Proposal | None, sentence: str, now: float) -> None:
        """A planner has answered; what comes too late, or cannot be, does not count."""
        if number != self._number or self._problem is None or self._decision is not None:
            return
        fault = proposal.fault(self._problem) if proposal is not None else sentence
        if proposal is not None and not fault:
            self._decision = Decision(len(proposal.servers), proposal, "")
        else:
            self._give_up(fault or "the planner said nothing", now)

    def _give_up(self, why: str, now: float) -> None:
        assert self._problem is not None
        self._outbox.log("warning", "no plan from the planner", detail=why, after_s=round(now - self._asked_at, 3))
        servers = sum(machine.role == "server" for machine in self._problem.network.machines)
        counts = possible_counts(self._config, servers // self.servers_per_stage)
        self._decision = Decision(max(counts), None, why)

    def _begin_survey(self, servers: Sequence[Member], now: float) -> None:
        self._surveyed, self._surveyed_at = tuple(member.peer for member in servers), now
        self._pairs = []
        count = len(servers)
        self._outbox.log("info", "survey begins", servers=count)
        for index, member in enumerate(servers):
            near = range(1, min(count - 1, FELLOWS_MAX // 2) + 1)
            ring = sorted({(index + way * step) % count for step in near for way in (-1, 1)} - {index})
            fellows = [servers[place] for place in ring]
            self._pairs += [(member.peer, fellow.peer) for fellow in fellows]
            words = tuple(Fellow(fellow.peer, fellow.addresses) for fellow in fellows)
            self._outbox.send(member.peer, Survey(fellows=words))


def problem_now(
    config: RunConfig,
    servers: Sequence[Member],
    volunteers: Sequence[Member],
    network: NetworkBook,
    flops_per_s: Callable[[Member], float],
    now: float,
    *,
    keeps_seats: bool = False,
) -> Problem:
    """What a planner is to solve for those who are here now, with what is known of their lines.

    Args:
        servers: those that have a place first, in the order of the places.
    """
    counted = volunteers[: VOLUNTEER_LINKS_MAX // (2 * max(1, len(servers)))]
    file = surveyed_network(servers, counted, network.directions(now), flops_per_s)
    return Problem(config=config, network=file, keeps_seats=keeps_seats)


def settled_by(config: RunConfig, plan: Plan) -> RunConfig:
    """The run as a plan has filled in what is open in it."""
    if not config.is_open:
        return config
    if plan.changes and plan.changes[0].key == LAYOUT and plan.changes[0].from_step == 0:  # `first_layout`
        return settled_as(config, plan.changes[0])
    parts = len(plan.stages) * config.stages.chunks
    return config.settled(len(plan.stages), tuple(chunk.first_block for chunk in plan.course.chunks[1:parts]))


def why_of(decision: Decision) -> str:
    """What a plan's sentence says of how it was found."""
    if decision.proposal is None:
        return f"planned evenly, with servers as they came: {decision.sentence}"
    return why_planned(decision.proposal)


def why_planned(found: Proposal) -> str:
    """The same of what a planner has found."""
    gain = f", the even plan {found.even_step_s:.3g} s" if found.even_step_s > found.step_s * 1.001 else ""
    return (
        f"planned from what was measured: {found.step_s:.3g} s a step by the planner's cost{gain},"
        f" at least {found.fraction_of_bound:.0%} of the proven bound; {found.reason}"
    )
