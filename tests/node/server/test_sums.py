"""Differences up: a server that is front and back in one makes results whole before anybody hears of them."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from node.machine.jobs import AddUp
from node.machine.outbox import Outbox
from node.machine.records import Record, StageKeyKnown
from node.server.server import ServerMachine
from node.server.tickets import KEY_BYTES, TicketOffice
from protocol.base.forms import byte_bounds
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.base.machine import HangUp
from protocol.messages import Activation, Gradient, Held, InputGradient, Output, StepOpened, Work
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import BoundaryForm, RunConfig, WireSection
from tests.node.setting import VOLUNTEER, Effects, make_config

KEY = bytes(range(KEY_BYTES))
BEFORE, HERE, AFTER, OTHER = NodeId("s0"), NodeId("s1"), NodeId("s2"), NodeId("v2")
FORWARD, BACKWARD = TaskId(0, 0, 1, "F"), TaskId(0, 0, 1, "B")


def config_of() -> RunConfig:
    config = make_config(count=3)
    stages = msgspec.structs.replace(config.stages, back_servers=0)
    wire = WireSection(activations_up="d4", gradients="fp32", parameters="fp32")
    config = msgspec.structs.replace(config, stages=stages, wire=wire)
    config.validate()
    return config


class Desk:
    """A ready server with two volunteers; in the middle of three stages unless said otherwise."""

    def __init__(self, node: NodeId = HERE) -> None:
        self.config, self.out, self.keys = config_of(), Outbox(node, count(1000)), count(1)
        stages = tuple(StagePlan((ServerPlan(name, "both", (f"{name}:1",)),)) for name in (BEFORE, HERE, AFTER))
        plan, records = Plan(1, 1, -1, stages, line(10, 3)), list[Record]()
        self.server = ServerMachine(
            node, self.config, 259, plan, self.out, records, NodeId("c"), secret=KEY, incarnation=1
        )
        self.server.start(0.0)
        for peer in (BEFORE, HERE, AFTER):
            self.server.link_up(peer, "server", 0.0)
        for volunteer in (VOLUNTEER, OTHER):
            self.server.link_up(volunteer, "volunteer", 0.0)
        for effect in Effects(self.out).all:
            if hasattr(effect, "job"):
                self.server.computed(effect.job, 3 if "SetUp" in type(effect.job).__name__ else b"digest", 0.0)
        self.server.persisted(StageKeyKnown(ledger_generation=1, step=0, key=KEY), 0.0)
        self.server.handle(BEFORE, StepOpened(ledger_generation=1, step=0, closed=-1), 0.0)
        Effects(self.out)

    def tensor(self, form: BoundaryForm) -> TensorRef:
        shape = (self.config.batch.samples, self.config.model.context, self.config.model.hidden)
        return TensorRef(next(self.keys), shape, form, byte_bounds(shape, form)[0])

    def say(self, peer: NodeId, message: Work, size: float = 1.0) -> Effects:
        self.server.handle(peer, message, 1.0, size)
        self.server.check()
        return Effects(self.out)

    def result(self, task: TaskId, form: BoundaryForm, peer: NodeId = VOLUNTEER) -> Output | InputGradient:
        office = TicketOffice(1)
        office.set_key(KEY)
        kind = Output if task.op == "F" else InputGradient
        ticket = office.issue(peer, task, 3)
        return kind(ledger_generation=1, task=task, ticket=ticket, tensors=(self.tensor(form),))

    def base(self, task: TaskId) -> tuple[NodeId, Activation | Gradient]:
        kind, peer = (Activation, BEFORE) if task.op == "F" else (Gradient, AFTER)
        return peer, kind(ledger_generation=1, task=task, tensors=(self.tensor("q8"),))

    def done(self, job: AddUp) -> Effects:
        shape = job.base.shape
        self.server.computed(job, TensorRef(job.sum, shape, "q8", byte_bounds(shape, "q8")[0]), 2.0)
        self.server.check()
        return Effects(self.out)


def handed_on(effects: Effects, task: TaskId) -> list[int]:
    """Keys of what other stages get."""
    sent = effects.sent(Activation) if task.op == "F" else effects.sent(Gradient)
    return [message.tensors[0].key for message in sent]


@pytest.mark.parametrize("task", [FORWARD, BACKWARD])
@pytest.mark.parametrize("base_first", [True, False])
def test_a_difference_goes_on_when_it_is_whole_whatever_came_first(task: TaskId, base_first: bool) -> None:
    """Nobody hears of it before: who dies meanwhile has lost nothing that another one counts on."""
    desk = Desk()
    message = desk.result(task, "d4")
    if base_first:
        desk.say(*desk.base(task))
    early = desk.say(VOLUNTEER, message)
    assert handed_on(early, task) == [] and early.sent(Held) == [] and bool(early.jobs(AddUp)) == base_first
    effects = early if base_first else desk.say(*desk.base(task))
    (job,) = effects.jobs(AddUp)
    assert (job.task, job.part, job.base.form) == (task, message.tensors[0], "q8")
    assert effects.dropped == [message.tensors[0].key]
    assert handed_on(desk.done(job), task) == [job.sum]


@pytest.mark.parametrize("task", [FORWARD, BACKWARD])
def test_the_first_that_came_stays(task: TaskId) -> None:
    """Another one's result of the task is dropped, before the sum is there and after."""
    desk = Desk()
    desk.say(*desk.base(task))
    (job,) = desk.say(VOLUNTEER, desk.result(task, "d4")).jobs(AddUp)
    for is_sum in (False, True):
        other = desk.result(task, "d4", OTHER)
        effects = desk.say(OTHER, other)
        assert effects.jobs(AddUp) == [] and effects.dropped == [other.tensors[0].key]
        if not is_sum:
            assert handed_on(desk.done(job), task) == [job.sum]


@pytest.mark.parametrize("task", [FORWARD, BACKWARD])
def test_an_absurd_difference_is_not_added(task: TaskId) -> None:
    """It is put aside like any absurd result, and somebody else's goes on."""
    desk = Desk()
    desk.say(*desk.base(task))
    effects = desk.say(VOLUNTEER, desk.result(task, "d4"), size=1e37)
    assert effects.jobs(AddUp) == [] and len(effects.dropped) == 1
    assert len(desk.say(OTHER, desk.result(task, "d4", OTHER)).jobs(AddUp)) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_no_sum_when_its_ledgers_end_is_let_go_of(waits: bool) -> None:
    """Whether it waits for what it differs from, or the lane is at it."""
    desk = Desk()
    if not waits:
        desk.say(*desk.base(FORWARD))
    message = desk.result(FORWARD, "d4")
    jobs = desk.say(VOLUNTEER, message).jobs(AddUp)
    desk.server.end()
    effects = Effects(desk.out)
    if waits:
        assert jobs == [] and message.tensors[0].key in effects.dropped
    else:
        effects = desk.done(jobs[0])
        assert effects.dropped == [jobs[0].sum] and handed_on(effects, FORWARD) == []


def test_a_sum_of_earlier_ledgers_is_let_go_of_and_its_failure_stops_nobody() -> None:
    """The lane ends what it was given, whatever has become of the run; a sum of today's ledgers has to come."""
    desk = Desk()
    desk.say(*desk.base(FORWARD))
    (job,) = desk.say(VOLUNTEER, desk.result(FORWARD, "d4")).jobs(AddUp)
    old = AddUp(0, job.task, job.node, job.part, job.base, 77)
    assert desk.done(old).dropped == [77]
    assert desk.server.failed(old, "no memory", 1.0) and not desk.server.failed(job, "no memory", 1.0)
    assert handed_on(desk.done(job), FORWARD) == [job.sum]


@pytest.mark.parametrize(
    ("node", "task", "form"),
    [
        (BEFORE, TaskId(0, 0, 0, "F"), "q8"),
        (HERE, FORWARD, "d4"),
        (HERE, BACKWARD, "d4"),
        (AFTER, TaskId(0, 0, 2, "B"), "q8"),
    ],
)
def test_every_place_has_one_form(node: NodeId, task: TaskId, form: BoundaryForm) -> None:
    """Where a route begins and ends there is nothing to leave out; who sends the other form is hung up on."""
    right, wrong = Desk(node), Desk(node)
    assert [e for e in right.say(VOLUNTEER, right.result(task, form)).all if isinstance(e, HangUp)] == []
    effects = wrong.say(VOLUNTEER, wrong.result(task, "q8" if form == "d4" else "d4"))
    (reason,) = [effect.reason for effect in effects.all if isinstance(effect, HangUp)]
    assert reason.startswith("shape")
