"""When can each operation of a pipeline start at the earliest, and what must still follow it?

Every schedule of a `PipelineProblem`, however clever, keeps three kinds of constraint: dependencies between
operations, caps on microbatches in flight, and one thing at a time per stage. From them follow, for every
operation, a *head* (no schedule starts it earlier) and a *tail* (no schedule ends sooner after its end); and
a `Refuter` shows of some makespans that no schedule can keep them.

Microbatches are alike, so each (stage, op) may run them in order (sorting the starts of any schedule breaks
nothing). What a stage still chooses is only how to interleave its few ordered rows of operations: a path
through a small grid of counts. The refuter walks that grid exactly, stage by stage, and lets the stages
tighten each other's time windows until nothing moves or a stage has no path left (destructive lower bounds:
Klein and Scholl, "Computing lower bounds by destructive improvement", EJOR 112, 1999).

Heads and tails are one calculation: a pipeline read backward in time is a pipeline again (`Chain.reversed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf

from coordinator.planning.order.pipeline_problem import PipelineProblem

#: Times per [row][stage][microbatch].
Windows = list[list[list[float]]]

#: Share of the makespan by which a window may be wrong through rounding; keeps every refutation honest.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Chain:
    """A pipeline as rows of operations; what a microbatch does on a stage runs from row 0 to the last row.

    Attributes:
        durations_s: [row][stage]; the rows are F, B or F, I, W, or, read backward in time, B, F or W, I, F.
        down: the row that travels from stage s to s + 1; the row after it travels from s + 1 to s.
        link_s: seconds from stage s to s + 1 and back.
        caps: per stage, microbatches that may stand between the start of row 0 and the end of the last row.
        microbatches: how many of them.
    """

    durations_s: list[list[float]]
    down: int
    link_s: list[float]
    caps: list[int]
    microbatches: int

    @property
    def rows(self) -> range:
        """Numbers of the rows."""
        return range(len(self.durations_s))

    @property
    def stages(self) -> range:
        """Numbers of the stages."""
        return range(len(self.caps))

    def reversed(self) -> Chain:
        """The same pipeline with time running backward: last row first, last microbatch first."""
        down = len(self.durations_s) - 2 - self.down
        return Chain(self.durations_s[::-1], down, self.link_s, self.caps, self.microbatches)


def chain_of(problem: PipelineProblem) -> Chain:
    """The rows of `problem`: F and B, or F, I and W when the backward is split."""
    m = problem.microbatches
    caps = [min(cap, m) for cap in problem.activations_max or [m] * problem.stages]
    if problem.split_backward:
        rows = [problem.forward_s, problem.backward_input_s, problem.backward_weight_s]
    else:
        pairs = zip(problem.backward_input_s, problem.backward_weight_s, strict=True)
        rows = [problem.forward_s, [b + w for b, w in pairs]]
    return Chain(rows, 0, problem.link_s, caps, m)


def heads(chain: Chain, floor: Windows | None = None) -> Windows:
    """Earliest starts, [row][stage][microbatch]: the longest path of dependencies, caps and loads before.

    `floor` holds starts that are known already; the result is never below it. O(number of operations).
    """
    durations, down, last = chain.durations_s, chain.down, len(chain.durations_s) - 1
    head: Windows = [[[0.0] * chain.microbatches for _ in chain.stages] for _ in chain.rows]
    way = [(row, stage) for stage in chain.stages for row in range(down + 1)]
    way += [(row, stage) for stage in reversed(chain.stages) for row in range(down + 1, last + 1)]
    # What a stage has run before microbatch i in a row: i + 1 in earlier rows, i in its own, and in later rows those
    # that had to make room.
    per_microbatch = [[sum(row[d] for row in durations[: r + 1]) for d in chain.stages] for r in chain.rows]
    earlier = [[sum(row[d] for row in durations[:r]) for d in chain.stages] for r in chain.rows]
    later = [[sum(row[d] for row in durations[r + 1 :]) for d in chain.stages] for r in chain.rows]
    for i in range(chain.microbatches):
        for row, stage in way:
            own = head[row][stage]
            freed = i - chain.caps[stage]  # the microbatch that must be done before this one may enter
            starts = [floor[row][stage][i] if floor else 0.0]
            if i > 0:
                starts.append(own[i - 1] + durations[row][stage])
                before_s = per_microbatch[row][stage] * i + earlier[row][stage]
                if freed >= 0:
                    before_s += later[row][stage] * (freed + 1)
                starts.append(head[0][stage][0] + before_s)
            if row > 0:
                starts.append(head[row - 1][stage][i] + durations[row - 1][stage])
            elif freed >= 0:
                starts.append(head[last][stage][freed] + durations[last][stage])
            if row == down and stage > 0:
                starts.append(head[row][stage - 1][i] + durations[row][stage - 1] + chain.link_s[stage - 1])
            elif row == down + 1 and stage + 1 < len(chain.caps):
                starts.append(head[row][stage + 1][i] + durations[row][stage + 1] + chain.link_s[stage])
            own[i] = max(starts)
    return head


def mirror(windows: Windows) -> Windows:
    """Turns what was found for a chain into what it says about the reversed chain, and back."""
    return [[row[::-1] for row in by_stage] for by_stage in windows[::-1]]


def tails(chain: Chain, floor: Windows | None = None) -> Windows:
    """Least time from each operation's end to the end of the schedule: the heads of the reversed chain."""
    return mirror(heads(chain.reversed(), mirror(floor) if floor else None))


class StageGrid:
    """The ways in which one stage may interleave its rows, as a grid of counts.

    A point (n_0, n_1, …) says how many operations of each row are done; n_0 ≥ n_1 ≥ … because a microbatch
    passes the rows in order, and n_0 - n_last ≤ cap. `moves` lists (point before, point after, row,
    microbatch) as small integers, every point after all its predecessors.
    """

    def __init__(self, rows: int, microbatches: int, cap: int) -> None:
        counts = [
            (first, *reversed(rest))
            for first in range(microbatches + 1)
            for rest in combinations_with_replacement(range(max(0, first - cap), first + 1), rows - 1)
        ]
        number = {point: index for index, point in enumerate(counts)}
        self.points = len(counts)
        self.moves: list[tuple[int, int, int, int]] = []
        for point in counts:  # they count upward, so predecessors stand before
            for row in range(rows):
                if point[row] > 0:
                    before = number.get((*point[:row], point[row] - 1, *point[row + 1 :]))
                    if before is not None:
                        self.moves.append((before, number[point], row, point[row] - 1))


def grid_points(rows: int, microbatches: int, cap: int) -> int:
    """About how many points a `StageGrid` has, without building it."""
    width = min(cap, microbatches) + 1
    return (microbatches + 1) * (width if rows == 2 else width * (width + 1) // 2)


def narrow_stage(
    grid: StageGrid,
    durations_s: Sequence[float],
    starts_s: list[list[float]],
    ends_s: list[list[float]],
    slack_s: float,
) -> bool:
    """Tightens the windows of one stage's operations to what some path through its grid allows.

    Args:
        grid: the stage's grid.
        durations_s: per row.
        starts_s: [row][microbatch], earliest starts; raised in place.
        ends_s: [row][microbatch], latest ends; lowered in place.
        slack_s: an end may miss its limit by this much (rounding).

    Returns:
        False when no path exists: the windows cannot all hold.
    """
    earliest = [inf] * grid.points
    latest = [-inf] * grid.points
    earliest[0], latest[-1] = -inf, inf
    for before, after, row, i in grid.moves:
        start = earliest[before]
        if start < starts_s[row][i]:
            start = starts_s[row][i]
        end = start + durations_s[row]
        if end <= ends_s[row][i] + slack_s and end < earliest[after]:
            earliest[after] = end
    if earliest[-1] == inf:
        return False
    new_starts = [[inf] * len(row) for row in starts_s]
    new_ends = [[-inf] * len(row) for row in ends_s]
    for before, after, row, i in reversed(grid.moves):
        end = latest[after]
        if end > ends_s[row][i]:
            end = ends_s[row][i]
        start = earliest[before]
        if start < starts_s[row][i]:
            start = starts_s[row][i]
        if start + durations_s[row] > end + slack_s:
            continue  # no schedule takes this step
        if end - durations_s[row] > latest[before]:
            latest[before] = end - durations_s[row]
        if start < new_starts[row][i]:
            new_starts[row][i] = start
        if end > new_ends[row][i]:
            new_ends[row][i] = end
    for row in range(len(starts_s)):
        for i in range(len(starts_s[row])):
            if new_starts[row][i] == inf:
                return False
            starts_s[row][i] = max(starts_s[row][i], new_starts[row][i])
            ends_s[row][i] = min(ends_s[row][i], new_ends[row][i])
    return True


class Refuter:
    """Proves makespans impossible for one chain; keeps what does not depend on the makespan."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._heads = heads(chain)
        self._tails = tails(chain)
        by_cap = {cap: StageGrid(len(chain.rows), chain.microbatches, cap) for cap in sorted(set(chain.caps))}
        self._grids = [by_cap[cap] for cap in chain.caps]

    def refutes(self, limit_s: float, rounds_max: int) -> bool:
        """True when no schedule ends within `limit_s`; False when `rounds_max` rounds did not show that."""
        chain = self._chain
        slack_s = limit_s * ROUNDING
        head, tail = self._heads, self._tails
        for _ in range(rounds_max):
            starts, left = _copy(head), _copy(tail)
            for stage in chain.stages:
                starts_s = [starts[row][stage] for row in chain.rows]
                ends_s = [[limit_s - after for after in left[row][stage]] for row in chain.rows]
                durations_s = [chain.durations_s[row][stage] for row in chain.rows]
                if not narrow_stage(self._grids[stage], durations_s, starts_s, ends_s, slack_s):
                    return True
                for row in chain.rows:
                    left[row][stage] = [limit_s - end for end in ends_s[row]]
            new_head, new_tail = heads(chain, starts), tails(chain, left)
            moved = _distance(head, new_head) + _distance(tail, new_tail)
            head, tail = new_head, new_tail
            if moved <= 10 * slack_s:
                return False
        return False


def _copy(windows: Windows) -> Windows:
    return [[list(row) for row in by_stage] for by_stage in windows]


def _distance(one: Windows, other: Windows) -> float:
    """How far two sets of windows lie apart, summed."""
    return sum(
        abs(a - b)
        for by_stage, by_stage_other in zip(one, other, strict=True)
        for row, row_other in zip(by_stage, by_stage_other, strict=True)
        for a, b in zip(row, row_other, strict=True)
    )
