"""Mutants: each takes one rule away, and the world must notice (D3 of state-and-trust 3.7).

A mutant is a context manager that patches one method; `MUTANTS` names each with the scene in which its rule matters.
`EQUIVALENT` are changes that the world cannot tell from the rule, with the reason why nobody else could either.
`python -m tests.simulation.hunt [NAME ...]` hunts them.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

import tests.simulation.mutants_of_buddies
import tests.simulation.mutants_of_courses
import tests.simulation.mutants_of_faults
import tests.simulation.mutants_of_segments
import tests.simulation.mutants_of_the_grid
import tests.simulation.mutants_of_waits  # noqa: F401 - they register themselves
from node.core import NodeMachine
from node.machine.jobs import ServeParameters
from node.machine.records import SnapshotWritten
from node.server import intake
from node.server.back import BackRole
from node.server.context import StageContext
from node.server.decider import DeciderRole
from node.server.doubts import Doubts
from node.server.front import FrontRole
from node.server.intake import Intake
from node.server.ledger import LedgerRole
from node.server.pool import Pool
from node.server.roles import Roles
from node.server.saves import Saves
from node.server.server import ServerMachine
from node.server.serving import Serving
from node.server.shard import Phase, ShardRole
from node.server.tickets import TicketOffice
from node.volunteer.gradients import Gradients
from node.volunteer.holdings import Holdings
from node.volunteer.owed import OwedQueue
from node.volunteer.volunteer import VolunteerMachine
from protocol.messages import Commit
from tests.simulation.mutant_registry import (
    CONSPIRACY,
    LINE,
    SHORT_LEASES,
    equivalent,
    liars,
    mutant,
)
from tests.simulation.scene import Scene

# ---- the ledger ----------------------------------------------------------------------------------------------------


@mutant(LedgerRole, "_judge", scene=SHORT_LEASES)
def covered_tasks_are_accepted_again(original: Any) -> Any:
    def judge(self: Any, step: Any, message: Any, refusal: str, doubted: bool = False) -> None:
        if "covered already" not in refusal:
            original(self, step, message, refusal, doubted)
            return
        for task in message.tasks:
            step.uncovered.setdefault(task)
        original(self, step, message, "")

    return judge


@mutant(LedgerRole, "_judge", scene=SHORT_LEASES)
def only_the_new_tasks_of_an_overlap_are_counted(original: Any) -> Any:
    def judge(self: Any, step: Any, message: Any, refusal: str, doubted: bool = False) -> None:
        new = tuple(task for task in message.tasks if task in step.uncovered)
        if "covered already" in refusal and new and not any(task.op == "L" for task in message.tasks):
            message, refusal, doubted = msgspec.structs.replace(message, tasks=new), "", False
        original(self, step, message, refusal, doubted)

    return judge


@mutant(LedgerRole, "_judge_if_complete", "server_kill")
def one_shard_is_enough_to_accept(original: Any) -> Any:
    def judge(self: Any, step: Any, pending: Any) -> None:
        if step.opened:
            self._judge(step, pending.first, self._refusal(step, pending.first))

    return judge


@mutant(LedgerRole, "_judge", "server_kill")
def a_verdict_is_told_before_it_is_durable(original: Any) -> Any:
    def judge(self: Any, step: Any, message: Any, refusal: str, doubted: bool = False) -> None:
        if not refusal:
            self._tell(self._verdict(message.contribution, message.step, message.tasks, 0, ""))
        original(self, step, message, refusal, doubted)

    return judge


@mutant(LedgerRole, "on_stored", "server_kill", "link_cut", "dial_twice")
def the_ledger_forgets_its_verdicts(original: Any) -> Any:
    def on_stored(self: Any, message: Any) -> None:
        if message.step in self._steps:
            self._steps[message.step].verdicts.pop(message.contribution, None)
        original(self, message)

    return on_stored


@mutant(LedgerRole, "start", scene=Scene(only=("server_kill", "power_cut"), gap_s=(0.2, 0.6), run=LINE))
def the_ledger_forgets_on_restart(original: Any) -> Any:
    return lambda self, records: ""


@mutant(LedgerRole, "on_decision", "server_kill")
def a_seal_is_told_before_it_is_durable(original: Any) -> Any:
    def on_decision(self: Any, message: Any) -> None:
        news = message.step in self._steps and self._steps[message.step].decision is None
        original(self, message)
        if news:
            commit = self._commit_message(message.step, self._steps[message.step])
            for node in self._context.stage_servers:
                self._out.send(node, commit)

    return on_decision


@mutant(LedgerRole, "on_decision")
def one_stage_ignores_the_skip_flag(original: Any) -> Any:
    def on_decision(self: Any, message: Any) -> None:
        original(
            self,
            msgspec.structs.replace(message, skipped=False)
            if self._context.stage == len(self._context.plan.stages) - 1
            else message,
        )

    return on_decision


@mutant(LedgerRole, "on_decision")
def one_stage_ignores_the_clip_factor(original: Any) -> Any:
    def on_decision(self: Any, message: Any) -> None:
        original(
            self,
            msgspec.structs.replace(message, clip_factor=1.0)
            if self._context.stage == len(self._context.plan.stages) - 1
            else message,
        )

    return on_decision


@mutant(LedgerRole, "_stage_frozen", "volunteer_kill")
def a_loss_is_forgotten(original: Any) -> Any:
    def stage_frozen(self: Any, number: int, step: Any) -> Any:
        return msgspec.structs.replace(original(self, number, step), loss_sum=step.loss_sum * (number != 2))

    return stage_frozen


@equivalent(
    LedgerRole,
    "_judge",
    "A journal keeps the order in which records were given to it, and a step freezes only when none is under way: the"
    " order of arrival is the order of durability.",
)
def acceptances_count_in_the_order_of_arrival(original: Any) -> Any:
    def judge(self: Any, step: Any, message: Any, refusal: str, doubted: bool = False) -> None:
        before = list(step.accepted)
        original(self, step, message, refusal, doubted)
        step.accepted[:] = before

    return judge


@mutant(Doubts, "look", scene=liars("absurd"))
def absurd_contributions_are_taken_at_their_word(original: Any) -> Any:
    return lambda self, message, square_norm, trusted, servers_judge=False: ""


@mutant(StageContext, "servers_judge", scene=replace(CONSPIRACY, gap_s=(0.5, 2.0)))
def two_members_confirm_each_other(original: Any) -> Any:
    return property(lambda self: False)


# ---- shards --------------------------------------------------------------------------------------------------------


@mutant(ShardRole, "on_contribute", "server_kill")
def a_part_is_acknowledged_before_it_is_durable(original: Any) -> Any:
    def on_contribute(self: Any, peer: Any, message: Any) -> str:
        refusal = original(self, peer, message)
        part = self._parts.get((message.contribution, message.step))
        if part is not None:
            part.measured = True
            self._announce(part)
        return str(refusal)

    return on_contribute


@mutant(Serving, "_serve", "volunteer_kill")
def the_latest_version_is_served_for_any(original: Any) -> Any:
    def serve(self: Any, peer: Any, version: int, base: int) -> None:
        newest = self._served.get(max(self._served, default=version))
        if newest is None:
            original(self, peer, version, base)
        else:
            self._send(peer, version, newest)

    return serve


@mutant(ShardRole, "applied", "server_kill")
def a_commit_is_told_before_it_is_durable(original: Any) -> Any:
    def applied(self: Any, job: Any, digest: bytes) -> None:
        replayed = bool(self._replay)
        original(self, job, digest)
        if not replayed:
            self._digests[job.step + 1] = digest
            self._send_committed(job.step)

    return applied


@mutant(ShardRole, "on_commit", scene=Scene(only=("unsaid_commit",), gap_s=(0.5, 1.5)), first=21)
def a_commit_that_comes_again_is_applied_again(original: Any) -> Any:
    def on_commit(self: Any, message: Commit) -> None:
        if self.phase is Phase.READY and message.step == self.version - 1:
            message = msgspec.structs.replace(message, step=self.version)
        original(self, message)

    return on_commit


@mutant(
    Saves,
    "snapshot_durable",
    scene=Scene(only=("server_kill",), gap_s=(0.5, 1.0), run={"checkpoint_every": 0, "snapshot_steps": 2}),
)
def too_much_is_pruned(original: Any) -> Any:
    def snapshot_durable(self: Any, record: SnapshotWritten, version: int) -> None:
        self._snapshots.append(record.step)
        self._out.prune(record.step + 1)

    return snapshot_durable


@mutant(ShardRole, "reduced")
def a_contribution_is_summed_up_twice(original: Any) -> Any:
    def reduced(self: Any, job: Any, square_norm: float, finite: bool) -> None:
        original(self, job, square_norm + (job.step == 3), finite)

    return reduced


@mutant(ShardRole, "on_verdict", "server_kill", "link_cut")
def a_verdict_that_comes_again_folds_its_part_again(original: Any) -> Any:
    def on_verdict(self: Any, message: Any) -> None:
        if message.accepted:
            message = msgspec.structs.replace(message, number=len(self._accepted.get(message.step, ())))
        original(self, message)

    return on_verdict


@mutant(ShardRole, "on_freeze", "server_kill", "power_cut")
def a_restarted_shard_leaves_out_what_it_had_folded_before(original: Any) -> Any:
    def on_freeze(self: Any, message: Any) -> None:
        if any(part.durable and not part.folded for part in self._parts.values()) and message.step == 3:
            self._folded[message.step] = len(message.contributions)
        original(self, message)

    return on_freeze


@mutant(ShardRole, "served")
def a_served_version_is_kept_for_good(original: Any) -> Any:
    def served(self: Any, job: ServeParameters, tensors: Any, **rest: Any) -> None:
        for tensor in tensors:
            self._out.share(tensor)
        original(self, job, tensors, **rest)

    return served


# ---- the decider ---------------------------------------------------------------------------------------------------


@mutant(DeciderRole, "on_stage_frozen", "server_kill")
def a_decision_is_told_before_it_is_durable(original: Any) -> Any:
    def on_stage_frozen(self: Any, peer: Any, message: Any) -> None:
        original(self, peer, message)
        step = self._steps.get(message.step)
        if step is not None and step.decision is not None and not step.decision_durable:
            self.decided(step.decision)

    return on_stage_frozen


@mutant(DeciderRole, "on_stage_committed", "server_kill")
def a_step_is_closed_before_all_stages_have_committed(original: Any) -> Any:
    def on_stage_committed(self: Any, message: Any) -> None:
        if message.step in self._steps:
            self._steps[message.step].committed.update(dict.fromkeys(range(self._stage_count), ()))
        original(self, message)

    return on_stage_committed


@mutant(DeciderRole, "_open_steps")
def a_step_is_opened_too_early(original: Any) -> Any:
    def open_steps(self: Any, now: float) -> None:
        self._closed += 1
        original(self, now)
        self._closed -= 1

    return open_steps


@mutant(DeciderRole, "coordinator_here", scene=Scene(only=("coordinator_kill",), gap_s=(0.1, 0.4)))
def reports_are_not_repeated(original: Any) -> Any:
    def coordinator_here(self: Any) -> None:
        self._coordinator_linked = True

    return coordinator_here


@mutant(DeciderRole, "on_checkpoint_part")
def a_manifest_is_written_before_all_parts_are_there(original: Any) -> Any:
    def on_checkpoint_part(self: Any, message: Any) -> None:
        context, self._context = self._context, _OneStage(self._context)
        try:
            original(self, message)
        finally:
            self._context = context

    return on_checkpoint_part


class _OneStage:
    """A context whose plan has fewer stages than the run; all else is the run's."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.plan = SimpleNamespace(stages=context.plan.stages[:1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


# ---- fences --------------------------------------------------------------------------------------------------------


@mutant(StageContext, "in_window", scene=liars("old_results"))
def no_fence_around_steps(original: Any) -> Any:
    return lambda self, step: 0 <= step < self.config.steps


@mutant(
    ServerMachine,
    "handle",
    scene=Scene(
        only=("late_words", "server_disk_loss", "snapshot_lost"), gap_s=(0.5, 1.5), until_s=(30.0, 50.0),
        disk_losses_max=24, run={**LINE, "checkpoint_every": 2, "steps": 80, "spares": 0},
    ),
    first=22,
)  # fmt: skip
def no_fence_around_generations(original: Any) -> Any:
    def handle(self: Any, peer: Any, message: Any, *rest: Any) -> None:
        original(self, peer, msgspec.structs.replace(message, ledger_generation=self.context.generation), *rest)

    return handle


@mutant(
    NodeMachine,
    "_plan_changed",
    scene=Scene(only=("old_coordinator", "server_disk_loss"), gap_s=(0.15, 0.4)),
)
def an_old_plan_is_followed(original: Any) -> Any:
    def plan_changed(self: Any, message: Any, now: float) -> None:
        self._roles.plan = None
        original(self, message, now)

    return plan_changed


@mutant(intake, "check_bounds", scene=liars("bent_shape"))
def bounds_are_not_checked(original: Any) -> Any:
    return lambda context, message: None


@mutant(TicketOffice, "check", scene=liars("stolen_output"))
def tickets_are_never_verified(original: Any) -> Any:
    return lambda self, node, task, ticket: None


@mutant(Intake, "_on_contribute", scene=liars("another_name"))
def anybody_contributes_in_anybodys_name(original: Any) -> Any:
    def on_contribute(self: Any, peer: Any, message: Any, now: float) -> None:
        original(self, message.contribution.node, message, now)

    return on_contribute


# ---- pools, links, and what is lost ----------------------------------------------------------------------------------


@mutant(Pool, "worker_gone", "volunteer_kill")
def leases_of_the_dead_are_kept(original: Any) -> Any:
    return lambda self, node, now: self._workers.pop(node, None) and None


@mutant(
    Pool,
    "result_lost",
    scene=Scene(
        only=("hop_kill",),
        gap_s=(0.5, 1.5),
        until_s=(2.0, 6.0),
        run={**LINE, "fronts": 1, "backs": 1, "microbatches": 8, "volunteers": 4, "collocated": "when_empty"},
    ),
)
def a_lost_result_is_never_asked_for_again(original: Any) -> Any:
    return lambda self, task: None


@equivalent(Pool, "give_back", "A lease that is not given back ends with its time: that costs time and nothing else.")
def no_lease_is_given_back_early(original: Any) -> Any:
    return lambda self, tasks, node, **why: None


@mutant(Roles, "sync", "server_kill")
def a_server_that_comes_back_is_told_nothing(original: Any) -> Any:
    return lambda self, peer: None


PATIENT = Scene(only=("server_kill", "link_cut"), gap_s=(0.2, 0.6), run={"lease_s": 1000.0})
"""No lease's time is over before the run is: what is lost must have another way out."""


@mutant(Gradients, "resend", scene=PATIENT)
def uploads_are_not_repeated(original: Any) -> Any:
    return lambda self, server: None


@mutant(BackRole, "close_step")
def a_back_server_keeps_closed_steps(original: Any) -> Any:
    return lambda self, step: self.pool.drop_step(step)


@equivalent(
    FrontRole,
    "on_activation",
    "An input computed a second time, by the same arithmetic from the same version, has the same value.",
)
def the_last_activation_stays(original: Any) -> Any:
    def on_activation(self: Any, message: Any) -> None:
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position
        held = state.inputs.get(place) if state is not None else None
        entry = self.pool_of(message.task)._of_task.get(message.task)
        if state is None or held is None or entry is None or entry.tensors is None:
            original(self, message)
            return
        state.inputs[place] = message.tensors[0]
        entry.tensors = (message.tensors[0], *entry.tensors[1:])
        self._out.drop((held,))

    return on_activation


# ---- volunteers ------------------------------------------------------------------------------------------------------


@mutant(Gradients, "accumulator_for", "link_slow", "volunteer_kill")
def a_sum_is_cut_while_a_job_adds_to_it(original: Any) -> Any:
    def accumulator_for(self: Any, step: int, version: int) -> int:
        total = self._sums.get(step)
        flush_at = None if total is None else total.flush_at
        accumulator = original(self, step, version)
        self._sums[step].flush_at = flush_at
        return int(accumulator)

    return accumulator_for


@mutant(VolunteerMachine, "_run")
def some_tasks_run_on_stale_parameters(original: Any) -> Any:
    def run(self: Any, held: Any) -> None:
        held_versions = self._versions._versions.items()
        older = [n for n, v in held_versions if v.loaded and n < held.lease.version]
        graph = held.lease.tasks[0].op == "B" and held.input is None
        if older and not graph and held.lease.tasks[0].microbatch % 2:
            key = held.lease.tasks[0]
            self._held.leases[key].lease = msgspec.structs.replace(held.lease, version=older[0])
        original(self, held)

    return run


@equivalent(
    Holdings,
    "add",
    "It names the same work on the same version, and its result is worth as much; where it wants less than the newer"
    " one it ends with its time, and the work is given again: that costs time and nothing else.",
)
def an_overtaken_lease_is_kept(original: Any) -> Any:
    def add(self: Any, held: Any, segments: int = 1) -> None:
        if held.lease.tasks[0] in self.leases:
            self.drop(held)
        else:
            original(self, held, segments)

    return add


@mutant(Holdings, "drop")
def what_came_with_a_lease_is_kept_for_good(original: Any) -> Any:
    return lambda self, held: None


SPLIT = Scene(always=("volunteer_kill",), run={**LINE, "stages": 3, "split": True})


@mutant(VolunteerMachine, "_backward_done", scene=SPLIT)
def a_contribution_names_a_task_whose_weight_gradient_is_owed(original: Any) -> Any:
    def backward_done(self: Any, job: Any, task: Any, covered: Any, losses: Any, dx: Any, now: float) -> None:
        ticket = self._held.running.lease.ticket
        original(self, job, task, covered, losses, dx, now)
        for owed in self._owed.take_steps(task.step, task.step):
            self.gradients.added(owed.job.accumulator, owed.tasks, owed.losses, ticket, now, owed=True)

    return backward_done


@mutant(Gradients, "owe", scene=SPLIT)
def a_sum_is_cut_while_a_weight_gradient_is_owed_to_it(original: Any) -> Any:
    return lambda self, accumulator, step: None


@mutant(OwedQueue, "next", scene=SPLIT)
def weight_gradients_are_owed_for_ever(original: Any) -> Any:
    return lambda self: None
