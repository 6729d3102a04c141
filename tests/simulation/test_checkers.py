"""What the judges of the world let pass, and what not, where nightly seeds had judged wrong."""

from __future__ import annotations

from collections import deque
from itertools import combinations
from typing import Any

import msgspec
import pytest

from coordinator.live.gray import AGAIN_S
from coordinator.live.records import PlanRow
from node.machine.jobs import SetUpDevice
from node.machine.records import (
    ContributionStored,
    ShardStarted,
    SnapshotWritten,
    StateLost,
    StepCommitted,
    StepDone,
    StepSealed,
)
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.machine import Exit, Log, Send
from protocol.messages import CopyKept, Ping, ShardCopy
from protocol.run.plan import Plan, ServerPlan, StagePlan
from tests.node.setting import make_plan
from tests.simulation.checkers import Checker
from tests.simulation.host import Link
from tests.simulation.lanes import Lanes
from tests.simulation.swarm import COORDINATOR, Shape
from tests.simulation.violation import ViolationError
from tests.simulation.world import Host, World


class Court:
    """A judge, and a world in which nothing happens but what a test says: two servers of one stage, one spare."""

    def __init__(self, buddy: str = "never") -> None:
        shape = Shape(stages=1, steps=6, checkpoint_every=0, buddy=buddy)
        self.config = shape.config(1)
        self.checker = Checker(self.config, [2])
        self.world = World(1, self.checker)
        machine: Any = object()
        roles = {"f0": "server", "b0": "server", "s9": "server", "v": "volunteer", COORDINATOR: "coordinator"}
        for node, role in roles.items():
            host = self.world.add(Host(NodeId(node), role, lambda host, rng: machine, f"{node}:1"))
            host.machine, host.lanes = machine, Lanes(host.store, host.files, self.world.shared)
        self.plan = make_plan(stages=1)
        self.adopt(self.plan)

    def host(self, node: str) -> Host:
        return self.world.hosts[NodeId(node)]

    def adopt(self, plan: Plan, back: bool = False) -> None:
        """A plan is durable."""
        row = PlanRow(plan=plan, sentence="", goes_back=back, lost_steps=0)
        self.checker.durable(self.world, self.world.hosts[COORDINATOR], row, {})
        self.plan = plan

    def ask(self) -> None:
        """The coordinator asks which checkpoints can be read."""
        self.checker.stepped(self.world, self.world.hosts[COORDINATOR], [Send(NodeId("f0"), Ping(number=1, look=True))])

    def save(self, step: int) -> None:
        """A checkpoint is there."""
        self.world.shared[f"manifest-{step}"] = tuple((0, shard, f"{step}/{shard}", 1, b"") for shard in range(2))
        self.world.shared.update({f"{step}/{shard}": () for shard in range(2)})

    def lose(self, step: int) -> None:
        """It is gone again, by no mistake of the run's."""
        del self.world.shared[f"{step}/1"]
        self.world.shared.harmed = True

    def begin(self) -> None:
        """Both servers begin the ledgers of the plan."""
        for shard, node in enumerate(self.plan.server_nodes()):
            started = ShardStarted(
                ledger_generation=self.plan.ledger_generation, step=0, stage=0, shard=shard, shard_count=2,
                checkpoint_step=self.plan.restore_step, config_hash=b"", continues=self.plan.continues,
            )  # fmt: skip
            self.checker.durable(self.world, self.host(node), started, {})


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_spare_waits_with_a_disk_only_where_its_state_is_lost(is_lost: bool) -> None:
    """Its place is gone for good, and it has all of it: it gets the place, unless its disk says that another's has lied
    and nobody can go on from here (seed 147203)."""
    court = Court()
    court.begin()
    old, spare = court.host("f0"), court.host("s9")
    old.machine, old.gone, spare.machine = None, True, None
    if is_lost:
        old.records.append((StateLost(ledger_generation=1, step=0, reason="", closed_version=-1), {}))
    court.world.move_disk(old, spare)
    court.world.run(10.0)
    if is_lost:
        court.checker._on_spare(court.world, spare, court.plan)
        return
    with pytest.raises(ViolationError, match="s9 waits with the disk of 0/0"):
        court.checker._on_spare(court.world, spare, court.plan)


def test_who_has_lost_a_part_makes_all_versions_since_again() -> None:
    """A restart makes versions again as far as the disk has all that counts in them: of a disk that has lost a part of
    step 0, step 1 is committed once more, too (found by a hunt for two kinds of faults at a time)."""
    court = Court()
    court.begin()
    lost = ContributionStored(
        ledger_generation=1, step=0, contribution=ContributionId(NodeId("v"), 7, 1), version=0, tasks=(), losses=(),
        tensors=(),
    )  # fmt: skip
    key = (1, 0, 0)
    court.checker._committed[key] = 2
    for step in (0, 1):
        commit = StepCommitted(
            ledger_generation=1, step=step, contributions=(), clip_factor=1.0, skipped=False, learning_rate=0.1,
            digest=court.checker.reference.digests[step + 1][0][0],
        )  # fmt: skip
        seal = StepSealed(
            ledger_generation=1, step=step, contributions=(), clip_factor=1.0, skipped=False, learning_rate=0.1,
            stages=(), changes=(), norms=(),
        )  # fmt: skip
        court.checker._seals[1, 0, step] = seal
        with pytest.raises(ViolationError, match="T-I5"):
            court.checker.durable(court.world, court.host("f0"), commit, {})
        court.checker.record_lost(court.world, court.host("f0"), lost)
        court.checker.durable(court.world, court.host("f0"), commit, {})
        court.checker._lost_commits.clear()


def test_a_run_does_not_go_back_to_what_was_gone_when_it_asked() -> None:
    """What verified at any moment since may be gone by now; what was gone before nobody can have read."""
    court = Court()
    court.save(0)
    court.ask()
    court.lose(0)
    court.adopt(make_plan(stages=1, generation=2, ledgers=2, restore_step=0), back=True)
    court.ask()
    with pytest.raises(ViolationError, match="T-I12: the run goes back to 0, and when it asked that was gone"):
        court.adopt(make_plan(stages=1, generation=3, ledgers=3, restore_step=0), back=True)


@pytest.mark.parametrize("snapshots", [0, 1, 2])
def test_who_began_from_a_checkpoint_that_is_gone_has_lost_it(snapshots: int) -> None:
    """Until it has a snapshot of its own the checkpoint is all that it has; then other ledgers have no reason."""
    court = Court(buddy="always")
    court.save(0)
    court.ask()
    court.adopt(make_plan(stages=1, generation=2, ledgers=2, restore_step=0), back=True)
    court.begin()
    for node in ("f0", "b0")[:snapshots]:
        written = SnapshotWritten(ledger_generation=2, step=0, file="snapshot-0", digest=b"")
        court.checker.durable(court.world, court.host(node), written, {})
    court.lose(0)
    court.ask()
    plan = make_plan(stages=1, generation=3, ledgers=3)
    if snapshots < 2:
        court.adopt(plan, back=True)
    else:
        with pytest.raises(ViolationError, match="B4: other ledgers begin, and nobody has lost anything"):
            court.adopt(plan, back=True)


@pytest.mark.parametrize("on_disk", [True, False])
def test_who_has_what_ledgers_went_on_from_on_its_disk_has_lost_nothing(on_disk: bool) -> None:
    """It makes that again when it starts anew, before there is a snapshot; who has it in memory alone cannot."""
    court = Court(buddy="always")
    if on_disk:
        court.begin()
    court.checker._committed = {(1, 0, shard): 1 for shard in range(2)}
    court.ask()
    _, back = court.plan.stages[0].servers
    placed = StagePlan((ServerPlan(NodeId("s9"), "front", ("s9:1",)), back))
    plan = make_plan(stages=1, generation=2, ledgers=2, restore_step=1)
    goes_on = msgspec.structs.replace(plan, continues=1, stages=(placed,))
    court.adopt(goes_on, back=True)
    court.begin()
    written = SnapshotWritten(ledger_generation=2, step=1, file="snapshot-1", digest=b"")
    court.checker.durable(court.world, court.host("s9"), written, {})
    court.ask()
    again = msgspec.structs.replace(goes_on, generation=3, ledger_generation=3)
    if on_disk:
        with pytest.raises(ViolationError, match="B4: other ledgers begin, and nobody has lost anything"):
            court.adopt(again, back=True)
    else:
        court.adopt(again, back=True)


def test_from_version_0_back_to_the_seed_no_step_is_thrown_away() -> None:
    """They are the same: a server that was to begin with a copy of version 0, and got none, takes the seed."""
    court = Court()
    court.ask()
    goes_on = msgspec.structs.replace(make_plan(stages=1, generation=2, ledgers=2, restore_step=0), continues=1)
    court.adopt(goes_on, back=True)
    court.ask()
    court.adopt(make_plan(stages=1, generation=3, ledgers=3), back=True)


def test_a_closed_step_is_thrown_away_by_nobody() -> None:
    """While all disks are whole."""
    court = Court()
    court.checker._committed = {(1, 0, shard): 1 for shard in range(2)}
    court.checker.durable(court.world, court.host("f0"), StepDone(ledger_generation=1, step=0, shares=()), {})
    court.ask()
    with pytest.raises(ViolationError, match="T-I12: 1 closed steps are thrown away"):
        court.adopt(make_plan(stages=1, generation=2, ledgers=2), back=True)


@pytest.mark.parametrize("has_it", ["nobody", "its buddy", "a disk", "a disk that hangs", "a disk that just came"])
def test_only_what_two_computers_had_that_are_gone_is_lost(has_it: str) -> None:
    """Ledgers went on from a copy in memory. Its holder went down before the newcomer had it on its disk, and the disk
    that it was of is in no server that has joined."""
    court = Court()
    court.checker._committed = {(1, 0, shard): 1 for shard in range(2)}
    buddy, spare, world = court.host("b0"), court.host("s9"), court.world
    begun = [
        ShardStarted(
            ledger_generation=1, step=0, stage=0, shard=shard, shard_count=2, checkpoint_step=-1, config_hash=b""
        )
        for shard in range(2)
    ]
    world.now, buddy.records = 60.0, [(begun[1], {})]
    court.checker.durable(world, court.host("f0"), StepDone(ledger_generation=1, step=0, shares=()), {})
    copy = {"ledger_generation": 1, "version": 1, "piece": 0}
    sent = ShardCopy(**copy, stage=0, shard=0, pieces=1, digest=b"", tensors=())
    court.checker.stepped(world, court.host("f0"), [Send(buddy.node, sent)])
    court.checker.stepped(world, buddy, [Send(NodeId("f0"), CopyKept(**copy))])
    placed = StagePlan((ServerPlan(NodeId("v"), "front", ("v:1",)), court.plan.stages[0].servers[1]))
    court.ask()
    goes_on = msgspec.structs.replace(make_plan(generation=2, ledgers=2, restore_step=1), stages=(placed,))
    court.adopt(msgspec.structs.replace(goes_on, continues=1, course=court.plan.course), back=True)
    buddy.life += has_it != "its buddy"
    if "disk" in has_it:
        spare.records = [(begun[0], {})]
    spare.hung = {"server": 1.0} if has_it == "a disk that hangs" else {}
    spare.started_at = world.now - 1.0 if has_it == "a disk that just came" else 0.0
    court.ask()
    back = msgspec.structs.replace(
        goes_on, generation=3, ledger_generation=3, restore_step=-1, course=court.plan.course
    )
    if has_it in ("its buddy", "a disk"):
        with pytest.raises(ViolationError, match="T-I12: 1 closed steps are thrown away"):
            court.adopt(back, back=True)
    else:
        court.adopt(back, back=True)


@pytest.mark.parametrize("since_s", [AGAIN_S - 0.5, AGAIN_S + 0.5])
def test_who_hangs_is_given_up_soon_after_its_fellows_go_on(since_s: float) -> None:
    """As soon as it has had the time to say that it goes on, too, and not before."""
    court = Court()
    world = court.world
    world.now = 60.0
    for a, b in combinations(sorted(world.hosts), 2):
        world.links[a, b] = Link(a, b, 0.02, 1e7)
    for node in ("f0", "s9"):
        court.host(node).hung_spans["server"] = (1.0, world.now - since_s)
    court.host("b0").hung, court.host("b0").held_up = {"disk": 1.0}, {"disk": deque()}
    front, _ = court.plan.stages[0].servers
    placed = StagePlan((front, ServerPlan(NodeId("s9"), "back", ("s9:1",))))
    plan = msgspec.structs.replace(court.plan, generation=2, stages=(placed,))
    if since_s > AGAIN_S:
        court.adopt(plan)
    else:
        with pytest.raises(ViolationError, match="L1: b0 is given up, though its fellows reach it"):
            court.adopt(plan)


@pytest.mark.parametrize(
    "case", ["as it was", "they went on", "an older coordinator", "they hung as soon", "it hung for a moment"]
)
def test_who_is_given_up_with_reason_may_be_well_when_the_plan_comes(case: str) -> None:
    """Seed 125367: a disk hung, its fellows showed that theirs did not, and then all hung for what they share. The
    coordinator gave it up, and had its plan when all had told what they can read, by when that disk went on.

    Few kinds 706320: they had hung for a moment meanwhile, and gone on so lately that they could not have said so."""
    court = Court()
    world, holder, coordinator = court.world, court.host("b0"), court.host(COORDINATOR)
    for a, b in combinations(sorted(world.hosts), 2):
        world.links[a, b] = Link(a, b, 0.02, 1e7)
    gone_s = court.config.limits.server_gone_s
    world.now = 60.0
    began = world.now - (0.5 if case == "it hung for a moment" else 2.0) * gone_s
    holder.hung, holder.held_up = {"disk": began}, {"disk": deque()}
    for node in ("f0", "s9"):
        court.host(node).hung["server"] = began if case == "they hung as soon" else world.now - 1.0
        if case == "they went on":
            del court.host(node).hung["server"]
            court.host(node).hung_spans["server"] = (world.now - 2.0, world.now - 1.0)
    given_up = Log("warning", "server given up", {"node": "b0", "slot": "", "stalled_s": gone_s})
    court.checker.stepped(world, coordinator, [given_up])
    world.now += 6.0
    holder.hung, holder.held_up, holder.hung_before = {}, {}, (began, world.now - 5.5)
    coordinator.life += case == "an older coordinator"
    front, _ = court.plan.stages[0].servers
    placed = StagePlan((front, ServerPlan(NodeId("s9"), "back", ("s9:1",))))
    plan = msgspec.structs.replace(court.plan, generation=2, stages=(placed,))
    if case in ("as it was", "they went on"):
        court.adopt(plan)
    else:
        with pytest.raises(ViolationError, match="L1: b0 is given up, though its fellows reach it"):
            court.adopt(plan)


@pytest.mark.parametrize("ledgers", [1, 2])
def test_gradients_of_earlier_ledgers_are_of_use_to_nobody(ledgers: int) -> None:
    """A volunteer that stood still, and has not heard that the run went back, may leave with them."""
    court = Court()
    volunteer = court.host("v")
    assert volunteer.lanes is not None
    volunteer.lanes.perform(SetUpDevice(court.config, 259, court.plan, 0), {})
    volunteer.lanes.added[TaskId(2, 1, 0, "B")] = None
    if ledgers > 1:
        court.ask()
        court.adopt(make_plan(stages=1, generation=2, ledgers=2), back=True)
        court.checker.stepped(court.world, volunteer, [Exit("drained")])
    else:
        with pytest.raises(ViolationError, match="T-I11: v was to leave in peace, and takes gradients with it"):
            court.checker.stepped(court.world, volunteer, [Exit("drained")])
