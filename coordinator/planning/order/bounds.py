"""Lower bounds on a pipeline's makespan: what no order of its operations can beat (algorithms.md, section 4).

For stage d, write f for its forward and `back` for the backward that the stage before waits for (B, or I when
the backward is split); `head` for the time until the first forward can reach d, `tail` for what follows the
last backward of d on the stages before it, `ret` for the time from the end of a forward on d to the earliest
start of its backward there, and K for the most microbatches in flight. All of these hold for every order:

* *path*: one microbatch must go down and come back;
* *load*: a stage works off all microbatches between its head and its tail;
* *first backward*: before the first backward returns, a stage can fill its time with at most K forwards;
* *memory cycle*: the forward of microbatch j + K waits for the end of microbatch j;
* *one machine*: the preemptive schedule of one stage's operations between their heads and tails;
* *windows*: makespans refuted one after another by time windows (`coordinator.planning.order.stage_windows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, floor, gcd, inf

from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.order.stage_windows import (
    ROUNDING,
    Chain,
    Refuter,
    Windows,
    chain_of,
    grid_points,
    heads,
    tails,
)

#: The windows are tried while one round over all stages visits at most this many grid points.
GRID_POINTS_MAX = 40_000
#: Rounds of tightening over all trials of one bound, times grid points: at most a second or two.
WORK_POINTS_MAX = 2_000_000
#: Rounds of tightening for one trial makespan.
ROUNDS_MAX = 40
#: The windows stop when the bound is known this well.
PRECISION = 1e-4


@dataclass(frozen=True, slots=True)
class Bound:
    """A makespan that nothing can beat.

    Attributes:
        value_s: no schedule ends earlier (up to rounding of the order of 1e-9 of it).
        name: the argument: `path`, `load`, `first backward`, `memory cycle`, `one machine` or `windows`.
        stage: the stage that the argument is about; None when it is about all of them.
        sentence: the argument in words, for reports.
    """

    value_s: float
    name: str
    stage: int | None
    sentence: str


def pipeline_bound(problem: PipelineProblem, effort: int = 2) -> Bound:
    """The best valid lower bound on the makespan of `problem`; ties go to the simplest argument.

    Args:
        problem: a checked problem.
        effort: 0 for the closed forms (time independent of the microbatches), 1 adds *one machine*
            (O(n log n) for n operations), 2 adds *windows* where the problem is small enough. More effort
            never gives a smaller value.
    """
    chain = chain_of(problem)
    best = max(_closed_forms(chain), key=lambda bound: bound.value_s)
    if effort >= 1:
        head, tail = heads(chain), tails(chain)
        for stage in chain.stages:
            best = _better(best, _one_machine(chain, stage, head, tail))
    best = _on_the_tick(best, _tick_s(chain))
    if effort >= 2:
        best = _better(best, _windows(chain, best))
    return best


def _better(one: Bound, other: Bound) -> Bound:
    return other if other.value_s > one.value_s * (1 + 1e-12) else one


def _closed_forms(chain: Chain) -> Iterable[Bound]:
    """Arguments 1 to 4, for every stage."""
    forward, back = chain.durations_s[0], chain.durations_s[1]
    weight = chain.durations_s[2] if len(chain.durations_s) == 3 else [0.0] * len(forward)
    m, link = chain.microbatches, chain.link_s
    path = sum(forward) + sum(back) + 2 * sum(link) + weight[0]
    yield Bound(path, "path", None, "one microbatch goes through all stages and back")
    for d in chain.stages:
        f, b, w, cap = forward[d], back[d], weight[d], chain.caps[d]
        head = sum(forward[:d]) + sum(link[:d])
        tail = sum(back[:d]) + sum(link[:d]) + (weight[0] if d > 0 else 0.0)
        ret = sum(forward[d + 1 :]) + sum(back[d + 1 :]) + 2 * sum(link[d:])
        yield Bound(
            max(head + m * (f + b + w), head + m * (f + b) + max(tail, w)),
            "load",
            d,
            f"stage {d} works off {m} microbatches",
        )
        first = head + f + ret  # earliest end of waiting for the first backward
        fits = min(cap, m) * f
        idle = max(0.0, first - head - fits)
        yield Bound(
            max(head + idle + m * (f + b + w), head + idle + m * (f + b) + max(tail, w)),
            "first backward",
            d,
            f"stage {d} can start at most {min(cap, m)} forwards before its first backward returns",
        )
        turns = (m - 1) // cap
        yield Bound(
            head + turns * (f + ret + b + w) + f + ret + b + max(tail, w),
            "memory cycle",
            d,
            f"stage {d} holds at most {cap} microbatches, so it goes round {turns + 1} times",
        )


def _one_machine(chain: Chain, stage: int, head: Windows, tail: Windows) -> Bound:
    """Argument 5: jobs of one stage with heads and tails, preemption allowed (Jackson's rule)."""
    jobs = [
        (head[row][stage][i], chain.durations_s[row][stage], tail[row][stage][i])
        for row in chain.rows
        for i in range(chain.microbatches)
    ]
    value_s = preemptive_one_machine(jobs)
    return Bound(value_s, "one machine", stage, f"stage {stage} alone needs this long between its heads and tails")


def preemptive_one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Least makespan of (head, duration, tail) jobs on one machine when jobs may be interrupted.

    Always runs the released job with the longest tail (Carlier, EJOR 11, 1982); a valid lower bound on the
    makespan without interruption. O(n log n).
    """
    waiting: list[tuple[float, float]] = []  # (-tail, time left)
    now, makespan = 0.0, 0.0
    for head, duration, tail in [*sorted(jobs), (inf, 0.0, 0.0)]:
        while waiting and now < head:
            minus_tail, left = heappop(waiting)
            worked = min(left, head - now)
            now += worked
            if worked < left:
                heappush(waiting, (minus_tail, left - worked))
            else:
                makespan = max(makespan, now - minus_tail)
        if head < inf:
            now = max(now, head)
            heappush(waiting, (-tail, duration))
    return makespan


def _windows(chain: Chain, known: Bound) -> Bound:
    """Argument 6: climbs from the best known bound by refuting makespans, then closes in by bisection."""
    points = sum(grid_points(len(chain.rows), chain.microbatches, cap) for cap in chain.caps)
    if points > GRID_POINTS_MAX or known.value_s <= 0.0:
        return known
    refuter = Refuter(chain)
    rounds_max = min(ROUNDS_MAX, WORK_POINTS_MAX // points)
    if not refuter.refutes(known.value_s, rounds_max):
        return known
    tick_s = _tick_s(chain)
    refuted_s, standing_s = known.value_s, inf
    step_s = max(known.value_s * 0.01, tick_s)
    for _ in range(WORK_POINTS_MAX // (rounds_max * points)):
        if standing_s - refuted_s <= max(PRECISION * refuted_s, tick_s):
            break
        trial_s = refuted_s + step_s if standing_s == inf else (refuted_s + standing_s) / 2
        if refuter.refutes(trial_s, rounds_max):
            refuted_s = trial_s
            step_s *= 2
        else:
            standing_s = trial_s
    bound = Bound(refuted_s, "windows", None, "in any shorter time some stage has no order left that fits its windows")
    return _on_the_tick(bound, tick_s, refuted=True)


def _tick_s(chain: Chain) -> float:
    """The longest time, in whole thousandths, that divides every duration and link; 0 when there is none.

    A best schedule starts everything as early as its order allows, so its makespan is a sum of durations.
    """
    values = [value for row in chain.durations_s for value in row] + chain.link_s
    thousandths = [round(value * 1000) for value in values]
    # Nothing but 0 counts as 0: many times that are too short to be seen beside a thousandth add up to one.
    if any(abs(t - value * 1000) > 1e-12 * t for t, value in zip(thousandths, values, strict=True)):
        return 0.0
    return gcd(*thousandths) / 1000


def _on_the_tick(bound: Bound, tick_s: float, refuted: bool = False) -> Bound:
    """The bound raised to a multiple of `tick_s`: to a larger one when the value itself was refuted.

    What lies within rounding of a multiple counts as that multiple. A refuted value has room for it: the refuter lets
    ends be late by `ROUNDING`, so it has refuted a little more than the value.
    """
    if tick_s == 0.0:
        return bound
    ticks = bound.value_s / tick_s
    whole = floor(ticks * (1 + ROUNDING / 10)) + 1 if refuted else ceil(ticks * (1 - ROUNDING))
    return replace(bound, value_s=whole * tick_s)
