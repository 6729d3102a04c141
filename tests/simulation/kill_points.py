"""Kills a process at a named point: before or after a kind of message is sent, or a kind of record is durable (T2).

after Persist StepSealed     the record is on the disk, and the process dies before its machine hears of it
before Send Commit           the record is on the disk, and nobody has been told
after Send Commit            what was said still arrives, and the sender remembers nothing but its disk
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

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


def point_of(moment: str, effect: Effect) -> str:
    """The name of the point that a host is at."""
    if isinstance(effect, Persist):
        return f"{moment} Persist {type(effect.record).__name__}"
    return f"{moment} Send {type(effect.message).__name__}"  # type: ignore[union-attr]


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
        if point_of(moment, effect) != self.point:
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
    swarm, checker = _swarm(seed)
    killer = Killer(swarm, point, nth)
    _train(swarm, checker, point)
    return killer.kills


@cache
def times_reached(seed: int) -> dict[str, int]:
    """How often each point is reached, by the host that reaches it most often, while nobody dies: until the first
    death every run of the seed is this one, so nobody dies at a time beyond."""
    swarm, checker = _swarm(seed)
    seen: Counter[tuple[str, str]] = Counter()

    def count(host: Host, moment: str, effect: Effect) -> bool:
        seen[point_of(moment, effect), host.node] += 1
        return False

    swarm.world.kill_at = count
    _train(swarm, checker, "nobody dies")
    most: dict[str, int] = {}
    for (point, _), times in seen.items():
        most[point] = max(times, most.get(point, 0))
    return most


def _swarm(seed: int) -> tuple[Swarm, Checker]:
    checker = Checker(SHAPE.config(seed), [SHAPE.shards] * SHAPE.stages)
    return Swarm(seed, SHAPE, checker), checker


def _train(swarm: Swarm, checker: Checker, what: str) -> None:
    swarm.world.run(RUN_S, stop=lambda: swarm.finished)
    assert swarm.finished, f"L1: {what}: the run did not end within {RUN_S:g} s"
    checker.finish(swarm.world)
