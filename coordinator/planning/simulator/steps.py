"""Several steps in a row: what aggregation and the optimizer cost, with and without delayed update.

REDUCE and OPT are the servers' work, beside the nodes. Without delay a stage's first forward of a step waits for the
stage's OPT of the step before; with delayed parameter update it waits for the one before that, so that summing up
hides behind a whole step of compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.planning.simulator.graph import Costs, Edge, TaskGraph, build_graph
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import Timeline, replay
from protocol.base.errors import BadInputError
from protocol.schedule.ir import EVERY, Instruction, Key, Op, Schedule, nodes_by_stage


def with_update(schedule: Schedule) -> Schedule:
    """The schedule with REDUCE and OPT of every stage at the end of each of its nodes' orders."""
    orders: list[list[Instruction]] = [list(order) for order in schedule.orders]
    for op in (Op.REDUCE, Op.OPT):
        for stage, nodes in nodes_by_stage(schedule.flows).items():
            for replica, node in enumerate(nodes):
                orders[node].append(Instruction(key=Key(op, EVERY, stage, 0, replica)))
    return Schedule(
        stages=schedule.stages,
        flows=schedule.flows,
        orders=tuple(map(tuple, orders)),
        samples=schedule.samples,
        tokens=schedule.tokens,
        memory_max=schedule.memory_max,
        rules=schedule.rules,
    )


def simulate_steps(
    schedule: Schedule, costs: Costs, network: Network | None = None, steps: int = 4, delay: int = 1
) -> Timeline:
    """Runs `steps` equal steps; step t starts on a stage when its update of step t - 1 - delay is done.

    Args:
        schedule: of one step, with REDUCE and OPT (`with_update`).
    """
    if steps < 1 or delay not in (0, 1):
        raise BadInputError(f"steps: {steps} steps with a delay of {delay}; at least 1, and 0 or 1, are wanted")
    return replay(repeat(build_graph(schedule.flows, schedule.orders, costs, network), steps, delay))


def step_s(timeline: Timeline, steps: int) -> float:
    """Seconds per step once the pipeline is warm: the growth of the makespan over the last half of the steps."""
    if steps < 2:
        return timeline.makespan_s
    per_step = len(timeline.end_s) // steps
    ends = [max(timeline.end_s[number * per_step : (number + 1) * per_step]) for number in range(steps)]
    since = (steps - 1) // 2
    return (ends[-1] - ends[since]) / (steps - 1 - since)


def repeat(graph: TaskGraph, steps: int, delay: int) -> TaskGraph:
    """The graph `steps` times, tasks numbered step by step, joined where a stage waits for its update."""
    size = len(graph)
    firsts: dict[int, list[int]] = {}
    updates: dict[int, list[int]] = {}
    for task, key in enumerate(graph.keys):
        if key.op is Op.F:
            firsts.setdefault(graph.stages[task], []).append(task)
        elif key.op is Op.OPT:
            updates.setdefault(graph.stages[task], []).append(task)
    followers = [
        [Edge(edge.to + step * size, edge.delay_s, edge.size) for edge in edges]
        for step in range(steps)
        for edges in graph.followers
    ]
    waits = graph.waits * steps
    for step in range(steps - 1 - delay):
        for stage, ends in updates.items():
            for start in firsts.get(stage, ()):
                later = start + (step + 1 + delay) * size
                for end in ends:
                    followers[end + step * size].append(Edge(later, 0.0, 0.0))
                    waits[later] += 1
    return replace(
        graph,
        keys=graph.keys * steps,
        nodes=graph.nodes * steps,
        stages=graph.stages * steps,
        seconds=graph.seconds * steps,
        beside=graph.beside * steps,
        followers=followers,
        waits=waits,
        memory_start=graph.memory_start * steps,
        memory_end=graph.memory_end * steps,
        orders=[_repeated(order, steps, size) for order in graph.orders],
        instructions=graph.instructions * steps,
    )


def _repeated(order: Sequence[int], steps: int, size: int) -> list[int]:
    return [task + step * size for step in range(steps) for task in order]
