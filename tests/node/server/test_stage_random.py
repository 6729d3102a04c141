"""A ledger and its two shards under any order of stores, losses, crashes and restarts (Hypothesis).

The rules draw what the network and the disks do; the roles are the production ones. Seeds of the world find bugs;
this finds the shortest story that shows one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from node.machine.jobs import Apply, DropVersions, Fold, Reduce, StartShard
from node.machine.records import ContributionAccepted, ContributionStored, Record, StepCommitted, StepSealed
from node.server.buddy import BuddyRole, Copies
from node.server.context import StageContext, stage_tasks
from node.server.ledger import LedgerRole
from node.server.shard import Phase, ShardRole
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.machine import Compute, Persist, Send
from protocol.messages import (
    Commit,
    Committed,
    Decision,
    Freeze,
    FrozenList,
    Message,
    PartialNorm,
    StageCommitted,
    StageFrozen,
    StepOpened,
    Stored,
    Verdict,
)
from tests.node.setting import ELEMENTS, VOLUNTEER, backward, contribution, make_config, make_context, part

CONFIG = make_config(delay=0, steps=6)
NODES = (NodeId("f0"), NodeId("b0"))
OTHER = NodeId("v2")
SOME = st.sampled_from([(0,), (1,), (0, 1)])
"""Microbatches, or shards."""


class Server:
    """One server of the stage: its roles (None while it is down), its disk, and what its lane has to do."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.disk: list[Record] = []
        self.closed = -1
        self.start()

    def start(self) -> None:
        self.writing: deque[Record] = deque()
        self.jobs: deque[Any] = deque()
        self.context: StageContext = make_context(self.node, CONFIG)
        self.context.closed = self.closed
        self.shard = ShardRole(self.context, BuddyRole(self.context, Copies(self.context.out)))
        self.shard.set_elements(ELEMENTS)
        self.ledger = LedgerRole(self.context) if self.node == NODES[0] else None
        if self.ledger is not None:
            self.ledger.start(self.disk)
        self.shard.start(self.disk)
        self.up = True


class Stage(RuleBasedStateMachine):
    """The stage and its neighbours: a volunteer that contributes, a decider that decides and closes."""

    @initialize()
    def begin(self) -> None:
        self.servers = {node: Server(node) for node in NODES}
        self.wire: deque[tuple[NodeId, Message]] = deque()
        self.accepted: dict[int, list[ContributionAccepted]] = {}
        self.seals: dict[int, StepSealed] = {}
        self.commits: dict[tuple[NodeId, int], StepCommitted] = {}
        self.uploads: list[tuple[int, tuple[TaskId, ...]]] = []
        self.key = 0
        for server in self.servers.values():
            self.collect(server)
        self.open(0)

    # ---- what the world does -------------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        ledger = self.servers[NODES[0]].ledger
        if ledger is not None and self.servers[NODES[0]].up:
            ledger.on_step_opened(StepOpened(ledger_generation=1, step=step, closed=step - 1))
            self.collect(self.servers[NODES[0]])

    @property
    def step(self) -> int:
        return self.servers[NODES[0]].closed + 1

    def collect(self, server: Server) -> None:
        """Takes a server's effects apart."""
        out = server.context.out
        effects = [*out.take_effects(), *(Send(server.node, message) for message in out.take_to_self())]
        for effect in effects:
            if isinstance(effect, Send) and effect.peer in self.servers:
                self.wire.append((effect.peer, effect.message))
            elif isinstance(effect, Persist):
                server.writing.append(effect.record)
            elif isinstance(effect, Compute):
                server.jobs.append(effect.job)
            elif isinstance(effect, Send):
                self.neighbour(effect.message)

    def neighbour(self, message: Message) -> None:
        """The decider is of stage 0 and so is the stage: its own words to itself arrive as messages. Other stages hear
        what this one came to."""
        assert isinstance(message, Verdict | StageFrozen), message

    @rule(
        number=st.integers(1, 8),
        tasks=st.sampled_from([(0,), (1,), (0, 1)]),
        shards=st.sampled_from([(0,), (1,), (0, 1)]),
    )
    def store(self, number: int, tasks: tuple[int, ...], shards: tuple[int, ...]) -> None:
        """A volunteer uploads to some shards; a number stands for the same tasks for ever."""
        step = self.step
        if step >= CONFIG.steps:
            return
        number += 10 * step
        chosen = tuple(backward(step, microbatch) for microbatch in tasks)
        for known, its in self.uploads:
            if known == number:
                chosen = its
        self.uploads.append((number, chosen))
        for shard in shards:
            server = self.servers[NODES[shard]]
            if server.up:
                self.key += 1
                server.shard.on_contribute(VOLUNTEER, part(number, step, chosen, shard, 10**6 + self.key, step))
                self.collect(server)

    @rule(which=st.sampled_from(NODES))
    def disk(self, which: NodeId) -> None:
        """The first record that waits becomes durable, and its server hears of it."""
        server = self.servers[which]
        if server.up and server.writing:
            record = server.writing.popleft()
            self.durable(server, record)
            match record:
                case ContributionStored():
                    server.shard.stored(record)
                case StepCommitted():
                    server.shard.committed(record)
                case ContributionAccepted():
                    assert server.ledger is not None
                    server.ledger.accepted(record)
                case StepSealed():
                    assert server.ledger is not None
                    server.ledger.sealed(record)
                case _:
                    pass
            self.collect(server)

    def durable(self, server: Server, record: Record) -> None:
        server.disk.append(record)
        if isinstance(record, ContributionAccepted):
            self.accepted.setdefault(record.step, []).append(record)
        elif isinstance(record, StepSealed):
            assert record.step not in self.seals, "two seals of a step (T-I9)"
            self.seals[record.step] = record
        elif isinstance(record, StepCommitted):
            assert (server.node, record.step) not in self.commits, "a step is committed twice (T-I5)"
            self.commits[server.node, record.step] = record

    @rule(which=st.sampled_from(NODES))
    def lane(self, which: NodeId) -> None:
        """The lane ends a job."""
        server = self.servers[which]
        if server.up and server.jobs:
            match job := server.jobs.popleft():
                case StartShard():
                    server.shard.base_loaded(b"0")
                case Fold():
                    server.shard.folded(job)
                case Reduce():
                    server.shard.reduced(job, 1.0, True)
                case Apply():
                    server.shard.applied(job, b"%d" % (job.step + 1))
                case DropVersions():
                    assert server.shard.phase is Phase.READY
            self.collect(server)

    @rule()
    def deliver(self) -> None:
        """The first message arrives."""
        if self.wire:
            self.hand_over(*self.wire.popleft())

    @rule()
    def deliver_twice(self) -> None:
        """The first message arrives, and stays on its way."""
        if self.wire:
            self.hand_over(*self.wire[0])

    @rule()
    def lose(self) -> None:
        """The link breaks and all on it is lost; when it is up again everybody tells what matters."""
        self.wire.clear()
        self.sync()

    @rule()
    def sync(self) -> None:
        """All who are up and ready tell each other what they must know."""
        for server in self.servers.values():
            if server.up and server.shard.phase is Phase.READY:
                for peer in NODES:
                    for role in (server.ledger, server.shard):
                        if role is not None and self.servers[peer].up:
                            role.sync(peer)
                self.collect(server)
        self.open(self.step)

    def hand_over(self, node: NodeId, message: Message) -> None:
        server = self.servers[node]
        if not server.up:
            return
        match message:
            case Stored() if server.ledger is not None:
                server.ledger.on_stored(message)
            case PartialNorm() if server.ledger is not None:
                server.ledger.on_partial_norm(message)
            case Committed() if server.ledger is not None:
                server.ledger.on_committed(message)
            case StageFrozen() if server.ledger is not None:
                decision = Decision(ledger_generation=1, step=message.step, clip_factor=1.0, skipped=False)
                server.ledger.on_decision(decision)
            case StageCommitted():
                self.close(message.step)
            case Freeze():
                server.shard.on_freeze(message)
            case FrozenList():
                server.shard.on_frozen_list(message)
            case Commit():
                server.shard.on_commit(message)
            case Verdict():
                server.shard.on_verdict(message)
            case _:
                pass
        self.collect(server)

    def close(self, step: int) -> None:
        """Both shards have committed: the step is over for everybody."""
        assert all((node, step) in self.commits for node in NODES), "closed before all have committed (T-I8)"
        for server in self.servers.values():
            if step > server.closed:
                server.closed = server.context.closed = step
                if server.ledger is not None:
                    server.ledger.close_step(step)
                server.shard.close_step(step)
                self.collect(server)
        if self.step < CONFIG.steps:
            self.open(self.step)

    @rule(which=st.sampled_from(NODES), written=st.integers(0, 3))
    def crash(self, which: NodeId, written: int) -> None:
        """kill -9; the first few records may have reached the disk."""
        server = self.servers[which]
        if server.up:
            for _ in range(min(written, len(server.writing))):
                self.durable(server, server.writing.popleft())
            server.up = False
            self.wire = deque((node, message) for node, message in self.wire if node != which)

    @precondition(lambda self: any(not server.up for server in self.servers.values()))
    @rule()
    def restart(self) -> None:
        """Who is down starts from its disk."""
        for server in self.servers.values():
            if not server.up:
                server.start()
                self.collect(server)

    # ---- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def roles_are_sound(self) -> None:
        for server in getattr(self, "servers", {}).values():
            if server.up:
                server.shard.check()
                if server.ledger is not None:
                    server.ledger.check()

    @invariant()
    def every_task_counts_once(self) -> None:
        for step, accepted in getattr(self, "accepted", {}).items():
            tasks = [task for record in accepted for task in record.tasks]
            assert len(set(tasks)) == len(tasks), f"a task of step {step} counts twice (T-I1)"

    @invariant()
    def what_is_sealed_is_whole_and_durable(self) -> None:
        for step, seal in getattr(self, "seals", {}).items():
            accepted = self.accepted[step]
            assert tuple(record.contribution for record in accepted) == seal.contributions
            tasks = sorted(task for record in accepted for task in record.tasks)
            assert tasks == sorted(stage_tasks(self.servers[NODES[0]].context, step)), "a hole in a seal (T-I1)"
            for server in self.servers.values():
                held: set[ContributionId] = {r.contribution for r in server.disk if isinstance(r, ContributionStored)}
                assert held.issuperset(seal.contributions), "sealed, and not on every shard (T-I2)"

    @invariant()
    def shards_commit_what_was_sealed(self) -> None:
        for (_, step), commit in getattr(self, "commits", {}).items():
            assert commit.contributions == self.seals[step].contributions

    def teardown(self) -> None:
        """When all is calm the open step is finished (L1)."""
        if not hasattr(self, "servers") or self.step >= CONFIG.steps:
            return
        step, before = self.step, self.step
        self.restart()
        for microbatch in (0, 1):
            self.uploads.append((90 + 10 * step + microbatch, (backward(step, microbatch),)))
        for _ in range(12):
            for microbatch in (0, 1):
                for shard in (0, 1):
                    self.key += 1
                    number = 1000 + 10 * step + microbatch
                    # By somebody who has not used up what one node may have written.
                    whole = part(number, step, (backward(step, microbatch),), shard, 10**6 + self.key, step)
                    whole = msgspec.structs.replace(whole, contribution=contribution(number, OTHER))
                    self.servers[NODES[shard]].shard.on_contribute(OTHER, whole)
                    self.collect(self.servers[NODES[shard]])
            while self.wire or any(server.jobs or server.writing for server in self.servers.values()):
                for node in NODES:
                    self.lane(node)
                    self.disk(node)
                self.deliver()
            self.sync()
            if self.step > before:
                return
        raise AssertionError(f"step {before} does not end although all is calm (L1)")


Stage.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStage = Stage.TestCase
