"""The coordinator asks nodes what they did: their clocks beside ours, pieces put together, all of it bounded."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from coordinator.live import tracing
from coordinator.live.outbox import Outbox
from coordinator.live.tracing import Tracing
from protocol.base.ids import NodeId, TaskId
from protocol.base.machine import Send
from protocol.messages import FetchSpans, Spans
from protocol.run.spans import DTYPE, RECORD_BYTES, SpanRing


class Node:
    """A node whose clock is off, and whose answers take a while each way."""

    def __init__(self, name: str, offset_s: float, ways_s: tuple[float, ...], spans: int) -> None:
        self.node = NodeId(name * 52)
        self.offset_s = offset_s
        self.ways_s = deque(ways_s)
        """Of each answer: the way there, which is also the way back but for the last one."""
        self.ring = SpanRing()
        for number in range(spans):
            start = 100.0 + number * 0.01 + offset_s
            self.ring.add("forward", start, start + 0.005, about=TaskId(number, 0, 0, "F"))

    def answer(self, question: FetchSpans, now: float) -> tuple[Spans, float]:
        """The answer and when it arrives."""
        there_s, back_s = (self.ways_s.popleft(), 0.02) if self.ways_s else (0.02, 0.02)
        return self.ring.answer(question, now + there_s + self.offset_s), now + there_s + back_s


def collect(nodes: list[Node], seconds: float = 1000.0, now: float = 200.0) -> tuple[Tracing, Outbox]:
    """Questions and answers until nobody has anything more to say."""
    outbox = Outbox(0.0)
    asking = Tracing(outbox)
    asking.begin(((node.node, "volunteer", 0) for node in nodes), seconds, now)
    by_name = {node.node: node for node in nodes}
    at = {node.node: now for node in nodes}
    for _ in range(1000):
        sends = [effect for effect in outbox.take() if isinstance(effect, Send)]
        if not sends:
            break
        for send in sends:
            assert isinstance(send.message, FetchSpans)
            answer, at[send.peer] = by_name[send.peer].answer(send.message, at[send.peer])
            assert asking.take(send.peer, answer, at[send.peer]) == ""
    return asking, outbox


def test_times_are_the_coordinators_whatever_the_nodes_clock_says() -> None:
    """A clock that is off by a day is corrected by the shortest round trip, within half of it."""
    asking, _ = collect([Node("a", 86_400.0, (0.5, 0.02, 0.3), 50), Node("b", -5.0, (), 50)])
    assert asking.done
    for traced in asking.take_all():
        assert traced.uncertain_s == pytest.approx(0.02)
        assert np.abs(traced.records["start"] - (100.0 + np.arange(50) * 0.01)).max() <= traced.uncertain_s + 1e-6
        assert traced.records["step"].tolist() == list(range(50))


def test_a_long_ring_comes_whole() -> None:
    """Piece after piece, in order."""
    asking, _ = collect([Node("a", 3.0, (), 5000)])
    (traced,) = asking.take_all()
    assert traced.records["step"].tolist() == list(range(5000)) and traced.lost == 0
    assert asking.take_all() == []


def test_many_nodes_together_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody tells his newest, and says how many he left out."""
    monkeypatch.setattr(tracing, "TOTAL_MAX", 4000)
    asking, _ = collect([Node(letter, 0.0, (), 3000) for letter in "abcd"])
    for traced in asking.take_all():
        assert traced.records["step"].tolist() == list(range(2000, 3000))
        assert traced.lost == 2000


def test_a_node_that_sends_without_end_is_heard_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says is left: after its share nobody asks."""
    monkeypatch.setattr(tracing, "TOTAL_MAX", 2500)
    outbox = Outbox(0.0)
    asking = Tracing(outbox)
    node = NodeId("a" * 52)
    asking.begin([(node, "volunteer", 0)], 10.0, 0.0)
    told = 0
    for _ in range(100):
        if not (sends := [effect for effect in outbox.take() if isinstance(effect, Send)]):
            break
        assert isinstance(sends[0].message, FetchSpans)
        piece = b"" if sends[0].message.after < 0 else bytes(1024 * RECORD_BYTES)
        answer = Spans(number=1, clock_s=1.0, first=told, left=10**9, names=("",), spans=piece)
        assert asking.take(node, answer, 1.0) == ""
        told += len(piece) // RECORD_BYTES
    assert asking.done and told == 3 * 1024


def test_nonsense_names_its_sender_and_old_answers_are_nobodys() -> None:
    """A span of an unknown kind is a fault; an answer to a question of before is none."""
    outbox = Outbox(0.0)
    asking = Tracing(outbox)
    node = NodeId("a" * 52)
    asking.begin([(node, "volunteer", 0)], 10.0, 0.0)
    asking.begin([(node, "volunteer", 0)], 10.0, 0.0)
    assert asking.take(node, Spans(number=1, clock_s=0.0, first=0, left=0), 1.0) == ""
    assert not asking.done
    for _ in range(3):
        assert asking.take(node, Spans(number=2, clock_s=0.0, first=0, left=9), 1.0) == ""
    bad = np.zeros(1, DTYPE)
    bad["kind"] = 255
    assert "Spans" in asking.take(node, Spans(number=2, clock_s=0.0, first=0, left=8, spans=bad.tobytes()), 1.0)
    assert asking.done


def test_whoever_leaves_is_not_waited_for() -> None:
    """What came of it counts."""
    outbox = Outbox(0.0)
    asking = Tracing(outbox)
    node = NodeId("a" * 52)
    asking.begin([(node, "volunteer", 0)], 10.0, 0.0)
    assert not asking.done
    asking.left(node)
    assert asking.done and len(asking.take_all()) == 1
