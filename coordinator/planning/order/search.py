"""In what order should a pipeline's stages work? The search behind `barnraise plan schedule`.

First a small grid of policies, each simulated (a deterministic warm start, FlexPipe's way), then the best
orders are improved on their critical path until the lower bound is met or the time is over. No solver is
used.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import monotonic

from coordinator.planning.order.bounds import Bound, pipeline_bound
from coordinator.planning.order.improver import OrderImprover
from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.simulator.graph import Costs, StageCosts, TaskGraph, build_graph, unordered
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import DeadlockError, Timeline, drive, replay
from protocol.schedule.check import check_bound
from protocol.schedule.ir import Flow, Hop
from protocol.schedule.policies import First, Policy, Weights

#: Above so many operations the costlier bounds and policies are left out.
SMALL_OPERATIONS = 4_000
#: On a link that takes longer than so many cycles nobody has that many microbatches; the quotient may be infinite.
CYCLES_MAX = 1e9


@dataclass(frozen=True)
class Found:
    """The best order found for a problem.

    Attributes:
        policy: the policy it grew from, in words.
        stopped: why the search ended: "bound" or "time".
    """

    timeline: Timeline
    bound: Bound
    policy: str
    search_s: float
    stopped: str

    @property
    def fraction(self) -> float:
        """How much of the lower bound is reached: 1 is proven optimal."""
        return self.bound.value_s / self.timeline.makespan_s if self.timeline.makespan_s else 1.0


def latency_warmup(forward_s: Sequence[float], backward_s: Sequence[float], link_s: Sequence[float]) -> list[int]:
    """Per stage, the forwards to run before the steady state so that latency costs no bubble.

    1F1B has one microbatch in flight per later hop, so each cycle pays the link twice; one more is needed
    for every started cycle that the way there and back takes: sum over later hops of 1 + ceil(2 link / (F + B)),
    F + B being the slowest stage's.
    """
    cycle_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    warmup = [0]
    for seconds in reversed(link_s):
        cycles = 2 * seconds / cycle_s if cycle_s > 0 else 0.0
        extra = math.ceil(min(cycles, CYCLES_MAX) - 1e-9)
        warmup.append(warmup[-1] + 1 + extra)
    return warmup[::-1]


def problem_graph(problem: PipelineProblem, link_scale: float = 1.0) -> TaskGraph:
    """The problem's operations; `link_scale` plans as if links were faster or slower than they are."""
    route = tuple(Hop(stage, stage) for stage in range(problem.stages))
    flows = [Flow(microbatch=m, route=route) for m in range(problem.microbatches)]
    times = zip(problem.forward_s, problem.backward_input_s, problem.backward_weight_s, strict=True)
    return build_graph(
        flows,
        unordered(flows, problem.stages, problem.split_backward),
        Costs([StageCosts(f, i, w) for f, i, w in times]),
        Network.line([seconds * link_scale for seconds in problem.link_s]),
    )


def search(problem: PipelineProblem, budget_s: float, seed: int, clock: Callable[[], float] = monotonic) -> Found:
    """The best order found within the budget; the same for the same seed unless the time ends it.

    Args:
        clock: seconds that only grow.
    """
    began_s = clock()
    operations = (3 if problem.split_backward else 2) * problem.stages * problem.microbatches
    bound = pipeline_bound(problem, effort=2 if operations <= SMALL_OPERATIONS else 1)
    graph = problem_graph(problem)
    best: Timeline | None = None
    words = ""

    def time_left() -> float:
        return budget_s - (clock() - began_s)

    def reached() -> bool:
        return best is not None and best.makespan_s <= bound.value_s * (1 + 1e-9)

    for name, policies in _policies(problem):
        if best is not None and (reached() or time_left() <= budget_s / 2):
            break
        try:
            timeline = drive(graph, policies)
        except DeadlockError:
            continue
        if best is None or timeline.makespan_s < best.makespan_s:
            best, words = timeline, name
    assert best is not None, "backwards first within memory never deadlocks"
    if not reached() and time_left() > 0:
        caps = problem.activations_max
        improver = OrderImprover(graph, None if caps is None else [float(cap) for cap in caps])
        improved = improver.improve(best.orders, bound.value_s, random.Random(seed), time_left)
        if improved.makespan_s < best.makespan_s:
            best, words = replay(graph, improved.orders), f"{words}, improved by {improved.moves} moves"
    stopped = "bound" if reached() else "time"
    # Both are sums of the same times in another order: where the bound is reached it may be above by a rounding.
    check_bound(best.makespan_s, bound.value_s)
    bound = replace(bound, value_s=min(bound.value_s, best.makespan_s))
    return Found(best, bound, words, clock() - began_s, stopped)


def _policies(problem: PipelineProblem) -> Iterator[tuple[str, list[Policy]]]:
    """Policies per stage, the most promising first; the first, backwards first within memory, never deadlocks."""
    for name, caps in _caps(problem):
        if problem.split_backward:
            rules: Sequence[tuple[Weights, bool]] = list(product(Weights, (False, True)))
        else:
            rules = [(Weights.GAP, False)]
        for (weights, free_first), first in product(rules, (First.BACKWARD, First.INTERLEAVED, First.FORWARD)):
            words = f"{first} first, {name}"
            if problem.split_backward:
                words += f", W in {weights}" + (" and before backwards when full" if free_first else "")
            yield (
                words,
                [Policy(first=first, alive_max=(cap,), weights=weights, free_first=free_first) for cap in caps],
            )
        # Turns that are waited for keep 1F1B's order where times are unequal.
        yield (
            f"strict turns, {name}",
            [Policy(first=First.INTERLEAVED, wait_turn=True, warmup=cap - 1, alive_max=(cap,)) for cap in caps],
        )


def _caps(problem: PipelineProblem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Limits in flight per stage, each below the memory's, without repeats."""
    depth = range(problem.stages)
    most = problem.activations_max or [problem.microbatches] * problem.stages
    backward_s = [i + w for i, w in zip(problem.backward_input_s, problem.backward_weight_s, strict=True)]
    warmup = latency_warmup(problem.forward_s, backward_s, problem.link_s)
    named = [
        ("1F1B's memory", [problem.stages - d for d in depth]),
        ("latency-aware warm-up", [w + 1 for w in warmup]),
        ("all memory", list(most)),
        ("twice 1F1B's memory", [2 * (problem.stages - d) for d in depth]),
        ("twice the latency-aware warm-up", [2 * w + 1 for w in warmup]),
        ("three times 1F1B's memory", [3 * (problem.stages - d) for d in depth]),
    ]
    seen: dict[tuple[int, ...], None] = {}
    for name, caps in named:
        limited = tuple(max(1, min(cap, limit)) for cap, limit in zip(caps, most, strict=True))
        if limited not in seen:
            seen[limited] = None
            yield name, limited
