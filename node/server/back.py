"""The back role: collects a stage's outputs, passes them on, receives output gradients, hands out backwards.

It remembers who computed what (the paper's linked list, here `Entry.preferred`) and offers the backward to the same
volunteer first, because it still has the graph. If that one is gone, another gets the gradient, fetches the input
from the front server, recomputes, and does the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from node.server.context import RUN_SLOTS_MAX, Place, StageContext, named
from node.server.front import DEADLINE_SHARE
from node.server.pool import Entry, Grant, Pool
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import Activation, FetchInput, Forget, Gradient, Held, InputAnswer, Lease, Output, Ready
from protocol.run.audits import Kept
from protocol.run.course import VALIDATION_FIRST
from protocol.schedule.live import backward_rank


@dataclass(slots=True)
class _Step:
    """What this back server has of one open step."""

    places: dict[Place, None]
    """Those whose output it keeps."""
    outputs: dict[Place, TensorRef] = field(default_factory=dict)
    delivered: dict[Place, None] = field(default_factory=dict)
    """Outputs that the next visit is known to hold."""
    safe: dict[Place, None] = field(default_factory=dict)
    """Input gradients that the visit's front is known to hold, or to have handed on."""
    output_gradients: dict[Place, TensorRef] = field(default_factory=dict)
    brought_by: dict[Place, NodeId] = field(default_factory=dict)
    """Who computed the outputs."""


class BackRole:
    """One back server's part of its stage. Where routes end there is nothing to relay: that work is the front's."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._steps: dict[int, _Step] = {}
        self._asked: dict[TaskId, dict[NodeId, None]] = {}
        """Who waits for an output gradient that is not here."""
        limits, collocated = context.config.limits, context.config.stages.collocated
        next_fence, rank = context.tickets.next_fence, partial(context.rank, backward_rank)
        self.pool = Pool(context.result_s, collocated, limits.lease_s, next_fence, context.transfer_s, rank)

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        return (self.pool,)

    def add_slots(self, node: NodeId, message: Ready) -> None:
        """A volunteer takes more backwards that it has to recompute."""
        self.pool.add_slots(node, message.slots, RUN_SLOTS_MAX)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def has_opened(self, step: int) -> bool:
        return step in self._steps

    def open_step(self, step: int) -> None:
        if step in self._steps:
            return
        places = dict.fromkeys(self._context.back_places(step))
        self._steps[step] = _Step(places)
        for microbatch, position, segment in places:
            if microbatch >= VALIDATION_FIRST or segment:
                continue
            backward = TaskId(step, microbatch, position, "B")
            self.pool.add(Entry((backward,), needs_result=position > 0, needs_gradient=True))

    def close_step(self, step: int) -> None:
        self.pool.drop_step(step)
        for key in [key for key in self._steps if key <= step]:
            state = self._steps.pop(key)
            self._out.drop((*state.outputs.values(), *state.output_gradients.values()))
        for task in [task for task in self._asked if task.step <= step]:
            del self._asked[task]

    # ---- forward -------------------------------------------------------------------------------------------------

    def wants(self, task: TaskId) -> bool:
        """Whether a forward's output has not come yet."""
        state = self._steps.get(task.step)
        place = task.microbatch, task.position, task.segment
        return state is not None and place in state.places and place not in state.outputs

    def on_output(self, peer: NodeId, message: Output) -> None:
        """A volunteer's forward result. The first that came stays."""
        state = self._steps.get(message.task.step)
        place = message.task.microbatch, message.task.position, message.task.segment
        if state is None or place not in state.places or place in state.outputs:
            self._out.drop(message.tensors)
            self.on_graph_of(peer, message.task)
            return
        (state.outputs[place],) = message.tensors
        state.brought_by[place] = peer
        self.on_graph_of(peer, message.task)
        if place not in state.delivered:
            self._send_activation(message.task.step, place)
        self._output_safe(message.task.step, place)

    def on_graph_of(self, peer: NodeId, task: TaskId) -> None:
        """`peer` has done a forward; with the last of its segments it has the whole graph."""
        last = self._context.segments_of(task.microbatch) - 1
        if task.microbatch < VALIDATION_FIRST and task.segment == last:
            self.on_graphs(peer, (task.whole,))

    def on_graphs(self, peer: NodeId, forwards: tuple[TaskId, ...]) -> None:
        """`peer` has the graphs of these forwards. Those that it will not be asked for only fill its memory.

        A forward whose output nobody has (any more) will be done again, perhaps by somebody else.
        """
        useless = []
        for task in forwards:
            place = task.microbatch, task.position
            if self._context.plan.back_of(task.step, *place) == self._context.node:
                state = self._steps.get(task.step)
                done = state is not None and all(
                    (*place, segment) in state.outputs or (*place, segment) in state.delivered
                    for segment in range(self._context.segments_of(task.microbatch))
                )
                if not done or not self.pool.prefer(TaskId(task.step, *place, "B"), peer):
                    useless.append(task)
        if useless:
            self._out.send(peer, Forget(ledger_generation=self._context.generation, tasks=tuple(useless)))

    def on_gradient(self, message: Gradient) -> None:
        """The next visit's input gradient: the backward can begin, with the last segment if there are several."""
        state, task = self._steps.get(message.task.step), message.task
        place = task.microbatch, task.position, task.segment
        if state is None or place in state.output_gradients:
            self._out.drop(message.tensors)
            return
        (state.output_gradients[place],) = message.tensors
        for peer in self._asked.pop(task, {}):
            self._answer(peer, task, state.output_gradients[place])
        count = self._context.segments_of(task.microbatch)
        here = [state.output_gradients.get((*place[:2], segment)) for segment in range(count)]
        if (last := here[-1]) is not None:
            self.pool.supply(task.whole, (last,), complete=None not in here)

    def on_fetch_gradient(self, peer: NodeId, message: FetchInput) -> None:
        """Who goes backward by segments asks for what did not come with the lease. What we have not it gets later."""
        task = message.task
        held = self.output_gradient_of(task)
        if held is None and self._context.in_window(task.step):
            self._asked.setdefault(task, {})[peer] = None
        self._answer(peer, task, held)

    def _answer(self, peer: NodeId, task: TaskId, held: TensorRef | None) -> None:
        tensors = () if held is None else (held,)
        self._out.send(peer, InputAnswer(ledger_generation=self._context.generation, task=task, tensors=tensors))

    def output_gradient_of(self, task: TaskId) -> TensorRef | None:
        """What a backward's visit was given, if it is here."""
        state = self._steps.get(task.step)
        return None if state is None else state.output_gradients.get((task.microbatch, task.position, task.segment))

    def kept_of(self, task: TaskId) -> dict[Kept, tuple[TensorRef, str]]:
        """What is held of a backward's visit, for an audit: what it is, and who brought it."""
        state = self._steps.get(task.step)
        place = task.microbatch, task.position, 0
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
                microbatch, position, segment = place
                if message.kind == "input_gradient" and plan.front_of(step, microbatch, position) == peer:
                    task = TaskId(step, microbatch, position, "B")
                    if TaskId(step, microbatch, position, "B", segment) in told:
                        state.safe[place] = None
                        parts = range(self._context.segments_of(microbatch))
                        if all((microbatch, position, part) in state.safe for part in parts):
                            self.pool.result_held(task)
                    elif message.complete and position > 0:
                        state.safe.pop(place, None)
                        self.pool.result_lost(task)
                elif message.kind == "input" and plan.front_of(step, microbatch, position + 1) == peer:
                    if TaskId(step, microbatch, position + 1, "F", segment) in told:
                        state.delivered[place] = None
                        self._output_safe(step, place)
                    elif message.complete:
                        delivered = place in state.delivered
                        state.delivered.pop(place, None)
                        if place in state.outputs:
                            self._send_activation(step, place)
                        elif delivered:
                            lost[plan.front_of(step, microbatch, position)] = None
                            self.pool.withdraw(TaskId(step, microbatch, position, "B"))
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
                TaskId(step, microbatch, position, "B", segment)
                for step, state in self._steps.items()
                for microbatch, position, segment in state.output_gradients
            ]
            self._held(peer, "gradient", held)

    def _tell_safe(self, front: NodeId) -> None:
        """Which outputs need not be computed again."""
        safe = [
            TaskId(step, microbatch, position, "F", segment)
            for step, state in self._steps.items()
            for microbatch, position, segment in {**state.outputs, **state.delivered}
        ]
        self._held(front, "output", safe)

    # ---- leases --------------------------------------------------------------------------------------------------

    def give_leases(self, now: float) -> list[Grant]:
        grants = self.pool.grant(now) if self._context.tickets.open else []
        for grant in grants:
            self._lease(grant)
        for node, task in self.pool.take_withdrawn():
            forward = TaskId(task.step, task.microbatch, task.position, "F")
            self._out.send(node, Forget(ledger_generation=self._context.generation, tasks=(forward,)))
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
        microbatch, position, segment = place
        front = self._context.plan.front_of(step, microbatch, position)
        self._held(front, "output", [TaskId(step, microbatch, position, "F", segment)], complete=False)

    def _send_activation(self, step: int, place: Place) -> None:
        context = self._context
        microbatch, position, segment = place
        self._out.send(
            context.plan.front_of(step, microbatch, position + 1),
            Activation(
                ledger_generation=context.generation,
                task=TaskId(step, microbatch, position + 1, "F", segment),
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
