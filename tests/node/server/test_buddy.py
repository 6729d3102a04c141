"""A shard counts as committed when another server holds it, and begins from what that server gives back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from node.machine.jobs import CopyState, StartShard
from node.machine.records import Record, ShardStarted, SnapshotWritten, StepCommitted
from node.server.buddy import FETCH_AGAIN_S, BuddyRole, Copies
from node.server.recovery import StateLostError, held, recovery
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TensorRef
from protocol.messages import CopyGiven, CopyKept, FetchCopy, ShardCopy
from protocol.run.plan import Plan
from tests.node.setting import ELEMENTS, Effects, make_config, make_context, make_plan

FRONT, BACK = NodeId("f0"), NodeId("b0")


def words(key: int) -> TensorRef:
    return TensorRef(key, (ELEMENTS,), "int32", 4 * ELEMENTS)


def copy(version: int = 0, piece: int = 0, key: int = 7, digest: bytes = b"d", pieces: int = 2) -> ShardCopy:
    """A piece of f0's shard."""
    return ShardCopy(
        ledger_generation=1, stage=0, shard=0, version=version, piece=piece, pieces=pieces, digest=digest,
        tensors=(words(key),),
    )  # fmt: skip


class Desk:
    """The buddy role of `node`; f0 and b0 keep each other's copies."""

    def __init__(self, node: str = "f0", plan: Plan | None = None, copies: Copies | None = None, **config: Any) -> None:
        self.context = make_context(node, make_config(**{"buddy": "always", **config}), plan)
        self.copies = copies or Copies(self.context.out)
        self.role = BuddyRole(self.context, self.copies)
        self.kept: list[int] = []
        self.role.on_kept = self.kept.append
        self.role.set_elements(ELEMENTS)

    def take(self) -> Effects:
        return Effects(self.context.out)

    def send(self, version: int, piece: int, key: int) -> None:
        """The lane makes the piece that is due, and the buddy keeps it."""
        (job,) = self.take().jobs(CopyState)
        assert (job.version, job.piece) == (version, piece)
        self.role.made(job, (words(key), 2, b"d"))
        effects = self.take()
        (message,) = effects.sent(ShardCopy, BACK)
        assert message.tensors[0].key in effects.dropped
        self.role.handle(BACK, CopyKept(ledger_generation=1, version=version, piece=piece))


def test_a_version_is_held_when_its_last_piece_is_kept() -> None:
    """Pieces go one after the other; before the last one the version is not safe."""
    desk = Desk()
    desk.role.committed(1)
    assert desk.take().jobs(CopyState) == [] and not desk.role.holds(1)
    desk.role.buddy_ready()
    desk.send(0, 0, 50)
    desk.send(0, 1, 51)
    desk.send(1, 0, 52)
    assert not desk.role.holds(1) and desk.kept == [0]
    desk.send(1, 1, 53)
    assert desk.role.holds(1) and desk.kept == [0, 1]


def test_without_copies_every_version_counts_at_once() -> None:
    """As before there were any."""
    desk = Desk(buddy="never")
    desk.role.committed(1)
    desk.role.buddy_ready()
    assert desk.role.holds(1) and desk.take().all == []


def test_a_buddy_that_starts_anew_gets_everything_again() -> None:
    """It has nothing of what it had said to hold."""
    desk = Desk()
    desk.role.committed(0)
    desk.role.buddy_ready()
    desk.send(0, 0, 50)
    desk.send(0, 1, 51)
    assert desk.role.holds(0)
    desk.role.link_down(BACK, 0.0)
    desk.role.buddy_ready()
    assert not desk.role.holds(0)
    desk.send(0, 0, 52)


def test_a_version_that_is_gone_needs_no_copy() -> None:
    """Its step was closed meanwhile; the next one follows."""
    desk = Desk()
    desk.role.committed(1)
    desk.role.buddy_ready()
    (job,) = desk.take().jobs(CopyState)
    desk.role.made(job, None)
    (job,) = desk.take().jobs(CopyState)
    assert job.version == 1


def test_what_is_kept_is_named_when_it_is_whole_and_forgotten_when_its_step_is_closed() -> None:
    """A piece that comes twice is kept once; a copy under another digest takes the place of the first."""
    desk = Desk("b0")
    desk.role.handle(FRONT, copy(key=7))
    assert desk.copies.named() == ()
    desk.role.handle(FRONT, copy(key=8))
    desk.role.handle(FRONT, copy(piece=1, key=9))
    effects = desk.take()
    assert [message.piece for message in effects.sent(CopyKept, FRONT)] == [0, 0, 1] and effects.dropped == [8]
    assert desk.copies.named() == ((0, 0, 0, 1),)
    desk.role.handle(FRONT, copy(key=10, digest=b"other"))
    assert desk.copies.named() == () and desk.take().dropped == [7, 9]
    desk.role.handle(FRONT, copy(version=1, key=11, pieces=1))
    desk.copies.close_step(0)
    assert desk.copies.named() == ((0, 0, 1, 1),) and desk.take().dropped == [10]


def test_nobody_keeps_what_is_not_for_it() -> None:
    """Of a shard whose buddy is another server, in an absurd number of pieces, or far ahead of all that is open."""
    desk = Desk("b0")
    for peer, message in (
        (NodeId("f1"), msgspec.structs.replace(copy(), stage=1)),
        (FRONT, copy(pieces=10**6)),
        (FRONT, copy(version=99)),
    ):
        with pytest.raises(RemoteProtocolError):
            desk.role.handle(peer, message)
    assert desk.take().dropped == [7, 7, 7]


def test_ledgers_that_go_on_take_the_version_they_begin_with_and_nothing_else() -> None:
    """Those that go back to a checkpoint take nothing, nor do any that go on from others than these."""
    for continues, kept in ((1, ((0, 0, 1, 2),)), (-1, ()), (0, ())):
        desk = Desk("b0")
        for version in (0, 1, 2):
            desk.role.handle(FRONT, copy(version=version, key=20 + version, pieces=1))
        plan = make_plan(generation=2, ledgers=2, restore_step=1)
        Desk("b0", msgspec.structs.replace(plan, continues=continues), desk.copies)
        assert desk.copies.named() == kept


def continuing() -> Plan:
    return msgspec.structs.replace(make_plan(generation=2, ledgers=2, restore_step=3), continues=1)


def given(piece: int, digest: bytes = b"d", key: int = 30) -> CopyGiven:
    return CopyGiven(
        ledger_generation=2, version=3, piece=piece, pieces=2, digest=digest, tensors=(words(key + piece),)
    )


def test_a_server_without_anything_begins_from_its_buddys_copy() -> None:
    """It asks until it is heard, gets piece by piece, and the lane looks at the digest."""
    desk = Desk("f0", continuing())
    desk.role.fetch(3, 10.0)
    assert [message.piece for message in desk.take().sent(FetchCopy, BACK)] == [0]
    desk.role.wake(10.0 + FETCH_AGAIN_S)
    assert [message.piece for message in desk.take().sent(FetchCopy, BACK)] == [0]
    desk.role.handle(BACK, given(0))
    desk.role.handle(BACK, given(0, key=40))
    effects = desk.take()
    assert [message.piece for message in effects.sent(FetchCopy)] == [1] and effects.dropped == [40]
    desk.role.handle(BACK, given(1))
    effects = desk.take()
    (job,) = effects.jobs(StartShard)
    assert (job.checkpoint_step, job.continues, job.digest) == (3, 1, b"d")
    assert [ref.key for ref in job.copy] == effects.dropped == [30, 31]
    assert desk.role.wake_at() is None


def test_a_buddy_is_asked_as_soon_as_it_can_hear() -> None:
    """What it holds is in memory alone: it is asked when its link is there and when it has begun the ledgers, and in
    between after twice the time each time."""
    desk = Desk("f0", continuing())

    def asked() -> list[int]:
        return [message.piece for message in desk.take().sent(FetchCopy, BACK)]

    desk.role.fetch(3, 10.0)
    asked()
    now = 10.0
    for wait_s in (0.5, 1.0, 2.0, 2.0):
        assert desk.role.wake_at() == now + wait_s
        now += wait_s
        desk.role.wake(now)
        assert asked() == [0]
    desk.role.link_up(BACK, 20.0)
    assert asked() == [0] and desk.role.wake_at() == 20.5
    desk.role.begun(BACK)
    desk.role.begun(BACK)
    assert asked() == [0] and desk.role.wake_at() is None
    desk.role.handle(BACK, given(0))
    assert asked() == [1]
    desk.role.link_down(BACK, 30.0)
    assert desk.role.wake_at() is not None
    desk.role.link_up(BACK, 30.1)
    assert asked() == [1]
    desk.role.handle(BACK, given(1))
    assert len(desk.take().jobs(StartShard)) == 1
    desk.role.link_up(BACK, 31.0)
    assert asked() == [] and desk.role.wake_at() is None


def test_who_asks_a_buddy_that_is_heard_already_asks_once() -> None:
    """Each answer comes: to ask again would send the same piece twice over a slow line."""
    desk = Desk("f0", continuing())
    desk.role.begun(NodeId("f1"))
    desk.role.begun(BACK)
    desk.role.fetch(3, 10.0)
    assert len(desk.take().sent(FetchCopy, BACK)) == 1 and desk.role.wake_at() is None


def test_ledgers_that_begin_with_the_same_once_more_take_the_same_copies() -> None:
    """The second ones closed nothing, and third ones go on from what they went on from."""
    desk = Desk("b0")
    desk.role.handle(FRONT, copy(version=3, key=20, pieces=1))
    Desk("b0", continuing(), desk.copies)
    again = msgspec.structs.replace(continuing(), generation=3, ledger_generation=3)
    Desk("b0", again, desk.copies)
    assert desk.copies.named() == ((0, 0, 3, 3),)
    for other in (msgspec.structs.replace(again, restore_step=2), msgspec.structs.replace(again, continues=-1)):
        assert not other.goes_on_from(again) and not again.goes_on_from(other)


def test_a_copy_that_is_not_there_or_not_what_it_says_loses_the_state_and_is_used_by_nobody() -> None:
    """Then the run goes back to a checkpoint; the buddy forgets what is spoilt, so it is not chosen again."""
    desk = Desk("f0", continuing())
    desk.role.fetch(3, 0.0)
    with pytest.raises(StateLostError, match="does not hold it"):
        desk.role.handle(BACK, CopyGiven(ledger_generation=2, version=3, piece=0, pieces=0, digest=b"", tensors=()))
    desk = Desk("f0", continuing())
    desk.role.fetch(3, 0.0)
    desk.role.handle(BACK, given(0))
    with pytest.raises(StateLostError, match="two forms"):
        desk.role.handle(BACK, given(1, digest=b"other"))
    desk.take()
    with pytest.raises(StateLostError, match="cannot be used"):
        desk.role.useless("another digest")
    assert [message.piece for message in desk.take().sent(FetchCopy, BACK)] == [-1]
    buddy = Desk("b0")
    buddy.role.handle(FRONT, copy(pieces=1))
    buddy.role.handle(FRONT, FetchCopy(ledger_generation=1, stage=0, shard=0, version=0, piece=-1))
    assert buddy.copies.named() == ()


def test_ledgers_that_began_in_memory_are_made_again_from_their_first_snapshot() -> None:
    """However new it is; before it is written the disk has nothing of use, and the version is to be fetched."""
    started = ShardStarted(
        ledger_generation=2, step=0, stage=0, shard=0, shard_count=2, checkpoint_step=3, config_hash=b"", continues=1
    )
    committed = StepCommitted(ledger_generation=2, step=3, contributions=(), clip_factor=1.0, skipped=False, digest=b"")
    snapshot = SnapshotWritten(ledger_generation=2, step=3, file="snapshot-3", digest=b"d")
    cases: tuple[tuple[list[Record], tuple[int, str, int]], ...] = (
        ([started], (3, "", 3)),
        ([started, snapshot], (3, "snapshot-3", 3)),
        ([started, snapshot, committed], (3, "snapshot-3", 4)),
    )
    for records, found in cases:
        known = recovery(records, 2, 1, None)
        assert known is not None and (known.base, known.snapshot, known.version) == found
    assert recovery([started], 2, 1, (3,)) is None and held([started, committed], 1, (3,)) is None
    assert held([started, snapshot, committed], 1, ()) == (0, 0, 4, 2)
