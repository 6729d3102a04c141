"""The back role: collects a stage's outputs, passes them on, receives output gradients, hands out backwards.

It remembers who computed what (the paper's linked list, here `Entry.preferred`) and offers the backward to the same
volunteer first, because it still has the graph. If that one is gone, another gets the gradient, fetches the input
from the front server, recomputes, and does the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.server.context import StageContext
from node.server.front import DEADLINE_SHARE
from node.server.pool import Entry, Grant, Pool
from protocol.ids import NodeId, TaskId, TensorRef
from protocol.messages import Activation, Forget, Gradient, Held, Lease, Output


@dataclass(slots=True)
class _Step:
    """What this back server has of one open step, by microbatch."""

    outputs: dict[int, TensorRef] = field(default_factory=dict)
    delivered: dict[int, None] = field(default_factory=dict)
    """Outputs that the next stage is known to hold."""
    output_gradients: dict[int, TensorRef] = field(default_factory=dict)


class BackRole:
    """One back server's part of its stage. The last stage's has nothing to relay: its work begins at the front."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._steps: dict[int, _Step] = {}
        self.pool = Pool(context.config.limits.lease_s, context.config.stages.collocated)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int) -> None:
        context = self._context
        if context.is_last or step in self._steps:
            return
        self._steps[step] = _Step()
        for microbatch in range(context.config.batch.microbatches):
            if context.is_back_of(context.stage, microbatch):
                backward = self._backward(step, microbatch)
                self.pool.add(Entry((backward,), needs_result=not context.is_first, needs_gradient=True))

    def close_step(self, step: int) -> None:
        self.pool.drop_step(step)
        for key in [key for key in self._steps if key <= step]:
            state = self._steps.pop(key)
            self._out.drop((*state.outputs.values(), *state.output_gradients.values()))

    # ---- forward -------------------------------------------------------------------------------------------------

    def on_output(self, peer: NodeId, message: Output) -> None:
        """A volunteer's forward result. The first that came stays."""
        state = self._steps.get(message.task.step)
        microbatch = message.task.microbatch
        if state is None or microbatch in state.outputs:
            self._out.drop(message.tensors)
            self.on_graphs(peer, (message.task,))
            return
        (state.outputs[microbatch],) = message.tensors
        self.on_graphs(peer, (message.task,))
        if microbatch not in state.delivered:
            self._send_activation(message.task.step, microbatch)
        self._output_safe(message.task.step, microbatch)

    def on_graphs(self, peer: NodeId, forwards: tuple[TaskId, ...]) -> None:
        """`peer` has the graphs of these forwards. Those that it will not be asked for only fill its memory.

        A forward whose output nobody has (any more) will be done again, perhaps by somebody else.
        """
        useless = []
        for task in forwards:
            if self._context.is_back_of(self._context.stage, task.microbatch):
                state = self._steps.get(task.step)
                done = state is not None and (task.microbatch in state.outputs or task.microbatch in state.delivered)
                if not done or not self.pool.prefer(self._backward(task.step, task.microbatch), peer):
                    useless.append(task)
        if useless:
            self._out.send(peer, Forget(ledger_generation=self._context.generation, tasks=tuple(useless)))

    def on_gradient(self, message: Gradient) -> None:
        """The next stage's input gradient: the backward can begin."""
        state = self._steps.get(message.task.step)
        microbatch = message.task.microbatch
        if state is None or microbatch in state.output_gradients:
            self._out.drop(message.tensors)
            return
        (state.output_gradients[microbatch],) = message.tensors
        self.pool.supply(message.task, message.tensors)

    def on_held(self, peer: NodeId, message: Held) -> None:
        """A neighbour says what it holds: inputs (next stage), input gradients (front of the same stage)."""
        context = self._context
        told = dict.fromkeys(message.tasks)
        lost: dict[NodeId, None] = {}
        for step, state in self._steps.items():
            for microbatch in range(context.config.batch.microbatches):
                if not context.is_back_of(context.stage, microbatch):
                    continue
                if message.kind == "input_gradient" and context.plan.front_of(context.stage, microbatch) == peer:
                    task = self._backward(step, microbatch)
                    if task in told:
                        self.pool.result_held(task)
                    elif message.complete and not context.is_first:
                        self.pool.result_lost(task)
                elif message.kind == "input" and context.plan.front_of(context.stage + 1, microbatch) == peer:
                    if TaskId(step, microbatch, context.stage + 1, "F") in told:
                        state.delivered[microbatch] = None
                        self._output_safe(step, microbatch)
                    elif message.complete:
                        delivered = microbatch in state.delivered
                        state.delivered.pop(microbatch, None)
                        if microbatch in state.outputs:
                            self._send_activation(step, microbatch)
                        elif delivered:
                            lost[context.plan.front_of(context.stage, microbatch)] = None
        for front in lost:
            # We had lost it before, and trusted in that neighbour: now it has to be done again.
            self._tell_safe(front)

    def sync(self, peer: NodeId) -> None:
        """A server is ready: say all that it must know about what this role holds."""
        context = self._context
        if context.is_last:
            return
        if any(server.node == peer for server in context.plan.stages[context.stage].fronts):
            self._tell_safe(peer)
        if any(server.node == peer for server in context.plan.stages[context.stage + 1].fronts):
            held = [self._backward(step, mb) for step, state in self._steps.items() for mb in state.output_gradients]
            self._held(peer, "gradient", held)

    def _tell_safe(self, front: NodeId) -> None:
        """Which outputs need not be computed again."""
        safe = [
            TaskId(step, microbatch, self._context.stage, "F")
            for step, state in self._steps.items()
            for microbatch in {**state.outputs, **state.delivered}
        ]
        self._held(front, "output", safe)

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
                front=context.plan.front_of(context.stage, task.microbatch),
                back=context.node,
                recompute=not grant.has_graph,
                need_input_gradient=entry.needs_result,
                need_weight_gradient=entry.needs_gradient,
                more=grant.more,
                tensors=entry.tensors,
            ),
        )

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _output_safe(self, step: int, microbatch: int) -> None:
        front = self._context.plan.front_of(self._context.stage, microbatch)
        self._held(front, "output", [TaskId(step, microbatch, self._context.stage, "F")], complete=False)

    def _send_activation(self, step: int, microbatch: int) -> None:
        context = self._context
        self._out.send(
            context.plan.front_of(context.stage + 1, microbatch),
            Activation(
                ledger_generation=context.generation,
                task=TaskId(step, microbatch, context.stage + 1, "F"),
                tensors=(self._steps[step].outputs[microbatch],),
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

    def _backward(self, step: int, microbatch: int) -> TaskId:
        return TaskId(step, microbatch, self._context.stage, "B")

    def check(self) -> None:
        self.pool.check()
        assert all(step > self._context.closed for step in self._steps), "a closed step is kept (L3)"
