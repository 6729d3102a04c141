"""What a pool believes of results that may be lost: `tests/node/volunteer/test_lost_results.py` has the other side."""

from __future__ import annotations

from itertools import count as fences

from node.server.entries import BELIEVED_MAX
from node.server.pool import Entry, Pool
from protocol.base.ids import TaskId
from tests.node.server.test_pool import TENSORS, A, B


def make_pool() -> tuple[Pool, TaskId]:
    """One backward, and two volunteers of whom A has asked for it."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    for worker in (A, B):
        pool.worker_here(worker, is_server=False)
    pool.add_slots(A, 1, 64)
    return pool, task


def test_whoever_says_that_a_result_may_be_lost_does_it_again_and_is_not_blamed() -> None:
    """It has the weight gradient: with another one both would name the task, and one whole sum be refused."""
    pool, task = make_pool()
    assert [grant.worker for grant in pool.grant(0.0)] == [A]
    pool.summed((task,), A, 1.0)
    pool.result_may_be_lost((task,), A)
    pool.add_slots(B, 2, 64)
    assert [grant.worker for grant in pool.grant(1.0)] == [A]
    pool.check()
    pool.result_held(task)
    pool.summed((task,), A, 2.0)
    pool.result_may_be_lost((task,), A)
    assert pool.grant(2.0) == [], "nothing but its sum is waited for, and that it has"


def test_nobody_is_believed_for_ever_that_its_results_are_lost() -> None:
    """Whoever says that it has summed up a task, that the result was lost, and again, would keep the task from all."""
    pool, task = make_pool()
    had = []
    for second in range(10):
        had += [grant.worker for grant in pool.grant(float(second))]
        pool.add_slots(B, 1, 64)
        pool.summed((task,), A, second + 0.3)
        pool.result_may_be_lost((task,), A)
    assert had == [A] * BELIEVED_MAX + [B]
