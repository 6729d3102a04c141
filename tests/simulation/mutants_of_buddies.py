"""Mutants of `protocol.run.buddies`: copies that other servers hold, and a run that goes on from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.live import slots
from coordinator.live.slots import SlotTable
from node.machine.jobs import StartShard
from node.server import recovery
from node.server.buddy import BuddyRole, Copies
from node.server.saves import Saves
from node.server.server import ServerMachine
from protocol.run.plan import Plan
from tests.simulation.lanes import Lanes, copy_digest
from tests.simulation.mutant_registry import LINE, mutant
from tests.simulation.scene import Scene

COPIED: dict[str, Any] = {**LINE, "buddy": "always", "checkpoint_every": 0, "steps": 16, "spares": 2}
DISKS = Scene(only=("server_disk_loss",), gap_s=(1.0, 3.0), disk_losses_max=4, run=COPIED)
"""Disks are lost, one at a time, and there is no checkpoint to go back to."""
KILLS = Scene(
    only=("server_disk_loss", "server_kill"), gap_s=(0.8, 1.6), until_s=(10.0, 20.0), disk_losses_max=1,
    run={**COPIED, "steps": 24, "snapshot_steps": 8},
)  # fmt: skip
LOSSES = replace(KILLS, disk_losses_max=3)
SKEWED = Scene(
    only=("copy_ahead", "link_slow", "link_slow"), gap_s=(0.1, 0.3), until_s=(25.0, 35.0), disk_losses_max=20,
    run={**COPIED, "fronts": 2, "backs": 1, "delay": 1, "steps": 30},
)  # fmt: skip
"""One server has heard of an update, made it and copied it, and dies before another has heard of it."""
UNFETCHED = Scene(only=("copy_unfetched",), gap_s=(1.0, 3.0), until_s=(20.0, 30.0), run={**COPIED, "steps": 24})
"""Who holds the copy of a shard is gone before the newcomer has it, and the shard lies on the disk of who waits."""
BENT = Scene(only=("copy_bent",), gap_s=(1.0, 3.0), until_s=(10.0, 20.0), run=COPIED)


@mutant(BuddyRole, "holds", scene=DISKS)
def a_step_is_over_before_its_buddies_have_it(original: Any) -> Any:
    return lambda self, version: True


@mutant(slots, "copied_version", scene=DISKS)
def nobody_goes_on_from_a_copy(original: Any) -> Any:
    return lambda table, linked, plan, lost: -1


@mutant(slots, "copied_version", scene=SKEWED)
def a_version_counts_that_not_all_have(original: Any) -> Any:
    """The newest copy, whatever the others have."""

    def copied_version(table: Any, linked: Any, plan: Any, lost: Any) -> int:
        found = [v for slot in lost for v in slots.copies_of(table, linked, slot, plan.ledger_generation)]
        return max(found, default=-1)

    return copied_version


@mutant(BuddyRole, "buddy_ready", scene=KILLS)
def nothing_is_sent_to_a_buddy_that_starts_anew(original: Any) -> Any:
    """It was sent to once, and that counts."""

    def buddy_ready(self: Any) -> None:
        if not self._kept:
            original(self)

    return buddy_ready


@mutant(Lanes, "_take_version", scene=BENT)
def a_copy_is_believed_whatever_its_digest(original: Any) -> Any:
    def take_version(self: Any, job: StartShard) -> bytes:
        if job.copy:
            state = tuple(self.inputs[ref.key] for ref in job.copy)
            job = StartShard(
                job.checkpoint_step, job.undone, job.continues, job.copy, copy_digest(state, job.checkpoint_step)
            )
        digest: bytes = original(self, job)
        return digest

    return take_version


@mutant(BuddyRole, "useless", scene=BENT)
def a_spoilt_copy_is_not_forgotten(original: Any) -> Any:
    """The server that found it out says nothing to its buddy: the run goes on from it again and again."""

    def useless(self: Any, reason: str) -> None:
        self._fetching = None
        original(self, reason)

    return useless


@mutant(Lanes, "_whole", scene=DISKS)
def a_server_goes_on_with_its_newest_version(original: Any) -> Any:
    """And not with the one that all have."""

    def whole(self: Any, shard: Any, version: int) -> Any:
        newest = max(shard, default=version)
        return original(self, shard, newest if shard is self.before or not self.shard else version)

    return whole


@mutant(Saves, "begun_at", scene=LOSSES)
def what_ledgers_begin_with_in_memory_is_not_written_down(original: Any) -> Any:
    return lambda self, version: self.checkpoint_if_due(version)


@mutant(Copies, "close_step", scene=DISKS)
def copies_are_kept_for_good(original: Any) -> Any:
    return lambda self, step: None


@mutant(slots, "_holds_beginning", scene=UNFETCHED)
def what_ledgers_began_with_counts_on_no_disk(original: Any) -> Any:
    return lambda join, slot, plan, alike: False


@mutant(SlotTable, "begin", scene=UNFETCHED)
def ledgers_that_began_with_the_same_are_strangers(original: Any) -> Any:
    return lambda self, before, plan: None


@mutant(recovery, "beginning", scene=UNFETCHED)
def what_ledgers_begin_with_is_read_from_no_disk(original: Any) -> Any:
    return lambda records, place, continues, version: None


@mutant(Plan, "goes_on_from", scene=UNFETCHED)
def only_the_ledgers_that_are_continued_are_gone_on_from(original: Any) -> Any:
    """A server that has begun others with the same version lets it go."""
    return lambda self, other: self.continues >= 0 and other.ledger_generation == self.continues


@mutant(ServerMachine, "restores_what_begins", scene=UNFETCHED)
def later_ledgers_do_not_wait_for_the_disk_that_is_being_read(original: Any) -> Any:
    """They begin within the moment after a restart, and find nothing in memory."""
    return lambda self, plan: False
