"""Several devices of one owner: each is a member of the run, and to the owner they are one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from node.compute.devices.choice import DeviceChoice
from node.measure.meter import Figures
from node.process.cards import AGAIN_S, Cards
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
        self.again: Card | None = None
        """The life after this one."""

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


def cards(*lives: Card, leads: Callable[[], bool] = lambda: True) -> Cards:
    """With these lives at the first, and fresh ones after them."""
    first = list(lives)

    def make(place: int) -> Card:
        if len(lives) - len(first) == place:
            return first.pop(0)
        fresh = lives[place].again = Card(**lives[place].known)
        return fresh

    return Cards(make, [f"cuda:{place}" for place in range(len(lives))], leads)


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
    all of them anew. Nothing of what it last said counts as present: its machine stands still with a stage, a link to
    the coordinator and a lease."""
    stale = News(step=100, hour_ratio=0.5)
    refused = Card("refused: this invite was for 1 node(s)", stage=3, busy=True, coordinator=True, news=stale)
    works = Card(stage=2, stages=4, waiting_for="work", news=News(step=60, hour_ratio=0.25), paths={"tcp": 1})
    both = cards(refused, works)
    found: list[str] = []

    async def live() -> None:
        found.append(await both.run())

    with capture_logs() as said:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            await trio.testing.wait_all_tasks_blocked()
            assert not found and [card["ended"] for card in both.facts()["cards"]] == [refused.ends, ""]
            facts = both.facts()
            assert (facts["stage"], facts["busy"], facts["coordinator"], facts["waiting_for"]) == (
                2,
                False,
                False,
                "work",
            )
            assert (facts["news"].step, facts["news"].hour_ratio) == (60, 0.25)
            both.end_device()
            assert refused.seen == [] and works.seen == ["device ended"]
            both.tell(Told("suspend quota"))
    assert found == ["suspended: quota"]
    assert [(line["event"], line["log_level"]) for line in said] == [("one device has ended", "warning")]


async def test_a_card_that_failed_is_begun_again_beside_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """With one device the process ended, and the service's manager began it anew; beside another that works nobody did.
    It works as much of the time then as the owner has said meanwhile."""
    lost, works = Card("failed: the device was lost 4 times in ten minutes"), Card(busy=True)
    both = cards(lost, works)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(both.run)
        await trio.sleep(AGAIN_S - 1.0)
        both.set_share(0.5)
        assert lost.again is None and lost.seen == []
        await trio.sleep(2.0)
        assert lost.again is not None and lost.again.seen == [0.5] and not both.facts()["cards"][0]["ended"]
        both.tell(Told("drain"))


async def test_nothing_is_begun_again_when_all_have_ended_or_shall_end(autojump_clock: trio.testing.MockClock) -> None:
    """The owner's word, and the end of the others, end the waiting for a card that failed."""
    for word in ("drain", ""):
        lost, works = Card("failed: no device"), Card("" if word else "refused: banned")
        both = cards(lost, works)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.run)
            await trio.sleep(1.0)
            if word:
                both.tell(Told(word))
        assert trio.current_time() < AGAIN_S and lost.again is None


async def test_the_end_of_the_run_is_told_to_all(autojump_clock: trio.testing.MockClock) -> None:
    """A card whose link was down at that moment would have kept the process for ever."""
    away = Card()
    assert await cards(Card("finished"), away).run() in ("finished", "suspended: ")
    assert away.seen == ["drain"]


async def test_the_first_card_joins_before_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """An invite with one use is that one's: whoever lends it alone later comes by its membership. Where it is refused,
    the others need not wait."""
    member = False
    one, two = Card(), Card("drained")
    both = cards(one, two, leads=lambda: member)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(both.run)
        await trio.sleep(60.0)
        assert not both.facts() and both._reasons == ["", ""]
        member = True
        await trio.sleep(1.0)
        assert both._reasons == ["", "drained"]
        both.tell(Told("drain"))
    assert await cards(Card("refused: banned"), Card("drained"), leads=lambda: False).run() == "drained"


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (("finished", "finished"), "finished"),
        (("refused: banned", "drained"), "drained"),
        (("drained", "refused: banned"), "drained"),
        (("drain time is over", "refused: banned"), "drain time is over"),
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
    assert second.listen == (("*", 0),) and second.announce == (), "`--map-port` finds a socket there, too"
    assert (first.metrics, second.metrics) == (("*", 9000), ("*", 9001))
    for each in (first, second):
        ((_, _, figures),) = each.measured
        assert (figures.received_bytes_per_s, figures.sent_bytes_per_s, figures.round_trip_s) == (4e6, 1e6, 0.02)
    assert replace(options, metrics=OFF).by_device()[1].metrics == OFF
    assert replace(options, metrics=("*", 65535)).by_device()[1].metrics == ("*", 65535)
    assert replace(options, further=()).by_device() == [replace(options, further=())]
