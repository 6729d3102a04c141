"""A volunteer's sums: what is in one is known task by task, and an upload is the same however often it is sent."""

from __future__ import annotations

from itertools import count

from node.machine.jobs import DropAccumulators, TakeGradient
from node.machine.outbox import Outbox
from node.volunteer.gradients import Gradients
from protocol.base.ids import NodeId, TaskId
from protocol.messages import Contribute, Verdict
from tests.node.setting import TICKET, VOLUNTEER, Effects, backward, shard_tensor

SERVERS = (NodeId("f0"), NodeId("b0"))


class Desk:
    def __init__(self, tasks_max: int = 4, incarnation: int = 7, upload_s: float = 0.0) -> None:
        self.out = Outbox(VOLUNTEER, count(1))
        self.gradients = Gradients(self.out, incarnation, tasks_max, linger_s=0.25)
        self.gradients.reset(1, SERVERS, upload_s)

    def take(self) -> Effects:
        self.gradients.check()
        return Effects(self.out)

    def add(self, *tasks: TaskId) -> None:
        for task in tasks:
            accumulator = self.gradients.accumulator_for(task.step, 0)
            self.gradients.added(accumulator, (task,), (), TICKET, 0.0)

    def upload(self, *tasks: TaskId) -> list[Contribute]:
        """The parts that go out for these tasks."""
        self.add(*tasks)
        self.gradients.flush(tasks[0].step, 0.0)
        (job,) = self.take().jobs(TakeGradient)
        self.gradients.taken(job, tuple(shard_tensor(key) for key in job.shards))
        return self.take().sent(Contribute)


def verdict(contribute: Contribute, accepted: bool = True) -> Verdict:
    return Verdict(
        ledger_generation=1,
        contribution=contribute.contribution,
        step=contribute.step,
        tasks=contribute.tasks,
        accepted=accepted,
        number=0,
        reason="",
    )


def test_a_sum_is_not_cut_while_a_job_adds_to_it() -> None:
    """The linger timer runs, work comes after all and the device adds: the timer is off until the job has ended."""
    desk = Desk()
    desk.add(backward(0, 0))
    desk.gradients.send_complete([], lambda step: False, 1.0, True)
    assert desk.gradients.wake_at() == 1.25
    accumulator = desk.gradients.accumulator_for(0, 0)
    assert desk.gradients.wake_at() is None
    desk.gradients.wake(2.0)
    assert desk.take().jobs(TakeGradient) == []
    desk.gradients.added(accumulator, (backward(0, 1),), (), TICKET, 2.0)
    desk.gradients.flush(0, 0.0)
    (job,) = desk.take().jobs(TakeGradient)
    desk.gradients.taken(job, tuple(shard_tensor(key) for key in job.shards))
    assert desk.take().sent(Contribute)[0].tasks == (backward(0, 0), backward(0, 1))


def test_a_full_sum_is_sent_at_once() -> None:
    """As many backwards as the run allows, and the device cuts it."""
    desk = Desk(tasks_max=2)
    desk.add(backward(0, 0))
    assert desk.take().jobs(TakeGradient) == []
    desk.add(backward(0, 1))
    assert len(desk.take().jobs(TakeGradient)) == 1


def test_it_lingers_only_if_more_may_come() -> None:
    """Nothing more of the step expected: sent at once; else after the linger time; busy steps stay."""
    for tail, at, busy in ((True, 1.0, []), (False, 1.25, []), (True, None, [0])):
        desk = Desk()
        desk.add(backward(0, 0))
        desk.gradients.send_complete(busy, [lambda step: False, lambda step: True][tail], 1.0, True)
        assert len(desk.take().jobs(TakeGradient)) == (at == 1.0)
        desk.gradients.wake(1.25)
        assert len(desk.take().jobs(TakeGradient)) == (at == 1.25)
        assert desk.gradients.unsent_task_count == 1


def test_sums_go_in_the_order_of_their_steps() -> None:
    """Who has taken over a leaver's tasks of a step sends them before its sum of the next one: together on one line
    each takes twice as long, and the run waits for the older."""
    desk = Desk(tasks_max=100, upload_s=100.0)
    (first, _) = desk.upload(backward(0, 0))
    desk.add(backward(0, 1))
    desk.add(backward(1, 0))
    desk.gradients.send_complete([], lambda step: True, 1.0, True)
    assert desk.take().jobs(TakeGradient) == [], "the first one is on its way"
    desk.gradients.on_verdict(verdict(first), 80.0)
    desk.gradients.send_complete([], lambda step: True, 80.0, True)
    (cut,) = desk.take().jobs(TakeGradient)
    desk.gradients.taken(cut, tuple(shard_tensor(key) for key in cut.shards))
    sent = desk.take().sent(Contribute)
    assert [part.tasks for part in sent] == [(backward(0, 1),)] * 2
    desk.gradients.send_complete([], lambda step: True, 81.0, True)
    assert desk.take().jobs(TakeGradient) == []
    desk.gradients.on_verdict(verdict(sent[0]), 150.0)
    desk.gradients.send_complete([0], lambda step: True, 150.0, True)
    assert desk.take().jobs(TakeGradient) == [], "a lease of the older step is still to be done"
    desk.gradients.send_complete([], lambda step: True, 151.0, True)
    assert len(desk.take().jobs(TakeGradient)) == 1


def test_an_older_sum_that_waits_for_its_audit_is_not_waited_for() -> None:
    """An upload took 70 s from cut to verdict, so one without a verdict after as long has left the line: the sum of the
    next step goes then, and not when an audit has ended minutes later. The device is busy at that moment: it is asked a
    little later, and nothing rings meanwhile."""
    desk = Desk(tasks_max=100, upload_s=100.0)
    (first, _) = desk.upload(backward(0, 0))
    desk.gradients.on_verdict(verdict(first), 70.0)
    desk.add(backward(1, 0))
    desk.gradients.send_complete([], lambda step: True, 80.0, True)
    (cut,) = desk.take().jobs(TakeGradient)
    desk.gradients.taken(cut, tuple(shard_tensor(key) for key in cut.shards))
    desk.take()
    desk.add(backward(2, 0))
    desk.gradients.send_complete([], lambda step: True, 100.0, True)
    assert desk.take().jobs(TakeGradient) == [] and desk.gradients.wake_at() == 150.0
    desk.gradients.wake(150.0)
    assert desk.gradients.wake_at() is None
    desk.gradients.send_complete([], lambda step: True, 151.0, True)
    assert len(desk.take().jobs(TakeGradient)) == 1
    assert desk.gradients.outstanding == 2


def test_every_shard_gets_its_part_and_a_shard_that_comes_back_gets_the_same_again() -> None:
    """The number, the tasks and the tensor are those of the first time."""
    desk = Desk()
    parts = desk.upload(backward(0, 0))
    assert [part.shard for part in parts] == [0, 1]
    desk.gradients.resend(SERVERS[1])
    assert desk.take().sent(Contribute) == [parts[1]]


def test_a_verdict_ends_an_upload_once() -> None:
    """Its tensors are dropped; the same word again, or one on somebody else's, changes nothing."""
    desk = Desk()
    parts = desk.upload(backward(0, 0))
    assert desk.gradients.on_verdict(verdict(parts[0]), 1.0)
    assert sorted(desk.take().dropped) == [parts[0].tensors[0].key, parts[1].tensors[0].key]
    assert not desk.gradients.on_verdict(verdict(parts[0]), 1.0)
    assert desk.take().all == [] and desk.gradients.empty


def test_a_restart_never_reuses_a_number() -> None:
    """A verdict on the same number of an earlier life is not ours."""
    old = Desk(incarnation=1).upload(backward(0, 0))[0]
    desk = Desk(incarnation=2)
    new = desk.upload(backward(0, 0))[0]
    assert old.contribution.number == new.contribution.number and old.contribution != new.contribution
    assert not desk.gradients.on_verdict(verdict(old), 1.0)


def test_it_knows_what_it_has() -> None:
    """A task in a sum or in an upload without a verdict is there; after the verdict it is not."""
    desk = Desk()
    desk.add(backward(0, 0))
    assert desk.gradients.has(backward(0, 0)) and not desk.gradients.has(backward(0, 1))
    (part, _) = desk.upload(backward(0, 1))
    assert desk.gradients.has(backward(0, 0))
    desk.gradients.on_verdict(verdict(part), 1.0)
    assert not desk.gradients.has(backward(0, 0))


def test_a_closed_step_leaves_nothing() -> None:
    """Sums are dropped on the device, uploads in the store; what the device still cuts is dropped when it comes."""
    desk = Desk()
    parts = desk.upload(backward(0, 0))
    desk.add(backward(1, 0))
    desk.add(backward(2, 0))
    desk.gradients.flush(2, 0.0)
    (job,) = desk.take().jobs(TakeGradient)
    desk.gradients.drop_steps(2)
    effects = desk.take()
    assert len(effects.jobs(DropAccumulators)) == 1
    assert sorted(effects.dropped) == sorted(part.tensors[0].key for part in parts)
    desk.gradients.taken(job, tuple(shard_tensor(key) for key in job.shards))
    assert desk.take().dropped == list(job.shards) and desk.gradients.empty


def test_a_failed_addition_makes_the_sum_worthless() -> None:
    """Half an addition cannot be taken out: the step's sum is given up, with the tasks that were in it."""
    desk = Desk()
    desk.add(backward(0, 0))
    desk.gradients.accumulator_for(0, 0)
    assert desk.gradients.lose(0) == (backward(0, 0),)
    assert len(desk.take().jobs(DropAccumulators)) == 1 and desk.gradients.empty


def test_it_waits_twice_as_long_as_an_upload_takes() -> None:
    """On a slow line a sum that is not known to be the last is worth waiting for."""
    desk = Desk()
    (part, _) = desk.upload(backward(0, 0))
    desk.gradients.on_verdict(verdict(part), 30.0)
    desk.add(backward(1, 0))
    desk.gradients.send_complete([], lambda step: False, 31.0, True)
    assert desk.gradients.wake_at() == 91.0


def test_the_first_contribution_is_waited_for_as_on_a_slow_line() -> None:
    """Nobody knows yet how long an upload takes here: a whole stage's vector is not sent for one task because the
    second did not come within the linger time."""
    desk = Desk()
    desk.gradients.reset(1, SERVERS, upload_s=138.0)
    desk.add(backward(0, 0))
    desk.gradients.send_complete([], lambda step: False, 1.0, True)
    assert desk.gradients.wake_at() == 277.0


def test_what_comes_after_an_upload_of_its_step_waits_for_the_verdict() -> None:
    """A sum was refused for one task that somebody else had done, and its eighty others came back one by one after the
    tail: eighty vectors of 86 MB, each for one task, where one is enough."""
    desk = Desk(tasks_max=100)
    (part, _) = desk.upload(backward(0, 0))
    for microbatch in range(1, 80):
        desk.add(backward(0, microbatch))
        desk.gradients.send_complete([], lambda step: True, float(microbatch), True)
    assert desk.take().jobs(TakeGradient) == [] and desk.gradients.wake_at() is None
    desk.gradients.on_verdict(verdict(part), 80.0)
    desk.gradients.send_complete([], lambda step: True, 80.0, True)
    assert len(desk.take().jobs(TakeGradient)) == 1


def test_a_linger_that_ends_during_an_upload_of_the_step_begins_anew() -> None:
    """The timer was started before the step's first sum went out."""
    desk = Desk()
    desk.add(backward(0, 0))
    desk.gradients.send_complete([], lambda step: False, 1.0, True)
    desk.gradients.flush(0, 1.1)
    desk.take()
    desk.add(backward(0, 1))
    desk.gradients._sums[0].flush_at = 1.25
    desk.gradients.wake(1.25)
    assert desk.take().jobs(TakeGradient) == [] and desk.gradients.wake_at() is None
