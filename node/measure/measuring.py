"""Performs what `node.measure.meter` orders, and looks at the links' counters: the driver of measuring.

Every measuring byte goes through the link like any other, so it is counted and limited like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from node.measure.linkbook import REPORT_S, SAMPLE_S, LinkBook, Look
from node.measure.meter import MEASURES, Done, Figures, Meter, Order, Say
from protocol.base.ids import NodeId
from protocol.base.limits import MEASURE_PIECE_BYTES, MEASURE_S
from protocol.drive.link import Link
from protocol.messages import LinkReport, MeasureData, Message

REST_S = 0.01
"""Between two looks at what is due, however much happens."""
FORGET_S = 60.0
"""Between two sweeps over the budgets of peers that measured us."""


class Watch(Protocol):
    """What the owner is told."""

    def refuse(self, link: Link, detail: str) -> None:
        """The peer measures without bound."""

    def round_trip(self, path: str, seconds: float) -> None:
        """A round trip of a link, for the metrics."""


class Measuring:
    """All links of one process and what is known of them.

    Args:
        chooses: whether the link to this peer is ours to measure (one end is enough).
        report: what to do with the report of all links, every REPORT_S.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        chooses: Callable[[Link], bool] = lambda link: False,
        report: Callable[[LinkReport], None] = lambda report: None,
        known: Iterable[tuple[NodeId, str, Figures]] = (),
    ) -> None:
        """`known`: (peer, path, figures) of measurements that were made before, so that they are not made again."""
        self.book = LinkBook()
        self._watch = watch
        self._chooses = chooses
        self._report = report
        self._meter = Meter()
        self._links: dict[NodeId, Link] = {}
        self._waiting: dict[NodeId, list[trio.Event]] = {}
        self._found: dict[NodeId, Figures | None] = {}
        self._noise = os.urandom(MEASURE_PIECE_BYTES)
        self._more = trio.Event()
        now = trio.current_time()
        for peer, path, figures in known:
            self.book.up(peer, path)
            self.book.measured(peer, figures, now)
            self.book.down(peer)

    # ---- what the owner of the links tells -----------------------------------------------------------------------

    def up(self, link: Link) -> None:
        """A link is open."""
        if link.role == "coordinator":
            return
        known = self.book.up(link.peer, link.path)
        self._links[link.peer] = link
        if not known.measured and self._chooses(link):
            self._do(self._meter.begin(link.peer, trio.current_time()))

    def down(self, link: Link) -> None:
        """A link is gone."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self.book.down(link.peer)
            self._do(self._meter.link_down(link.peer, trio.current_time()))

    def take(self, link: Link, message: Message) -> bool:
        """Whether the message was about measuring; then it has been seen to."""
        if not isinstance(message, MEASURES):
            return False
        if self._links.get(link.peer) is link:
            self._do(self._meter.received(link.peer, message, trio.current_time()))
        return True

    # ---- what others ask for -------------------------------------------------------------------------------------

    async def measure(self, link: Link, duration_s: float = MEASURE_S) -> Figures | None:
        """Measures an open link now; None when it was lost or nothing was answered. Ends within the bound."""
        done = trio.Event()
        self._waiting.setdefault(link.peer, []).append(done)
        self._do(self._meter.begin(link.peer, trio.current_time(), duration_s))
        await done.wait()
        return self._found.get(link.peer)

    async def run(self) -> None:
        """Wakes the meter, looks at the counters, reports. Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wake)
            nursery.start_soon(self._look)

    async def _wake(self) -> None:
        while True:
            wake_at = self._meter.wake_at()
            with trio.move_on_at(float("inf") if wake_at is None else wake_at):
                await self._more.wait()
            self._do(self._meter.wake(trio.current_time()))
            # Only now: what was just done is no news, and a loop that woke itself would never rest.
            self._more = trio.Event()
            await trio.sleep(REST_S)

    async def _look(self) -> None:
        report_at = trio.current_time() + REPORT_S / 2
        forget_at = trio.current_time() + FORGET_S
        while True:
            await trio.sleep(SAMPLE_S)
            now = trio.current_time()
            for link in list(self._links.values()):
                self._notice_path(link)
                look = Look(link.sent_bytes, link.received_bytes, link.queued_bytes, link.round_trip_s, link.loss)
                self.book.look(link.peer, look, now)
            for peer in self.book.due(now):
                if self._chooses(self._links[peer]):
                    self._do(self._meter.begin(peer, now))
            if now >= report_at:
                report_at = now + REPORT_S
                self._tell(now)
            if now >= forget_at:
                forget_at = now + FORGET_S
                self._meter.forget_full(now)

    def _notice_path(self, link: Link) -> None:
        """A link may take another way while it lives: its figures are others then."""
        known = self.book.get(link.peer)
        if known is not None and known.path != link.path:
            self.up(link)

    def _tell(self, now: float) -> None:
        report = self.book.report(now)
        if report is None:
            return
        for figures in report.links:
            if figures.round_trip_s >= 0:
                self._watch.round_trip(figures.path, figures.round_trip_s)
        self._report(report)

    def _do(self, orders: list[Order]) -> None:
        for order in orders:
            link = self._links.get(order.peer)
            if isinstance(order, Done):
                self._found[order.peer] = order.figures
                self.book.measured(order.peer, order.figures, trio.current_time())
                for done in self._waiting.pop(order.peer, ()):
                    done.set()
                if not self._meter.busy:
                    self._tell(trio.current_time())
            elif link is None:
                continue
            elif isinstance(order, Say):
                data: tuple[memoryview, ...] = ()
                if isinstance(order.message, MeasureData):
                    data = tuple(memoryview(self._noise)[: ref.byte_count] for ref in order.message.tensors)
                link.send(order.message, data)
            else:
                self._watch.refuse(link, order.detail)
        self._more.set()
