"""A link that changes its path: whatever is lost on the way, each message arrives once, whole and in its order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TaskId, TensorRef
from protocol.base.limits import KEPT_BYTES_MAX, QUESTIONS_BURST, RECORD_BYTES_MAX
from protocol.link.frames import Frame, Hello, OutFrame
from protocol.link.framing import Event, Framing, FramingLimits, MessageArrived, PeerClosed
from protocol.link.paths import Path, take_hello
from protocol.messages import Activation, Message, Ping
from protocol.trust.handshake import Session
from tests.protocol.samples import ALICE, BOB

MIB = 1 << 20
LIMITS = FramingLimits(2 * MIB, 4 * MIB)


def sessions(number: int) -> tuple[Session, Session]:
    """What the handshake of the path with this number would give its two ends."""
    one, two = bytes([1, number]) * 16, bytes([2, number]) * 16
    return (
        Session(b"", BOB.node, BOB.public_key, b"", "server", one, two),
        Session(b"", ALICE.node, ALICE.public_key, b"", "server", two, one),
    )


def activation(size: int, number: int) -> Activation:
    tensors = (TensorRef(0, (size // 4,), "fp32", size),)
    return Activation(ledger_generation=1, task=TaskId(1, number, 0, "F"), tensors=tensors)


def content(size: int, number: int) -> bytes:
    return random.Random(number).randbytes(size)


@dataclass
class End:
    """One end of a link, and the bytes that are on their way to it."""

    framing: Framing
    coming: bytearray = field(default_factory=bytearray)
    got: list[MessageArrived] = field(default_factory=list)

    def take(self, byte_count: int) -> None:
        data, self.coming = bytes(self.coming[:byte_count]), self.coming[byte_count:]
        self.keep(self.framing.receive(data))

    def keep(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, MessageArrived):
                self.got.append(event)
                self.framing.release(event.byte_count)


class Pair:
    """Two ends, their present path, and what moves them to the next one."""

    def __init__(self) -> None:
        self.moves = 0
        here, there = sessions(0)
        self.ends = (
            End(Framing(here, role="server", header=b"\x33" * 24, token=b"a" * 16, limits=LIMITS)),
            End(Framing(there, role="server", header=b"\x44" * 24, token=b"b" * 16, limits=LIMITS)),
        )

    def write(self, side: int, budget: int) -> bool:
        data = b"".join(self.ends[side].framing.data_to_send(budget))
        self.ends[1 - side].coming += data
        return bool(data)

    def move(self, initiator: int, meanwhile: list[int]) -> None:
        """To a new path: what is on its way on the old one arrives up to some byte, before or after each step."""
        self.moves += 1
        one, two = self.ends[initiator], self.ends[1 - initiator]
        ours, theirs = sessions(self.moves)
        path, other = Path(ours, b"\x33" * 24), Path(theirs, b"\x44" * 24)
        one.framing.hold_acknowledgements(True)
        offer = one.framing.hello(resume=b"r" * 16, epoch=self.moves - 1, attempt=1, token=b"c" * 16)
        said = path.hello(offer)
        one.take(meanwhile[0])
        two.take(meanwhile[1])
        for side in (0, 1):
            self.write(side, meanwhile[2])
        one.take(meanwhile[3])
        two.take(meanwhile[4])
        (kind, plain), *rest = other.feed(said)
        assert not rest
        hello = take_hello(kind, plain)
        reply = two.framing.hello(resume=b"r" * 16, epoch=self.moves, attempt=1)
        two.framing.move(other, hello, reply.received, say=reply)
        two.coming.clear()
        answer = b"".join(two.framing.data_to_send(1 + meanwhile[2]))
        one.take(meanwhile[5])
        frames = path.feed(answer)
        first = take_hello(*next(frames))
        one.framing.move(path, first, offer.received)
        one.framing.hold_acknowledgements(False)
        one.coming.clear()
        one.keep(list(one.framing.take(frames)))

    def settle(self) -> None:
        while self.write(0, MIB) | self.write(1, MIB) or any(end.coming for end in self.ends):
            for end in self.ends:
                end.take(len(end.coming))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_moves_lose_and_double_nothing(data: st.DataObject) -> None:
    """Traffic both ways, cut at any byte by moves that either side begins: exactly once, control in its order."""
    pair = Pair()
    sent: tuple[list[Message], list[Message]] = ([], [])
    amount = st.sampled_from((0, 1, 30, 1000, 70_000, 300_000))
    pair.settle()
    for number in range(data.draw(st.integers(1, 25))):
        for side in (0, 1):
            size = data.draw(st.sampled_from((None, None, 0, 4, 65_532, 65_536, 200_000)))
            if size is not None:
                message: Message = activation(size, number) if size else Ping(number=number)
                pair.ends[side].framing.send(message, [content(size, number)] if size else ())
                sent[side].append(message)
        action = data.draw(st.sampled_from(("write", "take", "ping", "move", "move")))
        side = data.draw(st.integers(0, 1))
        if action == "write":
            pair.write(side, data.draw(amount))
        elif action == "take":
            pair.ends[side].take(data.draw(amount))
        elif action == "ping":
            pair.ends[side].framing.ping(number)
        else:
            pair.move(side, [data.draw(amount) for _ in range(6)])
    pair.settle()
    for end, expected in ((pair.ends[1], sent[0]), (pair.ends[0], sent[1])):
        got = [event.message for event in end.got]
        assert sorted(map(repr, got)) == sorted(map(repr, expected))
        assert [m for m in got if isinstance(m, Ping)] == [m for m in expected if isinstance(m, Ping)]
        for event in end.got:
            if isinstance(event.message, Activation):
                (buffer,) = event.buffers
                assert buffer == content(len(buffer), event.message.task.microbatch)
    assert not any(end.framing.queued_bytes for end in pair.ends)


def test_a_half_sent_tensor_goes_on_in_its_middle() -> None:
    """After a move only what had not arrived is sent again: far less than the whole."""
    pair = Pair()
    pair.settle()
    pair.ends[0].framing.send(activation(2 * MIB, 1), [content(2 * MIB, 1)])
    for _ in range(30):
        pair.write(0, 1)
    pair.ends[1].take(len(pair.ends[1].coming))
    pair.move(0, [0] * 6)
    pair.write(0, 10 * MIB)
    assert len(pair.ends[1].coming) < 6 * RECORD_BYTES_MAX
    pair.settle()
    assert [event.message for event in pair.ends[1].got] == [activation(2 * MIB, 1)]


def test_what_is_acknowledged_is_forgotten() -> None:
    """A busy link keeps what is on its way and no more; an idle one forgets with the next question."""
    pair = Pair()
    pair.settle()
    one, two = pair.ends
    for number in range(40):
        one.framing.send(activation(MIB, number), [bytes(MIB)])
        pair.settle()
    assert one.framing._kept_bytes < MIB
    two.framing.ping(1)
    pair.settle()
    assert not one.framing._kept


def test_a_peer_that_confirms_nothing_stops_the_sender_and_is_seen() -> None:
    """What we keep for it has a bound, and the driver is told, so that it can cut the link off."""
    here, _ = sessions(0)
    sender = Framing(here, role="server", header=bytes(24), token=b"a" * 16, limits=FramingLimits(MIB, 1 << 30))
    sender.greet(Hello(1, 1 << 40, b"b" * 16))
    data = bytes(MIB)
    for number in range(200):
        sender.send(activation(MIB, number), [data])
    while sender.data_to_send(MIB):
        pass
    assert KEPT_BYTES_MAX <= sender._kept_bytes <= KEPT_BYTES_MAX + RECORD_BYTES_MAX
    assert sender.progress.withholding and sender.queued_bytes > 100 * MIB


@pytest.mark.parametrize("received", [1, 2**63, 2**64 - 1])
def test_a_peer_that_claims_to_have_what_was_not_sent(received: int) -> None:
    """It is refused, and the link has not moved."""
    pair = Pair()
    pair.settle()
    ours, _ = sessions(9)
    before = pair.ends[0].framing._path
    with pytest.raises(RemoteProtocolError, match="size"):
        pair.ends[0].framing.move(Path(ours, bytes(24)), Hello(1, 1, b"t" * 16, b"r" * 16, 0, 1, received), 0)
    assert pair.ends[0].framing._path is before


@pytest.mark.parametrize(
    ("kind", "plain", "reason"),
    [
        (Frame.ACK, (1).to_bytes(8, "big"), "size"),
        (Frame.ACK, b"\xff" * 8, "size"),
        (Frame.ACK, b"", "size"),
        (Frame.PING, bytes(9), "size"),
        (Frame.PONG, b"", "size"),
        (Frame.PONG, bytes(8), "unexpected"),
        (Frame.ACK, bytes(8), "unexpected"),
        (Frame.HELLO, Hello(1, 1, b"t" * 16).encode(), "decode"),
    ],
)
def test_false_frames_of_the_path(kind: Frame, plain: bytes, reason: str) -> None:
    """Confirmations of what was not sent, wrong lengths and a second HELLO end the link with a named reason."""
    pair = Pair()
    pair.settle()
    forged = pair.ends[1].framing._path.seal(OutFrame(kind, plain))
    with pytest.raises(RemoteProtocolError, match=reason):
        pair.ends[0].framing.receive(forged)


def test_an_older_peer_gets_no_new_frames() -> None:
    """To a HELLO of 10 bytes nothing is kept, nothing acknowledged, and it may not ask."""
    here, there = sessions(0)
    ours = Framing(here, role="server", header=bytes(24), token=b"a" * 16)
    theirs = Framing(there, role="server", header=bytes(24))
    theirs.receive(b"".join(ours.data_to_send(MIB)))
    ours.receive(b"".join(theirs.data_to_send(MIB)))
    for number in range(200):
        theirs.send(Ping(number=number))
        ours.send(Ping(number=number))
    assert len(ours.receive(b"".join(theirs.data_to_send(MIB)))) == 200
    assert len(theirs.receive(b"".join(ours.data_to_send(MIB)))) == 200
    assert not ours.resumable and not theirs.resumable and not ours._kept and not ours.data_to_send(MIB)
    with pytest.raises(RemoteProtocolError, match="decode"):
        ours.receive(theirs._path.seal(OutFrame(Frame.PING, bytes(8))))


def test_many_questions_get_few_answers() -> None:
    """A peer that only asks does not make us collect answers without end."""
    pair = Pair()
    pair.settle()
    for number in range(1000):
        pair.ends[0].framing.ping(number)
    pair.write(0, 10 * MIB)
    pair.ends[1].take(len(pair.ends[1].coming))
    assert len(pair.ends[1].framing._urgent) < 100


def test_small_frames_without_end_are_a_fault() -> None:
    """Each costs the loop as much as a small message does and brings nothing: a thousand answers to one question,
    acknowledgements that do not rise, questions beyond what a peer may ask."""
    for kind, fine in ((Frame.PONG, 1), (Frame.ACK, 1), (Frame.PING, int(QUESTIONS_BURST))):
        pair = Pair()
        pair.settle()
        victim = pair.ends[0].framing
        victim.send(Ping(number=1))
        victim.ping(7)
        pair.write(0, MIB)
        frames = [pair.ends[1].framing._path.seal(OutFrame(kind, (1).to_bytes(8, "big"))) for _ in range(2000)]
        victim.receive(b"".join(frames[:fine]))
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            victim.receive(b"".join(frames[fine:]))


def test_a_peer_may_ask_again_with_time() -> None:
    """Who has asked all that it may, and then asks once a second as peers do, is answered for good."""
    pair = Pair()
    pair.settle()
    asking, asked = (end.framing for end in pair.ends)
    for number in range(int(QUESTIONS_BURST) + 500):
        asked.tell_time(max(0.0, number - QUESTIONS_BURST + 1.0))
        asking.ping(number)
        pair.settle()


def test_after_the_final_record_nothing_is_answered() -> None:
    """The peer may still ask and send before it has read our end; it gets no answer, and neither side fails."""
    pair = Pair()
    pair.settle()
    one, two = pair.ends
    one.framing.close()
    end = b"".join(one.framing.data_to_send(MIB))
    assert one.framing.close_sent
    two.framing.ping(1)
    for number in range(200):
        two.framing.send(Ping(number=number))
    one.framing.receive(b"".join(two.framing.data_to_send(10 * MIB)))
    one.framing.ping(2)
    assert one.framing.data_to_send(MIB) == []
    assert any(isinstance(event, PeerClosed) for event in two.framing.receive(end))
