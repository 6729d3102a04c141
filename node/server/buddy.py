"""A shard's buddy: another server that holds in memory what the shard has committed (`protocol.run.buddies`).

    shard commits version v ─▶ CopyState ─▶ ShardCopy ─▶ buddy: `Copies` ─▶ CopyKept ─▶ shard: Committed ─▶ ledger

So a step is closed only when every shard's new version lies on its own disk and in another server's memory: who loses
the one has the other, of every version that anybody may have to go on from. A server that begins ledgers which
continue others (`Plan.continues`), and has nothing of its shard in memory or on its disk, fetches the copy, piece by
piece. It counts only if its digest is the one that the shard itself had made.

A copy is whole or of no use, and of one ledger generation: ledgers that go on from a version take its copies with
them, all others are forgotten, and so is what a restart or a lost place takes away; then the shard sends it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from node.machine.jobs import CopyState, StartShard
from node.machine.outbox import Outbox
from node.machine.waits import Wait
from node.server.context import CLOSED_LAG_STEPS, StageContext
from node.server.recovery import StateLostError
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TensorRef
from protocol.base.limits import COPIES_MAX
from protocol.messages import CopyGiven, CopyKept, FetchCopy, ShardCopy, Work
from protocol.run.buddies import COPY_BYTES_MAX, copy_bytes, keeps_copies
from protocol.run.plan import Plan

FETCH_AGAIN_S = 0.5
FETCH_AGAIN_MAX_S = 2.0
"""A buddy that has not heard of the new ledgers yet gives no answer: so it is asked again, after twice the time each
time. What it holds is in its memory alone, and lost with it."""
PIECE_WORDS = 8 << 20
"""Of 4 bytes: 32 MiB, a quarter of a second at 1 Gbit/s, after which other traffic of the link has its turn."""
PIECES_MAX = -(-COPY_BYTES_MAX // (4 * PIECE_WORDS)) + 1
AHEAD = CLOSED_LAG_STEPS + 2
"""Versions, beyond the delay, by which a shard can be ahead of the newest step that this server knows to be closed."""
_ALERT = "copy"


@dataclass(slots=True)
class _Copy:
    """One version of one shard, whole when all pieces are there."""

    pieces: int
    digest: bytes
    refs: list[TensorRef] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return len(self.refs) == self.pieces


class Copies:
    """What one server holds of other servers' shards; it outlives the ledgers."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._plan: Plan | None = None
        """A plan of the ledgers that all of it belongs to."""
        self._held: dict[tuple[int, int, int], _Copy] = {}
        """By (stage, shard, version)."""

    def begin(self, plan: Plan) -> None:
        """Ledgers begin: what they go on from is theirs, too."""
        goes_on = self._plan is not None and plan.goes_on_from(self._plan)
        for key in [key for key in self._held if not (goes_on and key[2] == plan.restore_step)]:
            self._forget(key)
        self._plan = plan

    def end(self) -> None:
        """This server has no place any more."""
        for key in list(self._held):
            self._forget(key)
        self._plan = None

    def close_step(self, step: int) -> None:
        """Every shard has version step + 1 now, and so has its buddy: nobody goes on from an older one."""
        for key in [key for key in self._held if key[2] <= step]:
            self._forget(key)

    def take(self, message: ShardCopy) -> bool:
        """Keeps a piece. Whether it is there now: the next one may come."""
        key = message.stage, message.shard, message.version
        copy = self._held.get(key)
        if copy is not None and (copy.pieces, copy.digest) != (message.pieces, message.digest):
            self._forget(key)
            copy = None
        if copy is not None and message.piece < len(copy.refs):
            self._out.drop(message.tensors)  # it was sent again
            return True
        if message.piece != (0 if copy is None else len(copy.refs)):
            self._out.drop(message.tensors)
            return False
        if copy is None:
            copy = self._held[key] = _Copy(message.pieces, message.digest)
        copy.refs.append(message.tensors[0])
        return True

    def piece(self, stage: int, shard: int, version: int, number: int) -> tuple[int, bytes, TensorRef] | None:
        """(pieces, digest, the piece) of a copy that is whole."""
        copy = self._held.get((stage, shard, version))
        if copy is None or not copy.whole or not 0 <= number < copy.pieces:
            return None
        return copy.pieces, copy.digest, copy.refs[number]

    def forget(self, stage: int, shard: int, version: int) -> None:
        """It is not what its digest says."""
        if (stage, shard, version) in self._held:
            self._forget((stage, shard, version))

    def named(self) -> tuple[tuple[int, int, int, int], ...]:
        """(stage, shard, version, ledger generation) of all that are whole, newest versions first."""
        whole = sorted((key for key, copy in self._held.items() if copy.whole), key=lambda key: (-key[2], key))
        generation = -1 if self._plan is None else self._plan.ledger_generation
        return tuple((*key, generation) for key in whole[:COPIES_MAX])

    def _forget(self, key: tuple[int, int, int]) -> None:
        self._out.drop(self._held.pop(key).refs)


class BuddyRole:
    """Both sides of one server: its own versions go to its buddy, and others' come to `copies`."""

    def __init__(self, context: StageContext, copies: Copies) -> None:
        self._context = context
        self._out = context.out
        self._copies = copies
        self._on = False
        self._here = False
        """Whether the buddy has said that it is ready, under these ledgers."""
        self._kept: dict[int, None] = {}
        """Versions that the buddy holds."""
        self._wanted: dict[int, None] = {}
        self._sending: tuple[int, int] | None = None
        """(version, piece) on its way: in the lane, to the buddy, or waiting for its word."""
        self._pieces = 0
        """Of the version that is sent."""
        self._newest = -1
        self.on_kept: Callable[[int], None] = lambda version: None
        """Called when the buddy holds a version."""
        self._fetching: int | None = None
        """The version that this server has to begin with, and has not."""
        self._fetched = _Copy(0, b"")
        self._lacks = False
        """Whether pieces of it are still to come; else they are in the lane."""
        self._ask_at: float | None = None
        self._again_s = FETCH_AGAIN_S
        self._serves: NodeId | None = None
        """The buddy, once it is heard under these ledgers: until its link ends, each of its answers comes."""
        copies.begin(context.plan)

    @property
    def _buddy(self) -> NodeId | None:
        """By the plan of the moment: a disk may move to another computer under the same ledgers."""
        return self._context.plan.buddy_of(self._context.node)

    def set_elements(self, elements: int) -> None:
        """Size of the shard: it decides whether copies are kept."""
        config = self._context.config
        self._on = self._buddy is not None and keeps_copies(config, elements)
        if config.checkpoint.buddy == "always" and not self._on:
            size = copy_bytes(config, elements) / 1e9
            why = f"{size:.1f} GB are too much for its memory" if self._buddy else "there is no other server"
            self._context.alerts[_ALERT] = f"no buddy keeps copies of this shard: {why}"

    # ---- what is sent --------------------------------------------------------------------------------------------

    def holds(self, version: int) -> bool:
        """Whether a version that is durable here counts as committed: the buddy has it, or need not."""
        return not self._on or version in self._kept

    def committed(self, version: int) -> None:
        """The shard has made a version durable, or begins with it."""
        self._newest = version
        if self._on and version not in self._kept:
            self._wanted[version] = None
            self._send_next()

    def buddy_ready(self) -> None:
        """It may have started anew: all that anybody may have to go on from is sent again."""
        self._here = self._on
        self._kept.clear()
        self._sending = None
        first = self._context.closed + 1
        self._wanted = dict.fromkeys(range(first, self._newest + 1)) if self._on and self._newest >= 0 else {}
        self._send_next()

    def link_up(self, peer: NodeId, now: float) -> None:
        if peer == self._buddy and self._lacks:
            self._again_s = FETCH_AGAIN_S
            self._ask(now)

    def link_down(self, peer: NodeId, now: float) -> None:
        if peer == self._buddy:
            self._here, self._sending = False, None
        if peer == self._serves:
            self._serves = None
            self._ask_at = now + self._again_s if self._lacks else None

    def _send_next(self) -> None:
        if self._here and self._sending is None and self._wanted:
            self._order(min(self._wanted), 0)

    def _order(self, version: int, piece: int) -> None:
        self._sending = version, piece
        self._out.compute(CopyState(version, piece, PIECE_WORDS, self._out.key()))

    def made(self, job: CopyState, result: tuple[TensorRef, int, bytes] | None) -> None:
        """The lane has made a piece; None: it has that version no longer, so nobody needs its copy."""
        wanted = self._sending == (job.version, job.piece) and self._here and self._buddy is not None
        if result is None:
            if wanted:
                self._go_on_after(job.version)
            return
        ref, self._pieces, digest = result
        if wanted and self._buddy is not None:
            context = self._context
            self._out.send(
                self._buddy,
                ShardCopy(
                    ledger_generation=context.generation, stage=context.stage, shard=context.shard,
                    version=job.version, piece=job.piece, pieces=self._pieces, digest=digest, tensors=(ref,),
                ),
            )  # fmt: skip
        self._out.drop((ref,))

    def _go_on_after(self, version: int) -> None:
        self._sending = None
        self._wanted.pop(version, None)
        self._send_next()

    # ---- messages ------------------------------------------------------------------------------------------------

    def handle(self, peer: NodeId, message: Work) -> None:
        """A kind that the table gives to the buddy; the sender's place is checked."""
        match message:
            case ShardCopy():
                self._on_copy(peer, message)
            case CopyKept():
                self._on_kept(message)
            case FetchCopy():
                self._on_fetch(peer, message)
            case CopyGiven():
                self._on_given(peer, message)

    def _on_copy(self, peer: NodeId, message: ShardCopy) -> None:
        context = self._context
        piece = message.tensors[0] if len(message.tensors) == 1 else None
        right = piece is not None and piece.form == "int32" and piece.byte_count <= 4 * PIECE_WORDS
        few = 0 <= message.piece < message.pieces <= PIECES_MAX
        near = message.version <= context.closed + AHEAD + context.config.batch.delay
        if context.plan.buddy_of(peer) != context.node or not (right and few and near):
            self._out.drop(message.tensors)
            raise RemoteProtocolError("unexpected", "a copy that is not for this server, or no piece of one")
        if message.version <= context.closed:
            self._out.drop(message.tensors)  # the word that the step is closed has overtaken it
        elif not self._copies.take(message):
            return
        self._out.send(
            peer, CopyKept(ledger_generation=context.generation, version=message.version, piece=message.piece)
        )

    def _on_kept(self, message: CopyKept) -> None:
        if self._sending != (message.version, message.piece):
            return
        if message.piece + 1 < self._pieces:
            self._order(message.version, message.piece + 1)
            return
        self._kept = {version: None for version in self._kept if version > message.version - 8}
        self._kept[message.version] = None
        self._go_on_after(message.version)
        self.on_kept(message.version)

    # ---- a shard that is lost ------------------------------------------------------------------------------------

    def fetch(self, version: int, now: float) -> None:
        """This server has nothing of its shard's `version`, with which its ledgers begin."""
        if self._buddy is None:
            raise StateLostError(f"version {version} is not here, and there is no buddy")
        self._fetching, self._fetched, self._lacks = version, _Copy(PIECES_MAX, b""), True
        self._out.log("info", "shard is fetched from its buddy", version=version, buddy=self._buddy)
        self._ask(now)

    def begun(self, peer: NodeId) -> None:
        """A server has begun these ledgers."""
        if peer != self._buddy or peer == self._serves:
            return
        self._serves = peer
        if self._fetching is not None and self._lacks:
            self._ask_at = None
            self._say_fetch(self._fetching, len(self._fetched.refs))

    def _ask(self, now: float) -> None:
        assert self._fetching is not None
        self._ask_at = None if self._serves == self._buddy else now + self._again_s
        self._again_s = min(2 * self._again_s, FETCH_AGAIN_MAX_S)
        self._say_fetch(self._fetching, len(self._fetched.refs))

    def _say_fetch(self, version: int, piece: int) -> None:
        context = self._context
        assert self._buddy is not None
        self._out.send(
            self._buddy,
            FetchCopy(
                ledger_generation=context.generation, stage=context.stage, shard=context.shard, version=version,
                piece=piece,
            ),
        )  # fmt: skip

    def wake_at(self) -> float | None:
        return self._ask_at

    def wake(self, now: float) -> None:
        if self._ask_at is not None and now >= self._ask_at:
            self._ask(now)

    def _on_fetch(self, peer: NodeId, message: FetchCopy) -> None:
        place = message.stage, message.shard, message.version
        if message.piece < 0:
            self._copies.forget(*place)
            return
        found = self._copies.piece(*place, message.piece)
        pieces, digest, tensors = (0, b"", ()) if found is None else (found[0], found[1], (found[2],))
        self._out.send(
            peer,
            CopyGiven(
                ledger_generation=self._context.generation, version=message.version, piece=message.piece,
                pieces=pieces, digest=digest, tensors=tensors,
            ),
        )  # fmt: skip

    def _on_given(self, peer: NodeId, message: CopyGiven) -> None:
        if peer == self._buddy:
            self._serves, self._ask_at = peer, None
        if not self._lacks or message.version != self._fetching or message.piece != len(self._fetched.refs):
            self._out.drop(message.tensors)
            return
        if not message.tensors:
            raise StateLostError(f"version {message.version} is not here, and its buddy does not hold it")
        if message.piece == 0:
            self._fetched.pieces, self._fetched.digest = message.pieces, message.digest
        if (message.pieces, message.digest) != (self._fetched.pieces, self._fetched.digest):
            self._out.drop(message.tensors)
            raise StateLostError(f"its buddy gives version {message.version} in two forms")
        self._fetched.refs.append(message.tensors[0])
        if not self._fetched.whole:
            self._say_fetch(message.version, message.piece + 1)
            return
        refs, self._fetched.refs, self._lacks = tuple(self._fetched.refs), [], False
        plan = self._context.plan
        self._out.compute(StartShard(plan.restore_step, plan.undone, plan.continues, refs, self._fetched.digest))
        self._out.drop(refs)

    def useless(self, reason: str) -> None:
        """What was fetched is not what its digest says: nobody shall go on from it."""
        if self._fetching is not None and self._buddy is not None:
            self._say_fetch(self._fetching, -1)
        raise StateLostError(f"the copy at its buddy cannot be used: {reason}")

    def loaded(self) -> None:
        """The shard has what its ledgers begin with."""
        self._fetching = None

    def end(self) -> None:
        """Other ledgers begin; what is held for others is not touched."""
        self._out.drop(self._fetched.refs)
        self._fetched.refs = []

    # ---- what an operator asks -----------------------------------------------------------------------------------

    def waiting_for(self) -> Wait | None:
        """What this server needs of its buddy, or nothing."""
        oldest = min(self._wanted, default=-1)
        if self._buddy is None or oldest <= self._context.closed + 1:  # the step that made it is closed
            return None
        return Wait(oldest - 1, f"server {self._buddy[:8]} to keep a copy of its update")

    def fetching(self) -> str:
        """What the shard cannot begin without, or nothing; it reads after "waits for"."""
        if self._fetching is None or self._buddy is None:
            return ""
        return f"server {self._buddy[:8]} to give back version {self._fetching} of its part of the model"
