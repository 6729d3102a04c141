"""Several devices of one owner: each is a member of the run, and to the owner they are one."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from node.compute.devices.choice import DeviceChoice
from node.measure.meter import Figures
from node.process.cards import Cards
from node.process.daemon import NodeOptions
from node.process.device_frames import Hello
from protocol.base.ids import NodeId
from protocol.base.machine import Told
from protocol.drive.addresses import OFF
from protocol.messages import News
from tests.node.process.test_daemon import link_of_a


class Card:
    """One device's life: it ends as it is told, or at once where `ends` says why, or raises that."""

    def __init__(self, ends: str | Exception = "", **facts: Any) -> None:
        self.ends = ends
        self.seen: list[Any] = []
        self.known = facts
        self.over = trio.Event()
        self.others_end: threading.Barrier | None = None

    def tell(self, fact: Told) -> None:
        self.seen.append(fact.what)
        self.ends = self.ends or f"suspended: {fact.what.partition(' ')[2]}"
        self.over.set()

    def end_device(self) -> None:
        self.seen.append("device ended")
        if self.others_end is not None:
            self.others_end.wait(10.0)

    def set_share(self, share: float) -> None:
        self.seen.append(share)

    def facts(self) -> dict[str, Any]:
        return self.known

    async def run(self) -> str:
        if not self.ends:
            await self.over.wait()
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends


def cards(*lives: Card) -> Cards:
    return Cards(lives, [f"cuda:{place}" for place in range(len(lives))])


def test_what_the_owner_says_is_said_to_all() -> None:
    """And devices end side by side: one whose driver hangs does not keep the next from being given back."""
    one, two = Card(), Card()
    one.others_end = two.others_end = threading.Barrier(2)
    both = cards(one, two)
    both.set_share(0.5)
    both.end_device()
    both.tell(Told("yield program"))
    assert one.seen == two.seen == [0.5, "device ended", "yield program"]


async def test_a_card_that_cannot_go_on_leaves_the_others_at_work() -> None:
    """It is named with its device and shown with its reason, and a pause later is a pause for the keeper, which begins
    all of them anew."""
    refused, works = Card("refused: this invite was for 1 node(s)", stage=-1), Card(stage=2, stages=4, busy=True)
    both = cards(refused, works)
    found: list[str] = []

    async def live() -> None:
        found.append(await both.run())

    with capture_logs() as said:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            await trio.testing.wait_all_tasks_blocked()
            assert not found and [card["ended"] for card in both.facts()["cards"]] == [refused.ends, ""]
            assert both.facts()["stage"] == 2 and both.facts()["busy"]
            both.tell(Told("suspend quota"))
    assert found == ["suspended: quota"]
    assert [(line["event"], line["device"]) for line in said] == [("one device has ended", "cuda:0")]


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (("finished", "finished"), "finished"),
        (("refused: banned", "drained"), "drained"),
        (("drained", "refused: banned"), "drained"),
        (("suspended: quota", "drained"), "suspended: quota"),
        (("refused: banned", "refused: banned"), "refused: banned"),
        (("stopped",), "stopped"),
    ],
)
async def test_one_reason_is_told_for_all(reasons: tuple[str, ...], why: str) -> None:
    """That of a pause, else that of a card which ended in peace: one of two that was refused is no failure of both."""
    assert await cards(*map(Card, reasons)).run() == why


async def test_what_ends_the_process_ends_all_cards_and_is_itself() -> None:
    """A journal that cannot be written is named by its own error, as where there is one device."""
    broken, works = Card(OSError("no journal")), Card()
    with pytest.raises(OSError, match="no journal"):
        await cards(broken, works).run()


def test_what_the_owner_is_shown_is_added_up() -> None:
    """Links and news; who works says where. What each gave stays apart: their counters begin anew one by one."""
    news = News(step=7, hour_ratio=0.25, step_tasks=3, thanks=b"one")
    one = Card(
        stage=-1, stages=4, waiting_for="a place", busy=False, totals={"tokens": 10.0}, paths={"tcp": 1},
        device=Hello(1, "an old card"), coordinator=False, news=news,
    )  # fmt: skip
    two = Card(
        stage=3, stages=4, waiting_for="", busy=True, totals={"tokens": 30.0}, paths={"tcp": 2, "quic": 1},
        device=None, coordinator=True, news=None,
    )  # fmt: skip
    both = cards(one, two)
    facts = both.facts()
    assert (facts["stage"], facts["busy"], facts["waiting_for"], facts["coordinator"]) == (3, True, "", True)
    assert facts["totals"] == [{"tokens": 10.0}, {"tokens": 30.0}] and facts["paths"] == {"tcp": 3, "quic": 1}
    assert facts["devices"] == [Hello(1, "an old card"), None] and facts["thanks"] == [b"one", None]
    assert [card["device"] for card in facts["cards"]] == ["cuda:0, an old card", "cuda:1"]
    assert facts["news"] is news and both.facts()["news"] is news
    two.known["news"] = News(step=8, hour_ratio=0.5, step_tasks=4, thanks=b"two")
    facts = both.facts()
    assert (facts["news"].step, facts["news"].hour_ratio, facts["news"].step_tasks) == (8, 0.75, 4)
    assert facts["thanks"] == [b"one", b"two"] and both.facts()["news"] is facts["news"], "nothing new was heard"
    one.known["news"] = News(step=8, hour_ratio=0.25, step_tasks=2)
    assert both.facts()["news"].step_tasks == 6
    assert cards(Card(), Card()).facts() == {}, "before there is a machine nothing is known"


def test_a_single_device_is_shown_without_a_list() -> None:
    """Nothing changes on the screens of the many who have one."""
    assert cards(Card(stage=1, stages=2)).facts()["cards"] == []


def test_each_device_has_a_folder_and_ports_of_its_own_and_all_share_the_line() -> None:
    """The first keeps what the computer had when it had one; a port or an address that was named is the first one's."""
    measured = ((NodeId("server"), "tcp", Figures(0.02, 8e6, 2e6, 100, True)),)
    options = NodeOptions(
        link=link_of_a("volunteer"),
        state=Path("home"),
        listen=(("*", 0), ("*", 443)),
        announce=("here.example:443",),
        metrics=("*", 9000),
        device=DeviceChoice("cuda"),
        tokens_per_s=100.0,
        further=((DeviceChoice("cuda", 1), 50.0),),
        measured=measured,
    )
    first, second = options.by_device()
    assert (first.state, second.state) == (Path("home"), Path("home/device-2"))
    assert (str(first.device), str(second.device)) == ("cuda:0", "cuda:1")
    assert (first.tokens_per_s, second.tokens_per_s) == (100.0, 50.0)
    assert first.listen == options.listen and first.announce == options.announce
    assert second.listen == (("*", 0),) and second.announce == ()
    assert (first.metrics, second.metrics) == (("*", 9000), ("*", 9001))
    for each in (first, second):
        ((_, _, figures),) = each.measured
        assert (figures.received_bytes_per_s, figures.sent_bytes_per_s, figures.round_trip_s) == (4e6, 1e6, 0.02)
    assert replace(options, metrics=OFF).by_device()[1].metrics == OFF
    assert replace(options, metrics=("*", 65535)).by_device()[1].metrics == ("*", 65535)
    assert replace(options, further=()).by_device() == [replace(options, further=())]
