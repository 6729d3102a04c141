"""FlexPipe's schedule space: placements times priorities, every point simulated with measured durations.

A point is a placement, a computation-type priority and the traversal of forwards and backwards. The paper's
unit steps give F and B the same length, and orders found so are poor where a backward takes twice a forward
(4 nodes, 8 microbatches: V-shape 32.5 against 28.5); here time is what the costs say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from coordinator.planning.schedules.design import Route
from protocol.schedule.policies import First, Policy, Traversal


@dataclass(frozen=True)
class Point:
    """One choice of the grid; `interval` makes a node wait for each of its stages in turn."""

    placement: str
    first: First
    forward_deepest: bool = False
    backward_deepest: bool = True
    interval: int = 0

    def __str__(self) -> str:
        words = f"{self.placement}, {self.first} first"
        if self.placement != "one-to-one":
            forward, backward = ("depth" if d else "breadth" for d in (self.forward_deepest, self.backward_deepest))
            words += f", F {forward} B {backward}"
        return words + (f" in turns of {self.interval}" if self.interval else "")


def grid(nodes: int) -> Iterator[Point]:
    """The 40 points of algorithms section 1.4, of which one-to-one placement needs no traversal.

    Turns of fixed length are tried where they are known not to deadlock: circular, breadth-first forwards and
    depth-first backwards (interleaved 1F1B's).
    """
    for first in First:
        yield Point("one-to-one", first)
    for placement in ("circular", "V-shape", "bidirectional"):
        for first, forward, backward in product(First, (False, True), (True, False)):
            yield Point(placement, first, forward, backward)
    yield Point("circular", First.INTERLEAVED, interval=nodes)


def policies_of(
    point: Point,
    routes: Sequence[Route],
    nodes: int,
    segments: int = 1,
    free_first: bool = False,
) -> list[Policy]:
    """One policy per node.

    A stage that is `d` steps from the end of its route may hold what its turn-round needs: d microbatches,
    as 1F1B does, and never less than one; caps for a whole node deadlock where it holds both ends of a route.
    """
    ways: dict[int, dict[int, int]] = {node: {} for node in range(nodes)}
    for route in routes:
        for position, hop in enumerate(route):
            left = len(route) - position
            ways[hop.node][hop.stage] = max(left, ways[hop.node].get(hop.stage, 1))
    policies = []
    for node in range(nodes):
        lefts = [left for _, left in sorted(ways[node].items())]
        turns = bool(point.interval)
        policies.append(
            Policy(
                first=point.first,
                wait_turn=turns,
                warmup=2 * (nodes - 1 - node) + (len(lefts) - 1) * nodes if turns else None,
                forward=Traversal(deepest_first=point.forward_deepest, interval=point.interval),
                backward=Traversal(deepest_first=point.backward_deepest, interval=point.interval),
                alive_max=() if turns else tuple(left + segments - 1 for left in lefts),
                free_first=free_first,
            )
        )
    return policies
