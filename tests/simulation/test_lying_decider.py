"""Whoever decides how steps end is held to what the stages came to: no other decision is taken, and it is said why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from node.core import NodeMachine
from node.machine.numbers import clip_factor, learning_rate
from node.server.decider import DeciderRole
from node.server.judging import Judge
from node.server.ledger import LedgerRole
from protocol.messages import Commit, Decision
from protocol.run.changes import RunChange, changed
from tests.simulation.mutant_registry import _replaces
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.test_void import machine_of
from tests.simulation.world import Host, Watcher

SHAPE = Shape(stages=2, volunteers=2, microbatches=4, steps=6, checkpoint_every=0, audit_rate=0.0)
END_S, SEED, HONEST_STEPS = 60.0, 3, 2
Lie = Callable[[Any], Any]


def _claims(stage: int) -> Lie:
    """All the rest follows from a norm that the stage never had."""

    def lie(message: Any) -> Any:
        stages = list(message.stages)
        stages[stage] = msgspec.structs.replace(stages[stage], square_norm=stages[stage].square_norm * 1e6 + 1e6)
        factor = clip_factor([each.square_norm for each in stages], 1.0)
        return msgspec.structs.replace(message, stages=tuple(stages), clip_factor=factor)

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "clips harder": (lambda m: msgspec.structs.replace(m, clip_factor=m.clip_factor / 2), "a clip factor of"),
    "speeds up": (lambda m: msgspec.structs.replace(m, learning_rate=m.learning_rate * 2), "a learning rate of"),
    "skips": (lambda m: msgspec.structs.replace(m, skipped=True), "a step that counts is skipped"),
    "tells nothing": (lambda m: msgspec.structs.replace(m, stages=()), "what 0 of 2 stages came to"),
    "claims a norm of stage 1": (_claims(1), "it says that stage 1 came to"),
    "claims a norm of stage 0": (_claims(0), "it says that stage 0 came to"),
}


def run(lie: Lie, of: type, name: str) -> Swarm:
    """Some steps are as they should be, then what `of.name` makes is what the lie makes of it."""

    def lying(original: Any) -> Any:
        def say(self: Any, *words: Any) -> Any:
            message = original(self, *words)
            return lie(message) if message.step >= HONEST_STEPS else message

        return say

    with _replaces(of, name, lying)():
        swarm = Swarm(SEED, SHAPE, Watcher(), Scene())
        swarm.world.run(END_S, stop=lambda: swarm.finished)
    return swarm


def alerts(hosts: list[Host]) -> list[str]:
    """What their operators are told."""
    machines = [host.machine for host in hosts if isinstance(host.machine, NodeMachine)]
    found = [machine.server.alert() for machine in machines if machine.server is not None]
    return [each for each in found if each]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIES)
def test_a_decision_that_does_not_follow_is_refused_by_every_stage(name: str) -> None:
    """Not one step ends by it, and the other stage's ledger tells its operator what is wrong."""
    lie, why = LIES[name]
    swarm = run(lie, DeciderRole, "_decision_message")
    assert machine_of(swarm).history.newest_step == HONEST_STEPS - 1
    said = alerts(swarm.servers)
    # With a delayed update the next step is decided, too; what is told is the newest refusal.
    assert said and all(re.match(r"stage 0's decision on step [34] is refused", each) and why in each for each in said)


@pytest.mark.slow
def test_a_seal_that_does_not_follow_is_refused_by_the_other_shards() -> None:
    """A stage's ledger may pass on nothing but what was decided, nor say another norm of a shard than it came to."""
    for name in ("clips harder", "skips"):
        lie, why = LIES[name]
        swarm = run(lie, LedgerRole, "_commit_message")
        assert machine_of(swarm).history.newest_step == HONEST_STEPS - 1
        assert any(re.match("the ledger's seal of step [34]", each) and why in each for each in alerts(swarm.servers))

    def other_norms(message: Any) -> Any:
        return msgspec.structs.replace(message, norms=tuple(norm + 1 for norm in message.norms))

    swarm = run(other_norms, LedgerRole, "_commit_message")
    assert any("it says that shard" in each for each in alerts(swarm.servers))


def test_a_change_that_nobody_ordered_is_told_by_every_server() -> None:
    """The coordinator may have told the decider first, so the run goes on."""
    made_up = RunChange("optimizer.learning_rate", "0.02")

    def counts(message: Any) -> Any:
        rate = learning_rate(changed(SHAPE.config(SEED), (made_up,)), message.step)
        return msgspec.structs.replace(message, changes=(made_up,), learning_rate=rate)

    swarm = run(counts, DeciderRole, "_decision_message")
    assert swarm.finished
    said = alerts(swarm.servers)
    assert len(said) == len(swarm.servers)
    assert all("counts a change that was not told here: optimizer.learning_rate" in each for each in said), said


def test_the_lies_would_pass_if_nobody_judged() -> None:
    """Else the tests above would show nothing: the run ends, with each step clipped twice as hard."""
    with _replaces(Judge, "check", lambda original: lambda self, message, stages, norms: None)():
        swarm = run(LIES["clips harder"][0], DeciderRole, "_decision_message")
    assert swarm.finished and alerts(swarm.servers) == []


def test_an_honest_run_is_judged_and_ends() -> None:
    """Every decision and every seal of it was looked at."""
    seen: list[type] = []

    def counting(original: Any) -> Any:
        def check(self: Any, message: Decision | Commit, *words: Any) -> None:
            seen.append(type(message))
            original(self, message, *words)

        return check

    with _replaces(Judge, "check", counting)():
        swarm = run(lambda message: message, DeciderRole, "_decision_message")
    assert swarm.finished and seen.count(Decision) >= 2 * SHAPE.steps and seen.count(Commit) >= 4 * SHAPE.steps
