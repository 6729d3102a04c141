"""Judges of the simulated world: the invariants of state-and-trust 4.6, from the disks and the messages alone.

The checkers read what became durable and what was sent, never a machine's memory; each machine's own `check()` runs
besides. Safety is judged at every step, liveness (L1) at the end by `finish`.
"""

from __future__ import annotations

from typing import Any

from node.core import NodeMachine
from node.records import (
    ContributionAccepted,
    ContributionStored,
    ShardStarted,
    StepCommitted,
    StepDecided,
    StepSealed,
)
from protocol.ids import ContributionId, NodeId, TaskId
from protocol.machine import Effect, Send
from protocol.messages import Parameters, StepOpened
from protocol.plan import Plan
from protocol.run import RunConfig
from tests.simulation.arithmetic import reference
from tests.simulation.world import Host, Watcher, World


class ViolationError(AssertionError):
    """An invariant is broken; the text names it."""


class Checker(Watcher):
    """All safety invariants of one run.

    Args:
        shard_counts: servers of each stage.
    """

    def __init__(self, config: RunConfig, shard_counts: list[int]) -> None:
        self._config = config
        self._shard_counts = shard_counts
        self.reference = reference(config, shard_counts)
        self._place: dict[NodeId, ShardStarted] = {}
        self._committed: dict[tuple[int, int, int], int] = {}
        """(generation, stage, shard) -> newest version."""
        self._accepted: dict[tuple[int, int, int], dict[ContributionId, tuple[TaskId, ...]]] = {}
        """(generation, stage, step) -> acceptances in order."""
        self._seals: dict[tuple[int, int, int], StepSealed] = {}
        self._credit: dict[tuple[int, TaskId, int], ContributionId] = {}
        self._stored: set[tuple[int, int, int, ContributionId]] = set()
        """(generation, stage, shard, contribution) that was durable once, if the disk was not lost since."""
        self.sealed_count = 0
        self.accepted_count = 0

    # ---- what became durable -------------------------------------------------------------------------------------

    def durable(self, world: World, host: Host, record: Any) -> None:
        match record:
            case ShardStarted():
                self._place[host.node] = record
                self._committed[record.ledger_generation, record.stage, record.shard] = max(0, record.checkpoint_step)
            case ContributionStored():
                self._expect(
                    all(t.step == record.step for t in record.tasks), "T-I3", f"tasks of another step in {record}"
                )
                version = self._config.version_of(record.step)
                self._expect(record.version == version, "T-I4", f"step {record.step} on version {record.version}")
                place = self._place[host.node]
                self._stored.add((record.ledger_generation, place.stage, place.shard, record.contribution))
            case ContributionAccepted():
                self._on_accepted(host, record)
            case StepSealed():
                self._on_sealed(host, record)
            case StepCommitted():
                self._on_committed(host, record)
            case StepDecided():
                self._expect(
                    record.data_cursor == self._config.sample_range(record.step), "T-I10", f"cursor of {record}"
                )
                loss = self.reference.losses[record.step]
                self._expect(record.loss == loss, "T-I1", f"step {record.step}: loss {record.loss}, not {loss}")
                skipped = self.reference.skipped[record.step]
                self._expect(record.skipped == skipped, "T-I6", f"step {record.step}: skipped is {record.skipped}")

    def _on_accepted(self, host: Host, record: ContributionAccepted) -> None:
        stage = self._place[host.node].stage
        key = (record.ledger_generation, stage, record.step)
        accepted = self._accepted.setdefault(key, {})
        self._expect(record.contribution not in accepted, "T-I11", f"{record.contribution} accepted twice")
        accepted[record.contribution] = record.tasks
        self.accepted_count += 1
        for task in record.tasks:
            credit = (record.ledger_generation, task, stage)
            self._expect(credit not in self._credit, "T-I1", f"{task} counts twice in stage {stage}")
            self._credit[credit] = record.contribution

    def _on_sealed(self, host: Host, record: StepSealed) -> None:
        stage = self._place[host.node].stage
        key = (record.ledger_generation, stage, record.step)
        earlier = self._seals.setdefault(key, record)
        self._expect(earlier == record, "T-I9", f"two seals of step {record.step} differ")
        accepted = self._accepted.get(key, {})
        self._expect(tuple(accepted) == record.contributions, "T-I1", f"the seal of {key} lists other contributions")
        tasks = sorted(task for tasks in accepted.values() for task in tasks)
        self._expect(tasks == self._stage_tasks(stage, record.step), "T-I1", f"step {record.step}: tasks {tasks}")
        self.sealed_count += 1
        for shard in range(self._shard_counts[stage]):
            for contribution in record.contributions:
                durable = (record.ledger_generation, stage, shard, contribution) in self._stored
                self._expect(durable, "T-I2", f"{contribution} is sealed but not on shard {stage}/{shard}")

    def _on_committed(self, host: Host, record: StepCommitted) -> None:
        place = self._place[host.node]
        key = (record.ledger_generation, place.stage, place.shard)
        self._expect(
            self._committed.get(key) == record.step, "T-I5", f"{key} commits step {record.step} at another version"
        )
        self._committed[key] = record.step + 1
        right = self.reference.digests[record.step + 1][place.stage][place.shard]
        self._expect(record.digest == right, "T-I6", f"version {record.step + 1} of {key} is not the reference's")

    # ---- what is said --------------------------------------------------------------------------------------------

    def stepped(self, world: World, host: Host, effects: list[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            message = effect.message
            if isinstance(message, Parameters) and message.tensors:
                place = self._place[host.node]
                newest = self._committed[message.ledger_generation, place.stage, place.shard]
                self._expect(message.version <= newest, "T-I7", f"version {message.version} served at {newest}")
            elif isinstance(message, StepOpened):
                self._on_opened(host, message)

    def _on_opened(self, host: Host, message: StepOpened) -> None:
        needed = message.step - self._config.batch.delay
        # A shard that has not begun yet in this generation begins from the plan's checkpoint.
        assert isinstance(host.machine, NodeMachine) and host.machine.plan is not None
        began = max(0, host.machine.plan.restore_step)
        for stage, count in enumerate(self._shard_counts):
            for shard in range(count):
                newest = self._committed.get((message.ledger_generation, stage, shard), began)
                self._expect(newest >= needed, "T-I8", f"step {message.step} open, but {stage}/{shard} is at {newest}")

    # ---- the end -------------------------------------------------------------------------------------------------

    def finish(self, plan: Plan | None) -> None:
        """Every shard of the last plan has made every version."""
        self._expect(plan is not None, "L1", "there never was a plan")
        assert plan is not None
        for stage, count in enumerate(self._shard_counts):
            for shard in range(count):
                newest = self._committed.get((plan.ledger_generation, stage, shard), -1)
                self._expect(newest == self._config.steps, "L1", f"shard {stage}/{shard} ends at version {newest}")

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _stage_tasks(self, stage: int, step: int) -> list[TaskId]:
        """Written anew here, so that a mistake of the ledger's own list shows."""
        last = len(self._shard_counts) - 1
        tasks = [TaskId(step, microbatch, stage, "B") for microbatch in range(self._config.batch.microbatches)]
        if stage == last:
            tasks += [TaskId(step, mb, last + 1, "L") for mb in range(self._config.batch.microbatches)]
        return sorted(tasks)

    @staticmethod
    def _expect(holds: bool, invariant: str, text: str) -> None:
        if not holds:
            raise ViolationError(f"{invariant}: {text}")
