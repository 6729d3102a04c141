"""The shortest step with split backwards under a memory limit, on equal nodes: zero-bubble schedules and segments.

Two families are tried: a V-shape (two stages a node, Qi et al. 2024) and a line of stages over segments of tokens
(Seq1F1B with split backwards), with W in gaps, where it fits, or before a backward when memory is full. Orders are
also made as if links were slower or faster than they are, and then judged on the true ones: a list scheduler sees only
what is ready now, and pretended latency makes it keep work in reserve. The best is improved on its critical path.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from time import monotonic

from coordinator.planning.order.improver import OrderImprover
from coordinator.planning.schedules.design import routes_of
from coordinator.planning.simulator.graph import Costs, TaskGraph, build_graph, unordered
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import DeadlockError, Timeline, drive, replay
from coordinator.planning.simulator.report import graph_bound
from protocol.base.errors import BadInputError
from protocol.schedule.ir import Flow
from protocol.schedule.policies import First, Policy, Traversal, Weights

#: How much slower or faster than they are links may be taken for.
_PRETENDED = (1.0, 1.5, 0.0, 2.0)


@dataclass(frozen=True)
class Line:
    """Equal nodes in a row; times are a node's whole share of one microbatch."""

    nodes: int
    microbatches: int
    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    link_s: float = 0.0


@dataclass(frozen=True)
class SplitFound:
    """The best order under the limit, how it was made, and a bound for its placement and cut."""

    timeline: Timeline
    words: str
    bound_s: float
    search_s: float


def search_split(
    line: Line,
    peak_max: float,
    segments: tuple[int, ...] = (1,),
    budget_s: float = 10.0,
    seed: int = 0,
    clock: Callable[[], float] = monotonic,
) -> SplitFound:
    """The shortest step whose every node holds at most `peak_max` microbatches' activations.

    Args:
        segments: cuts to try; 1 tries V-shapes too.
        budget_s: two thirds for policies, the rest for improving the best.

    Raises:
        BadInputError: when no tried order fits the limit.
    """
    began_s = clock()
    best: Timeline | None = None
    words = ""

    @cache
    def graph(placement: str, count: int, scale: float) -> TaskGraph:
        return _graph(line, placement, count, line.link_s * scale)

    for placement, count, name, policies in _candidates(line, peak_max, segments):
        if best is not None and clock() - began_s > budget_s * 2 / 3:
            break
        for pretended in _PRETENDED if line.link_s else (1.0,):
            made, true = (graph(placement, count, scale) for scale in (pretended, 1.0))
            try:
                timeline = drive(made, policies)
                if pretended != 1.0:
                    timeline = replay(true, timeline.orders)
            except DeadlockError:
                continue
            if max(timeline.peaks()) > peak_max * (1 + 1e-9):
                continue
            if best is None or timeline.makespan_s < best.makespan_s * (1 - 1e-12):
                best = timeline
                words = name if pretended == 1.0 else f"{name}, made for links {pretended:g} times as slow"
    if best is None:
        raise BadInputError(f"peak_max: no order of {line.nodes} nodes fits {peak_max:g} microbatches a node")
    bound_s = graph_bound(best.graph)
    improver = OrderImprover(best.graph, [peak_max] * line.nodes)
    improved = improver.improve(best.orders, bound_s, random.Random(seed), lambda: budget_s - (clock() - began_s))
    if improved.makespan_s < best.makespan_s * (1 - 1e-12):
        best, words = replay(best.graph, improved.orders), f"{words}, improved by {improved.moves} moves"
    return SplitFound(best, words, bound_s, clock() - began_s)


def _graph(line: Line, placement: str, segments: int, link_s: float) -> TaskGraph:
    routes = routes_of(placement, line.nodes)
    chunks = len(routes[0]) // line.nodes
    flows = [Flow(microbatch=m, route=routes[0], segment_tokens=(1,) * segments) for m in range(line.microbatches)]
    return build_graph(
        flows,
        unordered(flows, line.nodes, split=True),
        Costs.equal(len(routes[0]), line.forward_s, line.input_s, line.weight_s, chunks),
        Network.uniform(line.nodes, link_s),
    )


def _candidates(line: Line, peak_max: float, segments: tuple[int, ...]) -> Iterator[tuple[str, int, str, list[Policy]]]:
    """(placement, segments, words, policies), the usually best first."""
    rules = list(product((True, False), (First.FORWARD, First.INTERLEAVED, First.BACKWARD), (Weights.FIT, Weights.GAP)))
    if 1 in segments and (fits := int(2 * peak_max + 1e-9)) >= 2:
        # The way down may take all places but one; where it turns, it needs fewer.
        for (free_first, first, weights), backward, fewer in product(rules, (True, False), (1, 0)):
            policies = [
                Policy(
                    first=first,
                    alive_max=(max(1, fits - 1 - fewer * node), min(fits, line.nodes)),
                    alive_total_max=fits,
                    forward=Traversal(deepest_first=True),
                    backward=Traversal(deepest_first=backward),
                    weights=weights,
                    free_first=free_first,
                )
                for node in range(line.nodes)
            ]
            yield "V-shape", 1, f"V-shape, {first} first, W in {weights}", policies
    for count in segments:
        if (fits := int(peak_max * count + 1e-9)) < count:
            continue  # not even one microbatch goes back
        for free_first, first, weights in reversed(rules):
            yield (
                "one-to-one",
                count,
                f"{count} segments, {first} first, W in {weights}",
                [Policy(first=first, alive_max=(fits,), weights=weights, free_first=free_first)] * line.nodes,
            )
