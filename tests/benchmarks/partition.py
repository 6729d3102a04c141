"""Figures of the partition, the slicer and the bounds: `python -m tests.benchmarks.partition`.

Each line is a figure, what it must be, and whether it is. Times are the best of three, since other work on
the machine only ever adds to them. Exits with 1 when a figure fails.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations

from coordinator.planning.order.bounds import pipeline_bound
from coordinator.planning.partition.bounds import BoundTable
from coordinator.planning.partition.costs import BlockCost, PartitionCosts, StagePower
from coordinator.planning.partition.model_costs import CostRules, block_costs
from coordinator.planning.partition.one_f_one_b import makespan_s
from coordinator.planning.partition.planner import partition
from coordinator.planning.partition.search import BalanceTable
from coordinator.planning.partition.slicer import choose_slices
from protocol.run.model_spec import ModelSpec
from tests.oracles.cpsat import solve_pipeline
from tests.strategies.partitions import exhaustive_s, random_parts
from tests.strategies.problems import random_pipeline

failures = 0


def figure(name: str, value: float, wanted: str, passed: bool) -> None:
    """Prints one line and counts what fails."""
    global failures
    failures += not passed
    print(f"{'pass' if passed else 'FAIL'}  {name:<58} {value:>12.4f}  {wanted}")


def best_time_s(work: Callable[[], object]) -> float:
    """The shortest of three runs."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def gpt2(layers: int, hidden: int, recompute: bool) -> list[BlockCost]:
    """A GPT-2 with 16 heads, in millions of operations per token."""
    spec = ModelSpec(
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=16,
        kv_heads=16,
        feed_forward=4 * hidden,
        vocabulary=50304,
        context=1024,
        tied_embeddings=True,
    )
    return block_costs(spec, CostRules(flops_per_s=1e6, tokens=1, recompute=recompute))


def exhaustive_gpt2(blocks: list[BlockCost], stages: int, microbatches: int) -> float:
    """The least makespan over every choice of cuts."""
    costs = PartitionCosts(blocks, [StagePower()] * stages, [0.0] * (stages - 1), microbatches)
    return min(
        makespan_s(*costs.stage_times((0, *cuts, costs.blocks)), costs.link_s, microbatches)
        for cuts in combinations(range(1, costs.blocks), stages - 1)
    )


def partitions() -> None:
    """GPT-2 345M and random small problems against every partition; time for 12 stages."""
    for recompute, known in ((True, 8721.53), (False, 6695.68)):
        blocks = gpt2(24, 1024, recompute)
        found = partition(blocks, [StagePower()] * 4, 8)
        label = "with recompute" if recompute else "without recompute"
        optimum = exhaustive_gpt2(blocks, 4, 8)
        passed = abs(found.makespan_s - optimum) < 1e-6 and round(optimum, 2) == known
        figure(f"GPT-2 345M, 4 x 8, {label}", found.makespan_s, f"exhaustive {optimum:.4f}", passed)
        costs = PartitionCosts(blocks, [StagePower()] * 4, [0.0] * 3, 8)
        start = makespan_s(*costs.stage_times(BalanceTable(costs).edges(4, 50)), costs.link_s, 8)
        print(f"      balanced start alone: {start / optimum:.4f} of it; search: {found.stopped}")
    for count, microbatches in ((12, 12), (12, 24), (12, 96)):
        blocks = gpt2(48, 1600, recompute=True)
        spent = best_time_s(partial(partition, blocks, [StagePower()] * count, microbatches))
        figure(f"seconds for {count} stages x {len(blocks)} blocks, m={microbatches}", spent, "< 1", spent < 1)
    rng = random.Random(1)
    blocks = [BlockCost(rng.random(), 2 * rng.random()) for _ in range(98)]
    stages_unequal = [StagePower(rng.uniform(0.5, 2.0)) for _ in range(12)]
    spent = best_time_s(lambda: partition(blocks, stages_unequal, 24, [0.1] * 11))
    figure("seconds for 12 unequal stages x 98 unequal blocks", spent, "< 1", spent < 1)
    rng, solved, bounded, count = random.Random(2), 0, 0.0, 0
    while count < 500:
        blocks, stages, link_s, microbatches = random_parts(rng)
        costs = PartitionCosts(blocks, stages, link_s, microbatches)
        optimum = exhaustive_s(costs)
        if optimum < float("inf") and optimum > 0.0:
            count += 1
            bounded += min(1.0, BoundTable(costs).value_s / optimum)
            solved += partition(blocks, stages, microbatches, link_s).makespan_s <= optimum + 1e-9
    figure("random partitions solved exactly, of 500", solved, "= 500", solved == 500)
    print(f"      mean of the bound over the optimum before any search: {bounded / count:.4f}")


def slices() -> None:
    """What halving the first microbatches gains for F=1, B=2; the paper's slicer reaches 32, 66 and 100."""
    for stages, microbatches, plain, paper in ((4, 8, 33, 32), (8, 16, 69, 66), (12, 24, 105, 100)):
        chosen = choose_slices([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), microbatches)
        name = f"{stages} x {microbatches}: {plain} with {chosen.count} microbatches halved"
        figure(name, chosen.makespan_s, f"<= {paper}", chosen.makespan_s <= paper)


def bounds() -> None:
    """Bound over optimum on 300 random pipelines that CP-SAT proves."""
    rng, sums, worst, above, count = random.Random(3), [0.0] * 3, 1.0, 0, 0
    while count < 300:
        problem = random_pipeline(rng)
        solved = solve_pipeline(problem)
        if not solved.proven:
            continue
        count += 1
        for effort in range(3):
            ratio = pipeline_bound(problem, effort).value_s / solved.makespan_s
            sums[effort] += ratio
            above += ratio > 1 + 1e-9
        worst = min(worst, ratio)
    figure("bounds above the optimum, 300 random pipelines", above, "= 0", above == 0)
    figure("mean of bound over optimum", sums[2] / count, ">= 0.95", sums[2] / count >= 0.95)
    print(f"      closed forms {sums[0] / count:.4f}, with one machine {sums[1] / count:.4f}, worst {worst:.4f}")


if __name__ == "__main__":
    for part in (partitions, slices, bounds):
        print(f"\n{part.__doc__}")
        part()
    sys.exit(1 if failures else 0)
