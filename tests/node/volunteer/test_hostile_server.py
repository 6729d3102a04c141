"""A volunteer under servers that say anything in any order: it never falls over, holds a bound, and keeps nothing.

The handshake, the codec and the role table have let these messages through; here they are drawn from small ranges
around what is right, so that most are nearly right. Every tensor that came must be dropped in the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.machine.jobs import Backward, Forward, RouteEnd, SetUpDevice, TakeGradient
from node.volunteer.volunteer import LEASES_MAX
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.base.machine import Compute, DropTensors
from protocol.messages import Flush, Forget, InputAnswer, Lease, Parameters, StepClosed, Verdict, VersionReady
from tests.node.setting import TICKET, VOLUNTEER, make_plan, shard_tensor
from tests.node.volunteer.test_volunteer import CONFIG, Desk

TASKS = st.builds(TaskId, st.integers(0, 4), st.integers(0, 2), st.integers(0, 2), st.sampled_from("FBL"))
HONEST = st.builds(TaskId, st.integers(0, CONFIG.steps - 1), st.integers(0, 1), st.just(0), st.sampled_from("FB"))
HONEST_FORWARDS = st.builds(TaskId, st.integers(0, CONFIG.steps - 1), st.integers(0, 1), st.just(0), st.just("F"))
SERVERS = st.sampled_from([NodeId("f0"), NodeId("b0"), NodeId("f1")])
VERSIONS = st.integers(0, CONFIG.steps + 1)
EVENTS = (
    "honest lease", "lease", "flush", "forget", "input", "parameters", "version", "verdict", "closed", "done", "done",
    "failed", "link",
)  # fmt: skip


class Siege:
    """The desk of a volunteer, the tensors that it holds, and the jobs that its device has not done yet."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.desk = Desk()
        self.alive: set[int] = set()
        self.jobs: list[Any] = []

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def tensors(self, *right: TensorRef) -> tuple[TensorRef, ...]:
        """The right tensors, or one too few, or others; they are the machine's from now on."""
        given = self.draw(st.sampled_from([right, right, right, right[:-1], (shard_tensor(self.desk.tensor().key),)]))
        self.alive |= {ref.key for ref in given}
        return tuple(given)

    def take(self) -> None:
        for effect in self.desk.take().all:
            if isinstance(effect, DropTensors):
                for key in effect.keys:
                    assert key in self.alive, f"tensor {key} is dropped twice, or was never here"
                    self.alive.remove(key)
            elif isinstance(effect, Compute):
                self.jobs.append(effect.job)
        assert len(self.desk.machine._held.leases) <= LEASES_MAX
        assert len(self.desk.machine._versions) <= CONFIG.steps + 1

    def say(self, message: Any, peer: NodeId | None = None) -> None:
        self.desk.machine.handle(peer or self.draw(SERVERS), message, self.desk.now)
        self.take()

    def run_one(self, fails: bool) -> None:
        """The oldest job ends."""
        if not self.jobs:
            return
        job = self.jobs.pop(0)
        if fails and not isinstance(job, SetUpDevice | TakeGradient):
            self.desk.machine.failed(job, "planted", self.desk.now)
        else:
            self.desk.machine.computed(job, self.result(job), self.desk.now)
        self.take()

    def made(self, key: int | None) -> TensorRef | None:
        """A tensor that a job has made under the key that it was given."""
        if key is None:
            return None
        self.alive.add(key)
        shape = (CONFIG.batch.samples, CONFIG.model.context, CONFIG.model.hidden)
        return TensorRef(key, shape, "fp32", 256)

    def result(self, job: Any) -> Any:
        match job:
            case Forward():
                return self.made(job.output)
            case Backward():
                return self.made(job.input_gradient)
            case RouteEnd():
                return 1.0, self.made(job.input_gradient)
            case TakeGradient():
                self.alive |= set(job.shards)
                return tuple(shard_tensor(key) for key in job.shards)
            case _:
                return None

    def step(self) -> None:
        event = self.draw(st.sampled_from(EVENTS))
        generation = self.draw(st.sampled_from([1, 1, 1, 0]))
        server = self.draw(SERVERS)
        machine, desk = self.desk.machine, self.desk
        desk.now += self.draw(st.sampled_from([0.0, 0.1, 7.0]))
        match event:
            case "honest lease":
                task = self.draw(HONEST)
                lease = desk.lease(task, need_weight_gradient=task.op == "B", recompute=task.op == "B")
                self.alive |= {ref.key for ref in lease.tensors}
                self.say(lease, desk.servers[task.op == "B"])
            case "lease":
                tasks = tuple(self.draw(st.lists(TASKS, min_size=1, max_size=3)))
                right = (desk.tokens(), desk.tensor())
                changes = {
                    "version": self.draw(VERSIONS),
                    "deadline_s": self.draw(st.sampled_from([0.0, 5.0, 1e18])),
                    "recompute": self.draw(st.booleans()),
                    "need_input_gradient": self.draw(st.booleans()),
                    "need_weight_gradient": self.draw(st.booleans()),
                    "ticket": Ticket(self.draw(st.integers(0, 3)), TICKET.mac),
                }
                fields = {
                    "ledger_generation": generation, "front": desk.servers[0], "back": desk.servers[1],
                }  # fmt: skip
                self.say(Lease(tasks=tasks, tensors=self.tensors(*right), **fields, **changes), server)
            case "flush":
                step, leases = self.draw(st.integers(0, 10**9)), self.draw(st.integers(0, 3))
                self.say(Flush(ledger_generation=generation, step=step, leases=leases), server)
            case "forget":
                self.say(Forget(ledger_generation=generation, tasks=tuple(self.draw(st.lists(TASKS, max_size=3)))))
            case "input":
                task = self.draw(st.one_of(TASKS, HONEST_FORWARDS))
                self.say(InputAnswer(ledger_generation=generation, task=task, tensors=self.tensors(desk.tokens())))
            case "parameters":
                shard = self.draw(st.sampled_from([0, 1, 2]))
                tensors = self.tensors(shard_tensor(desk.tensor().key))
                version = self.draw(VERSIONS)
                message = Parameters(ledger_generation=generation, version=version, shard=shard, tensors=tensors)
                self.say(message, desk.servers[shard] if shard < 2 else server)
            case "version":
                self.say(VersionReady(ledger_generation=generation, version=self.draw(st.integers(0, 1000))))
            case "verdict":
                contribution = ContributionId(VOLUNTEER, 7, self.draw(st.integers(0, 3)))
                tasks = tuple(self.draw(st.lists(TASKS, max_size=2)))
                fields = {
                    "step": self.draw(st.integers(0, 4)),
                    "accepted": self.draw(st.booleans()),
                    "number": 0,
                    "reason": "",
                }
                self.say(Verdict(ledger_generation=generation, contribution=contribution, tasks=tasks, **fields))
            case "closed":
                self.say(StepClosed(ledger_generation=generation, step=self.draw(st.integers(0, 5))))
            case "done":
                self.run_one(False)
            case "failed":
                self.run_one(True)
            case "link":
                machine.link_down(server)
                machine.link_up(server)
                self.take()

    def end(self) -> None:
        """The device finishes what it has; then the run goes back, and all that was given is forgotten."""
        for _ in range(500):  # far more jobs than forty events can order
            if not self.jobs:
                break
            self.run_one(False)
        assert not self.jobs, "the device is never done"
        self.desk.machine.set_plan(make_plan(generation=9, ledgers=9), 0)
        self.take()
        while self.jobs:
            self.run_one(False)
        assert self.alive == set(), "tensors that came or were made are kept for nobody"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_volunteer_outlives_any_servers(data: st.DataObject) -> None:
    """No exception, no unbounded table, every invariant after every word, no tensor kept."""
    siege = Siege(data)
    for _ in range(data.draw(st.integers(1, 40), label="events")):
        siege.step()
    siege.end()
