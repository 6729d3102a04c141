"""Mutants of what outlives faults: hosts, places, disks, checkpoints. `mutants.py` hunts them with its own."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.live import spares, status
from coordinator.live.adoption import Adoption, Verdict
from coordinator.live.core import CoordinatorMachine
from coordinator.live.gray import Arbitration, stalled_s
from coordinator.live.look_first import LookFirst
from coordinator.live.seating import Placement
from coordinator.live.slots import SlotTable
from node.core import NodeMachine
from node.machine.jobs import DEVICE_JOBS, WriteCheckpoint
from node.machine.kept_plan import Resumption
from node.machine.readable import ReadableCheckpoints
from node.machine.records import Record, ShardStarted, StepCommitted, StepSealed
from node.machine.revocation import Revocation
from node.machine.roles import Roles
from node.machine.stalls import Stalls
from node.server.decider import DeciderRole
from node.server.ledger import LedgerRole
from node.server.saves import Saves
from node.server.shard import ShardRole
from node.volunteer.gradients import Gradients
from node.volunteer.volunteer import VolunteerMachine
from protocol.base.machine import Exit
from protocol.run.course import PLANNED
from tests.simulation.lanes import Lanes
from tests.simulation.mutant_registry import HANGING, LINE, lying, mutant
from tests.simulation.scene import Scene


@mutant(
    NodeMachine,
    "_computed",
    scene=Scene(
        only=("server_disk_loss", "slow_host"),
        gap_s=(0.2, 0.5),
        disk_losses_max=6,
        run={**LINE, "collocated": "always", "microbatches": 12, "volunteers": 1},
    ),
)
def a_server_drops_what_its_device_made(original: Any) -> Any:
    def computed(self: Any, job: Any, result: Any, now: float) -> None:
        if isinstance(job, DEVICE_JOBS) and self.server is not None:
            self.server.computed(job, result, now)
        original(self, job, result, now)

    return computed


@mutant(NodeMachine, "_failed", "folder_full")
def a_full_checkpoint_folder_ends_the_process(original: Any) -> Any:
    def failed(self: Any, job: Any, reason: str, now: float) -> None:
        self._out.add(Exit(f"failed: {type(job).__name__}: {reason}"))

    return failed


@mutant(
    LookFirst,
    "ask_in_one_place",
    scene=Scene(
        only=("folder_unmounted", "folder_unmounted", "server_lost"),
        gap_s=(0.5, 1.5),
        run={**LINE, "spares": 2, "checkpoint_every": 2, "steps": 24},
    ),
)
def who_does_not_see_the_folder_sends_the_run_to_its_seed(original: Any) -> Any:
    return lambda self, verdict, linked, now, table, folder, most: self.ask(verdict, linked, now, table)


@mutant(Placement, "_look_first", "server_lost")
def nobody_looks_before_the_run_goes_back(original: Any) -> Any:
    return lambda self, verdict, linked, now: verdict


@mutant(
    NodeMachine,
    "_looked",
    scene=Scene(only=("server_lost",), gap_s=(0.5, 1.5), run={**LINE, "spares": 2, "checkpoint_every": 2, "steps": 24}),
)
def a_spare_says_nothing_of_what_it_found(original: Any) -> Any:
    return lambda self, found: original(self, None)


@mutant(
    ReadableCheckpoints,
    "found",
    scene=Scene(
        only=("checkpoint_loss", "checkpoint_loss", "server_lost"),
        gap_s=(0.5, 1.5),
        run={**LINE, "checkpoint_every": 16, "steps": 16, "spares": 4},
    ),
)
def a_checkpoint_that_is_gone_is_still_named(original: Any) -> Any:
    def found(self: Any, steps: Any) -> Any:
        return original(self, None if steps is None else (*steps, *self.steps))

    return found


@mutant(
    Lanes,
    "perform",
    scene=Scene(only=("bytes_differ", "server_kill"), gap_s=(0.2, 0.6), run={"steps": 16, "checkpoint_every": 2}),
)
def a_checkpoint_part_is_written_in_place(original: Any) -> Any:
    """Under one name, whatever its bytes: those that a manifest has the digest of are gone."""

    def perform(self: Any, job: Any, inputs: Any) -> Any:
        result = original(self, job, inputs)
        if isinstance(job, WriteCheckpoint):
            for name in [name for name in self.shared if name.startswith(result[0].rpartition("/")[0] + "/")]:
                if name != result[0]:
                    del self.shared[name]
        return result

    return perform


@mutant(
    Roles,
    "held",
    scene=Scene(only=("snapshot_lost",), gap_s=(1.0, 3.0), disk_losses_max=6, run={"steps": 16, "snapshot_steps": 2}),
)
def a_disk_without_its_snapshot_counts_as_whole(original: Any) -> Any:
    def held(self: Any, readable: Any) -> Any:
        starts = [record for record in self._facts.records if isinstance(record, ShardStarted)]
        commits = [record.step + 1 for record in self._facts.records if isinstance(record, StepCommitted)]
        if self.server is not None or not commits:
            return original(self, readable)
        return starts[-1].stage, starts[-1].shard, commits[-1], starts[-1].ledger_generation

    return held


@mutant(Stalls, "look", scene=HANGING)
def nobody_notices_a_hang(original: Any) -> Any:
    return lambda self, now: None


@mutant(Arbitration, "is_given_up", scene=HANGING)
def a_server_that_hangs_keeps_its_place(original: Any) -> Any:
    return lambda *facts: False


@mutant(Arbitration, "is_given_up", scene=Scene(only=("folder_hangs",), gap_s=(0.5, 1.0), run={"spares": 2}))
def a_server_is_given_up_though_all_hang(original: Any) -> Any:
    def is_given_up(self: Any, member: Any, others: Any, fellows: int, quiet_s: float, gone_s: float, now: Any) -> bool:
        return member is not None and quiet_s >= gone_s and bool(stalled_s(member, now) >= gone_s)

    return is_given_up


@mutant(spares, "is_well", scene=HANGING)
def a_spare_that_hangs_is_called(original: Any) -> Any:
    return lambda member, now: True


@mutant(
    status,
    "_no_step",
    scene=Scene(
        only=("crew_hangs",), gap_s=(1.0, 2.0), until_s=(45.0, 50.0), run={"collocated": "never", "lease_s": 8.0}
    ),
)
def a_run_that_stands_still_counts_as_training(original: Any) -> Any:
    return lambda machine, now: ""


PLANNED_RUN = Scene(
    only=("coordinator_kill",), gap_s=(4.0, 8.0), until_s=(30.0, 40.0),
    run={**LINE, "stages": 3, "cut": PLANNED, "steps": 40, "checkpoint_every": 0},
)  # fmt: skip
"""The coordinator dies seldom enough to have made a plan before."""


@mutant(CoordinatorMachine, "_settled", scene=PLANNED_RUN)
def nobody_hears_how_the_run_is_cut(original: Any) -> Any:
    return lambda self: None


OLD_DATABASE = Scene(
    only=("database_old",), gap_s=(1.0, 2.5), until_s=(12.0, 20.0), run={**LINE, "steps": 12, "checkpoint_every": 2}
)
"""The coordinator forgets what it has told, while all servers are well."""


@mutant(Adoption, "look", scene=OLD_DATABASE)
def an_old_database_is_believed(original: Any) -> Any:
    return lambda self, plan, config, ordered_count=0: Verdict()


@mutant(NodeMachine, "_known_plan", scene=OLD_DATABASE)
def nobody_shows_the_plan_that_it_goes_by(original: Any) -> Any:
    return lambda self: None


# ---- disks that lie --------------------------------------------------------------------------------------------------


@mutant(NodeMachine, "_lose_state", scene=lying("ContributionStored", "ContributionAccepted"))
def ledgers_that_contradict_each_other_go_on(original: Any) -> Any:
    return lambda self, reason: None


@mutant(
    DeciderRole,
    "_known",
    scene=Scene(
        only=("disk_lied", "slow_disk", "power_cut", "power_cut"),
        gap_s=(0.1, 0.2),
        until_s=(30.0, 40.0),
        disk_losses_max=100,
        loses=("StepDone",),
        run={**LINE, "delay": 0, "steps": 48, "spares": 0, "microbatches": 2},
    ),
    first=141,
)
def who_has_lost_the_end_of_a_step_hears_nothing_of_the_next(original: Any) -> Any:
    def known(self: Any, number: int) -> Any:
        return None if self._newest_that_may_open < number <= self._reached else original(self, number)

    return known


@mutant(
    DeciderRole,
    "_unsaid_end",
    scene=Scene(
        only=("disk_lied", "slow_disk"),
        gap_s=(0.2, 0.4),
        until_s=(15.0, 20.0),
        disk_losses_max=30,
        loses=("StepDone",),
        run={**LINE, "stages": 1, "fronts": 1, "backs": 1, "delay": 0, "steps": 40, "spares": 0, "microbatches": 2},
    ),
    first=61,
)
def a_decider_that_has_lost_an_end_opens_what_it_has_decided(original: Any) -> Any:
    """A slow disk makes time between the decision on a step and its end, in which the end before is the newest."""
    return lambda self: ""


@mutant(DeciderRole, "check_closed", scene=lying("StepDone"))
def a_decider_believes_only_its_own_disk(original: Any) -> Any:
    return lambda self, step: None


@mutant(
    ShardRole,
    "_freeze_again",
    scene=Scene(
        only=("disk_lied",), gap_s=(0.3, 0.8), until_s=(8.0, 14.0), disk_losses_max=10, loses=("StepSealed",),
        run={**LINE, "steps": 16, "delay": 0, "fronts": 1, "backs": 1},
    ),
)  # fmt: skip
def who_has_committed_a_step_says_nothing_to_a_ledger_that_lost_its_seal(original: Any) -> Any:
    return lambda self, message: None


@mutant(
    DeciderRole,
    "_decisions",
    scene=Scene(
        only=("disk_lied", "coordinator_away"), gap_s=(0.3, 0.8), until_s=(8.0, 14.0), disk_losses_max=10,
        loses=("StepDecided",), run={**LINE, "steps": 16, "delay": 0, "spares": 0, "checkpoint_every": 1},
    ),
)  # fmt: skip
def a_lost_decision_is_not_looked_for_in_the_seal(original: Any) -> Any:
    def _decisions(self: DeciderRole, records: list[Record]) -> Any:
        return original(self, [record for record in records if not isinstance(record, StepSealed)])

    return _decisions


# ---- rules that once could be taken away without anybody's notice ----------------------------------------------------


@mutant(Placement, "_call_spares", scene=Scene(only=("server_lost",), gap_s=(1.0, 3.0), run={"spares": 2}))
def no_spare_ever_takes_a_place(original: Any) -> Any:
    return lambda self, now: None


@mutant(Saves, "failed", scene=Scene(only=("folder_full",), gap_s=(0.3, 1.0), run={"checkpoint_every": 2}))
def what_could_not_be_written_is_forgotten(original: Any) -> Any:
    return lambda self, job, reason, now: None


@mutant(
    ShardRole,
    "base_loaded",
    scene=Scene(only=("snapshot_bent",), gap_s=(1.0, 3.0), disk_losses_max=6, run={"steps": 16, "snapshot_steps": 2}),
)
def a_disk_is_believed_whatever_it_gives_back(original: Any) -> Any:
    """Neither the snapshot's digest nor those of the steps that are made again are looked at."""

    def base_loaded(self: Any, digest: bytes) -> None:
        self._base_digest, applied = b"", self.applied

        def believed(job: Any, digest: bytes) -> None:
            if self._replay:
                self._replay[0] = msgspec.structs.replace(self._replay[0], digest=digest)
            applied(job, digest)

        self.applied = believed
        original(self, digest)

    return base_loaded


DEVICES = Scene(only=("device_fails",), gap_s=(0.1, 0.4), run={**LINE, "collocated": "never", "contribution_tasks": 4})
"""Devices fail again and again, and nobody else computes."""


@mutant(VolunteerMachine, "failed", scene=DEVICES)
def a_failed_device_is_never_free_again(original: Any) -> Any:
    return lambda self, job, reason, now: None


@mutant(VolunteerMachine, "_lose_sum", scene=DEVICES)
def what_a_failed_device_had_half_added_is_kept(original: Any) -> Any:
    return lambda self, step: ()


@mutant(Gradients, "flush_all", scene=Scene(only=("drained",), gap_s=(0.5, 1.0), run={"linger_s": 10.0}))
def who_leaves_throws_its_sums_away(original: Any) -> Any:
    return lambda self, now: self.drop_steps(None)


@mutant(Placement, "_slot_by_disk", scene=Scene(only=("server_moved",), gap_s=(1.0, 2.0), run={"steps": 30}))
def a_disk_in_another_computer_is_not_recognised(original: Any) -> Any:
    return lambda self, join: None


@mutant(SlotTable, "servers", scene=Scene(only=("address_moves",), gap_s=(0.5, 1.5)))
def nobody_hears_of_a_new_address(original: Any) -> Any:
    def servers(self: Any, linked: Any, plan: Any) -> Any:
        found = original(self, linked, plan)
        if plan is None:
            return found
        known = {server.node: server for stage in plan.stages for server in stage.servers}
        return tuple(tuple(known.get(server.node, server) for server in stage) for stage in found)

    return servers


@mutant(
    Revocation,
    "take",
    scene=Scene(only=("banned",), gap_s=(0.2, 0.6), until_s=(20.0, 30.0), run={**LINE, "steps": 60, "volunteers": 4}),
)
def a_list_of_bans_is_laid_aside(original: Any) -> Any:
    return lambda self, peer, message: ()


@mutant(
    Adoption,
    "is_ahead",
    scene=Scene(only=("database_mislaid",), gap_s=(1.0, 2.0), run={**LINE, "steps": 12, "checkpoint_every": 2}),
)
def ledgers_that_nobody_explains_are_welcome(original: Any) -> Any:
    return lambda self, member, plan: False


@mutant(
    LedgerRole,
    "sync",
    scene=Scene(
        only=("commit_lost",), gap_s=(0.5, 1.5), until_s=(20.0, 30.0), disk_losses_max=10,
        run={**LINE, "fronts": 2, "backs": 1, "delay": 0, "steps": 24, "checkpoint_every": 2},
    ),
)  # fmt: skip
def who_has_committed_a_step_does_not_hear_of_it_again(original: Any) -> Any:
    def sync(self: Any, peer: Any) -> None:
        shard = self._context.plan.shard_of(peer) if peer in self._context.stage_servers else None
        known = [step for step in self._steps.values() if step.sealed and shard in step.committed]
        for step in known:
            step.sealed = False
        original(self, peer)
        for step in known:
            step.sealed = True

    return sync


@mutant(
    LedgerRole,
    "sync",
    scene=Scene(
        only=("late_for_final",), gap_s=(0.1, 0.3), until_s=(20.0, 30.0),
        run={**LINE, "collocated": "never", "validate_every": 2, "steps": 4, "checkpoint_every": 0},
    ),
)  # fmt: skip
def who_comes_late_hears_nothing_of_a_step_that_only_validates(original: Any) -> Any:
    def sync(self: Any, peer: Any) -> None:
        opened, self._context.opened = self._context.opened, min(self._context.opened, self._context.config.steps - 1)
        original(self, peer)
        self._context.opened = opened

    return sync


@mutant(
    spares,
    "seen_by_fellows",
    scene=Scene(
        only=("coordinator_cut",), gap_s=(1.0, 3.0), until_s=(30.0, 40.0), run={**LINE, "spares": 1, "steps": 150}
    ),
)
def the_coordinators_link_alone_decides(original: Any) -> Any:
    """Whom it has lost is given up, though its fellows reach it."""
    return lambda servers, node, now: False


@mutant(
    Resumption,
    "take",
    scene=Scene(
        only=("coordinator_away",),
        gap_s=(1.0, 3.0),
        until_s=(60.0, 70.0),
        run={**LINE, "collocated": "always", "microbatches": 2, "steps": 150},
    ),
)
def nobody_goes_by_the_plan_that_it_kept(original: Any) -> Any:
    """Who restarts waits for the coordinator, however long it is away."""

    def take(self: Any, serves: bool) -> None:
        original(self, serves)

    return take


@mutant(
    Saves, "snapshot_durable", scene=Scene(only=("volunteer_kill",), run={**LINE, "steps": 30, "snapshot_steps": 2})
)
def nothing_is_ever_forgotten(original: Any) -> Any:
    return lambda self, record, version: self._snapshots.append(record.step)
