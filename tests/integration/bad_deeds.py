"""What bad peers do, as cases: bytes, handshakes, papers, records and messages that no honest member sends.

`test_bad_peers.py` lets each of them loose on daemons that train.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import trio

from node.compute.layout import StageLayout
from node.compute.plan_parts import chunks_of
from protocol.base.forms import byte_bounds
from protocol.base.ids import TICKET_BYTES, ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.base.limits import MESSAGE_BYTES_MAX, OPEN_BULK_MAX, RECORD_BYTES_MAX
from protocol.link.framing import Frame
from protocol.messages import (
    Activation,
    Commit,
    Contribute,
    DataReady,
    Decision,
    FetchInput,
    Freeze,
    FrozenList,
    InputGradient,
    Message,
    NodeReport,
    Output,
    Ping,
    Ready,
    Refused,
    StageFrozen,
    StepOpened,
    StepReport,
    Stored,
    Verdict,
)
from protocol.trust.handshake import ENTROPY_BYTES, VERSION
from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, Membership, sign_statement
from tests.integration.attacker import PATIENCE_S, Papers, RawLink, join, join_message, tensor
from tests.integration.swarm import Daemon

ACTIVATION = (2, 16, 32)
"""Shape of the run's activations: samples, context, hidden."""
TICKET = Ticket(1, bytes(TICKET_BYTES))
"""Of a lease that nobody was given."""
STEPS_AHEAD = 6
"""The run goes on while an attacker aims at its newest step: it says the same about so many steps."""


@dataclass(frozen=True)
class Target:
    """Whom a case attacks, and what it may use for it."""

    daemon: Daemon
    address: str
    node: NodeId
    volunteer: Papers
    """Of a member that takes no work."""
    spare: Papers
    """Of a server that has no place in the plan."""
    issuer: Identity
    """The coordinator's own key: for papers that only it could have signed."""
    step: int

    async def open(self, papers: Papers | None = None, *, hello: bool = True) -> RawLink:
        return await RawLink.open(self.address, self.node, papers or self.volunteer, hello=hello)


# ---- attacks ------------------------------------------------------------------------------------------------------

Strike = Callable[[Target], Awaitable[RawLink]]


def bytes_at_once(data: bytes) -> Strike:
    """Bytes instead of a handshake."""

    async def strike(target: Target) -> RawLink:
        link = await RawLink.connect(target.address)
        await link.raw(data)
        return link

    return strike


def first_message(**changes: bytes) -> Strike:
    """A first message of the handshake with some parts changed."""

    async def strike(target: Target) -> RawLink:
        parts = {
            "version": bytes((VERSION,)),
            "run": target.volunteer.run_id,
            "ephemeral": os.urandom(ENTROPY_BYTES),
            "cookie": bytes(16),
        }
        message = b"".join({**parts, **changes}.values())
        link = await RawLink.connect(target.address)
        await link.raw(len(message).to_bytes(4, "big") + message)
        return link

    return strike


async def forged_proof(target: Target) -> RawLink:
    """A good first message, then noise instead of the proof of who we are."""
    link = await first_message()(target)
    with trio.fail_after(PATIENCE_S):
        assert await link.stream.receive_some(4096)
    await link.raw((300).to_bytes(4, "big") + os.urandom(300))
    return link


def papers(change: Callable[[Target], Papers]) -> Strike:
    """A right handshake with wrong papers."""

    async def strike(target: Target) -> RawLink:
        return await target.open(change(target))

    return strike


def stranger(target: Target) -> Papers:
    return target.volunteer.but(identity=Identity(os.urandom(32)))


def signed(target: Target, signer: Identity, **changes: object) -> Papers:
    """A membership of a stranger, signed by anybody."""
    who = stranger(target).identity
    facts = {"node": who.node, "role": "volunteer", "run_id": target.volunteer.run_id, "generation": 1, "serial": 9999}
    statement = Membership(**{**facts, "not_after": int(time.time()) + 3600, **changes})  # type: ignore[arg-type]
    return target.volunteer.but(identity=who, credential=sign_statement(statement, signer))


def invite_of(target: Target, **changes: object) -> bytes:
    facts = {"issuer": target.issuer.public_key, "run_id": target.volunteer.run_id, "role": "volunteer", "uses": 1}
    facts |= {"not_after": int(time.time()) + 3600, "nonce": os.urandom(16)}
    return sign_statement(Invite(**{**facts, **changes}), target.issuer)  # type: ignore[arg-type]


async def spent_invite(target: Target) -> RawLink:
    """An invite for one node, used by a second."""
    invite = invite_of(target)
    await join(JoinLink((target.address,), invite), 103)
    link = await target.open(stranger(target).but(credential=invite))
    await link.say(join_message("volunteer"))
    refused = (await link.hear(Refused))[Refused]
    assert isinstance(refused, Refused) and "1 node" in refused.reason
    return link


def frames(*sent: tuple[int, bytes], hello: bool = True) -> Strike:
    """Frames after a right handshake."""

    async def strike(target: Target) -> RawLink:
        link = await target.open(hello=hello)
        if not hello:
            await link.raw(link._header)
        for kind, plain in sent:
            await link.frame(kind, plain)
        return link

    return strike


def noise_as_records(head: bytes) -> Strike:
    """Bytes that no key has sealed."""

    async def strike(target: Target) -> RawLink:
        link = await target.open()
        await link.raw(head + os.urandom(200))
        return link

    return strike


async def shuffled_records(target: Target) -> RawLink:
    """Two right records in the wrong order."""
    link = await target.open()
    records = [link.writer.seal(Frame.MESSAGE, msgspec.msgpack.encode(Ping(number=n))) for n in range(2)]
    await link.raw(records[1] + records[0])
    return link


def says(message: Callable[[Target, int], Message], buffers: tuple[bytes, ...] = (), spare: bool = False) -> Strike:
    """A message that no honest member says, about each step that may be open right now."""

    async def strike(target: Target) -> RawLink:
        link = await target.open(target.spare if spare else None)
        for step in range(target.step + 1, target.step + 1 + STEPS_AHEAD):
            await link.say(message(target, step), buffers)
        return link

    return strike


def says_encoded(data: bytes) -> Strike:
    return frames((Frame.MESSAGE, data))


def output(ref: TensorRef, **task: int) -> Callable[[Target, int], Message]:
    return lambda target, step: Output(
        ledger_generation=target.volunteer.generation, task=forward(step, **task), ticket=TICKET, tensors=(ref,)
    )


def input_gradient(ref: TensorRef, **task: int) -> Callable[[Target, int], Message]:
    return lambda target, step: InputGradient(
        ledger_generation=target.volunteer.generation,
        task=TaskId(step, task.get("microbatch", 0), task.get("position", 1), "B"),
        ticket=TICKET,
        tensors=(ref,),
    )


def forward(step: int, microbatch: int = 0, position: int = 0, segment: int = 0) -> TaskId:
    return TaskId(step, microbatch, position, "F", segment)


def contribute(ref: TensorRef, **changes: object) -> Callable[[Target, int], Message]:
    def message(target: Target, step: int) -> Message:
        honest = Contribute(
            ledger_generation=target.volunteer.generation,
            contribution=ContributionId(target.volunteer.identity.node, 1, step),
            step=step,
            version=max(0, step - 1),
            tasks=(TaskId(step, 0, 0, "B"),),
            losses=(),
            tickets=(TICKET,),
            shard=1,
            tensors=(ref,),
        )
        return msgspec.structs.replace(honest, **changes)

    return message


def ready(slots: int) -> Callable[[Target, int], Message]:
    return lambda target, step: Ready(ledger_generation=target.volunteer.generation, hello=False, slots=slots)


def whole_part(target: Target) -> TensorRef:
    """What an honest contribution to shard 1 of stage 0 holds."""
    assert target.volunteer.welcome is not None and target.volunteer.plan is not None
    stage = target.volunteer.plan.stages[0]
    welcome = target.volunteer.welcome
    layout = StageLayout(welcome.config, welcome.vocabulary, *chunks_of(target.volunteer.plan, 0)[0])
    begin, end = layout.shard_range(1, len(stage.servers))
    return tensor((end - begin,), welcome.config.wire.gradients)


def with_whole_part(**changes: object) -> Strike:
    """A contribution of the right size that is wrong in another way."""

    async def strike(target: Target) -> RawLink:
        part = whole_part(target)
        return await says(contribute(part, **changes), (bytes(part.byte_count),))(target)

    return strike


def in_anothers_name(target: Target, step: int) -> Message:
    other = ContributionId(target.spare.identity.node, 1, step)
    return contribute(tensor((4,), "fp64"), contribution=other)(target, step)


@dataclass(frozen=True)
class Case:
    """One bad deed, at whom, and the word it is refused with."""

    name: str
    reason: str
    places: tuple[str, ...]
    strike: Strike


EVERYBODY = ("coordinator", "front 0")
BACK = ("back 0",)
FRONT = ("front 1",)
GOOD = tensor(ACTIVATION)
ZEROS = bytes(GOOD.byte_count)
SMALL = TensorRef(0, ACTIVATION, "q8", byte_bounds(ACTIVATION, "q8")[0])
"""Of zeros it decodes to nothing."""
PART = tensor((4,), "fp64")
G = "ledger_generation"

PLAIN_FORMS = """
[wire]
activations_up = "fp32"
activations_down = "fp32"
gradients = "fp64"
"""
"""Tensors that an attacker can write by hand, so that something else must be what is wrong."""
CASES = (
    # The handshake.
    Case("random bytes", "size", EVERYBODY, bytes_at_once(b"\xf7" + os.urandom(4096))),
    Case("a web browser", "decode", EVERYBODY, bytes_at_once(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
    Case("an empty first message", "version", EVERYBODY, bytes_at_once(bytes(4))),
    Case("a short first message", "size", EVERYBODY, first_message(cookie=b"")),
    Case("another protocol version", "version", EVERYBODY, first_message(version=bytes((VERSION + 1,)))),
    Case("another run", "run", EVERYBODY, first_message(run=bytes(16))),
    Case("a low-order key", "signature", EVERYBODY, first_message(ephemeral=bytes(32))),
    Case("bytes behind the first message", "size", EVERYBODY, first_message(cookie=bytes(16 + 9))),
    Case("a forged proof", "signature", EVERYBODY, forged_proof),
    Case("no papers", "credential", EVERYBODY, papers(lambda t: stranger(t).but(credential=b""))),
    Case("somebody else's membership", "identity", EVERYBODY, papers(stranger)),
    Case("self-signed papers", "signature", EVERYBODY, papers(lambda t: signed(t, Identity(bytes(32))))),
    Case("papers of another run", "run", EVERYBODY, papers(lambda t: signed(t, t.issuer, run_id=bytes(16)))),
    Case("expired papers", "credential", EVERYBODY, papers(lambda t: signed(t, t.issuer, not_after=1))),
    Case("an invite at a server", "credential", FRONT, papers(lambda t: t.volunteer.but(credential=invite_of(t)))),
    Case("an expired invite", "credential", ("coordinator",),
         papers(lambda t: stranger(t).but(credential=invite_of(t, not_after=1)))),
    Case("a spent invite", "credential", ("coordinator",), spent_invite),
    # Records and frames.
    Case("unsealed records", "signature", EVERYBODY, noise_as_records(bytes((2, 0, 0, 200)))),
    Case("an oversize record", "size", EVERYBODY, noise_as_records(b"\2\xff\xff\xff")),
    Case("shuffled records", "signature", EVERYBODY, shuffled_records),
    Case("no HELLO", "decode", EVERYBODY, frames((Frame.MESSAGE, b"\xc0"), hello=False)),
    Case("two HELLOs", "decode", EVERYBODY, frames((Frame.HELLO, bytes(10)))),
    Case("an unknown frame", "decode", EVERYBODY, frames((77, b""))),
    Case("an oversize message", "size", EVERYBODY,
         frames(*[(Frame.PART, bytes(RECORD_BYTES_MAX))] * (MESSAGE_BYTES_MAX // RECORD_BYTES_MAX + 1))),
    Case("a part that is not full", "size", EVERYBODY, frames((Frame.PART, b"x"))),
    Case("a chunk of nothing", "decode", EVERYBODY, frames((Frame.CHUNK, bytes(20)))),
    Case("credit for nothing", "size", EVERYBODY, frames((Frame.CREDIT, (9).to_bytes(8, "big")))),
    # Messages.
    Case("no msgpack", "decode", EVERYBODY, says_encoded(b"\xc1\xc1\xc1")),
    Case("an unknown message", "decode", EVERYBODY, says_encoded(msgspec.msgpack.encode({"type": "Surprise"}))),
    Case("a field too many", "decode", EVERYBODY,
         says_encoded(msgspec.msgpack.encode({"type": "Ping", "number": 1, "extra": 1}))),
    Case("a nested bomb", "decode", EVERYBODY, says_encoded(b"\x91" * 60_000)),
    Case("a list announced huge", "decode", EVERYBODY, says_encoded(b"\xdd\xff\xff\xff\xff")),
    Case("a longer form of a number", "decode", EVERYBODY,
         says_encoded(b"\x82\xa4type\xa4Ping\xa6number\xd3" + bytes(8))),
    Case("a report before Join", "unexpected", ("coordinator",),
         says(lambda t, s: NodeReport(state="idle", waiting_for="", counters={}))),
    Case("a server's message from a volunteer", "role", ("coordinator",),
         says(lambda t, s: DataReady(vocabulary=1, data_hash="", token_count=1))),
    Case("a decision from a volunteer", "role", FRONT,
         says(lambda t, s: Decision(ledger_generation=t.volunteer.generation, step=s, clip_factor=0.0, skipped=True))),
    Case("a wish to be a server", "unexpected", ("coordinator",), says(lambda t, s: join_message("server"))),
    Case("a counter of nobody", "decode", ("coordinator",),
         says(lambda t, s: NodeReport(state="idle", waiting_for="", counters={"x": 1.0}))),
    Case("an endless speed", "not_finite", ("coordinator",),
         says(lambda t, s: join_message("volunteer", tokens_per_s=math.inf))),
    # A server without a place in the plan may speak as a server, but not for those that have one.
    Case("a step report from a spare", "unexpected", ("coordinator",), says(
        lambda t, s: StepReport(ledger_generation=t.spare.generation, step=s, loss=0.0, tokens=1, gradient_norm=0.0,
                                clip_factor=1.0, skipped=False, learning_rate=0.0, duration_s=0.0), spare=True)),
    Case("a decision from a spare", "role", FRONT, says(
        lambda t, s: Decision(ledger_generation=t.spare.generation, step=s, clip_factor=0.0, skipped=True),
        spare=True)),
    Case("a freeze from a spare", "role", BACK, says(
        lambda t, s: Freeze(ledger_generation=t.spare.generation, step=s, contributions=(
            ContributionId(t.spare.identity.node, 1, 1),)), spare=True)),
    Case("a list of another shard from a spare", "role", BACK, says(
        lambda t, s: FrozenList(ledger_generation=t.spare.generation, step=s, shard=0, digest=bytes(32)), spare=True)),
    Case("a commit from a spare", "role", BACK, says(
        lambda t, s: Commit(ledger_generation=t.spare.generation, step=s, contributions=(), clip_factor=0.0,
                            skipped=True), spare=True)),
    Case("a frozen stage from a spare", "role", ("front 0",), says(
        lambda t, s: StageFrozen(ledger_generation=t.spare.generation, stage=7, step=s, square_norm=0.0, finite=True,
                                 loss_sum=0.0), spare=True)),
    Case("a stored part from a spare", "role", FRONT, says(
        lambda t, s: Stored(ledger_generation=t.spare.generation, contribution=ContributionId(t.spare.identity.node, 1,
                            1), step=s, version=s, tasks=(TaskId(s, 0, 1, "B"),), losses=(), shard=0), spare=True)),
    Case("a verdict from a spare", "role", BACK, says(
        lambda t, s: Verdict(ledger_generation=t.spare.generation, contribution=ContributionId(t.spare.identity.node, 1,
                             1), step=s, tasks=(), accepted=True, number=0, reason=""), spare=True)),
    Case("a new step from a spare", "role", FRONT, says(
        lambda t, s: StepOpened(ledger_generation=t.spare.generation, step=s, closed=s - 1), spare=True)),
    Case("an activation from a spare", "role", FRONT, says(
        lambda t, s: Activation(ledger_generation=t.spare.generation, task=forward(s, position=1), tensors=(GOOD,)),
        (ZEROS,), spare=True)),
    Case("an output from a spare", "role", BACK, says(output(GOOD), (ZEROS,), spare=True)),
    # Work.
    Case("an old generation", "version", BACK, says(lambda t, s: Ready(ledger_generation=0, hello=True, slots=1))),
    Case("an activation of another shape", "shape", BACK, says(output(tensor((1, 2))), (bytes(8),))),
    Case("an activation transposed", "shape", BACK, says(output(tensor(ACTIVATION[::-1])), (ZEROS,))),
    Case("an activation of another dtype", "shape", BACK,
         says(output(tensor(ACTIVATION, "bf16")), (bytes(GOOD.byte_count // 2),))),
    Case("a gradient of another shape", "shape", FRONT, says(input_gradient(tensor((4,))), (bytes(16),))),
    Case("bytes that do not fit the shape", "shape", BACK,
         says(output(tensor(ACTIVATION, byte_count=GOOD.byte_count + 4)), (ZEROS + bytes(4),))),
    Case("a tensor of no bytes", "shape", BACK, says(output(tensor((0, 4))), (b"x",))),
    Case("a tensor larger than any", "size", BACK, says(output(tensor((2**33,))), (b"x",))),
    Case("a tensor whose size overflows", "shape", BACK, says(output(tensor((2**62, 2**62), byte_count=0)), (b"x",))),
    Case("too many tensors at once", "size", BACK, frames(*[
        (Frame.BULK, number.to_bytes(4, "big") + msgspec.msgpack.encode(
            Output(ledger_generation=1, task=forward(1), ticket=TICKET, tensors=(GOOD,))))
        for number in range(OPEN_BULK_MAX + 1)])),
    Case("an overflow without a lease", "signature", BACK,
         says(output(GOOD), (b"\xff" * GOOD.byte_count,))),
    Case("a small form that nobody can decode", "decode", BACK, says(output(SMALL), (bytes(SMALL.byte_count),))),
    Case("a contribution in another's name", "signature", BACK, says(in_anothers_name, (bytes(32),))),
    Case("a contribution without a lease", "signature", BACK, with_whole_part()),
    Case("a contribution with too few tickets", "decode", BACK, with_whole_part(tickets=())),
    Case("a contribution without tasks", "decode", BACK, with_whole_part(tasks=())),
    Case("an output without a lease", "signature", BACK, says(output(GOOD), (ZEROS,))),
    Case("an input gradient without a lease", "signature", FRONT, says(input_gradient(GOOD), (ZEROS,))),
    Case("more slots than anybody has", "decode", BACK, says(ready(64))),
    Case("slots below nothing", "decode", BACK, says(ready(-1))),
    Case("a huge microbatch", "decode", BACK, says(output(GOOD, microbatch=2**31), (ZEROS,))),
    Case("a huge position", "decode", BACK, says(output(GOOD, position=2**31), (ZEROS,))),
    Case("a segment that is not cut", "decode", BACK, says(output(GOOD, segment=1), (ZEROS,))),
    Case("a step after the last", "decode", BACK, says(
        lambda t, s: msgspec.structs.replace(output(GOOD)(t, s), task=forward(10**7)),
        (ZEROS,))),
    Case("a task of another stage", "role", BACK, says(output(GOOD, position=1), (ZEROS,))),
    Case("an input of another stage", "role", FRONT,
         says(lambda t, s: FetchInput(ledger_generation=t.volunteer.generation, task=forward(s), ticket=TICKET))),
    Case("graphs of nothing", "decode", BACK, says(
        lambda t, s: Ready(ledger_generation=t.volunteer.generation, hello=False, slots=0,
                           graphs=(forward(s, microbatch=2**31),)))),
    Case("graphs of another stage", "role", BACK, says(
        lambda t, s: Ready(ledger_generation=t.volunteer.generation, hello=False, slots=0,
                           graphs=(forward(s, position=1),)))),
)  # fmt: skip
