"""Which stage a volunteer picks, and when moving volunteers between stages pays for the reload.

A volunteer measures its own links and picks the stage with the highest mean bandwidth; where several are
about as good, the one that needs it most (hybrid paper, section 3.2). What it picked is checked against the
cost of the placement. Moves are planned in batches: a batch is worth what the pipeline gains until the swarm
is expected to change again, less what the movers do not compute while they load parameters. A batch that does
not raise the slowest stage is never worth it, so a swarm that stays as it is stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from coordinator.planning.placement.cost import Placement, Stage

RATE_SLACK = 0.2
"""Stages within so much of the best mean bandwidth count as equally near."""
GAIN_AT_LEAST = 0.01
"""A batch must raise the pipeline's rate by so much, or measurement noise would move people."""


@dataclass(frozen=True)
class Member:
    """A volunteer at work: its power and its stage."""

    power: float
    stage: int


@dataclass(frozen=True)
class Move:
    """Volunteer number `member` leaves stage `source` for stage `target`."""

    member: int
    source: int
    target: int


@dataclass(frozen=True)
class Moves:
    """A batch: the rate of the pipeline before and after (steps of work per second), and what it costs."""

    moves: tuple[Move, ...]
    rate_before: float
    rate_after: float
    lost: float


def choose_stage(mean_bytes_per_s: Sequence[float], power_per_work: Sequence[float]) -> int:
    """The volunteer's own choice among stages: nearest first, then the neediest of those about as near.

    An empty stage is always chosen first: without it nothing runs.
    """
    stages = range(len(power_per_work))
    reachable = [k for k in stages if mean_bytes_per_s[k] > 0] or list(stages)
    empty = [k for k in reachable if power_per_work[k] <= 0]
    if empty:
        return max(empty, key=lambda k: (mean_bytes_per_s[k], -k))
    best = max(mean_bytes_per_s[k] for k in reachable)
    near = [k for k in reachable if mean_bytes_per_s[k] >= (1 - RATE_SLACK) * best]
    return min(near, key=lambda k: (power_per_work[k], k))


def choice_against_best(placement: Placement, volunteer: int, stage: int) -> float:
    """The cost with the volunteer in `stage` over the cost in the best stage for it; 1.0 is the best choice."""
    home = next((k for k, s in enumerate(placement.stages) if volunteer in s.volunteers), None)
    costs = []
    for k in range(len(placement.stages)):
        changes = {}
        if home is not None and home != k:
            old = placement.stages[home]
            rest = tuple(v for v in old.volunteers if v != volunteer)
            changes[home] = Stage(old.front, old.back, rest)
        if home != k:
            new = placement.stages[k]
            changes[k] = Stage(new.front, new.back, (*new.volunteers, volunteer))
        costs.append(placement.replaced(changes).cost_s if changes else placement.cost_s)
    return costs[stage] / min(costs)


def plan_moves(work: Sequence[float], members: Sequence[Member], reload_s: float, horizon_s: float) -> Moves:
    """The batch of moves with the greatest net gain over the next `horizon_s`; often none.

    Args:
        work: of each stage for one token (layers, or operations); its rate is power / work.
        members: all volunteers; power that does not move (servers) may be given as members that are too
        strong. reload_s: how long a mover computes nothing. horizon_s: how long the swarm is expected to stay
        as it is.

    Volunteers move one by one from the richest to the poorest stage as long as that evens them out; of all
    prefixes of this list the best one is kept.
    """
    powers = [0.0] * len(work)
    heaps: list[list[tuple[float, int]]] = [[] for _ in work]
    for number, member in enumerate(members):
        powers[member.stage] += member.power
        heaps[member.stage].append((member.power, number))
    for heap in heaps:
        heapify(heap)
    before = _rate(powers, work)
    away = list(powers)
    moves: list[Move] = []
    best = Moves((), before, before, 0.0)
    best_net = 0.0
    for _ in range(len(members)):
        poorest = min(range(len(work)), key=lambda k: (powers[k] / work[k], k))
        step = _step(powers, work, heaps, poorest)
        if step is None:
            break
        source, (power, number) = step
        heappop(heaps[source])
        heappush(heaps[poorest], (power, number))
        powers[source] -= power
        powers[poorest] += power
        away[source] -= power
        moves.append(Move(number, source, poorest))
        after = _rate(powers, work)
        lost = max(0.0, before - _rate(away, work)) * reload_s
        net = (after - before) * max(0.0, horizon_s - reload_s) - lost
        if after > before * (1 + GAIN_AT_LEAST) and net > best_net:
            best, best_net = Moves(_shortened(moves), before, after, lost), net
    return best


def _rate(powers: Sequence[float], work: Sequence[float]) -> float:
    return min((power / need for power, need in zip(powers, work, strict=True)), default=0.0)


def _step(
    powers: Sequence[float], work: Sequence[float], heaps: list[list[tuple[float, int]]], poorest: int
) -> tuple[int, tuple[float, int]] | None:
    """The richest stage whose weakest volunteer can leave without making it as poor as the poorest is now."""
    for source in sorted(range(len(work)), key=lambda k: (-powers[k] / work[k], k)):
        if source == poorest or not heaps[source]:
            continue
        power, number = heaps[source][0]
        left = (powers[source] - power) / work[source]
        if left > powers[poorest] / work[poorest] + 1e-12 * math.fabs(left):
            return source, (power, number)
    return None


def _shortened(moves: Sequence[Move]) -> tuple[Move, ...]:
    """A volunteer that would move twice goes straight to where it ends; one that comes back stays."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for move in moves:
        first.setdefault(move.member, move.source)
        last[move.member] = move.target
    return tuple(Move(member, first[member], last[member]) for member in first if first[member] != last[member])
