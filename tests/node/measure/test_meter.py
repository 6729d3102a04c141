"""Measuring: a line of known rate and delay is found out within its bounds, and nobody can be made to pay for more."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from node.measure.meter import Cut, Done, Figures, Meter, Order, Say, Spread, _Way, piece
from protocol.base.ids import NodeId
from protocol.base.limits import MEASURE_BYTES, MEASURE_PEER_BYTES, MEASURE_PIECE_BYTES, MEASURE_S
from protocol.link.codec import tensors_of
from protocol.messages import MeasureAsk, MeasureGot, Message

A, B, C = NodeId("a" * 52), NodeId("b" * 52), NodeId("c" * 52)


class Line:
    """Meters at the ends of lines: each direction sends at a rate, then takes a delay; all of it in order."""

    def __init__(self, up: float, down: float, delay_s: float) -> None:
        self.meters = {A: Meter(itertools.count(1)), B: Meter(itertools.count(1000))}
        self.rates = {A: up, B: down}
        self.delay_s = delay_s
        self.now = 0.0
        self.free = {A: 0.0, B: 0.0}
        self.carried = {A: 0, B: 0}
        self.done: list[tuple[float, Figures | None]] = []
        self.cuts: list[str] = []
        self._events: list[tuple[float, int, NodeId, NodeId, Message]] = []
        self._order = itertools.count()

    def take(self, who: NodeId, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Done):
                self.done.append((self.now, order.figures))
            elif isinstance(order, Cut):
                self.cuts.append(order.detail)
            else:
                size = 60 + sum(tensor.byte_count for tensor in tensors_of(order.message))
                # Small messages overtake bytes, as on a link.
                start = max(self.now, self.free[who]) if size > 60 else self.now
                end = start + size / self.rates[who]
                self.free[who] = max(self.free[who], end)
                self.carried[who] += size
                heapq.heappush(self._events, (end + self.delay_s, next(self._order), who, order.peer, order.message))

    def run(self) -> None:
        """Until nothing is under way and nobody waits for the time."""
        while True:
            wakes = [(wake, who) for who, meter in self.meters.items() if (wake := meter.wake_at()) is not None]
            if self._events and (not wakes or self._events[0][0] <= min(wakes)[0]):
                self.now, _, source, target, message = heapq.heappop(self._events)
                self.take(target, self.meters[target].received(source, message, self.now))
            elif wakes:
                self.now, who = min(wakes)
                self.take(who, self.meters[who].wake(self.now))
            else:
                return
            for meter in self.meters.values():
                meter.check()


@pytest.mark.parametrize("delay_s", [0.0005, 0.025, 0.05])
@pytest.mark.parametrize(("up_mbit", "down_mbit"), [(1, 1), (5, 50), (20, 20), (2, 60), (60, 2)])
def test_a_line_is_found_out(up_mbit: float, down_mbit: float, delay_s: float) -> None:
    """Both rates within a tenth, the round trip exactly; at most 2 MiB each way and 3 s."""
    line = Line(up_mbit * 125_000, down_mbit * 125_000, delay_s)
    line.take(A, line.meters[A].begin(B, 0.0))
    line.run()
    [(ended, figures)] = line.done
    assert figures is not None
    assert figures.sent_bytes_per_s == pytest.approx(up_mbit * 125_000, rel=0.1)
    assert figures.received_bytes_per_s == pytest.approx(down_mbit * 125_000, rel=0.1)
    assert figures.round_trip_s == pytest.approx(
        2 * delay_s + 60 / (125_000 * up_mbit) + 60 / (125_000 * down_mbit), rel=0.01
    )
    assert ended <= MEASURE_S
    messages = MEASURE_BYTES // MEASURE_PIECE_BYTES * 2 + 10
    assert max(line.carried.values()) <= MEASURE_BYTES + 60 * messages


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("round_trip_s", [0.02, 0.5, 3.0])
def test_a_line_that_answered_late_is_not_taken_for_a_fast_one(round_trip_s: float, pieces: int) -> None:
    """Its queues were full when it was asked, and empty when the pieces came: what the questions took is not what the
    pieces' way takes, and a line of 2 Mbit/s was taken for one of 17."""
    way, rate = _Way(started=10.0), 0.25e6
    for number in range(pieces):
        way.arrived(MEASURE_PIECE_BYTES, 10.02 + (number + 1) * MEASURE_PIECE_BYTES / rate)
    assert way.rate(round_trip_s) <= (1.01 if pieces > 1 else 2.0) * rate
    assert way.rate(0.02) >= 0.9 * rate


@pytest.mark.parametrize("mbit", [100, 300, 1000])
def test_a_line_that_two_mebibytes_do_not_fill_is_rated_too_low_never_too_high(mbit: float) -> None:
    """At 100 ms the bytes are through before the window has grown to such lines; live traffic corrects that later."""
    line = Line(mbit * 125_000, mbit * 125_000, 0.05)
    line.take(A, line.meters[A].begin(B, 0.0))
    line.run()
    [(_, figures)] = line.done
    assert figures is not None
    assert min(0.7 * mbit, 60) * 125_000 <= figures.sent_bytes_per_s <= mbit * 125_000 * 1.01
    assert min(0.7 * mbit, 60) * 125_000 <= figures.received_bytes_per_s <= mbit * 125_000 * 1.01


@pytest.mark.parametrize("mbit", [20, 100, 1000])
def test_a_near_line_costs_a_third_of_what_a_measurement_may(mbit: float) -> None:
    """At 1 ms there and back nobody feels their way for long: the rate is known within a tenth, and no more is sent."""
    line = Line(mbit * 125_000, mbit * 125_000, 0.0005)
    line.take(A, line.meters[A].begin(B, 0.0))
    line.run()
    [(_, figures)] = line.done
    assert figures is not None and figures.complete
    assert figures.sent_bytes_per_s == pytest.approx(mbit * 125_000, rel=0.1)
    assert figures.received_bytes_per_s == pytest.approx(mbit * 125_000, rel=0.1)
    if mbit <= 100:
        assert max(line.carried.values()) < MEASURE_BYTES / 3


def test_a_line_too_slow_for_the_bytes_still_gets_a_figure_in_time() -> None:
    """At 0.3 Mbit/s there is time for a few pieces; what is under way at the end is no more than half a second's."""
    line = Line(37_500, 37_500, 0.05)
    line.take(A, line.meters[A].begin(B, 0.0))
    line.run()
    [(ended, figures)] = line.done
    assert figures is not None and not figures.complete and ended <= MEASURE_S
    assert figures.received_bytes_per_s == pytest.approx(37_500, rel=0.3)
    assert max(line.free.values()) <= MEASURE_S + 2.0


def test_measurements_of_one_node_come_one_after_the_other() -> None:
    """Two at once would share the line; each asked for once ends with a word of its own."""
    meter = Meter()
    [first] = meter.begin(B, 0.0)
    assert isinstance(first, Say) and first.peer == B
    assert meter.begin(C, 0.0) == [] and meter.begin(C, 0.0) == [] and meter.begin(B, 0.0) == []
    done, then = meter.link_down(B, 1.0)
    assert done == Done(B, None) and isinstance(then, Say) and then.peer == C
    assert meter.wake(1.0 + MEASURE_S) == [Done(C, None)]
    assert not meter.busy


def test_a_measurement_may_be_given_less_time() -> None:
    """Many servers share what a newcomer waits: each measurement is over within its share, with figures."""
    line = Line(250_000, 250_000, 0.02)
    line.take(A, line.meters[A].begin(B, 0.0, 0.8))
    line.run()
    [(ended, figures)] = line.done
    assert figures is not None and not figures.complete and ended <= 0.8
    assert figures.received_bytes_per_s == pytest.approx(250_000, rel=0.25)


def test_a_peer_that_measures_without_end_is_refused_and_others_are_not() -> None:
    """Its budget is four measurements; another peer's is its own; after a while there is more."""
    meter = Meter()

    def asks(peer: NodeId, now: float) -> bool:
        [order] = meter.received(peer, MeasureAsk(number=1, byte_count=MEASURE_PIECE_BYTES), now)
        assert isinstance(order, Say)
        return not (isinstance(order.message, MeasureGot) and order.message.refused)

    granted = sum(asks(A, 0.0) for _ in range(10_000))
    assert granted == MEASURE_PEER_BYTES // MEASURE_PIECE_BYTES
    assert asks(C, 0.0) and not asks(A, 0.0) and asks(A, 60.0)


def test_bytes_that_nobody_wants_cost_the_link() -> None:
    """Data goes on after the refusal: for what was under way there is patience, then the link is cut."""
    meter = Meter()
    orders: list[Order] = []
    count = 0
    while not any(isinstance(order, Cut) for order in orders):
        orders = meter.received(A, piece(count, MEASURE_PIECE_BYTES, answers=False), 0.0)
        count += 1
    assert count * MEASURE_PIECE_BYTES <= 2 * MEASURE_PEER_BYTES + 2 * MEASURE_PIECE_BYTES


def test_a_piece_larger_than_any_is_refused() -> None:
    """The bound holds before anything is sent or counted."""
    meter = Meter()
    for bad in (
        MeasureAsk(number=1, byte_count=MEASURE_PIECE_BYTES + 4),
        MeasureAsk(number=1, byte_count=3),
        piece(1, 2 * MEASURE_PIECE_BYTES, answers=False),
    ):
        [order] = meter.received(A, bad, 0.0)
        assert isinstance(order, Cut)


def test_whatever_is_answered_a_measurement_ends_in_time() -> None:
    """Answers of other numbers, doubled ones, refusals, from the wrong peer: it ends, and its figures are sane."""
    for seed in range(300):
        draw = random.Random(seed)
        meter, now = Meter(itertools.count(1)), 0.0
        orders = meter.begin(B, now)
        done: list[Done] = []
        said: list[Message] = []
        for _ in range(2000):
            said += [order.message for order in orders if isinstance(order, Say)]
            done += [order for order in orders if isinstance(order, Done)]
            if done:
                break
            wake_at = meter.wake_at()
            assert wake_at is not None
            now += draw.expovariate(20.0)
            if now >= wake_at:
                orders = meter.wake(now)
                continue
            numbers = [message.number for message in said if isinstance(message, MeasureAsk)] + [draw.randrange(50)]
            number = draw.choice(numbers)
            answer: Message = MeasureGot(number=number, refused=draw.random() < 0.02)
            if draw.random() < 0.6:
                answer = piece(number, MEASURE_PIECE_BYTES, answers=True)
            orders = meter.received(draw.choice((B, B, B, C)), answer, now)
            meter.check()
        assert len(done) == 1, f"seed {seed}"
        figures = done[0].figures
        assert figures is None or (figures.round_trip_s >= 0 and figures.received_bytes_per_s >= 0), f"seed {seed}"


def test_a_figure_knows_how_far_its_values_lie_apart() -> None:
    """Median and relative median deviation of the newest nine; hand-checked."""
    spread = Spread()
    for at, value in enumerate([1.0] * 20 + [8.0, 9.0, 10.0, 11.0, 12.0, 10.0, 10.0, 10.0, 10.0]):
        spread.add(value, float(at))
    assert spread.value == 10.0 and spread.spread == 0.0 and spread.at == 28.0
    spread = Spread()
    for value in (8.0, 10.0, 13.0):
        spread.add(value, 0.0)
    assert spread.value == 10.0 and spread.spread == pytest.approx(0.2)
