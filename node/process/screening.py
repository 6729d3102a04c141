"""The look at tensors that come from outside, before anybody computes with them or the machine hears of them.

A large one is looked at in a thread: the loop carries everybody's links, and a look at a gigabyte takes it from all of
them for a second. The link waits for its look before it hands over what came behind, so messages keep their order.
Every look takes memory by the piece, not by what the sender says it has sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from node.compute.forms.heads import square_norm_most
from node.compute.forms.packed import all_within, begins_with, is_whole
from node.process.store import Buffer
from protocol.base.forms import BLOCK_FORMS, GRID_SUM_MOST, NOT_FINITE, small_is_whole
from protocol.base.ids import TensorRef
from protocol.messages import Contribute, InputGradient, Message, Output, Parameters

LARGE = 1 << 20
"""Bytes, or values, of a message above which the look is taken in a thread: a million packed integers are 1.4 ms of a
core, and the way to a thread and back 0.1."""
LOOKS_AT_ONCE = 4
"""Threads: numpy lets the loop run meanwhile, and more of them would take the cores from those who compute. They are
not those that write to the disk, so that a hundred contributions at once hold up no record."""
_PIECE = 1 << 20
"""Values that are looked at together: 8 MB in fp64."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a look."""

    refusal: tuple[str, str] | None = None
    """Why the sender is cut off: a word of REJECT_REASONS, and a sentence."""
    square_norm: float | None = None
    """Of a volunteer's contribution; None: of something else."""
    size: float = 0.0
    """Root mean square of what a volunteer computed for others, or a little more."""


class Screening:
    """Looks at the tensors of messages, the large ones in threads of its own. Made and asked on trio's thread."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(LOOKS_AT_ONCE)

    async def look(self, role: str, message: Message, buffers: Sequence[Buffer], step_tasks: int) -> Seen:
        """What there is to say of a message from a peer in this role, in a run with so many tasks in a step."""
        if not buffers or (role != "volunteer" and not isinstance(message, Parameters)):
            return Seen()
        refs = _refs(message)
        if sum(max(ref.byte_count, math.prod(ref.shape)) for ref in refs) <= LARGE:
            return look_at(role, message, buffers, step_tasks)
        # Not given up when the link ends: its bytes would be held without being counted.
        return await trio.to_thread.run_sync(look_at, role, message, buffers, step_tasks, limiter=self._threads)


def look_at(role: str, message: Message, buffers: Sequence[Buffer], step_tasks: int) -> Seen:
    """`Screening.look`, at once, in any thread."""
    strange = role == "volunteer"
    name = type(message).__name__
    if strange and not all_whole(message, buffers):
        return Seen(("decode", f"{name} holds a tensor that nobody can decode"))
    if strange and not fits_the_sum(message, buffers, step_tasks):
        return Seen(("size", f"{name} holds a value beyond what its tasks may add to a step's sum"))
    if isinstance(message, Parameters) and not all_finite(message, buffers):
        return Seen(("not_finite", f"{name} holds values that are not finite"))
    if strange and isinstance(message, Contribute):
        # A run that diverges is no misdeed, nor are activations that overflow in it: what comes of them is in the
        # gradients and losses. The ledger looks at their size, and has what is absurd done again.
        return Seen(square_norm=square_norm(message.tensors, buffers))
    if strange and isinstance(message, Output | InputGradient):
        count = sum(math.prod(ref.shape) for ref in message.tensors)
        return Seen(size=math.sqrt(square_norm(message.tensors, buffers) / max(1, count)))
    return Seen()


def square_norm(tensors: Sequence[TensorRef], buffers: Sequence[Buffer]) -> float:
    """The sum of squares over what a volunteer sent, or a little more; infinite if a value is not finite."""
    total = 0.0
    for ref, buffer in zip(tensors, buffers, strict=True):
        if ref.form in BLOCK_FORMS:
            total += square_norm_most(buffer, ref.form, ref.shape)
        elif ref.form in _FLOATS:
            with np.errstate(over="ignore", invalid="ignore"):
                for piece in _pieces(buffer, ref.form):
                    values = piece.astype(np.float64)
                    total += float(np.dot(values, values))
        elif ref.form == "gi" and begins_with(buffer, math.prod(ref.shape), NOT_FINITE):
            return math.inf
        else:
            return 0.0  # whole numbers: only who has the grid knows what they stand for (`node.machine.jobs.Measure`)
    return total if math.isfinite(total) else math.inf


def fits_the_sum(message: Message, buffers: Sequence[Buffer], step_tasks: int) -> bool:
    """Whether the integers of a contribution's part are what its backwards, of `step_tasks` in the step, can add up to:
    then no sum of such parts wraps, whatever else is in it. A part that stands for NaN is no sum, and fits."""
    if not isinstance(message, Contribute):
        return True
    tasks = sum(task.op == "B" for task in message.tasks)
    for ref, buffer in zip(message.tensors, buffers, strict=True):
        count = math.prod(ref.shape)
        if ref.form != "gi" or begins_with(buffer, count, NOT_FINITE):
            continue
        if not all_within(buffer, count, min(tasks, step_tasks) * (GRID_SUM_MOST // step_tasks)):
            return False
    return True


def all_finite(message: Message, buffers: Sequence[Buffer]) -> bool:
    """Whether no tensor of floats is NaN or infinite."""
    for ref, buffer in zip(_refs(message), buffers, strict=True):
        if ref.form not in _FLOATS:
            continue
        # A sum is finite unless a value is not (or values are absurd): one pass.
        total = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in _pieces(buffer, ref.form):
                total += float(piece.sum(dtype=np.float64))
        if not math.isfinite(total):
            return False
    return True


def all_whole(message: Message, buffers: Sequence[Buffer]) -> bool:
    """Whether every tensor in a small form can be decoded: a lane that cannot do its arithmetic stops its server."""
    for ref, buffer in zip(_refs(message), buffers, strict=True):
        if ref.form == "gi" and not is_whole(buffer, math.prod(ref.shape)):
            return False
        if ref.form in BLOCK_FORMS and not small_is_whole(buffer, ref.form, ref.shape):
            return False
    return True


_FLOATS = ("bf16", "fp32", "fp64")
_Floats = npt.NDArray[np.floating[Any]]


def _pieces(buffer: Buffer, form: str) -> Iterator[_Floats]:
    """The values of a tensor of floats, _PIECE at a time."""
    kind: Any = {"bf16": np.uint16, "fp32": np.float32, "fp64": np.float64}[form]
    values = np.frombuffer(buffer, dtype=kind)
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        yield (piece.astype(np.uint32) << 16).view(np.float32) if form == "bf16" else piece


def _refs(message: Message) -> tuple[TensorRef, ...]:
    refs: tuple[TensorRef, ...] = getattr(message, "tensors", ())
    return refs
