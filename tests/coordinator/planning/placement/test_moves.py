"""Volunteers choose the nearest stage that needs them, and move only when it pays for the reload."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.placement.moves import Member, choice_against_best, choose_stage, plan_moves
from coordinator.planning.placement.search import search_placement
from tests.coordinator.planning.placement.worlds import random_world


def test_choice_is_near_then_needed() -> None:
    """The nearest stage wins; among stages about as near, the poorest; an empty stage before all."""
    assert choose_stage([1e6, 5e6, 2e6], [3.0, 9.0, 1.0]) == 1
    assert choose_stage([4.5e6, 5e6, 2e6], [3.0, 9.0, 1.0]) == 0
    assert choose_stage([1e6, 5e6, 2e6], [0.0, 9.0, 1.0]) == 0
    assert choose_stage([0.0, 5e6, 2e6], [0.0, 9.0, 1.0]) == 1
    assert choose_stage([0.0, 0.0], [2.0, 1.0]) == 1


def test_choice_is_checked_against_the_cost() -> None:
    """At least one stage is the best for a volunteer, and no stage is better than the best."""
    found = search_placement(random_world(random.Random(3), 6, 8), budget_s=0.2, stages=2)
    for volunteer in range(8):
        ratios = [choice_against_best(found.placement, volunteer, stage) for stage in range(2)]
        assert min(ratios) == 1.0


def test_moves_pay_for_the_reload() -> None:
    """Eight against two is evened out when there is time to earn it back, and left alone when there is not."""
    members = [Member(1.0, 0)] * 8 + [Member(1.0, 1)] * 2
    batch = plan_moves([1.0, 1.0], members, reload_s=60, horizon_s=3600)
    assert (batch.rate_before, batch.rate_after, len(batch.moves)) == (2.0, 5.0, 3)
    assert plan_moves([1.0, 1.0], members, reload_s=60, horizon_s=30).moves == ()


def test_an_empty_stage_is_filled() -> None:
    """A stage without volunteers gets one, whatever else."""
    batch = plan_moves([1.0, 1.0, 1.0], [Member(1.0, 0)] * 3, 10, 100)
    assert batch.rate_before == 0 and batch.rate_after == 1.0 and len(batch.moves) == 2


def test_nobody_nothing() -> None:
    """No volunteers and one stage give no moves."""
    assert plan_moves([1.0, 1.0], [], 10, 100).moves == ()
    assert plan_moves([1.0], [Member(1.0, 0)], 10, 100).moves == ()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_a_swarm_that_stays_does_not_flap(seed: int) -> None:
    """Each batch raises the slowest stage; applying batches again and again ends, without anybody returning."""
    rng = random.Random(seed)
    work = [rng.uniform(0.5, 2) for _ in range(rng.randint(2, 6))]
    members = [Member(rng.choice([1.0, 2.0, 5.0]), rng.randrange(len(work))) for _ in range(rng.randint(0, 40))]
    for _ in range(50):
        batch = plan_moves(work, members, 30, 600)
        if not batch.moves:
            break
        for move in batch.moves:
            assert members[move.member].stage == move.source
            members[move.member] = Member(members[move.member].power, move.target)
        rate = min(sum(m.power for m in members if m.stage == k) / need for k, need in enumerate(work))
        assert abs(rate - batch.rate_after) < 1e-9 and rate > batch.rate_before
    else:
        raise AssertionError("the swarm never came to rest")
