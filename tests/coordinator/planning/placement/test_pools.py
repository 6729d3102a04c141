"""Plans under the cost of pools: arithmetic by hand, the search against every plan there is, the bound below all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.placement.pool_bound import pool_bound
from coordinator.planning.placement.pool_search import even_plan, search_pools
from coordinator.planning.placement.pools import NEVER_S, PoolPlan, Pools, PoolSizes, PoolStage
from protocol.base.errors import BadInputError
from protocol.run.model_spec import BlockSpec
from protocol.schedule.profile import Machine, Network, NetworkFile, SiteLink, build_network

MB = 1e6


def blocks_of(count: int, parameters: int = 1000, flops: int = 6) -> tuple[BlockSpec, ...]:
    """Equal blocks of so many parameters, and operations per token and parameter."""
    return tuple(
        BlockSpec(
            kind="attention",
            parameters=parameters,
            forward_flops=flops * parameters // 3,
            backward_flops=2 * flops * parameters // 3,
            kept_values=10,
        )
        for _ in range(count)
    )


def sizes_of(count: int = 4, **changes: object) -> PoolSizes:
    """Four blocks, ten microbatches, a megabyte a boundary, a thousandth of one a gradient."""
    sizes = PoolSizes(
        blocks=blocks_of(count),
        microbatch_tokens=1,
        microbatches=10,
        activation_up_bytes=MB,
        activation_down_bytes=MB,
        gradient_bytes=1000.0,
        parameter_bytes=1000.0,
        contribution_tasks=512,
        held_bytes=16.0,
        server_held_bytes=16.0,
        collocated="never",
    )
    return replace(sizes, **changes)  # type: ignore[arg-type]


def network_of(
    servers: int, volunteers: list[tuple[float, float, float]], memory_bytes: int = 10**9, line: float = 1e12
) -> Network:
    """Servers on lines of `line` bytes a second, volunteers as (operations a second, bytes a second up, down)."""
    machines = [
        Machine(
            name=f"s{number}",
            role="server",
            site="dc",
            forward_flops_per_s=1.0,
            backward_flops_per_s=1.0,
            memory_bytes=10**9,
            uplink_bytes_per_s=line,
            downlink_bytes_per_s=line,
        )
        for number in range(servers)
    ] + [
        Machine(
            name=f"v{number}",
            role="volunteer",
            site="home",
            forward_flops_per_s=flops,
            backward_flops_per_s=flops,
            memory_bytes=memory_bytes,
            uplink_bytes_per_s=up,
            downlink_bytes_per_s=down,
        )
        for number, (flops, up, down) in enumerate(volunteers)
    ]
    sites = (
        SiteLink(a="dc", b="dc", latency_s=0.0, bytes_per_s=1e15),
        SiteLink(a="dc", b="home", latency_s=0.0, bytes_per_s=1e15),
    )
    return build_network(NetworkFile(kind="network", machines=tuple(machines), sites=sites))


def test_the_pace_of_a_pool_is_what_its_members_do_together() -> None:
    """By hand: 2,000 parameters, a boundary of 1 MB. A member with 1 MB/s up sends the stage's sum (2 MB) in 2 s and an
    output in 1 s each: T - 2 microbatches. One of 3 MB/s does 3 T - 2. Ten visits: 4 T - 4 = 10.
    """
    pools = Pools(network_of(4, [(1e12, MB, 1e12), (1e12, 3 * MB, 1e12)]), sizes_of())
    stage = PoolStage(front=(0,), back=(1,), volunteers=(0, 1), first_block=0, end_block=2)
    pace = pools.pace(stage, 10.0, 4)
    assert pace.pace_s == pytest.approx(3.5, rel=1e-5)
    assert pace.binds == "uplink"
    assert pace.microbatches_of == pytest.approx((1.5, 8.5), rel=1e-4)


def test_a_stage_between_two_others_sends_twice_as_much() -> None:
    """An output and an input gradient for each microbatch: 2 s of the line each, where an end has 1 s."""
    pools = Pools(network_of(4, [(1e12, MB, 1e12)]), sizes_of())
    middle = PoolStage(front=(0,), back=(1,), volunteers=(0,), first_block=1, end_block=2)
    end = replace(middle, first_block=3, end_block=4)
    assert pools.pace(middle, 10.0, 4).pace_s == pytest.approx(2 * 10 + 1, rel=1e-5)
    assert pools.pace(end, 10.0, 4).pace_s == pytest.approx(10 + 1, rel=1e-5)


def test_a_slow_member_delays_nobody() -> None:
    """Whoever joins a pool makes it faster or leaves it as it is, however poor the line: nobody waits for it."""
    fast = (1e12, 10 * MB, 1e12)
    before = NEVER_S
    for slow in ([], [(1e12, MB / 100, 1e12)], [(1e3, MB, MB)], [(1e12, 20 * MB, 1e12)]):
        pools = Pools(network_of(4, [fast, *slow]), sizes_of())
        stage = PoolStage(front=(0,), back=(1,), volunteers=tuple(range(1 + len(slow))), first_block=0, end_block=2)
        pace_s = pools.pace(stage, 10.0, 4).pace_s
        assert pace_s <= before * (1 + 1e-6)
        before = pools.pace(replace(stage, volunteers=(0,)), 10.0, 4).pace_s


def test_servers_lines_set_the_pace_where_they_are_narrow() -> None:
    """A server that gives out inputs and passes gradients on moves two boundaries each way for each microbatch."""
    pools = Pools(network_of(4, [(1e12, 1e12, 1e12)] * 2, line=MB), sizes_of(gradient_bytes=0.0, parameter_bytes=0.0))
    stage = PoolStage(front=(0,), back=(1,), volunteers=(0, 1), first_block=2, end_block=4)
    pace = pools.pace(stage, 10.0, 4)
    assert pace.lines_s == pytest.approx(20.0) and pace.pace_s == pytest.approx(20.0)


def test_whom_the_blocks_do_not_fit_does_nothing_there() -> None:
    """Memory for one block of 1,000 parameters at 16 bytes: alone with it in two blocks nobody computes."""
    pools = Pools(network_of(4, [(1e12, MB, MB)], memory_bytes=17_000), sizes_of())
    one = PoolStage(front=(0,), back=(1,), volunteers=(0,), first_block=0, end_block=1)
    assert pools.pace(one, 10.0, 4).pace_s < NEVER_S
    assert pools.pace(replace(one, end_block=2), 10.0, 4).pace_s >= NEVER_S


def random_pools(rng: random.Random, servers: int, volunteers: int, blocks: int) -> Pools:
    """Unequal lines and devices, gradients that matter."""
    lines = [(10 ** rng.uniform(3.5, 6), 10 ** rng.uniform(5, 7), 10 ** rng.uniform(6, 8)) for _ in range(volunteers)]
    sizes = sizes_of(
        blocks,
        gradient_bytes=rng.choice([10.0, 1000.0]),
        microbatches=rng.randint(2, 30),
        delayed=rng.random() < 0.5,
        collocated=rng.choice(["never", "when_empty", "always"]),
    )
    return Pools(network_of(servers, lines, line=10 ** rng.uniform(7, 9)), sizes)


def every_plan(pools: Pools) -> Iterator[PoolPlan]:
    """All plans with one front and one back server a stage, over all cuts and choices of stage by volunteer."""
    blocks, volunteers = len(pools.sizes.blocks), pools.network.volunteers
    for count in range(1, min(pools.servers // 2, blocks) + 1):
        for cuts in product(range(1, blocks), repeat=count - 1):
            if list(cuts) != sorted(set(cuts)):
                continue
            edges = [0, *cuts, blocks]
            for stage_of in product(range(count), repeat=volunteers):
                yield pools.plan(
                    [
                        PoolStage(
                            front=(2 * k,),
                            back=(2 * k + 1,),
                            volunteers=tuple(v for v in range(volunteers) if stage_of[v] == k),
                            first_block=edges[k],
                            end_block=edges[k + 1],
                        )
                        for k in range(count)
                    ]
                )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_small_networks_are_planned_as_well_as_by_trying_everything(seed: int) -> None:
    """Four equal servers, four volunteers, five blocks: within five percent of the best plan, never below the bound."""
    pools = random_pools(random.Random(seed), 4, 4, 5)
    best_s = min(plan.step_s for plan in every_plan(pools))
    found = search_pools(pools, seed, 1.0)
    assert found.lower_bound_s <= best_s * (1 + 1e-6)
    assert found.step_s <= best_s * 1.05


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_no_answer_is_worse_than_the_even_plan_and_none_is_below_the_bound(seed: int) -> None:
    """On any network: by its own cost the answer is at least as fast as what a coordinator does without a planner."""
    rng = random.Random(seed)
    pools = random_pools(rng, rng.randint(2, 9), rng.randint(0, 12), rng.randint(2, 9))
    even_stages = rng.randint(1, 4)
    try:
        found = search_pools(pools, seed, 0.05, even_stages=even_stages)
    except BadInputError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert ":" in refusal
        return
    assert found.step_s <= found.even.step_s
    assert found.lower_bound_s <= found.step_s
    stages = found.plan.stages
    assert found.plan.edges[0] == 0 and found.plan.edges[-1] == len(pools.sizes.blocks)
    assert all(a < b for a, b in zip(found.plan.edges, found.plan.edges[1:], strict=False))
    servers = [server for stage in stages for server in stage.servers]
    assert sorted([*servers, *found.spares]) == list(range(pools.servers))
    volunteers = sorted(volunteer for stage in stages for volunteer in stage.volunteers)
    assert volunteers == list(range(pools.network.volunteers))  # nobody is benched for being slow


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_for_plans_of_any_shape(seed: int) -> None:
    """No random plan of a network beats its bound, for its own number of stages or for all of them."""
    rng = random.Random(seed)
    pools = random_pools(rng, 8, 10, 8)
    bounds = {count: pool_bound(pools, [count]) for count in range(1, 5)}
    assert pool_bound(pools, range(1, 5)) == pytest.approx(min(bounds.values()))
    for _ in range(300):
        count = rng.randint(1, 4)
        edges = [0, *sorted(rng.sample(range(1, 8), count - 1)), 8]
        stage_of = [rng.randrange(count) for _ in range(10)]
        plan = pools.plan(
            [
                PoolStage(
                    front=(2 * k,),
                    back=(2 * k + 1,),
                    volunteers=tuple(v for v in range(10) if stage_of[v] == k),
                    first_block=edges[k],
                    end_block=edges[k + 1],
                )
                for k in range(count)
            ]
        )
        assert plan.step_s >= bounds[count] * (1 - 1e-6)


def test_equal_home_lines_reach_most_of_the_bound() -> None:
    """Forty equal volunteers whose lines set the pace, four stages: the bound is near, so prices are not far off."""
    pools = Pools(
        network_of(8, [(1e15, MB, 10 * MB)] * 40, line=1e12),
        sizes_of(16, microbatches=400, gradient_bytes=10_000.0, delayed=True),
    )
    found = search_pools(pools, 0, 2.0, stages=4)
    assert found.fraction_of_bound >= 0.8


def test_who_cannot_finish_a_gradient_in_a_step_is_named_with_the_reason() -> None:
    """A line that needs longer for the stage's sum than a step takes does nothing, and the answer names the line."""
    pools = Pools(network_of(2, [(1e12, 10 * MB, 1e12)] * 3 + [(1e12, 1.0, 1e12)]), sizes_of())
    found = search_pools(pools, 0, 0.2)
    assert found.idle == ((3, "uplink"),)


def test_even_plans_are_those_of_a_coordinator_without_a_planner() -> None:
    """Blocks as even as whole numbers allow, servers as they come, volunteers in turn."""
    pools = Pools(network_of(5, [(1e12, MB, MB)] * 3), sizes_of(5))
    plan = even_plan(pools, 2, [10.0, 10.0])
    assert plan.edges == (0, 2, 5)
    assert [stage.servers for stage in plan.stages] == [(0, 1), (2, 3, 4)]
    assert [stage.volunteers for stage in plan.stages] == [(0, 2), (1,)]
    assert np.isfinite(plan.step_s)
