"""The invariants that every schedule must hold, checked before a plan is sent and again before it is run.

`check` raises for the first broken invariant and names the operation; a deadlock is shown as its cycle. The
numbers are those of the project's algorithm notes:

I1   every operation a microbatch needs exists: F once, B once or else I and W once each.
I2   an operation has one entry, on the node that its flow names.
I3   whatever an operation waits for is in the schedule.
I4   program order and data together have no cycle: nothing waits for itself.
I5   SEND and RECV pair one to one, and name each other's node.
I6   segments run forward in order and backward in reverse order on every node.
I7   a backward comes after all slices of its forward.
I8   the loss stands on a node, and the activations reach it.
I9   memory stays within the node's limit, ends at zero, and a segment's share is held until its own backward.
I10  REDUCE after every weight gradient of its stage and node, OPT after REDUCE, each once.
I11  routes obey the rules for skipping and swapping, for visits and for memory.
I12  samples and tokens of all parts add up to the batch, so that every part of the loss is weighed once.
I13  no simulated time is below a proven lower bound (`check_bound`).
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from protocol.base.errors import BadInputError
from protocol.schedule.ir import (
    EVERY,
    Flow,
    Instruction,
    Key,
    Op,
    RouteRules,
    Schedule,
    dependencies,
    node_of,
    nodes_by_stage,
    paired,
)


class InvalidScheduleError(BadInputError):
    """A schedule broke an invariant; `invariant` is its number, like "I4"."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"schedule: {detail} ({invariant})")
        self.invariant = invariant


def check(schedule: Schedule) -> None:
    """Raises `InvalidScheduleError` for the first invariant of I1 to I12 that the schedule breaks."""
    flows = {flow.microbatch: flow for flow in schedule.flows}
    _check_flows(schedule, flows)
    placed = _check_keys(schedule, flows)
    _check_complete(placed, flows)
    instructions = [instruction for _, instruction in schedule.instructions()]
    needs = dependencies(instructions, schedule.flows)
    _check_closed(needs)
    _check_pairs(placed, instructions)
    _check_node_order(schedule, flows)
    _check_stage_ends(schedule, placed)
    _check_acyclic(schedule, needs)
    _check_memory(schedule)


def check_bound(makespan_s: float, bound_s: float) -> None:
    """Raises `InvalidScheduleError` (I13) when a time is below what was proven to be the least."""
    if makespan_s < bound_s * (1 - 1e-9) - 1e-12:
        raise InvalidScheduleError("I13", f"{makespan_s} s is below the proven lower bound of {bound_s} s")


def _check_flows(schedule: Schedule, flows: dict[int, Flow]) -> None:
    """I8, I11 and I12: what the flows say, before any order."""
    if len(flows) != len(schedule.flows):
        raise InvalidScheduleError("I2", "two flows have the same microbatch")
    for flow in schedule.flows:
        name = f"flow {flow.microbatch}"
        if not flow.route:
            raise InvalidScheduleError("I11", f"{name}: the route is empty")
        stages = [hop.stage for hop in flow.route]
        for stage, node in flow.route:
            if not 0 <= stage < schedule.stages or not 0 <= node < schedule.nodes:
                raise InvalidScheduleError("I11", f"{name}: there is no stage {stage} on a node {node}")
        if len(set(stages)) != len(stages):
            raise InvalidScheduleError("I11", f"{name}: the route visits a stage twice")
        if flow.loss_node is not None and not 0 <= flow.loss_node < schedule.nodes:
            raise InvalidScheduleError("I8", f"{name}: there is no node {flow.loss_node} for the loss")
        if min(flow.segment_tokens, default=0) < 1 or min(flow.slice_samples, default=0) < 1:
            raise InvalidScheduleError("I12", f"{name}: a segment or a slice is empty")
        if schedule.tokens is not None and sum(flow.segment_tokens) != schedule.tokens:
            raise InvalidScheduleError(
                "I12", f"{name}: segments hold {sum(flow.segment_tokens)} of {schedule.tokens} tokens"
            )
    total = sum(sum(flow.slice_samples) for flow in schedule.flows)
    if schedule.samples is not None and total != schedule.samples:
        raise InvalidScheduleError("I12", f"the flows hold {total} of {schedule.samples} samples")
    if schedule.rules is not None:
        _check_rules(schedule, schedule.rules)


def _check_rules(schedule: Schedule, rules: RouteRules) -> None:
    """I11 where routes may skip: stage 0 first, few swaps, equal visits, few routes per node."""
    visits: Counter[tuple[int, int]] = Counter()
    routes: Counter[tuple[int, int]] = Counter()
    for flow in schedule.flows:
        stages = [hop.stage for hop in flow.route]
        if stages[0] != 0:
            raise InvalidScheduleError("I11", f"flow {flow.microbatch}: the route starts at stage {stages[0]}, not 0")
        if (swaps := swaps_in(stages)) is None or swaps > rules.swaps_max:
            raise InvalidScheduleError(
                "I11",
                f"flow {flow.microbatch}: {stages} is more than {rules.swaps_max} exchanges from ascending",
            )
        visits.update((flow.wave, stage) for stage in stages)
        routes.update((flow.wave, node) for node in dict.fromkeys(hop.node for hop in flow.route))
    for wave in sorted({flow.wave for flow in schedule.flows}):
        for stage in range(1, schedule.stages):
            if rules.visits_per_stage not in (None, visits[wave, stage]):
                raise InvalidScheduleError(
                    "I11",
                    f"wave {wave}: {visits[wave, stage]} routes, not {rules.visits_per_stage}, visit {stage}",
                )
    for (wave, node), count in sorted(routes.items()):
        if rules.routes_per_node_max is not None and count > rules.routes_per_node_max:
            raise InvalidScheduleError(
                "I11",
                f"wave {wave}: node {node} is on {count} routes, at most {rules.routes_per_node_max} fit",
            )


def swaps_in(stages: list[int]) -> int | None:
    """Exchanges of two neighbours with consecutive stage numbers that sort a route; None if those cannot.

    Disjoint exchanges only: a stage takes part in at most one.
    """
    swaps, index = 0, 0
    sorted_stages = list(stages)
    while index + 1 < len(sorted_stages):
        if sorted_stages[index] == sorted_stages[index + 1] + 1:
            sorted_stages[index : index + 2] = sorted_stages[index + 1], sorted_stages[index]
            swaps, index = swaps + 1, index + 1
        index += 1
    return swaps if sorted_stages == sorted(stages) else None


def _check_keys(schedule: Schedule, flows: dict[int, Flow]) -> dict[Key, int]:
    """I2: one entry per key, on the node that its flow names, for a part that exists."""
    placed: dict[Key, int] = {}
    holders = nodes_by_stage(schedule.flows)
    for node, instruction in schedule.instructions():
        key = instruction.key
        if key in placed:
            raise InvalidScheduleError("I2", f"{key} stands twice, on node {placed[key]} and on node {node}")
        placed[key] = node
        wanted = node_of(key, flows, holders)
        if wanted is None:
            raise InvalidScheduleError("I2", f"{key} on node {node}: no flow has this operation")
        if wanted != node and not (key.op in (Op.SEND, Op.RECV) and key.name in ("kv", "param")):
            raise InvalidScheduleError("I2", f"{key} stands on node {node}, its flow names node {wanted}")
        flow = flows.get(key.microbatch)
        if flow is not None:
            if key.segment >= len(flow.segment_tokens) or key.slice >= len(flow.slice_samples):
                raise InvalidScheduleError("I2", f"{key} on node {node}: its microbatch is not cut so often")
            if key.slice and key.op in (Op.L, Op.B, Op.I, Op.W, Op.R):
                raise InvalidScheduleError("I2", f"{key} on node {node}: only forwards are sliced")
    return placed


def _check_complete(placed: dict[Key, int], flows: dict[int, Flow]) -> None:
    """I1: every F; B or else I and W, never both; L where the flow asks for it."""
    for flow in flows.values():
        microbatch, last = flow.microbatch, len(flow.route)
        for segment in range(len(flow.segment_tokens)):
            for position in range(last):
                for part in range(len(flow.slice_samples)):
                    if (key := Key(Op.F, microbatch, position, segment, part)) not in placed:
                        raise InvalidScheduleError("I1", f"{key} is missing")
                whole, first, second = (Key(op, microbatch, position, segment) for op in (Op.B, Op.I, Op.W))
                halves = (first in placed) + (second in placed)
                if whole in placed and halves:
                    raise InvalidScheduleError("I1", f"{whole} stands beside {first if first in placed else second}")
                if whole not in placed and halves < 2:
                    missing = whole if not halves else second if first in placed else first
                    raise InvalidScheduleError("I1", f"{missing} is missing")
            if flow.loss_node is not None and (key := Key(Op.L, microbatch, last, segment)) not in placed:
                raise InvalidScheduleError("I8", f"{key} is missing: the flow's loss is nowhere computed")


def _check_closed(needs: dict[Key, tuple[Key, ...]]) -> None:
    """I3: nothing waits for what is not there (a REDUCE that is missing before OPT is I10)."""
    for key, before in needs.items():
        for other in before:
            if other not in needs:
                if key.op is Op.OPT and other.op is Op.REDUCE:
                    raise InvalidScheduleError("I10", f"{key} has no {other} to follow")
                if key.op is Op.RECV:
                    raise InvalidScheduleError("I5", f"{key} waits for {other}, which nobody sends")
                raise InvalidScheduleError("I3", f"{key} waits for {other}, which is not in the schedule")


def _check_pairs(placed: dict[Key, int], instructions: list[Instruction]) -> None:
    """I5: each SEND has its RECV, each names the other's node."""
    for instruction in instructions:
        key = instruction.key
        if key.op not in (Op.SEND, Op.RECV):
            continue
        other = paired(key)
        if other not in placed:
            raise InvalidScheduleError("I5", f"{key} has no {other}")
        if instruction.peer != placed[other]:
            raise InvalidScheduleError(
                "I5", f"{key} names node {instruction.peer}, but {other} stands on node {placed[other]}"
            )


def _check_node_order(schedule: Schedule, flows: dict[int, Flow]) -> None:
    """I6 and I7 within each node's own order, where they are easiest to understand."""
    index = {
        instruction.key: (node, number)
        for node, order in enumerate(schedule.orders)
        for number, instruction in enumerate(order)
    }

    def before(key: Key, other: Key, invariant: str, why: str) -> None:
        if key in index and other in index:
            (node, at), (other_node, other_at) = index[key], index[other]
            if node == other_node and at > other_at:
                raise InvalidScheduleError(invariant, f"node {node}: {other} stands before {key}: {why}")

    for key in index:
        flow = flows.get(key.microbatch)
        if flow is None:
            continue
        if key.op is Op.F and key.segment:
            before(key._replace(segment=key.segment - 1), key, "I6", "segments run forward in order")
        if key.op in (Op.B, Op.I):
            for part in range(len(flow.slice_samples)):
                before(key._replace(op=Op.F, slice=part), key, "I7", "a backward needs all of its forward")
            if key.segment + 1 < len(flow.segment_tokens):
                for op in (Op.B, Op.I):
                    later = key._replace(op=op, segment=key.segment + 1)
                    before(later, key, "I6", "segments run backward in reverse order")


def _check_stage_ends(schedule: Schedule, placed: dict[Key, int]) -> None:
    """I10: where a stage reduces or steps at all, every node of it does, after its gradients."""
    used = {key.op for key in placed if key.microbatch == EVERY}
    for stage, nodes in nodes_by_stage(schedule.flows).items():
        for replica, node in enumerate(nodes):
            for op in (Op.REDUCE, Op.OPT):
                key = Key(op, EVERY, stage, 0, replica)
                if op in used and key not in placed:
                    raise InvalidScheduleError("I10", f"{key} is missing on node {node}")
    stage_at = {
        (flow.microbatch, position): hop.stage for flow in schedule.flows for position, hop in enumerate(flow.route)
    }
    for node, order in enumerate(schedule.orders):
        ended: dict[int, Key] = {}
        for instruction in order:
            key = instruction.key
            if key.op is Op.REDUCE:
                ended[key.position] = key
            elif key.op in (Op.B, Op.W) and (stage := stage_at[key.microbatch, key.position]) in ended:
                raise InvalidScheduleError("I10", f"node {node}: {key} stands after {ended[stage]}")
            elif key.op is Op.OPT and Op.REDUCE in used and key.position not in ended:
                raise InvalidScheduleError("I10", f"node {node}: {key} stands before its REDUCE")


def _check_acyclic(schedule: Schedule, needs: dict[Key, tuple[Key, ...]]) -> None:
    """I4: Kahn's order over program order and data; what is left over holds a cycle, which is named."""
    waits: dict[Key, list[Key]] = {key: list(before) for key, before in needs.items()}
    for order in schedule.orders:
        # A RECV is posted early and never holds up its node; everything else starts in order.
        for earlier, later in pairwise(i.key for i in order if i.key.op is not Op.RECV):
            waits[later].append(earlier)
    if cycle := find_cycle(waits):
        raise InvalidScheduleError("I4", f"deadlock: {' waits for '.join(map(str, cycle))}")


def find_cycle(waits: dict[Key, list[Key]]) -> list[Key]:
    """A cycle of the relation "key waits for other", first operation repeated at the end; empty if none."""
    followers: dict[Key, list[Key]] = {}
    missing = {key: len(before) for key, before in waits.items()}
    for key, before in waits.items():
        for other in before:
            followers.setdefault(other, []).append(key)
    ready = deque(key for key, count in missing.items() if count == 0)
    while ready:
        done = ready.popleft()
        del missing[done]
        for key in followers.get(done, ()):
            missing[key] -= 1
            if missing[key] == 0:
                ready.append(key)
    if not missing:
        return []
    # Everything left waits for something left: walking back must come round.
    walk: dict[Key, int] = {}
    key = next(iter(missing))
    while key not in walk:
        walk[key] = len(walk)
        key = next(other for other in waits[key] if other in missing)
    return [*list(walk)[walk[key] :], key]


def _check_memory(schedule: Schedule) -> None:
    """I9: within the limit at every point of the order, zero at the end, a segment held until its
    backward."""
    if schedule.memory_max is not None and len(schedule.memory_max) != schedule.nodes:
        raise InvalidScheduleError("I9", f"{len(schedule.memory_max)} memory limits for {schedule.nodes} nodes")
    for node, order in enumerate(schedule.orders):
        held = 0
        parts: dict[tuple[int, int, int], int] = {}
        for instruction in order:
            key = instruction.key
            held += instruction.memory_start
            if schedule.memory_max is not None and held > schedule.memory_max[node]:
                raise InvalidScheduleError(
                    "I9", f"node {node}: {key} needs memory {held}, {schedule.memory_max[node]} are allowed"
                )
            held += instruction.memory_end
            part = (key.microbatch, key.position, key.segment)
            taken = parts.get(part, 0) + instruction.memory_start
            parts[part] = taken + instruction.memory_end
            freed_early = taken > 0 >= parts[part] and key.op not in (Op.L, Op.B, Op.I, Op.W)
            if held < 0 or freed_early:
                raise InvalidScheduleError("I9", f"node {node}: {key} gives back memory that is still needed")
        if held != 0:
            raise InvalidScheduleError("I9", f"node {node}: {held} units of memory are never given back")
