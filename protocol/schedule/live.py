"""Order policies at work: a node that does not know what is still to come asks the policy of a schedule.

The simulator makes a schedule of a whole step; a pool, or a volunteer's queue, sees what is ready now. So of a policy
remains what can be answered without the rest of the step: which kind goes first and in which turns, which chunk goes
first, and that W fills gaps. What waits for something that may never come does not: warm-ups, strict turns, intervals.
Caps on what is alive are kept by slots (`Plan.graphs_max`) and by the device's memory. Whatever a policy says, what is
ready is never held back for what is not, and an older step goes first: so no policy brings a run to a stand.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.base.ids import TaskId
from protocol.schedule.ir import Key, Op
from protocol.schedule.policies import Kind, Policy, Ready, State, Traversal, choose, start

_ENDLESS = 1 << 62
"""Operations still to come, as far as one who cannot know counts."""
_SEGMENT_BITS = 20


def followed_live(policy: Policy) -> Policy:
    """What of a policy is followed without knowing the rest of the step."""
    return Policy(
        first=policy.first,
        forward_unit=policy.forward_unit,
        backward_unit=policy.backward_unit,
        forward=Traversal(deepest_first=policy.forward.deepest_first),
        backward=Traversal(deepest_first=policy.backward.deepest_first),
    )


def candidate(task: TaskId, kind: Kind, chunk: int) -> Ready:
    """A task that could begin, as a policy sees it; `chunk` counts among the node's own, from 0. Older microbatches go
    first, segments forward in order and backward in reverse."""
    segment = task.segment if kind is Kind.FORWARD else (1 << _SEGMENT_BITS) - 1 - task.segment
    key = Key(Op(task.op), task.microbatch, task.position, task.segment, task.slice)
    return Ready(kind, chunk, (task.microbatch << _SEGMENT_BITS) + segment, key)


class LiveOrder:
    """One node's order in the step that it is at.

    Args:
        chunks: that the node's stage holds.
    """

    def __init__(self, policy: Policy, chunks: int) -> None:
        self._policy = followed_live(policy)
        self._chunks = chunks
        self._step = -1
        self._state = self._fresh()

    def _fresh(self) -> State:
        endless = (_ENDLESS,) * self._chunks
        return start(self._policy, endless, endless, split=True)

    def next(self, step: int, ready: Sequence[Ready]) -> Ready:
        """What goes first among what is ready, all of one step."""
        if step != self._step:
            self._step, self._state = step, self._fresh()
        chosen, self._state = choose(self._policy, self._state, ready)
        assert chosen is not None, "a policy that waits for nothing takes what is ready"
        return chosen


def forward_rank(policy: Policy, task: TaskId, chunk: int) -> tuple[int, ...]:
    """Where a pool has a forward stand among those that are free; the smallest goes first."""
    depth = -chunk if policy.forward.deepest_first else chunk
    return task.step, depth, task.microbatch, task.segment, task.slice


def backward_rank(policy: Policy, task: TaskId, chunk: int) -> tuple[int, ...]:
    """Where a pool has a backward stand among those that are free; the smallest goes first."""
    depth = -chunk if policy.backward.deepest_first else chunk
    return task.step, depth, task.microbatch, -task.segment, task.slice
