"""Who gets which task, and when it is free again."""

from __future__ import annotations

from node.server.pool import Entry, Pool
from protocol.ids import NodeId, TaskId
from tests.node.setting import shard_tensor

A, B, SERVER = NodeId("a"), NodeId("b"), NodeId("s")
TENSORS = (shard_tensor(1),)


def forward(step: int, microbatch: int) -> TaskId:
    return TaskId(step, microbatch, 0, "F")


def make_pool(*workers: NodeId, tasks: int = 2, slots: int = 1, collocated: str = "when_empty") -> Pool:
    """A pool with supplied forwards of step 0 and workers with slots."""
    pool = Pool(8.0, collocated)
    for number in range(tasks):
        pool.add(Entry((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
    for worker in workers:
        pool.worker_here(worker, is_server=worker == SERVER)
        pool.add_slots(worker, slots, 64)
    return pool


def given(pool: Pool, now: float = 0.0) -> list[tuple[str, int]]:
    """(worker, microbatch) of each lease that is given now."""
    leases = [(grant.worker, grant.entry.tasks[0].microbatch) for grant in pool.grant(now)]
    pool.check()
    return leases


def test_each_slot_takes_one_lease_and_older_tasks_go_first() -> None:
    """Two workers with a slot each get the first two of three tasks; the third waits for a slot."""
    pool = make_pool(A, B, tasks=3)
    assert given(pool) == [("a", 0), ("b", 1)]
    assert given(pool) == []
    pool.add_slots(B, 1, 64)
    assert given(pool) == [("b", 2)]


def test_the_worker_with_most_slots_is_chosen() -> None:
    """Work is spread over those who have asked for most."""
    pool = make_pool(A, tasks=1)
    pool.worker_here(B, is_server=False)
    pool.add_slots(B, 3, 64)
    assert given(pool) == [("b", 0)]


def test_slots_are_bounded() -> None:
    """However much a worker asks for, it never has more than the bound."""
    pool = make_pool(A, tasks=5, slots=0)
    pool.add_slots(A, 10**9, 3)
    assert len(given(pool)) == 3


def test_a_link_that_drops_frees_the_leases_at_once_and_nothing_else_need_happen() -> None:
    """The next grant after `worker_gone` gives the task to another who waits."""
    pool = make_pool(A, tasks=1)
    assert given(pool) == [("a", 0)]
    pool.worker_here(B, is_server=False)
    pool.add_slots(B, 1, 64)
    assert given(pool) == []
    pool.worker_gone(A)
    assert given(pool) == [("b", 0)]
    assert pool.reissued_count == 1


def test_a_lease_ends_with_its_time() -> None:
    """At its deadline a task is free again, its fence grows with the next lease, and its graph counts as lost."""
    pool = make_pool(A, tasks=1, slots=2)
    (first,) = pool.grant(0.0)
    fence = first.entry.fence
    assert pool.next_deadline() == 8.0
    assert pool.expire(7.9) == [] and len(pool.expire(8.0)) == 1
    (second,) = pool.grant(8.0)
    assert second.entry.fence > fence


def test_who_has_the_graph_is_asked_first_and_without_a_slot() -> None:
    """A preferred worker gets its backward without a slot; when it goes, anybody with a slot does."""
    pool = Pool(8.0, "when_empty")
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True))
    pool.worker_here(A, is_server=False)
    assert pool.prefer(task, A) and not pool.prefer(task, B)
    pool.worker_here(B, is_server=False)
    pool.add_slots(B, 1, 64)
    pool.supply(task, TENSORS)
    (grant,) = pool.grant(0.0)
    assert (grant.worker, grant.has_graph) == (A, True)
    pool.worker_gone(A)
    (grant,) = pool.grant(1.0)
    assert (grant.worker, grant.has_graph) == (B, False)


def test_a_task_is_finished_when_result_and_gradient_are_there_and_each_can_be_lost_alone() -> None:
    """A lost result is asked for again without its weight gradient, which is covered."""
    pool = Pool(8.0, "when_empty")
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    pool.worker_here(A, is_server=False)
    pool.add_slots(A, 2, 64)
    assert len(pool.grant(0.0)) == 1
    pool.result_held(task)
    pool.covered((task,))
    assert pool.counts() == {"input": 0, "free": 0, "leased": 0}
    pool.result_lost(task)
    (grant,) = pool.grant(1.0)
    assert grant.entry.needs_result and not grant.entry.needs_gradient


def test_nobody_gives_back_what_another_has() -> None:
    """A word about a task that another holds changes nothing."""
    pool = make_pool(A, B, tasks=1)
    assert given(pool) == [("a", 0)]
    pool.give_back((forward(0, 0),), B)
    assert given(pool) == []
    pool.give_back((forward(0, 0),), A)
    assert given(pool) == [("b", 0)]


def test_servers_compute_only_while_there_is_no_volunteer() -> None:
    """`when_empty`: the server waits while a volunteer is linked; `always` and `never` mean it."""
    pool = make_pool(SERVER, A, tasks=2)
    assert given(pool) == [("a", 0)]
    pool.worker_gone(A)
    assert given(pool) == [("s", 0)]
    assert given(make_pool(SERVER, collocated="never")) == []
    assert given(make_pool(SERVER, collocated="always")) == [("s", 0)]


def test_a_closed_step_leaves_nothing() -> None:
    """Tasks up to the closed step are gone; words about them are ignored."""
    pool = make_pool(A)
    given(pool)
    pool.drop_step(0)
    pool.result_lost(forward(0, 0))
    pool.covered((forward(0, 1),))
    assert given(pool) == [] and pool.next_deadline() is None and pool.waiting_for(B) is None


def test_it_says_what_it_waits_for() -> None:
    """In plain words: the input, a volunteer, a slot, somebody's result or its own, or a weight gradient."""
    pool = Pool(8.0, "never")
    pool.add(Entry((forward(0, 0),), needs_result=True, needs_gradient=False))
    assert pool.waiting_for(B) == (0, "input for the forward of microbatch 0")
    pool.supply(forward(0, 0), TENSORS)
    assert pool.waiting_for(B) == (0, "a volunteer for the forward of microbatch 0")
    pool.worker_here(A, is_server=False)
    assert pool.waiting_for(B) == (0, "a volunteer with a free slot for the forward of microbatch 0")
    pool.add_slots(A, 1, 64)
    pool.grant(0.0)
    assert pool.waiting_for(B) == (0, "forward of microbatch 0 by a")
    assert pool.waiting_for(A) == (0, "its own forward of microbatch 0")
