"""The front role: receives a stage's inputs, hands out forwards (and whole route ends), collects input gradients.

It keeps every input and every input gradient of a step until all stages have committed it, so that anybody can redo
anybody's work and a restarted neighbour can fetch instead of rerun (hybrid paper section 3; design section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.jobs import LoadBatch
from node.server.context import StageContext
from node.server.pool import Entry, Grant, Pool
from protocol.ids import NodeId, TaskId, TensorRef
from protocol.messages import Activation, FetchInput, Gradient, Held, InputAnswer, InputGradient, Labels, Lease

DEADLINE_SHARE = 0.8
"""A volunteer gives up at this share of a lease, so that it never works beside its successor (state-and-trust 4.5)."""


@dataclass(slots=True)
class _Step:
    """What this front server has of one open step, by microbatch."""

    inputs: dict[int, TensorRef] = field(default_factory=dict)
    labels: dict[int, TensorRef] = field(default_factory=dict)
    input_gradients: dict[int, TensorRef] = field(default_factory=dict)
    """Of this stage's backwards (or route ends); empty at stage 0, which has none."""
    delivered: dict[int, None] = field(default_factory=dict)
    """Input gradients that the stage before is known to hold."""


class FrontRole:
    """One front server's part of its stage, for the microbatches that the plan gives it."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._steps: dict[int, _Step] = {}
        self.pool = Pool(context.config.limits.lease_s, context.config.stages.collocated)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int) -> None:
        """The step may begin: its units of work are known, and stage 0 loads their data."""
        if step in self._steps:
            return
        context = self._context
        self._steps[step] = _Step()
        for microbatch in range(context.config.batch.microbatches):
            if not context.is_front_of(context.stage, microbatch):
                continue
            forward = self._forward(step, microbatch)
            if context.is_last:
                tasks = (forward, self._loss(step, microbatch), self._backward(step, microbatch))
                entry = Entry(tasks, needs_result=not context.is_first, needs_gradient=True)
            else:
                entry = Entry((forward,), needs_result=True, needs_gradient=False)
            self.pool.add(entry)
            if context.is_first:
                self._out.compute(LoadBatch(step, microbatch, tokens=self._out.key(), labels=self._out.key()))

    def close_step(self, step: int) -> None:
        self.pool.drop_step(step)
        for key in [key for key in self._steps if key <= step]:
            state = self._steps.pop(key)
            self._out.drop((*state.inputs.values(), *state.labels.values(), *state.input_gradients.values()))

    # ---- inputs --------------------------------------------------------------------------------------------------

    def batch_loaded(self, job: LoadBatch, tokens: TensorRef, labels: TensorRef) -> None:
        """Stage 0 has read a microbatch."""
        state = self._steps.get(job.step)
        if state is None or job.microbatch in state.inputs:
            self._out.drop((tokens, labels))
            return
        state.inputs[job.microbatch] = tokens
        state.labels[job.microbatch] = labels
        if not self._context.is_last:
            self._send_labels(job.step, job.microbatch)
        self._supply(job.step, job.microbatch)

    def on_activation(self, message: Activation) -> None:
        """The stage before has computed an input. The first that came stays: everybody downstream saw that one."""
        state = self._steps.get(message.task.step)
        if state is None or message.task.microbatch in state.inputs:
            self._out.drop(message.tensors)
            return
        (state.inputs[message.task.microbatch],) = message.tensors
        self._supply(message.task.step, message.task.microbatch)

    def on_labels(self, message: Labels) -> None:
        state = self._steps.get(message.task.step)
        if state is None or message.task.microbatch in state.labels:
            self._out.drop(message.tensors)
            return
        (state.labels[message.task.microbatch],) = message.tensors
        self._supply(message.task.step, message.task.microbatch)

    def on_fetch_input(self, peer: NodeId, message: FetchInput) -> None:
        """A volunteer has to recompute a forward of somebody who left."""
        state = self._steps.get(message.task.step)
        held = state.inputs.get(message.task.microbatch) if state is not None else None
        self._out.send(
            peer,
            InputAnswer(
                ledger_generation=self._context.generation,
                task=message.task,
                tensors=() if held is None else (held,),
            ),
        )

    # ---- results -------------------------------------------------------------------------------------------------

    def on_input_gradient(self, message: InputGradient) -> None:
        """A backward's input gradient: used at once, whatever becomes of its weight gradient."""
        state = self._steps.get(message.task.step)
        microbatch = message.task.microbatch
        if state is None or self._context.is_first or microbatch in state.input_gradients:
            self._out.drop(message.tensors)
            return
        (state.input_gradients[microbatch],) = message.tensors
        if microbatch not in state.delivered:
            self._send_gradient(message.task.step, microbatch)
        self._input_gradient_safe(message.task.step, microbatch)

    def on_held(self, peer: NodeId, message: Held) -> None:
        """A neighbour says what it holds: outputs (same stage), gradients (stage before), labels (last stage)."""
        told = dict.fromkeys(message.tasks)
        lost: dict[NodeId, None] = {}
        for step, state in self._steps.items():
            if message.kind == "output":
                for microbatch in self._microbatches_with(peer, self._context.stage, back=True):
                    task = self._forward(step, microbatch)
                    if task in told:
                        self.pool.result_held(task)
                    elif message.complete:
                        self.pool.result_lost(task)
            elif message.kind == "gradient":
                for microbatch in self._microbatches_with(peer, self._context.stage - 1, back=True):
                    if self._gradient_task(step, microbatch) in told:
                        state.delivered[microbatch] = None
                        self._input_gradient_safe(step, microbatch)
                    elif message.complete:
                        delivered = microbatch in state.delivered
                        state.delivered.pop(microbatch, None)
                        if microbatch in state.input_gradients:
                            self._send_gradient(step, microbatch)
                        elif delivered and self._context.is_last:
                            self.pool.result_lost(self._forward(step, microbatch))
                        elif delivered:
                            lost[self._context.plan.back_of(self._context.stage, microbatch)] = None
            elif message.kind == "labels" and message.complete:
                last = len(self._context.plan.stages) - 1
                for microbatch in state.labels:
                    missing = self._loss(step, microbatch) not in told
                    if missing and self._context.plan.front_of(last, microbatch) == peer:
                        self._send_labels(step, microbatch)
        for back in lost:
            # We had lost it before, and trusted in that neighbour: now it has to be done again.
            self._tell_safe(back)

    def sync(self, peer: NodeId) -> None:
        """A server is ready: say all that it must know about what this role holds."""
        context = self._context
        if context.stage > 0 and self._is_back(peer, context.stage - 1):
            held = [self._forward(step, mb) for step, state in self._steps.items() for mb in state.inputs]
            self._held(peer, "input", held)
        if self._is_back(peer, context.stage) and not context.is_last:
            self._tell_safe(peer)
        if context.is_last and not context.is_first and any(s.node == peer for s in context.plan.stages[0].fronts):
            held = [self._loss(step, mb) for step, state in self._steps.items() for mb in state.labels]
            self._held(peer, "labels", held)

    def _tell_safe(self, back: NodeId) -> None:
        """Which input gradients need not be computed again."""
        safe = [
            self._backward(step, microbatch)
            for step, state in self._steps.items()
            for microbatch in {**state.input_gradients, **state.delivered}
        ]
        self._held(back, "input_gradient", safe)

    # ---- leases --------------------------------------------------------------------------------------------------

    def give_leases(self, now: float) -> None:
        for grant in self.pool.grant(now):
            self._lease(grant)

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
                fence=entry.fence,
                version=context.config.version_of(task.step),
                deadline_s=context.config.limits.lease_s * DEADLINE_SHARE,
                front=context.node,
                back=context.plan.back_of(context.stage, task.microbatch),
                recompute=False,
                need_input_gradient=context.is_last and entry.needs_result,
                need_weight_gradient=entry.needs_gradient,
                more=grant.more,
                tensors=entry.tensors,
            ),
        )

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _supply(self, step: int, microbatch: int) -> None:
        state = self._steps[step]
        task = self._forward(step, microbatch)
        if not self._context.is_last:
            self.pool.supply(task, (state.inputs[microbatch],))
        elif microbatch in state.inputs and microbatch in state.labels:
            self.pool.supply(task, (state.inputs[microbatch], state.labels[microbatch]))

    def _input_gradient_safe(self, step: int, microbatch: int) -> None:
        if self._context.is_last:
            self.pool.result_held(self._forward(step, microbatch))
        else:
            back = self._context.plan.back_of(self._context.stage, microbatch)
            self._held(back, "input_gradient", [self._backward(step, microbatch)], complete=False)

    def _send_gradient(self, step: int, microbatch: int) -> None:
        context = self._context
        self._out.send(
            context.plan.back_of(context.stage - 1, microbatch),
            Gradient(
                ledger_generation=context.generation,
                task=self._gradient_task(step, microbatch),
                tensors=(self._steps[step].input_gradients[microbatch],),
            ),
        )

    def _send_labels(self, step: int, microbatch: int) -> None:
        last = len(self._context.plan.stages) - 1
        self._out.send(
            self._context.plan.front_of(last, microbatch),
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

    def _is_back(self, peer: NodeId, stage: int) -> bool:
        return any(server.node == peer for server in self._context.plan.stages[stage].backs)

    def _microbatches_with(self, peer: NodeId, stage: int, back: bool) -> list[int]:
        """Microbatches that this server handles here and `peer` (a back server) handles at `stage`."""
        context = self._context
        if stage < 0:
            return []
        return [
            microbatch
            for microbatch in range(context.config.batch.microbatches)
            if context.is_front_of(context.stage, microbatch) and context.plan.back_of(stage, microbatch) == peer
        ]

    def _forward(self, step: int, microbatch: int) -> TaskId:
        return TaskId(step, microbatch, self._context.stage, "F")

    def _backward(self, step: int, microbatch: int) -> TaskId:
        return TaskId(step, microbatch, self._context.stage, "B")

    def _loss(self, step: int, microbatch: int) -> TaskId:
        return TaskId(step, microbatch, len(self._context.plan.stages), "L")

    def _gradient_task(self, step: int, microbatch: int) -> TaskId:
        """The backward of the stage before, whose output gradient is this stage's input gradient."""
        return TaskId(step, microbatch, self._context.stage - 1, "B")

    def check(self) -> None:
        self.pool.check()
        assert all(step > self._context.closed for step in self._steps), "a closed step is kept (L3)"
