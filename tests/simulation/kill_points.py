"""Kills a process at a named point: before or after a kind of message is sent, or a kind of record is durable (T2).

after Persist StepSealed     the record is on the disk, and the process dies before its machine hears of it
before Send Commit           the record is on the disk, and nobody has been told
after Send Commit            what was said still arrives, and the sender remembers nothing but its disk
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.base.machine import Effect, Persist
from tests.simulation.checkers import Checker
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Host

SHAPE = Shape(stages=2, volunteers=4, microbatches=4, steps=6, snapshot_steps=2, checkpoint_every=2)
RUN_S = 120.0
BACK_AFTER_S = 0.5
"""The killed process is started again so soon."""
SENDS = (
    # coordinator
    "Welcome", "PlanChanged", "StepReportStored",
    # to the coordinator
    "Join", "DataReady", "StepReport", "NodeReport",
    # volunteer and server
    "Ready", "Lease", "Output", "InputGradient", "FetchInput", "FetchParameters", "Parameters", "VersionReady",
    "Contribute", "Verdict", "Forget", "InputAnswer",
    # server and server
    "ServerReady", "Activation", "Labels", "Gradient", "Held", "Stored", "StepOpened", "StepClosed", "Freeze",
    "FrozenList", "PartialNorm", "StageFrozen", "Decision", "Commit", "Committed", "StageCommitted", "CheckpointPart",
)  # fmt: skip
RECORDS = (
    "PlanRow", "MemberRow", "InviteSpent", "DataRow", "StepRow",
    "ShardStarted", "ContributionStored", "ContributionAccepted", "StepDecided", "StepSealed",
    "StepCommitted", "StepDone", "SnapshotWritten", "CheckpointWritten",
)  # fmt: skip
POINTS = tuple(
    f"{moment} {kind}" for kind in (*(f"Send {s}" for s in SENDS), *(f"Persist {r}" for r in RECORDS))
    for moment in ("before", "after")
)  # fmt: skip


@dataclass
class Killer:
    """Kills at the `nth` time that a point is reached, once for each host that reaches it so often."""

    swarm: Swarm
    point: str
    nth: int
    kills: int = 0

    def __post_init__(self) -> None:
        self._seen: dict[str, int] = {}
        self.swarm.world.kill_at = self.kill_at

    def kill_at(self, host: Host, moment: str, effect: Effect) -> bool:
        if isinstance(effect, Persist):
            name = f"{moment} Persist {type(effect.record).__name__}"
        else:
            name = f"{moment} Send {type(effect.message).__name__}"  # type: ignore[union-attr]
        if name != self.point:
            return False
        self._seen[host.node] = self._seen.get(host.node, 0) + 1
        if self._seen[host.node] != self.nth:
            return False
        self.kills += 1
        world = self.swarm.world
        world.at(BACK_AFTER_S, lambda: world.start(host) if host.machine is None else None)
        return True


def run_with_kills(point: str, nth: int, seed: int) -> int:
    """Trains a whole run in which every host dies once at `point`; returns how many died.

    Raises:
        AssertionError: an invariant broke, or the run did not end.
    """
    config = SHAPE.config(seed)
    checker = Checker(config, [SHAPE.shards] * SHAPE.stages)
    swarm = Swarm(seed, SHAPE, checker)
    killer = Killer(swarm, point, nth)
    swarm.world.run(RUN_S, stop=lambda: swarm.finished)
    assert swarm.finished, f"L1: {point}: the run did not end within {RUN_S:g} s"
    checker.finish(swarm.world)
    return killer.kills
