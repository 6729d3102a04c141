"""The front role: receives a stage's inputs, hands out forwards (and whole route ends), collects input gradients.

Forwards of the validation go the same way, in a pool of their own: nobody's gradient waits for them.

It keeps every input and every input gradient of a step until all stages have committed it, so that anybody can redo
anybody's work and a restarted neighbour can fetch instead of rerun (hybrid paper section 3; design section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from node.machine.jobs import LoadBatch
from node.server.context import RUN_SLOTS_MAX, Place, StageContext, named
from node.server.pool import Entry, Grant, Pool
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import (
    Activation,
    Evaluated,
    FetchInput,
    Gradient,
    Held,
    InputAnswer,
    InputGradient,
    Labels,
    Lease,
    Ready,
    Validated,
)
from protocol.run.audits import Kept
from protocol.run.changes import mixtures
from protocol.run.course import VALIDATION_FIRST
from protocol.run.plan import Plan
from protocol.schedule.live import backward_rank, forward_rank

DEADLINE_SHARE = 0.8
"""A volunteer gives up at this share of a lease, so that it never works beside its successor (state-and-trust 4.5)."""


@dataclass(slots=True)
class _Step:
    """What this front server has of one open step."""

    places: dict[Place, None]
    """Those whose input it keeps."""
    inputs: dict[Place, TensorRef] = field(default_factory=dict)
    labels: dict[int, TensorRef] = field(default_factory=dict)
    """By microbatch: of routes that begin here, and of those that end here."""
    input_gradients: dict[Place, TensorRef] = field(default_factory=dict)
    """Of the visits' backwards (or route ends); a route's beginning has none."""
    brought_by: dict[Place, NodeId] = field(default_factory=dict)
    """Who computed them."""
    delivered: dict[Place, None] = field(default_factory=dict)
    """Input gradients that the visit before is known to hold."""
    safe: dict[Place, None] = field(default_factory=dict)
    """Outputs that the visit's back is known to hold, or to have handed on."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of the validation, by microbatch, where its route ends here."""


class FrontRole:
    """One front server's part of its stage, for the microbatches that the plan gives it."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._steps: dict[int, _Step] = {}
        self._asked: dict[TaskId, dict[NodeId, None]] = {}
        """Who waits for an input that is not here."""
        limits, collocated = context.config.limits, context.config.stages.collocated
        next_fence = context.tickets.next_fence
        terms = context.result_s, collocated, limits.lease_s, next_fence, context.transfer_s
        positions = context.plan.course.graph_positions(context.stage)
        self.pools = {position: Pool(*terms, partial(context.rank, forward_rank)) for position in positions}
        """Forwards, by position: a slot for one is none for another."""
        self._in_order: tuple[Plan | None, tuple[Pool, ...]] = (None, ())
        """The training pools, and the plan that they are in order by."""
        self.ends = Pool(*terms, partial(context.rank, backward_rank))
        """Route ends, which leave no graph behind and never wait for one."""
        self.validation = Pool(*terms)
        """Forwards that nobody trains on; those of a route's end are its loss, too."""

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        """Route ends come first: they make room. The validation comes last."""
        return (*self.training_pools, self.validation)

    @property
    def training_pools(self) -> tuple[Pool, ...]:
        """Those whose work leads to weight gradients; forwards as the plan's order goes through a stage's visits."""
        plan, pools = self._in_order
        if plan is not self._context.plan:  # asked several times at every input
            plan = self._context.plan
            deepest_first = plan.order.forward.deepest_first
            pools = (self.ends, *(self.pools[place] for place in sorted(self.pools, reverse=deepest_first)))
            self._in_order = plan, pools
        return pools

    def pool_of(self, task: TaskId) -> Pool:
        """Where a forward, or the first task of a route's end, waits for somebody who does it."""
        if task.microbatch >= VALIDATION_FIRST:
            return self.validation
        return self.ends if self._ends_at(task.step, task.microbatch, task.position) else self.pools[task.position]

    def add_slots(self, node: NodeId, message: Ready) -> None:
        """A volunteer takes more leases."""
        self.ends.add_slots(node, message.slots, RUN_SLOTS_MAX)
        self.validation.add_slots(node, message.validation_slots, RUN_SLOTS_MAX)
        for position, slots in message.graph_slots:
            self.pools[position].add_slots(node, slots, self._context.plan.graphs_max(self._context.stage))

    # ---- steps ---------------------------------------------------------------------------------------------------

    def has_opened(self, step: int) -> bool:
        return step in self._steps

    def open_step(self, step: int) -> None:
        """The step may begin: its units of work are known, and stage 0 loads their data."""
        if step in self._steps:
            return
        places = dict.fromkeys(self._context.front_places(step))
        self._steps[step] = _Step(places)
        for microbatch, position, segment in places:
            if segment:
                continue
            forward = TaskId(step, microbatch, position, "F")
            if microbatch >= VALIDATION_FIRST:
                ends = self._ends_at(step, microbatch, position)
                tasks: tuple[TaskId, ...] = (forward, self._loss(step, microbatch)) if ends else (forward,)
                entry = Entry(tasks, needs_result=True, needs_gradient=False)
            elif self._ends_at(step, microbatch, position):
                tasks = (forward, self._loss(step, microbatch), TaskId(step, microbatch, position, "B"))
                entry = Entry(tasks, needs_result=position > 0, needs_gradient=True)
            else:
                entry = Entry((forward,), needs_result=True, needs_gradient=False)
            self.pool_of(forward).add(entry)
            if position == 0:
                tokens, labels = self._out.key(), self._out.key()
                drawn_by, counts = mixtures(self._context.plan.changes, step), self._context.batches.counts
                self._out.compute(LoadBatch(step, microbatch, tokens, labels, drawn_by, counts))

    def close_step(self, step: int) -> None:
        for pool in self.all_pools:
            pool.drop_step(step)
        for key in [key for key in self._steps if key <= step]:
            state = self._steps.pop(key)
            self._out.drop((*state.inputs.values(), *state.labels.values(), *state.input_gradients.values()))
        for task in [task for task in self._asked if task.step <= step]:
            del self._asked[task]

    # ---- inputs --------------------------------------------------------------------------------------------------

    def batch_loaded(self, job: LoadBatch, tokens: TensorRef, labels: TensorRef) -> None:
        """Stage 0 has read a microbatch."""
        state = self._steps.get(job.step)
        place = job.microbatch, 0, 0
        if state is None or place in state.inputs:
            self._out.drop((tokens, labels))
            return
        state.inputs[place] = tokens
        state.labels[job.microbatch] = labels
        self._supply(job.step, place)
        if self._end_of(job.step, job.microbatch) != self._context.node:
            self._send_labels(job.step, job.microbatch)
        elif not self._ends_at(job.step, job.microbatch, 0):
            # After a restart the end's input, sent again, may be here before the labels are.
            self._supply(job.step, (job.microbatch, self._context.plan.length(job.step, job.microbatch) - 1, 0))

    def on_activation(self, message: Activation) -> None:
        """The visit before has computed an input. The first that came stays: everybody downstream saw that one."""
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position, message.task.segment
        if state is None or place in state.inputs:
            self._out.drop(message.tensors)
            return
        (state.inputs[place],) = message.tensors
        self._supply(message.task.step, place)

    def on_labels(self, message: Labels) -> None:
        state = self._steps.get(message.task.step)
        if state is None or message.task.microbatch in state.labels:
            self._out.drop(message.tensors)
            return
        (state.labels[message.task.microbatch],) = message.tensors
        self._supply(message.task.step, (message.task.microbatch, message.task.position - 1, 0))

    def on_fetch_input(self, peer: NodeId, message: FetchInput) -> None:
        """A volunteer has to recompute a forward of somebody who left, or has begun one of which not all had come. What
        we have not (again) it gets when we do."""
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position, message.task.segment
        held = state.inputs.get(place) if state is not None else None
        if held is None and self._context.in_window(message.task.step):
            self._asked.setdefault(message.task, {})[peer] = None
        self._answer(peer, message.task, held)

    def _answer(self, peer: NodeId, task: TaskId, held: TensorRef | None) -> None:
        tensors = () if held is None else (held,)
        self._out.send(peer, InputAnswer(ledger_generation=self._context.generation, task=task, tensors=tensors))

    # ---- results -------------------------------------------------------------------------------------------------

    def wants(self, task: TaskId) -> bool:
        """Whether a backward's input gradient has not come yet."""
        state = self._steps.get(task.step)
        place = task.microbatch, task.position, task.segment
        return state is not None and task.position > 0 and place not in state.input_gradients

    def on_input_gradient(self, peer: NodeId, message: InputGradient) -> None:
        """A backward's input gradient: used at once, whatever becomes of its weight gradient."""
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position, message.task.segment
        if state is None or message.task.position == 0 or place in state.input_gradients:
            self._out.drop(message.tensors)
            return
        (state.input_gradients[place],) = message.tensors
        state.brought_by[place] = peer
        if place not in state.delivered:
            self._send_gradient(message.task.step, place)
        self._input_gradient_safe(message.task.step, place)

    def on_evaluated(self, message: Evaluated) -> None:
        """The loss of a microbatch of the validation. The first that came stays; the decider hears of it."""
        state = self._steps.get(message.task.step)
        microbatch = message.task.microbatch
        if state is None or microbatch in state.losses:
            return
        state.losses[microbatch] = message.loss_sum
        self.validation.result_held(TaskId(message.task.step, microbatch, message.task.position - 1, "F"))
        self._send_loss(message.task, message.loss_sum)

    def _send_loss(self, task: TaskId, loss_sum: float) -> None:
        generation = self._context.generation
        self._out.send(
            self._context.plan.decider, Validated(ledger_generation=generation, task=task, loss_sum=loss_sum)
        )

    def input_of(self, task: TaskId) -> TensorRef | None:
        """What a forward's visit was given, if it is here."""
        state = self._steps.get(task.step)
        return None if state is None else state.inputs.get((task.microbatch, task.position, task.segment))

    def kept_of(self, task: TaskId) -> dict[Kept, tuple[TensorRef, str]]:
        """What is held of a backward's visit, for an audit: what it is, and who brought it."""
        state = self._steps.get(task.step)
        place = task.microbatch, task.position, 0
        if state is None or place not in state.inputs:
            return {}
        kept: dict[Kept, tuple[TensorRef, str]] = {"input": (state.inputs[place], "")}
        if self._ends_at(task.step, *place[:2]) and task.microbatch in state.labels:
            kept["labels"] = state.labels[task.microbatch], ""
        if place in state.input_gradients:
            kept["input_gradient"] = state.input_gradients[place], state.brought_by[place]
        return kept

    def on_held(self, peer: NodeId, message: Held) -> None:
        """A neighbour says what it holds: outputs (same visit), gradients (the visit before), labels (route's end)."""
        told = dict.fromkeys(message.tasks)
        lost: dict[NodeId, None] = {}
        plan = self._context.plan
        for step, state in self._steps.items():
            if message.kind == "output":
                for place in self._visited(state, step, message):
                    microbatch, position, segment = place
                    ends = self._ends_at(step, microbatch, position)
                    if ends or plan.back_of(step, microbatch, position) != peer:
                        continue
                    task = TaskId(step, microbatch, position, "F")
                    if TaskId(step, microbatch, position, "F", segment) in told:
                        state.safe[place] = None
                        parts = range(self._context.segments_of(microbatch))
                        if all((microbatch, position, part) in state.safe for part in parts):
                            self.pool_of(task).result_held(task)
                    elif message.complete:
                        state.safe.pop(place, None)
                        self.pool_of(task).result_lost(task)
            elif message.kind == "gradient":
                for place in named(state.places, step, message, ahead=1):
                    microbatch, position, _ = place
                    if position > 0 and plan.back_of(step, microbatch, position - 1) == peer:
                        self._gradient_told(step, state, place, told, message.complete, lost)
            elif message.kind == "labels" and message.complete:
                for microbatch in state.labels:
                    missing = self._loss(step, microbatch) not in told
                    ours = plan.front_of(step, microbatch, 0) == self._context.node
                    if missing and ours and self._end_of(step, microbatch) == peer:
                        self._send_labels(step, microbatch)
        for back in lost:
            # We had lost it before, and trusted in that neighbour: now it has to be done again.
            self._tell_safe(back)

    def _visited(self, state: _Step, step: int, message: Held) -> list[Place]:
        """What leaves the visits that this server keeps the input of, as far as the message is about it."""
        if not message.complete:
            told = ((task.microbatch, task.position, task.segment) for task in message.tasks if task.step == step)
            return [place for place in told if (*place[:2], 0) in state.places]
        visits = ((microbatch, position) for microbatch, position, segment in state.places if not segment)
        return [(*visit, segment) for visit in visits for segment in range(self._context.segments_of(visit[0]))]

    def _gradient_told(
        self, step: int, state: _Step, place: Place, told: dict[TaskId, None], complete: bool, lost: dict[NodeId, None]
    ) -> None:
        """The back server before a visit has, or has not, the visit's input gradient."""
        microbatch, position, segment = place
        if TaskId(step, microbatch, position - 1, "B", segment) in told:
            state.delivered[place] = None
            self._input_gradient_safe(step, place)
        elif complete:
            delivered = place in state.delivered
            state.delivered.pop(place, None)
            if place in state.input_gradients:
                self._send_gradient(step, place)
            elif delivered and self._ends_at(step, microbatch, position):
                self.pool_of(TaskId(step, microbatch, position, "F")).result_lost(
                    TaskId(step, microbatch, position, "F")
                )
            elif delivered:
                lost[self._context.plan.back_of(step, microbatch, position)] = None

    def sync(self, peer: NodeId) -> None:
        """A server is ready: say all that it must know about what this role holds."""
        context = self._context
        neighbours = context.plan.neighbours_of(context.stage)
        if peer == context.plan.decider:
            for step, state in self._steps.items():
                for microbatch, loss_sum in state.losses.items():
                    self._send_loss(self._loss(step, microbatch), loss_sum)
        if peer in neighbours.backs_before:
            held = [
                TaskId(step, microbatch, position, "F", segment)
                for step, state in self._steps.items()
                for microbatch, position, segment in state.inputs
                if position > 0
            ]
            self._held(peer, "input", held)
        if peer in neighbours.own_backs:
            self._tell_safe(peer)
        if peer in neighbours.label_sources:
            held = [self._loss(step, mb) for step, state in self._steps.items() for mb in state.labels]
            self._held(peer, "labels", held)

    def _tell_safe(self, back: NodeId) -> None:
        """Which input gradients need not be computed again."""
        safe = [
            TaskId(step, microbatch, position, "B", segment)
            for step, state in self._steps.items()
            for microbatch, position, segment in {**state.input_gradients, **state.delivered}
            if not self._ends_at(step, microbatch, position)
        ]
        self._held(back, "input_gradient", safe)

    # ---- leases --------------------------------------------------------------------------------------------------

    def give_leases(self, now: float) -> list[Grant]:
        if not self._context.tickets.open:
            return []
        grants = [grant for pool in self.all_pools for grant in pool.grant(now)]
        for grant in grants:
            self._lease(grant)
        return grants

    def _lease(self, grant: Grant) -> None:
        context = self._context
        entry = grant.entry
        task = entry.tasks[0]
        assert entry.tensors is not None
        self._out.send(
            grant.worker,
            Lease(
                ledger_generation=context.generation,
                tasks=entry.tasks,
                ticket=context.tickets.issue(grant.worker, entry.tasks[-1], entry.fence),
                version=context.config.version_of(task.step),
                deadline_s=context.result_s * DEADLINE_SHARE,
                front=context.node,
                back=context.plan.back_of(task.step, task.microbatch, task.position),
                recompute=False,
                need_input_gradient=entry.tasks[-1].op == "B" and entry.needs_result,
                need_weight_gradient=entry.needs_gradient,
                tensors=entry.tensors,
            ),
        )

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _supply(self, step: int, place: Place) -> None:
        state = self._steps[step]
        microbatch, position, segment = place
        task = TaskId(step, microbatch, position, "F", segment)
        if place in state.inputs:
            for peer in self._asked.pop(task, {}):
                self._answer(peer, task, state.inputs[place])
        count = self._context.input_segments(microbatch, position)
        here = [state.inputs.get((microbatch, position, part)) for part in range(count)]
        ends = self._ends_at(step, microbatch, position)
        if here[0] is not None and (not ends or microbatch in state.labels):
            tensors = (here[0], state.labels[microbatch]) if ends else (here[0],)
            self.pool_of(task).supply(task.whole, tensors, complete=None not in here)

    def _input_gradient_safe(self, step: int, place: Place) -> None:
        microbatch, position, segment = place
        if self._ends_at(step, microbatch, position):
            state = self._steps[step]
            places = [(microbatch, position, part) for part in range(self._context.segments_of(microbatch))]
            if all(each in state.input_gradients or each in state.delivered for each in places):
                self.ends.result_held(TaskId(step, microbatch, position, "F"))
        else:
            back = self._context.plan.back_of(step, microbatch, position)
            self._held(back, "input_gradient", [TaskId(step, microbatch, position, "B", segment)], complete=False)

    def _send_gradient(self, step: int, place: Place) -> None:
        """To the visit before, whose output gradient is this visit's input gradient."""
        microbatch, position, segment = place
        self._out.send(
            self._context.plan.back_of(step, microbatch, position - 1),
            Gradient(
                ledger_generation=self._context.generation,
                task=TaskId(step, microbatch, position - 1, "B", segment),
                tensors=(self._steps[step].input_gradients[place],),
            ),
        )

    def _send_labels(self, step: int, microbatch: int) -> None:
        self._out.send(
            self._end_of(step, microbatch),
            Labels(
                ledger_generation=self._context.generation,
                task=self._loss(step, microbatch),
                tensors=(self._steps[step].labels[microbatch],),
            ),
        )

    def _held(self, peer: NodeId, kind: str, tasks: list[TaskId], complete: bool = True) -> None:
        message = Held(
            ledger_generation=self._context.generation,
            kind=kind,  # type: ignore[arg-type]
            tasks=tuple(tasks),
            complete=complete,
        )
        self._out.send(peer, message)

    def _ends_at(self, step: int, microbatch: int, position: int) -> bool:
        return self._context.plan.ends_at(step, microbatch, position)

    def _end_of(self, step: int, microbatch: int) -> NodeId:
        """The front server where the microbatch's loss is computed."""
        plan = self._context.plan
        return plan.front_of(step, microbatch, plan.length(step, microbatch))

    def _loss(self, step: int, microbatch: int) -> TaskId:
        return TaskId(step, microbatch, self._context.plan.length(step, microbatch), "L")

    def check(self) -> None:
        for pool in self.all_pools:
            pool.check()
        assert all(step > self._context.closed for step in self._steps), "a closed step is kept (L3)"
