"""What the nodes of a run that is about to begin should do first, and how much each should have in flight.

A plan with seats is simulated as the run will work: every stage's members take its microbatches in turns, each as many
as its device and lines allow; activations and gradients cross from member to server to server to member; a member has
room by position (`protocol.run.plan.graphs_max`), or what its memory holds if that is less. Asked are policies as nodes
follow them (`protocol.schedule.live.followed_live`), so what is chosen here is what is done there; warm-ups, turns that
are waited for and intervals are of no use, since a pool does not know what is still to come. Left out are weight
gradients and parameters on the lines, and the servers' own lines: they are the same whatever goes first.

Which kind goes first, and which chunk of a stage, are tried one after the other. How much is in flight follows from
latency: beside what the run's rule gives for waits and computing, as much as the lines' latency keeps in the air.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coordinator.planning.placement.seats import SeatCost, SeatPlan, Seats
from coordinator.planning.schedules.design import Design
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import Chooser
from protocol.base.errors import BadInputError
from protocol.run.plan import IN_FLIGHT_LIMIT, graphs_max
from protocol.schedule.ir import Flow, Hop
from protocol.schedule.live import followed_live
from protocol.schedule.policies import First, Policy, Ready, State, Traversal, choose

NODES_MAX = 32
"""Members that are simulated; of more, an even choice of each stage's, with as much less work."""
OPERATIONS_MAX = 1_200
"""Forwards and backwards of one simulation: with all their transfers followed, a second or two of arithmetic."""
STEPS_AT_ONCE = 2
"""With a delay two steps are open at a time, and the older one goes first; without, one is."""
LATENCY_SHARE = 1.5
"""As much more than the latency alone takes, since not every answer is the first in its line."""
GAIN_MIN = 0.01
"""What is less than this faster in simulation is not faster."""
ROOM_GAIN_MIN = 0.1
"""More in flight takes memory of every device, and what is simulated is a sample of a run: less is no gain."""
WEIGHT_SHARE = 0.4
"""Of a backward, when it is split (measured: 0.34 to 0.46)."""
WORDS = {First.BACKWARD: "backwards first", First.FORWARD: "forwards first", First.INTERLEAVED: "both by turns"}


@dataclass(frozen=True)
class LiveChoice:
    """An order policy for all nodes of a run, forwards in flight for each stage's volunteers, and why."""

    policy: Policy
    in_flight_max: int
    reason: str
    """A sentence without its full stop."""


def choose_live(
    seats: Seats, plan: SeatPlan, in_flight: int, tuned: bool, expired: Callable[[], bool] = lambda: False
) -> LiveChoice:
    """What a run with this plan should do.

    Args:
        in_flight: forwards in flight by the run's rule; never less.
        tuned: whether the order is asked for, too; otherwise it is the run file's.
        expired: whether no more may be tried.
    """
    model = _Model(seats, plan)
    config = seats.config
    first = Policy() if tuned else Policy(first=First(config.stages.order))
    wanted = model.in_flight_wanted(in_flight)
    if not tuned and wanted == in_flight:
        return LiveChoice(first, in_flight, "")
    times = {first: model.step_s(first, in_flight)}
    for policy in _policies(max(len(seats.course.chunks_of(k)) for k in range(seats.count))) if tuned else ():
        if policy != first and not expired():
            times[policy] = model.step_s(policy, in_flight)
    best = min(times, key=lambda policy: times[policy])
    if times[best] > times[first] * (1 - GAIN_MIN):
        best = first
    reasons = [_why_order(best, times, first)] if tuned else []
    if wanted > in_flight and not expired():
        more_s = model.step_s(best, wanted)
        if more_s < times[best] * (1 - ROOM_GAIN_MIN):
            reasons.append(
                f"{wanted} forwards in flight, as the ways between members alone take {model.latency_s:.3g} s there and"
                f" back: with {in_flight} a step would take {times[best] / more_s:.2f} times as long"
            )
            in_flight = wanted
    return LiveChoice(best, in_flight, "; ".join(reasons))


def _policies(chunks: int) -> list[Policy]:
    """All that nodes follow live, the usual ones first."""
    ways = [(False, True)] if chunks == 1 else [(False, True), (True, True), (False, False), (True, False)]
    return [
        followed_live(Policy(first=first, forward=Traversal(deepest_first=f), backward=Traversal(deepest_first=b)))
        for f, b in ways
        for first in First
    ]


def words_of(policy: Policy) -> str:
    """The policy as people say it."""
    words = WORDS[policy.first]
    if policy.forward != Policy().forward or policy.backward != Policy().backward:
        depths = ("deepest" if way.deepest_first else "first" for way in (policy.forward, policy.backward))
        words += ", of a stage's parts the {} for forwards and the {} for backwards".format(*depths)
    return words


def _why_order(best: Policy, times: dict[Policy, float], first: Policy) -> str:
    if best != first:
        return (
            f"nodes do {words_of(best)}: {times[best] / times[first]:.0%} of the time of {words_of(first)}, simulated"
        )
    others = [
        f"{words_of(policy)} {seconds / times[first]:.2f} times"
        for policy, seconds in sorted(times.items(), key=lambda each: each[1])
        if policy != first and math.isfinite(seconds)
    ]
    compared = f" ({'; '.join(others[:2])})" if others else ""
    return f"nodes do {words_of(best)}: simulated, nothing else is faster by {GAIN_MIN:.0%}{compared}"


def _oldest_step_first(microbatches: int) -> Chooser:
    """As nodes do whatever their policy says; of a step there are so many microbatches."""

    def chooser(
        policy: Policy,
        state: State,
        candidates: Sequence[Ready],
        forward_gap_s: float = math.inf,
        backward_gap_s: float = math.inf,
    ) -> tuple[Ready | None, State]:
        oldest = min(each.key.microbatch // microbatches for each in candidates)
        here = [each for each in candidates if each.key.microbatch // microbatches == oldest]
        chosen, after = choose(policy, state, here, forward_gap_s, backward_gap_s)
        if chosen is None and len(here) < len(candidates):  # no room for the older step's forward
            return choose(policy, state, candidates, forward_gap_s, backward_gap_s)
        return chosen, after

    return chooser


class _Model:
    """A plan's members, their shares of the work, and what lies between them."""

    def __init__(self, seats: Seats, plan: SeatPlan) -> None:
        self._seats, self._plan = seats, plan
        pools, sizes = seats.pools, seats.pools.sizes
        cost: SeatCost = seats.cost(plan)
        self._step_s = cost.step_s
        rows = [seats.rows(plan.servers[k], plan.volunteers[k]) for k in range(seats.count)]
        shares = []
        for k, of_stage in enumerate(rows):
            capacity = tuple(each[of_stage] for each in seats.capacity(k, plan.servers[k], plan.edges))
            shares.append(pools.done(cost.pace_s, sizes.contribution_tasks, *capacity))
        self._part = min(1.0, NODES_MAX / max(1, sum(map(len, rows))))
        self._members: list[list[tuple[int, int, float]]] = []
        """Of each stage: (node of the simulation, machine, share of the stage's work)."""
        number = 0
        for of_stage, share in zip(rows, shares, strict=True):
            count = max(1, round(len(of_stage) * self._part))
            by_share = sorted(range(len(of_stage)), key=lambda place: (-share[place], place))
            chosen = [by_share[place * len(by_share) // count] for place in range(count)]
            self._members.append(
                [(number + at, of_stage[place], float(share[place])) for at, place in enumerate(chosen)]
            )
            number += count
        self._count = number
        self._chunks = len(seats.course.chunks)
        self._latency = np.zeros((number, number))
        self._rate = np.full((number, number), math.inf)
        self._tie()
        self.latency_s = self._longest_latency_s()

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _tie(self) -> None:
        """The way from a member to one of the next stage is over a back and a front server."""
        seats, plan, pools = self._seats, self._plan, self._seats.pools
        network, moved = pools.network, pools.sizes.activation_down_bytes
        for source, target in seats.crossings:
            back, front = seats.backs(plan.servers[source]), seats.fronts(plan.servers[target])
            hop = network.to_latency_s[np.ix_(back, front)] + moved * pools.to_s[np.ix_(back, front)]
            hop_s = float(np.median(np.where(np.array(back)[:, None] == np.array(front)[None, :], 0.0, hop)))
            for a, one, _ in self._members[source]:
                for b, two, _ in self._members[target]:
                    for here, there, near, far, x, y in ((a, b, back, front, one, two), (b, a, front, back, two, one)):
                        self._latency[here, there] = (
                            float(np.median(network.to_latency_s[x, near]))
                            + hop_s
                            + float(np.median(network.from_latency_s[far, y]))
                        )
                        slowest = max(float(np.median(pools.to_s[x, near])), float(np.median(pools.from_s[far, y])))
                        self._rate[here, there] = 1.0 / slowest if slowest > 0 else math.inf

    def _longest_latency_s(self) -> float:
        """Of the way from a graph's forward to its backward: there and back, through all visits behind it."""
        longest = 0.0
        for route in self._seats.course.routes:
            stages = self._seats.course.stages_of(route)
            way = sum(self._between(a, b) for a, b in pairwise(stages))
            longest = max(longest, way)
        return longest

    def _between(self, source: int, target: int) -> float:
        nodes = [[node for node, _, _ in self._members[k]] for k in (source, target)]
        there = float(np.median(self._latency[np.ix_(nodes[0], nodes[1])]))
        return there + float(np.median(self._latency[np.ix_(nodes[1], nodes[0])]))

    # ---- how much is in flight -----------------------------------------------------------------------------------

    def in_flight_wanted(self, rule: int) -> int:
        """The rule's number, and what the lines' latency keeps in the air for whoever begins most often."""
        busiest = 0.0
        for k, members in enumerate(self._members):
            whole = sum(share for _, _, share in members) or 1.0
            visits = self._seats.visits[k] * self._part
            if members and self._step_s > 0:
                busiest = max(busiest, visits * max(share for _, _, share in members) / whole / self._step_s)
        in_air = LATENCY_SHARE * self.latency_s * busiest
        return max(rule, min(IN_FLIGHT_LIMIT, rule + math.ceil(in_air))) if in_air >= 1.0 else rule

    def _fits(self, k: int, machine: int) -> float:
        """Graphs of inputs alone that a member's memory holds beside the stage's parameters."""
        pools, sizes = self._seats.pools, self._seats.pools.sizes
        ranges = self._seats.ranges(k, self._plan.edges)
        held = sizes.held_bytes * sum(
            float(sizes.parameters[end] - sizes.parameters[first]) for first, end, _ in ranges
        )
        each = sizes.value_bytes * sizes.microbatch_tokens * sizes.boundary_values
        each *= sum(end - first for first, end, _ in ranges) / len(ranges)
        return (float(pools.memory[machine]) - held) / each if each > 0 else math.inf

    # ---- a step --------------------------------------------------------------------------------------------------

    def step_s(self, policy: Policy, in_flight: int) -> float:
        """Simulated seconds of the work that is looked at; infinity where it comes to a stand."""
        seats, sizes, config = self._seats, self._seats.pools.sizes, self._seats.config
        routes, segments = seats.course.routes, config.batch.segments
        longest = max(map(len, routes))
        steps = STEPS_AT_ONCE if sizes.delayed else 1
        most = OPERATIONS_MAX // (2 * longest * segments * steps)
        of_step = max(1, min(most, round(sizes.microbatches * self._part)))
        done = [[0.0] * len(members) for members in self._members]
        flows: list[Flow] = []
        held: list[dict[int, int]] = [{} for _ in range(self._count)]
        for microbatch in range(of_step * steps):
            hops = []
            route = routes[microbatch % len(routes)]
            for position, chunk in enumerate(route):
                stage = seats.owners[chunk]
                members = self._members[stage]
                at = min(range(len(members)), key=lambda m: ((done[stage][m] + 1) / max(members[m][2], 1e-12), m))
                done[stage][at] += 1
                name = position * self._chunks + chunk
                hops.append(Hop(name, members[at][0]))
                held[members[at][0]][name] = stage if position < len(route) - 1 else -1
            flows.append(Flow(microbatch=microbatch, route=tuple(hops), segment_tokens=(1,) * segments))
        policies = tuple(self._with_room(policy, held[node], node, in_flight, segments) for node in range(self._count))
        design = Design(
            tuple(flows), policies, split=config.compute.split_backward, chooser=_oldest_step_first(of_step)
        )
        try:
            return design.timeline(self._costs(longest), self._network()).makespan_s
        except BadInputError:  # a deadlock: real nodes give way instead, so this says nothing of them
            return math.inf

    def _with_room(self, policy: Policy, held: dict[int, int], node: int, in_flight: int, segments: int) -> Policy:
        """`held`: what the node has of the run by (position, chunk), and of which stage; -1: a route's end."""
        caps = []
        for _, stage in sorted(held.items()):
            if stage < 0:
                caps.append(1 << 30)
                continue
            machine = next(machine for number, machine, _ in self._members[stage] if number == node)
            positions = max(1, len(self._seats.course.graph_positions(stage)))
            room = min(graphs_max(self._seats.course, stage, in_flight), int(self._fits(stage, machine)) // positions)
            caps.append(max(1, room) * segments)
        return Policy(
            first=policy.first, forward_unit=policy.forward_unit, backward_unit=policy.backward_unit,
            forward=policy.forward, backward=policy.backward, alive_max=tuple(caps),
        )  # fmt: skip

    def _costs(self, longest: int) -> Costs:
        """By (position, chunk). A route's end is one job: nothing waits behind its forward."""
        sizes, course = self._seats.pools.sizes, self._seats.course
        forward, backward = sizes.flops
        ends = {(len(route) - 1, route[-1]) for route in course.routes}
        cuts = [cut for k in range(self._seats.count) for cut in zip(course.chunks_of(k), self._blocks(k), strict=True)]
        blocks = dict(cuts)
        stages = []
        for position in range(longest):
            for chunk in range(self._chunks):
                first, end = blocks[chunk]
                there, back = float(forward[end] - forward[first]), float(backward[end] - backward[first])
                if (position, chunk) in ends:
                    there, back = 0.0, there + back
                stages.append(
                    StageCosts(
                        forward_s=there,
                        backward_input_s=back * (1 - WEIGHT_SHARE),
                        backward_weight_s=back * WEIGHT_SHARE,
                        activation_bytes=sizes.activation_up_bytes,
                        gradient_bytes=sizes.activation_up_bytes,
                    )
                )
        whole = float(forward[-1]), float(backward[-1])
        slowness = [0.0] * self._count
        for node, machine, _ in (each for members in self._members for each in members):
            pools = self._seats.pools
            seconds = whole[0] / float(pools.forward[machine]) + whole[1] / float(pools.backward[machine])
            slowness[node] = seconds / sum(whole)
        return Costs(stages, slowness)

    def _blocks(self, k: int) -> list[tuple[int, int]]:
        return [(first, end) for first, end, _ in self._seats.ranges(k, self._plan.edges)]

    def _network(self) -> Network:
        pools = self._seats.pools
        machines: Sequence[int] = [machine for members in self._members for _, machine, _ in members]
        return Network(
            latency_s=self._latency.tolist(),
            link_bytes_per_s=self._rate.tolist(),
            uplink_bytes_per_s=[float(pools.up[machine]) for machine in machines],
            downlink_bytes_per_s=[float(pools.down[machine]) for machine in machines],
        )
