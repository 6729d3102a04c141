"""A ledger cannot have one shard of its stage count what another leaves out: no step ends so, and it is said why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from node.server.agreement import Agreement
from node.server.ledger import LedgerRole
from protocol.messages import Verdict
from tests.simulation.mutant_registry import _replaces
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.test_lying_decider import alerts
from tests.simulation.test_void import machine_of
from tests.simulation.world import Watcher

SHAPE = Shape(stages=2, volunteers=2, microbatches=4, steps=6, checkpoint_every=0, audit_rate=0.0)
END_S, SEED, HONEST_STEPS = 60.0, 3, 2


def _does_not_tell(original: Any) -> Callable[..., None]:
    """The last contribution of a step counts, and only the ledger's own shard hears of it."""

    def tell(self: LedgerRole, verdict: Verdict) -> None:
        step = self._steps[verdict.step]
        if verdict.step < HONEST_STEPS or not verdict.accepted or not step.frozen:
            original(self, verdict)
        elif verdict.number == len(step.accepted) - 1:
            for node in dict.fromkeys((verdict.contribution.node, self._context.node)):
                self._out.send(node, verdict)

    return tell


def _lies_to_fellows(message_of: str) -> Callable[[Any], Callable[..., None]]:
    """Fellow shards are to count all but the last contribution, and the norms are as they come out."""

    def lying(original: Any) -> Callable[..., None]:
        def tell(self: LedgerRole, *words: Any) -> None:
            number, step = words if len(words) == 2 else (words[0].step, self._steps[words[0].step])
            if number < HONEST_STEPS:
                original(self, *words)
                return
            step.sealed = step.sealed or message_of == "_commit_message"
            truth = getattr(self, message_of)(number, step)
            less = msgspec.structs.replace(truth, contributions=truth.contributions[:-1])
            for node in self._context.stage_servers:
                self._out.send(node, truth if node == self._context.node else less)

        return tell

    return lying


def run() -> Swarm:
    """Some steps are as they should be; then the ledgers lie."""
    with ExitStack() as lies:
        lies.enter_context(_replaces(LedgerRole, "_tell", _does_not_tell)())
        lies.enter_context(_replaces(LedgerRole, "_freeze", _lies_to_fellows("_freeze_message"))())
        lies.enter_context(_replaces(LedgerRole, "sealed", _lies_to_fellows("_commit_message"))())
        swarm = Swarm(SEED, SHAPE, Watcher(), Scene())
        swarm.world.run(END_S, stop=lambda: swarm.finished)
    return swarm


def test_a_step_that_shards_were_told_to_count_differently_is_applied_by_none() -> None:
    """Every server of such a stage tells its operator, with the names of those one of whom lies."""
    swarm = run()
    assert machine_of(swarm).history.newest_step == HONEST_STEPS - 1
    said = alerts(swarm.servers)
    assert len(said) == len(swarm.servers)
    assert all("was told to count other contributions than this server; the stage's ledger, " in each for each in said)


def test_the_lie_would_pass_if_shards_did_not_ask_each_other() -> None:
    """Else the test above would show nothing: the run ends, and its update was put together from two lists."""
    with _replaces(Agreement, "reached", lambda original: lambda self, step: True)():
        swarm = run()
    assert swarm.finished and alerts(swarm.servers) == []
