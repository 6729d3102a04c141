"""The search for cuts: Algorithm 1 by hand, bounds that hold, and every small problem solved exactly."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.partition.bounds import BoundTable
from coordinator.planning.partition.costs import BlockCost, PartitionCosts, StagePower
from coordinator.planning.partition.one_f_one_b import makespan_s
from coordinator.planning.partition.search import BalanceTable, PartitionSearch
from tests.strategies.partitions import exhaustive_s, random_partition_costs


def plain(work: list[tuple[float, float]], stages: int, microbatches: int) -> PartitionCosts:
    """Equal stages without links, from (forward, backward) per block."""
    blocks = [BlockCost(f, b) for f, b in work]
    return PartitionCosts(blocks, [StagePower()] * stages, [0.0] * (stages - 1), microbatches)


def test_balanced_start_by_hand() -> None:
    """f = 1 … 5, b = 2 f on three stages: blocks 0–2, 3, 4, and no stage works longer than 18."""
    costs = plain([(f, 2 * f) for f in (1.0, 2.0, 3.0, 4.0, 5.0)], 3, 6)
    edges = BalanceTable(costs).edges(3, 5)
    assert edges == (0, 3, 4, 5)
    assert max(costs.work_s(d, edges[d], edges[d + 1]) for d in range(3)) == 18


def test_no_stage_is_left_empty() -> None:
    """As many stages as blocks, one of them free: one block each (the published code can do otherwise)."""
    costs = plain([(0.0, 0.0), (1.0, 2.0), (1.0, 2.0), (9.0, 18.0)], 4, 8)
    search = PartitionSearch(costs, random.Random(1))
    search.run()
    assert search.best == (0, 1, 2, 3, 4)


def test_faster_nodes_get_more_blocks() -> None:
    """Nine equal blocks on nodes of speed 1 and 2: a third and two thirds."""
    blocks = [BlockCost(1.0, 2.0)] * 9
    costs = PartitionCosts(blocks, [StagePower(1.0), StagePower(2.0)], [0.0], 16)
    search = PartitionSearch(costs, random.Random(1))
    search.run()
    assert search.best == (0, 3, 9)


def test_memory_moves_the_cut() -> None:
    """Stage 0 holds two microbatches in flight, so it can bear one block less than without the limit."""
    blocks = [BlockCost(1.0, 2.0, parameter_bytes=1.0, activation_bytes=1.0)] * 8
    limits = [StagePower(memory_bytes=9.0), StagePower(memory_bytes=100.0)]  # 3 bytes per block on stage 0
    search = PartitionSearch(PartitionCosts(blocks, limits, [0.0], 8), random.Random(1))
    search.run()
    assert search.best == (0, 3, 8)


@given(st.randoms(use_true_random=False))
def test_small_problems_are_solved_exactly(rng: random.Random) -> None:
    """The search ends with a proof, its makespan is the least of all partitions, and the limits are kept."""
    costs = random_partition_costs(rng)
    best_s = exhaustive_s(costs)
    search = PartitionSearch(costs, random.Random(0))
    search.run()
    assert search.proven
    if best_s == inf:
        assert search.best == ()
        return
    assert search.best_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
    assert search.lower_bound_s == search.best_s
    edges = search.best
    assert edges[0] == 0 and edges[-1] == costs.blocks
    assert all(costs.fits(d, edges[d], edges[d + 1]) for d in range(costs.stages))
    assert all(a < b for a, b in pairwise(edges))


@given(st.randoms(use_true_random=False))
def test_no_partition_beats_the_bound(rng: random.Random) -> None:
    """The table's value is at most the least makespan, and a range's bound at most that of what holds it."""
    costs = random_partition_costs(rng, stages_max=5)
    table = BoundTable(costs)
    assert table.value_s <= exhaustive_s(costs) * (1 + 1e-9) + 1e-9
    cuts = sorted(rng.sample(range(1, costs.blocks), costs.stages - 1))
    edges = (0, *cuts, costs.blocks)
    value_s = makespan_s(*costs.stage_times(edges), costs.link_s, costs.microbatches)
    for d in range(costs.stages):
        for bound_s, end in table.choices[d][edges[d]]:
            assert end != edges[d + 1] or bound_s <= value_s * (1 + 1e-9) + 1e-9


def test_a_search_out_of_time_has_an_answer_all_the_same() -> None:
    """The balanced start is kept when there is no time for anything else."""
    costs = random_partition_costs(random.Random(21), stages_max=4)
    hurried = PartitionSearch(costs, random.Random(1), out_of_time=lambda: True)
    hurried.run()
    assert hurried.best != ()
    assert hurried.lower_bound_s <= exhaustive_s(costs) <= hurried.best_s


def test_the_same_seed_gives_the_same_answer() -> None:
    """Large enough that the local search kicks and the enumeration is cut short."""
    rng = random.Random(8)
    blocks = [BlockCost(rng.random(), 2 * rng.random()) for _ in range(60)]
    costs = PartitionCosts(blocks, [StagePower(rng.uniform(0.5, 2.0)) for _ in range(10)], [0.3] * 9, 10)
    answers = []
    for _ in range(2):
        search = PartitionSearch(costs, random.Random(5), work_max=50_000)
        search.run()
        answers.append((search.best, search.best_s, search.stopped, search.lower_bound_s))
    assert answers[0] == answers[1]
    assert answers[0][2] == "no better neighbour, and too many partitions to try them all"
    assert answers[0][3] <= answers[0][1]
