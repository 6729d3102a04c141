"""The volunteer role: takes leases, computes, sends results at once and weight gradients as contributions.

    slots ──▶ leases ──▶ (parameters, inputs fetched) ──▶ ready ──▶ the device, one job at a time ──▶ results, sums

Older steps come first; within a step the plan's order policy says what goes first (`node.volunteer.order`).
Nothing here decides what counts; a lease that is late, doubled or pointless costs time and nothing else.
"""

from __future__ import annotations

from typing import Any

from node.machine.jobs import (
    Backward,
    DropGraphs,
    Evaluate,
    Forward,
    Job,
    LoadParameters,
    RouteEnd,
    SegmentEnd,
    SetUpDevice,
    TakeGradient,
    WeightGradient,
)
from node.machine.outbox import Outbox
from node.machine.slow_line import stage_values, upload_s
from node.machine.waits import Wait, sentence, work_name
from node.volunteer.allowances import Allowances
from node.volunteer.auditor import Auditor
from node.volunteer.gradients import OUTSTANDING_MAX, Gradients
from node.volunteer.holdings import Holdings
from node.volunteer.leases import AskedAgain, Held, forward_of, is_validation
from node.volunteer.order import Order
from node.volunteer.owed import Owed, OwedQueue, owed_of
from node.volunteer.room import Room, is_out_of_memory
from node.volunteer.screening import check_from_server, refuse
from node.volunteer.slots import Slots
from node.volunteer.tails import Tails
from node.volunteer.tally import Tally
from node.volunteer.tenants import Tenants
from node.volunteer.versions import Versions
from node.volunteer.words import Words
from node.volunteer.work import job_of
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.base.machine import HangUp
from protocol.messages import (
    Allowance,
    Flush,
    Forget,
    InputAnswer,
    Lease,
    Parameters,
    StepClosed,
    Verdict,
    VersionReady,
    Work,
)
from protocol.run.batches import Batches
from protocol.run.plan import IN_FLIGHT_LIMIT, Plan
from protocol.run.run import RunConfig

LEASES_MAX = 4 * IN_FLIGHT_LIMIT
"""Leases held at once; more are given back. Each of a stage's fronts may give as many as a plan has in flight."""


class VolunteerMachine:
    """One device that works for one stage. Hosted by `node.machine.roles.Roles`, also on servers that compute."""

    def __init__(self, config: RunConfig, vocabulary: int, out: Outbox, incarnation: int) -> None:
        self._written = config  # as its file has it: what forms follow from
        self._batches = Batches.of(config)
        self._vocabulary = vocabulary
        self._out = out
        self._plan: Plan | None = None
        self._stage = -1
        self._place = 0
        """Counts the changes of stage or ledgers."""
        self.servers: tuple[NodeId, ...] = ()
        """Servers of our stage, in shard order."""
        self._linked: dict[NodeId, bool] = {}
        """Those with a live link, and whether they have said that they are ready."""
        self._words = Words(out, self._linked)
        self._slots: Slots | None = None
        self._closed = -1
        self._versions = Versions(out, by_changes=config.wire.parameters == "p12")
        self._held = Holdings(out)
        self._owed = OwedQueue()
        self._order: Order | None = None
        self._device_ready = False
        self._room = Room()
        self._draining = False
        self._tails = Tails()
        self._allowances = Allowances(self._out)
        self._asked_again = AskedAgain()
        self._auditor = Auditor(config, out, self._want_version, self._versions.has, self._drop_old_versions)
        self.gradients = Gradients(out, incarnation, config.limits.contribution_tasks, config.limits.linger_s)
        self._tenants = Tenants(out, self._held, self._words, self.gradients, self._has_gradient)
        self.tally = Tally(config, out)

    # ---- plan and links ------------------------------------------------------------------------------------------

    def set_plan(self, plan: Plan, stage: int) -> bool:
        """Works for `stage` from here on; returns whether that is news.

        Then everything of another stage, or of other ledgers, is forgotten, and links have to be told again.
        """
        same = (
            self._plan is not None
            and self._stage == stage
            and plan.ledger_generation == self._plan.ledger_generation
            and self.servers == tuple(server.node for server in plan.stages[stage].servers)
        )
        if self._plan is not None and self._words.generation == plan.ledger_generation and not same:
            self._return(self._held.all(), "its place has changed")
            self._words.give_untaken_back(self._held.unsent, self._plan)
            self._words.server_begins(None, self._held.has_forward)
        self._plan, self._batches = plan, Batches.of(self._written, plan.changes)
        self._order = Order(plan, stage)
        if same:
            return False
        self._forget_steps(None)
        self._allowances.forget_all()
        self._closed = -1
        self._place += 1
        self._stage = stage
        self.servers = tuple(server.node for server in plan.stages[stage].servers)
        self._slots = Slots(plan, stage, validates=self._config.validation.every_steps > 0)
        self._linked.clear()
        self._words.generation = self._held.generation = plan.ledger_generation
        values = stage_values(self._config, self._vocabulary, plan, stage)
        self.gradients.reset(plan.ledger_generation, self.servers, upload_s(self._config, values))
        self._versions.reset(plan.ledger_generation, self.servers)
        self._auditor.reset(plan, self.servers)
        self._device_ready = False
        self._room.reset()
        self._out.compute(SetUpDevice(self._written, self._vocabulary, plan, stage))
        return True

    @property
    def stage(self) -> int:
        return self._stage

    def link_up(self, peer: NodeId) -> None:
        if peer in self.servers:
            self._linked[peer] = False
            assert self._slots is not None
            self._slots.link_up(peer)
            self._greet(peer, hello=True)

    def _greet(self, server: NodeId, hello: bool) -> None:
        """Asks whether the shard is ready, and says which graphs are still here."""
        self._words.greet(server, hello, self._held.graphs, {**self.gradients.backwards(), **self._owed.tickets})

    def link_down(self, peer: NodeId) -> None:
        """Its leases go on: the work is worth as much as before, and results go to other servers too."""
        self._linked.pop(peer, None)
        if self._slots is not None:
            self._slots.link_down(peer)
        self._tails.link_down(peer)
        self._allowances.forget(peer)
        self._words.link_down(peer)
        self._held.link_down(peer, self._plan, self._linked)

    # ---- messages ------------------------------------------------------------------------------------------------

    def handle(self, peer: NodeId, message: Work, now: float) -> None:
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        if self._plan is None or message.ledger_generation != self._plan.ledger_generation or peer not in self._linked:
            self._out.drop(tensors)
            return
        try:
            check_from_server(self._batches, self._plan, self._stage, peer, message)
        except RemoteProtocolError as error:
            refuse(self._out, peer, tensors, error)
            return
        match message:
            case Lease():
                self._on_lease(peer, message, now)
            case Flush():
                self._tails.told(message.step, peer, message.leases)
            case Allowance():
                self._allowances.told(peer, message, now)
            case Forget():
                self._words.give_untaken_back(self._held.forget_graphs(message.tasks), self._plan)
            case InputAnswer():
                self._held.on_input(message, now, self._config.batch.segments)
            case Parameters():
                self._versions.on_parameters(message)
            case VersionReady():
                self._on_version_ready(peer, message)
            case Verdict():
                if self.gradients.on_verdict(message, now):
                    for issuer, returned in self._asked_again.settle(message):
                        self._words.give_back(issuer, returned, "refused")
                    self.tally.judged(message)
            case StepClosed():
                self._close(message.step)
            case _ if not self._auditor.handle(peer, message):
                self._out.drop(tensors)
        self._go_on(now)
        for server in self._words.take_unasked():
            self._greet(server, hello=False)

    def _on_lease(self, issuer: NodeId, lease: Lease, now: float) -> None:
        key = lease.tasks[0]
        gives_slot = lease.recompute or key.op == "F"
        if gives_slot:
            assert self._slots is not None
            self._slots.used(issuer, lease, now)
        if not is_validation(lease):
            self._tails.leased(key.step, issuer)
        sent = [task for task in lease.tasks if task.op != "F" and self._has_gradient(task)]
        wants = lease.need_weight_gradient and not sent
        if lease.need_weight_gradient:
            self._asked_again.add(sent, issuer, lease)
        if (
            key.step <= self._closed
            or self._held.is_ending(key, self._place)
            or self._draining
            or len(self._held.leases) >= LEASES_MAX
            or not (
                wants or lease.need_input_gradient or is_validation(lease) or (lease.tasks == (key,) and key.op == "F")
            )
        ):
            self._out.drop(lease.tensors)
            if sent and not self._draining:
                self._words.say_summed(issuer, lease, self._has_gradient)
            elif self._draining or len(self._held.leases) >= LEASES_MAX:
                self._words.give_back(issuer, lease.tasks, "draining" if self._draining else "too many leases")
            return
        recompute = key.op == "B" and forward_of(key) not in self._held.graphs
        held = Held(lease, issuer, now, None, gives_slot, wants, place=self._place)
        self._held.add(held, self._config.batch.segments)
        self._words.leased_anew(key)
        self._want_version(lease.version)
        if recompute and not self._in_segments(lease):
            self._held.fetch_input(lease)

    def _in_segments(self, lease: Lease) -> bool:
        return self._config.batch.segments > 1 and not is_validation(lease)

    def _on_version_ready(self, peer: NodeId, message: VersionReady) -> None:
        """The first such word on a link also says that the shard takes work (again)."""
        if not self._linked[peer]:
            self._linked[peer] = True
            self._words.server_begins(peer, self._held.has_forward)
            self.gradients.resend(peer)
            self._versions.server_ready(peer)
            self._held.fetch_missing_inputs(peer)
            if self._held.graphs or self.gradients.backwards() or self._owed.tickets:
                self._greet(peer, hello=False)
            else:  # there is nothing to name: the slots that it gets are word enough
                self._words.unasked[peer] = None
        if message.version == self._config.version_of(self._closed + 1 + self._config.batch.delay):
            self._want_version(message.version)

    def _want_version(self, number: int) -> None:
        self._versions.want(number, [server for server, ready in self._linked.items() if ready])

    # ---- the device ----------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Sends the sums that are complete, starts the next job if the device is free, asks for work."""
        self._abandon_late(now)
        self._send_complete(now, idle=False)  # before the device begins something that nobody waits for yet
        if not self._is_busy and self._device_ready and not self._room.rests(now):
            self._start_next()
        if not self._is_busy:
            self._send_complete(now, idle=True)
        self._ask_for_work(now)

    def _send_complete(self, now: float, *, idle: bool) -> None:
        if self._draining:
            if idle:
                self.gradients.flush_all(now)
        elif self.gradients.is_summing:
            busy = self._held.busy_steps()
            self.gradients.send_complete(busy, lambda step: self._tails.has_come(step, self.servers), now, idle)

    @property
    def _is_busy(self) -> bool:
        """Whether the device is at a task."""
        return self._held.running is not None or self._owed.running is not None

    def _has_gradient(self, task: TaskId) -> bool:
        """Whether a contribution has the task's weight gradient, or will have it."""
        return self.gradients.has(task) or self._owed.has(task)

    def _start_next(self) -> None:
        """What the plan's order says of all that is ready."""
        ready = [held for held in self._held.leases.values() if self._is_ready(held)]
        assert self._order is not None and self._slots is not None, "a device is set up for a plan"
        ready = self._slots.with_room(ready, [*self._held.graphs, *self._owed.graphs()], self._room.graphs_max)
        best = self._order.next(ready, self._owed, len(self._held.graphs), self._room.graphs_max)
        if isinstance(best, Held):
            self._run(best)
        elif best is not None:
            self._owed.begin(best)
            self._out.compute(best.job)

    def _is_ready(self, held: Held) -> bool:
        return self._versions.has(held.lease.version) and self._held.has_what_it_needs(held)

    def _run(self, held: Held) -> None:
        lease = held.lease
        self._held.begin(held)
        step = lease.tasks[0].step

        def accumulator() -> int | None:
            return self.gradients.accumulator_for(step, lease.version) if held.wants_gradient else None

        if held.tenancy is not None:
            self._out.compute(held.tenancy.job(accumulator, self._out.key))
        else:
            self._out.compute(job_of(held, accumulator(), self._out.key, self._config.compute.split_backward))

    def computed(self, job: Job, result: Any, now: float) -> None:
        if self._auditor.owns(job):
            self._auditor.computed(job, result)
            self._go_on(now)
            return
        match job:
            case Forward() | Backward() | SegmentEnd() if (held := self._held.of_tenant) is not None:
                self._room.succeeded()
                alive = held.lease.tasks[0].step > self._closed and held.place == self._place
                done = self._tenants.computed(job, result, alive, self._draining, now)
                if done is not None:
                    self.tally.done(done)
            case SetUpDevice():
                self._device_ready = self._is_here(job)
                if self._device_ready:
                    self._room.set_up(result)
            case LoadParameters():
                self._versions.loaded(job)
                self._auditor.go_on()
            case Forward():
                self._forward_done(job, result)
            case Evaluate():
                self._evaluated(job, result)
            case Backward():
                self._backward_done(job, job.task, (job.task,), (), result, now)
            case RouteEnd():
                loss_sum, input_gradient = result
                covered = (job.tasks[1], job.tasks[2])
                self._backward_done(job, job.tasks[2], covered, (loss_sum,), input_gradient, now)
            case WeightGradient():
                self._weights_done(now)
            case TakeGradient():
                self.gradients.taken(job, result)
        self._go_on(now)

    def _forward_done(self, job: Forward, output: TensorRef) -> None:
        held = self._held.end()
        if job.task.step <= self._closed or held.place != self._place:
            self._out.drop((output,))
            self._out.compute(DropGraphs((job.task,)))
            return
        self._held.keep_graph(job.task, held.lease.ticket, sent=self._words.reaches(held.lease.back))
        self._room.succeeded()
        self.tally.done(job.task)
        self._words.bring(job.task, held.lease, held.issuer, output)
        self._out.drop((output,))

    def _evaluated(self, job: Evaluate, result: TensorRef | float) -> None:
        """A forward of the validation: its output goes on, or its loss is told. Nothing stays here."""
        held = self._held.end()
        self._room.succeeded()
        if job.task.step > self._closed and held.place == self._place:
            self.tally.done(job.task)
            self._words.bring_evaluated(held.lease, held.issuer, result)
        self._out.drop((result,) if isinstance(result, TensorRef) else ())

    def _backward_done(
        self,
        job: Backward | RouteEnd,
        task: TaskId,
        covered: tuple[TaskId, ...],
        losses: tuple[float, ...],
        input_gradient: TensorRef | None,
        now: float,
    ) -> None:
        held = self._held.end()
        self._room.succeeded()
        alive = task.step > self._closed and held.place == self._place
        if input_gradient is not None:
            if alive:
                self._words.bring(task, held.lease, held.issuer, input_gradient)
            self._out.drop((input_gradient,))
        if not alive:
            if job.weights_later:
                self._out.compute(DropGraphs((task,)))
            return
        self.tally.done(task)
        if job.accumulator is not None and job.weights_later:
            left = WeightGradient(task, job.version, job.accumulator)
            self._owed.add(owed_of(held, left, covered, losses))
            self.gradients.owe(job.accumulator, task.step)
        elif job.accumulator is not None:
            self.gradients.added(job.accumulator, covered, losses, held.lease.ticket, now)
        if held.lease.need_weight_gradient:
            self._words.say_summed(held.issuer, held.lease, self._has_gradient)

    def _weights_done(self, now: float) -> None:
        """The second part of a backward: now its contribution may name it."""
        owed = self._owed.end()
        self._room.succeeded()
        if owed.job.task.step > self._closed and owed.place == self._place:
            self.gradients.added(owed.job.accumulator, owed.tasks, owed.losses, owed.ticket, now, owed=True)

    def _lose_sum(self, step: int) -> tuple[TaskId, ...]:
        """The device failed in the middle of an addition to it: returns the tasks that must be done again."""
        owed = self._owed.take_steps(step, step)
        self._drop_owed(owed)
        return (*self.gradients.lose(step), *(task for each in owed for task in each.lease_tasks))

    def _drop_owed(self, owed: list[Owed]) -> None:
        if owed:
            self._out.compute(DropGraphs(tuple(each.job.task for each in owed)))

    def failed(self, job: Job, reason: str, now: float) -> None:
        """The device could not: what it may have left half added is thrown away, and the work goes back."""
        if self._auditor.owns(job):
            self._auditor.failed(job, reason)
        elif isinstance(job, (Forward, Backward, RouteEnd, SegmentEnd, Evaluate)):
            held = self._held.end()
            if held.tenancy is not None:
                self._out.compute(DropGraphs((forward_of(held.lease.tasks[0]),)))
            step = held.lease.tasks[0].step
            lost = self._lose_sum(step) if held.wants_gradient else ()
            self._device_failed(job, reason, now)
            self._words.give_all_back((*held.lease.tasks, *lost), "device failed")
        elif isinstance(job, WeightGradient):
            owed = self._owed.end()
            self._device_failed(job, reason, now)
            self._words.give_all_back((*owed.lease_tasks, *self._lose_sum(job.task.step)), "device failed")
        elif isinstance(job, LoadParameters):
            self._device_failed(job, reason, now)
            self._versions.failed(job)
            self._return(self._held.take_version(job.version), "device failed")
        elif isinstance(job, TakeGradient):
            self._device_failed(job, reason, now)
            self._words.give_all_back(self.gradients.cannot_take(job), "device failed")
        elif isinstance(job, SetUpDevice) and self._is_here(job):
            self._device_failed(job, reason, now)
        self._go_on(now)

    def _device_failed(self, job: Job, reason: str, now: float) -> None:
        """One line for the owner. Without memory all graphs go, and the device rests before it is asked for more."""
        self._out.count("barnraise_errors_total", component="compute")
        held, rest_s = len(self._held.graphs), 0.0
        if is_out_of_memory(reason) or isinstance(job, SetUpDevice):
            rest_s = self._room.failed(reason, held, now)
        if is_out_of_memory(reason):
            self._held.make_room()
        self._out.log(
            "error", "device failed", job=type(job).__name__, reason=reason, dropped_graphs=held, rests_s=rest_s
        )

    # ---- asking, giving back, forgetting -------------------------------------------------------------------------

    def _ask_for_work(self, now: float) -> None:
        """Gives slots: as many as the device gets to while the next ones come, and has room for."""
        if self._draining or self._plan is None or not self._device_ready or self._room.rests(now):
            return
        if self.gradients.outstanding >= OUTSTANDING_MAX:
            return
        assert self._slots is not None
        servers = [node for node in self.servers if self._linked.get(node)]
        graphs, fits = self._owed.graphs(), self._room.graphs_max
        for server, ready in self._slots.give(servers, self._held, graphs, fits, self._versions.has, now):
            self._words.ask(server, ready)

    def _abandon_late(self, now: float) -> None:
        """A lease that is over on our side never runs: its successor may be at work (state-and-trust 4.5)."""
        for held in self._held.take_late(now):
            self._words.give_back(held.issuer, held.lease.tasks, "late")
            self._out.count("barnraise_node_work_results_total", len(held.lease.tasks), outcome="late")

    def _return(self, leases: list[Held], reason: str) -> None:
        for held in leases:
            self._words.give_back(held.issuer, held.lease.tasks, reason)

    def _close(self, step: int) -> None:
        if step > self._closed:
            self._closed = step
            self._forget_steps(step)
            self._auditor.versions_dropped(self._config.version_of(step + 1))
            self._drop_old_versions()

    def _drop_old_versions(self) -> None:
        """Versions that neither an open step nor an audit needs."""
        audited = self._auditor.version
        oldest = self._config.version_of(self._closed + 1)
        self._versions.drop_below(oldest if audited is None else min(oldest, audited))

    def _forget_steps(self, step: int | None) -> None:
        self._held.forget_steps(step)
        self._words.forget_steps(step)
        self._drop_owed(self._owed.take_steps(0, step))
        self._tails.forget(step)
        self._asked_again.forget(step)
        self.gradients.drop_steps(step)

    # ---- leaving -------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Takes no more work, gives back what has not begun, sends what is summed up."""
        self._draining = True
        self._return(self._held.take_all(), "draining")
        self._go_on(now)

    def stay(self) -> None:
        """It drained to go elsewhere: work is taken again."""
        self._draining = False

    def hand_back(self, reason: str) -> None:
        """The device is gone, now: everything that it had goes back to the servers at once, sums too."""
        self._draining = True
        lost = self.gradients.lose_all()
        self._return(self._held.lose_all(), reason)
        for owed in self._owed.lose_all():
            self._words.give_back(owed.issuer, owed.lease_tasks, reason)
        self._words.give_all_back(lost, reason)

    def device_lost(self, reason: str) -> None:
        """A fresh process has the device. Servers count on graphs and slots that are gone: links begin anew, too."""
        assert self._plan is not None, "a device is set up for a plan"
        draining, stage = self._draining, self._stage
        self.hand_back(reason)
        self._draining, self._stage = draining, -1
        for server in self._linked:
            self._out.add(HangUp(server, f"device lost: {reason}"))
        self.set_plan(self._plan, stage)

    @property
    def drained(self) -> bool:
        return self._draining and not self._is_busy and not self._owed.all() and self.gradients.empty

    # ---- time and reports ----------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        first = self.gradients.wake_at()
        room_at = self._room.rest_until if self._room.reason and self._room.rest_until else None
        others = (room_at, self._held.first_deadline(), self._allowances.wake_at())
        return min((due for due in (first, *others) if due is not None), default=None)

    def wake(self, now: float) -> None:
        self.gradients.wake(now)
        self._allowances.wake(now)
        if self._room.rest_until and not self._room.rests(now):
            self._room.rest_until = 0.0
            if not self._device_ready and self._plan is not None:
                self._out.compute(SetUpDevice(self._written, self._vocabulary, self._plan, self._stage))
        self._go_on(now)

    def waiting_for(self) -> str:
        if self._plan is None:
            return "a stage"
        if self._room.reason and self._room.rest_until:
            return f"the device, which rests: {self._room.reason}"
        if not self._device_ready:
            return "the device to start"
        if not all(self._linked.get(node) for node in self.servers):
            missing = [node[:8] for node in self.servers if not self._linked.get(node)]
            return f"servers {', '.join(missing)} of stage {self._stage}"
        if self._held.running is None and self._held.leases:
            tasks = next(iter(self._held.leases.values())).lease.tasks
            return sentence([Wait(tasks[0].step, f"parameters, inputs or memory for the {work_name(tasks)}")])
        return self._allowances.sentence() or ("" if self._is_busy else "work")

    def given(self) -> dict[str, float]:
        """What the ledgers have accepted of it: tasks, and their tokens."""
        return self.tally.given()

    def counters(self) -> dict[str, float]:
        unsent = self.gradients.unsent_task_count + len(self._owed.all())
        return {**self.tally.totals, "leases": float(len(self._held.all())), "unsent_tasks": float(unsent)}

    def check(self) -> None:
        self.gradients.check()
        self._auditor.check()
        self._room.check()
        self._held.check(self._closed)
        self._owed.check(self._closed, self.gradients.tasks_in_sums())

    def _is_here(self, job: SetUpDevice) -> bool:
        return (job.stage, job.plan.ledger_generation) == (self._stage, self.generation)

    @property
    def generation(self) -> int:
        assert self._plan is not None
        return self._plan.ledger_generation

    @property
    def _config(self) -> RunConfig:
        """The run as it is now."""
        return self._batches.now
