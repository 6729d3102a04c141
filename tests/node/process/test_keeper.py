"""The keeper's lives: each begins when nothing holds it back, and none begins only to be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from structlog.testing import capture_logs

from node.owner.governor import Moment, Readings
from node.process.keeper import Keeper
from node.process.metrics import NodeMetrics
from node.process.pauses import clock_words
from protocol.base.machine import Told
from protocol.drive.limits import Limits, QuotaUsedUpError
from protocol.messages import News

QUOTA_BYTES = 100_000
WRITE_BYTES = 5000


class Sensors:
    """A computer that nobody uses, whose clock goes on by itself."""

    gpu = False

    def read(self) -> Readings:
        return Readings()

    def moment(self) -> Moment:
        return Moment(trio.current_time(), 1.8e9, 0)

    def device_is(self, accelerator: bool, gpus: Sequence[str]) -> None: ...

    def describe(self) -> dict[str, str]:
        return {}


class SendingLife:
    """A node that sends until its line refuses, and then leaves as the daemon does."""

    def __init__(self, line: Limits) -> None:
        self._line = line
        self.told: list[str] = []

    def tell(self, fact: Told) -> None:
        self.told.append(fact.what)

    def end_device(self) -> None: ...

    def set_share(self, share: float) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}

    async def run(self) -> str:
        try:
            while True:
                await self._line.take_up(WRITE_BYTES)
                await trio.lowlevel.checkpoint()
        except QuotaUsedUpError:
            return "suspended: quota"


def keeper_of(
    folder: Path,
    line: Limits,
    overrides: dict[str, str] | None = None,
    sensors: Sensors | None = None,
    not_yet: Callable[[], None] = lambda: None,
) -> Keeper:
    """A volunteer's keeper, with nothing of its owner's but these."""
    return Keeper(
        state=folder,
        settings=folder / "limits.toml",
        overrides=overrides or {},
        sensors=sensors or Sensors(),
        line=line,
        metrics=[NodeMetrics("volunteer")],
        run_name=lambda: "lent",
        not_yet=not_yet,
    )


@pytest.mark.slow
async def test_a_quota_that_refuses_a_write_ends_the_lives_until_it_is_raised(tmp_path: Path) -> None:
    """4 % are left, too little for a write: it pauses for the quota, says so, and does not begin anew with a device
    that nobody may speak to. (It did, again and again; the screens said that it worked.) A greater one goes on."""
    line, lives = Limits(), []
    line.set_quota(QUOTA_BYTES, tmp_path)
    line.spend_up(QUOTA_BYTES - WRITE_BYTES + 1000)
    keeper = keeper_of(tmp_path, line, {"quota": "0.1 MB"})

    def make(_: object) -> SendingLife:
        lives.append(SendingLife(line))
        return lives[-1]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.watch)
        nursery.start_soon(keeper.live, make)
        with trio.fail_after(60.0):
            while not (lives and keeper.decision.reason):
                await trio.sleep(0.01)
            for _ in range(5):
                await keeper._next_change()
            assert len(lives) == 1
            status = keeper.status()
            assert (status["state"], status["reason"], status["device"]["free"]) == ("paused", "quota", True)
            keeper.order({"verb": "limits", "values": {"quota": "0.2 MB"}})
            while len(lives) < 2 or not keeper.decision.reason:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    line.close()


class WaitingLife(SendingLife):
    """A node that holds a place in a stage, and has work only when it is told so."""

    busy = False

    def facts(self) -> dict[str, Any]:
        return {"stage": 0, "busy": self.busy, "coordinator": True}

    async def run(self) -> str:
        await trio.sleep_forever()
        raise AssertionError("unreachable")


class PlacelessLife(WaitingLife):
    """A node that has joined and waits for a place."""

    stage = -1

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "stage": self.stage}


async def test_who_has_no_place_yet_does_not_say_that_it_works(tmp_path: Path) -> None:
    """`resume` said WORKING while the device's process had not even begun."""
    line = Limits()
    keeper = keeper_of(tmp_path, line)
    keeper.order({"verb": "pause"})
    resumed = keeper.order({"verb": "resume"})
    assert (resumed["state"], resumed["sentence"]) == ("waiting", "waiting for a place in the run")
    life = PlacelessLife(line)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.watch)
        nursery.start_soon(keeper.live, lambda _: life)
        with trio.fail_after(60.0):
            while keeper.status()["device"]["free"]:
                await trio.sleep(0.01)
            status = keeper.status()
            assert (status["state"], status["reason"]) == ("waiting", "no_work")
            life.stage = 0
            assert keeper.status()["state"] == "working"
        nursery.cancel_scope.cancel()
    line.close()


@pytest.mark.parametrize("paused", [True, False])
async def test_who_may_not_begin_at_once_keeps_nothing_ready(tmp_path: Path, paused: bool) -> None:
    """A device's process that was loaded ahead goes before a pause is waited out: while it lasts nothing runs here."""
    line, said = Limits(), list[str]()
    keeper = keeper_of(tmp_path, line, not_yet=lambda: said.append("not yet"))
    if paused:
        keeper.order({"verb": "pause"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.watch)
        nursery.start_soon(keeper.live, lambda _: WaitingLife(line))
        with trio.fail_after(60.0):
            while not said and keeper.status()["state"] != "working":
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert said == ["not yet"] * paused
    line.close()


async def test_time_without_work_is_not_counted_as_work(tmp_path: Path) -> None:
    """A page showed 21 minutes of work beside no task at all, and the run's thanks said 0 minutes of the same visit."""
    line = Limits()
    keeper = keeper_of(tmp_path, line)
    life = WaitingLife(line)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.watch)
        nursery.start_soon(keeper.live, lambda _: life)
        with trio.fail_after(60.0):
            while keeper.status()["state"] != "working":
                await trio.sleep(0.01)
            for _ in range(3):
                await keeper._next_change()
            assert keeper.tally.visit.working_s == 0.0
            life.busy = True
            while not keeper.tally.visit.working_s:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    line.close()


async def test_a_yes_can_be_taken_back_during_a_pause(tmp_path: Path) -> None:
    """`leave --for-good` and the page's button said that the yes was taken back; it was kept where no life was there to
    end: the next start asked nothing. Without `--for-good` it ends as ever."""
    for for_good, ends in ((True, "left"), (False, "drained")):
        line = Limits()
        keeper = keeper_of(tmp_path, line)
        keeper.order({"verb": "pause"})
        keeper.order({"verb": "leave", "for_good": for_good})
        with trio.fail_after(60.0):
            assert await keeper.live(lambda _: WaitingLife(Limits())) == ends
        line.close()


class DrainedLife(WaitingLife):
    """It calls its end drained, also where the device was ended under it."""

    def __init__(self, line: Limits) -> None:
        super().__init__(line)
        self.words: list[str] = []
        self._over = trio.Event()

    def tell(self, fact: Told) -> None:
        self.words.append(fact.what)

    def end_device(self) -> None:
        self._over.set()

    async def run(self) -> str:
        await self._over.wait()
        return "drained"


async def test_a_second_ctrl_c_does_not_say_that_what_was_begun_is_finished(tmp_path: Path) -> None:
    """It ended the device in the middle of its work and said "drained" all the same."""
    line, lives = Limits(), []
    keeper = keeper_of(tmp_path, line)

    def make(_: Any) -> DrainedLife:
        lives.append(DrainedLife(line))
        return lives[-1]

    ends: list[str] = []

    async def live() -> None:
        ends.append(await keeper.live(make))

    with trio.fail_after(60.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            await trio.testing.wait_all_tasks_blocked()
            keeper.told(Told("drain"))
            keeper.told(Told("stop"))
    assert ends == ["stopped"] and lives[0].words == ["drain", "stop"]
    line.close()


async def test_an_everyday_pause_is_no_warning(tmp_path: Path) -> None:
    """`WARNING: holding back` stood before the pause that its owner had just asked for; a short disk is one."""
    line = Limits()
    keeper = keeper_of(tmp_path, line)
    assert keeper.thanks() == "Thank you. This visit: no task yet."
    keeper.order({"verb": "resume"})
    with capture_logs() as seen:
        keeper._log = structlog.get_logger("owner")
        keeper.order({"verb": "pause"})
        keeper.order({"verb": "resume"})
        keeper._look(Readings(disk_free_bytes=1e7), keeper._sensors.moment())
    held = [(entry["log_level"], entry["reason"]) for entry in seen if entry["event"] == "holding back"]
    assert held == [("info", "user"), ("warning", "disk")]
    line.close()


async def test_a_pause_from_before_the_start_is_told(tmp_path: Path) -> None:
    """Whoever paused while `join` asked, and then said yes, read nothing there but a folder and two addresses."""
    line = Limits()
    keeper_of(tmp_path, line).order({"verb": "pause"})
    keeper = keeper_of(tmp_path, line)
    with capture_logs() as seen:
        keeper._log = structlog.get_logger("owner")
        for _ in range(2):
            keeper._look(Readings(), keeper._sensors.moment())
    assert [(entry["event"], entry["reason"]) for entry in seen] == [("holding back", "user")]
    line.close()


async def test_the_first_ctrl_c_is_answered(tmp_path: Path) -> None:
    """Nothing was said until all was finished, so it looked as if nobody had heard it; nor when a second one counts."""
    line = Limits()
    keeper = keeper_of(tmp_path, line)
    with capture_logs() as seen, trio.fail_after(60.0):
        keeper._log = structlog.get_logger("owner")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.live, lambda _: DrainedLife(line))
            await trio.testing.wait_all_tasks_blocked()
            for what in ("drain", "drain", "stop"):
                keeper.told(Told(what))
    assert [entry["detail"] for entry in seen if entry["event"] == "leaving"] == [
        "finishing what was begun; Ctrl-C again ends at once"
    ]
    line.close()


class OrphanedLife(WaitingLife):
    """A node whose coordinator is away, with tasks that the servers give it all the same, each soon done."""

    tokens = 0.0

    def facts(self) -> dict[str, Any]:
        return {"stage": 0, "busy": self.busy, "coordinator": False, "totals": [{"tokens": self.tokens}]}


async def test_who_works_without_the_coordinator_does_not_wait_for_it(tmp_path: Path) -> None:
    """Between two tasks the screens said WAITING, and the metrics that this computer was held back, while it gave as
    much as ever. Who gets no work any more waits for the coordinator."""
    line = Limits()
    keeper = keeper_of(tmp_path, line)
    life = OrphanedLife(line)
    keeper.order({"verb": "resume"})
    keeper._life = life

    def after(seconds: float, tokens: float) -> tuple[str, str]:
        life.tokens = tokens
        keeper._look(Readings(), replace(keeper._moment, now_s=keeper._moment.now_s + seconds))
        status = keeper.status()
        return status["state"], status["reason"]

    assert after(4.0, 0.0) == ("working", "")
    assert after(7.0, 0.0) == ("waiting", "coordinator")
    assert after(1.0, 64.0) == ("working", "")
    assert after(4.0, 64.0) == ("working", "")
    assert after(2.0, 64.0) == ("waiting", "coordinator")
    line.close()


class TellingLife(WaitingLife):
    """A node that works, and whose coordinator tells how the run goes as long as it is there."""

    def __init__(self, line: Limits) -> None:
        super().__init__(line)
        self.there, self.news = True, News(step=9, hour_ratio=0.5)

    def facts(self) -> dict[str, Any]:
        return {"stage": 0, "busy": True, "coordinator": self.there, "news": self.news}


class ClockSensors(Sensors):
    """A computer whose clock the test sets."""

    now_s = 1000.0

    def moment(self) -> Moment:
        return Moment(self.now_s, 1.8e9 + self.now_s, 0)


def look(keeper: Keeper, sensors: ClockSensors, seconds: float) -> None:
    sensors.now_s += seconds
    keeper._look(sensors.read(), sensors.moment())


async def test_news_of_the_run_have_their_time_when_no_new_ones_come(tmp_path: Path) -> None:
    """The coordinator is gone, or has said nothing for three times as long as it should: each number of the run is told
    with the time at which it was heard. (Steps and loss of hours ago stood there as if they were of now.)"""
    sensors = ClockSensors()
    keeper = keeper_of(tmp_path, Limits(), sensors=sensors)
    life = keeper._life = TellingLife(Limits())
    look(keeper, sensors, 0.0)
    look(keeper, sensors, 60.0)
    assert keeper.status()["news"]["as_of"] == ""
    told = clock_words(1.8e9 + 1000.0, 1.8e9)
    look(keeper, sensors, 31.0)
    assert keeper.status()["news"]["as_of"] == told
    assert f"50.0 % of the hour before {told}" in keeper.thanks()
    life.news = News(step=10)
    look(keeper, sensors, 1.0)
    assert keeper.status()["news"]["as_of"] == ""
    life.there = False
    assert keeper.status()["news"]["as_of"] == clock_words(1.8e9 + 1092.0, 1.8e9)
    keeper._ending = "drained"
    assert keeper.status()["news"]["as_of"] == "", "the coordinator's last word came just before its link ended"
    look(keeper, sensors, 91.0)
    assert keeper.status()["news"]["as_of"] != "", "it had gone long before"


async def test_sleep_is_no_work(tmp_path: Path) -> None:
    """A computer that was suspended with work in its hands has worked until then, and from then on."""
    sensors = ClockSensors()
    keeper = keeper_of(tmp_path, Limits(), sensors=sensors)
    keeper._life = TellingLife(Limits())
    for seconds in (0.0, 0.5, 0.5, 3600.0, 0.5):
        look(keeper, sensors, seconds)
    assert keeper.tally.visit.working_s == 1.5
