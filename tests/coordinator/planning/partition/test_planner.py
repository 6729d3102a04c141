"""Where to cut a model: GPT-2 345M against every partition, the paper's table, and what is refused."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import inf, nan

import pytest

from coordinator.planning.partition.costs import BlockCost, StagePower
from coordinator.planning.partition.model_costs import CostRules, block_costs
from coordinator.planning.partition.one_f_one_b import makespan_s
from coordinator.planning.partition.planner import partition
from protocol.base.errors import BadInputError
from tests.coordinator.planning.partition.test_model_costs import GPT2_345M

EQUAL = StagePower()


def gpt2(recompute: bool) -> list[BlockCost]:
    """GPT-2 345M, 50 blocks, in millions of operations per token."""
    return block_costs(GPT2_345M, CostRules(flops_per_s=1e6, tokens=1, recompute=recompute))


@pytest.mark.parametrize(
    ("recompute", "cuts", "value_s"), [(True, [15, 28, 41], 8721.53), (False, [15, 29, 43], 6695.68)]
)
def test_gpt2_345m_is_cut_as_exhaustive_search_cuts_it(recompute: bool, cuts: list[int], value_s: float) -> None:
    """p=4, m=8: the optimum of all 18,424 partitions, and the bound proves it."""
    found = partition(gpt2(recompute), [EQUAL] * 4, 8)
    assert found.cuts == cuts
    assert round(found.makespan_s, 2) == value_s
    assert found.lower_bound_s == pytest.approx(found.makespan_s, rel=1e-12)
    assert found.timeline.makespan_s == pytest.approx(found.makespan_s, rel=1e-12)


def test_the_papers_table_is_ordered_by_arithmetic() -> None:
    """Of AutoPipe's seven partitions (Table II) number 4 is fastest and number 1 slowest."""
    table = [
        (5, 7, 6, 6),
        (6, 6.5, 6.5, 5),
        (6, 7, 6, 5),
        (6.5, 6.5, 6.5, 4.5),
        (6.5, 6.5, 6, 5),
        (7, 5.5, 6, 5.5),
        (7, 6.5, 5.5, 5),
    ]
    blocks = gpt2(recompute=True)
    values = []
    for layers in table:
        edges = [0, *(1 + int(2 * end) for end in accumulate(layers))]
        edges[-1] += 1  # the head
        stages = [blocks[first:end] for first, end in pairwise(edges)]
        values.append(
            makespan_s(
                [sum(block.forward_s for block in stage) for stage in stages],
                [sum(block.backward_s for block in stage) for stage in stages],
                [0.0] * 3,
                8,
            )
        )
    assert values.index(min(values)) + 1 == 4
    assert values.index(max(values)) + 1 == 1


def test_memory_is_kept_and_reported() -> None:
    """Limits that bind move the cuts; every stage reports what it holds, within its limit."""
    blocks = [BlockCost(1.0, 2.0, parameter_bytes=10.0, activation_bytes=4.0)] * 12
    free = partition(blocks, [EQUAL] * 3, 6)
    assert free.memory_bytes[0] == 4 * (10 + 3 * 4)
    limited = partition(blocks, [StagePower(memory_bytes=70.0), EQUAL, EQUAL], 6)
    assert limited.memory_bytes[0] <= 70.0 < free.memory_bytes[0]
    assert limited.makespan_s >= free.makespan_s


def test_each_link_counts_for_itself() -> None:
    """Making one link slow adds at least its two crossings."""
    blocks = [BlockCost(1.0, 2.0)] * 6
    near, far = partition(blocks, [EQUAL] * 3, 4), partition(blocks, [EQUAL] * 3, 4, [0.0, 10.0])
    assert far.makespan_s >= near.makespan_s + 20.0


def test_blocks_that_are_alike_are_spread_evenly() -> None:
    """Before anything is measured: embedding and head are free, every half of a layer is like the next."""
    blocks = [BlockCost(0.0, 0.0), *[BlockCost(1.0, 2.0)] * 16, BlockCost(0.0, 0.0)]
    found = partition(blocks, [EQUAL] * 4, 8)
    layers = [end - first for first, end in pairwise(found.edges)]
    assert sum(layers) == 18
    assert max(found.forward_s) == 4.0 == min(found.forward_s)


@pytest.mark.parametrize(
    ("blocks", "stages", "microbatches", "link_s", "key"),
    [
        ([BlockCost(1, 2)] * 2, [EQUAL] * 3, 4, None, "stages: 3 stages cannot share 2 blocks"),
        ([], [EQUAL], 4, None, "forward_s: 0 blocks"),
        ([BlockCost(1, 2)] * 4, [], 4, None, "stages: 0"),
        ([BlockCost(1, 2)] * 4, [EQUAL] * 2, 0, None, "microbatches: 0"),
        ([BlockCost(1, 2)] * 4, [EQUAL] * 2, 4, [1.0, 2.0], "link_s: 1 values wanted, got 2"),
        ([BlockCost(1, 2)] * 4, [EQUAL] * 2, 4, [inf], r"link_s\[0\]: inf"),
        ([BlockCost(1, 2), BlockCost(-1, 2)], [EQUAL] * 2, 4, None, r"forward_s\[1\]: -1"),
        ([BlockCost(1, nan), BlockCost(1, 2)], [EQUAL] * 2, 4, None, r"backward_s\[0\]: nan"),
        ([BlockCost(1, 2)] * 4, [EQUAL, StagePower(speed=0.0)], 4, None, r"speed\[1\]: 0.0"),
        ([BlockCost(1, 2)] * 4, [EQUAL, StagePower(memory_bytes=0.0)], 4, None, r"memory_bytes\[1\]: 0.0"),
        ([BlockCost(1, 2, 5.0)] * 4, [EQUAL, StagePower(1.0, 4.0)], 4, None, "memory_bytes: stage 1"),
        (
            [BlockCost(1, 2, 5.0)] * 4,
            [StagePower(memory_bytes=9.0)] * 2,
            4,
            None,
            "memory_bytes: no partition",
        ),
    ],
)
def test_bad_input_names_the_key(
    blocks: list[BlockCost],
    stages: list[StagePower],
    microbatches: int,
    link_s: list[float] | None,
    key: str,
) -> None:
    """One sentence that starts with what is wrong."""
    with pytest.raises(BadInputError, match=f"^{key}"):
        partition(blocks, stages, microbatches, link_s)
