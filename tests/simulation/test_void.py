"""What a liar gave is void: the run comes to the weights of one that never had it, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.live.bans import Bans
from coordinator.live.core import CoordinatorMachine
from coordinator.live.records import PlanRow
from coordinator.live.seating import Placement
from coordinator.process.ordering import voiding_of
from protocol.base.errors import BadInputError
from protocol.base.machine import Ordered
from tests.simulation.mutant_registry import _replaces
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Host, Watcher

SHAPE = Shape(stages=2, volunteers=3, microbatches=6, steps=24, checkpoint_every=4, audit_rate=0.0)
END_S = 400.0
LIES = ("false_gradient", "false_output", "false_input_gradient")


def machine_of(swarm: Swarm) -> CoordinatorMachine:
    machine = swarm.coordinator.machine
    assert isinstance(machine, CoordinatorMachine)
    return machine


def run_until(swarm: Swarm, what: Callable[[], bool]) -> None:
    swarm.world.run(END_S, stop=what)
    assert what(), "it never came to that"


def weights(swarm: Swarm, step: int) -> list[tuple[Any, ...]]:
    """(stage, shard, name with the digest of its state) of each part of a checkpoint."""
    return sorted(tuple(part[:3]) for part in swarm.world.shared[f"manifest-{step}"])


def honest(seed: int) -> Swarm:
    swarm = Swarm(seed, SHAPE, Watcher(), Scene())
    run_until(swarm, lambda: swarm.finished)
    return swarm


def poisoned(seed: int, since: int) -> tuple[Swarm, Host]:
    """A run that a liar has joined after step `since`, and has spoilt five steps of at least."""
    swarm = Swarm(seed, SHAPE, Watcher(), Scene(lies=LIES))
    run_until(swarm, lambda: machine_of(swarm).history.newest_step >= since)
    liar = swarm.add_liar()
    run_until(swarm, lambda: machine_of(swarm).giving.of(liar.node) is not None)
    newest = machine_of(swarm).history.newest_step
    run_until(swarm, lambda: machine_of(swarm).history.newest_step >= newest + 5)
    return swarm, liar


def void(swarm: Swarm, liar: Host, from_start: bool = False) -> tuple[int, int]:
    """Orders it; returns the liar's first step, and the one that the run goes back to."""
    order = voiding_of(machine_of(swarm), (liar.node,), "lies", from_start, 1.0)
    swarm.world.feed(swarm.coordinator, Ordered(order))
    assert order.voiding is not None
    return order.voiding.first_step, order.step


def judge(seed: int, since: int = 9) -> None:
    """The liar comes, spoils, is voided, and nothing of it is left at the end."""
    swarm, liar = poisoned(seed, since)
    first, step = void(swarm, liar)
    given = machine_of(swarm).giving.of(liar.node)
    assert given is not None and since < first <= given.first_step and 0 < step <= first
    run_until(swarm, lambda: machine_of(swarm).history.rollback_count == 1)
    assert machine_of(swarm).admission.ban_reason(liar.node) == "lies"
    (row,) = [r for r, _ in swarm.coordinator.records if isinstance(r, PlanRow) and r.goes_back]
    assert row.voided is not None and row.voided.nodes == (liar.node,) and row.plan.restore_step == step
    run_until(swarm, lambda: swarm.finished)
    clean = honest(seed)
    for each in range(SHAPE.checkpoint_every, SHAPE.steps + 1, SHAPE.checkpoint_every):
        assert weights(swarm, each) == weights(clean, each), f"checkpoint {each}"


@pytest.mark.slow
def test_the_run_comes_to_the_weights_of_one_that_never_had_the_liar() -> None:
    """Also every checkpoint on the way, those that the poisoned run had left behind included; and it was poisoned."""
    seed = 3
    swarm, _ = poisoned(seed, 9)
    run_until(swarm, lambda: swarm.finished)
    assert weights(swarm, SHAPE.steps) != weights(honest(seed), SHAPE.steps)
    judge(seed)


@pytest.mark.slow
def test_where_no_checkpoint_is_old_enough_nothing_happens_and_the_run_can_begin_anew() -> None:
    """A sentence says what can be done instead; a server's work is not voided, nor that of somebody unknown."""
    seed = 5
    swarm, liar = poisoned(seed, -1)
    run_until(swarm, lambda: min(machine_of(swarm).placement.readable_steps(), default=0) > 0)
    newest = machine_of(swarm).history.newest_step
    with pytest.raises(BadInputError, match=r"no checkpoint is kept from before step \d+.*--from-start.*Nothing was"):
        void(swarm, liar)
    with pytest.raises(BadInputError, match="is a server"):
        void(swarm, swarm.servers[0])
    assert machine_of(swarm).history.newest_step == newest and machine_of(swarm).admission.ban_reason(liar.node) is None
    _, step = void(swarm, liar, from_start=True)
    assert step == -1
    run_until(swarm, lambda: swarm.finished)
    assert weights(swarm, SHAPE.steps) == weights(honest(seed), SHAPE.steps)


def test_whoever_was_there_when_the_run_went_back_came_at_that_step() -> None:
    """Its work before is thrown away, and what it does from there on is new."""
    swarm, liar = poisoned(3, 9)
    admission, first = machine_of(swarm).admission, void(swarm, liar)
    others = [host.node for host in swarm.volunteers if host is not liar]
    run_until(swarm, lambda: machine_of(swarm).history.rollback_count == 1)
    assert admission.since(liar.node) == first[1]
    assert all(admission.since(node) <= first[1] for node in others)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["later checkpoints are none", "it is banned first"])
def test_a_rule_that_is_gone_is_missed(rule: str) -> None:
    """Without either of these something of the liar is left."""
    patches = {
        "later checkpoints are none": _replaces(Placement, "_issue", _keeps_later),
        "it is banned first": _replaces(Bans, "void", lambda original: lambda self, voiding, now: None),
    }
    with patches[rule](), pytest.raises(AssertionError):
        judge(3)


def _keeps_later(original: Any) -> Any:
    def issue(self: Any, *words: Any, **facts: Any) -> None:
        if "back" in facts:
            facts["back"] = replace(facts["back"], undone=False)
        original(self, *words, **facts)

    return issue
