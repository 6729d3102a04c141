"""One line for all links of a volunteer: older results leave first, and before the sum of gradients of their step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol.base.ids import TaskId, TensorRef
from protocol.base.limits import PROGRESS_BYTES, PROGRESS_S, RECORD_BYTES_MAX
from protocol.link.codec import is_long, tensors_of
from protocol.link.framing import Framing, FramingLimits, MessageArrived
from protocol.link.line import MOVING_S, TRICKLE_S, Line, goes_after, result_step
from protocol.messages import Audited, Contribute, InputGradient, Lease, Message, Output, Parameters
from tests.protocol.samples import allowed_pair, framing_pair, samples

_MIB = 1 << 20
_SAMPLES: dict[type, Any] = {type(message): message for message in samples()}


def _of(kind: type, byte_count: int, **fields: Any) -> Any:
    tensors = (TensorRef(0, (byte_count // 4,), "fp32", byte_count),)
    return msgspec.structs.replace(_SAMPLES[kind], tensors=tensors, **fields)


def _result(step: int) -> Output:
    result: Output = _of(Output, _MIB, task=TaskId(step, 3, 0, "F"))
    return result


def _backward(step: int) -> InputGradient:
    result: InputGradient = _of(InputGradient, _MIB, task=TaskId(step, 3, 0, "B"))
    return result


def _sum(step: int) -> Contribute:
    whole: Contribute = _of(Contribute, 4 * _MIB, step=step)
    return whole


class _Ends:
    """A volunteer's links to two servers, and what the servers have."""

    def __init__(self, shared: bool = True) -> None:
        self.freed = 0
        line = Line(self._free)
        self.links = []
        for _ in range(2):
            own = line if shared else Line()
            near, far = framing_pair("volunteer", "server", FramingLimits(8 * _MIB, 64 * _MIB), line=own)
            for _ in range(2):  # HELLO, and a window
                far.receive(b"".join(near.data_to_send(_MIB)))
                near.receive(b"".join(far.data_to_send(_MIB)))
            self.links.append((near, far))
        self.arrived: list[type] = []

    def _free(self) -> None:
        self.freed += 1

    def send(self, number: int, message: Message) -> None:
        near: Framing = self.links[number][0]
        near.send(message, [bytes(tensor.byte_count) for tensor in tensors_of(message)])

    def carry(self, number: int, now: float = 0.0, budget: int = _MIB // 4) -> int:
        """Some of what may leave on a link does; returns how many bytes."""
        near, far = self.links[number]
        near.tell_time(now)
        data = b"".join(near.data_to_send(budget))
        self.arrived += [type(event.message) for event in far.receive(data) if isinstance(event, MessageArrived)]
        return len(data)

    def carry_all(self) -> None:
        while sum(self.carry(number) for number in range(2)):
            pass


@pytest.mark.parametrize("link", [0, 1])
def test_results_go_before_the_sum_of_their_step_and_of_older_ones(link: int) -> None:
    """A sum of 4 MiB has begun; two results of 1 MiB that come then, on its link or on another one, are there before
    it."""
    ends = _Ends()
    ends.send(0, _sum(7))
    assert ends.carry(0) > 0
    ends.send(link, _result(7))
    ends.send(link, _result(6))
    ends.carry_all()
    assert ends.arrived == [Output, Output, Contribute]


def test_a_sum_stands_still_while_a_result_of_its_step_waits_on_another_link_and_hears_when_it_is_through() -> None:
    """Not a byte of it leaves; and its link, which has nothing else to send, is told once when it may go on."""
    ends = _Ends()
    ends.send(0, _sum(7))
    assert ends.carry(0) > 0
    ends.send(1, _result(7))
    assert ends.carry(0) == 0 == ends.carry(0)
    while ends.carry(1):
        assert ends.freed == (Output in ends.arrived)
    assert ends.arrived == [Output] and ends.freed == 1
    assert ends.carry(0) > 0


def test_results_of_the_next_step_take_turns_with_a_sum() -> None:
    """They would keep it back for as long as there are any: on one link chunks of both go in turns, and on two each
    goes as its own path lets it."""
    one, two = _Ends(), _Ends()
    one.send(0, _sum(7))
    one.send(0, _result(8))
    one.carry(0, budget=2 * _MIB + _MIB // 4)
    assert one.arrived == [Output] and one.links[0][0].queued_bytes < 3 * _MIB
    two.send(0, _sum(7))
    two.send(1, _result(8))
    assert two.carry(0) > 0 and two.carry(1) > 0


def test_what_has_begun_and_is_held_back_sends_a_chunk_now_and_then() -> None:
    """A peer cuts off who begins something and does not bring it: 64 KiB every three seconds is enough for it."""
    assert RECORD_BYTES_MAX >= 2 * PROGRESS_BYTES and 3 * TRICKLE_S < PROGRESS_S
    ends = _Ends()
    ends.send(0, _sum(7))
    assert ends.carry(0) > 0
    for number in range(1, 5):
        ends.send(1, _result(7))
        now = number * TRICKLE_S
        assert ends.carry(1, now, budget=1) > 0
        assert ends.carry(0, now - 0.1) == 0
        assert RECORD_BYTES_MAX / 2 < ends.carry(0, now) < 1.1 * RECORD_BYTES_MAX


def test_a_link_that_hangs_keeps_no_sum_back_for_long() -> None:
    """A result of which nothing leaves holds the sum on the other link for `MOVING_S`; as long as something of it
    leaves now and then, it does."""
    ends = _Ends()
    ends.send(0, _sum(7))
    assert ends.carry(0) > 0
    ends.send(1, _result(7))
    one_chunk = 1.1 * RECORD_BYTES_MAX
    assert ends.carry(0, now=0.9 * MOVING_S) < one_chunk
    assert ends.carry(1, now=0.9 * MOVING_S, budget=1) > 0
    assert ends.carry(0, now=1.8 * MOVING_S) < one_chunk
    assert ends.carry(0, now=2.0 * MOVING_S) > 2 * one_chunk


def test_a_link_that_closes_keeps_nothing_back() -> None:
    ends = _Ends()
    ends.send(0, _sum(7))
    assert ends.carry(0) > 0
    ends.send(1, _result(7))
    assert ends.carry(0) == 0
    ends.links[1][0].close()
    assert ends.freed == 1 and ends.carry(0) > 0


def test_results_of_an_older_step_go_before_newer_ones_that_have_begun() -> None:
    """On their own link and on another one; those of one step keep their order and share the line."""
    one, two = _Ends(), _Ends()
    one.send(0, _result(8))
    assert one.carry(0) > 0
    one.send(0, _backward(7))
    one.carry_all()
    assert one.arrived == [InputGradient, Output]
    two.send(0, _result(8))
    two.carry(0)
    two.send(1, _backward(7))
    assert two.carry(0) == 0 and two.carry(1) > 0
    two.carry_all()
    assert two.arrived == [InputGradient, Output]
    for number, message in enumerate((_result(8), _backward(8))):
        two.send(number, message)
    assert two.carry(0) > 0 and two.carry(1) > 0


def test_a_result_does_not_wait_behind_a_sum_for_room_at_the_peer() -> None:
    """Two sums of 4 MiB fill a window of 9; a third one waits for room, and a result that comes then does not."""
    near, far = framing_pair("volunteer", "server", FramingLimits(8 * _MIB, 9 * _MIB), line=Line())
    for _ in range(2):
        far.receive(b"".join(near.data_to_send(_MIB)))
        near.receive(b"".join(far.data_to_send(_MIB)))
    for message in (_sum(7), _sum(7), _sum(7), _result(7)):
        near.send(message, [bytes(tensor.byte_count) for tensor in tensors_of(message)])
    arrived: list[type] = []
    while data := b"".join(near.data_to_send(_MIB)):
        arrived += [type(event.message) for event in far.receive(data) if isinstance(event, MessageArrived)]
    assert arrived == [Output, Contribute, Contribute]


def test_eight_newer_results_that_have_begun_keep_no_older_one_back() -> None:
    """As many as may be under way on a link at once; the next one of them makes room."""
    ends = _Ends()
    for _ in range(9):
        ends.send(0, _result(8))
    ends.carry(0, budget=_MIB // 8)
    ends.send(0, _backward(7))
    ends.carry_all()
    assert ends.arrived[:2] == [Output, InputGradient] and len(ends.arrived) == 10


def test_links_of_different_nodes_know_nothing_of_each_other() -> None:
    ends = _Ends(shared=False)
    ends.send(0, _sum(7))
    ends.send(1, _result(7))
    assert ends.carry(0) > 0


@pytest.mark.parametrize("message", samples(), ids=lambda message: type(message).__name__)
def test_what_waits_for_what(message: Message) -> None:
    """Results for older ones, and sums for those of their step; parameters, copies of shards, what is audited and what
    measures a line neither wait nor are waited for."""
    if isinstance(message, Contribute):
        assert (result_step(message), goes_after(message)) == (-1, message.step)
    elif isinstance(message, (Output, InputGradient)):
        assert (result_step(message), goes_after(message)) == (message.task.step, message.task.step - 1)
    elif isinstance(message, Lease):
        assert result_step(message) == message.tasks[0].step
    elif isinstance(message, (Parameters, Audited)) or is_long(message):
        assert result_step(message) == -1 and goes_after(message) < 0
    assert allowed_pair(type(message)), "every kind has a sender"
