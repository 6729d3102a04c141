"""A line in virtual time: one bottleneck with a queue, a delay, loss by chance, and flows that share it.

Each flow is aioquic's own recovery (loss detection, pacer and a controller of its registry) with endless data, so
what is judged is the controller as aioquic drives it, without sockets, ciphers or clocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.tls import Epoch

from node.links.quic.bbr import NAME, ModelController, ModelPacer

PACKET_BYTES = 1200
_ACK_RANGES = 32


class Line:
    """A queue that drains at a rate, then a delay; what finds the queue full is dropped, some is lost by chance."""

    def __init__(self, *, mbit_s: float, rtt_s: float, queue_bytes: int, loss: float = 0.0, seed: int = 1) -> None:
        self.now = 0.0
        self.bytes_per_s = mbit_s * 125_000
        self.loss = loss
        self.dropped = 0
        self.rtt_s = rtt_s
        self._queue_bytes = queue_bytes
        self._free_at_s = 0.0
        self._random = Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def queued_bytes(self) -> float:
        """What waits now."""
        return max(self._free_at_s - self.now, 0.0) * self.bytes_per_s

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        """Do this then."""
        heapq.heappush(self._events, (when_s, next(self._order), act))

    def carry(self, byte_count: int, arrive: Callable[[], None]) -> None:
        """Send a packet to the far end."""
        if self.queued_bytes + byte_count > self._queue_bytes:
            self.dropped += 1
            return
        self._free_at_s = max(self._free_at_s, self.now) + byte_count / self.bytes_per_s
        if self._random.random() >= self.loss:
            self.at(self._free_at_s + self.rtt_s / 2, arrive)

    def answer(self, arrive: Callable[[], None]) -> None:
        """Send something small back: it is neither queued nor lost."""
        self.at(self.now + self.rtt_s / 2, arrive)

    def run_until(self, end_s: float) -> None:
        """Let virtual time pass."""
        while self._events and self._events[0][0] <= end_s:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end_s


class Flow:
    """Endless data from one end to the other, as fast as `controller` of aioquic's registry lets it.

    `ack_delay_s`: how long the far end gathers before it acknowledges; `late_s`: the sender has its turns no closer.
    """

    def __init__(
        self,
        line: Line,
        controller: str = NAME,
        *,
        starts_at_s: float = 0.0,
        ack_delay_s: float = 0.001,
        late_s: float = 0.0,
    ) -> None:
        self.line = line
        self.received_bytes = 0
        self.queue_seen: list[float] = []
        self.recovery = QuicPacketRecovery(
            congestion_control_algorithm=controller,
            initial_rtt=0.1,
            max_datagram_size=PACKET_BYTES,
            peer_completed_address_validation=True,
            send_probe=self._probe,
        )
        if isinstance(self.recovery._cc, ModelController):
            self.recovery._pacer = ModelPacer(self.recovery._cc, max_datagram_size=PACKET_BYTES)
        self.stopped = False
        self._ack_delay_s = ack_delay_s
        self._late_s = late_s
        self._turn_at_s = 0.0
        self._space = QuicPacketSpace()
        self.recovery.spaces = [self._space]
        self._number = itertools.count()
        self._arrived = RangeSet()
        self._ack_pending = False
        self._probes = 0
        self._wakes_at_s = float("inf")
        line.at(starts_at_s, self._send)

    @property
    def controller(self) -> ModelController:
        """The model, where it is one."""
        assert isinstance(self.recovery._cc, ModelController)
        return self.recovery._cc

    def mbit_s(self, begin_s: float, end_s: float) -> float:
        """What arrives between two moments; runs the line until the second."""
        self.line.run_until(begin_s)
        before = self.received_bytes
        self.line.run_until(end_s)
        return (self.received_bytes - before) / (end_s - begin_s) / 125_000

    def _probe(self) -> None:
        self._probes += 1

    def _send(self) -> None:
        now = self.line.now
        if now < self._turn_at_s:
            self._wake(self._turn_at_s)
            return
        self._turn_at_s = now + self._late_s
        timer = self.recovery.get_loss_detection_time()
        if timer is not None and now >= timer:
            self.recovery.on_loss_detection_timeout(now=now)
        pacing_at = None
        while not self.stopped:
            pacing_at = self.recovery._pacer.next_send_time(now=now)
            if pacing_at is not None and pacing_at <= now:
                continue  # a turn is over, and the next begins
            room = self.recovery.congestion_window - self.recovery.bytes_in_flight >= PACKET_BYTES
            if pacing_at is not None or not (room or self._probes):
                break
            self._probes = max(self._probes - 1, 0)
            self._send_one(now)
            self.recovery._pacer.update_after_send(now=now)
        self._wake(pacing_at, self.recovery.get_loss_detection_time())

    def _send_one(self, now: float) -> None:
        number = next(self._number)
        packet = QuicSentPacket(
            epoch=Epoch.ONE_RTT,
            in_flight=True,
            is_ack_eliciting=True,
            is_crypto_packet=False,
            packet_number=number,
            packet_type=QuicPacketType.ONE_RTT,
            sent_time=now,
            sent_bytes=PACKET_BYTES,
        )
        self.recovery.on_packet_sent(packet=packet, space=self._space)
        self.line.carry(PACKET_BYTES, lambda: self._arrive(number))

    def _wake(self, *times: float | None) -> None:
        """One turn at the next of these moments: an earlier one that waits already does as well."""
        when = max(min((time for time in times if time is not None), default=float("inf")), self.line.now + 1e-6)
        if when < self._wakes_at_s:
            self._wakes_at_s = when
            self.line.at(when, lambda: self._woken(when))

    def _woken(self, when: float) -> None:
        if when == self._wakes_at_s:
            self._wakes_at_s = float("inf")
            self._send()

    def _arrive(self, number: int) -> None:
        self.received_bytes += PACKET_BYTES
        self.queue_seen.append(self.line.queued_bytes)
        self._arrived.add(number)
        while len(self._arrived) > _ACK_RANGES:
            self._arrived.shift()
        if not self._ack_pending:
            self._ack_pending = True
            self.line.at(self.line.now + self._ack_delay_s, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_pending = False
        ranges = RangeSet(list(self._arrived))
        self.line.answer(lambda: self._acknowledged(ranges))

    def _acknowledged(self, ranges: RangeSet) -> None:
        self.recovery.on_ack_received(
            ack_rangeset=ranges, ack_delay=self._ack_delay_s, now=self.line.now, space=self._space
        )
        self._send()
