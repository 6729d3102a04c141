"""Equal nodes into stages: the published networks at their optimum, and a bound that is one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from coordinator.planning.placement.arrange import arrange, bottleneck, matching
from coordinator.planning.placement.bound import arrangement_bound
from protocol.base.errors import BadInputError
from tests.benchmarks import dtfm_cases


def test_matching_uses_the_fewer_side_evenly() -> None:
    """Four nodes against two: each of the two is used twice, and the bottleneck is the smallest possible."""
    cost = np.array([[1.0, 1, 1, 1], [9, 9, 2, 3]])
    assert bottleneck(cost) == 3
    rows = matching(cost, 3.0, 2)
    assert rows is not None and sorted(rows) == [0, 0, 1, 1]
    assert matching(cost, 2.0, 2) is None
    assert bottleneck(cost.T) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "table_s", "_"), dtfm_cases.CASES)
def test_dtfm_networks_at_most_the_genetic_search(name: str, file: str, table_s: float, _: int) -> None:
    """DT-FM's own networks, sizes and cost: the table's arrangement is recounted, and none can be better than ours."""
    latency, rate = dtfm_cases.network(file)
    found, rule = dtfm_cases.ours(latency, rate), dtfm_cases.one_of_each_site(latency, rate)
    assert sorted(n for stage in found.stages for n in stage) == list(range(64))
    assert round(rule.cost_s, 2) == table_s
    assert found.cost_s <= rule.cost_s * (1 + 1e-9)
    assert found.cost_s == pytest.approx(dtfm_cases.bound_s(latency, rate), rel=1e-9)


@pytest.mark.parametrize("closed", [False, True])
def test_no_arrangement_of_few_nodes_is_below_the_bound(closed: bool) -> None:
    """The bound against every arrangement of six nodes: never above the best, and on a third of them it is the best."""
    reached = 0
    for seed in range(30):
        draw = np.random.default_rng(seed)
        site = draw.integers(0, 3, 6) if seed % 2 else np.arange(6) % int(draw.integers(2, 4))
        apart = site[:, None] != site[None, :]
        latency = np.where(apart, draw.integers(5, 9, (6, 6)) if seed % 3 else 6.0, 1.0)
        latency = (latency + latency.T) / 2
        rate = np.full((6, 6), 1.0)
        activation, gradients = float(draw.integers(0, 4)), float(draw.integers(0, 12))
        for stages in (2, 3):
            sizes = [6 // stages] * stages
            best = min(
                arrange(latency, rate, sizes, activation, gradients, closed=closed, start=split, rounds=0).cost_s
                for split in splits(list(range(6)), 6 // stages)
            )
            hop, exchange = latency + activation, 2 * (latency + gradients / sizes[0])
            np.fill_diagonal(hop, 0.0)
            bound = arrangement_bound(hop, exchange, stages, closed)
            assert bound <= best * (1 + 1e-9), seed
            reached += bound >= best * (1 - 1e-9)
    assert reached >= 20


def splits(nodes: list[int], size: int) -> Iterator[list[list[int]]]:
    """All ways to cut `nodes` into groups of `size`, the order of groups aside."""
    if not nodes:
        yield []
        return
    for others in combinations(nodes[1:], size - 1):
        rest = [node for node in nodes[1:] if node not in others]
        for more in splits(rest, size):
            yield [[nodes[0], *others], *more]


def test_arrangement_of_unequal_sizes_keeps_stage_zero() -> None:
    """The larger stage 0 of a skipping pipeline stays in front, and wrong sizes are refused."""
    draw = np.random.default_rng(1)
    latency, rate = draw.uniform(0.01, 0.1, (10, 10)), np.full((10, 10), 1e8)
    found = arrange(latency, rate, [4, 3, 3], 1e6, 1e7, closed=True, rounds=50)
    assert [len(stage) for stage in found.stages] == [4, 3, 3]
    with pytest.raises(BadInputError, match="sizes"):
        arrange(latency, rate, [4, 3], 1e6, 1e7)
