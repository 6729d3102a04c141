"""A congestion controller that models the path: it sends at the rate that was delivered, whatever got lost.

After BBR: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016, and
draft-ietf-ccwg-bbr (BBRv3), section numbers below; delivery rates after draft-cheng-iccrg-delivery-rate-estimation.
The path has a bottleneck bandwidth (the largest delivery rate of the last ten round trips) and a propagation delay
(the smallest round trip of ten seconds); their product is what must be under way to keep the line busy. We pace at
the bandwidth, probe above it now and then, and keep at most twice the product in flight. Random loss lowers none of
this. Loss of a whole round beyond two percent and some does: a full queue with others in it looks like that.

What is left out of BBRv3: ECN, and its slow raising of the long-term bound, which here grows by a quarter with each
clean probe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer

NAME = "barnraise-bbr"
"""In aioquic's registry of controllers."""

STARTUP_GAIN = 2.77
"""4 ln 2: the smallest that doubles the rate every round (BBRv3 2.4)."""
DRAIN_GAIN = 0.5
PROBE_GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Ask for more, give the queue back, and keep the rate; each for one round trip at least (Queue 2016)."""
WINDOW_GAIN = 2.0
"""Bandwidth-delay products in flight: one on the line, one for acknowledgements that come in lumps."""
PACING_MARGIN = 0.99
"""A hundredth less than the model says, so that queues drain (BBRv3 5.6.2)."""
BANDWIDTH_ROUNDS = 10
MIN_RTT_S = 10.0
PROBE_RTT_S = 0.2
PROBE_RTT_GAIN = 0.5
"""Products in flight while the queue is emptied to see the propagation delay (BBRv3 2.14)."""
FULL_ROUNDS = 3
FULL_GROWTH = 1.25
"""The line is full when three rounds did not bring a quarter more."""
LOSS_SHARE = 0.02
LOSS_SHARE_WITHOUT_QUEUE = 0.1
LOSS_PACKETS = 6
"""A round is lossy with more than this share and number of its packets lost (BBRv3 2.7). While round trips show no
queue the share may be larger: a radio loses more, and only a policer takes a tenth without queueing."""
QUEUE_FACTOR = 1.1
QUEUE_S = 0.002
"""A round whose mean round trip exceeds the smallest by this factor and time saw a queue."""
LOSS_FACTOR = 0.7
CEILING_GROWTH = 1.25
HEADROOM = 0.85
"""Of the flight that was too much; what is left is for others (BBRv3 2.8)."""
WINDOW_PACKETS_MIN = 4
WINDOW_BYTES_MAX = 16 << 20
"""A peer that acknowledges what it never got makes us hold no more than this."""
FIRST_RTT_S = 0.1
"""Until a round trip was seen."""
QUANTUM_S = 0.002
"""Packets leave in bursts of this length: fewer turns of the loop, and a queue of 2 ms at most."""
LUMP_ROUNDS = 5
"""Acknowledgements that come in lumps (radios, busy peers) allow more in flight: the largest of five to ten rounds
(BBRv3 5.5.9), …"""
LUMP_S = 0.1
"""… as far as it is worth this much of the rate."""
LATE_S = 0.05
"""A loop that comes late makes up for so much; a line that was idle gets no more than a burst at once."""
TURN_PACKETS_MAX = 32
"""Packets in one turn of the loop, about 2 ms of processor; then others have theirs."""


class Phase(Enum):
    """What the controller is after."""

    STARTUP = "startup"
    DRAIN = "drain"
    PROBE_BANDWIDTH = "probe bandwidth"
    PROBE_RTT = "probe round trip"


class _Sent:
    """The line as it was when a packet left."""

    __slots__ = ("at_s", "delivered", "delivered_at_s", "first_at_s", "idle")

    def __init__(self, at_s: float, delivered: int, delivered_at_s: float, first_at_s: float, idle: bool) -> None:
        self.at_s = at_s
        self.delivered = delivered
        self.delivered_at_s = delivered_at_s
        self.first_at_s = first_at_s
        self.idle = idle


class ModelController(QuicCongestionControl):
    """For aioquic: it calls `on_...`, reads `congestion_window`; `ModelPacer` reads `pacing_bytes_per_s`."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.phase = Phase.STARTUP
        self.min_rtt_s = float("inf")
        self.pacing_bytes_per_s = STARTUP_GAIN * self.congestion_window / FIRST_RTT_S
        self._datagram_bytes = max_datagram_size
        self._sent: dict[int, _Sent] = {}
        # Delivery.
        self._delivered = 0
        self._lost = 0
        self._delivered_at_s = 0.0
        self._first_at_s = 0.0
        self._idle_until = 0
        self._newest: _Sent | None = None
        self._fresh_bytes = 0
        # Rounds, and the bandwidth of each.
        self._round = 0
        self._round_ends = 0
        self._rates: deque[tuple[int, float]] = deque()
        self._round_rate = 0.0
        self._round_rtt_sum_s = 0.0
        self._round_rtts = 0
        self._round_lost_bytes = self._round_lost_packets = self._round_delivered = 0
        # Startup.
        self._full_rate = 0.0
        self._full_rounds = 0
        self._full = False
        # Cycles.
        self._cycle = 0
        self._cycle_at_s = 0.0
        self._caution = 1.0
        self._ceiling_bytes: float = WINDOW_BYTES_MAX
        # What acknowledgements brought beyond the rate: of these rounds, and of those before.
        self._lump_at_s = 0.0
        self._lump_bytes = 0
        self._lumps = [0.0, 0.0]
        self._lumps_round = 0
        # The smallest round trip.
        self._min_rtt_at_s = 0.0
        self._probe_rtt_until_s = 0.0

    # ---- what the model says ----

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Largest delivery rate of the last rounds; 0 before the first acknowledgement."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def product_bytes(self) -> float:
        """Bytes in flight that keep the line busy with no queue."""
        rtt_s = self.min_rtt_s if self.min_rtt_s < float("inf") else FIRST_RTT_S
        return self.bandwidth_bytes_per_s * rtt_s

    def on_idle(self) -> None:
        """The sender could have sent more and did not: rates until all this is delivered say less than the line."""
        self._idle_until = self._delivered + self.bytes_in_flight or 1

    # ---- aioquic's calls ----

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        now = packet.sent_time
        assert now is not None, "aioquic stamps packets before it hands them over"
        if not self.bytes_in_flight:
            self._first_at_s = self._delivered_at_s = now
        self.bytes_in_flight += packet.sent_bytes
        self._sent[packet.packet_number] = _Sent(
            now, self._delivered, self._delivered_at_s, self._first_at_s, self._idle_until > 0
        )

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.bytes_in_flight -= packet.sent_bytes
        self._delivered += packet.sent_bytes
        self._delivered_at_s = now
        self._fresh_bytes += packet.sent_bytes
        self._round_delivered += packet.sent_bytes
        sent = self._sent.pop(packet.packet_number)
        newest = self._newest
        if newest is None or (sent.delivered, sent.at_s) >= (newest.delivered, newest.at_s):
            self._newest = sent

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """aioquic calls this at the end of an acknowledgement that brought news: the model moves here."""
        if self._idle_until and self._delivered > self._idle_until:
            self._idle_until = 0
        self._round_rtt_sum_s += rtt
        self._round_rtts += 1
        rate, idle, round_over = self._sample(now)
        if rate and (not idle or rate >= self.bandwidth_bytes_per_s):
            self._take_rate(rate)
        if round_over:
            self._end_round(idle)
        self._see_lump(now)
        self._see_rtt(now, rtt)
        self._advance(now, round_over)
        self._set_window()
        self._set_pace()

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._sent.pop(packet.packet_number, None)
            self._round_lost_bytes += packet.sent_bytes
            self._round_lost_packets += 1
            self._lost += packet.sent_bytes

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._sent.pop(packet.packet_number, None)

    @property
    def loss(self) -> float | None:
        """Share of the bytes that were lost so far; None before any came through."""
        return self._lost / (self._lost + self._delivered) if self._delivered else None

    # ---- the model ----

    def _sample(self, now: float) -> tuple[float, bool, bool]:
        """(bytes per second delivered while the newest acknowledged packet was under way, too few sent, a round over).

        Over the longer of the times in which these bytes were sent and acknowledged: lumps on the way show in one of
        them only (draft-cheng-iccrg-delivery-rate-estimation 2.2.4).
        """
        newest, self._newest = self._newest, None
        if newest is None:
            return 0.0, True, False
        self._first_at_s = newest.at_s
        elapsed_s = max(newest.at_s - newest.first_at_s, now - newest.delivered_at_s)
        shortest_s = self.min_rtt_s if self.min_rtt_s < float("inf") else 0.0
        rate = (self._delivered - newest.delivered) / elapsed_s if elapsed_s >= max(shortest_s, 1e-6) else 0.0
        round_over = newest.delivered >= self._round_ends
        if round_over:
            self._round += 1
            self._round_ends = self._delivered
        return rate, newest.idle, round_over

    def _take_rate(self, rate: float) -> None:
        """A windowed maximum: rates fall from left to right, each the largest of its round and after."""
        self._round_rate = max(self._round_rate, rate)
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((self._round, rate))

    def _end_round(self, idle: bool) -> None:
        while len(self._rates) > 1 and self._rates[0][0] <= self._round - BANDWIDTH_ROUNDS:
            self._rates.popleft()
        if self._lossy_round():
            self._give_room()
        if not self._full and not idle:
            self._check_full()
        self._round_lost_bytes = self._round_lost_packets = self._round_delivered = 0
        self._round_rate = self._round_rtt_sum_s = 0.0
        self._round_rtts = 0

    def _lossy_round(self) -> bool:
        """Whether more was lost than chance explains: the queue is full, or others need room."""
        queued = self._round_rtt_sum_s > self._round_rtts * (QUEUE_FACTOR * self.min_rtt_s + QUEUE_S)
        share = LOSS_SHARE if queued else LOSS_SHARE_WITHOUT_QUEUE
        total = self._round_lost_bytes + self._round_delivered
        return self._round_lost_packets >= LOSS_PACKETS and self._round_lost_bytes > share * total

    def _give_room(self) -> None:
        if self.phase is Phase.STARTUP:
            self._full = True
        probing = self.phase is Phase.STARTUP or (self.phase is Phase.PROBE_BANDWIDTH and self._cycle <= 1)
        if probing:
            self._ceiling_bytes = max(self.bytes_in_flight, LOSS_FACTOR * self.product_bytes)
        elif self.bandwidth_bytes_per_s:
            share = self._round_rate / self.bandwidth_bytes_per_s
            self._caution = min(self._caution, max(share, LOSS_FACTOR * self._caution))

    def _check_full(self) -> None:
        if self.bandwidth_bytes_per_s >= FULL_GROWTH * self._full_rate:
            self._full_rate, self._full_rounds = self.bandwidth_bytes_per_s, 0
        else:
            self._full_rounds += 1
            self._full = self._full_rounds >= FULL_ROUNDS

    def _see_lump(self, now: float) -> None:
        expected = self.bandwidth_bytes_per_s * (now - self._lump_at_s)
        if self._lump_bytes <= expected:
            self._lump_at_s, self._lump_bytes, expected = now, 0, 0.0
        self._lump_bytes += self._fresh_bytes
        if self._round >= self._lumps_round + LUMP_ROUNDS:
            self._lumps_round, self._lumps = self._round, [0.0, self._lumps[0]]
        extra = min(self._lump_bytes - expected, LUMP_S * self.bandwidth_bytes_per_s, self.congestion_window)
        self._lumps[0] = max(self._lumps[0], extra)

    def _see_rtt(self, now: float, rtt: float) -> None:
        expired = now > self._min_rtt_at_s + MIN_RTT_S and self.min_rtt_s < float("inf")
        if rtt <= self.min_rtt_s or expired:
            self.min_rtt_s, self._min_rtt_at_s = rtt, now
        if expired and self.phase is not Phase.PROBE_RTT:
            self.phase = Phase.PROBE_RTT
            self._probe_rtt_until_s = 0.0

    def _advance(self, now: float, round_over: bool) -> None:
        if self.phase is Phase.STARTUP and self._full:
            self.phase = Phase.DRAIN
        if self.phase is Phase.DRAIN and self.bytes_in_flight <= self.product_bytes:
            self._begin_cycles(now)
        elif self.phase is Phase.PROBE_BANDWIDTH:
            self._turn_cycle(now)
        elif self.phase is Phase.PROBE_RTT:
            if not self._probe_rtt_until_s and self.bytes_in_flight <= self._probe_rtt_window():
                self._probe_rtt_until_s = now + max(PROBE_RTT_S, self.min_rtt_s)
            elif self._probe_rtt_until_s and now >= self._probe_rtt_until_s:
                self._min_rtt_at_s = now
                if self._full:
                    self._begin_cycles(now)
                else:
                    self.phase = Phase.STARTUP

    def _begin_cycles(self, now: float) -> None:
        """With a phase that keeps the rate; which one differs with the bytes so far, so that flows take turns."""
        self.phase = Phase.PROBE_BANDWIDTH
        self._cycle = 2 + self._delivered // self._datagram_bytes % (len(PROBE_GAINS) - 2)
        self._cycle_at_s = now

    def _turn_cycle(self, now: float) -> None:
        gain = PROBE_GAINS[self._cycle]
        long_enough = now - self._cycle_at_s > self.min_rtt_s
        if gain > 1.0:
            # Until the extra is really in flight, or was too much.
            over = long_enough and (
                self._lossy_round()
                or self.bytes_in_flight >= gain * self.product_bytes
                or now - self._cycle_at_s > 2 * self.min_rtt_s
            )
        elif gain < 1.0:
            over = long_enough or self.bytes_in_flight <= self.product_bytes
        else:
            over = long_enough
        if not over:
            return
        if gain > 1.0 and not self._lossy_round():
            self._ceiling_bytes = min(CEILING_GROWTH * self._ceiling_bytes, WINDOW_BYTES_MAX)
        self._cycle = (self._cycle + 1) % len(PROBE_GAINS)
        self._cycle_at_s = now
        if not self._cycle:
            self._caution = 1.0

    # ---- what follows from it ----

    def _probe_rtt_window(self) -> int:
        return max(int(PROBE_RTT_GAIN * self.product_bytes), WINDOW_PACKETS_MIN * self._datagram_bytes)

    def _set_window(self) -> None:
        fresh, self._fresh_bytes = self._fresh_bytes, 0
        # Three bursts on top, for those that wait here and at the peer: all there is on a line without delay.
        bursts = 3 * max(self.pacing_bytes_per_s * QUANTUM_S, 2 * self._datagram_bytes)
        lumps = max(self._lumps) if self._full else 0.0
        target = WINDOW_GAIN * self.product_bytes * self._caution + bursts + lumps
        window = float(self.congestion_window)
        if self._full or window < target:
            window += fresh
        if self._full:
            probing = PROBE_GAINS[self._cycle] > 1.0
            window = min(window, target, self._ceiling_bytes * (1.0 if probing else HEADROOM))
        if self.phase is Phase.PROBE_RTT:
            window = min(window, self._probe_rtt_window())
        floor = WINDOW_PACKETS_MIN * self._datagram_bytes
        self.congestion_window = int(min(max(window, floor), WINDOW_BYTES_MAX))

    def _set_pace(self) -> None:
        gain = {
            Phase.STARTUP: STARTUP_GAIN,
            Phase.DRAIN: DRAIN_GAIN,
            Phase.PROBE_BANDWIDTH: PROBE_GAINS[self._cycle],
            Phase.PROBE_RTT: 1.0,
        }[self.phase]
        rate = gain * PACING_MARGIN * self.bandwidth_bytes_per_s * self._caution
        if self._full or rate > self.pacing_bytes_per_s:
            self.pacing_bytes_per_s = max(rate, self._datagram_bytes)


class ModelPacer(QuicPacketPacer):
    """aioquic's pacer at the model's rate, in bursts that are worth a turn of the loop."""

    def __init__(self, controller: ModelController, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._controller = controller
        self._packet_s = self._quantum_s = 0.0
        self._bursting = False
        self._turn_packets = 0
        self._wanted_at_s = float("inf")
        self.update_rate(0, 0.0)

    def next_send_time(self, now: float) -> float | None:  # type: ignore[override]  # as theirs does
        """None for now; a time that is over means after the next turn of the loop."""
        if now > self._wanted_at_s + LATE_S:
            # We came so late that we sent less than we could: what is delivered now is no measure of the line.
            self._controller.on_idle()
        self._wanted_at_s = float("inf")
        self.update_bucket(now)
        if not self._controller.bytes_in_flight:
            self.bucket_time = min(self.bucket_time, self._quantum_s)
        if self._turn_packets >= TURN_PACKETS_MAX:
            self._turn_packets = 0
            return now
        # A hair less than the whole: sums of times do not come out even.
        self._bursting = self.bucket_time > (0.0 if self._bursting else 0.99 * self._quantum_s)
        if self._bursting:
            return None
        self._turn_packets = 0
        self._wanted_at_s = now + self._quantum_s - self.bucket_time
        return self._wanted_at_s

    def update_after_send(self, now: float) -> None:
        """A debt stays a debt: aioquic forgives what a burst's last packet had too much, a tenth of the rate here."""
        self.bucket_time -= self._packet_s
        self._turn_packets += 1

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """aioquic calls this after every change; what it hands over is not needed."""
        self._packet_s = self._max_datagram_size / self._controller.pacing_bytes_per_s
        self._quantum_s = min(QUANTUM_S, TURN_PACKETS_MAX * self._packet_s)
        self.bucket_max = max(LATE_S, 2 * self._packet_s)
        self.bucket_time = min(self.bucket_time, self.bucket_max)


register_congestion_control(NAME, ModelController)
