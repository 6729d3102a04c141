"""FlexPipe's whole grid, point by point: what the tuner's choice is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.planning.order.policy_grid import Point, policies_of
from coordinator.planning.schedules.design import routes_of
from coordinator.planning.simulator.graph import Costs, TaskGraph, build_graph, unordered
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import DeadlockError, Timeline, drive
from protocol.schedule.ir import Flow


@dataclass(frozen=True)
class Explored:
    """A grid point and what came of it: a timeline, or why there is none."""

    point: Point
    timeline: Timeline | None
    refused: str = ""


class PolicyGrid:
    """Runs grid points on equal stages; points of one placement share their graph.

    Args:
        nodes, microbatches: the pipeline.
        forward_s, input_s, weight_s: a node's whole share of one microbatch.
        link_s: between any two nodes.
        split: whether backwards are split.
    """

    def __init__(
        self,
        nodes: int,
        microbatches: int,
        forward_s: float = 1.0,
        input_s: float = 1.0,
        weight_s: float = 1.0,
        link_s: float = 0.0,
        split: bool = False,
        segments: int = 1,
    ) -> None:
        self._nodes = nodes
        self._microbatches = microbatches
        self._times = (forward_s, input_s, weight_s)
        self._network = Network.uniform(nodes, link_s)
        self._split = split
        self._segments = segments
        self._graphs: dict[str, TaskGraph] = {}

    def graph(self, placement: str) -> TaskGraph:
        """The operations of all microbatches under a placement."""
        if placement not in self._graphs:
            routes = routes_of(placement, self._nodes)
            chunks = len(routes[0]) // self._nodes
            flows = [
                Flow(microbatch=m, route=routes[m % len(routes)], segment_tokens=(1,) * self._segments)
                for m in range(self._microbatches)
            ]
            self._graphs[placement] = build_graph(
                flows,
                unordered(flows, self._nodes, self._split),
                Costs.equal(self._nodes * chunks, *self._times, chunks),
                self._network,
            )
        return self._graphs[placement]

    def run(self, point: Point) -> Explored:
        """Simulates one point."""
        routes = routes_of(point.placement, self._nodes)
        policies = policies_of(point, routes, self._nodes, self._segments)
        try:
            return Explored(point, drive(self.graph(point.placement), policies))
        except DeadlockError as error:
            return Explored(point, None, str(error))
