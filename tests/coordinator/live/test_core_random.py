"""The coordinator's machine under random facts: invariants after every one, and rules that an observer can check."""

from __future__ import annotations

import random

import pytest

from coordinator.live.records import PlanRow, StepRow
from protocol.base.ids import NodeId
from protocol.base.machine import HangUp, Send
from protocol.messages import Join, PlanChanged, StepReportStored, Welcome
from protocol.run.run import LimitsSection, RunConfig, StagesSection
from tests.coordinator.live.desk import DATA, Desk, join, step_report

CONFIG = RunConfig(steps=30, stages=StagesSection(count=2), limits=LimitsSection(server_gone_s=8.0))


class Server:
    """What a server has on its disk; it believes every plan that it is sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.linked = False
        self.forget()

    def forget(self) -> None:
        self.place = (-1, -1)
        self.ledgers = -1
        self.version = -1


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_of_servers(seed: int) -> None:
    """Links break, disks are lost, spares come, steps close when all can: nobody begins ledgers of which others have
    more, and when all is calm the run goes on."""
    rng = random.Random(seed)
    desk = Desk(CONFIG)
    servers = [Server(f"s{n}") for n in range(6)]
    by_name = {server.name: server for server in servers}
    checkpoints: list[int] = []  # in a folder that all servers can read, newest first
    seen = 0

    def obey() -> None:
        """Servers act on what they were sent; an observer checks it."""
        nonlocal seen
        while seen < len(desk.done):
            effect = desk.done[seen]
            seen += 1
            if isinstance(effect, HangUp) and effect.peer in by_name:
                by_name[effect.peer].linked = False
            if not isinstance(effect, Send):
                continue
            if isinstance(effect.message, PlanChanged):
                plan = effect.message.plan
                assert plan in [row.plan for row in desk.written(PlanRow)], "told before it was written"
                take(by_name[effect.peer], effect.message)
            if isinstance(effect.message, StepReportStored) and effect.message.step >= 0:
                assert effect.message.step <= max(row.step for row in desk.written(StepRow))

    def take(server: Server, message: PlanChanged) -> None:
        plan = message.plan
        if message.stage < 0:
            return
        shard = plan.shard_of(NodeId(server.name))
        assert shard is not None and plan.stage_of(NodeId(server.name)) == message.stage
        if server.ledgers == plan.ledger_generation and server.place == (message.stage, shard):
            return
        assert plan.restore_step == -1 or plan.restore_step in checkpoints
        others = [s for s in servers if s is not server and s.ledgers == plan.ledger_generation]
        assert all(s.version == max(0, plan.restore_step) for s in others), "began ledgers of which others have more"
        server.place, server.ledgers, server.version = (
            (message.stage, shard), plan.ledger_generation, max(0, plan.restore_step)
        )  # fmt: skip

    def facts(server: Server) -> Join:
        return join(
            addresses=(f"{server.name}:1",), stage=server.place[0], shard=server.place[1], version=server.version,
            held_generation=server.ledgers, checkpoints=tuple(checkpoints),
        )  # fmt: skip

    def arrive(server: Server) -> None:
        server.linked = True
        desk.link(server.name)
        desk.say(server.name, facts(server))

    def close_step() -> None:
        """All shards commit a step, the decider reports it; every third is a checkpoint that all can read."""
        plan = desk.machine.placement.plan
        if plan is None:
            return
        holders = [by_name[node] for node in plan.server_nodes()]
        if any(s.ledgers != plan.ledger_generation for s in holders) or len({s.version for s in holders}) != 1:
            return
        step = holders[0].version
        if step >= CONFIG.steps:
            return
        for server in holders:
            server.version = step + 1
        if step % 3 == 2 and step + 1 not in checkpoints:
            checkpoints.insert(0, step + 1)
            for server in servers:
                if server.linked and rng.random() < 0.7:  # the others have not looked into the folder yet
                    desk.say(server.name, facts(server))

    def report() -> None:
        """The decider repeats what is not acknowledged."""
        plan = desk.machine.placement.plan
        if plan is None or not (decider := by_name[plan.decider]).linked:
            return
        if decider.ledgers == plan.ledger_generation:
            for step in range(desk.machine.history.newest_step + 1, decider.version):
                desk.say(decider.name, step_report(step, plan.ledger_generation))

    for _ in range(120):
        server = rng.choice(servers)
        deed = rng.random()
        if not server.linked:
            if deed < 0.5:
                if rng.random() < 0.2:
                    server.forget()
                arrive(server)
        elif deed < 0.12:
            server.linked = False
            desk.drop(server.name)
        elif deed < 0.6:
            close_step()
        elif deed < 0.7:
            report()
        else:
            desk.stay(rng.choice((0.5, 2.0)), *(s.name for s in servers if s.linked))
        obey()
    for server in servers:
        if not server.linked:
            arrive(server)
    obey()
    if desk.machine.data is None:
        desk.say(desk.plan.decider, DATA)
    for _ in range(CONFIG.steps * 2):
        close_step()
        report()
        obey()
    assert desk.machine.finished, f"stuck: {desk.machine.status(desk.now)['run']['waiting_for']} (seed {seed})"
    assert [row.step for row in desk.machine.history.tail] == list(range(CONFIG.steps))
    assert all(desk.sent(server.name, Welcome) for server in servers)
