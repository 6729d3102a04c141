"""A server of one stage: its roles, the fence around them, and the steps that are open.

    link up, ServerReady ──▶ sync of every role          Work ──▶ fence ──▶ bounds ──▶ the role that handles it
    StepOpened ──▶ every role opens the step             StepClosed ──▶ every role forgets it

The roles never call each other: what one has to say to another is a message, also when both live here.
"""

from __future__ import annotations

from typing import Any

from node.machine.jobs import (
    Apply,
    Fold,
    Job,
    LoadBatch,
    LoadSnapshot,
    Measure,
    Reduce,
    ServeParameters,
    SetUpServer,
    StartShard,
    WriteCheckpoint,
    WriteManifest,
    WriteSnapshot,
)
from node.machine.outbox import Outbox
from node.machine.records import (
    CheckpointWritten,
    ContributionAccepted,
    ContributionStored,
    Record,
    SnapshotWritten,
    StageKeyKnown,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from node.machine.waits import sentence
from node.server.allowances import tell_allowances
from node.server.back import BackRole
from node.server.bounds import check_bounds
from node.server.context import StageContext
from node.server.decider import DeciderRole
from node.server.front import FrontRole
from node.server.guard import Guard
from node.server.ledger import FOR_LEDGER, LedgerRole
from node.server.senders import check_sender
from node.server.shard import Phase, ShardRole
from node.server.tails import TailDesk
from node.server.tickets import NEED_LEASE, TicketOffice
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TensorRef
from protocol.base.machine import HangUp
from protocol.messages import (
    Activation,
    Commit,
    Contribute,
    FetchInput,
    FetchParameters,
    Freeze,
    Gradient,
    Held,
    InputGradient,
    Labels,
    LeaseReturned,
    Output,
    Ready,
    ServerReady,
    StageKey,
    StepClosed,
    StepOpened,
    StepReport,
    Summed,
    Tail,
    Verdict,
    Work,
)
from protocol.run.plan import Plan
from protocol.run.run import RunConfig


class ServerMachine:
    """Everything that one server does for its stage. Hosted by `node.core.NodeMachine`, which owns the links.

    Args:
        records: the durable records of this server, oldest first, with the tensors of unpruned contributions.
        coordinator: where step reports go.
        secret: drawn for this start of the process; the key of the stage's lease tickets if this server has to make it.
        incarnation: drawn for this start of the process.
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
    ) -> None:
        stage, shard = plan.stage_of(node), plan.shard_of(node)
        assert stage is not None and shard is not None, "a server machine without a place in the plan"
        tickets = TicketOffice(plan.ledger_generation, (incarnation % 2**30) << 32)
        self.context = StageContext(
            node=node, config=config, plan=plan, stage=stage, shard=shard, out=out, tickets=tickets
        )
        self._secret = secret
        self._out = out
        self._vocabulary = vocabulary
        self._records = records
        self._servers: dict[NodeId, bool] = {}
        """Servers with a live link, and whether they have said that they are ready."""
        self._volunteers: dict[NodeId, None] = {}
        self._guard = Guard(self.context, self._pools)
        self._lane_is_ours = False
        """Whether what the server lane ends now was ordered by this machine."""
        self.front = FrontRole(self.context) if self.context.is_front else None
        self.back = BackRole(self.context) if self.context.is_back else None
        self.shard = ShardRole(self.context)
        self.tails = TailDesk(self.context)
        self.ledger = LedgerRole(self.context) if self.context.ledger == node else None
        self.decider = DeciderRole(self.context, coordinator) if plan.decider == node else None

    @property
    def ready(self) -> bool:
        return self.shard.phase is Phase.READY

    # ---- start, plan, links --------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        context = self.context
        records = [record for record in self._records if record.ledger_generation == context.generation]
        for record in self._records:
            if isinstance(record, ContributionStored) and record.ledger_generation != context.generation:
                self._out.drop(record.tensors)
        everything, self._records = self._records, []
        commits = [record.step for record in records if isinstance(record, StepCommitted)]
        # We committed step v - 1, which opened only after step v - 2 - delay was closed everywhere (T-I8).
        first = max(0, context.plan.restore_step) - 1
        context.closed = max(first, (commits[-1] if commits else -1) - 1 - context.config.batch.delay)
        context.opened = context.closed
        self._out.compute(SetUpServer(context.config, self._vocabulary, context.plan, context.stage, context.shard))
        self._begin_tickets(records)
        if self.ledger is not None:
            self.ledger.start(records)
        if self.decider is not None:
            self.decider.start(everything, now)
            if self.decider.closed > context.closed:
                self._close(self.decider.closed)
        self.shard.start(records)

    def _begin_tickets(self, records: list[Record]) -> None:
        """The stage's key is that of the generation's first start; the ledger's server draws it."""
        for record in records:
            if isinstance(record, StageKeyKnown):
                self.context.tickets.set_key(record.key)
        if self.ledger is not None and not self.context.tickets.open:
            self._out.persist(StageKeyKnown(ledger_generation=self.context.generation, step=0, key=self._secret))

    def _key_durable(self, record: StageKeyKnown) -> None:
        """From here on leases are given and results are taken; fellow servers hear the key from the ledger."""
        self.context.tickets.set_key(record.key)
        for peer in self._servers:
            self._tell_key(peer)
        self.shard.tell_workers()

    def _tell_key(self, peer: NodeId) -> None:
        tickets, context = self.context.tickets, self.context
        if self.ledger is not None and tickets.open and peer in context.stage_servers and peer != context.node:
            self._out.send(peer, StageKey(ledger_generation=context.generation, key=tickets.key))

    def end(self) -> tuple[StepReport, ...]:
        """Lets go of every tensor: other ledgers begin, or this server has no place any more.

        Returns what the coordinator has not heard of yet, for `take_over`.
        """
        for role in (self.front, self.back):
            if role is not None:
                role.close_step(self.context.config.steps)
        self.shard.end()
        return self.decider.unreported() if self.decider is not None else ()

    def take_over(self, reports: tuple[StepReport, ...]) -> None:
        """What the ledgers before these closed, the run has kept, and nobody has told the coordinator."""
        if self.decider is not None:
            self.decider.take_over(reports)

    def ban(self, nodes: tuple[NodeId, ...]) -> None:
        """These members count no longer: the ledger accepts nothing more of theirs. Names all that are banned."""
        if self.ledger is not None:
            self.ledger.ban(nodes)

    def change_plan(self, plan: Plan, now: float) -> None:
        """A new generation with the same ledgers: addresses may have changed, or the run; work goes on."""
        self.context.plan = plan
        if self.decider is not None:
            self.decider.plan_changed(now)

    def link_up(self, peer: NodeId, role: str, now: float) -> None:
        if role == "server":
            self._servers[peer] = False
            if self.ready:
                self._say_ready(peer)
        if role == "volunteer" or peer in self.context.stage_servers:
            if role == "volunteer":
                self._volunteers[peer] = None
            for pool in self._pools():
                pool.clock(now)
                pool.worker_here(peer, is_server=role == "server")
            self.tails.worker_here(peer)
            self._out.send(peer, StepClosed(ledger_generation=self.context.generation, step=self.context.closed))
            self.shard.worker_here(peer)
            self._give_leases(now)

    def link_down(self, peer: NodeId, now: float) -> None:
        self._servers.pop(peer, None)
        self._volunteers.pop(peer, None)
        for pool in self._pools():
            pool.worker_gone(peer, now)
        self.tails.worker_gone(peer)
        self.shard.worker_gone(peer)
        self._give_leases(now)

    def coordinator_here(self) -> None:
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
        for peer, peer_ready in self._servers.items():
            self._say_ready(peer)
            if peer_ready:
                self._sync(peer)
        self._sync(self.context.node)

    def _say_ready(self, peer: NodeId) -> None:
        self._out.send(peer, ServerReady(ledger_generation=self.context.generation, version=self.shard.version))

    def _sync(self, peer: NodeId) -> None:
        """Tells a ready server all that it must know; what it knows already changes nothing there."""
        self._tell_key(peer)
        for role in (self.decider, self.ledger, self.shard, self.front, self.back, self.tails):
            if role is not None:
                role.sync(peer)

    # ---- messages ------------------------------------------------------------------------------------------------

    def may_speak(self, peer: NodeId, now: float) -> bool:
        """Counts a message of any kind; a volunteer that floods this server is hung up on, with the reason."""
        try:
            if peer in self._volunteers:
                self._guard.check_message(peer, now)
        except RemoteProtocolError as error:
            self._refuse(peer, error, ())
            return False
        return True

    def handle(self, peer: NodeId, message: Work, now: float, size: float = 0.0) -> None:
        """One message about work. A peer that breaks the rules is hung up on, with the reason. `size`: of the values of
        an activation, where it was measured (`protocol.base.machine.Received`)."""
        context = self.context
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        for pool in self._pools():
            pool.clock(now)
        if message.ledger_generation > context.generation:
            self._out.drop(tensors)  # our plan is on its way; being ready under it brings everything again
            return
        try:
            if message.ledger_generation < context.generation:
                raise RemoteProtocolError(
                    "version", f"generation {message.ledger_generation}, not {context.generation}"
                )
            check_bounds(context, message)
            check_sender(context, peer, message, is_volunteer=peer in self._volunteers)
            if isinstance(message, NEED_LEASE) and not context.tickets.open:
                self._out.drop(tensors)  # whoever sent it hears when we take work, and what still counts comes again
                return
            context.tickets.check_message(peer, message)
        except RemoteProtocolError as error:
            self._refuse(peer, error, tensors)
            return
        try:
            self._dispatch(peer, message, now, size)
        except RemoteProtocolError as error:
            self._refuse(peer, error, ())
        self._give_leases(now)

    def _refuse(self, peer: NodeId, error: RemoteProtocolError, tensors: tuple[TensorRef, ...]) -> None:
        self._out.drop(tensors)
        self._out.count("barnraise_transport_rejected_messages_total", reason=error.reason)
        self._out.log("warning", "message refused", peer=peer, reason=error.reason, detail=error.detail)
        if peer != self.context.node:
            self._out.add(HangUp(peer, str(error)))

    def _dispatch(self, peer: NodeId, message: Work, now: float, size: float) -> None:
        match message:
            case Output() | Activation() | Gradient() | InputGradient() | Labels() if self._open_early(message):
                self._on_tensor(peer, message, size)
            case Held():
                for role in (self.front, self.back):
                    if role is not None:
                        role.on_held(peer, message)
            case Ready():
                if message.hello:
                    self.shard.greet(peer)
                if self.back is not None and self.ready:
                    self.back.on_graphs(peer, message.graphs)
                for role in (self.front, self.back):
                    if role is not None:
                        role.add_slots(peer, message)
            case Summed():
                for pool in self._pools():
                    if message.complete:
                        tasks = tuple(task for task in message.tasks if self.context.in_window(task.step))
                        pool.claim(tasks, peer, now)
                    else:
                        pool.summed(message.tasks, peer, now)
            case Tail():
                self.tails.on_tail(peer, message.step)
            case LeaseReturned():
                for pool in self._pools():
                    pool.give_back(message.tasks, peer, untried=True)
            case FetchInput() if self.front is not None:
                self.front.on_fetch_input(peer, message)
            case FetchParameters():
                if peer in self._volunteers:
                    self._guard.check_fetch(peer, self.shard.version, now)
                self.shard.on_fetch(peer, message)
            case Contribute():
                self._on_contribute(peer, message, now)
            case Verdict():
                self.shard.on_verdict(message)
                self._guard.on_verdict(message)
            case Freeze():
                self.shard.on_freeze(message)
            case Commit():
                self.shard.on_commit(message)
            case ServerReady():
                self._on_server_ready(peer)
            case StageKey():
                if message.key != self.context.tickets.key:
                    self._out.persist(
                        StageKeyKnown(ledger_generation=message.ledger_generation, step=0, key=message.key)
                    )
            case StepOpened():
                self._on_step_opened(message)
            case StepClosed():
                self._on_step_closed(message)
            case _ if self.ledger is not None and isinstance(message, FOR_LEDGER):
                self.ledger.handle(message)
            case _ if self.decider is not None:
                self.decider.handle(peer, message)
            case _:
                self._out.drop(getattr(message, "tensors", ()))

    def _on_tensor(self, peer: NodeId, message: Work, size: float) -> None:
        if self.front is not None and isinstance(message, Activation):
            self.front.on_activation(message)
        elif self.front is not None and isinstance(message, Labels):
            self.front.on_labels(message)
        elif self.front is not None and isinstance(message, InputGradient):
            if not self.front.wants(message.task) or self._guard.is_used(peer, message, size):
                self.front.on_input_gradient(message)
        elif self.back is not None and isinstance(message, Output):
            if not self.back.wants(message.task) or self._guard.is_used(peer, message, size):
                self.back.on_output(peer, message)
            else:
                self.back.on_graphs(peer, (message.task,))
        elif self.back is not None and isinstance(message, Gradient):
            self.back.on_gradient(message)
        else:
            self._out.drop(getattr(message, "tensors", ()))

    def _open_early(self, message: Work) -> bool:
        """Work of a step can come by another link before the word that the step is open: believe the work.

        Only the decider opens steps; whoever computed this has heard of it. Where routes begin the word of a volunteer
        is not enough, since new work would be made of it.
        """
        step = message.task.step  # type: ignore[attr-defined]
        if not self.context.in_window(step):
            return False
        if not (self.context.reads_data and isinstance(message, (Output, InputGradient))):
            self._open_roles(step)
        return True

    def _on_contribute(self, peer: NodeId, message: Contribute, now: float) -> None:
        if message.contribution.node != peer:
            error = RemoteProtocolError("signature", "a contribution in another node's name")
            self._refuse(peer, error, message.tensors)
            return
        if not self.context.in_window(message.step):
            self._out.drop(message.tensors)
            self._out.count("barnraise_server_updates_total", outcome="stale")
            return
        before = self.shard.part_count
        reason = self.shard.on_contribute(peer, message)
        if reason:
            word, _, detail = reason.partition(": ")
            self._refuse(peer, RemoteProtocolError(word, detail), ())
        for pool in self._pools() if self.shard.part_count > before else ():  # what comes twice is no progress
            pool.progress(peer, message.step, now)

    def _on_server_ready(self, peer: NodeId) -> None:
        if not self._servers.get(peer, True):
            self._servers[peer] = True
            if self.ready:
                # It may have become ready before it could hear that we are.
                self._say_ready(peer)
                self._sync(peer)

    def _on_step_opened(self, message: StepOpened) -> None:
        if message.closed > self.context.closed:
            self._close(message.closed)
        if message.step <= self.context.closed:
            return
        self.context.opened = max(self.context.opened, message.step)
        if self.ledger is not None:
            self.ledger.on_step_opened(message)
        self._open_roles(message.step)

    def _on_step_closed(self, message: StepClosed) -> None:
        if message.step <= self.context.closed:
            return
        if self.ledger is not None:
            self.ledger.on_step_closed(message)
        self._close(message.step)

    # ---- jobs and records ----------------------------------------------------------------------------------------

    def computed(self, job: Job, result: Any, now: float) -> None:
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
                for pool in self._pools():
                    pool.allow_upload(self.context.upload_s(result))
            case StartShard() | LoadSnapshot():
                self.shard.base_loaded(result)
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
                self.shard.saves.manifest_written(job)
                self.decider.manifest_written(job, result)
            case _:
                pass
        if self.ready and not was_ready:
            self._become_ready(now)
        self._give_leases(now)

    def failed(self, job: Job, reason: str, now: float) -> bool:
        """Whether the server goes on without what a job should have done: with a checkpoint or snapshot less."""
        if not isinstance(job, WriteCheckpoint | WriteSnapshot | WriteManifest):
            return False
        if self._lane_is_ours:  # else it was ordered under earlier ledgers
            self.shard.saves.failed(job, reason, now)
        return True

    def persisted(self, record: Record, now: float) -> None:
        if record.ledger_generation != self.context.generation:
            return
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
            case CheckpointWritten() if self.decider is not None:
                self.decider.manifest_durable(record)
            case _:
                pass
        self._give_leases(now)

    # ---- time ----------------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        deadlines = [self.shard.saves.wake_at(), *(pool.next_deadline() for pool in self._pools())]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def wake(self, now: float) -> None:
        self.shard.saves.wake(now, self.shard.version)
        for pool in self._pools():
            for entry, worker in pool.expire(now):
                self._out.log("info", "lease over", task=str(entry.tasks[0]), worker=worker)
        self._give_leases(now)

    def alert(self) -> str:
        """What is wrong here while training goes on, or nothing."""
        return "; ".join(self.context.alerts.values())

    # ---- what an operator asks -----------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """What the oldest open steps wait for here, or nothing; it reads after "waits for"."""
        if not self.ready:
            return "its part of the model to be restored"
        waits = [pool.waiting_for(self.context.node) for pool in self._pools()]
        waits += [role.waiting_for() for role in (self.ledger, self.decider) if role is not None]
        return sentence(waits)

    def task_counts(self) -> dict[str, int]:
        """Unfinished units of all pools by what they wait for: input, free, leased."""
        counts = [pool.counts() for pool in self._pools()]
        return {state: sum(count[state] for count in counts) for state in ("input", "free", "leased")}

    def counters(self) -> dict[str, float]:
        pools = self._pools()
        counts = self.task_counts()
        return {
            "step": float(self.context.closed),
            "version": float(self.shard.version),
            "volunteers": float(len(self._volunteers)),
            "reissued": float(sum(pool.reissued_count for pool in pools)),
            "queue": float(counts["free"]),
            "leased": float(counts["leased"]),
            **({} if self.decider is None else {"unreported": float(self.decider.unreported_count)}),
        }

    def check(self) -> None:
        for role in (self.front, self.back, self.shard, self.ledger, self.decider, self.tails):
            if role is not None:
                role.check()

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _pools(self) -> list[Any]:
        return [pool for role in (self.front, self.back) if role is not None for pool in role.all_pools]

    def _open_roles(self, step: int) -> None:
        for role in (self.front, self.back, self.tails):
            if role is not None:
                role.open_step(step)

    def _close(self, step: int) -> None:
        self.context.closed = step
        self._guard.close_step(step)
        for role in (self.front, self.back, self.ledger, self.shard, self.tails):
            if role is not None:
                role.close_step(step)
        for peer in self._volunteers:
            self._out.send(peer, StepClosed(ledger_generation=self.context.generation, step=step))
        # A fellow server hears it from the ledger, and our own device from us.
        self._out.send(self.context.node, StepClosed(ledger_generation=self.context.generation, step=step))

    def _give_leases(self, now: float) -> None:
        for role in (self.front, self.back):
            if role is not None:
                grants = role.give_leases(now)
                for grant in grants:
                    self._guard.leased(grant.worker, now)
                self.tails.granted(grants)
        self.tails.look(self._pools(), now)
        tell_allowances(self.context, self._pools())
