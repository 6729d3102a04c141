"""Audits in the world of whole numbers: who computes falsely is found and banned everywhere, and nobody else is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from coordinator.live.bans import Bans
from coordinator.live.core import CoordinatorMachine
from node.core import NodeMachine
from node.machine.records import ContributionStored
from node.server.audits import Audits
from node.server.back import BackRole
from node.server.ledger import LedgerRole
from node.server.shard import ShardRole
from protocol.base.ids import ContributionId
from protocol.base.machine import Effect, Log, Send
from protocol.messages import Audit
from tests.simulation.mutant_registry import Patch, _replaces
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Host, Watcher, World

SHAPE = Shape(stages=2, volunteers=4, microbatches=6, steps=14, contribution_tasks=2, checkpoint_every=0, audit_first=6)
END_S = 120.0
FALSE = {"false_gradient": (0, 3), "false_output": (4, 5), "false_input_gradient": (0, 2)}
"""Lies, and seeds in which the liar comes to a stage where there is something to lie about."""


class Ledgers(Watcher):
    """What ledgers said of audits."""

    def __init__(self) -> None:
        self.rulings: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.voided: list[str] = []
        self.parts: defaultdict[str, set[ContributionId]] = defaultdict(set)

    def stepped(self, world: World, host: Host, effects: list[Effect]) -> None:
        host.machine.check()  # type: ignore[union-attr]
        for effect in effects:
            if isinstance(effect, Log) and effect.event == "audit":
                self.rulings.append(effect.fields)
            if isinstance(effect, Log) and effect.event == "message refused":
                self.refused.append(f"{host.node}: {effect.fields}")
            if isinstance(effect, Log) and effect.event == "contribution refused":
                self.voided.append(str(effect.fields))
            if isinstance(effect, Send) and isinstance(effect.message, Audit):
                shards = [node for node, parts in self.parts.items() if effect.message.contribution in parts]
                assert len(shards) == SHAPE.shards, f"drawn when {shards} had it"

    def durable(self, world: World, host: Host, record: Any, tensors: dict[int, Any]) -> None:
        if isinstance(record, ContributionStored):
            self.parts[host.node].add(record.contribution)


def play(seed: int, *lies: str, shape: Shape = SHAPE) -> tuple[Swarm, Ledgers, Host]:
    """A run with one liar among honest volunteers, or a whole volunteer in its place. Ends early when it is banned."""
    ledgers = Ledgers()
    swarm = Swarm(seed, shape, ledgers, Scene(lies=lies))
    suspect = swarm.add_liar() if lies else swarm.add_volunteer()
    swarm.world.run(END_S, stop=lambda: swarm.finished)
    return swarm, ledgers, suspect


def banned(swarm: Swarm) -> set[str]:
    """By the coordinator, and by every server that is up."""
    coordinator = swarm.coordinator.machine
    assert isinstance(coordinator, CoordinatorMachine)
    everywhere: set[str] = set(coordinator.admission.banned_since(0.0))
    for host in swarm.servers:
        if isinstance(host.machine, NodeMachine):
            assert set(host.machine._bans.banned) == everywhere, f"{host.node} knows other bans"
    return everywhere


def outcomes(ledgers: Ledgers) -> dict[str, int]:
    found: dict[str, int] = {}
    for ruling in ledgers.rulings:
        found[ruling["outcome"]] = found.get(ruling["outcome"], 0) + 1
    return found


def judge(seed: int, lie: str) -> None:
    """The one liar is banned everywhere, no honest member is, and the run ends."""
    swarm, ledgers, liar = play(seed, lie)
    assert swarm.finished, "the run did not end"
    assert banned(swarm) == {liar.node}, f"{banned(swarm)} banned, {liar.node} lies; {outcomes(ledgers)}"
    assert not ledgers.refused, ledgers.refused


@pytest.mark.slow
@pytest.mark.parametrize("lie", FALSE)
def test_who_computes_falsely_is_banned_and_the_run_goes_on(lie: str) -> None:
    """Half of its results are false by one, in the right shape; everybody else's audits pass."""
    for seed in FALSE[lie]:
        judge(seed, lie)


def test_honest_members_pass() -> None:
    """Under an honest run every audit that could be done passes."""
    swarm, ledgers, _ = play(2)
    assert swarm.finished and not banned(swarm)
    found = outcomes(ledgers)
    assert found.keys() <= {"passed", "missed"} and found["passed"] >= 30


@pytest.mark.slow
def test_known_members_are_audited_at_the_rate() -> None:
    """Once a member's first contributions have passed, only some of the others are computed again."""
    known = everything = 0
    for seed in (4, 5, 6):
        swarm, ledgers, _ = play(seed, shape=replace(SHAPE, audit_first=1, audit_rate=0.1))
        assert swarm.finished
        known += outcomes(ledgers)["passed"]
        everything += outcomes(play(seed)[1])["passed"]
    assert 0 < known < 0.6 * everything


def test_a_run_without_audits_has_none() -> None:
    """`rate = 0`: nothing is computed again."""
    _, ledgers, _ = play(1, shape=replace(SHAPE, audit_rate=0.0))
    assert not ledgers.rulings


@pytest.mark.slow
def test_what_was_found_in_time_is_never_summed_up() -> None:
    """A false contribution whose audit ends before its step must go on is refused; others do its tasks. That it ends so
    soon is luck, which a run in four has."""
    shape = replace(SHAPE, microbatches=24, contribution_tasks=1, steps=4)

    def refuses(seed: int) -> bool:
        _, ledgers, liar = play(seed, "false_gradient", shape=shape)
        return any(liar.node in line and "two audits" in line for line in ledgers.voided)

    assert any(refuses(seed) for seed in range(20))


def _early(original: Any) -> Any:
    def on_stored(self: Any, message: Any) -> None:
        if not self.desk.is_held(message.step, message.contribution):
            self.desk.hold(message, 0.0)
        original(self, message)

    return on_stored


def _swapped(original: Any) -> Any:
    """Another member's name stands beside what somebody brought."""

    def kept_of(self: Any, task: Any) -> Any:
        kept = original(self, task)
        return {kind: (ref, by and ("v5" if by != "v5" else "v6")) for kind, (ref, by) in kept.items()}

    return kept_of


def _never(*_: Any, **__: Any) -> None:
    return None


MUTANTS: dict[str, Patch] = {
    "it is drawn before all of it has come": _replaces(LedgerRole, "on_stored", _early),
    "a mismatch is ignored": _replaces(
        Audits, "_second", lambda _: lambda self, unit, found, *rest: self._passed(unit, found)
    ),
    "somebody honest is blamed": _replaces(BackRole, "kept_of", _swapped),
    "a ban is not passed on": _replaces(Bans, "tell", lambda _: _never),
    "the sum is compared only after it was folded": _replaces(ShardRole, "part_of", lambda _: _never),
}


def hunt() -> None:
    for lie, seeds in FALSE.items():
        for seed in seeds:
            judge(seed, lie)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_gone_is_missed(name: str) -> None:
    """Each of these changes lets a liar stay, or harms somebody honest."""
    with MUTANTS[name](), pytest.raises(AssertionError):
        hunt()
