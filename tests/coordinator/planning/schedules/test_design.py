"""The language: placements, rules, priorities and instructions of one's own, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from coordinator.planning.schedules import known_design
from coordinator.planning.schedules.design import Design, routes_of
from coordinator.planning.simulator.graph import Costs
from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.ir import Hop, Key, Op
from protocol.schedule.policies import Kind, Policy, Ready, State, choose


def test_the_four_placements() -> None:
    """Which node each stage stands on."""
    nodes = {
        name: [[hop.node for hop in route] for route in routes_of(name, 3)]
        for name in ("one-to-one", "circular", "V-shape", "bidirectional")
    }
    assert nodes == {
        "one-to-one": [[0, 1, 2]],
        "circular": [[0, 1, 2, 0, 1, 2]],
        "V-shape": [[0, 1, 2, 2, 1, 0]],
        "bidirectional": [[0, 1, 2], [2, 1, 0]],
    }


def test_a_placement_of_ones_own() -> None:
    """Two stages on the first node, one on the second."""
    design = Design.of(2, 3).place([(Hop(0, 0), Hop(1, 0), Hop(2, 1))])
    check(design.schedule())
    assert design.stages == 3 and design.chunks == 2


def test_a_rule_refuses_what_it_must_not_start_yet() -> None:
    """No forward beyond two without a backward: 1F1B's limit written as a rule."""

    def at_most_two(state: State, candidate: Ready) -> bool:
        return candidate.kind is not Kind.FORWARD or state.forwards_done - state.backwards_done < 2

    timeline = Design.of(2, 6).rule(at_most_two).timeline()
    assert max(timeline.peaks()) == 2


def test_a_priority_of_ones_own() -> None:
    """Youngest microbatch first among forwards: a function instead of the built-in order."""

    def youngest(
        policy: Policy,
        state: State,
        candidates: Sequence[Ready],
        forward_gap_s: float = math.inf,
        backward_gap_s: float = math.inf,
    ) -> tuple[Ready | None, State]:
        backward = [c for c in candidates if c.kind is Kind.BACKWARD]
        return choose(policy, state, backward or list(candidates))

    design = Design.of(3, 5).choose_with(youngest)
    check(design.schedule())


def test_different_nodes_may_have_different_priorities() -> None:
    """Forward first on node 0 only."""
    design = Design.of(2, 4).order("forward", nodes=[0])
    order = [instruction.key.op for instruction in design.schedule().orders[0]]
    assert order == [Op.F] * 4 + [Op.B] * 4
    assert [i.key.op for i in design.schedule().orders[1]][:2] == [Op.F, Op.B]


def test_a_registered_instruction_waits_and_is_waited_for() -> None:
    """A check between the last forward and its backward takes its time and holds both."""
    base = Design.of(2, 3)
    last = [Key(Op.F, m, 1) for m in range(3)]
    design = base.register("audit", last, after=lambda f: [f], before=lambda f: [f._replace(op=Op.B)])
    costs = Costs(Costs.equal(2, 1, 1, 1).stages, custom_s={"audit": 0.5})
    timeline = design.timeline(costs)
    check(timeline.schedule(2))
    task_of = {key: task for task, key in enumerate(timeline.graph.keys)}
    for forward in last:
        audit = task_of[forward._replace(op=Op.CUSTOM, name="audit")]
        assert timeline.end_s[audit] - timeline.start_s[audit] == 0.5
        assert timeline.end_s[task_of[forward]] <= timeline.start_s[audit]
        assert timeline.end_s[audit] <= timeline.start_s[task_of[forward._replace(op=Op.B)]]


@pytest.mark.parametrize(("nodes", "microbatches", "makespan"), [(4, 8, 32), (8, 16, 66), (12, 24, 100)])
def test_slicing_shortens_the_warm_up(nodes: int, microbatches: int, makespan: float) -> None:
    """AutoPipe's 33 to 32, 69 to 66 and 105 to 100, or better, from the third slice on; none is 1F1B again."""
    design = known_design("1f1b", nodes, microbatches)
    assert design.slice_first(0).timeline().makespan_s == design.timeline().makespan_s
    sliced = design.slice_first(3)
    check(sliced.schedule())
    assert sliced.timeline().makespan_s <= makespan


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: Design.of(0, 4), "stages: 0"),
        (lambda: Design.of(4, 0), "microbatches: 0"),
        (lambda: Design.of(2, 2).place("zigzag"), "placement: 'zigzag' is not one of"),
        (lambda: Design.of(2, 2).order("sideways"), "order: 'sideways'"),
        (lambda: Design.of(2, 2).traverse("far"), "traverse: forward: 'far'"),
        (lambda: Design.of(2, 2).cut(0), "segments: 0"),
        (lambda: Design.of(2, 2).in_flight(lambda node: 0), "alive_max"),
    ],
)
def test_what_cannot_be_is_refused_by_name(build: object, complaint: str) -> None:
    """A sentence for every wrong word or number."""
    with pytest.raises(BadInputError, match=complaint):
        build()  # type: ignore[operator]
