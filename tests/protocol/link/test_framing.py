"""Frames: whole delivery, control before bulk, fair turns, windows, and every way in which a peer may misbehave."""

from __future__ import annotations

import mmap
import random
import tracemalloc
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.ids import ContributionId, TaskId, TensorRef
from protocol.base.limits import CONTRIBUTIONS_MAX, MESSAGE_BYTES_MAX, OPEN_BULK_MAX, RECORD_BYTES_MAX, REJECT_REASONS
from protocol.kinds import MAY_SEND
from protocol.link.codec import PROTOCOL_MINOR, encode
from protocol.link.framing import Event, Frame, Framing, FramingLimits, MessageArrived, PeerClosed, PeerReady
from protocol.messages import Activation, Freeze, Message, Parameters, Ping, Ready
from protocol.trust.records import RecordWriter
from tests.protocol.samples import ALICE, allowed_pair, buffers_for, framing_pair, samples

_MIB = 1 << 20


def _activation(byte_count: int, microbatch: int = 1) -> Activation:
    tensors = (TensorRef(0, (byte_count // 4,), "fp32", byte_count),)
    return Activation(ledger_generation=1, task=TaskId(1, microbatch, 0, "F"), tensors=tensors)


def _run(*ends: Framing, budget: int = 1 << 20) -> list[tuple[int, Event]]:
    """Let two ends talk until neither has anything to send; (receiving end, event) in order."""
    events: list[tuple[int, Event]] = []
    while True:
        pieces = [end.data_to_send(budget) for end in ends]
        if not any(pieces):
            return events
        for number, end in enumerate(ends):
            events += [(number, event) for event in end.receive(b"".join(pieces[1 - number]))]


def _messages(events: Iterable[tuple[int, Event]]) -> list[Message]:
    return [event.message for _, event in events if isinstance(event, MessageArrived)]


class _Forger:
    """A peer that seals whatever frames it likes under the right key, after an honest HELLO."""

    def __init__(self, hello: bytes | None = b"\0\0" + (1 << 30).to_bytes(8, "big"), **options: Any) -> None:
        _, self.victim = framing_pair(**options)
        self.victim_says = self.victim.data_to_send(1 << 20)
        self.writer = RecordWriter(b"\x11" * 32, b"\x33" * 24)
        self.victim.receive(self.writer.header)
        if hello is not None:
            self.say(Frame.HELLO, hello)

    def say(self, kind: int, plain: bytes, *, final: bool = False) -> list[Event]:
        return self.victim.receive(self.writer.seal(kind, plain, final=final))

    def refused(self, kind: int, plain: bytes, *, final: bool = False) -> str:
        with pytest.raises(RemoteProtocolError) as caught:
            self.say(kind, plain, final=final)
        assert caught.value.reason in REJECT_REASONS
        return caught.value.reason


def _bulk(number: int, message: Message) -> bytes:
    return number.to_bytes(4, "big") + encode(message)


@pytest.mark.parametrize("message", samples(), ids=lambda message: type(message).__name__)
def test_every_kind_arrives_with_its_tensors(message: Message) -> None:
    """Each kind arrives once, equal, with the bytes of its tensors, and announces how many to give back."""
    sender, receiver = framing_pair(*allowed_pair(type(message)))
    buffers = buffers_for(message)
    sender.send(message, buffers)
    events = _run(sender, receiver)
    assert [event.hello.minor for _, event in events if isinstance(event, PeerReady)] == [PROTOCOL_MINOR] * 2
    (arrived,) = [event for _, event in events if isinstance(event, MessageArrived)]
    assert arrived.message == message and [bytes(buffer) for buffer in arrived.buffers] == buffers
    assert arrived.byte_count == sum(map(len, buffers))
    assert sender.queued_bytes == 0


@settings(max_examples=40)
@given(st.data())
def test_any_traffic_arrives_whole(data: st.DataObject) -> None:
    """Whatever is sent, in whatever pieces it is read, each message arrives once and control stays in order."""
    sizes = data.draw(st.lists(st.sampled_from((0, 4, 65_528, 65_532, 65_536, 200_000)), max_size=10))
    sender, receiver = framing_pair(limits=FramingLimits(_MIB, _MIB))
    sent = []
    for number, size in enumerate(sizes):
        message: Message = _activation(size, number) if size else Ping(number=number)
        sender.send(message, [random.Random(number).randbytes(size)] if size else ())
        sent.append(message)
    got: list[MessageArrived] = []
    while any(pieces := (sender.data_to_send(data.draw(st.integers(1, 200_000))), receiver.data_to_send(1 << 20))):
        stream, cut = b"".join(pieces[0]), data.draw(st.sampled_from((100, 1000, 65_000, 65_557, 1 << 20)))
        for start in range(0, len(stream), cut):
            for event in receiver.receive(stream[start : start + cut]):
                if isinstance(event, MessageArrived):
                    got.append(event)
                    receiver.release(event.byte_count)
        sender.receive(b"".join(pieces[1]))
    assert sorted(map(repr, sent)) == sorted(repr(event.message) for event in got)
    control = [event.message for event in got if isinstance(event.message, Ping)]
    assert control == [message for message in sent if isinstance(message, Ping)]
    for event in got:
        if isinstance(event.message, Activation):
            (buffer,) = event.buffers
            assert buffer == random.Random(event.message.task.microbatch).randbytes(len(buffer))


def test_control_overtakes_bulk() -> None:
    """A control message that is sent while 8 MiB wait leaves with the very next record."""
    sender, receiver = framing_pair()
    _run(sender, receiver)
    sender.send(_activation(8 * _MIB), [bytes(8 * _MIB)])
    for _ in range(5):
        receiver.receive(b"".join(sender.data_to_send(1)))
    sender.send(Ping(number=5))
    (event,) = receiver.receive(b"".join(sender.data_to_send(1)))
    assert isinstance(event, MessageArrived) and event.message == Ping(number=5)
    assert len(_messages(_run(sender, receiver))) == 1


def test_activations_go_in_their_order_and_whole_shards_take_turns_with_them() -> None:
    """A tensor sent behind a whole shard arrives first; of activations the oldest one does, however large it is; no
    more than OPEN_BULK_MAX are under way at once."""
    sender, receiver = framing_pair()
    _run(sender, receiver)
    shard = TensorRef(0, (_MIB,), "fp32", 4 * _MIB)
    sender.send(Parameters(ledger_generation=1, version=0, shard=0, base=-1, tensors=(shard,)), [bytes(4 * _MIB)])
    sender.send(_activation(400_000, 0), [bytes(400_000)])
    for number in range(1, 2 * OPEN_BULK_MAX):
        sender.send(_activation(100_000, number), [bytes(100_000)])
    messages = _messages(_run(sender, receiver))
    order = [message.task.microbatch if isinstance(message, Activation) else "shard" for message in messages]
    assert order == [*range(2 * OPEN_BULK_MAX), "shard"]


def test_activations_share_the_line_evenly_with_a_whole_shard() -> None:
    """Neither waits for the other's end: 1.25 MiB of a shard are through when as much of activations is: two of three,
    half a mebibyte each."""
    sender, receiver = framing_pair()
    _run(sender, receiver)
    for number in range(3):
        sender.send(_activation(_MIB // 2, number), [bytes(_MIB // 2)])
    shard = TensorRef(0, (5 * _MIB // 16,), "fp32", 5 * _MIB // 4)
    sender.send(Parameters(ledger_generation=1, version=0, shard=0, base=-1, tensors=(shard,)), [bytes(5 * _MIB // 4)])
    kinds = [type(message).__name__ for message in _messages(_run(sender, receiver))]
    assert kinds == ["Activation", "Activation", "Parameters", "Activation"]


def test_windows_hold_the_sender_back() -> None:
    """No more tensor bytes are under way or undigested than the receiver's window; releases let the rest come."""
    limits = FramingLimits(_MIB, 3 * _MIB)
    sender, receiver = framing_pair(limits=limits)
    for number in range(7):
        sender.send(_activation(_MIB, number), [bytes(_MIB)])
    seen = []
    for expected in (3, 3, 1):
        arrived = [event for _, event in _run(sender, receiver) if isinstance(event, MessageArrived)]
        assert len(arrived) == expected
        assert not any(sender.data_to_send(1 << 20))
        for event in arrived:
            receiver.release(event.byte_count)
        seen += arrived
    assert len(seen) == 7


def test_control_passes_a_full_window() -> None:
    """A receiver that digests nothing still hears control messages."""
    sender, receiver = framing_pair(limits=FramingLimits(_MIB, _MIB))
    sender.send(_activation(_MIB), [bytes(_MIB)])
    sender.send(_activation(_MIB), [bytes(_MIB)])
    _run(sender, receiver)
    sender.send(Ping(number=1))
    assert _messages(_run(sender, receiver)) == [Ping(number=1)]


def test_long_messages_travel_in_parts() -> None:
    """A freeze list of the greatest length is one message, though no record is longer than the bound."""
    sender, receiver = framing_pair()
    contributions = tuple(ContributionId(ALICE.node, 2**62, number) for number in range(CONTRIBUTIONS_MAX))
    message = Freeze(ledger_generation=1, step=1, contributions=contributions)
    sender.send(message)
    sender.send(Ping(number=2))
    pieces = sender.data_to_send(1 << 24)
    assert max(map(len, pieces)) <= RECORD_BYTES_MAX + 100
    assert _messages((0, event) for event in receiver.receive(b"".join(pieces))) == [message, Ping(number=2)]


def test_clean_end() -> None:
    """Control that waits is sent before the end, tensors are given up, and both sides see a clean close."""
    sender, receiver = framing_pair()
    _run(sender, receiver)
    sender.send(_activation(4 * _MIB), [bytes(4 * _MIB)])
    receiver.receive(b"".join(sender.data_to_send(1 << 17)))
    sender.send(Ping(number=3))
    sender.close()
    sender.send(Ping(number=4))
    events = receiver.receive(b"".join(sender.data_to_send(1 << 24)))
    assert [type(event) for event in events] == [MessageArrived, PeerClosed]
    assert sender.close_sent and sender.queued_bytes == 0 and not sender.data_to_send(1 << 20)


def test_counting() -> None:
    """Both sides count the same payload by kind."""
    counts: list[tuple[str, str, int, int]] = []
    sender, receiver = framing_pair(count=lambda *facts: counts.append(facts))
    sender.send(_activation(1000), [bytes(1000)])
    sender.send(Ping(number=1))
    _run(sender, receiver)
    assert len(counts) == 4
    for kind in ("activation", "control"):
        (sent,) = [facts[2:] for facts in counts if facts[:2] == ("tx", kind)]
        assert [facts[2:] for facts in counts if facts[:2] == ("rx", kind)] == [sent] and sent[1] == 1


def test_our_own_mistakes() -> None:
    """Buffers of a wrong length, tensors without bytes, forbidden kinds and too large tensors never leave."""
    sender, _ = framing_pair("volunteer", "server", limits=FramingLimits(1000, 1000))
    ready = Ready(ledger_generation=1, hello=True, slots=1)
    sender.send(ready)
    for message, buffers in (
        (Freeze(ledger_generation=1, step=1, contributions=()), []),
        (_activation(8), [bytes(8)]),
        (ready, [bytes(8)]),
    ):
        with pytest.raises(LocalProtocolError):
            sender.send(message, buffers)
    server, _ = framing_pair(limits=FramingLimits(1000, 1000))
    for message, buffers in ((_activation(8), [bytes(4)]), (_activation(8), []), (_activation(2000), [bytes(2000)])):
        with pytest.raises(LocalProtocolError):
            server.send(message, buffers)


def test_a_peer_with_a_window_too_small() -> None:
    """A window that no message fits is the peer's fault: it must not stop our process."""
    forger = _Forger(hello=b"\0\0" + (10).to_bytes(8, "big"))
    forger.victim.send(_activation(1000), [bytes(1000)])
    with pytest.raises(RemoteProtocolError, match="size"):
        forger.victim.data_to_send(1 << 20)


# ---- peers that break the rules ---------------------------------------------------------------------------------


def test_first_frames() -> None:
    """Before HELLO nothing else is taken, and HELLO is taken only once."""
    for kind in set(range(256)) - {Frame.HELLO}:
        assert _Forger(hello=None).refused(kind, b"") == "decode"
    assert _Forger().refused(Frame.HELLO, bytes(10)) == "decode"


def test_unknown_frames() -> None:
    """Frames of kinds that this version does not know are refused."""
    for kind in set(range(256)) - set(Frame):
        assert _Forger().refused(kind, b"") == "decode"


@pytest.mark.parametrize("hello", [b"", bytes(9), bytes(11), b"\0\0" + b"\xff" * 8])
def test_bad_hellos(hello: bytes) -> None:
    """A HELLO of a wrong length, or with an absurd window, is refused."""
    assert _Forger(hello=None).refused(Frame.HELLO, hello) == "size"


def test_forbidden_kinds_are_refused_before_their_bytes() -> None:
    """What the role table does not allow is refused at its header, in both ways to send it."""

    def volunteer() -> _Forger:
        return _Forger(sender_role="volunteer", receiver_role="server")

    assert volunteer().refused(Frame.BULK, _bulk(0, _activation(1000))) == "role"
    freeze = Freeze(ledger_generation=1, step=1, contributions=())
    assert volunteer().refused(Frame.MESSAGE, encode(freeze)) == "role"
    assert ("volunteer", "server") not in MAY_SEND[Freeze]


def test_tensors_are_checked_at_their_header() -> None:
    """Wrong shapes, counts, keys, sizes and windows are refused before a byte of the tensor was sent."""
    limits = FramingLimits(1000, 1500, elements_max=1000)
    for tensors, reason in (
        ((TensorRef(0, (251,), "fp32", 1004),), "size"),
        ((TensorRef(0, (250,), "fp32", 999),), "shape"),
        ((TensorRef(1, (250,), "fp32", 1000),), "shape"),
        ((TensorRef(0, (200,), "fp32", 800), TensorRef(1, (200,), "fp32", 800)), "size"),
        ((TensorRef(0, (64 * 800,), "gi", 500),), "size"),
        ((), "decode"),
    ):
        message = msgspec.structs.replace(_activation(4), tensors=tensors)
        assert _Forger(limits=limits).refused(Frame.BULK, _bulk(0, message)) == reason
    unaccompanied = _Forger(limits=limits)
    assert unaccompanied.refused(Frame.MESSAGE, encode(_activation(4))) == "decode"
    twice = _Forger(limits=limits)
    twice.say(Frame.BULK, _bulk(0, _activation(1000)))
    assert twice.refused(Frame.BULK, _bulk(1, _activation(1000))) == "size"


def test_numbers_of_bulk() -> None:
    """Numbers go up by one; a chunk belongs to an open message; too many open ones are refused."""
    assert _Forger().refused(Frame.BULK, _bulk(1, _activation(1000))) == "replay"
    again = _Forger()
    again.say(Frame.BULK, _bulk(0, _activation(1000)))
    assert again.refused(Frame.BULK, _bulk(0, _activation(1000))) == "replay"
    assert _Forger().refused(Frame.CHUNK, bytes(4) + b"x") == "decode"
    many = _Forger()
    for number in range(OPEN_BULK_MAX):
        many.say(Frame.BULK, _bulk(number, _activation(1000)))
    assert many.refused(Frame.BULK, _bulk(OPEN_BULK_MAX, _activation(1000))) == "size"
    assert _Forger().refused(Frame.BULK, b"") == "size"


def test_chunks() -> None:
    """Empty, short, overlong and surplus chunks are refused; an exact one ends the message."""
    for plain, reason in ((b"", "decode"), (bytes(999), "size"), (bytes(1001), "size")):
        forger = _Forger()
        forger.say(Frame.BULK, _bulk(0, _activation(1000)))
        assert forger.refused(Frame.CHUNK, bytes(4) + plain) == reason
    honest = _Forger()
    honest.say(Frame.BULK, _bulk(0, _activation(1000)))
    (event,) = honest.say(Frame.CHUNK, bytes(4) + bytes(1000))
    assert isinstance(event, MessageArrived)
    assert honest.refused(Frame.CHUNK, bytes(4) + b"x") == "decode"


def test_parts() -> None:
    """Parts fill their records, stand together, and never grow beyond the longest message."""
    assert _Forger().refused(Frame.PART, bytes(10)) == "size"
    mixed = _Forger()
    mixed.say(Frame.PART, bytes(RECORD_BYTES_MAX))
    assert mixed.refused(Frame.CREDIT, bytes(8)) == "decode"
    endless = _Forger()
    for _ in range(MESSAGE_BYTES_MAX // RECORD_BYTES_MAX):
        endless.say(Frame.PART, bytes(RECORD_BYTES_MAX))
    assert endless.refused(Frame.PART, bytes(RECORD_BYTES_MAX)) == "size"


def test_credit_for_nothing() -> None:
    """Nobody gives back bytes that were not sent, nor zero of them."""
    for plain in (bytes(8), (1).to_bytes(8, "big"), b"\xff" * 8, b"", bytes(9)):
        assert _Forger().refused(Frame.CREDIT, plain) in ("size", "decode")


def test_ends() -> None:
    """END is the final record, the final record is END, and it is empty."""
    assert _Forger().refused(Frame.END, b"") == "decode"
    assert _Forger().refused(Frame.MESSAGE, encode(Ping(number=1)), final=True) == "decode"
    assert _Forger().refused(Frame.END, b"x", final=True) == "size"
    assert _Forger().say(Frame.END, b"", final=True) == [PeerClosed()]


@given(st.lists(st.tuples(st.integers(0, 11), st.binary(max_size=60)), max_size=8))
def test_any_frames(frames: list[tuple[int, bytes]]) -> None:
    """Whatever a proven peer seals, nothing but `RemoteProtocolError` comes out."""
    forger = _Forger()
    with suppress(RemoteProtocolError):
        for kind, plain in frames:
            forger.say(kind, plain)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Bytes of somebody without the key end the link with a named reason."""
    _, victim = framing_pair()
    with suppress(RemoteProtocolError):
        victim.receive(data)


def test_memory_of_what_a_peer_began() -> None:
    """A peer that opens all it may and sends nothing makes us hold almost nothing (S9)."""
    limits = FramingLimits(64 * _MIB, 64 * _MIB)
    forger = _Forger(limits=limits)
    tracemalloc.start()
    for number in range(OPEN_BULK_MAX):
        forger.say(Frame.BULK, _bulk(number, _activation(8 * _MIB)))
    assert tracemalloc.get_traced_memory()[0] < 64 * 1024
    before = psutil.Process().memory_info().vms
    for _ in range(32):
        forger.say(Frame.CHUNK, bytes(4) + bytes(RECORD_BYTES_MAX - 4))
    assert tracemalloc.get_traced_memory()[1] < _MIB
    tracemalloc.stop()
    # The one tensor that has begun to come is memory from the kernel.
    assert psutil.Process().memory_info().vms - before < 9 * _MIB


def test_progress() -> None:
    """`progress` says whether the peer owes something, so that a driver can cut off one that stalls."""
    forger = _Forger()
    assert not forger.victim.progress.receiving
    forger.say(Frame.BULK, _bulk(0, _activation(1000)))
    assert forger.victim.progress.receiving
    forger.say(Frame.CHUNK, bytes(4) + bytes(1000))
    assert not forger.victim.progress.receiving
    before = forger.victim.progress
    forger.victim.receive(forger.writer.seal(Frame.MESSAGE, encode(Ping(number=1)))[:10])
    after = forger.victim.progress
    assert after.receiving and after.messages == before.messages and after.byte_count == before.byte_count + 10


def test_a_large_tensor_takes_memory_as_its_chunks_come() -> None:
    # Not in huge pages: making one holds the loop for milliseconds.
    byte_count = 64 * _MIB
    forger = _Forger(limits=FramingLimits(byte_count, byte_count))
    forger.say(Frame.BULK, _bulk(0, _activation(byte_count)))
    chunk = bytes(4) + bytes(RECORD_BYTES_MAX - 4)
    forger.say(Frame.CHUNK, chunk)
    process = psutil.Process()
    resident = process.memory_info().rss
    came = 2 * _MIB + _MIB // 2
    for _ in range(came // RECORD_BYTES_MAX):
        forger.say(Frame.CHUNK, chunk)
    assert process.memory_info().rss - resident < came + _MIB


def test_a_large_tensor_arrives_where_memory_has_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows gives memory by its length alone; asking it for a private piece ended the process."""
    taken: list[int] = []
    memory = mmap.mmap

    def by_length(file_number: int, length: int) -> mmap.mmap:
        taken.append(length)
        return memory(file_number, length)

    monkeypatch.delattr(mmap, "MAP_PRIVATE")
    monkeypatch.delattr(mmap, "MAP_ANONYMOUS")
    monkeypatch.setattr(mmap, "mmap", by_length)
    sender, receiver = framing_pair()
    data = random.Random(5).randbytes(5 * _MIB)
    sender.send(_activation(5 * _MIB), [data])
    (arrived,) = [event for _, event in _run(sender, receiver) if isinstance(event, MessageArrived)]
    assert [bytes(buffer) for buffer in arrived.buffers] == [data] and taken == [5 * _MIB]
