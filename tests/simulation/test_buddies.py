"""A server is lost with its disk for ever, and another one holds what it had: no closed step is done again."""

from __future__ import annotations

import pytest

from tests.seeds import slow_then_long
from tests.simulation.mutant_registry import LINE
from tests.simulation.mutants_of_buddies import UNFETCHED
from tests.simulation.run_seed import run_seed
from tests.simulation.scene import Scene

COPIED = {"buddy": "always", "spares": 1, "checkpoint_every": 0, "steps": 14}
LOST = Scene(only=("server_lost",), gap_s=(1.0, 3.0), run=COPIED)
"""One server, the decider too, of a run with one spare, and not a single checkpoint."""
EMPTIED = Scene(only=("server_disk_loss",), gap_s=(1.0, 3.0), disk_losses_max=1, run=COPIED)
"""It comes back itself, with an empty disk."""
MOVED = Scene(
    only=("hang", "coordinator_cut", "server_moved"),
    gap_s=(0.2, 0.6),
    until_s=(10.0, 30.0),
    run={
        **LINE, "stages": 1, "fronts": 1, "backs": 1, "spares": 3, "microbatches": 2, "steps": 20,
        "checkpoint_every": 2, "buddy": "always",
    },
)  # fmt: skip
WICKED = Scene(run={"buddy": "always"})


@pytest.mark.slow
@pytest.mark.parametrize("scene", [LOST, EMPTIED], ids=["lost", "emptied"])
@pytest.mark.parametrize("seed", range(4))
def test_a_lost_disk_costs_no_closed_step(seed: int, scene: Scene) -> None:
    """The weights are those of one process, and nothing that was closed is thrown away."""
    assert run_seed(seed, scene=scene).lost_steps == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [pytest.param(10, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("scene", [LOST, EMPTIED], ids=["lost", "emptied"])
def test_many_lost_disks_cost_no_closed_step(scene: Scene, count: int) -> None:
    """Most seeds lose one; some end before it comes to that."""
    outcomes = [run_seed(seed, scene=scene) for seed in range(100, 100 + count)]
    assert sum(sum(outcome.faults.values()) for outcome in outcomes) >= count // 2
    assert [outcome.seed for outcome in outcomes if outcome.lost_steps] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", slow_then_long(range(3001, 3061), 10))
def test_copies_break_nothing_in_any_weather(seed: int) -> None:
    """All kinds of faults, with copies: B1 to B4 beside all other invariants."""
    run_seed(seed, scene=WICKED)


@pytest.mark.slow
def test_reports_that_only_a_lost_decider_had_are_missing_and_nothing_else() -> None:
    """Its disk comes back in another computer after the place was given away: seed 26 once called that a violation."""
    run_seed(26, scene=WICKED)


def test_who_held_the_copy_is_gone_before_anybody_has_it_and_no_step_is_lost() -> None:
    """The disk of the shard is in a computer that waits, and that of its buddy came to another one."""
    assert run_seed(20, scene=MOVED).lost_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_copy_that_its_holder_takes_along_costs_no_closed_step(seed: int) -> None:
    """Its process ends when the newcomer asks; who hung until then has the shard on its disk, and gets its place
    back."""
    outcome = run_seed(seed, scene=UNFETCHED)
    assert outcome.faults["copy_unfetched"] >= 2 and outcome.lost_steps == 0
