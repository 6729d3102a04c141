"""Random small partition problems, and the answer by trying every partition."""

from __future__ import annotations

import random
from itertools import combinations
from math import inf

from coordinator.planning.partition.costs import BlockCost, PartitionCosts, StagePower
from coordinator.planning.partition.one_f_one_b import makespan_s

Parts = tuple[list[BlockCost], list[StagePower], list[float], int]


def random_partition_costs(rng: random.Random, stages_max: int = 4, blocks_max: int = 11) -> PartitionCosts:
    """`random_parts` as sums over ranges."""
    return PartitionCosts(*random_parts(rng, stages_max, blocks_max))


def random_parts(rng: random.Random, stages_max: int = 4, blocks_max: int = 11) -> Parts:
    """Blocks with ties and zeros; equal and unequal stages; with and without links and memory limits."""
    stages = rng.randint(1, stages_max)
    blocks = rng.randint(stages, blocks_max)
    microbatches = rng.choice([1, 2, stages, 2 * stages, rng.randint(1, 12)])
    unequal, limited = rng.random() < 0.5, rng.random() < 0.4
    durations = [0.0, 1.0, 2.0, 3.0, 5.0, 8.0]

    def duration() -> float:
        return rng.choice(durations) if rng.random() < 0.5 else rng.random() * 6

    return (
        [BlockCost(duration(), duration(), float(rng.randint(0, 9)), float(rng.randint(0, 5))) for _ in range(blocks)],
        [
            StagePower(
                rng.choice([0.5, 1.0, 2.0, 3.3]) if unequal else 1.0,
                rng.uniform(10.0, 60.0) if limited else inf,
            )
            for _ in range(stages)
        ],
        [rng.choice([0.0, 1.0, rng.random() * 5]) for _ in range(stages - 1)],
        microbatches,
    )


def exhaustive_s(costs: PartitionCosts) -> float:
    """The least makespan of all partitions that keep the memory limits; inf when none does."""
    best_s = inf
    for cuts in combinations(range(1, costs.blocks), costs.stages - 1):
        edges = (0, *cuts, costs.blocks)
        if all(costs.fits(d, edges[d], edges[d + 1]) for d in range(costs.stages)):
            best_s = min(best_s, makespan_s(*costs.stage_times(edges), costs.link_s, costs.microbatches))
    return best_s
