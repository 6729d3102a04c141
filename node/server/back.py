"""The back role: collects a stage's outputs, passes them on, receives output gradients, hands out backwards.

It remembers who computed what (the paper's linked list, here `Entry.preferred`) and offers the backward to the same
volunteer first, because it still has the graph. If that one is gone, another gets the gradient, fetches the input
from the front server, recomputes, and does the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.server.context import RUN_SLOTS_MAX, Place, StageContext, named
from node.server.front import DEADLINE_SHARE
from node.server.pool import Entry, Grant, Pool
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import Activation, Forget, Gradient, Held, Lease, Output, Ready
from protocol.run.audits import Kept
from protocol.run.course import VALIDATION_FIRST
from protocol.schedule.live import backward_rank


@dataclass(slots=True)
class _Step:
    """What this back server has of one open step, by visit."""

    places: dict[Place, None]
    """The visits whose output it keeps."""
    outputs: dict[Place, TensorRef] = field(default_factory=dict)
    delivered: dict[Place, None] = field(default_factory=dict)
    """Outputs that the next visit is known to hold."""
    output_gradients: dict[Place, TensorRef] = field(default_factory=dict)
    brought_by: dict[Place, NodeId] = field(default_factory=dict)
    """Who computed the outputs."""


class BackRole:
    """One back server's part of its stage. Where routes end there is nothing to relay: that work is the front's."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._steps: dict[int, _Step] = {}
        limits, collocated = context.config.limits, context.config.stages.collocated
        next_fence = context.tickets.next_fence
        chunks = context.plan.course.chunks_of(context.stage)

        def rank(task: TaskId) -> tuple[int, ...]:
            chunk = context.plan.chunk_at(task.step, task.microbatch, task.position)
            return backward_rank(context.plan.order, task, chunks.index(chunk))

        self.pool = Pool(context.result_s, collocated, limits.lease_s, next_fence, context.transfer_s, rank)

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        return (self.pool,)

    def add_slots(self, node: NodeId, message: Ready) -> None:
        """A volunteer takes more backwards that it has to recompute."""
        self.pool.add_slots(node, message.slots, RUN_SLOTS_MAX)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int) -> None:
        if step in self._steps:
            return
        places = dict.fromkeys(self._context.back_places(step))
        self._steps[step] = _Step(places)
        for microbatch, position in places:
            if microbatch >= VALIDATION_FIRST:
                continue
            backward = TaskId(step, microbatch, position, "B")
            self.pool.add(Entry((backward,), needs_result=position > 0, needs_gradient=True))

    def close_step(self, step: int) -> None:
        self.pool.drop_step(step)
        for key in [key for key in self._steps if key <= step]:
            state = self._steps.pop(key)
            self._out.drop((*state.outputs.values(), *state.output_gradients.values()))

    # ---- forward -------------------------------------------------------------------------------------------------

    def wants(self, task: TaskId) -> bool:
        """Whether a forward's output has not come yet."""
        state = self._steps.get(task.step)
        place = task.microbatch, task.position
        return state is not None and place in state.places and place not in state.outputs

    def on_output(self, peer: NodeId, message: Output) -> None:
        """A volunteer's forward result. The first that came stays."""
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position
        if state is None or place not in state.places or place in state.outputs:
            self._out.drop(message.tensors)
            if message.task.microbatch < VALIDATION_FIRST:
                self.on_graphs(peer, (message.task,))
            return
        (state.outputs[place],) = message.tensors
        state.brought_by[place] = peer
        if message.task.microbatch < VALIDATION_FIRST:
            self.on_graphs(peer, (message.task,))
        if place not in state.delivered:
            self._send_activation(message.task.step, place)
        self._output_safe(message.task.step, place)

    def on_graphs(self, peer: NodeId, forwards: tuple[TaskId, ...]) -> None:
        """`peer` has the graphs of these forwards. Those that it will not be asked for only fill its memory.

        A forward whose output nobody has (any more) will be done again, perhaps by somebody else.
        """
        useless = []
        for task in forwards:
            place = task.microbatch, task.position
            if self._context.plan.back_of(task.step, *place) == self._context.node:
                state = self._steps.get(task.step)
                done = state is not None and (place in state.outputs or place in state.delivered)
                if not done or not self.pool.prefer(TaskId(task.step, *place, "B"), peer):
                    useless.append(task)
        if useless:
            self._out.send(peer, Forget(ledger_generation=self._context.generation, tasks=tuple(useless)))

    def on_gradient(self, message: Gradient) -> None:
        """The next visit's input gradient: the backward can begin."""
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position
        if state is None or place in state.output_gradients:
            self._out.drop(message.tensors)
            return
        (state.output_gradients[place],) = message.tensors
        self.pool.supply(message.task, message.tensors)

    def kept_of(self, task: TaskId) -> dict[Kept, tuple[TensorRef, str]]:
        """What is held of a backward's visit, for an audit: what it is, and who brought it."""
        state = self._steps.get(task.step)
        place = task.microbatch, task.position
        kept: dict[Kept, tuple[TensorRef, str]] = {}
        if state is not None and place in state.output_gradients:
            kept["output_gradient"] = state.output_gradients[place], ""
        if state is not None and place in state.outputs:
            kept["output"] = state.outputs[place], state.brought_by[place]
        return kept

    def on_held(self, peer: NodeId, message: Held) -> None:
        """A neighbour says what it holds: inputs (next visit), input gradients (front of the same visit)."""
        plan = self._context.plan
        told = dict.fromkeys(message.tasks)
        lost: dict[NodeId, None] = {}
        for step, state in self._steps.items():
            for place in named(state.places, step, message, ahead=-1 if message.kind == "input" else 0):
                microbatch, position = place
                if message.kind == "input_gradient" and plan.front_of(step, microbatch, position) == peer:
                    task = TaskId(step, microbatch, position, "B")
                    if task in told:
                        self.pool.result_held(task)
                    elif message.complete and position > 0:
                        self.pool.result_lost(task)
                elif message.kind == "input" and plan.front_of(step, microbatch, position + 1) == peer:
                    if TaskId(step, microbatch, position + 1, "F") in told:
                        state.delivered[place] = None
                        self._output_safe(step, place)
                    elif message.complete:
                        delivered = place in state.delivered
                        state.delivered.pop(place, None)
                        if place in state.outputs:
                            self._send_activation(step, place)
                        elif delivered:
                            lost[plan.front_of(step, microbatch, position)] = None
        for front in lost:
            # We had lost it before, and trusted in that neighbour: now it has to be done again.
            self._tell_safe(front)

    def sync(self, peer: NodeId) -> None:
        """A server is ready: say all that it must know about what this role holds."""
        neighbours = self._context.plan.neighbours_of(self._context.stage)
        if peer in neighbours.own_fronts:
            self._tell_safe(peer)
        if peer in neighbours.fronts_after:
            held = [
                TaskId(step, microbatch, position, "B")
                for step, state in self._steps.items()
                for microbatch, position in state.output_gradients
            ]
            self._held(peer, "gradient", held)

    def _tell_safe(self, front: NodeId) -> None:
        """Which outputs need not be computed again."""
        safe = [
            TaskId(step, microbatch, position, "F")
            for step, state in self._steps.items()
            for microbatch, position in {**state.outputs, **state.delivered}
        ]
        self._held(front, "output", safe)

    # ---- leases --------------------------------------------------------------------------------------------------

    def give_leases(self, now: float) -> list[Grant]:
        grants = self.pool.grant(now) if self._context.tickets.open else []
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
                front=context.plan.front_of(task.step, task.microbatch, task.position),
                back=context.node,
                recompute=not grant.has_graph,
                need_input_gradient=entry.needs_result,
                need_weight_gradient=entry.needs_gradient,
                tensors=entry.tensors,
            ),
        )

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _output_safe(self, step: int, place: Place) -> None:
        front = self._context.plan.front_of(step, *place)
        self._held(front, "output", [TaskId(step, *place, "F")], complete=False)

    def _send_activation(self, step: int, place: Place) -> None:
        context = self._context
        microbatch, position = place
        self._out.send(
            context.plan.front_of(step, microbatch, position + 1),
            Activation(
                ledger_generation=context.generation,
                task=TaskId(step, microbatch, position + 1, "F"),
                tensors=(self._steps[step].outputs[place],),
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

    def check(self) -> None:
        self.pool.check()
        assert all(step > self._context.closed for step in self._steps), "a closed step is kept (L3)"
