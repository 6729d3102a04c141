"""Tests of `protocol.schedule.live`: policies asked by nodes that do not know what is still to come."""

from __future__ import annotations

import random
from typing import cast

from protocol.base.ids import Op, TaskId
from protocol.schedule.live import LiveOrder, backward_rank, candidate, followed_live, forward_rank
from protocol.schedule.policies import First, Kind, Policy, Ready, Traversal

BACK = Traversal(deepest_first=False)
DEEP = Traversal(deepest_first=True)


def forward(microbatch: int, chunk: int = 0) -> Ready:
    return candidate(TaskId(0, microbatch, chunk, "F"), Kind.FORWARD, chunk)


def backward(microbatch: int, chunk: int = 0) -> Ready:
    return candidate(TaskId(0, microbatch, chunk, "B"), Kind.BACKWARD, chunk)


def test_the_kind_that_goes_first_does() -> None:
    """Backward first, forward first, and by turns of two and one."""
    ready = [forward(0), backward(1)]
    assert LiveOrder(Policy(), 1).next(0, ready) == backward(1)
    assert LiveOrder(Policy(first=First.FORWARD), 1).next(0, ready) == forward(0)
    turns = LiveOrder(Policy(first=First.INTERLEAVED, forward_unit=2), 1)
    kinds = [turns.next(0, [forward(n), backward(n)]).kind for n in range(6)]
    assert [kind.name[0] for kind in kinds] == list("FFBFFB")


def test_chunks_go_as_the_traversal_says_and_microbatches_by_age() -> None:
    """Of what is ready: the deeper or the earlier chunk, and in it the older microbatch."""
    ready = [backward(3, 0), backward(5, 1), backward(4, 1)]
    assert LiveOrder(Policy(), 2).next(0, ready) == backward(4, 1)
    assert LiveOrder(Policy(backward=BACK), 2).next(0, ready) == backward(3, 0)
    tasks = [TaskId(0, microbatch, chunk, "B") for microbatch, chunk in ((3, 0), (5, 1), (4, 1))]
    for policy, first in ((Policy(), tasks[2]), (Policy(backward=BACK), tasks[0])):
        assert min(tasks, key=lambda task: backward_rank(policy, task, task.position)) == first
    for policy, first in ((Policy(), tasks[0]), (Policy(forward=DEEP), tasks[2])):
        assert min(tasks, key=lambda task: forward_rank(policy, task, task.position)) == first


def test_nothing_that_is_ready_waits_for_what_may_never_come() -> None:
    """Warm-ups, turns that are waited for, intervals and caps of one are made for a whole step: here all that is ready
    is done, one after the other."""
    rng = random.Random(3)
    for _ in range(50):
        turn = Traversal(deepest_first=rng.random() < 0.5, interval=2)
        policy = Policy(
            first=rng.choice(list(First)), wait_turn=True, warmup=rng.randint(0, 9), forward=turn, backward=turn,
            alive_max=(1, 1), alive_total_max=1,
        )  # fmt: skip
        order, ready = LiveOrder(policy, 2), [rng.choice((forward, backward))(n, rng.randint(0, 1)) for n in range(20)]
        ready = list(dict.fromkeys(ready))
        while ready:
            ready.remove(order.next(0, ready))
        assert followed_live(policy).first is policy.first


def test_segments_go_forward_in_order_and_backward_in_reverse() -> None:
    """Attention needs what came before, and its gradient what comes after."""
    for op, kind, first in (("F", Kind.FORWARD, 0), ("B", Kind.BACKWARD, 2)):
        tasks = [TaskId(0, 0, 0, cast(Op, op), segment) for segment in (1, 2, 0)]
        chosen = LiveOrder(Policy(), 1).next(0, [candidate(task, kind, 0) for task in tasks])
        assert chosen.key.segment == first
