"""A slow worker is given what it brings back in time, and nothing that the others would wait for."""

from __future__ import annotations

import math
from itertools import count as fences

import pytest

from node.server.conduct import Conduct, Kind
from node.server.entries import Worker
from node.server.pool import Entry, Pool
from node.server.tables import Tables
from node.server.worth import TOLD_AFTER_S, TOLD_AFTER_STEPS, TOO_LATE, TRIAL_TIMES, Worth
from protocol.base.ids import NodeId, TaskId
from protocol.base.machine import LinkMoved, LinkUp
from tests.node.setting import make_plan, shard_tensor
from tests.node.test_core import Desk

FAST, ALSO_FAST, SLOW, NEW = NodeId("fast"), NodeId("also fast"), NodeId("slow"), NodeId("new")
SERVER = NodeId("server")
TAKES_S = {FAST: 1.0, ALSO_FAST: 1.0, SLOW: 5.0}
TENSORS = (shard_tensor(1),)


class Stage:
    """A pool of two fast workers and one that takes five times as long, all of them known, and a clock."""

    def __init__(self, times: float = 1.0) -> None:
        """`times` what `TAKES_S` says."""
        self.pool = Pool(1000.0, "never", 1000.0, fences(1).__next__)
        self.now, self.step = 0.0, -1
        self.grants: dict[tuple[int, int], NodeId] = {}
        """(step, microbatch) -> who had it last."""
        for node in TAKES_S:
            self.pool.worker_here(node, is_server=False)
        for node, seconds in TAKES_S.items():
            for _ in range(3):
                self.offers(1)
                assert self.asks(node) == 1
                self.brings(node, times * seconds)

    def offers(self, tasks: int) -> None:
        """So many forwards of a new step are ready; the step before is closed."""
        self.pool.drop_step(self.step)
        self.step += 1
        for number in range(tasks):
            task = TaskId(self.step, number, 0, "F")
            self.pool.add(Entry((task,), needs_result=True, needs_gradient=False, tensors=TENSORS))

    def asks(self, node: NodeId, slots: int = 1) -> int:
        """How many leases it gets when it asks for so many."""
        self.pool.clock(self.now)
        self.pool.add_slots(node, slots, 64)
        given = {grant.entry.tasks[0].microbatch: grant.worker for grant in self.pool.grant(self.now)}
        self.pool.check()
        self.grants.update({(self.step, microbatch): worker for microbatch, worker in given.items()})
        return sum(worker == node for worker in given.values())

    def brings(self, node: NodeId, seconds: float = 0.0) -> None:
        """All that it holds, after so long."""
        self.passes(seconds)
        for microbatch in range(64):
            if self.grants.get((self.step, microbatch)) == node:
                self.pool.result_held(TaskId(self.step, microbatch, 0, "F"))
        self.pool.check()

    def holds(self, node: NodeId) -> int:
        """How many leases of the step it was given."""
        return sum(worker == node for (step, _), worker in self.grants.items() if step == self.step)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.pool.expire(self.now)

    def rulings(self) -> list[tuple[NodeId, int, str]]:
        """What workers are told: who, leases at once, why."""
        return [(ruling.node, ruling.leases_max, ruling.reason) for ruling in self.pool.take_rulings()]


@pytest.mark.parametrize(("tasks", "gets"), [(4, 0), (30, 1)])
def test_a_slow_worker_helps_where_work_piles_up_and_nowhere_else(tasks: int, gets: int) -> None:
    """It takes 5 s, and the others do two a second: of thirty that are ready it gets one, of four none, although it
    is the only one that asks just now."""
    stage = Stage()
    stage.offers(tasks)
    assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1
    assert stage.asks(SLOW) == gets


def test_who_would_be_late_is_told_so_and_until_when_and_that_it_is_over() -> None:
    """After two steps and some seconds without a lease its owner reads why, and after the next lease that it gets work
    as before."""
    stage = Stage()
    stage.rulings()
    steps = max(TOLD_AFTER_STEPS, math.ceil(TOLD_AFTER_S))
    for _ in range(steps):
        assert stage.rulings() == []
        stage.offers(3)
        assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1 and stage.asks(SLOW, 0) == 0
        stage.asks(SLOW)
        stage.brings(FAST, 1.0)
        stage.brings(ALSO_FAST)
    stage.offers(0)
    (told,) = stage.pool.take_rulings()
    assert (told.node, told.leases_max, told.reason) == (SLOW, 0, TOO_LATE)
    assert told.seconds == pytest.approx(TRIAL_TIMES * TAKES_S[SLOW] - steps * 1.0)
    stage.offers(30)
    assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1
    stage.asks(SLOW, 0)
    assert stage.holds(SLOW) >= 1
    assert stage.rulings() == [(SLOW, -1, "")]


def test_who_gets_nothing_is_tried_with_one_lease_after_a_while_and_what_was_before_is_forgotten() -> None:
    """A home line that was busy is free again: after the trial it gets what it asks for."""
    stage = Stage()
    stage.offers(4)
    assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1 and stage.asks(SLOW, 2) == 0
    stage.brings(FAST, 1.0)
    stage.brings(ALSO_FAST)
    stage.passes(TRIAL_TIMES * TAKES_S[SLOW])
    stage.offers(4)
    assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1
    assert stage.holds(SLOW) == 1, "one, though it has two slots and two are ready"
    stage.brings(SLOW, 1.0)
    assert stage.asks(SLOW) == 1


def test_a_slow_worker_gets_everything_when_the_others_are_gone_or_stuck() -> None:
    """Nothing waits for somebody who does not come: a link that ends, and leases that hang, count no more."""
    for gone in (True, False):
        stage = Stage()
        stage.offers(4)
        assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1 and stage.asks(SLOW, 2) == 0
        if gone:
            stage.pool.worker_gone(FAST, stage.now)
            stage.pool.worker_gone(ALSO_FAST, stage.now)
        stage.passes(4.5)
        assert stage.asks(SLOW, 0) == 2, gone


@pytest.mark.parametrize(("tasks", "gets"), [(10, 1), (64, 3)])
def test_who_is_new_to_others_that_are_known_begins_with_what_would_be_in_time_if_it_took_ten_times_as_long(
    tasks: int, gets: int
) -> None:
    """Of ten that are ready one, of sixty three: the others do two a second. From its first result on it gets what it
    asks for."""
    stage = Stage()
    stage.pool.worker_here(NEW, is_server=False)
    stage.offers(tasks)
    assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1
    stage.passes(0.2)
    assert stage.asks(NEW, 4) == gets
    stage.brings(NEW, 1.0)
    assert stage.asks(NEW, 0) == 4 - gets


def test_where_nobody_is_known_everybody_gets_what_it_asks_for() -> None:
    """The first leases of a run."""
    pool = Pool(1000.0, "never", 1000.0, fences(1).__next__)
    pool.worker_here(NEW, is_server=False)
    pool.add_slots(NEW, 4, 64)
    for number in range(4):
        pool.add(Entry((TaskId(0, number, 0, "F"),), needs_result=True, needs_gradient=False, tensors=TENSORS))
    assert len(pool.grant(0.0)) == 4


@pytest.mark.parametrize("away", [True, False])
def test_what_took_long_while_a_server_was_away_makes_nobody_slow(away: bool) -> None:
    """Two of four alike were given nothing for three minutes after a server of their stage had been killed: they held
    results that it was to have, and brought them when it was back; the leases of the others had run out meanwhile.
    Where all servers are there, who takes so long is slow."""
    stage = Stage()
    stage.pool.worker_gone(SLOW, stage.now)
    stage.pool.worker_here(SERVER, is_server=True)
    stage.offers(4)
    if away:
        stage.pool.worker_gone(SERVER, stage.now)
    for _ in range(3):
        assert stage.asks(ALSO_FAST) == 1
        stage.brings(ALSO_FAST, 5.5)
    stage.pool.worker_here(SERVER, is_server=True)
    stage.offers(2)
    assert stage.asks(FAST) == 1
    assert stage.asks(ALSO_FAST) == (1 if away else 0)


@pytest.mark.parametrize("stood_still", [True, False])
def test_what_was_late_because_its_link_stood_still_makes_nobody_slow(stood_still: bool) -> None:
    """A gateway restarts, and the link goes on by another path: volunteers were given nothing for a minute after that.
    Whose link was well is slow."""
    stage = Stage()
    stage.pool.worker_gone(SLOW, stage.now)
    stage.offers(4)
    for _ in range(3):
        assert stage.asks(ALSO_FAST) == 1
        stage.passes(5.5)
        if stood_still:
            stage.pool.clock(stage.now)
            stage.pool.worker_late(ALSO_FAST, 4.5)
        stage.brings(ALSO_FAST)
    stage.offers(2)
    assert stage.asks(FAST) == 1
    assert stage.asks(ALSO_FAST) == (1 if stood_still else 0)


def test_a_server_hears_from_its_links_that_they_stood_still() -> None:
    """These seconds are no part of what an answer took, and whoever has no lease has no record either."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    desk.feed(LinkUp(SLOW, "volunteer"), 1.0)
    assert desk.machine.server is not None
    (*_, pool) = desk.machine.server._roles.pools()
    pool.add_slots(SLOW, 1, 64)
    pool.add(Entry((TaskId(0, 0, 1, "F"),), needs_result=True, needs_gradient=False, tensors=TENSORS))
    assert len(pool.grant(1.0)) == 1
    for node in (SLOW, NEW):  # NEW is a visitor, of whom nothing was said yet
        desk.feed(LinkMoved(node, 4.5), 7.0)
    assert pool._conduct.result_came(SLOW, 2.0, 1, 7.1) and pool._conduct.typical_s(SLOW, "result") == pytest.approx(
        0.6
    )
    assert NEW not in pool._conduct._records


def test_who_was_in_time_until_its_link_stood_still_for_a_while_gets_work_as_before_after_one_lease() -> None:
    """All that it held came two seconds late, where results take a twentieth. It is tried at once, and what was before
    the trial says nothing: a volunteer whose address had changed was given nothing for a minute."""
    stage = Stage(0.05)
    for _ in range(3):
        stage.offers(3)
        assert stage.asks(FAST) == stage.asks(ALSO_FAST) == 1
        assert stage.asks(FAST) == 1
        stage.brings(FAST, 0.05)
        stage.brings(ALSO_FAST)
    stage.offers(4)
    assert stage.asks(ALSO_FAST) == 1 and stage.asks(FAST, 3) == 3
    stage.brings(ALSO_FAST, 0.05)
    stage.brings(FAST, 1.9)
    stage.offers(2)
    assert stage.asks(ALSO_FAST) == 1
    assert stage.asks(FAST, 2) == 1, "one, to see what it takes now"
    stage.brings(ALSO_FAST, 0.05)
    stage.brings(FAST)
    stage.offers(2)
    assert stage.asks(ALSO_FAST) == 1 and stage.holds(FAST) == 1, "which has a slot left"


def test_who_is_near_the_limit_is_not_tried_each_time_that_it_gets_beyond() -> None:
    """It takes a little less than twice what is usual, and then twice as long again, until it is slow: each trial would
    cost a sum."""
    stage = Stage()
    seconds = [0.9] * 12 + [3.0] * 60
    while seconds:
        stage.offers(2)
        assert stage.asks(ALSO_FAST) == 1
        if not stage.asks(FAST):
            break
        stage.brings(ALSO_FAST, 1.0)
        stage.brings(FAST, seconds.pop(0))
    assert 50 < len(seconds) < 59, "after a few of them, not after the first"
    stage.offers(2)
    assert stage.asks(ALSO_FAST) == 1 and stage.asks(FAST) == 0


@pytest.mark.parametrize("late", [2.0, 4.5])
def test_who_answers_late_once_is_not_slow(late: float) -> None:
    """A device of a stage works for its other server too, so some of its answers take many times what others do, by
    chance: of 24 equal computers in a cloud each got nothing for minutes, time after time."""
    stage = Stage()
    for seconds in (0.0,) * 12 + (late,):
        stage.offers(2)
        assert stage.asks(ALSO_FAST) == stage.asks(FAST) == 1
        stage.brings(ALSO_FAST, 1.0)
        stage.brings(FAST, seconds)
    stage.offers(2)
    assert stage.asks(ALSO_FAST) == stage.asks(FAST) == 1


def test_of_sums_the_shortest_of_three_says_what_a_line_takes() -> None:
    """One that comes while the line or the device is at something else says nothing; three in a row do, and after a
    trial the first one does."""
    conduct = Conduct()
    conduct.answered(FAST, "each", 1.0, 0.0)
    for seconds, steady_s in ((0.5, 1.5), (9.0, 1.5), (9.0, 1.5), (9.0, 10.0), (0.7, 1.7)):
        conduct.answered(FAST, "sum", seconds, 0.0)
        assert conduct.steady_s(FAST, with_sum=True) == pytest.approx(steady_s)
    assert conduct.steady_s(FAST, with_sum=False) == 1.0
    conduct.tries(FAST, 1.0)
    conduct.answered(FAST, "sum", 8.0, 2.0)
    assert conduct.steady_s(FAST, with_sum=True) == pytest.approx(9.0)
    assert conduct.steady_s(NEW, with_sum=True) == 0.0


class Counting(Conduct):
    """Counts how often it is asked what a worker takes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def typical_s(self, node: NodeId, kind: Kind) -> float:
        self.asked += 1
        return super().typical_s(node, kind)


@pytest.mark.parametrize("workers", [3, 300])
@pytest.mark.parametrize("known", [True, False])
def test_a_look_costs_the_same_in_a_stage_of_three_and_of_three_hundred(workers: int, known: bool) -> None:
    """Each asks once in the time of a lease, at a moment of its own. While nobody had brought a result, all were
    counted at each of these moments: a world of ten thousand spent its time there."""
    nodes = [NodeId(f"{number:03}") for number in range(workers)]
    here = {node: Worker(node, is_server=False, slots=1, asked=True) for node in nodes}
    conduct = Counting()
    for node in nodes if known else ():
        conduct.answered(node, "each", 1.0, 0.0)
    worth = Worth(here, Tables(), conduct)
    looks = 3000
    for number in range(looks):
        assert worth.in_time(here[nodes[number % workers]], 1.0 + number / workers)
    assert looks <= conduct.asked <= 60 * looks


def test_whose_sums_come_late_gets_no_forward_that_would_make_it_send_one() -> None:
    """All three are equally fast with results. The sums of one take a minute, as its contributions to the backs' pools
    show; a forward's graph would bring it a backward, and that a sum."""
    pool, now = Pool(1000.0, "never", 1000.0, fences(1).__next__), 0.0
    nodes = (FAST, ALSO_FAST, SLOW)
    for node in nodes:
        pool.worker_here(node, is_server=False)
        pool.add_slots(node, 4, 64)
    for step in range(4):
        for number in range(6):
            task = TaskId(step, number, 0, "F")
            pool.add(Entry((task,), needs_result=True, needs_gradient=False, tensors=TENSORS))
        given = pool.grant(now)
        assert (SLOW in {grant.worker for grant in given}) == (step == 0)
        now += 1.0
        pool.clock(now)
        for grant in given:
            pool.result_held(grant.entry.tasks[0])
            pool.add_slots(grant.worker, 1, 64)
        pool.tail(step, now)
        for node, seconds in zip(nodes, (2.0, 3.0, 60.0), strict=True):
            if any(grant.worker == node for grant in given):
                pool.clock(now + seconds)
                pool.covered([TaskId(step, 0, 0, "B")], node)
        now += 60.0
        pool.clock(now)
        pool.drop_step(step)
        pool.check()
