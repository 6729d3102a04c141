"""A volunteer asks for work, does the most urgent first, sends results at once, and forgets what is closed."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from node.machine.jobs import (
    Backward,
    DropGraphs,
    DropParameters,
    Forward,
    LoadParameters,
    RouteEnd,
    SetUpDevice,
    TakeGradient,
)
from node.machine.outbox import Outbox
from node.volunteer.volunteer import VolunteerMachine
from protocol.base.ids import NodeId, TaskId, TensorRef, Ticket
from protocol.base.machine import HangUp
from protocol.messages import (
    Contribute,
    FetchInput,
    FetchParameters,
    Flush,
    Forget,
    InputAnswer,
    InputGradient,
    Lease,
    LeaseReturned,
    Output,
    Parameters,
    Ready,
    StepClosed,
    Summed,
    Verdict,
    VersionReady,
    Work,
)
from protocol.run.changes import RunChange
from protocol.run.plan import Plan
from tests.node.setting import TICKET, VOLUNTEER, Effects, activation, backward, make_config, make_plan, shard_tensor

CONFIG = make_config()
FRONT, BACK = NodeId("f0"), NodeId("b0")


def forward(step: int, microbatch: int, stage: int = 0) -> TaskId:
    return TaskId(step, microbatch, stage, "F")


class Desk:
    """A volunteer of stage 0 whose device is ready; both servers are linked and ready."""

    def __init__(self, stage: int = 0, plan: Plan | None = None) -> None:
        self.out = Outbox(VOLUNTEER, count(1))
        self.machine = VolunteerMachine(CONFIG, 259, self.out, incarnation=7)
        self.servers: tuple[NodeId, ...] = (NodeId(f"f{stage}"), NodeId(f"b{stage}"))
        self.stage = stage
        self.now = 0.0
        self._keys = count(500)
        self.begin(plan or make_plan())

    def begin(self, plan: Plan) -> None:
        assert self.machine.set_plan(plan, self.stage)
        (job,) = self.take().jobs(SetUpDevice)
        for server in self.servers:
            self.machine.link_up(server)
        self.machine.computed(job, None, self.now)
        self.plan = plan
        for server in self.servers:
            self.say(server, VersionReady(ledger_generation=plan.ledger_generation, version=0))

    def take(self) -> Effects:
        self.machine.check()
        return Effects(self.out)

    def say(self, peer: NodeId, message: Any) -> Effects:
        self.machine.handle(peer, message, self.now)
        return self.take()

    def done(self, job: Any, result: Any = None) -> Effects:
        self.machine.computed(job, result, self.now)
        return self.take()

    def tensor(self) -> TensorRef:
        return activation(next(self._keys), CONFIG)

    def tokens(self) -> TensorRef:
        return TensorRef(next(self._keys), (CONFIG.batch.samples, CONFIG.model.context), "int32", 32)

    def lease(self, *tasks: TaskId, **changes: Any) -> Lease:
        by_op = {1: (self.tokens() if tasks[0].op == "F" else self.tensor(),), 3: (self.tensor(), self.tokens())}
        fields = {
            "ledger_generation": self.plan.ledger_generation,
            "tasks": tasks,
            "ticket": TICKET,
            "version": CONFIG.version_of(tasks[0].step),
            "deadline_s": 6.4,
            "front": self.servers[0],
            "back": self.servers[1],
            "recompute": False,
            "need_input_gradient": False,
            "need_weight_gradient": tasks[-1].op == "B",
            "tensors": by_op[len(tasks)],
            **changes,
        }
        return Lease(**fields)

    def flush(self, step: int, leases: dict[NodeId, int]) -> Effects:
        """Every server says that nothing of the step is left; `leases` that it gave are 0 where they are not named."""
        for server in self.servers:
            word = Flush(ledger_generation=self.plan.ledger_generation, step=step, leases=leases.get(server, 0))
            effects = self.say(server, word)
        return effects

    def load(self, version: int = 0) -> Effects:
        """Both shards of a version arrive, and the device loads it."""
        for shard, server in enumerate(self.servers):
            tensors = (shard_tensor(next(self._keys)),)
            parameters = Parameters(
                ledger_generation=self.plan.ledger_generation, version=version, shard=shard, tensors=tensors
            )
            effects = self.say(server, parameters)
        (job,) = effects.jobs(LoadParameters)
        return self.done(job)

    def compute_forward(self, microbatch: int = 0, step: int = 0) -> Effects:
        """A forward from lease to output."""
        effects = self.say(self.servers[0], self.lease(forward(step, microbatch)))
        if not effects.jobs(Forward):
            effects = self.load(CONFIG.version_of(step))
        (job,) = effects.jobs(Forward)
        return self.done(job, self.tensor())


def test_it_asks_for_work_as_soon_as_servers_are_ready() -> None:
    """For two forwards, of the four that it may hold, and for two recomputations."""
    desk = Desk()
    out = Outbox(VOLUNTEER, count(1))
    machine = VolunteerMachine(CONFIG, 259, out, incarnation=7)
    machine.set_plan(make_plan(), 0)
    (job,) = Effects(out).jobs(SetUpDevice)
    machine.computed(job, None, 0.0)
    for server in desk.servers:
        machine.link_up(server)
    assert [ready.hello for ready in Effects(out).sent(Ready)] == [True, True]
    slots = {}
    for server in desk.servers:
        machine.handle(server, VersionReady(ledger_generation=1, version=0), 0.0)
        readies = Effects(out).sent(Ready, server)
        slots[server] = [(r.slots, r.graph_slots) for r in readies if r.slots or r.graph_slots]
    assert slots == {"f0": [(0, ((0, 2),))], "b0": [(2, ())]}


def test_a_server_that_takes_work_hears_once_more_only_of_somebody_who_has_something() -> None:
    """The slots are word enough of a volunteer that holds nothing; one that takes none says that it is here; one that
    has a graph names it again, since a server that did not serve yet has not kept what it said at first."""
    desk = Desk()
    desk.machine.link_down(BACK)
    desk.machine.link_up(BACK)
    assert [type(word) for word in desk.take().sent(Work, BACK)] == [Ready, Summed]
    ready = VersionReady(ledger_generation=1, version=1)
    words = desk.say(BACK, ready).sent(Work, BACK)
    assert [(type(word), getattr(word, "slots", 0)) for word in words if not isinstance(word, FetchParameters)] == [
        (Ready, 2)
    ]
    desk.compute_forward()
    desk.machine.link_down(BACK)
    desk.machine.link_up(BACK)
    desk.take()
    assert next(word.graphs for word in desk.say(BACK, ready).sent(Ready, BACK)) == (forward(0, 0),)
    idle = Desk()
    idle.machine.link_down(BACK)
    idle.machine.drain(0.0)
    idle.machine.link_up(BACK)
    idle.take()
    assert [(word.hello, word.slots) for word in idle.say(BACK, ready).sent(Ready, BACK)] == [(False, 0)]


def test_a_run_made_longer_gives_work_of_its_new_steps() -> None:
    """The plan says that the operator has changed the number of steps: a lease of a later one is no stranger's."""
    desk, step = Desk(), CONFIG.steps
    longer = RunChange("steps", str(step + 2), from_step=1)
    assert not desk.machine.set_plan(msgspec.structs.replace(make_plan(generation=2), changes=(longer,)), 0)
    effects = desk.say(desk.servers[0], desk.lease(forward(step, 0)))
    assert HangUp not in map(type, effects.all)
    closed = desk.say(desk.servers[0], StepClosed(ledger_generation=1, step=step)).all
    assert HangUp not in map(type, closed)
    refused = desk.say(desk.servers[0], desk.lease(forward(step + 2, 0))).all
    assert HangUp in map(type, refused), "beyond the new end"


def test_a_changed_learning_rate_leaves_the_places_of_parameters_as_the_servers_have_them() -> None:
    """How many binary places parameters travel in follows from the rate in the run's file, whatever it is now."""
    desk = Desk()
    rate = RunChange("optimizer.learning_rate", "0.9", from_step=1)
    desk.machine.set_plan(msgspec.structs.replace(make_plan(generation=2), changes=(rate,)), 0)
    desk.take()
    desk.machine.device_lost("it was pulled out")
    (job,) = desk.take().jobs(SetUpDevice)
    assert job.config == CONFIG


def test_slots_that_lie_idle_at_one_front_do_not_starve_another() -> None:
    """Two fronts: each may fill the volunteer's room alone."""
    plan = make_plan(fronts=2)
    out = Outbox(VOLUNTEER, count(1))
    machine = VolunteerMachine(CONFIG, 259, out, incarnation=7)
    machine.set_plan(plan, 0)
    machine.computed(Effects(out).jobs(SetUpDevice)[0], None, 0.0)
    for server in ("f0", "g0"):
        machine.link_up(NodeId(server))
        machine.handle(NodeId(server), VersionReady(ledger_generation=1, version=0), 0.0)
    effects = Effects(out)
    for server in ("f0", "g0"):
        assert [ready.graph_slots for ready in effects.sent(Ready, server) if ready.graph_slots] == [((0, 2),)]


def test_a_forward_waits_for_its_version_and_its_output_goes_out_at_once() -> None:
    """Parameters are fetched from every shard; the result goes to the back server, the input is dropped."""
    desk = Desk()
    lease = desk.lease(forward(0, 0))
    effects = desk.say(FRONT, lease)
    assert effects.peers(FetchParameters) in ([], ["f0", "b0"]) and effects.jobs(Forward) == []
    (job,) = desk.load().jobs(Forward)
    effects = desk.done(job, desk.tensor())
    assert [output.task for output in effects.sent(Output, "b0")] == [forward(0, 0)]
    assert lease.tensors[0].key in effects.dropped


def test_a_backward_uses_the_graph_that_is_kept() -> None:
    """No input is fetched; the weight gradient goes into the step's sum."""
    desk = Desk()
    desk.compute_forward()
    effects = desk.say(BACK, desk.lease(backward(0, 0)))
    (job,) = effects.jobs(Backward)
    assert job.input is None and job.accumulator is not None and effects.sent(FetchInput) == []


def test_a_backward_without_a_graph_fetches_the_input_first() -> None:
    """The front answers, the device recomputes. If the front has to wait for the input itself, the lease holds no slot
    meanwhile: others may be what makes the input."""
    desk = Desk()
    desk.compute_forward()
    effects = desk.say(BACK, desk.lease(backward(0, 1), recompute=True))
    assert effects.peers(FetchInput) == ["f0"] and effects.jobs(Backward) == []
    (job,) = desk.say(FRONT, InputAnswer(ledger_generation=1, task=forward(0, 1), tensors=(desk.tokens(),))).jobs(
        Backward
    )
    assert job.input is not None
    desk.done(job, None)
    desk.say(BACK, desk.lease(backward(1, 1), recompute=True))
    waits = desk.say(FRONT, InputAnswer(ledger_generation=1, task=forward(1, 1), tensors=()))
    assert waits.sent(LeaseReturned) == [] and [ready.slots for ready in waits.sent(Ready, "b0")] == [1]
    again = desk.say(FRONT, InputAnswer(ledger_generation=1, task=forward(1, 1), tensors=(desk.tokens(),)))
    assert [job.task for job in again.jobs(Backward)] == [backward(1, 1)]


def test_a_backward_goes_before_a_forward_and_an_older_step_before_both() -> None:
    """While the device works, leases queue up; the most urgent is next, not the first that came."""
    desk = Desk()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    (running,) = desk.say(FRONT, desk.lease(forward(1, 0))).jobs(Forward)
    for lease, server in ((desk.lease(forward(1, 1)), FRONT), (desk.lease(backward(0, 1)), BACK)):
        assert desk.say(server, lease).jobs(Forward) == []
    effects = desk.done(running, desk.tensor())
    assert [job.task for job in effects.jobs(Backward)] == [backward(0, 1)]


def test_the_end_of_a_route_covers_its_loss_too() -> None:
    """The contribution lists L and B, with the loss."""
    desk = Desk(stage=1)
    tasks = (forward(0, 0, 1), TaskId(0, 0, 2, "L"), backward(0, 0, 1))
    desk.say(desk.servers[0], desk.lease(*tasks, need_input_gradient=True))
    desk.flush(0, {desk.servers[0]: 1})
    (job,) = desk.load().jobs(RouteEnd)
    effects = desk.done(job, (3.5, desk.tensor()))
    assert effects.peers(InputGradient) == ["f1"]
    assert len(effects.jobs(TakeGradient)) == 1
    upload = next(iter(desk.machine.gradients._uploads.values()))
    assert (upload.total.tasks, upload.total.losses) == ([tasks[1], tasks[2]], [3.5])


def test_a_weight_gradient_that_it_has_is_not_computed_again() -> None:
    """A lease for a lost result: the input gradient is made again, the sum stays as it is."""
    desk = Desk(stage=1)
    tasks = (forward(0, 0, 1), TaskId(0, 0, 2, "L"), backward(0, 0, 1))
    desk.say(desk.servers[0], desk.lease(*tasks, need_input_gradient=True))
    desk.flush(0, {desk.servers[0]: 1})
    (job,) = desk.load().jobs(RouteEnd)
    assert job.accumulator is not None
    desk.done(job, (3.5, desk.tensor()))
    effects = desk.say(desk.servers[0], desk.lease(*tasks, need_input_gradient=True))
    (again,) = effects.jobs(RouteEnd)
    assert again.accumulator is None and again.input_gradient is not None


def test_a_lease_that_is_late_never_runs() -> None:
    """Its successor may be at work: it goes back, with its tensors."""
    desk = Desk()
    lease = desk.lease(forward(0, 0))
    desk.say(FRONT, lease)
    assert desk.machine.wake_at() == 6.4
    desk.now = 6.4
    desk.machine.wake(desk.now)
    effects = desk.take()
    assert effects.sent(LeaseReturned)[0].reason == "late" and lease.tensors[0].key in effects.dropped


def test_a_graph_that_nobody_will_ask_for_is_forgotten() -> None:
    """The back server says so; a graph whose backward is leased stays."""
    desk = Desk()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    (running,) = desk.say(FRONT, desk.lease(forward(1, 0))).jobs(Forward)
    desk.say(BACK, desk.lease(backward(0, 1)))
    effects = desk.say(BACK, Forget(ledger_generation=1, tasks=(forward(0, 0), forward(0, 1), forward(3, 0))))
    assert [job.tasks for job in effects.jobs(DropGraphs)] == [(forward(0, 0),)]
    assert running.task == forward(1, 0)


def test_work_for_parameters_that_the_device_could_not_take_goes_back_at_once() -> None:
    """They are fetched again with the next lease, which may never come: what waits for them would wait for its time to
    be over."""
    desk = Desk()
    desk.say(FRONT, desk.lease(forward(0, 0)))
    for shard, server in enumerate(desk.servers):
        parameters = Parameters(ledger_generation=1, version=0, shard=shard, tensors=(shard_tensor(900 + shard),))
        effects = desk.say(server, parameters)
    (job,) = effects.jobs(LoadParameters)
    desk.machine.failed(job, "out of memory", desk.now)
    (returned,) = desk.take().sent(LeaseReturned, "f0")
    assert (returned.tasks, returned.reason) == ((forward(0, 0),), "device failed")
    assert len(desk.say(FRONT, desk.lease(forward(0, 1))).sent(FetchParameters)) == len(desk.servers)


def test_a_closed_step_leaves_nothing() -> None:
    """Leases, graphs, sums and versions of the step go; a result that comes afterwards goes nowhere."""
    desk = Desk()
    desk.compute_forward(0)
    waiting = desk.lease(backward(0, 1), recompute=True)
    desk.say(BACK, waiting)
    (running,) = desk.say(FRONT, desk.lease(forward(0, 1))).jobs(Forward)
    effects = desk.say(FRONT, StepClosed(ledger_generation=1, step=1))
    assert waiting.tensors[0].key in effects.dropped
    assert len(effects.jobs(DropGraphs)) == 1 and [job.version for job in effects.jobs(DropParameters)] == [0]
    late = desk.tensor()
    effects = desk.done(running, late)
    assert effects.sent(Output) == [] and late.key in effects.dropped


def test_work_for_earlier_ledgers_goes_nowhere() -> None:
    """New ledgers begin while the device works: its result is dropped, and its job touches nothing of the new ones."""
    desk = Desk()
    desk.say(FRONT, desk.lease(forward(0, 0)))
    (running,) = desk.load().jobs(Forward)
    assert desk.machine.set_plan(make_plan(generation=2, ledgers=2), 0)
    assert desk.take().sent(LeaseReturned) == []
    desk.begin(make_plan(generation=3, ledgers=3))
    late = desk.tensor()
    effects = desk.done(running, late)
    assert effects.sent(Output) == [] and late.key in effects.dropped
    old = desk.lease(forward(0, 1), ledger_generation=1)
    assert old.tensors[0].key in desk.say(FRONT, old).dropped


@pytest.mark.parametrize("accepted", [True, False])
def test_a_lease_that_overtakes_the_refusal_which_caused_it_is_given_back(accepted: bool) -> None:
    """The ledger refuses a contribution, the task is leased to us anew, and the lease comes by another link before the
    refusal: it must not wait for the lease's time. After an acceptance there is nothing to give back."""
    desk = Desk(stage=1)
    front = desk.servers[0]
    tasks = (forward(0, 0, 1), TaskId(0, 0, 2, "L"), backward(0, 0, 1))
    desk.say(front, desk.lease(*tasks))
    desk.flush(0, {front: 1})
    (job,) = desk.load().jobs(RouteEnd)
    (cut,) = desk.done(job, (3.5, None)).jobs(TakeGradient)
    (sent, _) = desk.done(cut, tuple(shard_tensor(key) for key in cut.shards)).sent(Contribute)
    second, third = (desk.lease(*tasks, ticket=Ticket(fence, TICKET.mac)) for fence in (2, 3))
    assert desk.say(front, second).sent(LeaseReturned) == []  # it may still be accepted
    word = Verdict(
        ledger_generation=1,
        contribution=sent.contribution,
        step=0,
        tasks=sent.tasks,
        accepted=accepted,
        number=0,
        reason="" if accepted else "another task of it is covered already",
    )
    returned = desk.say(desk.plan.ledger_of(1), word).sent(LeaseReturned, front)
    assert [message.tasks for message in returned] == ([] if accepted else [tasks])
    assert len(desk.say(front, third).jobs(RouteEnd)) == 1  # now it is work again


def test_draining_gives_back_what_has_not_begun_and_sends_what_is_summed_up() -> None:
    """No more work is asked for; it is drained when the last verdict is there."""
    desk = Desk()
    desk.compute_forward()
    (job,) = desk.say(BACK, desk.lease(backward(0, 0))).jobs(Backward)
    desk.say(FRONT, desk.lease(forward(0, 1)))
    desk.machine.drain(desk.now)
    assert [returned.tasks for returned in desk.take().sent(LeaseReturned)] == [(forward(0, 1),)]
    effects = desk.done(job)
    assert len(effects.jobs(TakeGradient)) == 1 and effects.sent(Ready) == []
    assert not desk.machine.drained


def test_a_failed_device_gives_its_work_back() -> None:
    """What it may have half added is given up, with all that was in the sum."""
    desk = Desk()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    (first,) = desk.say(BACK, desk.lease(backward(0, 0))).jobs(Backward)
    desk.done(first)
    (second,) = desk.say(BACK, desk.lease(backward(0, 1))).jobs(Backward)
    desk.machine.failed(second, "out of memory", desk.now)
    effects = desk.take()
    assert effects.peers(LeaseReturned) == ["f0", "b0"]
    assert effects.sent(LeaseReturned)[0].tasks == (backward(0, 1), backward(0, 0))


def run_backward(desk: Desk, microbatch: int, step: int = 0) -> Effects:
    """A backward whose graph is with us is leased, computed, and added to the step's sum."""
    effects = desk.say(BACK, desk.lease(backward(step, microbatch), need_input_gradient=False))
    (job,) = effects.jobs(Backward)
    return desk.done(job, None)


def test_a_sum_is_sent_when_all_servers_of_the_stage_have_nothing_left() -> None:
    """An idle device is no reason: tasks come seconds apart and make one contribution, not one each."""
    desk = Desk()
    desk.load()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    for microbatch in (0, 1):
        desk.now += 3.0
        assert run_backward(desk, microbatch).jobs(TakeGradient) == []
    desk.say(FRONT, Flush(ledger_generation=1, step=0, leases=2))
    assert desk.take().jobs(TakeGradient) == []
    effects = desk.say(BACK, Flush(ledger_generation=1, step=0, leases=2))
    assert len(effects.jobs(TakeGradient)) == 1


def test_a_complete_sum_does_not_wait_until_the_device_is_idle() -> None:
    """Where there is always work of the next step it never is, and all others wait for the sum: in a cloud for 15 to
    25 s of a step of 31. What runs for the sum itself is waited for."""
    desk = Desk()
    desk.load()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    run_backward(desk, 0)
    (last,) = desk.say(BACK, desk.lease(backward(0, 1))).jobs(Backward)
    for microbatch in (0, 1):
        desk.say(FRONT, desk.lease(forward(1, microbatch)))
    assert desk.flush(0, {FRONT: 2, BACK: 2}).jobs(TakeGradient) == [], "the device adds to it"
    effects = desk.done(last)
    assert [type(job) for job in effects.jobs(object)] == [TakeGradient, Forward]
    desk = Desk()
    desk.load()
    desk.compute_forward(0)
    run_backward(desk, 0)
    assert len(desk.say(FRONT, desk.lease(forward(1, 0))).jobs(Forward)) == 1
    assert len(desk.flush(0, {FRONT: 1, BACK: 1}).jobs(TakeGradient)) == 1, "while the device is at the next step"


def test_the_word_about_the_tail_may_overtake_the_last_leases() -> None:
    """They carry tensors and it does not: the sum stays open until as many have come as were given."""
    desk = Desk()
    desk.load()
    desk.compute_forward(0)
    desk.flush(0, {FRONT: 1, BACK: 1})
    effects = run_backward(desk, 0)
    assert len(effects.jobs(TakeGradient)) == 1
    desk = Desk()
    desk.load()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    desk.flush(0, {FRONT: 2, BACK: 2})
    assert run_backward(desk, 0).jobs(TakeGradient) == []
    assert len(run_backward(desk, 1).jobs(TakeGradient)) == 1


def test_a_server_hears_what_is_summed_up() -> None:
    """At once for each lease, so that its clock stops; and all of it on a new link, so that nobody else gets it."""
    desk = Desk()
    desk.load()
    desk.compute_forward(0)
    effects = run_backward(desk, 0)
    assert effects.sent(Summed, BACK) == [
        Summed(ledger_generation=1, tasks=(backward(0, 0),), tickets=(TICKET,), complete=False)
    ]
    desk.machine.link_down(BACK)
    desk.machine.link_up(BACK)
    (claim,) = desk.take().sent(Summed, BACK)
    assert claim.complete and claim.tasks == (backward(0, 0),)


def test_a_device_that_is_gone_gives_everything_back_at_once() -> None:
    """A game starts: leases that wait, the one that ran and every task that was summed up go back; nothing more is
    asked for."""
    desk = Desk()
    for microbatch in (0, 1):
        desk.compute_forward(microbatch)
    (first,) = desk.say(BACK, desk.lease(backward(0, 0))).jobs(Backward)
    desk.done(first)
    desk.say(BACK, desk.lease(backward(0, 1)))
    desk.say(FRONT, desk.lease(forward(1, 0)))
    desk.machine.hand_back("program")
    effects = desk.take()
    returned = {task for message in effects.sent(LeaseReturned) for task in message.tasks}
    assert returned == {backward(0, 0), backward(0, 1), forward(1, 0)}
    assert effects.sent(Ready) == [] and desk.machine.gradients.empty


def test_a_device_that_was_lost_begins_as_at_first() -> None:
    """Its process died: all goes back, links begin anew (servers count on graphs that are gone), and the fresh one is
    set up."""
    desk = Desk()
    desk.compute_forward()
    (running,) = desk.say(BACK, desk.lease(backward(0, 0))).jobs(Backward)
    desk.machine.failed(running, "the device's process was killed", desk.now)
    desk.take()
    desk.machine.device_lost("killed")
    effects = desk.take()
    assert len(effects.jobs(SetUpDevice)) == 1
    assert [effect.peer for effect in effects.all if isinstance(effect, HangUp)] == list(desk.servers)
    desk.machine.link_up(FRONT)
    assert [ready.hello for ready in desk.take().sent(Ready)] == [True]
