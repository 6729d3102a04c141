"""Members that hang, dawdle, hoard or give all back cost a few leases: others do the work, and they are named."""

from __future__ import annotations

from itertools import count

import pytest

from node.server.conduct import (
    LEFT_MAX,
    OUT_MAX_S,
    OUT_S,
    OUT_TIMES,
    OVERTAKEN_MAX,
    PATIENCE,
    PATIENCE_MIN_S,
    REFUSED_MAX,
    SAMPLES_MIN,
    SLOW_FORGOTTEN_TIMES,
    Conduct,
    Ruling,
)
from node.server.patience import LEAVING_S
from node.server.pool import Entry, Pool
from protocol.base.ids import NodeId, TaskId
from tests.node.setting import shard_tensor

LEASE_S = 60.0
WORKERS = tuple(NodeId(name) for name in "abcd")
BAD = WORKERS[0]


def forward(step: int, microbatch: int) -> TaskId:
    return TaskId(step, microbatch, 0, "F")


class Stage:
    """A pool of forwards whose workers take `seconds` each, one lease after the other, and ask for four at a time.

    `bad` says what the first worker does with its leases: it takes them and hangs, or needs much longer, or gives them
    back at once.
    """

    def __init__(self, bad: str = "", seconds: float = 0.1, collocated: str = "never") -> None:
        self.pool = Pool(LEASE_S, collocated, LEASE_S, count(1).__next__)
        self.bad, self.seconds, self.now = bad, seconds, 0.0
        self.queues: dict[NodeId, list[tuple[float, TaskId]]] = {}
        self.rulings: list[Ruling] = []
        self.leases_of_bad = 0
        self.waits: set[str] = set()
        for node in WORKERS:
            if bad != "killed" or node != BAD:
                self.pool.worker_here(node, is_server=False)
                self.pool.add_slots(node, 4, 4)
                self.queues[node] = []

    def steps(self, number: int, microbatches: int = 8) -> float:
        """Runs steps of so many forwards, one after the other; returns how long they took."""
        start = self.now
        for step in range(number):
            for microbatch in range(microbatches):
                task = forward(step, microbatch)
                self.pool.add(Entry((task,), needs_result=True, needs_gradient=False, tensors=(shard_tensor(1),)))
            while any(self.pool.counts().values()):
                self.turn()
            self.pool.drop_step(step)
        return self.now - start

    def turn(self) -> None:
        for grant in self.pool.grant(self.now):
            task, queue = grant.entry.tasks[0], self.queues[grant.worker]
            self.leases_of_bad += grant.worker == BAD
            begins = max([self.now, *(end for end, _ in queue)])
            if grant.worker == BAD and self.bad == "hangs":
                continue
            if grant.worker == BAD and self.bad == "gives back":
                self.pool.give_back((task,), BAD, untried=True)
                self.pool.add_slots(BAD, 1, 4)
                continue
            factor = 60.0 if grant.worker == BAD and self.bad == "is slow" else 1.0
            queue.append((begins + factor * self.seconds, task))
        wait = self.pool.waiting_for(NodeId("server"))
        self.waits.add(wait.what if wait is not None else "")
        times = [queue[0][0] for queue in self.queues.values() if queue]
        alarm = self.pool.next_deadline()
        self.now = max(self.now, min([*times, *([alarm] if alarm is not None else [])], default=self.now + 0.01))
        self.pool.clock(self.now)
        self.pool.expire(self.now)
        for node, queue in self.queues.items():
            while queue and queue[0][0] <= self.now:
                self.pool.result_held(queue.pop(0)[1])
                self.pool.add_slots(node, 1, 4)
        self.rulings += self.pool.take_rulings()
        self.pool.check()


@pytest.mark.parametrize("bad", ["hangs", "is slow", "gives back"])
def test_a_bad_worker_costs_no_more_than_a_killed_one(bad: str) -> None:
    """Of four, over 400 steps of 0.3 s with leases of a minute: within 10 %, and it is named within a few leases."""
    killed, stage = Stage("killed").steps(400), Stage(bad)
    assert stage.steps(400) <= 1.1 * killed
    assert {ruling.node for ruling in stage.rulings} == {BAD}, "it is named, and nobody else is blamed"
    assert stage.leases_of_bad <= 8, "it got little, then nothing"
    assert any(f" by {BAD}" in wait for wait in stage.waits) or bad == "gives back"


def test_a_worker_that_is_out_may_try_again() -> None:
    """After two minutes it gets one lease; when it finishes it, as many as it asks for."""
    conduct, a = Conduct(), WORKERS[0]
    for number in range(OVERTAKEN_MAX):
        assert conduct.leases_max(a, 10.0 * number) in (None, 1)
        conduct.overtaken_by_others(a, 10.0 * number, 10.0 * number + 5.0)
    end = 10.0 * (OVERTAKEN_MAX - 1) + 5.0
    assert conduct.leases_max(a, end) == 0 and conduct.back_at(end) == end + OUT_S
    assert conduct.leases_max(a, end + OUT_S) == 1
    ruling = conduct.finished(a, end + OUT_S)
    assert ruling is not None and ruling.leases_max == -1 and conduct.leases_max(a, end + OUT_S) is None


def test_a_rest_is_as_long_as_what_was_lost_is_worth() -> None:
    """Leases of five seconds: two minutes, doubled while it goes on losing them, ten minutes at most. Leases that held
    the others up for twenty seconds each: twenty times that at once."""
    for waited_s, rests in ((5.0, (OUT_S, 240.0, 480.0, OUT_MAX_S, OUT_MAX_S)), (20.0, (400.0, 400.0, 480.0, 600.0))):
        conduct, now = Conduct(), 0.0
        for number in range(OVERTAKEN_MAX - 1 + len(rests)):
            ruling = conduct.overtaken_by_others(BAD, now, now + waited_s)
            assert ruling is not None
            expected = 0.0 if number < OVERTAKEN_MAX - 1 else rests[number - OVERTAKEN_MAX + 1]
            assert ruling.seconds == expected and ruling.leases_max == (0 if expected else 1)
            now += waited_s + expected
    assert 20.0 * OUT_TIMES == 400.0


def test_who_is_hung_up_on_for_the_third_time_gets_nothing_for_ten_minutes() -> None:
    """Results in between change nothing: what it has under way is done again by others each time. Once in a quarter of
    an hour is a program that has an error somewhere, and costs nobody anything."""
    conduct = Conduct()
    for number in range(REFUSED_MAX - 1):
        assert conduct.refused(BAD, 10.0 * number) is None
        conduct.finished(BAD, 10.0 * number)
    ruling = conduct.refused(BAD, 30.0)
    assert ruling is not None and (ruling.leases_max, ruling.seconds) == (0, OUT_MAX_S)
    assert ruling.reason == "it was hung up on 3 times for what it sent"
    assert conduct.finished(BAD, 31.0) is None and conduct.resting(31.0) == [BAD], "what it had under way came"
    assert conduct.leases_max(BAD, 30.0 + OUT_MAX_S) == 1
    assert conduct.finished(BAD, 30.0 + OUT_MAX_S) is not None
    seldom = Conduct()
    assert not any(seldom.refused(BAD, 900.0 * number) for number in range(10))


def test_whose_result_was_false_rests_whatever_else_it_brings() -> None:
    """It had other leases when that was found, and finishes one: it had all the work that it asked for at once."""
    conduct = Conduct()
    assert conduct.blamed(BAD, 5.0).seconds == OUT_MAX_S
    assert conduct.finished(BAD, 6.0) is None
    assert conduct.leases_max(BAD, 4.0 + OUT_MAX_S) == 0 and conduct.leases_max(BAD, 5.0 + OUT_MAX_S) == 1


def test_who_rests_hears_of_it_again_on_a_new_link() -> None:
    """Its owner paused and resumed meanwhile: the screen must not say that there is no work."""
    flapping = Flapping(WORKERS[1])
    pool = flapping.pool
    for _ in range(OVERTAKEN_MAX):
        flapping.offers()
        pool.worker_here(BAD, is_server=False)
        assert flapping.asks(BAD)
        flapping.passes(LEASE_S)
        flapping.others_finish_all()
        pool.worker_gone(BAD, flapping.now)
    told = pool.take_rulings()[-1]
    flapping.passes(told.seconds - 60.0)
    pool.worker_here(BAD, is_server=False)
    (again,) = pool.take_rulings()
    assert again.node == BAD and again.leases_max == 0 and 0 < again.seconds <= 60.0 and again.reason == told.reason
    assert pool.resting() == [], "another is there"
    pool.worker_gone(WORKERS[1], flapping.now)
    assert pool.resting() == [BAD]
    flapping.passes(OUT_MAX_S)
    assert pool.resting() == []
    pool.worker_gone(BAD, flapping.now)
    pool.worker_here(BAD, is_server=False)
    assert pool.take_rulings() == []


def test_the_only_one_that_brings_nothing_is_of_no_use() -> None:
    """Nobody overtakes it, since nobody else is there: its device hangs, and its leases come back to it time after
    time. Its first result makes all good."""
    flapping = Flapping()
    pool = flapping.pool
    pool.worker_here(BAD, is_server=False)
    (task, *_) = flapping.offers(1)
    for number in range(OVERTAKEN_MAX):
        assert pool.resting() == [] and number < OVERTAKEN_MAX
        while not flapping.asks(BAD, 1):
            flapping.passes(1.0)
        flapping.passes(5 * LEASE_S)
    assert pool.resting() == [BAD] and pool.take_rulings() == [], "it may go on trying"
    while not flapping.asks(BAD, 1):
        flapping.passes(1.0)
    pool.covered([task], BAD)
    assert pool.resting() == []


def test_a_rest_that_ends_between_two_inputs_is_noticed() -> None:
    """A busy process was not woken at that moment but spoken to: the work that waits for it found nobody."""
    flapping = Flapping(WORKERS[1])
    pool = flapping.pool
    pool.worker_here(BAD, is_server=False)
    pool.blame(BAD)
    pool.add_slots(BAD, 4, 64)
    flapping.offers(1)
    assert pool.grant(flapping.now) == []
    pool.clock(OUT_MAX_S + 1.0)
    assert [grant.worker for grant in pool.grant(OUT_MAX_S + 1.0)] == [BAD]


def test_leases_that_run_out_together_count_once() -> None:
    """A computer that stood still for a moment had four of them; that is one failure."""
    conduct, a = Conduct(), WORKERS[0]
    assert conduct.overtaken_by_others(a, 0.0, 8.0) is not None
    assert [conduct.overtaken_by_others(a, start, 8.0) for start in (0.1, 0.2, 0.3)] == [None] * 3
    assert conduct.leases_max(a, 8.0) == 1


def test_nobody_is_blamed_while_nothing_moves() -> None:
    """All leases run out since a server is away: they go round, and when the first answers come all is forgotten."""
    stage = Stage()
    stage.steps(20)
    task = forward(100, 0)
    stage.pool.add(Entry((task,), needs_result=True, needs_gradient=False, tensors=(shard_tensor(1),)))
    for _ in range(10):
        stage.pool.grant(stage.now)
        stage.now += 100.0
        stage.pool.clock(stage.now)
        stage.pool.expire(stage.now)
    assert stage.pool.take_rulings() == []
    stage.now += 10.0
    stage.pool.expire(stage.now)
    (grant,) = stage.pool.grant(stage.now)
    stage.pool.result_held(task)
    assert grant.worker not in {ruling.node for ruling in stage.pool.take_rulings() if ruling.leases_max >= 0}


def test_patience_follows_the_faster_half() -> None:
    """Two of four that are slow do not make the others wait; one that is alone is measured by itself."""
    conduct = Conduct()
    assert conduct.patience_s("result", LEASE_S) == LEASE_S
    for node, seconds in zip(WORKERS, (1.0, 1.0, 50.0, 50.0), strict=True):
        for _ in range(SAMPLES_MIN):
            conduct.answered(node, "result", seconds, 0.0)
    assert conduct.patience_s("result", LEASE_S) == PATIENCE * 1.0
    assert conduct.is_slow(WORKERS[2], 100.0) and not conduct.is_slow(WORKERS[0], 100.0)
    assert conduct.patience_s("gradient", LEASE_S) == LEASE_S
    alone = Conduct()
    for _ in range(SAMPLES_MIN):
        alone.answered(BAD, "result", 0.001, 0.0)
    assert alone.patience_s("result", LEASE_S) == PATIENCE_MIN_S


def test_who_was_slow_once_is_measured_anew() -> None:
    """It waits for the others, but not for ever: after some of its own times it gets work, and one answer in the usual
    time is enough to be one of them again. (A volunteer whose computer was busy starved beside servers that took all
    there was.)"""
    conduct = Conduct()
    for node, seconds in zip(WORKERS[:2], (0.01, 5.0), strict=True):
        for _ in range(SAMPLES_MIN):
            conduct.answered(node, "result", seconds, 0.0)
    assert conduct.is_slow(WORKERS[1], SLOW_FORGOTTEN_TIMES * 5.0 - 0.1)
    assert not conduct.is_slow(WORKERS[1], SLOW_FORGOTTEN_TIMES * 5.0)
    conduct.answered(WORKERS[1], "result", 0.01, SLOW_FORGOTTEN_TIMES * 5.0)
    assert not conduct.is_slow(WORKERS[1], SLOW_FORGOTTEN_TIMES * 5.0 + 0.1)


def test_servers_compute_when_the_only_volunteer_hangs() -> None:
    """`when_empty` counts who works, not who is linked."""
    stage = Stage("hangs", collocated="when_empty")
    for node in WORKERS[1:]:
        stage.pool.worker_gone(node, 0.0)
        del stage.queues[node]
    server = NodeId("s")
    stage.pool.worker_here(server, is_server=True)
    stage.pool.add_slots(server, 4, 4)
    stage.queues[server] = []
    took = stage.steps(20)
    assert took < LEASE_S + 20 * 8 * stage.seconds + 30.0
    assert {ruling.node for ruling in stage.rulings} == {BAD}


def test_an_idle_volunteer_does_not_keep_the_servers_from_work() -> None:
    """It is linked and never asks for anything: after a moment a server that may compute gets the work."""
    pool = Pool(LEASE_S, "when_empty", LEASE_S, count(1).__next__)
    pool.worker_here(BAD, is_server=False)
    pool.worker_here(NodeId("s"), is_server=True)
    pool.add_slots(NodeId("s"), 1, 4)
    pool.add(Entry((forward(0, 0),), needs_result=True, needs_gradient=False, tensors=(shard_tensor(1),)))
    assert pool.grant(0.5) == []
    alarm = pool.next_deadline()
    assert alarm is not None and alarm < 5.0
    pool.expire(alarm)
    assert [grant.worker for grant in pool.grant(alarm)] == ["s"]


def test_summed_up_and_never_sent_is_a_lease_that_ran_out() -> None:
    """A worker that says that it has computed, and never contributes, is overtaken like one that hangs."""
    pool = Pool(LEASE_S, "never", LEASE_S, count(1).__next__)
    good = WORKERS[1]
    for node in (BAD, good):
        pool.worker_here(node, is_server=False)
    now = 0.0
    rulings: list[Ruling] = []
    for step in range(40):
        tasks = [TaskId(step, microbatch, 0, "B") for microbatch in range(2)]
        for task in tasks:
            pool.add(Entry((task,), needs_result=False, needs_gradient=True, tensors=(shard_tensor(1),)))
        for node in (BAD, good):
            pool.add_slots(node, 1, 1)
        while any(pool.counts().values()):
            grants = pool.grant(now)
            for grant in grants:
                pool.summed(grant.entry.tasks, grant.worker, now)
                pool.tail(step, now)
                if grant.worker == good:
                    pool.clock(now + 0.2)
                    pool.covered(grant.entry.tasks, good)
                    pool.add_slots(good, 1, 1)
            alarm = pool.next_deadline()
            now = now + 0.2 if grants or alarm is None else max(now, alarm)
            pool.clock(now)
            pool.expire(now)
            rulings += pool.take_rulings()
        pool.drop_step(step)
    assert {ruling.node for ruling in rulings} == {BAD} and rulings[-1].leases_max == 0
    assert now < LEASE_S * 2 + 40


class Flapping:
    """A pool of backwards for a worker whose owner pauses it again and again; a good one does what is left over."""

    def __init__(self, *others: NodeId) -> None:
        self.pool = Pool(LEASE_S, "never", LEASE_S, count(1).__next__)
        self.now, self.step, self.others = 0.0, 0, others
        for node in others:
            self.pool.worker_here(node, is_server=False)

    def offers(self, tasks: int = 4) -> list[TaskId]:
        """So many backwards of a new step are there; what else there was is done."""
        self.pool.drop_step(self.step)
        self.step += 1
        offered = [TaskId(self.step, microbatch, 0, "B") for microbatch in range(tasks)]
        for task in offered:
            self.pool.add(Entry((task,), needs_result=False, needs_gradient=True, tensors=(shard_tensor(1),)))
        return offered

    def asks(self, node: NodeId, slots: int = 2) -> list[TaskId]:
        """What `node` gets when it asks for so much."""
        self.pool.clock(self.now)
        self.pool.add_slots(node, slots, 64)
        tasks = [grant.entry.tasks[0] for grant in self.pool.grant(self.now) if grant.worker == node]
        self.pool.check()
        return tasks

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.pool.clock(self.now)
        self.pool.expire(self.now)

    def others_finish_all(self) -> None:
        for node in self.others:
            while tasks := self.asks(node):
                self.passes(0.1)
                self.pool.covered(tasks, node)
            self.pool.worker_here(node, is_server=False)  # without the slots that are left


@pytest.mark.parametrize("pause", ["returns", "returns late", "is killed", "is killed with sums"])
@pytest.mark.parametrize("results", [False, True])
def test_who_pauses_again_and_again_gets_work_at_once_each_time(pause: str, results: bool) -> None:
    """The owner needs the computer: leases come back or the link is gone, and others do the work, before the link
    closes or after. Eight times within minutes, with and without results in between."""
    flapping = Flapping(WORKERS[1])
    pool = flapping.pool
    for _ in range(8):
        flapping.offers()
        pool.worker_here(BAD, is_server=False)
        tasks = flapping.asks(BAD)
        assert len(tasks) == 2, "it has as many as it asked for"
        if results:
            pool.covered(tasks[:1], BAD)
        flapping.passes(0.5)
        if pause.startswith("returns"):
            pool.give_back(tasks[results:], BAD, untried=True)
        if pause == "is killed with sums":
            pool.summed(tasks, BAD, flapping.now)
            pool.tail(flapping.step, flapping.now)
        if pause == "returns late":
            flapping.others_finish_all()
        pool.worker_gone(BAD, flapping.now)
        flapping.passes(10.0)
        flapping.others_finish_all()
        assert not any(pool.counts().values())
    assert pool.take_rulings() == []


@pytest.mark.parametrize(("upload_s", "has_failed"), [(100.0, False), (0.0, True)])
def test_who_brings_large_sums_before_it_moves_has_not_failed(upload_s: float, has_failed: bool) -> None:
    """It gives back what it has not begun and sends what it has summed up, for four minutes where an upload may take
    100 s. Where that takes no time, who stays so long has given its leases back and stayed."""
    flapping = Flapping(WORKERS[1])
    pool = flapping.pool
    pool.allow_upload(upload_s)
    for _ in range(8):
        flapping.offers()
        pool.worker_here(BAD, is_server=False)
        tasks = flapping.asks(BAD)
        pool.give_back(tasks, BAD, untried=True)
        flapping.passes(10.0)
        flapping.others_finish_all()
        flapping.passes(240.0)
        pool.worker_gone(BAD, flapping.now)
    assert bool(pool.take_rulings()) == has_failed


def test_what_nobody_else_takes_goes_back_at_once_to_whoever_paused() -> None:
    """The others are busy: what it had when its owner paused it waits for it, and not longer each time."""
    flapping = Flapping(WORKERS[1])
    offered = flapping.offers(2)
    for _ in range(8):
        flapping.pool.worker_here(BAD, is_server=False)
        assert flapping.asks(BAD) == offered
        flapping.passes(0.5)
        flapping.pool.give_back(offered, BAD, untried=True)
        assert flapping.pool.grant(flapping.now) == []
        flapping.pool.worker_gone(BAD, flapping.now)
        flapping.passes(1.0)


@pytest.mark.parametrize("how", ["asks for more", "comes back", "asks for all at once", "has the graphs"])
def test_who_takes_leases_and_gives_them_back_hundreds_of_times_gets_nothing(how: str) -> None:
    """On one link it is out soon; with a new link each time, or where it need not ask, somewhat later."""
    flapping = Flapping(WORKERS[1])
    pool, taken = flapping.pool, 0
    pool.worker_here(BAD, is_server=False)
    for number in range(400):
        offered = flapping.offers()
        if how == "has the graphs":
            for task in offered[:2]:
                pool.prefer(task, BAD)
        first = number == 0
        slots = {"asks for all at once": 64 * first, "has the graphs": 2 * first}.get(how, 2)
        tasks = flapping.asks(BAD, slots)
        taken += len(tasks)
        flapping.passes(0.5)
        pool.give_back(tasks, BAD, untried=True)
        if how == "comes back":
            pool.worker_gone(BAD, flapping.now)
            pool.worker_here(BAD, is_server=False)
        flapping.others_finish_all()
    most = {"asks for more": 5, "comes back": 2 * LEFT_MAX, "asks for all at once": 64}
    assert taken <= most.get(how, 2 * (LEAVING_S / 0.6 + 2))
    if how != "asks for all at once":
        assert {ruling.node for ruling in pool.take_rulings() if ruling.leases_max == 0} == {BAD}
    assert flapping.asks(BAD) == []
    flapping.offers()
    assert how == "asks for all at once" or flapping.asks(BAD) == []


def test_leases_that_run_out_count_over_a_new_link() -> None:
    """Whoever hangs and is overtaken is not forgiven by leaving."""
    flapping = Flapping(WORKERS[1])
    for number in range(OVERTAKEN_MAX):
        flapping.offers()
        flapping.pool.worker_here(BAD, is_server=False)
        assert len(flapping.asks(BAD)) == (2 if number == 0 else 1)
        flapping.passes(LEASE_S)
        flapping.others_finish_all()
        flapping.pool.worker_gone(BAD, flapping.now)
    flapping.pool.worker_here(BAD, is_server=False)
    flapping.offers()
    assert flapping.asks(BAD) == []


def test_leaving_is_counted_within_ten_minutes_and_until_the_next_result() -> None:
    """An owner who pauses once in a while, or whose computer does something in between, is never out."""
    conduct, a, b, c = Conduct(), *WORKERS[:3]
    assert [conduct.left(a, OUT_MAX_S * number) for number in range(3 * LEFT_MAX)] == [None] * 3 * LEFT_MAX
    for number in range(3 * LEFT_MAX):
        assert conduct.left(b, float(number)) is None
        assert number % 4 or conduct.finished(b, float(number)) is None
    rulings = [conduct.left(c, float(number)) for number in range(LEFT_MAX)]
    assert rulings[:-1] == [None] * (LEFT_MAX - 1) and rulings[-1] is not None and rulings[-1].leases_max == 0
    assert conduct.leases_max(c, LEFT_MAX + OUT_MAX_S) == 1


def test_a_sum_says_once_how_fast_its_sender_is_and_not_how_long_its_audit_took() -> None:
    """Verdicts are said again where a link was broken, and what was whole waits for an auditor."""
    conduct, a = Conduct(), WORKERS[0]
    assert not conduct.sum_came(a, 0, 5.0, None, 9.0), "it has done nothing here"
    conduct.answered(a, "result", 1.0, 4.0)
    assert conduct.sum_came(a, 0, 5.0, None, 9.0) and conduct.typical_s(a, "sum") == 4.0
    assert not conduct.sum_came(a, 0, 5.0, None, 30.0) and conduct.typical_s(a, "sum") == 4.0
    conduct.sum_is_whole(a, 1, 19.0)
    assert conduct.sum_came(a, 1, 15.0, None, 90.0) and conduct.typical_s(a, "sum") == 4.0


def test_the_seconds_in_which_a_link_stood_still_are_no_part_of_what_an_answer_took() -> None:
    """Of results and of sums, also of one that had begun before; a trial that was under way is one all the same."""
    conduct, a = Conduct(), WORKERS[0]
    conduct.tries(a, 0.0)
    conduct.stood_still(a, 4.0, 6.0)
    assert conduct.result_came(a, 1.0, 2, 7.0)
    assert (conduct.typical_s(a, "result"), conduct.typical_s(a, "each")) == (2.0, 1.0)
    conduct.stood_still(a, 3.0, 12.0)
    assert conduct.sum_came(a, 0, 8.0, None, 13.0) and conduct.typical_s(a, "sum") == 2.0
    assert conduct.result_came(a, 14.0, 1, 16.0) and conduct.typical_s(a, "result") == 2.0


def test_who_moves_its_link_with_each_result_is_found_out_to_be_slow() -> None:
    """Some seconds of ten minutes are excused, and then no more until these have passed."""
    conduct, a = Conduct(), WORKERS[0]
    for number in range(100):
        conduct.stood_still(a, 4.5, 5.0 * number + 4.9)
        conduct.result_came(a, 5.0 * number, 1, 5.0 * number + 5.0)
    assert conduct.typical_s(a, "result") > 4.5
    conduct.stood_still(a, 4.5, 2000.0)
    conduct.answered(a, "result", 0.5, 1990.0)
    assert conduct.result_came(a, 1995.0, 1, 2000.0) and conduct.typical_s(a, "result") == pytest.approx(0.5)


def test_a_pace_of_long_ago_says_nothing() -> None:
    """A computer that was busy for a while is measured anew, like whoever comes new."""
    conduct, a = Conduct(), WORKERS[0]
    conduct.answered(a, "each", 50.0, 0.0)
    assert conduct.pace_s(a, 10.0) == 50.0 and conduct.pace_s(a, 10_000.0) == 0.0
    conduct.answered(a, "each", 1.0, 10_000.0)
    assert conduct.pace_s(a, 10_001.0) == 1.0
    conduct.answered(a, "each", 3.0, 10_001.0)
    assert conduct.pace_s(a, 10_002.0) == 2.0


def test_what_began_before_a_trial_says_nothing_and_the_first_answers_after_it_stand_alone() -> None:
    """A sum of the step before, which came late for the same reason as the results before it."""
    conduct, a = Conduct(), WORKERS[0]
    for _ in range(4):
        conduct.answered(a, "result", 6.0, 6.0)
        conduct.answered(a, "each", 6.0, 6.0)
    conduct.tries(a, 7.0)
    assert conduct.tried_at(a) == 7.0 and not conduct.says_how_fast(a, 6.0) and conduct.says_how_fast(a, 7.0)
    assert not conduct.sum_came(a, 3, 0.0, None, 8.0) and conduct.typical_s(a, "sum") == 0.0
    conduct.answered(a, "result", 1.0, 8.0)
    conduct.answered(a, "each", 1.0, 8.0)
    assert conduct.typical_s(a, "result") == conduct.typical_s(a, "each") == conduct.pace_s(a, 8.0) == 1.0
    assert conduct.sum_came(a, 4, 9.0, None, 10.0) and conduct.typical_s(a, "sum") == 1.0
    conduct.answered(a, "result", 3.0, 11.0)
    assert conduct.typical_s(a, "result") == 1.5
