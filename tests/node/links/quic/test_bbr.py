"""The controller on a line in virtual time: chance loss does not cost the rate, queues stay short, others get room."""

from __future__ import annotations

import pytest

from node.links.quic.bbr import LOSS_PACKETS, WINDOW_BYTES_MAX, Phase
from tests.node.links.quic.line import PACKET_BYTES, Flow, Line


def _line(*, mbit_s: float = 20.0, rtt_s: float = 0.05, products: float = 2.0, loss: float = 0.0) -> Line:
    """`products`: the queue in bandwidth-delay products."""
    return Line(mbit_s=mbit_s, rtt_s=rtt_s, queue_bytes=int(products * mbit_s * 125_000 * rtt_s), loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("products", [0.25, 2.0])
def test_the_line_is_used_whatever_chance_takes(loss: float, products: float) -> None:
    """Nine tenths of what loss leaves, with a queue of a quarter of the line and with a large one."""
    flow = Flow(_line(products=products, loss=loss))
    assert flow.mbit_s(2.0, 7.0) >= 0.9 * 20.0 * (1 - loss)


def test_a_loss_based_controller_loses_the_line_to_chance() -> None:
    """What the model is for: cubic on the same line keeps less than a quarter of it."""
    flow = Flow(_line(loss=0.01), "cubic")
    assert flow.mbit_s(2.0, 7.0) < 0.25 * 20.0


def test_a_fast_line_is_filled_within_two_seconds() -> None:
    """100 Mbit/s at 50 ms with one percent lost: startup finds it."""
    flow = Flow(_line(mbit_s=100.0, loss=0.01))
    assert flow.mbit_s(1.0, 2.0) >= 85.0
    assert flow.controller.phase is Phase.PROBE_BANDWIDTH


def test_the_queue_stays_short() -> None:
    """A message behind bulk waits a few milliseconds for it, not for a window of two products."""
    flow = Flow(_line(products=8.0))
    flow.mbit_s(2.0, 7.0)
    seen = sorted(flow.queue_seen[len(flow.queue_seen) // 3 :])
    assert seen[len(seen) // 2] <= 0.1 * 20 * 125_000 * 0.05
    assert seen[int(0.99 * len(seen))] <= 0.5 * 20 * 125_000 * 0.05


def test_a_line_that_becomes_slower_is_followed() -> None:
    """The old maximum is forgotten after ten rounds, and the queue that it built drains."""
    line = _line(products=8.0)
    flow = Flow(line)
    flow.mbit_s(1.0, 2.0)
    line.bytes_per_s /= 4
    assert flow.mbit_s(6.0, 9.0) >= 0.9 * 5.0
    assert flow.controller.bandwidth_bytes_per_s <= 1.1 * line.bytes_per_s
    assert flow.controller.bytes_in_flight <= 3 * line.bytes_per_s * 0.05 + 10 * PACKET_BYTES


def test_a_line_that_becomes_faster_is_found() -> None:
    """By probing a quarter more every eight round trips."""
    line = _line(mbit_s=5.0, products=4.0)
    flow = Flow(line)
    flow.mbit_s(1.0, 2.0)
    line.bytes_per_s *= 4
    assert flow.mbit_s(7.0, 9.0) >= 0.9 * 20.0


def test_a_path_that_becomes_longer_is_learned() -> None:
    """When no round trip was as short as the shortest for ten seconds, the queue is emptied to see what is true now."""
    line = _line(mbit_s=5.0)
    flow = Flow(line)
    flow.mbit_s(1.0, 2.0)
    line.rtt_s = 0.1
    phases = set()
    for tenth in range(20, 150):
        flow.line.run_until(tenth / 10)
        phases.add(flow.controller.phase)
    assert Phase.PROBE_RTT in phases
    assert 0.1 <= flow.controller.min_rtt_s <= 0.1 + 10 * PACKET_BYTES / line.bytes_per_s
    assert flow.mbit_s(15.0, 18.0) >= 0.9 * 5.0


def test_acknowledgements_in_lumps_do_not_cost_the_line() -> None:
    """A radio, or a peer that is busy with other things, answers every sixty milliseconds: more may be in flight."""
    line = _line(loss=0.01)
    flow = Flow(line, ack_delay_s=0.06)
    assert flow.mbit_s(3.0, 8.0) >= 0.9 * 20.0


def test_a_sender_that_comes_late_keeps_the_line() -> None:
    """Others have the processor for 40 ms, again and again: the bursts after that make up for it."""
    line = _line(products=3.0)
    flow = Flow(line, late_s=0.04)
    assert flow.mbit_s(3.0, 8.0) >= 0.85 * 20.0


@pytest.mark.slow
@pytest.mark.parametrize("products", [2.0, 8.0])
def test_a_cubic_flow_beside_it_keeps_a_fair_part(products: float) -> None:
    """A fifth of the line at least, where the queue holds what loss-based flows need: two products or more."""
    line = _line(products=products)
    Flow(line)
    other = Flow(line, "cubic", starts_at_s=1.0)
    assert other.mbit_s(15.0, 30.0) >= 0.2 * 20.0


def test_two_of_them_share_the_line() -> None:
    """The one that comes later gets a third at least, and the queue does not overflow."""
    line = _line(products=4.0)
    Flow(line)
    other = Flow(line, starts_at_s=2.0)
    assert other.mbit_s(10.0, 20.0) >= 20.0 / 3
    assert line.dropped == 0


def test_after_silence_it_goes_on() -> None:
    """All that was under way is lost for a second: probes bring it back, and the rate is not forgotten."""
    line = _line()
    flow = Flow(line)
    flow.mbit_s(1.0, 2.0)
    line.loss = 1.0
    line.run_until(3.0)
    line.loss = 0.0
    assert flow.mbit_s(4.5, 6.5) >= 0.9 * 20.0


def test_the_window_is_bounded_whatever_the_peer_acknowledges() -> None:
    """A line that seems to have no end makes us hold WINDOW_BYTES_MAX and no more."""
    line = Line(mbit_s=10_000.0, rtt_s=0.2, queue_bytes=1 << 30)
    flow = Flow(line)
    line.run_until(1.1)
    assert flow.controller.bytes_in_flight <= WINDOW_BYTES_MAX
    assert flow.controller.congestion_window <= WINDOW_BYTES_MAX


def test_nothing_of_a_packet_stays_behind() -> None:
    """What was sent, acknowledged or lost is forgotten; only what is under way is remembered."""
    line = _line(loss=0.05)
    flow = Flow(line)
    line.run_until(3.0)
    flow.stopped = True
    line.run_until(8.0)
    assert len(flow.controller._sent) * PACKET_BYTES == flow.controller.bytes_in_flight
    assert flow.controller.bytes_in_flight <= LOSS_PACKETS * PACKET_BYTES


def test_a_sender_with_little_to_say_does_not_lower_the_estimate() -> None:
    """Rates of times in which the sender had nothing are no measure of the line."""
    line = _line()
    flow = Flow(line)
    line.run_until(2.0)
    before = flow.controller.bandwidth_bytes_per_s
    flow.stopped = True
    flow.controller.on_idle()
    for tenth in range(21, 60):
        line.run_until(tenth / 10)
        flow.controller.on_idle()
        flow._send_one(line.now)
    assert flow.controller.bandwidth_bytes_per_s >= 0.9 * before
