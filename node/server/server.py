"""A server of one stage, from its start to its end: links, jobs, records, time, and what an operator asks.

    link up, ServerReady ──▶ sync of every role          Work ──▶ `Intake` ──▶ the role that handles it
    StepOpened ──▶ every role opens the step             StepClosed ──▶ every role forgets it

The roles are held by `Roles`; `Intake` is the fence before them.
"""

from __future__ import annotations

from typing import Any

from node.machine.jobs import (
    FILE_JOBS,
    STORE_JOBS,
    AddUp,
    Apply,
    BringManifest,
    CopyState,
    Fold,
    Job,
    LoadBatch,
    LoadSnapshot,
    Measure,
    MeasureResult,
    Reduce,
    ServeParameters,
    SetUpServer,
    StartShard,
    StoreJob,
    WriteCheckpoint,
    WriteEvidence,
    WriteManifest,
    WriteSnapshot,
)
from node.machine.outbox import Outbox
from node.machine.readable import ReadableCheckpoints
from node.machine.records import (
    AuditStanding,
    CheckpointWritten,
    ContributionAccepted,
    ContributionStored,
    LastValidated,
    Record,
    ShardStarted,
    SnapshotWritten,
    StageKeyKnown,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from node.machine.waits import sentence
from node.server.buddy import Copies
from node.server.context import StageContext
from node.server.intake import Intake
from node.server.recovery import StateLostError
from node.server.roles import Roles
from node.server.tickets import TicketOffice
from protocol.base.ids import NodeId, TensorRef
from protocol.base.limits import ITEMS_MAX
from protocol.messages import StepReport, Work
from protocol.run.memory import own_computing_bytes, server_bytes
from protocol.run.plan import Plan
from protocol.run.run import RunConfig


class ServerMachine:
    """Everything that one server does for its stage. Hosted by `node.machine.roles.Roles`, which knows the links.

    Args:
        records: the durable records of this server, oldest first, with the tensors of unpruned contributions.
        coordinator: where step reports go.
        secret: drawn for this start of the process; the key of the stage's lease tickets if this server has to make it.
        incarnation: drawn for this start of the process.
        copies: what this server holds of other servers' shards, also of earlier ledgers.
        memory_bytes: free on this computer when the process began; 0: not known.
        readable: checkpoints that this server was told of, also under earlier ledgers.
        computes: this computer computes tasks too, if the run lets servers do so.
    """

    def __init__(
        self,
        node: NodeId,
        config: RunConfig,
        vocabulary: int,
        plan: Plan,
        out: Outbox,
        records: list[Record],
        coordinator: NodeId,
        secret: bytes = b"",
        incarnation: int = 0,
        copies: Copies | None = None,
        memory_bytes: int = 0,
        readable: ReadableCheckpoints | None = None,
        computes: bool = False,
    ) -> None:
        stage, shard = plan.stage_of(node), plan.shard_of(node)
        assert stage is not None and shard is not None, "a server machine without a place in the plan"
        tickets = TicketOffice(plan.ledger_generation, (incarnation % 2**30) << 32)
        self.context = StageContext(
            node=node, config=config, plan=plan, stage=stage, shard=shard, out=out, tickets=tickets,
            memory_bytes=memory_bytes, readable=readable,
        )  # fmt: skip
        self._secret, self._computes = secret, computes
        self._out = out
        self._vocabulary = vocabulary
        self._records = records
        self._roles = Roles(self.context, coordinator, Copies(out) if copies is None else copies)
        self._intake = Intake(self.context, self._roles)
        self._lane_is_ours = False
        """Whether what the server lane ends now was ordered by this machine."""
        self.front, self.back, self.tails = self._roles.front, self._roles.back, self._roles.tails
        self.shard, self.ledger, self.decider = self._roles.shard, self._roles.ledger, self._roles.decider

    @property
    def has_closed_some(self) -> bool:
        """Whether it has made a version that it did not begin with."""
        return self.ready and self.shard.version > self.shard.began_with

    @property
    def closed_version(self) -> int:
        """What the newest closed step has made of the shard, where that is here; -1: it is not, or none is closed."""
        version = self.context.closed + 1
        return version if self.ready and self.shard.began_with < version <= self.shard.version else -1

    def restores_what_begins(self, plan: Plan) -> bool:
        """Whether the shard is just being made again from this disk, which nobody reads twice, and the ledgers of
        `plan` begin with a version of it. They came within the moment after a restart, did not find it in memory, and
        closed steps were thrown away."""
        context = self.context
        here = (plan.stage_of(context.node), plan.shard_of(context.node)) == (context.stage, context.shard)
        restoring = not self.ready and not self._roles.buddy.fetching() and self.shard.held_version >= plan.restore_step
        return here and restoring and plan.goes_on_from(context.plan)

    @property
    def ready(self) -> bool:
        return self._roles.ready

    # ---- start, plan, links --------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        context = self.context
        everything, self._records = self._records, []
        records = [record for record in everything if record.ledger_generation == context.generation]
        commits = [record.step for record in records if isinstance(record, StepCommitted)]
        # We committed step v - 1, which opened only after step v - 2 - delay was closed everywhere (T-I8).
        first = max(0, context.plan.restore_step) - 1
        context.closed = max(first, (commits[-1] if commits else -1) - 1 - context.config.batch.delay)
        context.opened = context.closed
        self._out.compute(SetUpServer(context.written, self._vocabulary, context.plan, context.stage, context.shard))
        missing = self._begin_tickets(records)
        if self.ledger is not None:
            missing = self.ledger.start(records) or missing
            self.ledger.desk.recall(everything)
        if self.decider is not None:
            missing = self.decider.start(everything, now) or missing
            if self.decider.closed > context.closed:
                self._roles.close_step(self.decider.closed)
        self.shard.start(everything)
        if missing:
            raise StateLostError(missing)

    def _begin_tickets(self, records: list[Record]) -> str:
        """The stage's key is that of the generation's first start; the ledger's server draws it, and writes it down
        before anything else. Returns what is missing, or nothing."""
        for record in records:
            if isinstance(record, StageKeyKnown):
                self.context.tickets.set_key(record.key)
        if self.ledger is None or self.context.tickets.open:
            return ""
        if any(isinstance(record, ShardStarted) for record in records):
            return "the key of the stage's leases is not on this disk any more"
        self._out.persist(StageKeyKnown(ledger_generation=self.context.generation, step=0, key=self._secret))
        return ""

    def _key_durable(self, record: StageKeyKnown) -> None:
        """From here on leases are given and results are taken; fellow servers hear the key from the ledger."""
        self.context.tickets.set_key(record.key)
        for peer in self._roles.servers:
            self._roles.tell_key(peer)
        self.shard.tell_workers()

    def end(self) -> tuple[StepReport, ...]:
        """Lets go of every tensor: other ledgers begin, or this server has no place any more.

        Returns what the coordinator has not heard of yet, for `take_over`.
        """
        for role in (self.front, self.back):
            if role is not None:
                role.close_step(self.context.config.final_step)
        self._roles.sums.close_step(self.context.config.final_step)
        self._roles.early.close_step(self.context.config.final_step)
        self.shard.end()
        self._roles.pins.end()
        return self.decider.unreported() if self.decider is not None else ()

    def standing(self) -> tuple[AuditStanding, ...]:
        """What audits have shown of members, for the ledgers after these."""
        return () if self.ledger is None else self.ledger.desk.standing()

    def take_over(self, reports: tuple[StepReport, ...], standing: tuple[AuditStanding, ...] = ()) -> None:
        """What the ledgers before these closed, the run has kept, and nobody has told the coordinator; and what their
        audits have shown of members."""
        if self.ledger is not None:
            self.ledger.desk.recall(standing)
        if self.decider is not None:
            self.decider.take_over(reports)

    def ban(self, nodes: tuple[NodeId, ...]) -> None:
        """These members count no longer: the ledger accepts nothing more of theirs, and their sums are not waited for
        when their links end, which they do now. Names all that are banned."""
        if self.ledger is not None:
            self.ledger.ban(nodes)
        for pool in self._roles.pools():
            pool.ban(nodes)

    def change_plan(self, plan: Plan, now: float) -> None:
        """A new generation with the same ledgers: addresses may have changed, or the run; work goes on."""
        self.context.take_plan(plan)
        for pool in self._roles.pools():
            pool.collocate(self.context.config.stages.collocated)
        if self.ready and plan.save == self.shard.version:
            self.shard.saves.checkpoint_if_due(plan.save)
        if self.decider is not None:
            self.decider.plan_changed(now)

    def link_up(self, peer: NodeId, role: str, now: float, here_before: bool = False) -> None:
        """`here_before`: the link is older than this machine, so what the peer said at its beginning nobody has heard.
        Who computes greets on each link, and hears then which step was closed last."""
        if role == "server":
            self._roles.servers[peer] = False
            if self.ready:
                self._roles.say_ready(peer)
            self._roles.buddy.link_up(peer, now)
        if role == "volunteer" or peer in self.context.stage_servers:
            if role == "volunteer":
                self._roles.volunteers[peer] = None
            self._roles.clock(now)
            for pool in self._roles.pools():
                pool.worker_here(peer, is_server=role == "server")
            self.tails.worker_here(peer)
            if here_before or role == "server":
                self._roles.say_closed(peer)
            self.shard.worker_here(peer)
            self._roles.give_leases(now)
        elif role == "auditor":
            self._roles.auditors[peer] = None
            if here_before:
                self._roles.say_closed(peer)
            self.shard.worker_here(peer)

    def link_moved(self, peer: NodeId, silent_s: float, now: float) -> None:
        self._roles.clock(now)
        for pool in self._roles.pools():
            pool.worker_late(peer, silent_s)

    def link_down(self, peer: NodeId, now: float) -> None:
        self._roles.servers.pop(peer, None)
        self._roles.buddy.link_down(peer, now)
        self._roles.volunteers.pop(peer, None)
        self._roles.auditors.pop(peer, None)
        self.context.computing.pop(peer, None)
        for pool in self._roles.pools():
            pool.worker_gone(peer, now)
        if self.ledger is not None:
            self.ledger.desk.auditor_gone(peer)
        self.tails.worker_gone(peer)
        self.shard.worker_gone(peer)
        self._roles.pins.gone(peer)
        self._roles.give_leases(now)

    def coordinator_here(self) -> None:
        if self.ledger is not None:
            self.ledger.desk.coordinator_here()
        if self.decider is not None:
            self.decider.coordinator_here()

    def coordinator_gone(self) -> None:
        if self.decider is not None:
            self.decider.coordinator_gone()

    def reports_stored(self, step: int) -> None:
        if self.decider is not None:
            self.decider.on_stored(step)

    def _become_ready(self, now: float) -> None:
        if self.decider is not None and not self.decider.started:
            self.decider.begin(now)
        for peer, peer_ready in self._roles.servers.items():
            self._roles.say_ready(peer)
            if peer_ready:
                self._roles.sync(peer)
        self._roles.sync(self.context.node)

    # ---- messages ------------------------------------------------------------------------------------------------

    def may_speak(self, peer: NodeId, now: float) -> bool:
        """As `Intake.may_speak`."""
        return self._intake.may_speak(peer, now)

    def handle(self, peer: NodeId, message: Work, now: float, size: float = 0.0) -> None:
        """As `Intake.handle`."""
        self._intake.handle(peer, message, now, size)

    # ---- jobs and records ----------------------------------------------------------------------------------------

    def computed(self, job: Job, result: Any, now: float) -> None:
        if isinstance(job, STORE_JOBS):
            self._brought(job, result)
            return
        if isinstance(job, AddUp):
            if job.ledger_generation == self.context.generation:
                self._intake.added(job, result)
                self._roles.give_leases(now)
            else:
                self._out.drop((result,))
            return
        if isinstance(job, MeasureResult):
            self._roles.guard.measured(job, result)
            self._roles.give_leases(now)
            return
        if isinstance(job, SetUpServer):
            self._lane_is_ours = job.plan.ledger_generation == self.context.generation
        if not self._lane_is_ours:
            # Ordered under earlier ledgers; the lane works in order, so ours begin after its set-up.
            results = result if isinstance(result, tuple) else (result,)
            self._out.drop(ref for ref in results if isinstance(ref, TensorRef))
            return
        was_ready = self.ready
        match job:
            case SetUpServer():
                self.shard.set_elements(result)
                self._say_what_it_takes(result)
                for pool in self._roles.pools():
                    pool.allow_upload(self.context.upload_s(result))
            case StartShard() if not result:
                self._roles.buddy.fetch(job.checkpoint_step, now)
            case StartShard() | LoadSnapshot():
                self.shard.base_loaded(result)
            case CopyState():
                self._roles.buddy.made(job, result)
            case LoadBatch() if self.front is not None:
                self.front.batch_loaded(job, *result)
            case Measure():
                self.shard.measured(job, result)
            case Fold():
                self.shard.folded(job)
            case Reduce():
                self.shard.reduced(job, *result)
            case Apply():
                self.shard.applied(job, result)
            case ServeParameters():
                self.shard.served(job, result)
            case WriteSnapshot():
                self.shard.snapshot_written(job, result)
            case WriteCheckpoint():
                self.shard.saves.part_written(job, *result)
            case WriteManifest() if self.decider is not None:
                if self.shard.saves.manifest_written(job):
                    self.decider.manifest_written(job, result)
            case WriteEvidence():
                self.context.alerts.pop("evidence", None)
                say_evidence(self._out, job, result)
            case _:
                pass
        if self.ready and not was_ready:
            self._become_ready(now)
        self._roles.give_leases(now)

    def _brought(self, job: StoreJob, result: Any) -> None:
        """Something of a checkpoint lies in the object store."""
        if self.shard.saves.brought(job) and isinstance(job, BringManifest) and self.decider is not None:
            self.decider.manifest_written(job, result)

    def failed(self, job: Job, reason: str, now: float) -> bool:
        """Whether the server goes on without what a job should have done: with a checkpoint or snapshot less."""
        if isinstance(job, STORE_JOBS):
            self.shard.saves.not_brought(job, reason, now)
            return True
        if isinstance(job, AddUp):
            return job.ledger_generation != self.context.generation
        if isinstance(job, MeasureResult):
            self._roles.guard.not_measured(job)
            return True
        if isinstance(job, LoadSnapshot):
            raise StateLostError(f"snapshot {job.version} cannot be read: {reason}")
        if isinstance(job, StartShard) and job.copy:
            if self._lane_is_ours:  # else it was ordered under earlier ledgers
                self._roles.buddy.useless(reason)
            return True
        if isinstance(job, WriteEvidence):
            self.context.alerts["evidence"] = f"evidence of a lie was not kept: {reason}"
            say_no_evidence(self._out, job, reason)
            return True
        if not isinstance(job, FILE_JOBS):
            return False
        if self._lane_is_ours:  # else it was ordered under earlier ledgers
            self.shard.saves.failed(job, reason, now)
        return True

    def persisted(self, record: Record, now: float) -> None:
        if record.ledger_generation != self.context.generation:
            return
        self._roles.clock(now)
        match record:
            case ContributionStored():
                self.shard.stored(record)
            case StageKeyKnown():
                self._key_durable(record)
            case StepCommitted():
                self.shard.committed(record)
            case SnapshotWritten():
                self.shard.snapshot_durable(record)
            case ContributionAccepted() if self.ledger is not None:
                self.ledger.accepted(record)
            case StepSealed() if self.ledger is not None:
                self.ledger.sealed(record)
            case StepDecided() if self.decider is not None:
                self.decider.decided(record)
            case StepDone() if self.decider is not None:
                self.decider.done(record, now)
            case LastValidated() if self.decider is not None:
                self.decider.last_validated(record)
            case CheckpointWritten() if self.decider is not None:
                self.decider.manifest_durable(record)
            case _:
                pass
        self._roles.give_leases(now)

    def _say_what_it_takes(self, elements: int) -> None:
        """Before any of it is taken: a process that the system ends for want of memory says nothing."""
        context = self.context
        needed, free = server_bytes(context.config, elements), context.memory_bytes
        whole = elements * len(context.plan.stages[context.stage].servers)
        own = own_computing_bytes(context.config, whole) if self._computes else 0
        self._out.log(
            "info", "memory of the shard", parameters=elements, takes_gb=_gb(needed), free_gb=_gb(free),
            own_computing_takes_gb=_gb(own),
        )  # fmt: skip
        takes = f"its shard of {elements / 1e6:,.0f} M parameters takes {_gb(needed)} GB of memory, and "
        had = f"{_gb(free)} GB were free when it started: "
        if 0 < free < needed:
            context.alerts["memory"] = f"{takes}{had}more servers a stage, more stages or more memory are needed"
        elif 0 < free < needed + own:
            context.alerts["memory"] = (
                f"{takes}what it computes itself while no volunteer does up to {_gb(own)} GB more on a processor; {had}"
                "started with --no-compute it takes its shard's alone"
            )

    # ---- time ----------------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        first = None if self.ledger is None else self.ledger.desk.wake_at()
        for at in (self.shard.saves.wake_at(), self._roles.buddy.wake_at(), self._roles.pins.wake_at()):
            if at is not None and (first is None or at < first):
                first = at
        for pool in self._roles.pools():
            at = pool.next_deadline()
            if at is not None and (first is None or at < first):
                first = at
        return first

    def wake(self, now: float) -> None:
        self.shard.saves.wake(now, self.shard.version)
        self._roles.buddy.wake(now)
        self._roles.pins.wake(now)
        if self.ledger is not None:
            self.ledger.desk.wake(now)
        for pool in self._roles.pools():
            for entry, worker in pool.expire(now):
                self._out.log("info", "lease over", task=str(entry.tasks[0]), worker=worker)
        self._roles.give_leases(now)

    def alert(self) -> str:
        """What is wrong here while training goes on, or nothing."""
        return "; ".join(self.context.alerts.values())

    # ---- what an operator asks -----------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """What the oldest open steps wait for here, or nothing; it reads after "waits for"."""
        if not self.ready:
            return self._roles.buddy.fetching() or "its part of the model to be restored"
        waits = [self._roles.buddy.waiting_for()]
        waits += [pool.waiting_for(self.context.node) for pool in self._roles.pools()]
        waits += [role.waiting_for() for role in (self.ledger, self.decider) if role is not None]
        return sentence(waits)

    def resting(self) -> tuple[NodeId, ...]:
        """Volunteers of no use here for a while, where that is all of one pool: without it a stage does nothing."""
        return tuple(sorted({node for pool in self._roles.training_pools() for node in pool.resting()}))[:ITEMS_MAX]

    def task_counts(self) -> dict[str, int]:
        """Unfinished units of all pools by what they wait for: input, free, leased."""
        counts = [pool.counts() for pool in self._roles.pools()]
        return {state: sum(count[state] for count in counts) for state in ("input", "free", "leased")}

    def counters(self) -> dict[str, float]:
        pools = self._roles.pools()
        counts = self.task_counts()
        return {
            "step": float(self.context.closed),
            "generation": float(self.context.plan.generation),
            "version": float(self.shard.version),
            "volunteers": float(len(self._roles.volunteers)),
            "reissued": float(sum(pool.reissued_count for pool in pools)),
            "queue": float(counts["free"]),
            "leased": float(counts["leased"]),
            **({} if self.ledger is None else self.ledger.audit_counts()),
            **({} if self.decider is None else self.decider.counters()),
        }

    def check(self) -> None:
        self._roles.check()


def say_evidence(out: Outbox, job: WriteEvidence, name: str) -> None:
    """Tells the operator where what an audit found lies."""
    out.log("warning", "evidence", file=name, contribution=str(job.order.contribution))


def say_no_evidence(out: Outbox, job: WriteEvidence, reason: str) -> None:
    """The same where it could not be kept; who lied is banned all the same."""
    out.log("warning", "evidence cannot be written", contribution=str(job.order.contribution), reason=reason)


def _gb(count: int) -> float:
    return round(count / 1e9, 2)
