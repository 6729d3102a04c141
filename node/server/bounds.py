"""What no honest peer of a stage can say: tasks that are not of this run or stage, shapes that cannot be, absurd slots.

The codec has checked types and lengths, `check_sender` checks places; this needs the run and the plan. What passes here
may still be late, doubled or a lie.
"""

from __future__ import annotations

from node.server.context import RUN_SLOTS_MAX, StageContext
from node.server.tickets import KEY_BYTES
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TaskId, TensorRef
from protocol.messages import (
    Activation,
    Commit,
    Contribute,
    Decision,
    Evaluated,
    FetchInput,
    Gradient,
    Held,
    InputGradient,
    Labels,
    LeaseReturned,
    Output,
    Ready,
    StageKey,
    Summed,
    Validated,
    Work,
)
from protocol.run.course import VALIDATION_FIRST
from protocol.run.run import LEARNING_RATE_MAX
from protocol.run.segments import segment_ranges

_OP_OF: dict[type[Work], str] = {
    Output: "F", FetchInput: "F", Activation: "F", InputGradient: "B", Gradient: "B", Labels: "L",
    Evaluated: "L", Validated: "L",
}  # fmt: skip
"""Messages to a server about one task, and what sort of task it is."""


_OF_SEGMENTS = (Output, FetchInput, Activation, InputGradient, Gradient, Held)
"""Messages that may be about one segment of a sample; all others are about whole ones."""


def _check_slots(context: StageContext, message: Ready) -> None:
    """What an honest worker asks for: what it can hold in memory at once, at positions that the stage is visited at."""
    for count in (message.slots, message.validation_slots):
        if not 0 <= count <= RUN_SLOTS_MAX:
            raise RemoteProtocolError("decode", f"{count} slots, where 0 to {RUN_SLOTS_MAX} are possible")
    if not message.graph_slots:
        return
    graphs_max = context.plan.graphs_max(context.stage)
    positions = context.plan.course.graph_positions(context.stage)
    for position, slots in message.graph_slots:
        if position not in positions:
            raise RemoteProtocolError("decode", f"slots for position {position}, where no forward of this stage is")
        if not 0 <= slots <= graphs_max:
            raise RemoteProtocolError("decode", f"{slots} slots, where 0 to {graphs_max} are possible")


def check_bounds(context: StageContext, message: Work) -> None:
    """Raises `RemoteProtocolError` ("decode", "role" or "shape") for what no honest peer of this stage can say."""
    single = getattr(message, "task", None)
    tasks: tuple[TaskId, ...] = getattr(message, "tasks", ()) if single is None else (single,)
    if isinstance(message, Ready):
        tasks = message.graphs
        _check_slots(context, message)
    for task in tasks:
        parts = 1
        if isinstance(message, _OF_SEGMENTS):
            whole = task.op == "F" and not isinstance(message, Output | Held)  # it is about an input
            parts = context.input_segments(task.microbatch, task.position if whole else 1)
        known = context.batches.has(task.step, task.microbatch)
        if not known or task.segment >= parts or task.slice:
            raise RemoteProtocolError("decode", f"{task} is no task of this run")
        if task.microbatch >= VALIDATION_FIRST and task.op not in ("F", "L"):
            raise RemoteProtocolError("decode", f"{task} is no task of this run")
        end = context.plan.length(task.step, task.microbatch)
        if not 0 <= task.position <= end or (task.position == end) != (task.op == "L"):
            raise RemoteProtocolError("decode", f"{task} is no task of this run")
    if isinstance(message, (Ready, Summed, Output, InputGradient, Evaluated, FetchInput, LeaseReturned, Contribute)):
        for task in tasks:
            if context.plan.stage_at(task.step, task.microbatch, task.position) != context.stage:
                raise RemoteProtocolError("role", f"{task} is not of stage {context.stage}")
    if isinstance(message, (Evaluated, Validated)) and single is not None:
        _check_loss(single, message.loss_sum)
    if single is not None and type(message) in _OP_OF and not isinstance(message, Validated):
        _check_owner(context, message, single)
    if isinstance(message, StageKey) and len(message.key) != KEY_BYTES:
        raise RemoteProtocolError("decode", f"a stage's key of {len(message.key)} bytes")
    if isinstance(message, (Decision, Commit)) and not 0.0 <= message.clip_factor <= 1.0:
        raise RemoteProtocolError("decode", f"a clip factor of {message.clip_factor}: clipping only makes smaller")
    if isinstance(message, (Decision, Commit)):
        rate = message.learning_rate
        if not (0.0 <= rate <= LEARNING_RATE_MAX or rate == -1.0):
            raise RemoteProtocolError("decode", f"a learning rate of {rate}, which no run can have")
    if single is None:  # what follows is about tensors of one task
        return
    config = context.config
    shape = (config.batch.samples, config.model.context, config.model.hidden)
    if context.segments_of(single.microbatch) > 1 and type(message) in _OF_SEGMENTS:
        first, end = segment_ranges(config)[single.segment]
        shape = shape[0], end - first, shape[2]
    if isinstance(message, Output):
        _check_shape(message.tensors, shape, config.wire.output_form(message.task.position == 0))
    elif isinstance(message, InputGradient):
        task = message.task
        ends = context.plan.ends_at(task.step, task.microbatch, task.position)
        _check_shape(message.tensors, shape, config.wire.input_gradient_form(ends))
    elif isinstance(message, (Activation, Gradient)):
        _check_shape(message.tensors, shape, config.wire.activations_down)
    elif isinstance(message, Labels):
        _check_shape(message.tensors, shape[:2], "int32")


def _check_loss(task: TaskId, loss_sum: float) -> None:
    """Of the validation alone: what is trained on comes with its gradient."""
    if task.microbatch < VALIDATION_FIRST or task.op != "L" or loss_sum < 0:
        raise RemoteProtocolError("decode", f"a loss sum of {loss_sum} for {task}")


def _check_owner(context: StageContext, message: Work, task: TaskId) -> None:
    fetches_gradient = isinstance(message, FetchInput) and task.op == "B"
    if task.op != _OP_OF[type(message)] and not fetches_gradient:
        raise RemoteProtocolError("decode", f"{type(message).__name__} of {task}")
    to_back = isinstance(message, (Output, Gradient)) or fetches_gradient
    owner = context.plan.back_of if to_back else context.plan.front_of
    if owner(task.step, task.microbatch, task.position) != context.node:
        raise RemoteProtocolError("role", f"{task} belongs to another {'back' if to_back else 'front'} server")


def _check_shape(tensors: tuple[TensorRef, ...], shape: tuple[int, ...], form: str) -> None:
    if len(tensors) != 1 or tensors[0].shape != shape or tensors[0].form != form:
        got = [f"{ref.form}{list(ref.shape)}" for ref in tensors]
        raise RemoteProtocolError("shape", f"expected one {form}{list(shape)}, got {got}")
