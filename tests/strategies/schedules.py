"""Random designs of pipelines that cannot deadlock, for tests that hold for every schedule."""

from __future__ import annotations

from hypothesis import strategies as st

from coordinator.planning.schedules.design import PLACEMENTS, Design
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.links import Network
from protocol.schedule.ir import EVERY, Instruction, Key, Op, Schedule, nodes_by_stage
from protocol.schedule.policies import Weights


@st.composite
def designs(draw: st.DrawFn) -> Design:
    """Any placement, cut, split and priority; limits per stage, as FlexPipe's default P - d."""
    nodes = draw(st.integers(1, 5))
    design = Design.of(nodes, draw(st.integers(1, 7))).place(draw(st.sampled_from(PLACEMENTS)))
    segments = draw(st.integers(1, 3))
    if draw(st.booleans()):
        design = design.cut(segments)
    elif draw(st.booleans()):
        design, segments = design.slice_first(draw(st.integers(0, 3))), 1
    else:
        segments = 1
    depth = len(design.flows[0].route)
    extra = draw(st.integers(0, 3))
    held = [sorted({h.stage for f in design.flows for h in f.route if h.node == n}) for n in range(nodes)]
    design = design.order(draw(st.sampled_from(("backward", "forward", "interleaved"))), draw(st.integers(1, 2)))
    design = design.traverse(draw(st.sampled_from(("breadth", "depth"))), draw(st.sampled_from(("breadth", "depth"))))
    design = design.in_flight(lambda node: tuple(depth - stage + segments - 1 + extra for stage in held[node]))
    if draw(st.booleans()):
        design = design.split_backward(draw(st.sampled_from(list(Weights))), draw(st.booleans()))
    return design


@st.composite
def costs_of(draw: st.DrawFn, design: Design) -> Costs:
    """Whole numbers of seconds and bytes, unequal stages and nodes."""
    times = st.integers(0, 9).map(float)
    stages = [
        StageCosts(draw(times), draw(times), draw(times), activation_bytes=draw(times), gradient_bytes=draw(times))
        for _ in range(design.stages)
    ]
    slowness = [float(draw(st.integers(1, 3))) for _ in range(design.nodes)]
    return Costs(stages, slowness)


@st.composite
def networks_of(draw: st.DrawFn, design: Design) -> Network:
    """Latencies of up to three seconds, sends that block or overlap, and uplinks and downlinks that they share."""
    rows = [
        [0.0 if a == b else float(draw(st.integers(0, 3))) for b in range(design.nodes)] for a in range(design.nodes)
    ]
    rates = st.none() | st.lists(st.integers(1, 4).map(float), min_size=design.nodes, max_size=design.nodes)
    return Network(rows, None, draw(rates), draw(rates), blocking=draw(st.booleans()))


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
