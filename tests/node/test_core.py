"""A node as a whole: it joins, follows plans of growing generations, hosts its roles, and ends with a reason."""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar

import msgspec
import pytest

from node.core import NodeMachine
from node.machine.facts import NodeFacts
from node.machine.jobs import (
    FindCheckpoints,
    LoadBatch,
    PrepareData,
    SetUpDevice,
    SetUpServer,
    StartShard,
    WriteCheckpoint,
    WriteEvidence,
    WriteManifest,
    WriteSnapshot,
)
from node.machine.records import ContributionStored, Record, ShardStarted, SnapshotWritten, StageKeyKnown, StepCommitted
from node.machine.roles import READ_AGAIN_S
from protocol.base.ids import NodeId, TensorRef
from protocol.base.machine import (
    AddressesChanged,
    CheckpointsFound,
    Compute,
    Computed,
    ComputeFailed,
    Dial,
    DropTensors,
    Effect,
    Exit,
    HangUp,
    LinkDown,
    LinkUp,
    Log,
    Persist,
    Persisted,
    Received,
    Send,
)
from protocol.messages import (
    Audit,
    Bye,
    CheckpointDone,
    DataReady,
    DrainOrder,
    Freeze,
    Join,
    Lease,
    Leave,
    Message,
    NodeReport,
    Ping,
    PlanChanged,
    Pong,
    Ready,
    RunFinished,
    ShardCopy,
    Welcome,
)
from protocol.run.plan import Plan
from protocol.run.run import DataSection
from protocol.trust.membership import Trust
from tests.node.setting import activation, backward, contribution, make_config, make_plan, shard_tensor
from tests.protocol.samples import COORDINATOR as SAMPLE_COORDINATOR
from tests.protocol.samples import RUN_ID as SAMPLE_RUN_ID

T = TypeVar("T")
COORDINATOR = NodeId("c")
CONFIG = make_config()


class Desk:
    """A node and all that it has ordered at its last input."""

    def __init__(self, node: str, role: str = "server", **facts: Any) -> None:
        addresses = (f"{node}:1",) if role == "server" else ()
        self.machine = NodeMachine(
            NodeId(node), NodeFacts(role=role, addresses=addresses, secret=bytes(range(32)), **facts), COORDINATOR,
            ("c:1",), count(1),
            Trust(SAMPLE_RUN_ID, SAMPLE_COORDINATOR.public_key),
        )  # fmt: skip
        self.effects: list[Effect] = list(self.machine.start(0.0))

    def feed(self, fact: Any, now: float = 0.0) -> list[Effect]:
        self.effects = list(self.machine.handle(fact, now))
        self.machine.check()
        return self.effects

    def hear(self, message: Message, peer: NodeId = COORDINATOR) -> list[Effect]:
        return self.feed(Received(peer, message))

    def join(self, vocabulary: int = 259) -> Join:
        """The link to the coordinator comes up; what the node says of itself. Then it is welcome."""
        self.feed(LinkUp(COORDINATOR, "coordinator"))
        (join,) = self.sent(Join)
        self.hear(Welcome(membership=b"m", config=CONFIG, config_hash=CONFIG.config_hash(), vocabulary=vocabulary))
        return join

    def plan(self, plan: Plan, stage: int = 0) -> list[Effect]:
        return self.hear(PlanChanged(plan=plan, stage=stage, reason="because"))

    def sent(self, kind: type[T]) -> list[T]:
        return [e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, kind)]

    def jobs(self, kind: type[T]) -> list[T]:
        return [e.job for e in self.effects if isinstance(e, Compute) and isinstance(e.job, kind)]

    def of(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


def started(checkpoint_step: int = -1, generation: int = 1) -> ShardStarted:
    return ShardStarted(
        ledger_generation=generation,
        step=0,
        stage=0,
        shard=1,
        shard_count=2,
        checkpoint_step=checkpoint_step,
        config_hash=CONFIG.config_hash(),
    )


def committed(step: int, generation: int = 1) -> StepCommitted:
    return StepCommitted(
        ledger_generation=generation, step=step, contributions=(), clip_factor=1.0, skipped=False, digest=b""
    )


def snapshot(version: int) -> SnapshotWritten:
    return SnapshotWritten(ledger_generation=5, step=version, file="s", digest=b"")


def test_it_dials_the_coordinator_and_joins() -> None:
    """A link that comes up brings a Join."""
    desk = Desk("b0")
    assert [dial.peer for dial in desk.of(Dial)] == ["c"]
    assert desk.join().role == "server"


@pytest.mark.parametrize(
    ("records", "checkpoints", "held"),
    [
        ([], (), (-1, -1, -1, -1)),
        ([started()], (), (0, 1, 0, 1)),
        ([started(), committed(0), committed(1)], (), (0, 1, 2, 1)),
        ([started(), committed(0), started(2, 5)], (2,), (0, 1, 2, 5)),
        ([started(2, 5), committed(2, 5)], (2,), (0, 1, 3, 5)),
        ([started(2, 5), committed(2, 5)], (), (-1, -1, -1, -1)),
        ([started(2, 5), committed(2, 5), snapshot(3)], (), (-1, -1, -1, -1)),
        ([started(2, 5), committed(2, 5), snapshot(3), *(committed(s, 5) for s in (3, 4, 5))], (), (0, 1, 6, 5)),
    ],
    ids=[
        "new",
        "begun",
        "committed",
        "went back",
        "from a checkpoint",
        "that is gone",
        "and the snapshot is too new",
        "but a snapshot is old enough",
    ],
)
def test_it_says_what_its_disk_holds(records: list[Record], checkpoints: tuple[int, ...], held: Any) -> None:
    """Stage, shard, version, ledgers; nothing, if what it began from is gone: the rest cannot be made again."""
    join = Desk("b0", records=records, checkpoints=checkpoints).join()
    assert (join.stage, join.shard, join.version, join.held_generation) == held


def test_checkpoints_found_later_are_named_and_a_question_brings_news_first() -> None:
    """A coordinator that must send the run back goes by what it has heard when the answer comes."""
    desk = Desk("b0")
    desk.join()
    desk.feed(CheckpointsFound((6, 4)))
    assert [join.checkpoints for join in desk.sent(Join)] == [(6, 4)]
    desk.feed(CheckpointsFound((4,)))
    assert desk.sent(Join) == []
    desk.hear(Ping(number=1))
    assert desk.sent(Join) == [] and desk.sent(Pong) == [Pong(number=1)]
    desk.feed(LinkDown(COORDINATOR, "cut"))
    desk.feed(CheckpointsFound((8,)))
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    assert [join.checkpoints for join in desk.sent(Join)] == [(8, 6, 4)]


def test_new_addresses_are_told_at_once_and_once() -> None:
    """The home router forwards a port, and then no more; with the coordinator away it hears of it when it is back."""
    desk = Desk("b0")
    desk.join()
    desk.feed(AddressesChanged(("203.0.113.9:7",)))
    assert [join.addresses for join in desk.sent(Join)] == [("203.0.113.9:7",)]
    desk.feed(AddressesChanged(("203.0.113.9:7",)))
    assert desk.sent(Join) == []
    desk.feed(LinkDown(COORDINATOR, "cut"))
    desk.feed(AddressesChanged(()))
    assert desk.sent(Join) == []
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    assert [join.addresses for join in desk.sent(Join)] == [()]
    desk.feed(AddressesChanged((), ("192.168.1.6:7",)))
    assert [join.local_addresses for join in desk.sent(Join)] == [("192.168.1.6:7",)]


def test_a_server_that_went_on_says_so_before_it_answers() -> None:
    """Its first word said version 0; meanwhile the shard began."""
    desk = Desk("b1")
    assert desk.join().held_generation == -1
    desk.plan(make_plan(), stage=1)
    assert desk.machine.server is not None
    desk.hear(Ping(number=1))
    messages = [e.message for e in desk.effects if isinstance(e, Send)]
    kinds = [type(message) for message in messages if isinstance(message, Join | Pong)]
    assert kinds == [Join, Pong]
    assert desk.sent(Join)[0].held_generation == 1


def test_another_configuration_of_the_run_is_refused() -> None:
    """The state folder is of another run, or the hash does not fit: the process ends with the reason."""
    desk = Desk("b0", records=[started()])
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    other = make_config(steps=9)
    desk.hear(Welcome(membership=b"m", config=other, config_hash=other.config_hash(), vocabulary=1))
    assert "another configuration" in desk.of(Exit)[0].reason
    desk = Desk("b0")
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    desk.hear(Welcome(membership=b"m", config=CONFIG, config_hash=b"x" * 32, vocabulary=1))
    assert "hash" in desk.of(Exit)[0].reason


def test_a_server_of_stage_0_reads_the_data_first() -> None:
    """Nobody else does; what it found goes to the coordinator."""
    desk = Desk("f0")
    desk.join(vocabulary=0)
    desk.plan(make_plan())
    (job,) = desk.jobs(PrepareData)
    desk.feed(Computed(job, (259, "hash", 1000)))
    assert desk.sent(DataReady)[0].token_count == 1000
    other = Desk("b1")
    other.join()
    other.plan(make_plan(), stage=1)
    assert other.jobs(PrepareData) == [] and len(other.jobs(SetUpServer)) == 1


def test_a_server_that_lost_its_place_of_stage_0_says_nothing_of_the_data_any_more() -> None:
    """Back as a spare it would be hung up on for that, again and again."""
    desk = Desk("f0")
    desk.join(vocabulary=0)
    desk.plan(make_plan())
    desk.feed(Computed(desk.jobs(PrepareData)[0], (259, "hash", 1000)))
    for stage, said in ((0, 1), (-1, 0)):
        desk.plan(make_plan(), stage=stage)
        desk.feed(LinkDown(COORDINATOR, "reset"))
        desk.feed(LinkUp(COORDINATOR, "coordinator"))
        assert len(desk.sent(DataReady)) == said


def test_who_holds_copies_says_so_when_no_step_closes_any_more() -> None:
    """The coordinator hears of them while it waits for who is gone, and not with each step before."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    copies = desk.machine._roles.copies
    copies.take(ShardCopy(
        ledger_generation=1, stage=1, shard=0, version=1, piece=0, pieces=1, digest=b"d",
        tensors=(TensorRef(5, (1,), "int32", 4),),
    ))  # fmt: skip
    desk.machine._closed = -2
    told = []
    for number in range(1, 4):
        effects = list(desk.machine.wake(2.0 * number + 0.1))
        told.append([e.message.copies for e in effects if isinstance(e, Send) and isinstance(e.message, Join)])
    assert told == [[], [((1, 0, 1, 1),)], []]


def test_data_that_nobody_can_read_are_named_and_tried_again() -> None:
    """The server stays, says why, and reads again a little later, or at once what the operator has corrected."""
    desk = Desk("f0")
    desk.join(vocabulary=0)
    desk.plan(make_plan())
    (job,) = desk.jobs(PrepareData)
    desk.feed(ComputeFailed(job, "/data/bok.txt: no such file"))
    assert desk.of(Exit) == [] and desk.jobs(PrepareData) == []
    assert desk.sent(NodeReport)[0].alert == "the data cannot be read: /data/bok.txt: no such file"
    desk.effects = list(desk.machine.wake(READ_AGAIN_S))
    assert desk.jobs(PrepareData) == [job], "somebody may have put the file there"
    other = msgspec.structs.replace(CONFIG, data=DataSection(source="/data/book.txt"))
    desk.hear(Welcome(membership=b"m", config=other, config_hash=other.config_hash(), vocabulary=0))
    assert desk.jobs(PrepareData) == [], "the lane is still at it"
    desk.feed(Computed(job, (259, "hash", 1000)), now=READ_AGAIN_S)
    assert desk.sent(DataReady) == [], "the run wants other data now"
    (again,) = desk.jobs(PrepareData)
    assert again.config == other
    desk.feed(Computed(again, (300, "other", 1000)))
    assert desk.sent(DataReady)[0].vocabulary == 300


def test_a_server_that_cannot_read_what_others_have_read_makes_room() -> None:
    """It is the one that lacks them: another may take its place."""
    desk = Desk("f0")
    desk.join(vocabulary=259)
    desk.plan(make_plan())
    (job,) = desk.jobs(PrepareData)
    desk.feed(ComputeFailed(job, "/data/book.txt: no such file"))
    assert "/data/book.txt" in desk.of(Exit)[0].reason


def test_a_plan_of_an_older_generation_is_refused() -> None:
    """A coordinator that was thought dead still speaks: its plan is not followed, its link is closed."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(generation=5), stage=1)
    desk.plan(make_plan(generation=4, ledgers=4), stage=1)
    assert [hang_up.peer for hang_up in desk.of(HangUp)] == ["c"]
    assert desk.machine.plan is not None and desk.machine.plan.generation == 5


def test_a_plan_that_only_moves_an_address_restarts_nothing() -> None:
    """A new generation with the same ledgers: shard and device go on."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(generation=1), stage=1)
    assert len(desk.jobs(SetUpServer)) == len(desk.jobs(SetUpDevice)) == 1
    desk.plan(make_plan(generation=2), stage=1)
    assert desk.jobs(SetUpServer) == [] and desk.jobs(SetUpDevice) == []


def test_results_of_jobs_that_were_ordered_under_earlier_ledgers_are_ignored() -> None:
    """New ledgers begin while the lane works: what it ends before their own set-up belongs to nobody."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    (old_set_up,) = desk.jobs(SetUpServer)
    desk.feed(Computed(old_set_up, 3))
    desk.plan(make_plan(generation=2, ledgers=2), stage=1)
    (set_up,), (start,) = desk.jobs(SetUpServer), desk.jobs(StartShard)
    server = desk.machine.server
    assert server is not None
    desk.feed(Computed(StartShard(-1), b"of the earlier ledgers"))
    assert not server.ready
    desk.feed(Computed(set_up, 3))
    desk.feed(Computed(start, b"digest"))
    assert server.ready


def test_new_ledgers_let_go_of_what_the_old_ones_held() -> None:
    """Tensors of the journal's old contributions are dropped, once."""
    kept = ContributionStored(
        ledger_generation=1,
        step=0,
        contribution=contribution(1),
        version=0,
        tasks=(backward(0, 0, 1),),
        losses=(),
        tensors=(shard_tensor(99),),
    )
    dropped: list[int] = []
    desk = Desk("b1", records=[started(), kept])
    desk.join()
    for generation in (1, 2, 3):
        desk.plan(make_plan(generation=generation, ledgers=generation), stage=1)
        dropped += [key for effect in desk.of(DropTensors) for key in effect.keys]
        assert dropped == ([] if generation == 1 else [99])


def test_leases_are_given_again_when_a_link_drops_and_nothing_else_happens() -> None:
    """The link of the volunteer with the leases breaks: in the same breath another gets them."""
    desk = Desk("f0", computes=False)
    desk.join()
    desk.plan(make_plan())
    (prepare,) = desk.jobs(PrepareData)
    desk.feed(Computed(prepare, (259, "hash", 1000)))
    (set_up,), (start,) = desk.jobs(SetUpServer), desk.jobs(StartShard)
    (key,) = [effect.record_number for effect in desk.of(Persist) if isinstance(effect.record, StageKeyKnown)]
    desk.feed(Computed(set_up, 3))
    desk.feed(Computed(start, b"digest"))
    loads = desk.jobs(LoadBatch)
    desk.feed(Persisted(key))
    for volunteer in ("v1", "v2"):
        desk.feed(LinkUp(NodeId(volunteer), "volunteer"))
        desk.hear(Ready(ledger_generation=1, hello=False, slots=0, graph_slots=((0, 4),)), NodeId(volunteer))
    for load in loads:
        desk.feed(Computed(load, (activation(load.tokens, CONFIG), activation(load.labels, CONFIG))))
        holders = [effect.peer for effect in desk.of(Send) if isinstance(effect.message, Lease)]
    desk.feed(LinkDown(NodeId(holders[0]), "broken"))
    leases = [effect for effect in desk.of(Send) if isinstance(effect.message, Lease)]
    assert leases and all(lease.peer != holders[0] for lease in leases)


def test_a_ping_is_answered_whoever_asks() -> None:
    """With the same number."""
    desk = Desk("b0")
    desk.feed(LinkUp(NodeId("f0"), "server"))
    desk.hear(Ping(number=8), NodeId("f0"))
    assert desk.sent(Pong) == [Pong(number=8)]


def test_a_coordinator_that_asks_hears_of_checkpoints_that_nobody_told_this_spare_of() -> None:
    """A spare is told of no checkpoint: it looks, says what it found, and answers after that, however often asked."""
    desk = Desk("s9")
    desk.join()
    desk.plan(make_plan(), stage=-1)
    desk.hear(Ping(number=3, look=True))
    assert desk.sent(Pong) == [] and len(desk.jobs(FindCheckpoints)) == 1
    desk.hear(Ping(number=4, look=True))
    desk.hear(Ping(number=5))
    assert desk.sent(Pong) == [Pong(number=5)] and not desk.jobs(FindCheckpoints)
    desk.feed(Computed(FindCheckpoints(CONFIG), (4, 2)))
    said = [effect.message for effect in desk.of(Send)]
    assert isinstance(said[0], Join) and said[0].checkpoints == (4, 2)
    assert said[1:] == [Pong(number=3), Pong(number=4)]


@pytest.mark.parametrize(("folder", "told"), [("/shared", ()), ("checkpoints", (8, 4))])
def test_a_checkpoint_that_is_gone_is_not_named_any_more(folder: str, told: tuple[int, ...]) -> None:
    """What it knew from its start does not count against what lies there now; what was told meanwhile does. Where every
    server keeps its own part there is no manifest: it looks for its part of what it was told of. Else a run would go
    back to what this one cannot begin from, and then once more."""
    desk = Desk("b1", checkpoints=(8, 4))
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    config = make_config(folder=folder)
    desk.hear(Welcome(membership=b"m", config=config, config_hash=config.config_hash(), vocabulary=259))
    desk.plan(make_plan(), stage=1)
    desk.feed(LinkUp(NodeId("f0"), "server"))
    desk.hear(Ping(number=1, look=True))
    assert desk.jobs(FindCheckpoints) == [FindCheckpoints(config, told)]
    desk.hear(CheckpointDone(ledger_generation=1, step=12), NodeId("f0"))
    desk.feed(Computed(FindCheckpoints(config, told), (4,)))
    assert desk.sent(Join)[-1].checkpoints == (12, 4)


def test_checkpoints_that_cannot_be_looked_for_hold_nobody_up() -> None:
    """The folder cannot be read: the answer goes out without news."""
    desk = Desk("s9")
    desk.join()
    desk.hear(Ping(number=3, look=True))
    desk.feed(ComputeFailed(FindCheckpoints(CONFIG), "permission denied"))
    assert desk.sent(Pong) == [Pong(number=3)] and not desk.of(Exit)


def test_a_full_checkpoint_folder_is_an_alert_and_training_goes_on() -> None:
    """No exit: the next report says what is wrong, and the same version is tried again until there is room."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    desk.feed(Computed(desk.jobs(SetUpServer)[0], 3))
    desk.feed(Computed(StartShard(-1), b"digest"))
    job = WriteCheckpoint(0, 0)
    desk.feed(ComputeFailed(job, "No space left on device: /checkpoints"), now=1.0)
    assert not desk.of(Exit)
    desk.effects = list(desk.machine.wake(2.0))
    assert (
        desk.sent(NodeReport)[0].alert == "checkpoint part 0 cannot be written: No space left on device: /checkpoints"
    )
    desk.effects = list(desk.machine.wake(17.0))
    assert desk.jobs(WriteCheckpoint) == [job]
    desk.feed(Computed(job, ("file", 8, b"d")), now=18.0)
    desk.effects = list(desk.machine.wake(20.0))
    assert desk.sent(NodeReport)[0].alert == ""


def test_evidence_that_cannot_be_kept_is_an_alert_until_some_can() -> None:
    """The run goes on, and who lied is banned all the same; the operator hears why there is no file."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    desk.feed(Computed(desk.jobs(SetUpServer)[0], 3))
    order = Audit(
        ledger_generation=1, contribution=contribution(1), step=0, version=0, tasks=(), losses=(),
        auditor=NodeId("b1"), attempt=0,
    )  # fmt: skip
    job = WriteEvidence(order, (), (), ())
    desk.feed(ComputeFailed(job, "evidence: there are 64 files"), now=1.0)
    assert not desk.of(Exit) and [effect.event for effect in desk.of(Log)] == ["evidence cannot be written"]
    desk.effects = list(desk.machine.wake(2.0))
    assert desk.sent(NodeReport)[0].alert == "evidence of a lie was not kept: evidence: there are 64 files"
    desk.feed(Computed(job, "file"), now=3.0)
    desk.effects = list(desk.machine.wake(4.0))
    assert desk.sent(NodeReport)[0].alert == ""


def test_a_server_that_is_told_of_checkpoints_says_so_when_it_writes_its_part() -> None:
    """Where every server keeps its own parts: by that the lane knows which ones it may delete."""
    desk = Desk("b1")
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    config = make_config(every_steps=1)
    desk.hear(Welcome(membership=b"m", config=config, config_hash=config.config_hash(), vocabulary=259))
    desk.plan(make_plan(), stage=1)
    (set_up,) = desk.jobs(SetUpServer)
    desk.feed(LinkUp(NodeId("f0"), "server"))
    desk.hear(CheckpointDone(ledger_generation=1, step=12), NodeId("f0"))
    desk.feed(Computed(set_up, 3))
    desk.feed(Computed(StartShard(-1), b"digest"))
    assert [job.complete for job in desk.jobs(WriteCheckpoint)] == [(12,)]


@pytest.mark.parametrize("job", [WriteCheckpoint(0, 0), WriteSnapshot(0), WriteManifest(0, (), 0)], ids=str)
def test_a_full_disk_ends_nobody_who_has_given_its_state_up_meanwhile(job: Any) -> None:
    """Seed 105218: the lane still wrote what its shard had ordered before it lost its state."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    desk.feed(Computed(desk.jobs(SetUpServer)[0], 3))
    desk.feed(Computed(StartShard(-1), b"digest"))
    freeze = Freeze(ledger_generation=1, step=0, contributions=(contribution(1),))
    desk.feed(LinkUp(NodeId("f1"), "server"))
    desk.hear(freeze, NodeId("f1"))
    assert desk.machine.server is None
    desk.feed(ComputeFailed(job, "no space left on device"))
    assert not desk.of(Exit)


def test_a_shard_that_cannot_do_its_arithmetic_stops() -> None:
    """It must not guess: the process ends with the reason, and the journal has everything."""
    desk = Desk("b1")
    desk.join()
    desk.plan(make_plan(), stage=1)
    desk.feed(ComputeFailed(StartShard(2), "checkpoint file is not there"))
    assert desk.of(Exit)[0].reason == "failed: StartShard: checkpoint file is not there"


def test_the_end_of_the_run_ends_the_node() -> None:
    """It reports, says good-bye to all, and exits."""
    desk = Desk("b1")
    desk.join()
    desk.feed(LinkUp(NodeId("f1"), "server"))
    desk.hear(RunFinished())
    assert len(desk.sent(Leave)) == 1 and len(desk.sent(Bye)) == 2
    assert desk.of(Exit)[0].reason == "finished"


def test_the_operator_lets_go_who_holds_nothing_alone() -> None:
    """A volunteer as its owner would end it, a spare at once; a server with a place stays, whoever says what."""
    lent = Desk("v1", role="volunteer")
    lent.join()
    lent.plan(make_plan(), stage=1)
    lent.hear(DrainOrder(reason="new card"))
    assert [report.state for report in lent.sent(NodeReport)][-1:] == ["draining"], "it reports before it goes"
    for node, placed, reasons in (("b9", False, ["drained by the operator"]), ("b1", True, [])):
        desk = Desk(node)
        desk.join()
        if placed:
            desk.plan(make_plan(), stage=1)
        desk.hear(DrainOrder(reason="new card"))
        assert [effect.reason for effect in desk.of(Exit)] == reasons


def test_an_owner_sees_now_and_then_what_the_computer_does() -> None:
    """Every half minute one line: tokens a second since the last, or what it waits for."""
    desk = Desk("v1", role="volunteer")
    desk.join()
    desk.plan(make_plan())
    assert desk.machine.volunteer is not None
    said: list[Log] = []
    for second in range(0, 70, 2):
        if second == 40:
            desk.machine.volunteer.tally.totals["tokens"] += 900
        effects = desk.machine.wake(float(second))
        said += [e for e in effects if isinstance(e, Log) and e.event in ("working", "idle")]
    assert [(line.event, line.fields["tokens_per_s"]) for line in said] == [("idle", 0.0), ("working", 30.0)]
    assert [line.fields["waiting_for"] for line in said] == ["the device to start", ""]


@pytest.mark.parametrize(("role", "vocabulary"), [("server", 0), ("volunteer", 259)])
def test_who_has_just_joined_claims_nothing_about_others(role: str, vocabulary: int) -> None:
    """The plan may follow at once, or when all servers are there: the node does not know which."""
    desk = Desk("v1", role=role)
    desk.join(vocabulary)
    (line,) = [each for each in desk.of(Log) if each.event == "joined"]
    assert line.fields["waiting_for"] == "the plan, which the coordinator makes when all servers are there"
    if role == "server":
        desk.hear(PlanChanged(plan=make_plan(), stage=1, reason="because"))
        assert desk.machine.waiting_for() == "stage 0 to read the data"


def test_a_server_that_crashed_again_and_again_says_that_it_holds_nothing() -> None:
    """What lies on its disk may be what makes it crash: the coordinator is told of nothing, and sends the run back."""
    records: list[Record] = [
        ShardStarted(
            ledger_generation=1, step=0, stage=0, shard=0, shard_count=2, checkpoint_step=-1,
            config_hash=CONFIG.config_hash(),
        )
    ]  # fmt: skip
    for gives_up, generation in (("", 1), ("3 crashes in a row: KeyError: 1", -1)):
        desk = Desk("a", records=list(records), gives_up=gives_up)
        effects = desk.feed(LinkUp(COORDINATOR, "coordinator"))
        (join,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Join)]
        assert join.held_generation == generation
