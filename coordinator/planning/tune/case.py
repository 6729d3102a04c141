"""One choice of the tuner worked out: which blocks stand where, what they cost, and the policies that order
them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.planning.order.policy_grid import Point, policies_of
from coordinator.planning.order.search import latency_warmup
from coordinator.planning.partition.costs import BlockCost
from coordinator.planning.schedules.design import Design, routes_of
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import Timeline
from protocol.base.errors import BadInputError
from protocol.run.segments import equal_cost_segments
from protocol.schedule.ir import Flow
from protocol.schedule.policies import First, Policy

#: A choice with more operations than this is refused: the simulator would need a minute for it.
OPERATIONS_MAX = 1_000_000


@dataclass(frozen=True)
class Node:
    """One node in pipeline order: its operations last 1/speed of the blocks' times."""

    speed: float = 1.0
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Workload:
    """What a step computes.

    Attributes:
        blocks: sub-layer blocks in order; times and activation bytes of **one sample** on a node of speed 1.
        samples, tokens: of a step, and of one sample.
        boundary_bytes: one sample's activation between two stages; its gradient is as large.
        weight_share: the share of a backward that the weight gradient takes when split (measured: 0.34 to
            0.46).
        attention_share: the share of a forward that grows with the square of the sequence, for segments.
        overhead_s: added to every operation: launching it, handing it over; what forbids tiny pieces.
    """

    blocks: Sequence[BlockCost]
    samples: int
    tokens: int = 1
    boundary_bytes: float = 0.0
    weight_share: float = 0.4
    attention_share: float = 0.0
    overhead_s: float = 0.0


@dataclass(frozen=True)
class Choice:
    """One point of the space."""

    nodes: int
    microbatch_samples: int
    placement: str
    order: str
    split: bool
    segments: int = 1
    slices: int = 0

    def __str__(self) -> str:
        parts = [f"{self.nodes} nodes", f"{self.microbatch_samples} samples", self.way]
        parts += [f"{self.segments} segments"] if self.segments > 1 else []
        parts += [f"{self.slices} sliced"] if self.slices else []
        return ", ".join(parts)

    @property
    def way(self) -> str:
        """Placement, order, and whether backwards are split."""
        return ", ".join([self.placement, self.order] + (["split backward"] if self.split else []))


class Case:
    """One choice worked out: which blocks where, what they cost, and the policies."""

    def __init__(
        self,
        choice: Choice,
        work: Workload,
        nodes: Sequence[Node],
        network: Network,
    ) -> None:
        self._choice, self._work, self._nodes = choice, work, list(nodes[: choice.nodes])
        if choice.nodes > len(nodes):
            raise BadInputError(f"nodes: {choice.nodes} wanted, {len(nodes)} given")
        self._microbatches, rest = divmod(work.samples, choice.microbatch_samples)
        if rest:
            raise BadInputError(
                f"microbatch_samples: {choice.microbatch_samples} does not divide the step's {work.samples} samples"
            )
        if choice.slices and choice.microbatch_samples < 2:
            raise BadInputError(f"slices: a microbatch of {choice.microbatch_samples} sample has no halves")
        self._routes = routes_of(choice.placement, choice.nodes)
        stages = len(self._routes[0])
        if stages > len(work.blocks):
            raise BadInputError(f"stages: {stages} stages cannot share {len(work.blocks)} blocks")
        operations = (3 if choice.split else 2) * stages * self._microbatches * choice.segments
        if operations > OPERATIONS_MAX:
            raise BadInputError(f"microbatches: {operations} operations, more than {OPERATIONS_MAX}")
        self._cut_tokens = self._segment_tokens()
        self._costs = self._stage_costs(stages)
        self._network = network.first(choice.nodes)
        self._piece_bytes = work.boundary_bytes * choice.microbatch_samples / choice.segments

    def _segment_tokens(self) -> tuple[int, ...]:
        """Segments of equal time, as far as whole tokens allow."""
        segments, work = self._choice.segments, self._work
        if segments == 1:
            return (1,)
        return equal_cost_segments(
            work.tokens, segments, 1 - work.attention_share, work.attention_share / max(1, work.tokens)
        )

    def _stage_costs(self, stages: int) -> Costs:
        """Blocks balanced over stages by their nodes' speed; parameters summed per node."""
        work, samples = self._work, self._choice.microbatch_samples
        holders = [[route[stage].node for route in self._routes] for stage in range(stages)]
        speeds = [min(self._nodes[node].speed for node in of_stage) for of_stage in holders]
        self.edges = edges = balanced_edges([b.forward_s + b.backward_s for b in work.blocks], speeds)
        self.parameter_bytes = [0.0] * len(self._nodes)
        costs = []
        for stage in range(stages):
            held = work.blocks[edges[stage] : edges[stage + 1]]
            overhead_s = work.overhead_s * self._choice.segments
            backward_s = samples * sum(b.backward_s for b in held)
            for node in dict.fromkeys(holders[stage]):
                self.parameter_bytes[node] += sum(b.parameter_bytes for b in held)
            costs.append(
                StageCosts(
                    forward_s=samples * sum(b.forward_s for b in held) + overhead_s,
                    backward_input_s=backward_s * (1 - work.weight_share) + overhead_s,
                    backward_weight_s=backward_s * work.weight_share + (overhead_s if self._choice.split else 0.0),
                    activation=samples * sum(b.activation_bytes for b in held),
                    activation_bytes=samples * work.boundary_bytes,
                    gradient_bytes=samples * work.boundary_bytes,
                )
            )
        for node, (held_bytes, of_node) in enumerate(zip(self.parameter_bytes, self._nodes, strict=True)):
            if held_bytes > of_node.memory_bytes:
                raise BadInputError(f"memory: node {node} cannot hold its parameters of {held_bytes:.4g} bytes")
        segments = len(self._cut_tokens)
        shares = (1 / segments,) * segments if segments > 1 else None
        return Costs(costs, [1 / node.speed for node in self._nodes], shares)

    def bound_s(self) -> float:
        """A quick valid bound: every node's work, after the first piece reached it and before the last left
        it."""
        costs, slowness = self._costs, self._costs.node_slowness or ()
        # The smaller half of three samples is a third.
        halves = 3 if self._choice.slices else 1
        work_s = [0.0] * len(self._nodes)
        head_s = [math.inf] * len(self._nodes)
        for number, route in enumerate(self._routes):
            share = len(range(number, self._microbatches, len(self._routes)))
            at_s = 0.0
            for position, (stage, node) in enumerate(route):
                of_stage = costs.stages[stage]
                whole_s = of_stage.forward_s + of_stage.backward_input_s + of_stage.backward_weight_s
                work_s[node] += share * whole_s * slowness[node]
                if share:
                    head_s[node] = min(head_s[node], at_s)
                at_s += of_stage.forward_s * slowness[node] / (len(self._cut_tokens) * halves)
                if position + 1 < len(route):
                    at_s += self._network.alone_s(node, route[position + 1].node, self._piece_bytes / halves)
        return max(h + w for h, w in zip(head_s, work_s, strict=True) if h < math.inf)

    def run(self) -> Timeline:
        """Simulates the choice under its policies."""
        samples = self._choice.microbatch_samples
        halves = ((samples + 1) // 2, samples // 2)
        flows = tuple(
            Flow(
                microbatch=number,
                route=self._routes[number % len(self._routes)],
                segment_tokens=self._cut_tokens,
                slice_samples=halves if number < self._choice.slices else (samples,),
            )
            for number in range(self._microbatches)
        )
        design = Design(flows, tuple(self._policies()), split=self._choice.split)
        return design.timeline(self._costs, self._network)

    def _policies(self) -> list[Policy]:
        choice, count, segments = self._choice, self._choice.nodes, self._choice.segments
        room = self._room()
        if choice.order == "interleaved 1F1B":
            if self._microbatches * segments % count or (count % segments and segments % count):
                raise BadInputError(
                    f"segments: {self._microbatches} microbatches of {segments} segments do not fill groups of {count}"
                )
            point = Point(choice.placement, First.INTERLEAVED, False, True, interval=count)
            group = (segments - 1) // count * 2 * count + (segments - 1) % count
            policies = policies_of(point, self._routes, count)
            return [
                Policy(
                    first=policy.first,
                    wait_turn=True,
                    warmup=(policy.warmup or 0) + group,
                    forward=policy.forward,
                    backward=policy.backward,
                )
                for policy in policies
            ]
        if choice.placement == "one-to-one":
            caps = self._line_caps()
            first = First.BACKWARD
            return [
                Policy(first=first, alive_max=(max(1, min(cap, fits)),)) for cap, fits in zip(caps, room, strict=True)
            ]
        first = First(choice.order.split()[0]) if choice.order.split()[0] in tuple(First) else First.INTERLEAVED
        point = Point(choice.placement, first, True, choice.placement == "circular")
        policies = policies_of(point, self._routes, count, segments, free_first=choice.split)
        limited = []
        for policy, fits in zip(policies, room, strict=True):
            held = len(policy.alive_max)
            # Every stage of the node but one keeps a place free for the others, or the node could fill up
            # with one.
            most = max(1, fits - (held - 1))
            limited.append(
                Policy(
                    first=policy.first,
                    forward=policy.forward,
                    backward=policy.backward,
                    alive_max=tuple(min(cap, most) for cap in policy.alive_max),
                    alive_total_max=max(held, fits),
                    free_first=policy.free_first,
                )
            )
        return limited

    def _line_caps(self) -> list[int]:
        """In-flight limits of one stage per node, in segments, for the choice's order."""
        count, segments, order = self._choice.nodes, self._choice.segments, self._choice.order
        if order == "all memory":
            return [self._microbatches * segments] * count
        warmup = list(range(count - 1, -1, -1))
        if order == "latency-aware 1F1B":
            slowness = self._costs.node_slowness or (1.0,) * count
            stages = self._costs.stages
            warmup = latency_warmup(
                [c.forward_s * s / segments for c, s in zip(stages, slowness, strict=True)],
                [
                    (c.backward_input_s + c.backward_weight_s) * s / segments
                    for c, s in zip(stages, slowness, strict=True)
                ],
                [self._network.alone_s(node, node + 1, self._piece_bytes) for node in range(count - 1)],
            )
        return [w + segments for w in warmup]

    def _room(self) -> list[int]:
        """Per node, how many segments of its largest stage its memory holds beside the parameters."""
        largest = [0.0] * self._choice.nodes
        for route in self._routes:
            for stage, node in route:
                largest[node] = max(largest[node], self._costs.stages[stage].activation)
        # Segments of equal time are not equally long: the first is the longest.
        share = max(self._cut_tokens) / sum(self._cut_tokens)
        room = []
        for of_node, piece, held in zip(self._nodes, largest, self.parameter_bytes, strict=True):
            if not math.isfinite(of_node.memory_bytes) or piece <= 0:
                room.append(1 << 40)
            else:
                room.append(int((of_node.memory_bytes - held) * (1 + 1e-12) / (piece * share)))
        return room


def balanced_edges(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """First block of every stage, and the number of blocks: the largest cost/speed of a stage is least.

    Dynamic programme over (stages, blocks), every stage with at least one block; ties take the later cut. Filling
    greedily up to a limit is not enough: with unequal speeds a stage may have to leave room in its limit so that a
    heavy block falls to a fast one.
    """
    if len(speeds) > len(costs):
        raise BadInputError(f"stages: {len(speeds)} stages cannot share {len(costs)} blocks")
    count = len(costs)
    before = np.concatenate(([0.0], np.cumsum(costs)))
    held = before[None, :] - before[:, None]  # [first, end]
    held[np.tri(count + 1, dtype=bool)] = np.inf  # an empty stage
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    cuts = []
    for speed in speeds:
        worst = np.maximum(least[:, None], held / speed)
        cuts.append(count - np.argmin(worst[::-1], axis=0))
        least = worst.min(axis=0)
    edges = [count]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    return edges[::-1]
