"""The volunteer role: takes leases, computes, sends results at once and weight gradients as contributions.

    slots ──▶ leases ──▶ (parameters, inputs fetched) ──▶ ready ──▶ the device, one job at a time ──▶ results, sums

Older steps come first, and within a step backwards before forwards: they free memory and somebody waits for them.
Nothing here decides what counts; a lease that is late, doubled or pointless costs time and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from node.jobs import (
    Backward,
    DropGraphs,
    DropParameters,
    Forward,
    Job,
    LoadParameters,
    RouteEnd,
    SetUpDevice,
    TakeGradient,
)
from node.outbox import Outbox
from node.volunteer.gradients import OUTSTANDING_MAX, Gradients
from node.volunteer.screening import check_from_server
from node.waits import Wait, sentence, work_name
from protocol.errors import RemoteProtocolError
from protocol.ids import NodeId, TaskId, TensorRef
from protocol.machine import HangUp
from protocol.messages import (
    FetchInput,
    FetchParameters,
    Forget,
    InputAnswer,
    InputGradient,
    Lease,
    LeaseReturned,
    Output,
    Parameters,
    Ready,
    StepClosed,
    Verdict,
    VersionReady,
    Work,
)
from protocol.plan import Plan
from protocol.run import RunConfig

BACK_SLOTS = 2
"""Backwards of others (to be recomputed) asked for ahead from each back server: one runs, one is on its way."""
LEASES_MAX = 64
"""Leases held at once; more are given back (a server with that many for us is not ours)."""


@dataclass(slots=True)
class _Held:
    """A lease that has not run yet."""

    lease: Lease
    issuer: NodeId
    received: float
    input: TensorRef | None
    """What the forward part needs; None while a recomputation waits for it, or where the graph is kept."""
    gives_slot: bool
    """Whether it used up one of the slots that we gave."""
    wants_gradient: bool
    place: int
    """Which of our places (stage and ledgers) it belongs to: work for an earlier one is thrown away."""


@dataclass(slots=True)
class _Version:
    """Parameters that are being fetched, or are with the device."""

    parts: dict[int, TensorRef] = field(default_factory=dict)
    loading: LoadParameters | None = None
    loaded: bool = False


class VolunteerMachine:
    """One device that works for one stage. Hosted by `node.core.NodeMachine`, also on servers that compute."""

    def __init__(self, config: RunConfig, vocabulary: int, out: Outbox, incarnation: int) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._out = out
        self._plan: Plan | None = None
        self._stage = -1
        self._place = 0
        """Counts the changes of stage or ledgers."""
        self._servers: tuple[NodeId, ...] = ()
        """Servers of our stage, in shard order."""
        self._linked: dict[NodeId, bool] = {}
        """Those with a live link, and whether they have said that they are ready."""
        self._given: dict[NodeId, int] = {}
        """Slots that we gave to a server and that it has not used."""
        self._closed = -1
        self._versions: dict[int, _Version] = {}
        self._leases: dict[TaskId, _Held] = {}
        self._graphs: dict[TaskId, None] = {}
        self._running: _Held | None = None
        self._device_ready = False
        self._draining = False
        self._expect_more: dict[int, bool] = {}
        self._asked_again: dict[TaskId, tuple[NodeId, tuple[TaskId, ...]]] = {}
        """Tasks that were leased to us while their weight gradient waits for a verdict: (issuer, the lease's tasks)."""
        limits = config.limits
        self.gradients = Gradients(out, incarnation, limits.contribution_tasks, limits.linger_s)
        self.totals = {"microbatches": 0.0, "tokens": 0.0, "accepted": 0.0, "rejected": 0.0}

    # ---- plan and links ------------------------------------------------------------------------------------------

    def set_plan(self, plan: Plan, stage: int) -> bool:
        """Works for `stage` from here on; returns whether that is news.

        Then everything of another stage, or of other ledgers, is forgotten, and links have to be told again.
        """
        same = (
            self._plan is not None
            and self._stage == stage
            and plan.ledger_generation == self._plan.ledger_generation
            and self._servers == tuple(server.node for server in plan.stages[stage].servers)
        )
        self._plan = plan
        if same:
            return False
        self._forget_steps(None)
        self._drop_versions(None)
        self._closed = -1
        self._place += 1
        self._stage = stage
        self._servers = tuple(server.node for server in plan.stages[stage].servers)
        self._linked = {}
        self._given = {}
        self.gradients.reset(plan.ledger_generation, self._servers)
        self._device_ready = False
        self._out.compute(SetUpDevice(self._config, self._vocabulary, plan, stage))
        return True

    @property
    def stage(self) -> int:
        return self._stage

    def link_up(self, peer: NodeId) -> None:
        if peer in self._servers:
            self._linked[peer] = False
            self._given[peer] = 0
            self._greet(peer, hello=True)

    def _greet(self, server: NodeId, hello: bool) -> None:
        """Asks whether the shard is ready, and says which graphs are still here."""
        graphs = tuple(self._graphs)
        self._out.send(server, Ready(ledger_generation=self._generation, hello=hello, slots=0, graphs=graphs))

    def link_down(self, peer: NodeId) -> None:
        """Its leases go on: the work is worth as much as before, and results go to other servers too."""
        self._linked.pop(peer, None)
        self._given.pop(peer, None)

    # ---- messages ------------------------------------------------------------------------------------------------

    def handle(self, peer: NodeId, message: Work, now: float) -> None:
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        if self._plan is None or message.ledger_generation != self._plan.ledger_generation or peer not in self._linked:
            self._out.drop(tensors)
            return
        try:
            check_from_server(self._config, self._plan, self._stage, peer, message)
        except RemoteProtocolError as error:
            self._out.drop(tensors)
            self._out.count("barnraise_transport_rejected_messages_total", reason=error.reason)
            self._out.log("warning", "message refused", peer=peer, reason=error.reason, detail=error.detail)
            self._out.add(HangUp(peer, str(error)))
            return
        match message:
            case Lease():
                self._on_lease(peer, message, now)
            case Forget():
                self._on_forget(message)
            case InputAnswer():
                self._on_input(message)
            case Parameters():
                self._on_parameters(message)
            case VersionReady():
                self._on_version_ready(peer, message)
            case Verdict():
                if self.gradients.on_verdict(message):
                    self._settle_asked_again(message)
                    outcome = "accepted" if message.accepted else "rejected"
                    self.totals[outcome] += len(message.tasks)
                    self._out.count("barnraise_node_work_results_total", len(message.tasks), outcome=outcome)
            case StepClosed():
                self._close(message.step)
            case _:
                self._out.drop(tensors)
        self._go_on(now)

    def _on_lease(self, issuer: NodeId, lease: Lease, now: float) -> None:
        key = lease.tasks[0]
        gives_slot = lease.recompute or key.op == "F"
        if gives_slot:
            self._given[issuer] = max(0, self._given[issuer] - 1)
        sent = [task for task in lease.tasks if task.op != "F" and self.gradients.has(task)]
        wants = lease.need_weight_gradient and not sent
        if lease.need_weight_gradient:
            self._asked_again.update((task, (issuer, lease.tasks)) for task in sent)
        running = self._running is not None and self._running.lease.tasks[0] == key
        if (
            key.step <= self._closed
            or running
            or self._draining
            or len(self._leases) >= LEASES_MAX
            or not (wants or lease.need_input_gradient or (lease.tasks == (key,) and key.op == "F"))
        ):
            self._out.drop(lease.tensors)
            if self._draining or len(self._leases) >= LEASES_MAX:
                self._give_back(issuer, lease.tasks, "draining" if self._draining else "too many leases")
            return
        before = self._leases.pop(key, None)
        if before is not None:
            self._drop_held(before)
        recompute = key.op == "B" and _forward_of(key) not in self._graphs
        held = _Held(lease, issuer, now, None, gives_slot, wants, self._place)
        if key.op == "F":
            held.input = lease.tensors[0]
        self._leases[key] = held
        self._expect_more[key.step] = lease.more
        self._want_version(lease.version)
        if recompute:
            self._out.send(lease.front, FetchInput(ledger_generation=self._generation, task=_forward_of(key)))

    def _settle_asked_again(self, verdict: Verdict) -> None:
        """A refusal and the new lease that follows it come by two links: the lease may have come first, and was taken
        for one of work that is done. Its issuer counts on us, so it hears that it must ask again."""
        returned: dict[tuple[NodeId, tuple[TaskId, ...]], None] = {}
        for task in verdict.tasks:
            asked = self._asked_again.pop(task, None)
            if asked is not None and not verdict.accepted:
                returned[asked] = None
        for issuer, tasks in returned:
            self._give_back(issuer, tasks, "refused")

    def _on_forget(self, message: Forget) -> None:
        """Graphs that nobody will ask for make room, unless a lease for one is here already."""
        running = None if self._running is None else self._running.lease.tasks[0]
        tasks = tuple(
            task
            for task in message.tasks
            if task in self._graphs and task != running and _backward_of(task) not in self._leases
        )
        for task in tasks:
            del self._graphs[task]
        if tasks:
            self._out.compute(DropGraphs(tasks))

    def _on_input(self, message: InputAnswer) -> None:
        held = self._leases.get(_backward_of(message.task))
        if held is None or held.input is not None:
            self._out.drop(message.tensors)
        elif message.tensors:
            held.input = message.tensors[0]
        else:
            del self._leases[held.lease.tasks[0]]
            self._drop_held(held)
            self._give_back(held.issuer, held.lease.tasks, "the input is gone")

    def _on_parameters(self, message: Parameters) -> None:
        version = self._versions.get(message.version)
        known = version is None or version.loading is not None or message.shard in version.parts
        if version is None or known or not message.tensors or not 0 <= message.shard < len(self._servers):
            self._out.drop(message.tensors)
            return
        version.parts[message.shard] = message.tensors[0]
        if len(version.parts) == len(self._servers):
            parts = tuple(version.parts[shard] for shard in range(len(self._servers)))
            version.parts = {}
            version.loading = LoadParameters(message.version, parts)
            self._out.compute(version.loading)

    def _on_version_ready(self, peer: NodeId, message: VersionReady) -> None:
        """The first such word on a link also says that the shard takes work (again)."""
        if not self._linked[peer]:
            self._linked[peer] = True
            self.gradients.resend(peer)
            shard = self._servers.index(peer)
            for number, version in self._versions.items():
                if version.loading is None and shard not in version.parts:
                    self._fetch(peer, number)
            self._greet(peer, hello=False)
        if message.version == self._config.version_of(self._closed + 1 + self._config.batch.delay):
            self._want_version(message.version)

    # ---- parameters ----------------------------------------------------------------------------------------------

    def _want_version(self, number: int) -> None:
        if number in self._versions:
            return
        self._versions[number] = _Version()
        for server, ready in self._linked.items():
            if ready:
                self._fetch(server, number)

    def _fetch(self, server: NodeId, version: int) -> None:
        self._out.send(server, FetchParameters(ledger_generation=self._generation, version=version))

    def _drop_versions(self, below: int | None) -> None:
        for number in [n for n in self._versions if below is None or n < below]:
            version = self._versions.pop(number)
            self._out.drop(version.parts.values())
            if version.loading is not None:
                self._out.compute(DropParameters(number))

    # ---- the device ----------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Starts the next job if the device is free, sends what is complete if it is not needed, asks for work."""
        self._abandon_late(now)
        if self._running is None and self._device_ready:
            ready = [held for held in self._leases.values() if self._is_ready(held)]
            if ready:
                self._run(min(ready, key=_urgency))
        if self._running is None:
            busy = [key.step for key in self._leases if key.op == "B" or len(self._leases[key].lease.tasks) > 1]
            if self._draining:
                self.gradients.flush_all()
            else:
                self.gradients.idle(busy, self._expect_more, now)
        self._ask_for_work()

    def _is_ready(self, held: _Held) -> bool:
        version = self._versions.get(held.lease.version)
        if version is None or not version.loaded:
            return False
        key = held.lease.tasks[0]
        return held.input is not None or (key.op == "B" and _forward_of(key) in self._graphs)

    def _run(self, held: _Held) -> None:
        lease = held.lease
        key = lease.tasks[0]
        del self._leases[key]
        self._running = held
        step = key.step
        accumulator = self.gradients.accumulator_for(step, lease.version) if held.wants_gradient else None
        input_gradient = self._out.key() if lease.need_input_gradient else None
        if len(lease.tasks) > 1:
            assert held.input is not None
            labels = lease.tensors[1]
            self._out.compute(RouteEnd(lease.tasks, lease.version, held.input, labels, input_gradient, accumulator))
        elif key.op == "F":
            assert held.input is not None
            self._out.compute(Forward(key, lease.version, held.input, self._out.key()))
        else:
            if held.input is None:
                del self._graphs[_forward_of(key)]
            self._out.compute(Backward(key, lease.version, lease.tensors[0], held.input, input_gradient, accumulator))

    def computed(self, job: Job, result: Any, now: float) -> None:
        match job:
            case SetUpDevice():
                here = (self._stage, self._generation)
                self._device_ready = (job.stage, job.plan.ledger_generation) == here
            case LoadParameters():
                self._out.drop(job.shards)
                version = self._versions.get(job.version)
                if version is not None and version.loading == job:
                    version.loaded = True
            case Forward():
                self._forward_done(job, result)
            case Backward():
                self._backward_done(job.task, (job.task,), (), result, job.accumulator)
            case RouteEnd():
                loss_sum, input_gradient = result
                covered = (job.tasks[1], job.tasks[2])
                self._backward_done(job.tasks[2], covered, (loss_sum,), input_gradient, job.accumulator)
            case TakeGradient():
                self.gradients.taken(job, result)
            case _:
                pass
        self._go_on(now)

    def _forward_done(self, job: Forward, output: TensorRef) -> None:
        held, self._running = self._running, None
        assert held is not None
        self._drop_held(held)
        if job.task.step <= self._closed or held.place != self._place:
            self._out.drop((output,))
            self._out.compute(DropGraphs((job.task,)))
            return
        self._graphs[job.task] = None
        self._count(job.task)
        self._out.send(
            held.lease.back,
            Output(ledger_generation=self._generation, task=job.task, fence=held.lease.fence, tensors=(output,)),
        )
        self._out.drop((output,))

    def _backward_done(
        self,
        task: TaskId,
        covered: tuple[TaskId, ...],
        losses: tuple[float, ...],
        input_gradient: TensorRef | None,
        accumulator: int | None,
    ) -> None:
        held, self._running = self._running, None
        assert held is not None
        self._drop_held(held)
        alive = task.step > self._closed and held.place == self._place
        if input_gradient is not None:
            if alive:
                self._out.send(
                    held.lease.front,
                    InputGradient(
                        ledger_generation=self._generation,
                        task=task,
                        fence=held.lease.fence,
                        tensors=(input_gradient,),
                    ),
                )
            self._out.drop((input_gradient,))
        if alive:
            self._count(task)
            if accumulator is not None:
                self.gradients.added(accumulator, covered, losses)

    def failed(self, job: Job, reason: str, now: float) -> None:
        """The device could not: what it may have left half added is thrown away, and the work goes back."""
        if isinstance(job, (Forward, Backward, RouteEnd)):
            held, self._running = self._running, None
            assert held is not None
            self._drop_held(held)
            step = held.lease.tasks[0].step
            lost = self.gradients.lose(step) if held.wants_gradient else ()
            self._out.log("error", "device failed", job=type(job).__name__, reason=reason)
            self._out.count("barnraise_errors_total", component="compute")
            for server in self._linked:
                self._give_back(server, (*held.lease.tasks, *lost), "device failed")
        elif isinstance(job, LoadParameters):
            self._out.drop(job.shards)
            self._out.log("error", "parameters cannot be used", version=job.version, reason=reason)
            self._out.count("barnraise_errors_total", component="compute")
            version = self._versions.get(job.version)
            if version is not None and version.loading == job:
                del self._versions[job.version]  # asked for again with the next lease that needs it
        self._go_on(now)

    # ---- asking, giving back, forgetting -------------------------------------------------------------------------

    def _ask_for_work(self) -> None:
        """Gives slots: so many forwards that graphs and queue stay within the plan's limit, two recomputations."""
        if self._draining or self._plan is None or not self._device_ready:
            return
        if self.gradients.outstanding >= OUTSTANDING_MAX:
            return
        fronts = [server.node for server in self._plan.stages[self._stage].fronts if self._linked.get(server.node)]
        backs = [server.node for server in self._plan.stages[self._stage].backs if self._linked.get(server.node)]
        from_front = sum(held.lease.tasks[0].op == "F" for held in self._leases.values())
        if self._running is not None and self._running.lease.tasks[0].op == "F":
            from_front += 1
        ends_here = self._stage == self._plan.last_position
        room_max = BACK_SLOTS if ends_here else self._plan.in_flight_max
        room = room_max - len(self._graphs) - from_front
        for node in fronts:
            # Each may fill the room alone: slots that lie with a front server without work would starve the others.
            self._give_slots(node, room - self._given[node])
        if not ends_here:
            for node in backs:
                held_count = sum(h.issuer == node and h.gives_slot for h in self._leases.values())
                self._give_slots(node, BACK_SLOTS - held_count - self._given[node])

    def _give_slots(self, node: NodeId, slots: int) -> None:
        if slots > 0:
            self._given[node] += slots
            self._out.send(node, Ready(ledger_generation=self._generation, hello=False, slots=slots))

    def _abandon_late(self, now: float) -> None:
        """A lease that is over on our side never runs: its successor may be at work (state-and-trust 4.5)."""
        for key in [k for k, held in self._leases.items() if now >= held.received + held.lease.deadline_s]:
            held = self._leases.pop(key)
            self._drop_held(held)
            self._give_back(held.issuer, held.lease.tasks, "late")
            self._out.count("barnraise_node_work_results_total", len(held.lease.tasks), outcome="late")

    def _give_back(self, server: NodeId, tasks: tuple[TaskId, ...], reason: str) -> None:
        if tasks and server in self._linked:
            self._out.send(server, LeaseReturned(ledger_generation=self._generation, tasks=tasks, reason=reason))

    def _drop_held(self, held: _Held) -> None:
        own = () if held.input is None or held.input in held.lease.tensors else (held.input,)
        self._out.drop((*held.lease.tensors, *own))

    def _close(self, step: int) -> None:
        if step > self._closed:
            self._closed = step
            self._forget_steps(step)
            self._drop_versions(self._config.version_of(step + 1))

    def _forget_steps(self, step: int | None) -> None:
        for key in [key for key in self._leases if step is None or key.step <= step]:
            self._drop_held(self._leases.pop(key))
        graphs = tuple(task for task in self._graphs if step is None or task.step <= step)
        if graphs:
            self._out.compute(DropGraphs(graphs))
            for task in graphs:
                del self._graphs[task]
        for key_step in [s for s in self._expect_more if step is None or s <= step]:
            del self._expect_more[key_step]
        for task in [task for task in self._asked_again if step is None or task.step <= step]:
            del self._asked_again[task]
        self.gradients.drop_steps(step)

    # ---- leaving -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes no more work, gives back what has not begun, sends what is summed up."""
        self._draining = True
        for key in list(self._leases):
            held = self._leases.pop(key)
            self._drop_held(held)
            self._give_back(held.issuer, held.lease.tasks, "draining")
        if self._running is None:
            self.gradients.flush_all()

    @property
    def drained(self) -> bool:
        return self._draining and self._running is None and self.gradients.empty

    # ---- time and reports ----------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        times = [held.received + held.lease.deadline_s for held in self._leases.values()]
        flush = self.gradients.wake_at()
        if flush is not None:
            times.append(flush)
        return min(times, default=None)

    def wake(self, now: float) -> None:
        self.gradients.wake(now)
        self._go_on(now)

    def waiting_for(self) -> str:
        if self._plan is None:
            return "a stage"
        if not all(self._linked.get(node) for node in self._servers):
            missing = [node[:8] for node in self._servers if not self._linked.get(node)]
            return f"servers {', '.join(missing)} of stage {self._stage}"
        if self._running is None and self._leases:
            held = next(iter(self._leases.values()))
            step = held.lease.tasks[0].step
            return sentence([Wait(step, f"parameters or inputs for the {work_name(held.lease.tasks)}")])
        return "" if self._running is not None else f"work of stage {self._stage}"

    def counters(self) -> dict[str, float]:
        leases = len(self._leases) + (self._running is not None)
        return {**self.totals, "leases": float(leases), "unsent_tasks": float(self.gradients.unsent_task_count)}

    def check(self) -> None:
        self.gradients.check()
        for key in self._leases:
            assert key.step > self._closed, f"a lease of closed step {key.step} is kept"
        for task in self._graphs:
            assert task.step > self._closed, f"a graph of closed step {task.step} is kept (L3)"

    @property
    def _generation(self) -> int:
        assert self._plan is not None
        return self._plan.ledger_generation

    def _count(self, task: TaskId) -> None:
        self.totals["microbatches"] += 1
        if task.op == "B":
            tokens = self._config.batch.samples * self._config.model.context
            self.totals["tokens"] += tokens
            self._out.count("barnraise_node_tokens_total", tokens)


def _urgency(held: _Held) -> tuple[int, bool, TaskId]:
    """Older steps first; within a step backwards and route ends before forwards; then by number."""
    key = held.lease.tasks[0]
    return key.step, key.op == "F" and len(held.lease.tasks) == 1, key


def _forward_of(task: TaskId) -> TaskId:
    return TaskId(task.step, task.microbatch, task.position, "F", task.segment, task.slice)


def _backward_of(task: TaskId) -> TaskId:
    return TaskId(task.step, task.microbatch, task.position, "B", task.segment, task.slice)
