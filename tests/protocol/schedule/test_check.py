"""Each invariant is broken on purpose in random schedules, and the validator names the invariant and the operation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.planning.schedules.design import Design
from protocol.schedule.check import InvalidScheduleError, check, check_bound, swaps_in
from protocol.schedule.ir import Flow, Hop, Instruction, Key, Op, RouteRules, Schedule
from protocol.schedule.text import parse_key, read
from tests.strategies.schedules import designs, with_update

Orders = list[list[Instruction]]


def change(schedule: Schedule, **changes: object) -> Schedule:
    """The schedule with fields exchanged."""
    return msgspec.structs.replace(schedule, **changes)


def orders_of(schedule: Schedule) -> Orders:
    """Orders that a test may spoil."""
    return [list(order) for order in schedule.orders]


def with_orders(schedule: Schedule, orders: Orders) -> Schedule:
    """The schedule with spoilt orders."""
    return change(schedule, orders=tuple(map(tuple, orders)))


def places(orders: Orders, *ops: Op) -> list[tuple[int, int]]:
    """Where operations of some kinds stand."""
    return [(n, i) for n, order in enumerate(orders) for i, ins in enumerate(order) if ins.key.op in ops]


def refused(schedule: Schedule, *invariants: str) -> str:
    """The sentence with which the validator refuses, for one of the invariants."""
    with pytest.raises(InvalidScheduleError) as caught:
        check(schedule)
    assert caught.value.invariant in invariants, str(caught.value)
    return str(caught.value)


few = settings(max_examples=20, deadline=None)


@settings(max_examples=40, deadline=None)
@given(designs())
def test_what_the_generators_make_is_valid(design: Design) -> None:
    """Every placement, cut, split and priority gives a schedule that holds all invariants, update included."""
    check(with_update(design.schedule()))


@few
@given(designs(), st.data())
def test_a_missing_operation_is_found(design: Design, data: st.DataObject) -> None:
    """I1: without one compute operation the schedule is incomplete, and the sentence names it."""
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.F, Op.B, Op.I, Op.W)))
    key = orders[node].pop(index).key
    assert f"{key} is missing" in refused(with_orders(design.schedule(), orders), "I1") or key.op in (Op.I, Op.W)


@few
@given(designs(), st.data())
def test_a_whole_backward_beside_its_halves_is_found(design: Design, data: st.DataObject) -> None:
    """I1: gradients would be counted twice."""
    orders = orders_of(design.schedule())
    halves = places(orders, Op.W)
    assume(halves)
    node, index = data.draw(st.sampled_from(halves))
    orders[node].append(Instruction(key=orders[node][index].key._replace(op=Op.B)))
    assert "beside" in refused(with_orders(design.schedule(), orders), "I1")


@few
@given(designs(), st.data())
def test_a_doubled_operation_is_found(design: Design, data: st.DataObject) -> None:
    """I2: an operation with two entries."""
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.F, Op.B, Op.I, Op.W)))
    orders[data.draw(st.integers(0, len(orders) - 1))].append(orders[node][index])
    refused(with_orders(design.schedule(), orders), "I2")


@few
@given(designs(), st.data())
def test_an_operation_on_the_wrong_node_is_found(design: Design, data: st.DataObject) -> None:
    """I2: the flow names another node."""
    assume(design.nodes > 1)
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.F, Op.B, Op.I, Op.W)))
    orders[(node + 1) % design.nodes].append(orders[node].pop(index))
    assert "its flow names node" in refused(with_orders(design.schedule(), orders), "I2")


@few
@given(designs(), st.data())
def test_an_operation_of_no_flow_is_found(design: Design, data: st.DataObject) -> None:
    """I2: a microbatch, position, segment or slice that nobody cut."""
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.F)))
    key = orders[node][index].key
    wrong = key._replace(microbatch=99), key._replace(position=99), key._replace(segment=99), key._replace(slice=99)
    orders[node].append(Instruction(key=data.draw(st.sampled_from(wrong))))
    refused(with_orders(design.schedule(), orders), "I2")


@few
@given(designs(), st.data())
def test_waiting_for_nothing_is_found(design: Design, data: st.DataObject) -> None:
    """I3: an extra dependency that is nowhere."""
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.F)))
    orders[node][index] = Instruction(key=orders[node][index].key, after=(Key(Op.CUSTOM, 0, 0, name="ghost"),))
    assert "0CUSTOM_ghost0" in refused(with_orders(design.schedule(), orders), "I3")


@few
@given(designs(), st.data())
def test_a_deadlock_is_shown_as_its_cycle(design: Design, data: st.DataObject) -> None:
    """I4: an operation made to wait for something after it; the cycle begins and ends with the same operation."""
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.F)))
    key = orders[node][index].key
    orders[node][index] = Instruction(key=key, after=(orders[node][-1].key,))
    sentence = refused(with_orders(design.schedule(), orders), "I4")
    cycle = sentence.removeprefix("schedule: deadlock: ").removesuffix(" (I4)").split(" waits for ")
    assert len(cycle) >= 2 and cycle[0] == cycle[-1]
    assert all(parse_key(text) for text in cycle)


def test_two_nodes_that_wait_for_each_other_are_a_deadlock() -> None:
    """I4: node 1 begins with the microbatch that node 0 sends only after a backward from node 1."""
    schedule = read("schedule stages=2\nflow 0-1 route=0@0,1@1\nnode 0: 0F0 0B0 0F1 0B1\nnode 1: 1F1 1B1 1F0 1B0\n")
    assert "0F1 waits for 0B0" in refused(schedule, "I4")


SENDS = (
    "schedule stages=2\nflow 0 route=0@0,1@1\n"
    "node 0: 0F0 0SEND_act0[to=1] 0RECV_grad0[to=1] 0B0\n"
    "node 1: 1RECV_act0[to=0] 1F0 1B0 1SEND_grad0[to=0]\n"
)


def test_sends_and_receives_pair() -> None:
    """I5: valid as it stands; without its partner, or with the wrong peer, either side is named."""
    check(read(SENDS))
    assert "1RECV_act0" in refused(read(SENDS.replace(" 0SEND_act0[to=1]", "")), "I5")
    assert "0SEND_act0 has no" in refused(
        read(SENDS.replace(" 1RECV_act0[to=0]", "").replace("node 1: ", "node 1:  ")), "I5"
    )
    assert "names node 0" in refused(read(SENDS.replace("0SEND_act0[to=1]", "0SEND_act0[to=0]")), "I5")


@few
@given(designs(), st.data())
def test_segments_out_of_order_are_found(design: Design, data: st.DataObject) -> None:
    """I6: forwards swapped between two segments, or backwards."""
    orders = orders_of(design.schedule())
    later = [(n, i) for n, i in places(orders, Op.F, Op.B, Op.I) if orders[n][i].key.segment]
    assume(later)
    node, index = data.draw(st.sampled_from(later))
    key = orders[node][index].key
    earlier = next(i for i, ins in enumerate(orders[node]) if ins.key == key._replace(segment=key.segment - 1))
    orders[node][index], orders[node][earlier] = orders[node][earlier], orders[node][index]
    refused(with_orders(design.schedule(), orders), "I6", "I7")


@few
@given(designs(), st.data())
def test_a_backward_before_its_forward_is_found(design: Design, data: st.DataObject) -> None:
    """I7: the backward of a microbatch moved before one of its forward's slices."""
    orders = orders_of(design.schedule())
    node, index = data.draw(st.sampled_from(places(orders, Op.B, Op.I)))
    instruction = orders[node].pop(index)
    orders[node].insert(0, instruction)
    refused(with_orders(design.schedule(), orders), "I6", "I7")


LOOP = "schedule stages=2\nflow 0 route=0@0,1@1 loss=0\nnode 0: 0F0 2L0 0B0\nnode 1: 1F0 1B0\n"


def test_a_closed_loop_has_its_loss_on_the_head() -> None:
    """I8: valid with L on node 0; refused without it, and on a node that is not there."""
    check(read(LOOP))
    assert "2L0" in refused(read(LOOP.replace(" 2L0", "")), "I8")
    refused(read(LOOP.replace("loss=0", "loss=7")), "I8")


@few
@given(designs(), st.data())
def test_memory_beyond_the_limit_is_found(design: Design, data: st.DataObject) -> None:
    """I9: with the true peak as the limit it holds, one unit less on a node that uses any is refused."""
    orders = orders_of(design.schedule())
    limits = []
    for order in orders:
        held = peak = 0
        split = any(ins.key.op is Op.W for ins in order)
        slices = {f.microbatch: len(f.slice_samples) for f in design.flows}
        for index, instruction in enumerate(order):
            key = instruction.key
            taken = 6 // slices[key.microbatch] if key.op is Op.F else 0
            given_back = -6 if key.op is (Op.W if split else Op.B) else 0
            order[index] = Instruction(key=key, memory_start=taken, memory_end=given_back)
            peak = max(peak, held + taken)
            held += taken + given_back
        limits.append(peak)
    schedule = with_orders(design.schedule(), orders)
    check(change(schedule, memory_max=tuple(limits)))
    node = data.draw(st.sampled_from([n for n, limit in enumerate(limits) if limit]))
    limits[node] -= 1
    assert f"node {node}" in refused(change(schedule, memory_max=tuple(limits)), "I9")


def test_memory_is_given_back_once_and_not_early() -> None:
    """I9: never given back, given back twice, and given back before the backward that needs it."""
    text = "schedule stages=1\nflow 0-1 route=0@0\nnode 0: 0F0[mem=4:0] 0F1[mem=4:0] 0B0[mem=0:-4] 0B1[mem=0:-4]\n"
    check(read(text))
    assert "never given back" in refused(read(text.replace("0B1[mem=0:-4]", "0B1")), "I9")
    assert "still needed" in refused(read(text.replace("0B1[mem=0:-4]", "0B1[mem=0:-8]")), "I9")
    assert "0F0" in refused(read(text.replace("0F0[mem=4:0]", "0F0[mem=4:-4]").replace("0B0[mem=0:-4]", "0B0")), "I9")


@few
@given(designs(), st.data())
def test_an_update_that_misses_a_gradient_is_found(design: Design, data: st.DataObject) -> None:
    """I10: REDUCE before the node's last gradient, OPT before REDUCE, or one of them missing."""
    orders = orders_of(with_update(design.schedule()))
    where = data.draw(st.sampled_from(places(orders, Op.REDUCE)))
    node, index = where
    how = data.draw(st.sampled_from(("early", "gone", "after its OPT")))
    reduce = orders[node].pop(index)
    if how == "early":
        orders[node].insert(0, reduce)
    elif how == "after its OPT":
        orders[node].append(reduce)
    refused(with_orders(design.schedule(), orders), "I10")


def test_routes_keep_the_rules_for_skipping() -> None:
    """I11: stage 0 first, at most one exchange of neighbours, equal visits, few routes per node."""
    rules = RouteRules(swaps_max=1, visits_per_stage=1, routes_per_node_max=2)

    def schedule(*routes: tuple[int, ...]) -> Schedule:
        flows = [Flow(microbatch=m, route=tuple(Hop(s, s) for s in route)) for m, route in enumerate(routes)]
        orders: Orders = [[], [], []]
        for flow in flows:
            for position, hop in enumerate(flow.route):
                orders[hop.node].append(Instruction(key=Key(Op.F, flow.microbatch, position)))
        for flow in flows:
            for position, hop in enumerate(flow.route):
                orders[hop.node].append(Instruction(key=Key(Op.B, flow.microbatch, position)))
        return Schedule(stages=3, flows=tuple(flows), orders=tuple(map(tuple, orders)), rules=rules)

    check(schedule((0, 1), (0, 2)))
    check(change(schedule((0, 2, 1)), rules=RouteRules(swaps_max=1)))
    refused(change(schedule((0, 2, 1)), rules=RouteRules(swaps_max=0)), "I11")
    refused(schedule((1, 0), (0, 2)), "I11")
    refused(schedule((0, 1), (0, 1)), "I11")
    refused(change(schedule((0, 1), (0, 2)), rules=RouteRules(routes_per_node_max=1)), "I11")
    refused(
        schedule(
            (0, 1, 1),
        ),
        "I11",
    )


@pytest.mark.parametrize(
    ("stages", "swaps"),
    [([0, 1, 2], 0), ([0, 2, 1], 1), ([1, 0, 3, 2], 2), ([0, 3, 1], None), ([2, 1, 0], None), ([0, 3, 2], 1)],
)
def test_swaps_are_exchanges_of_consecutive_stages(stages: list[int], swaps: int | None) -> None:
    """algorithms 1.1: one adjacent transposition of two stages whose numbers differ by one."""
    assert swaps_in(stages) == swaps


@few
@given(designs(), st.sampled_from(("samples", "tokens")))
def test_parts_that_do_not_add_up_are_found(design: Design, field: str) -> None:
    """I12: the batch holds one sample, or each sample one token, more than the parts."""
    schedule = design.schedule()
    refused(change(schedule, **{field: getattr(schedule, field) + 1}), "I12")


def test_a_time_below_a_proven_bound_is_found() -> None:
    """I13: equal is fine, and so is rounding; below is not."""
    check_bound(27.0, 27.0)
    check_bound(27.0 * (1 - 1e-12), 27.0)
    with pytest.raises(InvalidScheduleError, match="I13"):
        check_bound(26.99, 27.0)
