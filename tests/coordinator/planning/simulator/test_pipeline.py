"""The simulator agrees with hand checks, shares links fairly, never beats a bound, and explains a deadlock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.schedules import known_design
from coordinator.planning.schedules.design import Design
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.kernel import EventHeap
from coordinator.planning.simulator.links import Network, SharedLinks
from coordinator.planning.simulator.pipeline import DeadlockError, plan, simulate
from coordinator.planning.simulator.report import report
from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.ir import Flow, Hop, Key, Op
from protocol.schedule.policies import Kind, Policy, Ready, State, Weights, choose
from protocol.schedule.text import read
from tests.strategies.schedules import costs_of, designs, networks_of


def one_f_one_b(forward_s: list[float], microbatches: int) -> tuple[Design, Costs]:
    """1F1B with backwards twice as long as forwards."""
    return known_design("1f1b", len(forward_s), microbatches), Costs([StageCosts(f, f, f) for f in forward_s])


@pytest.mark.parametrize(("link_s", "blocking", "makespan"), [(0.0, False, 24), (0.5, False, 29.0), (0.5, True, 30.5)])
def test_autopipes_hand_check(link_s: float, blocking: bool, makespan: float) -> None:
    """p=3, m=6, f=1, b=2: sends that overlap, and sends that block (algorithms section 1.3)."""
    design, costs = one_f_one_b([1, 1, 1], 6)
    assert design.timeline(costs, Network.line([link_s] * 2, blocking)).makespan_s == makespan


@pytest.mark.parametrize(
    ("forward_s", "makespan", "master"),
    [([2, 2, 3], 66, 2), ([2, 3, 2], 63, 1), ([3, 2, 2], 60, 0), ([1, 1, 1], 24, 2)],
)
def test_the_master_stage_is_the_heavy_one(forward_s: list[float], makespan: float, master: int) -> None:
    """m=6; ties fall to the last stage."""
    design, costs = one_f_one_b(forward_s, 6)
    found = report(design.timeline(costs))
    assert (found.makespan_s, found.master_node) == (makespan, master)


@pytest.mark.parametrize(("routes", "ends"), [((1, 1), [30, 38]), ((1, 2), [29, 37])])
def test_skippipes_hand_check(routes: tuple[int, int], ends: list[float]) -> None:
    """Two microbatches from one head, links 1, F 4, loss 1, B 8: through one node, and through two."""
    flows = [Flow(microbatch=m, route=(Hop(0, 0), Hop(node, node)), loss_node=0) for m, node in enumerate(routes)]
    costs = Costs([StageCosts(4, 8, 0, loss_s=1)] * 3)
    timeline = plan(flows, [Policy()] * 3, False, costs, Network.uniform(3, 1))
    last = [timeline.end_s[timeline.graph.keys.index(Key(Op.B, m, 0))] for m in (0, 1)]
    assert last == ends
    check(timeline.schedule(3))


def test_parallel_transfers_share_an_uplink() -> None:
    """Two nodes send 10 bytes each into one downlink of 10 bytes a second: both take two seconds."""
    flows = [Flow(microbatch=m, route=(Hop(m, m), Hop(2, 2))) for m in (0, 1)]
    costs = Costs([StageCosts(1, 1, 0, activation_bytes=10)] * 3)
    narrow = Network(downlink_bytes_per_s=[math.inf, math.inf, 10])
    timeline = plan(flows, [Policy()] * 3, False, costs, narrow)
    assert timeline.start_s[timeline.graph.keys.index(Key(Op.F, 0, 1))] == pytest.approx(3)
    wide = Network(downlink_bytes_per_s=[math.inf, math.inf, 20])
    assert plan(flows, [Policy()] * 3, False, costs, wide).makespan_s == pytest.approx(timeline.makespan_s - 1)


def test_shares_are_max_min_fair() -> None:
    """A transfer held up elsewhere leaves its share to the others, and leaving transfers free theirs."""
    network = Network(uplink_bytes_per_s=[10, 10, 10], downlink_bytes_per_s=[1e9, 1e9, 2])
    links = SharedLinks(network)
    to_narrow = links.start(0, 0, 2, 10)  # 2 bytes a second: node 2 takes no more
    to_wide = links.start(0, 0, 1, 40)  # the other 8
    assert links.next_end_s() == pytest.approx(5)
    assert links.take_ended(5) == [to_narrow, to_wide]
    assert links.next_end_s() == math.inf


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shared_links_move_every_byte_once(data: st.DataObject) -> None:
    """Whatever starts when: all transfers end, none before its bytes at full rate, none later than all in a row."""
    links = SharedLinks(Network(uplink_bytes_per_s=[7.0] * 3, downlink_bytes_per_s=[5.0] * 3))
    jobs = data.draw(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 2), st.integers(1, 50)),
            min_size=1,
            max_size=8,
        )
    )
    started: dict[int, tuple[float, int]] = {}
    ended: dict[int, float] = {}
    for at_s, source, step, size in sorted(jobs):
        while links.next_end_s() <= at_s:
            now_s = links.next_end_s()
            ended |= dict.fromkeys(links.take_ended(now_s), now_s)
        started[links.start(at_s, source, (source + step) % 3, size)] = (at_s, size)
    while (now_s := links.next_end_s()) < math.inf:
        taken = links.take_ended(now_s)
        assert taken
        ended |= dict.fromkeys(taken, now_s)
    assert sorted(ended) == sorted(started)
    for number, (began_s, size) in started.items():
        assert ended[number] >= began_s + size / 5 - 1e-6
    assert max(ended.values()) <= 9 + sum(size for _, size in started.values()) / 5 * 3 + 1e-6


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_run_beats_its_bound_and_every_run_is_valid(data: st.DataObject) -> None:
    """Random designs, costs and links: valid orders, the same when replayed, never under the graph's bound."""
    design = data.draw(designs())
    costs, network = data.draw(costs_of(design)), data.draw(networks_of(design))
    timeline = design.timeline(costs, network)
    found = report(timeline)  # raises for I13
    assert found.bound_s <= found.makespan_s + 1e-9
    assert 0 <= found.bubble_ratio <= 1
    schedule = timeline.schedule(design.stages)
    check(schedule)
    again = simulate(schedule, costs, network)
    assert again.makespan_s == pytest.approx(timeline.makespan_s)
    path = found.critical_path
    assert timeline.start_s[path[0]] == 0 and timeline.end_s[path[-1]] == found.makespan_s
    for earlier, later in pairwise(path):
        assert timeline.end_s[earlier] <= timeline.start_s[later] + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_node_does_one_thing_at_a_time_after_what_it_needs(data: st.DataObject) -> None:
    """Timelines checked against the definitions, not against the engine."""
    design = data.draw(designs())
    costs = data.draw(costs_of(design))
    network = data.draw(networks_of(design))
    timeline = design.timeline(costs, network)
    graph = timeline.graph
    for order in timeline.orders:
        for earlier, later in pairwise(order):
            assert timeline.end_s[earlier] <= timeline.start_s[later] + 1e-9
    for task, edges in enumerate(graph.followers):
        for edge in edges:
            assert timeline.end_s[task] + edge.delay_s <= timeline.start_s[edge.to] + 1e-9


def test_a_wait_in_vain_is_not_planned() -> None:
    """A W that waits for a forward which then finds no room starts when it could have, as in its schedule."""
    costs = Costs([StageCosts(3, 1, 1), StageCosts(1, 1, 2)])
    design = Design.of(2, 2).in_flight(lambda node: 2 - node).split_backward(Weights.FIT)
    timeline = design.timeline(costs)
    keys = [timeline.graph.keys[task] for task in timeline.orders[1]]
    assert [str(key) for key in keys] == ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]
    assert timeline.start_s[timeline.orders[1][2]] == 5  # not 6, when the second forward arrives
    assert timeline.makespan_s == simulate(design.schedule(costs), costs).makespan_s == 11


def test_a_priority_of_your_own_that_waits_in_vain_is_planned_without_the_wait() -> None:
    """One that starts a backward only when it sees a forward beside it; a schedule has no such condition."""

    def in_company(
        policy: Policy, state: State, candidates: Sequence[Ready], *gaps_s: float
    ) -> tuple[Ready | None, State]:
        alone = any(state.forwards_left) and all(c.kind != Kind.FORWARD for c in candidates)
        return choose(policy, state, [c for c in candidates if not alone or c.kind != Kind.BACKWARD], *gaps_s)

    costs = Costs([StageCosts(3, 1, 1), StageCosts(1, 1, 1)])
    timeline = Design.of(2, 2).choose_with(in_company).timeline(costs)
    first = timeline.orders[1][:2]
    assert [str(timeline.graph.keys[task]) for task in first] == ["1F0", "1B0"]
    assert timeline.start_s[first[1]] == 4  # not 6, when the second forward arrives
    assert timeline.makespan_s == simulate(timeline.schedule(2), costs).makespan_s


@pytest.mark.parametrize("microbatches", [2, 5])
def test_segments_of_two_directions_that_meet_leave_each_other_room(microbatches: int) -> None:
    """Three segments each way and four places in the middle: two and two would block each other for ever."""
    design = Design.of(3, microbatches).place("bidirectional").cut(3)
    design = design.in_flight(lambda node: 4 if node == 1 else (5, 3))
    timeline = design.timeline(Costs([StageCosts(1, 0, 0), StageCosts(0, 0, 0), StageCosts(0, 0, 0)]))
    check(timeline.schedule(3))
    assert max(timeline.peaks()) <= 8 / 3
    assert len(timeline.orders[1]) == 6 * microbatches


def test_a_cap_below_a_microbatch_of_segments_is_refused_by_name() -> None:
    """Three segments are all alive before the first backward, so two places are never enough."""
    design = Design.of(2, 2).cut(3).in_flight(lambda node: 3 - node)
    with pytest.raises(BadInputError, match=r"policies\[1\]: alive_max \[2\]: .* 3 segments"):
        design.timeline()
    assert design.in_flight(lambda node: 3).timeline().makespan_s > 0


def test_a_policy_that_deadlocks_is_explained_by_its_cycle() -> None:
    """One place for a node's two stages: the way up never finds it free."""
    design = Design.of(2, 3).place("V-shape").in_flight_total(lambda node: 1)
    with pytest.raises(DeadlockError, match=r"deadlock: .* waits for ") as caught:
        design.timeline()
    assert caught.value.cycle[0] == caught.value.cycle[-1] and len(caught.value.cycle) > 2


def test_a_forward_without_a_place_waits_for_who_has_it() -> None:
    """Routes down and up with a place each: in the cycle no forward waits for its own backward, as was shown."""
    down, up = (Hop(0, 0), Hop(1, 1), Hop(2, 2), Hop(3, 3)), (Hop(0, 0), Hop(3, 3), Hop(2, 2), Hop(1, 1))
    design = Design.of(4, 4).place([down, up]).in_flight(lambda node: 1 if node else 8)
    with pytest.raises(DeadlockError) as caught:
        design.timeline()
    cycle = caught.value.cycle
    for one, two in pairwise(cycle):
        own = (one.microbatch, one.position) == (two.microbatch, two.position)
        assert not own or one.op is Op.B, f"{one} waits for {two}"


def test_orders_that_deadlock_are_explained_by_their_cycle() -> None:
    """Node 1 waits for microbatch 1, which node 0 starts after a backward that node 1 has not begun."""
    schedule = read("schedule stages=2\nflow 0-1 route=0@0,1@1\nnode 0: 0F0 0B0 0F1 0B1\nnode 1: 1F1 1B1 1F0 1B0\n")
    with pytest.raises(DeadlockError, match="1F1 waits for 0F1 waits for 0B0"):
        simulate(schedule, Costs.equal(2, 1, 1, 1))
    assert simulate(schedule, Costs.equal(2, 1, 1, 1), lookahead=4).makespan_s < math.inf


def test_looking_ahead_runs_what_is_ready() -> None:
    """With bounded look-ahead a late operand delays only what needs it."""
    schedule = read("schedule stages=2\nflow 0-1 route=0@0,1@1\nnode 0: 0F0 0F1 0B1 0B0\nnode 1: 1F0 1F1 1B0 1B1\n")
    costs = Costs.equal(2, 1, 1, 1)
    assert simulate(schedule, costs, lookahead=2).makespan_s < simulate(schedule, costs).makespan_s


def test_recompute_adds_its_time() -> None:
    """R before every B: one more forward each on the critical path of one node."""
    text = "schedule stages=1\nflow 0-1 route=0@0\nnode 0: 0F0 0R0 0B0 0F1 0R1 0B1\n"
    costs = Costs([StageCosts(1, 1, 1, recompute_s=1)])
    check(read(text))
    assert simulate(read(text), costs).makespan_s == 8


def test_events_of_one_instant_come_together() -> None:
    """Sums of floats in different order are one instant; insertion decides within a time."""
    heap: EventHeap[str] = EventHeap()
    for at_s, event in ((0.3, "b"), (0.1 + 0.2, "c"), (0.2, "a"), (0.4, "d")):
        heap.push(at_s, event)
    assert [heap.pop_instant()[1] for _ in range(3)] == [["a"], ["b", "c"], ["d"]]
    assert not heap and heap.next_s() == math.inf


def test_policies_must_be_as_many_as_nodes() -> None:
    """A sentence, not an index error."""
    flows = [Flow(microbatch=0, route=(Hop(0, 0),))]
    with pytest.raises(BadInputError, match="alive_max has 2 limits for 1 stages"):
        plan(flows, [Policy(alive_max=(1, 1))], False, Costs.equal(1, 1, 1, 1))


def test_the_same_design_gives_the_same_schedule_again() -> None:
    """No clock, no randomness, no set order."""
    design = known_design("v-shape", 4, 8)
    assert design.schedule() == design.schedule()
