"""After a server or volunteer drops, joins or slows down, one role finds somebody and everybody else stays."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.placement.change import StateBytes, as_it_is, drop, improve, join, slow_down, stage_of_machine
from coordinator.planning.placement.cost import Costs, Placement, Stage
from coordinator.planning.placement.live import LiveSwarm, SwarmRepair
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.search import search_placement
from coordinator.planning.placement.swarm import member_model
from coordinator.planning.routes.model import violations
from coordinator.planning.routes.search import search_routes
from protocol.base.errors import BadInputError, LocalProtocolError
from tests.coordinator.planning.placement.worlds import random_world

STATE = StateBytes.adamw(1e6, 2048.0)
NOBODY: frozenset[int] = frozenset()


def live_swarm(rng: random.Random, servers: int, volunteers: int, stages: int, gone: frozenset[int]) -> LiveSwarm:
    """A random world placed and routed without the machines in `gone`, which may join later."""
    world = random_world(rng, servers, volunteers)
    world = replace(
        world,
        server_layers_max=np.full(servers, 9.0 if stages > 1 else 12.0),
        volunteer_layers_max=np.full(volunteers, 9.0 if stages > 1 else 12.0),
        may_bench=True,
    )
    there = [j for j in range(servers) if j not in gone]
    ready = [v for v in range(volunteers) if servers + v not in gone]
    found = search_placement(world.part(there, ready), 0, stages=stages, clock=lambda: 0.0, budget_s=0.01).placement
    renumbered = [
        Stage(tuple(there[j] for j in s.front), tuple(there[j] for j in s.back), tuple(ready[v] for v in s.volunteers))
        for s in found.stages
    ]
    placement = Placement(Costs(world), renumbered, found.layers())
    swarm = member_model(world, placement, memory=2)
    answer = search_routes(swarm.model, 0, 0.02, conflicts=False, clock=lambda: 0.0)
    return LiveSwarm.of(placement, swarm, answer, STATE, gone=gone)


def four_servers() -> Placement:
    """Two stages of a front and a back server each, all alike, and a fifth server that stands in no stage."""
    world = World(
        server_power=np.full(5, 1000.0),
        volunteer_power=np.array([500.0]),
        server_latency_s=np.full((5, 5), 0.01) - 0.01 * np.eye(5),
        server_slowness=np.full((5, 5), 1e-4),
        front_latency_s=np.full((1, 5), 0.01),
        front_slowness=np.full((1, 5), 1e-5),
        back_latency_s=np.full((1, 5), 0.01),
        back_slowness=np.full((1, 5), 1e-5),
        layers=8,
        layers_max=8,
        tokens=100.0,
        microbatches=4,
    )
    return as_it_is(Placement(Costs(world), [Stage((0,), (1,), (0,)), Stage((2,), (3,), ())]))


def changed(live: LiveSwarm, kind: str, machine: int, rng: random.Random) -> SwarmRepair | None:
    """The repair after something happened to `machine`, None where it is refused naming a stage."""
    try:
        if kind == "join":
            return live.join(machine)
        if kind == "drop":
            return live.drop(machine)
        return live.slow_down(machine, rng.choice([0.5, 3.0, 10.0]), rng.choice([1.0, 8.0]))
    except BadInputError as error:
        refusal = str(error)
    assert "stage" in refusal
    return None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_churn_of_servers_and_volunteers_keeps_every_rule(seed: int) -> None:
    """Random drops, joins and slow-downs: stages stay whole, untouched routes stay, refusals name a stage."""
    rng = random.Random(seed)
    stages = rng.randint(1, 3)
    servers, volunteers = 2 * stages + rng.randint(0, 3), rng.randint(0, 6)
    late = frozenset(m for m in range(2 * stages, servers + volunteers) if rng.random() < 0.3)
    live = live_swarm(rng, servers, volunteers, stages, late)
    live.check()
    sent = sum(live.swarm.model.sends)
    for _ in range(8):
        machine = rng.randrange(servers + volunteers)
        kind = "join" if machine in live.gone else rng.choice(["drop", "drop", "slow"])
        before, members = live.routes, live.swarm.members
        repair = changed(live, kind, machine, rng)
        if repair is None:
            continue
        model = repair.routes.model
        assert violations(model, repair.routes.routes) == []
        assert sum(model.sends) == sent
        assert repair.members[: len(members)] == members
        for route, number in zip(repair.routes.routes, repair.routes.kept, strict=True):
            assert number < 0 or route == before[number]
        if kind == "drop":
            used = {repair.members[node] for route in repair.routes.routes for node in route}
            assert machine not in used
        live.apply(repair, live.generation)
        assert math.isfinite(live.placement.cost_s)


def test_the_others_of_its_side_carry_on() -> None:
    """With two servers in front, one dropping moves nobody; the other one takes over its share of the state."""
    placement = four_servers()
    placement = as_it_is(Placement(placement.costs, [Stage((0, 4), (1,), (0,)), Stage((2,), (3,), ())]))
    repair = drop(placement, NOBODY, 4, STATE)
    assert repair.placement.stages == [Stage((0,), (1,), (0,)), Stage((2,), (3,), ())]
    assert repair.changed == {0} and repair.gone == {4}
    layers = placement.layers()[0]
    sixth = layers * STATE.optimizer_state / 6  # shares grow from a third to a half
    assert repair.moved.bytes_of == pytest.approx({0: sixth, 1: sixth})
    assert "carry on" in repair.sentence and "2 machines load" in repair.sentence


def test_a_spare_server_takes_the_role_and_loads_layers_and_share() -> None:
    """The only back server drops: the spare one stands in for it where that is better than one with both roles."""
    placement = four_servers()
    repair = drop(placement, NOBODY, 3, STATE)
    assert repair.placement.stages[0] == placement.stages[0]
    assert repair.placement.stages[1] == Stage((2,), (4,), ())
    layers = placement.layers()[1]
    assert repair.moved.bytes_of == pytest.approx({4: layers * (STATE.parameters + STATE.optimizer_state / 2)})
    assert repair.moved.seconds == pytest.approx(repair.moved.total_bytes / STATE.activation * 1e-4)
    assert "server 4 joins stage 1 back" in repair.sentence


def test_without_a_spare_the_last_server_plays_both_roles() -> None:
    """Nobody is spare and no stage has more than it needs: front and back merge on the server that is left."""
    placement = four_servers()
    repair = drop(placement, frozenset((4,)), 0, STATE)
    assert repair.placement.stages == [Stage((1,), (1,), (0,)), Stage((2,), (3,), ())]
    assert "server 1 goes from stage 0 back to stage 0 front and back" in repair.sentence
    assert repair.placement.power[0] == 1500.0
    back = join(repair.placement, repair.gone, 0, STATE)
    assert 0 in back.placement.stages[0].servers and back.placement.stages[0].front != back.placement.stages[0].back


def test_a_stage_that_lost_everybody_is_given_a_server_of_another() -> None:
    """When the server with both roles drops too, another stage gives one away and merges its own roles."""
    first = drop(four_servers(), frozenset((4,)), 0, STATE)
    second = drop(first.placement, first.gone, 1, STATE)
    given, giver = second.placement.stages
    assert given.front == given.back and giver.front == giver.back
    assert {*given.servers, *giver.servers} == {2, 3}


def test_what_cannot_be_repaired_names_the_stage() -> None:
    """The last server of all, or memory that no stand-in has: the sentence says which stage lacks whom."""
    placement = four_servers()
    gone = frozenset((4,))
    for machine in (0, 1):
        repair = drop(placement, gone, machine, STATE)
        placement, gone = repair.placement, repair.gone
    alone = placement.stages[1].servers[0]
    with pytest.raises(BadInputError, match=f"^stage 1: nobody can stand in for server {alone}: 0 servers are spare"):
        drop(placement, gone, alone, STATE)
    with pytest.raises(BadInputError, match="machine: 99"):
        drop(placement, gone, 99, STATE)


def test_a_stand_in_must_hold_the_layers() -> None:
    """A spare server too small for the stage is passed over; with nobody large enough layers are cut anew."""
    placement = four_servers()
    world = replace(placement.costs.world, server_layers_max=np.array([8.0, 8, 8, 8, 1]))
    tight = as_it_is(Placement(Costs(world), placement.stages))
    assert all(4 not in stage.servers for stage in drop(tight, NOBODY, 3, STATE).placement.stages)
    narrow = replace(world, server_layers_max=np.array([7.0, 7, 3, 8, 2]))
    cut = drop(Placement(Costs(narrow), [Stage((0,), (1,), (0,)), Stage((3,), (3,), ())], [5, 3]), NOBODY, 3, STATE)
    assert sum(cut.placement.layers()) == 8
    assert cut.placement.most[1] >= cut.placement.layers()[1]


def test_a_slow_server_is_relieved_only_when_that_pays() -> None:
    """A server a little slower keeps its role; one with a hopeless link gives it to the spare one."""
    placement = four_servers()
    same = slow_down(placement, NOBODY, 3, STATE, 1.01, 1.0)
    assert same.placement.stages == placement.stages and "no change pays" in same.sentence
    bad = slow_down(placement, NOBODY, 3, STATE, 1.0, 1e4)
    assert 3 not in bad.placement.stages[1].servers
    with pytest.raises(BadInputError, match="link_factor"):
        slow_down(placement, NOBODY, 3, STATE, 1.0, 0.0)


def test_a_volunteer_joins_where_it_helps_and_drops_without_a_trace() -> None:
    """A volunteer that is back takes the stage whose cost it lowers most; leaving changes only its stage."""
    placement = four_servers()
    gone = drop(placement, NOBODY, 5, STATE)
    assert gone.changed == {0} and not gone.placement.stages[0].volunteers
    back = join(gone.placement, gone.gone, 5, STATE)
    k = stage_of_machine(back.placement, 5)
    assert k is not None and back.moved.bytes_of[5] == placement.layers()[k] * STATE.parameters
    again = join(back.placement, back.gone, 5, STATE)
    assert again.placement is back.placement and "already" in again.sentence


def test_the_background_answers_only_what_pays() -> None:
    """From a placement made bad on purpose it finds a better one for those who are there; a good one it leaves."""
    rng = random.Random(5)
    pair = search_placement(random_world(rng, 2, 0), 0, 0.1).placement  # two servers make one placement
    assert improve(as_it_is(pair), NOBODY, STATE, 1, 0.1) is None
    world = random_world(rng, 8, 10)
    found = search_placement(world, 0, stages=2)
    placement = as_it_is(found.placement)
    crowd = [v for s in placement.stages for v in s.volunteers]
    bad = Placement(
        placement.costs,
        [Stage(s.front, s.back, tuple(crowd) if k == 0 else ()) for k, s in enumerate(placement.stages)],
        placement.fixed,
    )
    gone = frozenset((world.servers + crowd[0],))
    bad = drop(bad, NOBODY, min(gone), STATE).placement
    better = improve(bad, gone, STATE, 1, 0.5)
    assert better is not None and better.placement.cost_s < bad.cost_s
    assert crowd[0] not in [v for s in better.placement.stages for v in s.volunteers]
    assert better.moved.total_bytes > 0 and "instead of" in better.sentence


def test_generations_fence_the_old_plan() -> None:
    """A plan made before another change was put in force is refused, and nothing of it is mixed in."""
    live = live_swarm(random.Random(2), 6, 6, 2, NOBODY)
    first = live.generation
    improved_meanwhile = live.drop(7)  # planned for the generation at hand, but slow to arrive
    live.apply(live.drop(0), first)
    assert live.generation == first + 1
    placement, routes = live.placement, live.routes
    with pytest.raises(LocalProtocolError, match=f"generation {first} came at generation {first + 1}"):
        live.apply(improved_meanwhile, first)
    assert live.placement is placement and live.routes is routes and 7 not in live.gone
    live.apply(live.drop(7), live.generation)
    assert live.gone == {0, 7}


def test_live_improvement_is_routed_too() -> None:
    """What the background finds comes with routes over its members and can be put in force."""
    live = live_swarm(random.Random(11), 8, 8, 2, NOBODY)
    for machine in (0, 8, 9):
        live.apply(live.drop(machine), live.generation)
    slow = live.slow_down(live.placement.stages[0].servers[0], 20.0, 20.0)
    live.apply(slow, live.generation)
    cost_s = live.placement.cost_s
    better = live.improve(0, 0.5)
    if better is not None:
        live.apply(better, live.generation)
        assert live.placement.cost_s < cost_s
        assert violations(live.swarm.model, live.routes) == []
