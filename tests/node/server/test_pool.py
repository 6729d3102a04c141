"""Who gets which task, and when it is free again."""

from __future__ import annotations

from itertools import count as fences

import pytest

from node.server.choice import JUDGED_WITHIN_S
from node.server.pool import Entry, Pool
from protocol.base.ids import NodeId, TaskId
from tests.node.setting import shard_tensor

A, B, SERVER = NodeId("a"), NodeId("b"), NodeId("s")
TENSORS = (shard_tensor(1),)


def forward(step: int, microbatch: int) -> TaskId:
    return TaskId(step, microbatch, 0, "F")


def make_pool(*workers: NodeId, tasks: int = 2, slots: int = 1, collocated: str = "when_empty") -> Pool:
    """A pool with supplied forwards of step 0 and workers with slots."""
    pool = Pool(8.0, collocated, 20.0, fences(1).__next__)
    for number in range(tasks):
        pool.add(Entry((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
    for worker in workers:
        pool.worker_here(worker, is_server=worker == SERVER)
        pool.add_slots(worker, slots, 64)
    return pool


def given(pool: Pool, now: float = 0.0) -> list[tuple[NodeId, int]]:
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


def test_of_equals_the_one_that_was_given_something_longest_ago_is_chosen() -> None:
    """Slots come back while lines still send: of two who always have one each gets every second lease."""
    pool = make_pool(A, B, tasks=0)
    chosen = []
    for number in range(4):
        pool.add(Entry((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
        ((worker, _),) = given(pool)
        chosen.append(worker)
        pool.result_held(forward(0, number))
        pool.add_slots(NodeId(worker), 1, 64)
    assert chosen == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("slower", "share"), [(1.0, 0.5), (1.8, 1.0)])
def test_work_goes_where_it_is_done_first(slower: float, share: float) -> None:
    """A takes a second for each lease, B 1.8, and there is one in two seconds: all goes to A. Of equals
    each gets every second one. (By free slots alone each got half of it, whatever it took.)"""
    pool = make_pool(A, B, tasks=0, slots=4)
    takes, free_at = {A: 1.0, B: slower}, dict.fromkeys((A, B), 0.0)
    under_way: list[tuple[float, NodeId, TaskId]] = []
    got: list[NodeId] = []
    for number in range(80):
        now = 2.0 * number
        for done_at, worker, task in sorted(under_way):
            if done_at <= now:
                pool.clock(done_at)
                pool.result_held(task)
                pool.add_slots(worker, 1, 64)
        under_way = [each for each in under_way if each[0] > now]
        pool.add(Entry((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
        for node, microbatch in given(pool, now):
            free_at[node] = max(free_at[node], now) + takes[node]
            under_way.append((free_at[node], node, forward(0, microbatch)))
            got.append(node)
    assert len(got) == 80 and abs(got[20:].count(A) / 60 - share) < 0.05


def test_who_has_all_the_graphs_that_it_may_hold_counts_as_one_that_works_while_bytes_take_their_time() -> None:
    """A volunteer without lease or slot waits for backwards that others' lines hold up: servers compute for it only
    when a lease's tensors would have gone through a slow line meanwhile."""
    for transfer_s, at, served in ((0.0, 3.0, True), (100.0, 3.0, False), (100.0, 101.0, True)):
        pool = Pool(800.0, "when_empty", 20.0, fences(1).__next__, transfer_s)
        pool.worker_here(SERVER, is_server=True)
        pool.add_slots(SERVER, 1, 64)
        pool.worker_here(A, is_server=False)
        pool.add_slots(A, 1, 64)
        for number in range(2):
            pool.add(Entry((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
        assert given(pool) == [("a", 0)]
        pool.result_held(forward(0, 0))
        assert given(pool) == []
        pool.expire(at)
        assert given(pool, at) == ([("s", 1)] if served else [])


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
    pool.worker_gone(A, 0.0)
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
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True))
    pool.worker_here(A, is_server=False)
    assert pool.prefer(task, A) and not pool.prefer(task, B)
    pool.worker_here(B, is_server=False)
    pool.add_slots(B, 1, 64)
    pool.supply(task, TENSORS)
    (grant,) = pool.grant(0.0)
    assert (grant.worker, grant.has_graph) == (A, True)
    pool.worker_gone(A, 0.0)
    (grant,) = pool.grant(1.0)
    assert (grant.worker, grant.has_graph) == (B, False)


def test_a_task_is_finished_when_result_and_gradient_are_there_and_each_can_be_lost_alone() -> None:
    """A lost result is asked for again without its weight gradient, which is covered."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    pool.worker_here(A, is_server=False)
    pool.add_slots(A, 2, 64)
    assert len(pool.grant(0.0)) == 1
    pool.result_held(task)
    pool.covered((task,), A)
    assert pool.counts() == {"input": 0, "free": 0, "leased": 0}
    pool.result_lost(task)
    (grant,) = pool.grant(1.0)
    assert grant.entry.needs_result and not grant.entry.needs_gradient


def test_a_result_that_was_sent_to_a_server_that_was_down_is_not_waited_for() -> None:
    """The worker has computed the task and sends its result once. When the server is back and has not got it, the same
    worker comes first: it has the weight gradient, and computes the result alone."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    for worker in (B, A):
        pool.worker_here(worker, is_server=False)
    pool.add_slots(A, 2, 64)
    assert [grant.worker for grant in pool.grant(0.0)] == [A]
    pool.result_lost(task)
    assert pool.grant(0.5) == [], "it may still be at it"
    pool.summed((task,), A, 1.0)
    pool.result_lost(task)
    pool.add_slots(B, 2, 64)
    (grant,) = pool.grant(1.0)
    assert grant.worker == A and grant.entry.needs_result and grant.entry.needs_gradient
    pool.check()


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
    pool.worker_gone(A, 0.0)
    assert given(pool) == [("s", 0)]
    assert given(make_pool(SERVER, collocated="never")) == []
    assert given(make_pool(SERVER, collocated="always")) == [("s", 0)]


def test_a_volunteer_that_asks_for_little_has_work_beside_servers_that_always_compute() -> None:
    """Two tasks come at a time. The server has four free slots and the volunteer two: by free slots alone, servers that
    always compute got everything, and a volunteer had nothing to do for as long as it stayed."""
    pool, got = make_pool(SERVER, tasks=0, slots=4, collocated="always"), []
    pool.worker_here(A, is_server=False)
    pool.add_slots(A, 2, 64)
    for turn in range(8):
        for number in (2 * turn, 2 * turn + 1):
            pool.add(Entry((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
        leases = given(pool, float(turn))
        pool.clock(turn + 0.5)
        for node, microbatch in leases:
            got.append(node)
            pool.result_held(forward(0, microbatch))
            pool.add_slots(node, 1, 64)
    assert got.count(A) >= 4 and got.count(SERVER) >= 4


def test_a_closed_step_leaves_nothing() -> None:
    """Tasks up to the closed step are gone; words about them are ignored."""
    pool = make_pool(A)
    given(pool)
    pool.drop_step(0)
    pool.result_lost(forward(0, 0))
    pool.covered((forward(0, 1),), A)
    assert given(pool) == [] and pool.next_deadline() is None and pool.waiting_for(B) is None


def test_it_says_what_it_waits_for() -> None:
    """In plain words: the input, a volunteer, a slot, somebody's result or its own, or a weight gradient."""
    pool = Pool(8.0, "never", 20.0, fences(1).__next__)
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


def backward_pool(count: int = 2) -> tuple[Pool, list[TaskId]]:
    """A pool of backwards that A has got, all at time 0."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    tasks = [TaskId(0, number, 0, "B") for number in range(count)]
    for task in tasks:
        pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    pool.worker_here(A, is_server=False)
    pool.add_slots(A, count, 64)
    assert len(pool.grant(0.0)) == count
    return pool, tasks


def test_a_weight_gradient_has_no_clock_before_the_tail_of_its_step() -> None:
    """What is computed and waits in a sum does not expire, however long the step takes; what is not computed does."""
    pool, (first, second) = backward_pool()
    pool.result_held(first)
    pool.summed((first,), A, 1.0)
    assert [entry.tasks[0] for entry, _ in pool.expire(8.0)] == [second]
    pool.check()
    assert pool.next_deadline() is None and pool.expire(1e6) == []


def test_in_the_tail_a_sum_without_progress_is_given_up() -> None:
    """The clock runs from the tail on, for what is summed up before and after it."""
    pool, (first, second) = backward_pool()
    pool.result_held(first)
    pool.result_held(second)
    pool.summed((first,), A, 1.0)
    pool.tail(0, 5.0)
    pool.summed((second,), A, 6.0)
    assert pool.next_deadline() == 25.0 and pool.expire(24.9) == []
    assert {entry.tasks[0] for entry, _ in pool.expire(25.0)} == {first, second}


def test_bytes_that_arrive_renew_the_clock_and_nothing_else_does() -> None:
    """A second word about the tail, or that a task is summed up, buys no time."""
    pool, (first, second) = backward_pool()
    for task in (first, second):
        pool.result_held(task)
    pool.summed((first, second), A, 1.0)
    pool.tail(0, 5.0)
    pool.progress(A, 0, 15.0)
    pool.tail(0, 20.0)
    pool.summed((first,), A, 30.0)
    pool.claim((first, second), A, 34.0)
    pool.progress(A, 1, 34.0)
    pool.progress(B, 0, 34.0)
    assert pool.next_deadline() == 35.0
    assert len(pool.expire(35.0)) == 2


def test_a_worker_that_comes_back_keeps_what_it_has_summed_up() -> None:
    """Its link drops: unfinished tasks are free at once; sums wait a little, and stay its own if it claims them."""
    pool, (first, second) = backward_pool()
    pool.result_held(first)
    pool.summed((first,), A, 1.0)
    pool.worker_gone(A, 2.0)
    pool.worker_here(B, is_server=False)
    pool.add_slots(B, 2, 64)
    assert [grant.entry.tasks[0] for grant in pool.grant(2.0)] == [second]
    pool.worker_here(A, is_server=False)
    pool.claim((first,), A, 4.0)
    assert pool.expire(100.0)[0][0].tasks[0] == second  # B never computed it
    assert pool.grant(100.0) == []  # first A has a moment to ask for it
    pool.expire(103.0)
    assert [grant.entry.tasks[0] for grant in pool.grant(103.0)] == [second]


def test_a_worker_that_comes_back_without_its_sums_loses_them_at_once() -> None:
    """A process that was started again claims nothing: what its earlier life had summed up is free."""
    pool, (first, _) = backward_pool()
    pool.result_held(first)
    pool.summed((first,), A, 1.0)
    pool.worker_gone(A, 2.0)
    pool.worker_here(A, is_server=False)
    pool.claim((), A, 2.5)
    pool.add_slots(A, 2, 64)
    assert len(pool.grant(3.0)) == 2


def test_a_worker_that_stays_away_loses_its_sums() -> None:
    """A few seconds, then others do the work again."""
    pool, (first, _) = backward_pool()
    pool.result_held(first)
    pool.summed((first,), A, 1.0)
    pool.worker_gone(A, 2.0)
    assert pool.next_deadline() == 7.0
    assert [entry.tasks[0] for entry, _ in pool.expire(7.0)] == [first]
    pool.check()


def test_a_sum_that_the_ledger_has_whole_is_not_done_again_when_its_worker_leaves() -> None:
    """It is audited before it counts. Others who did its tasks again sent them in sums with much else, and these were
    refused whole: on home lines two minutes for each upload that was for nothing."""
    pool, (first, second) = backward_pool()
    pool.result_held(first)
    pool.summed((first,), A, 1.0)
    pool.stored((first, second), A)
    pool.worker_gone(A, 2.0)
    pool.expire(7.0)
    pool.worker_here(B, is_server=False)
    pool.add_slots(B, 2, 64)
    assert [grant.entry.tasks[0] for grant in pool.grant(7.0)] == [second], "what it had not brought is free"
    pool.worker_here(A, is_server=False)
    pool.claim((), A, 8.0)  # another process, which knows of no sum
    pool.add_slots(A, 2, 64)
    assert given(pool, 8.0) == []
    pool.covered((first,), A)
    pool.check()


def test_a_sum_that_the_ledger_refuses_after_its_worker_has_left_is_done_again() -> None:
    """At once where it says so; and after the clock of weight gradients where it never does, since it may have started
    anew and have lost what others had not written yet."""
    for refused in (True, False):
        pool, (first, _) = backward_pool()
        pool.result_held(first)
        pool.summed((first,), A, 1.0)
        pool.stored((first,), A)
        pool.worker_gone(A, 2.0)
        pool.expire(7.0)
        if refused:
            pool.give_back((first,), A)
        else:
            pool.tail(0, 9.0)
            assert pool.next_deadline() == 29.0
            assert [entry.tasks[0] for entry, _ in pool.expire(29.0)] == [first]
        pool.worker_here(B, is_server=False)
        pool.add_slots(B, 2, 64)
        assert first in [grant.entry.tasks[0] for grant in pool.grant(29.0)]
        pool.check()


def test_what_a_leaver_took_with_it_is_done_again_by_one_member() -> None:
    """Seven members had one task of it each, and each sent another whole vector for it before its next step's: two
    minutes of all lines of a stage. The one whose sum of the step has come begins at once; it is waited for while it
    asks for more, and not longer."""
    c = NodeId("c")
    pool = make_pool(A, B, c, tasks=0, slots=9)
    tasks = [TaskId(0, number, 0, "B") for number in range(8)]
    for task in tasks:
        pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    of = {grant.entry.tasks[0]: grant.worker for grant in pool.grant(0.0)}
    mine = {node: [task for task in tasks if of[task] == node] for node in (A, B, c)}
    for node, done in mine.items():
        for task in done:
            pool.result_held(task)
        pool.summed(done, node, 1.0)
    pool.tail(0, 2.0)
    pool.covered(mine[c], c)
    pool._workers[B].slots = pool._workers[c].slots = 0
    pool.add_slots(B, 9, 64)
    pool.add_slots(c, 1, 64)
    pool.worker_gone(A, 3.0)
    pool.expire(8.0)
    lost = mine[A]
    assert len(lost) > 1 and given(pool, 8.0) == [(c, lost[0].microbatch)], "B could take all, and c has sent its sum"
    pool.summed(lost[:1], c, 9.0)
    assert given(pool, 12.0) == [] and pool._choice.look_at == 13.0
    pool.add_slots(c, 1, 64)
    assert given(pool, 12.5) == [(c, lost[1].microbatch)]
    pool.summed(lost[1:2], c, 13.0)
    assert given(pool, 17.0) == []
    pool.expire(17.5)
    assert given(pool, 17.5) == [(B, lost[2].microbatch)], "c asks for no more"


def test_what_was_summed_up_before_a_server_restarted_is_not_given_to_others() -> None:
    """The claim comes before the step is open here, and holds as soon as it is; but a result must be held somewhere."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    task, other = TaskId(0, 0, 0, "B"), TaskId(0, 1, 0, "B")
    pool.worker_here(A, is_server=False)
    pool.add_slots(A, 2, 64)
    pool.claim((task, other), A, 0.0)
    pool.add(Entry((task,), needs_result=False, needs_gradient=True, tensors=TENSORS))
    pool.add(Entry((other,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    assert [grant.entry.tasks[0] for grant in pool.grant(0.0)] == [other]


def test_the_last_claim_on_a_link_is_what_counts() -> None:
    """A volunteer begins anew when another server of the stage is replaced, and says on the same link that it has
    nothing any more; a step that opens here only then is not kept for it (seed 115944 of the world)."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    task = TaskId(0, 0, 0, "B")
    pool.worker_here(A, is_server=False)
    pool.add_slots(A, 2, 64)
    pool.claim((task,), A, 0.0)
    pool.claim((), A, 1.0)
    pool.add(Entry((task,), needs_result=False, needs_gradient=True, tensors=TENSORS))
    assert [grant.entry.tasks[0] for grant in pool.grant(1.0)] == [task]


def test_a_grant_looks_at_no_other_entries() -> None:
    """Heaps and counts answer: with 4,096 open entries a grant compares a few, not all of them."""
    pool = Pool(8.0, "when_empty", 20.0, fences(1).__next__)
    looked = 0

    class Counted(Entry):
        @property
        def free(self) -> bool:
            nonlocal looked
            looked += 1
            return super().open and self.tensors is not None

    for number in range(4096):
        pool.add(Counted((forward(0, number),), needs_result=True, needs_gradient=False, tensors=TENSORS))
    pool.worker_here(A, is_server=False)
    looked = 0
    for _ in range(100):
        pool.add_slots(A, 1, 64)
        assert len(pool.grant(0.0)) == 1
    assert looked < 1000


def test_the_clock_of_weight_gradients_leaves_time_for_an_upload() -> None:
    """A contribution that takes minutes on a slow line does not expire while it is on its way."""
    pool, (first, second) = backward_pool()
    pool.allow_upload(250.0)
    pool.result_held(first)
    pool.summed((first,), A, 1.0)
    pool.tail(0, 5.0)
    assert [entry.tasks[0] for entry, _ in pool.expire(274.9)] == [second]
    assert [entry.tasks[0] for entry, _ in pool.expire(275.0)] == [first]


def test_what_is_doubted_goes_to_a_server_that_computes() -> None:
    """Not to another volunteer, however idle; other work goes to volunteers meanwhile. Where servers may not compute,
    volunteers get it."""
    pool = make_pool(A, B, SERVER, tasks=3, slots=1)
    assert given(pool) == [("a", 0), ("b", 1)]
    pool.give_back((forward(0, 0),), A, doubted=True)
    pool.reserve((forward(0, 0),))
    pool.add_slots(A, 1, 64)
    pool.add_slots(B, 1, 64)
    assert given(pool) == [("s", 0), ("a", 2)] or given(pool) == [("s", 0), ("b", 2)]
    pool.give_back((forward(0, 1),), B, doubted=True)
    pool.reserve((forward(0, 1),))
    assert given(pool, 1.0) == []  # the server has no slot left
    pool.add_slots(SERVER, 1, 64)
    assert given(pool, 1.0) == [("s", 1)]
    pool = make_pool(A, B, SERVER, tasks=1, collocated="never")
    assert given(pool) == [("a", 0)]
    pool.give_back((forward(0, 0),), A, doubted=True)
    pool.reserve((forward(0, 0),))
    assert given(pool) == [("b", 0)]


def test_who_brought_something_doubted_was_not_late() -> None:
    """Honest volunteers bring large gradients now and then. Whether they were false the ledger says; that others did
    the tasks again is no failure of theirs, and after three of them they got nothing for two minutes."""
    pool = make_pool(A, SERVER, tasks=4, slots=30)
    for number in range(4):
        task = forward(0, number)
        given(pool, float(number))
        pool.give_back((task,), A, doubted=True)
        pool.reserve((task,))
        given(pool, float(number))
        pool.result_held(task)
        pool.covered((task,), SERVER)
        assert [ruling for ruling in pool.take_rulings() if ruling.node == A] == []


@pytest.mark.parametrize(("apart_s", "tries"), [(10.0, 7), (JUDGED_WITHIN_S - 1.0, 1)])
def test_a_server_that_fails_with_what_is_doubted_does_not_stop_the_run(apart_s: float, tries: int) -> None:
    """Again and again it is the server's, or for two minutes; then volunteers may try, whose usual result counts, too.
    It was counted in failures alone: a server whose device hung had all the time that it took for eight of them."""
    pool = make_pool(A, B, SERVER, tasks=1, slots=30)
    now, turns = 0.0, []
    for _ in range(12):
        ((worker, _),) = given(pool, now)
        turns.append(worker)
        pool.give_back((forward(0, 0),), worker, doubted=worker == A, untried=worker != A)
        pool.reserve((forward(0, 0),))
        now += apart_s
        pool.expire(now)
    assert turns[0] == "a" and turns[1 : tries + 1] == ["s"] * tries and "b" in turns[tries + 1 :]


def test_whoever_holds_a_graph_for_nothing_is_told() -> None:
    """Its one lease at a time is taken, so another does the backward: the graph took a forward's room until the step
    was closed, and with all room taken nobody did the forwards that were left."""
    pool = make_pool(A, B, tasks=0)
    backwards = [TaskId(0, number, 0, "B") for number in range(3)]
    for task in backwards:
        pool.add(Entry((task,), needs_result=False, needs_gradient=True))
        assert pool.prefer(task, A)
    pool.supply(backwards[0], TENSORS)
    assert given(pool) == [("a", 0)] and pool.take_withdrawn() == []
    pool._rule(pool._conduct.overtaken_by_others(A, 0.0, 1.0))
    pool.supply(backwards[1], TENSORS)
    assert given(pool) == [("b", 1)]
    assert pool.take_withdrawn() == [(A, backwards[1])] and pool.take_withdrawn() == []
    pool.blame(A)
    assert sorted(pool.take_withdrawn()) == [(A, backwards[0]), (A, backwards[2])]


def test_a_gradient_that_is_waited_for_from_its_result_on_has_a_clock() -> None:
    """The worker has said that it is summed up, the tail has come, and the clock ran out before the result came by a
    slower link: from then on nothing had a time, and the worker's device could hang for ever."""
    pool = make_pool(A, tasks=0)
    task = TaskId(0, 0, 0, "B")
    pool.add(Entry((task,), needs_result=True, needs_gradient=True, tensors=TENSORS))
    assert given(pool) == [("a", 0)]
    pool.summed((task,), A, 1.0)
    pool.tail(0, 1.0)
    pool.clock(7.0)
    pool.result_held(task)
    clock = pool.next_deadline()
    assert clock is not None
    pool.expire(22.0)
    pool.expire(100.0)
    assert pool.open_to_all(0), "somebody else may do it"


def test_a_server_that_has_never_asked_for_work_keeps_nobody_from_it() -> None:
    """It may compute and has no device, so nothing is done by it: the only volunteer, though ruled out, is all there
    is, as where servers never compute."""
    pool = make_pool(A, tasks=1)
    pool.worker_here(SERVER, is_server=True)
    pool.blame(A)
    assert given(pool) == [("a", 0)]
    with_device = make_pool(A, SERVER, tasks=1)
    with_device.blame(A)
    assert given(with_device) == [("s", 0)]
