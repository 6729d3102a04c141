"""The even partition and its words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.live.plan_builder import IN_FLIGHT_MOST, block_names, block_work, build_plan, in_flight_of
from node.volunteer.volunteer import LEASES_MAX
from protocol.base.ids import NodeId
from protocol.run.course import even_partition
from protocol.run.plan import IN_FLIGHT_LIMIT, ServerPlan
from protocol.run.run import ModelSection, RunConfig, StagesSection


@given(st.integers(1, 500).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(1, blocks))))
def test_the_partition_covers_every_block_once_and_evenly(case: tuple[int, int]) -> None:
    """No gap, no overlap, no empty stage; sizes differ by one at most."""
    block_count, stage_count = case
    ranges = even_partition(block_count, stage_count)
    assert [block for first, end in ranges for block in range(first, end)] == list(range(block_count))
    sizes = {end - first for first, end in ranges}
    assert len(ranges) == stage_count and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_work_counts_multiply_adds_of_the_demo() -> None:
    """Attention: q, k, v, o and the scores; feed-forward: three matrices; head: the vocabulary."""
    config = RunConfig()
    assert block_work(config, 1, 259) == 128 * (128 + 64 + 64 + 128) + 128 * 128
    assert block_work(config, 2, 259) == 3 * 128 * 352
    assert block_work(config, 9, 259) == 128 * 259
    assert block_work(config, 0, 259) < block_work(config, 1, 259)


def test_blocks_are_named_as_people_say_them() -> None:
    """Half layers by a and f."""
    config = RunConfig()
    assert block_names(config, 0, 10) == "embed, 0a-3f, head"
    assert block_names(config, 0, 1) == "embed"
    assert block_names(config, 9, 10) == "head"
    assert block_names(config, 2, 3) == "0f"
    assert block_names(config, 2, 9) == "0f-3f"


def test_sixteen_stages_have_as_many_forwards_in_flight_for_each_as_eight() -> None:
    """A line of twice the length keeps its members' uplinks busy with twice the microbatches: 32 left them idle for a
    fifth of a step of 7 B parameters. Two fronts' worth of them are fewer leases than a volunteer takes."""
    assert [in_flight_of(stages) for stages in (1, 2, 8, 16, 200)] == [4, 8, 32, 64, IN_FLIGHT_MOST]
    assert IN_FLIGHT_MOST <= IN_FLIGHT_LIMIT and 2 * IN_FLIGHT_MOST < LEASES_MAX


def test_a_plan_says_why() -> None:
    """Pure: the same in, the same out, with a sentence."""
    config = RunConfig(model=ModelSection(layers=1), stages=StagesSection(count=2))
    servers = [
        (ServerPlan(NodeId(f"{n}f"), "front", ("h:1",)), ServerPlan(NodeId(f"{n}b"), "back", ("h:2",))) for n in "ab"
    ]
    plan, sentence = build_plan(config, servers, generation=7, ledger_generation=3, restore_step=40)
    assert (plan.generation, plan.ledger_generation, plan.restore_step) == (7, 3, 40)
    assert sentence == "4 sub-layer blocks cut evenly into 2 stages (stage 0: embed, 0a; stage 1: 0f, head)"
    assert plan.decider == "af" and plan.stage_of(NodeId("bb")) == 1
