"""What a node says of its links: a rate counts only when the line was full, and figures belong to a path."""

from __future__ import annotations

import pytest

from node.measure.linkbook import FULL_BYTES, LinkBook, Look
from node.measure.meter import Figures
from protocol.base.ids import NodeId

PEER = NodeId("p" * 52)


def look(sent: int = 0, queued: int = 0, received: int = 0, trip: float | None = None) -> Look:
    return Look(sent_bytes=sent, received_bytes=received, queued_bytes=queued, round_trip_s=trip)


def test_what_leaves_a_full_line_is_its_rate() -> None:
    """Three seconds with bytes waiting: their median is reported, with age and spread; an idle second says nothing."""
    book = LinkBook()
    book.up(PEER, "quic")
    for second, sent in enumerate((0, 1_000_000, 2_000_000, 2_900_000)):
        book.look(PEER, look(sent, FULL_BYTES, trip=0.05), float(second))
    book.look(PEER, look(2_900_010, 0), 4.0)
    book.look(PEER, look(2_900_020, 0), 5.0)
    report = book.report(10.0)
    assert report is not None
    [figures] = report.links
    assert (figures.peer, figures.path, figures.round_trip_s) == (PEER, "quic", -1.0)
    assert figures.sent_bytes_per_s == 1_000_000 and figures.received_bytes_per_s == 0
    assert figures.age_s == 7.0 and figures.spread == 0.0


def test_arrivals_only_raise_what_is_known() -> None:
    """A slow second is no news of the line; a faster one than was ever measured is."""
    book = LinkBook()
    book.up(PEER, "tcp")
    book.measured(PEER, Figures(0.02, 500_000.0, 100_000.0, 1, True), 0.0)
    book.look(PEER, look(received=0), 0.0)
    book.look(PEER, look(received=100_000), 1.0)
    report = book.report(1.0)
    assert report is not None and report.links[0].received_bytes_per_s == 500_000
    book.look(PEER, look(received=1_100_000), 2.0)
    report = book.report(2.0)
    assert report is not None and report.links[0].received_bytes_per_s == pytest.approx(750_000)
    assert report.links[0].round_trip_s == 0.02


def test_what_was_not_found_is_looked_for_again_less_and_less_often() -> None:
    """A measurement that missed a direction is repeated after 10 s, then 20, 40, …; one that found both never."""
    book = LinkBook()
    book.up(PEER, "tcp")
    assert book.due(1e9) == []  # not tried yet: the first is begun when the link opens
    times = []
    now = 0.0
    for _ in range(4):
        book.measured(PEER, Figures(0.02, 0.0, 100_000.0, 1, False), now)
        while not book.due(now):
            now += 1.0
        times.append(now)
    assert times == [10.0, 30.0, 70.0, 150.0]
    book.measured(PEER, Figures(0.02, 500_000.0, 100_000.0, 1, True), now)
    assert book.due(1e9) == []


def test_figures_belong_to_a_path() -> None:
    """The same way again keeps them, another way begins anew; a lost link is not reported."""
    book = LinkBook()
    book.up(PEER, "relay")
    book.measured(PEER, Figures(0.02, 500_000.0, 100_000.0, 1, True), 0.0)
    book.down(PEER)
    assert book.report(1.0) is None
    assert book.up(PEER, "relay").measured
    assert not book.up(PEER, "quic").measured
    report = book.report(1.0)
    assert report is not None and report.links[0].sent_bytes_per_s == 0
