"""Order policies: which of its ready operations a node starts next, as pure functions with explicit state.

The simulator calls `choose` to make a schedule ahead of time; a volunteer's queue calls the same function
live, when reality differs from the plan, and a server's pools sort by what of a policy can be known there
(`protocol.schedule.live`). A policy is numbers and names, so it can cross
the wire; code never does.

The priorities are FlexPipe's (computation type, traversal of a node's stages, in-flight limits, section
5.2), the strict turns and warm-ups Seq1F1B's and interleaved 1F1B's, the rules for W those of zero-bubble
schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from protocol.base.bounded import Items, Number
from protocol.base.errors import BadInputError
from protocol.schedule.ir import Flow, Key, Op


class Kind(IntEnum):
    """How a policy sees an operation. OTHER (loss, recompute, registered ops) runs as soon as it can."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2
    OTHER = 3


class First(StrEnum):
    """Computation-type priority: which kind goes first when both are ready."""

    BACKWARD = "backward"
    FORWARD = "forward"
    INTERLEAVED = "interleaved"


class Weights(StrEnum):
    """When W runs, beyond when memory is full or nothing else is left: in any gap, only where it fits into
    the gap before the next known arrival, or that and always once all forwards are done."""

    GAP = "gap"
    FIT = "fit"
    FIT_OR_TAIL = "fit_or_tail"


class Traversal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stage-traversal priority among a node's stages.

    Attributes:
        deepest_first: depth-first (the later stage of the model first) instead of breadth-first.
        interval: how many operations of one stage before the next stage's turn comes, which is then waited
            for; 0 to take whatever is ready, in order of preference.
    """

    deepest_first: bool = False
    interval: Number = 0


class Policy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The order policy of one node.

    Attributes:
        first: the kind that goes first; `interleaved` alternates `forward_unit` forwards, `backward_unit`
            backwards.
        wait_turn: when interleaved, wait for the kind whose turn it is as soon as one backward has run.
        warmup: forwards to run before the steady state, whose first forward still comes before the first
            backward; None for as many as are ready.
        forward, backward: traversal of the node's stages.
        alive_max: per stage of the node, how many segments may be alive, from the start of F to the end of
            B, or of W when split; () for no limit. At least as many as a microbatch has, or none would ever go back.
        alive_total_max: the same for all stages of the node together; 0 for no limit. Stages take places as
            they can: where one could fill the node, `alive_max` has to keep a place free for the others.
        weights: when W runs.
        free_first: run a W before a backward while memory holds up a forward.
    """

    first: First = First.BACKWARD
    forward_unit: Number = 1
    backward_unit: Number = 1
    wait_turn: bool = False
    warmup: Number | None = None
    forward: Traversal = Traversal()
    backward: Traversal = Traversal(deepest_first=True)
    alive_max: Items[Number] = ()
    alive_total_max: Number = 0
    weights: Weights = Weights.GAP
    free_first: bool = False

    def __post_init__(self) -> None:
        if min(self.forward_unit, self.backward_unit) < 1:
            raise BadInputError("policy: forward_unit and backward_unit are at least 1")
        if min(self.alive_max, default=1) < 1:
            raise BadInputError(f"policy: alive_max {list(self.alive_max)}: a cap of 0 lets no microbatch start")
        if min(self.alive_total_max, self.warmup or 0, self.forward.interval, self.backward.interval) < 0:
            raise BadInputError("policy: alive_total_max, warmup and interval are at least 0")


class Ready(NamedTuple):
    """A ready operation as a policy sees it. Comparing two gives their order within a queue.

    Attributes:
        chunk: which of the node's stages, counted from the first of the model.
        turn: order among the operations of this kind and stage: oldest microbatch first, its segments
            forward in order and backward in reverse (Seq1F1B's partially ordered queue).
        seconds: how long it is expected to take; 0 when unknown.
        to_come: of a forward, how many segments of its microbatch follow it on this stage.
    """

    kind: Kind
    chunk: int
    turn: int
    key: Key
    seconds: float = 0.0
    to_come: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether it is a forward of a microbatch that its stage has begun already."""
        return self.kind == Kind.FORWARD and self.key.segment > 0


class State(NamedTuple):
    """Everything a policy remembers between two choices on one node."""

    forwards_left: tuple[int, ...]  # per stage of the node
    backwards_left: tuple[int, ...]
    alive: tuple[int, ...]
    split: bool
    forwards_done: int = 0
    backwards_done: int = 0
    streak: int = 0  # operations of the kind whose turn it is, since it became its turn
    backward_turn: bool = False
    forward_at: int = 0  # the stage whose turn it is, and how many of it ran
    forward_step: int = 0
    backward_at: int = 0
    backward_step: int = 0
    promised: tuple[int, ...] = (0,)  # per stage, segments still to come of microbatches that it has begun


_SEGMENT_BITS, _SLICE_BITS = 20, 10

_KINDS = {Op.F: Kind.FORWARD, Op.B: Kind.BACKWARD, Op.I: Kind.BACKWARD, Op.W: Kind.WEIGHT}


def ready(key: Key, flow: Flow, chunk: int, seconds: float = 0.0) -> Ready:
    """How a policy sees the operation `key` of `flow`, on the node's stage number `chunk`."""
    kind = _KINDS.get(key.op, Kind.OTHER)
    segment = key.segment if kind is not Kind.BACKWARD else len(flow.segment_tokens) - 1 - key.segment
    turn = (((key.microbatch << _SEGMENT_BITS) + segment) << _SLICE_BITS) + key.slice
    to_come = len(flow.segment_tokens) - 1 - key.segment if kind is Kind.FORWARD else 0
    return Ready(kind, chunk, turn, key, seconds, to_come)


def start(policy: Policy, forwards: Sequence[int], backwards: Sequence[int], split: bool) -> State:
    """The state before a step.

    Args:
        forwards, backwards: per stage of the node, how many operations of the kind the step has.
        split: whether W exists, and so ends an activation's life instead of B.
    """
    chunks = len(forwards)
    if policy.alive_max and len(policy.alive_max) != chunks:
        raise BadInputError(f"policy: alive_max has {len(policy.alive_max)} limits for {chunks} stages of the node")
    return State(
        tuple(forwards),
        tuple(backwards),
        (0,) * chunks,
        split,
        forward_at=chunks - 1 if policy.forward.deepest_first else 0,
        backward_at=chunks - 1 if policy.backward.deepest_first else 0,
        promised=(0,) * chunks,
    )


def choose(
    policy: Policy,
    state: State,
    candidates: Sequence[Ready],
    forward_gap_s: float = math.inf,
    backward_gap_s: float = math.inf,
) -> tuple[Ready | None, State]:
    """The operation to start now, or None to wait, and the state after it.

    Args:
        candidates: ready operations in any order, at least the lowest `turn` of each kind and stage, where
            forwards that go on with a microbatch are a kind of their own: one that may not be begun yet must
            not hide one that memory is kept for.
        forward_gap_s, backward_gap_s: when the next F or B is known to become ready, from now; infinity when
            unknown. Only `Weights.FIT` and `FIT_OR_TAIL` look at it.
    """
    forward = backward = weight = None
    memory_full = False
    for candidate in candidates:
        kind = candidate.kind
        if kind == Kind.FORWARD:
            if candidate.key.slice:  # what was begun is finished first: its memory and its turn are taken
                return candidate, _after_forward(policy, state, candidate)
            if not _fits(policy, state, candidate):
                memory_full = True
            elif _goes_before(candidate, forward, policy.forward, state.forward_at):
                forward = candidate
        elif kind == Kind.BACKWARD:
            if _goes_before(candidate, backward, policy.backward, state.backward_at):
                backward = candidate
        elif kind == Kind.OTHER:
            return candidate, state
        elif weight is None or candidate.turn < weight.turn:
            weight = candidate
    if weight is not None and memory_full and policy.free_first:
        return weight, _after_weight(state, weight.chunk)
    chosen = _by_kind(policy, state, forward, backward)
    if chosen is not None:
        if chosen.kind == Kind.FORWARD:
            return chosen, _after_forward(policy, state, chosen)
        return chosen, _after_backward(policy, state, chosen.chunk)
    if weight is not None and (
        policy.weights is Weights.GAP
        or memory_full
        or weight.seconds <= min(forward_gap_s, backward_gap_s)
        or (policy.weights is Weights.FIT_OR_TAIL and not any(state.forwards_left))
    ):
        return weight, _after_weight(state, weight.chunk)
    return None, state


def _fits(policy: Policy, state: State, forward: Ready) -> bool:
    """Whether one more segment may come alive.

    No segment of a microbatch goes back before the last one went forward. So where two routes meet, a microbatch is
    begun beside one that is not yet complete only if there is room for all that is still to come of both; otherwise
    each could hold the places that the other needs.
    """
    chunk = forward.chunk
    further = 0
    if state.promised[chunk] and not forward.goes_on:
        further = state.promised[chunk] + forward.to_come
    if policy.alive_max and state.alive[chunk] + further >= policy.alive_max[chunk]:
        return False
    return not policy.alive_total_max or sum(state.alive) + further < policy.alive_total_max


def _goes_before(candidate: Ready, best: Ready | None, traversal: Traversal, at: int) -> bool:
    """Whether the traversal allows `candidate` now and prefers it to `best`."""
    if traversal.interval and candidate.chunk != at:
        return False
    if best is None:
        return True
    if candidate.chunk != best.chunk:
        return (candidate.chunk > best.chunk) == traversal.deepest_first
    return candidate.turn < best.turn


def _by_kind(policy: Policy, state: State, forward: Ready | None, backward: Ready | None) -> Ready | None:
    """The computation-type priority between the best forward and the best backward."""
    if policy.warmup is not None and state.forwards_done <= policy.warmup and any(state.forwards_left):
        return forward
    if policy.first is First.BACKWARD:
        return backward or forward
    if policy.first is First.FORWARD:
        return forward or backward
    turn, other = (backward, forward) if state.backward_turn else (forward, backward)
    if turn is not None:
        return turn
    if policy.wait_turn and (state.backwards_done or policy.warmup is not None):
        turn_left = state.backwards_left if state.backward_turn else state.forwards_left
        if any(turn_left):
            return None
    return other


def _after_forward(policy: Policy, state: State, chosen: Ready) -> State:
    """A microbatch counts once, with its first slice; later slices change neither turn nor memory."""
    chunk = chosen.chunk
    left = _changed(state.forwards_left, chunk, -1)
    at, step = _next_turn(policy.forward, chunk, state.forward_step, left)
    if chosen.key.slice:
        return state._replace(forwards_left=left, forward_at=at, forward_step=step)
    streak = 1 if state.backward_turn else state.streak + 1
    turn_over = streak >= policy.forward_unit
    promised = state.promised
    if by := -1 if chosen.goes_on else chosen.to_come:
        promised = _changed(promised, chunk, by)
    return State(
        left,
        state.backwards_left,
        _changed(state.alive, chunk, 1),
        state.split,
        state.forwards_done + 1,
        state.backwards_done,
        0 if turn_over else streak,
        turn_over,
        at,
        step,
        state.backward_at,
        state.backward_step,
        promised,
    )


def _after_backward(policy: Policy, state: State, chunk: int) -> State:
    left = _changed(state.backwards_left, chunk, -1)
    at, step = _next_turn(policy.backward, chunk, state.backward_step, left)
    streak = state.streak + 1 if state.backward_turn else 1
    turn_over = streak >= policy.backward_unit
    return State(
        state.forwards_left,
        left,
        state.alive if state.split else _changed(state.alive, chunk, -1),
        state.split,
        state.forwards_done,
        state.backwards_done + 1,
        0 if turn_over else streak,
        not turn_over,
        state.forward_at,
        state.forward_step,
        at,
        step,
        state.promised,
    )


def _after_weight(state: State, chunk: int) -> State:
    return state._replace(alive=_changed(state.alive, chunk, -1))


def _next_turn(traversal: Traversal, chunk: int, step: int, left: tuple[int, ...]) -> tuple[int, int]:
    """Whose turn is next after an operation of `chunk`: the same until the interval is over or nothing is
    left."""
    if not traversal.interval:
        return chunk, 0
    if step + 1 < traversal.interval and left[chunk]:
        return chunk, step + 1
    direction = -1 if traversal.deepest_first else 1
    for distance in range(1, len(left) + 1):
        after = (chunk + direction * distance) % len(left)
        if left[after]:
            return after, 0
    return chunk, 0


def _changed(values: tuple[int, ...], index: int, by: int) -> tuple[int, ...]:
    if len(values) == 1:
        return (values[0] + by,)
    return (*values[:index], values[index] + by, *values[index + 1 :])
