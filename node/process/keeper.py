"""Keeps to the owner's limits: looks at the sensors, asks the governor, and lets the node live only while it may work.

    sensors ─▶ Governor ─▶ Decision ─┬─▶ the node's life: yield (the device ends now), suspend (finish first)
    control socket, page, signals ───┘   metrics, status, the page

A life is one membership of the node's machine in the run. A pause ends it, and the device's process with it, so that
nothing of the run is left on the computer but this loop; a resume begins another.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import structlog
import trio

from node.owner.governor import Decision, Governor, Moment, Readings, until_words
from node.owner.limits import OwnerLimits, read_limits, shown, with_values, write_limits
from node.owner.tally import Tally, as_dict, in_words, part_in_words
from node.owner.thanks import ThanksShelf
from node.owner.update import update_words
from node.owner.words import FINISHED, LEAVING
from node.platform.notify import notify
from node.platform.sensors import Sensors
from node.process.device_frames import Hello
from node.process.metrics import NodeMetrics
from node.process.pauses import clock_words, keep_pause, kept_pause, pause_seconds, write_whole
from protocol.base.errors import BadInputError
from protocol.base.machine import Told
from protocol.drive.limits import Limits
from protocol.messages import News

BUILD = f"barnraise-{version('barnraise')}"
LOOK_S = 0.3
"""Between two looks at the sensors: a game is seen within this, and has the device within a second."""
SAVE_S = 60.0
TALLY_FILE = "given.json"
COORDINATOR_GONE_S = 10.0
NEWS_OLD_S = 90.0
"""The coordinator tells each half minute how the run goes: what is older is shown with the time when it was told."""
LAST_WORD_S = 2.0
LAST_WORD_LOOK_S = 0.05
AWAKE_S = 5.0
"""A gap between two looks that is longer is no time of work: the computer slept, or this process was stopped."""
PAUSE_IN_WORK_S = 5.0
"""Between two tasks a device often has a moment to breathe: that is not called waiting."""


EVERY_DAY = frozenset({"user", "program", "user_active", "battery", "metered", "schedule"})
"""Pauses that an owner asked for or lives with; the others tell of something that runs short or hot."""


class Life(Protocol):
    """What the keeper may do to the node while it lives, with all the devices that it works on."""

    def tell(self, fact: Told) -> None: ...

    def end_device(self) -> None: ...

    def set_share(self, share: float) -> None: ...

    def facts(self) -> dict[str, Any]:
        """For screens, as far as they are known: stage, stages, waiting_for, busy, totals (of each device), paths,
        devices (their `Hello`s), coordinator, news, thanks (as signed, of each device), cards (their lines)."""

    async def run(self) -> str: ...


class Keeper:
    """One for each volunteer's process.

    Args:
        settings: the owner's file of limits, read again whenever it changes.
        overrides: limits of the command line, for this process alone.
        metrics: of each device's member of the run.
        thanks: what the coordinator signs for each.
        not_yet: called when the first life may not begin at once.
    """

    def __init__(
        self,
        *,
        state: Path,
        settings: Path,
        overrides: dict[str, str],
        sensors: Sensors,
        line: Limits,
        metrics: Sequence[NodeMetrics],
        run_name: Callable[[], str],
        thanks: ThanksShelf | None = None,
        not_yet: Callable[[], None] = lambda: None,
    ) -> None:
        self._thanks = thanks or ThanksShelf()
        self._not_yet = not_yet
        self._devices: dict[int, Hello] = {}
        """What each has said it is, by its place; also of one whose process does not run now."""
        self.news: News | None = None
        """What the run's coordinator told last."""
        self._news_at: Moment | None = None
        self.update = ""
        """That the run has a newer Barnraise, in words."""
        self._state = state
        self._settings = settings
        self._overrides = overrides
        self._sensors = sensors
        self._line = line
        self._metrics = metrics
        self._run_name = run_name
        self._log = structlog.get_logger("owner")
        self._settings_seen: tuple[int, int, int] | None = None
        self._read_once = False
        self.complaint = ""
        """What is wrong with the owner's file, which therefore does not count."""
        self._governor = Governor(OwnerLimits(), sensors.gpu, kept_pause(state))
        self.tally = self._kept_tally()
        self.decision = self._beginning = Decision(works=False, reason="user", sentence="it has only just begun")
        self.readings = Readings()
        self._moment = sensors.moment()
        self._coordinator_at_s = self._moment.now_s
        self._worked_at_s = float("-inf")
        self._life: Life | None = None
        self._ending = ""
        """The owner wants the process to end: drained, stopped or left."""
        self._changed = trio.Event()
        self._saved_s = float("-inf")
        self._reason_shown = ""
        self._moved_bytes = 0
        self.bytes_per_s = 0.0
        self._leaving_for_good = False
        self.over = trio.Event()
        """No further life begins: what is shown now is the last word."""
        self._watchers = 0
        self._read_settings()

    # ---- lives ---------------------------------------------------------------------------------------------------

    async def live(self, make: Callable[[OwnerLimits], Life]) -> str:
        """Lives of the node with pauses in between; returns why it ended."""
        self._look(self._sensors.read(), self._sensors.moment())
        while True:
            if not self.decision.works:
                self._not_yet()
            while not self.decision.works and not self._ending:
                await self._next_change()
            if self._ending:
                return self._end_of(self._ending)
            self._line.renew()
            self.tally.begin_life()
            self._worked_at_s = float("-inf")  # the device starts anew: until it works, that is no work
            self._life = make(self.limits)
            self._life.set_share(self.decision.share)
            try:
                reason = await self._life.run()
            finally:
                self._count(0.0, self._moment)  # its last words
                self._life = None
            if not reason.startswith("suspended: "):
                self._ending = self._ending or reason
                return self._end_of(reason)
            why = self.decision.reason or reason.removeprefix("suspended: ")
            self._log.info("paused", reason=why, detail="nothing runs here; the device's memory is free")
            if self.decision.works:
                await trio.sleep(LOOK_S)  # the line knows of its quota before the governor does, which looks meanwhile

    def _end_of(self, reason: str) -> str:
        """Why it ended: `left` where its owner took the yes back, also while it was paused and nothing lived; `stopped`
        where it was told so again: its device was ended under what was begun, and a life without work calls that
        drained."""
        if self._ending == "stopped" and reason == "drained":
            reason = "stopped"
        return "left" if self._leaving_for_good and reason in ("drained", "stopped") else reason

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody looks at what this keeper shows for as long as this lasts."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    async def say_last(self) -> None:
        """Gives whoever looks the last word, and the time to take it."""
        self.over.set()
        with trio.move_on_after(LAST_WORD_S):
            while self._watchers:
                await trio.sleep(LAST_WORD_LOOK_S)

    async def watch(self) -> None:
        """Looks at the sensors until cancelled. What takes time is done in a thread."""
        while True:
            self._read_settings()
            readings = await trio.to_thread.run_sync(self._sensors.read)
            self._look(readings, self._sensors.moment())
            await trio.sleep(LOOK_S)

    def _look(self, readings: Readings, moment: Moment) -> None:
        """What the line says of the quota is always taken from now, also when an order makes us look once more."""
        readings = replace(readings, quota_has_room=self._line.has_room)
        before, gap_s = self.decision, max(0.0, moment.now_s - self._moment.now_s)
        passed_s = gap_s if gap_s <= AWAKE_S else 0.0
        self.readings, self._moment = readings, moment
        decision = self.decision = self._governor.look(readings, moment)
        if self._governor.slept_s:
            self._log.warning("woke up", slept_s=round(self._governor.slept_s))
        self._line.set_rates(decision.up_bytes_per_s, decision.down_bytes_per_s)
        self._act(before, decision)
        self._count(passed_s, moment)
        self._show(passed_s)
        # a pause that was asked for before the start has the same reason as the beginning, and is told all the same
        if before is self._beginning or (before.works, before.reason) != (decision.works, decision.reason):
            self._tell_change(before, decision)
        notify("WATCHDOG=1", f"STATUS={self.why()[1] or 'working'}")
        self._changed.set()
        self._changed = trio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _act(self, before: Decision, decision: Decision) -> None:
        """The present life hears what it must do; said again only when it becomes more urgent."""
        life = self._life
        if life is None:
            return
        if decision.works:
            life.set_share(decision.share)
            return
        if decision.at_once and (before.works or not before.at_once):
            life.end_device()
            life.tell(Told(f"yield {decision.reason}"))
        elif before.works:
            life.tell(Told(f"suspend {decision.reason}"))

    def _tell_change(self, before: Decision, decision: Decision) -> None:
        if decision.works and before is self._beginning:
            self._log.info("nothing holds this computer back")
        elif decision.works:
            self._log.info("resumed", after=before.reason)
        else:
            tell = self._log.info if decision.reason in EVERY_DAY else self._log.warning
            tell("holding back", reason=decision.reason, detail=self.sentence())

    # ---- the owner -----------------------------------------------------------------------------------------------

    def told(self, fact: Told) -> None:
        """A signal: the first ends the process when what was begun is finished, the next ends it at once."""
        if not self._ending and self._life is not None and fact.what == "drain":
            self._log.info("leaving", detail="finishing what was begun; Ctrl-C again ends at once")
        if self._ending in ("", "drained"):
            self._ending = "drained" if fact.what == "drain" else "stopped"
        if self._life is not None:
            if fact.what == "stop":
                self._life.end_device()
            self._life.tell(fact)
        self._changed.set()

    def order(self, order: dict[str, Any]) -> dict[str, Any]:
        """One order of the control socket or the page, and the answer. Raises `BadInputError`."""
        verb = order.get("verb")
        if verb == "pause":
            self._governor.pause(self._moment, pause_seconds(order.get("for_s")))
        elif verb == "finish":
            self._governor.pause(self._moment, finish=True)
        elif verb == "resume":
            self._governor.resume()
        elif verb == "leave":
            self._leaving_for_good = bool(order.get("for_good"))
            self.told(Told("drain"))
            return self.status()
        elif verb == "limits":
            self._set_limits(order.get("values") or {})
        elif verb != "status":
            raise BadInputError(f"there is no order {verb!r}")
        if verb in ("pause", "finish", "resume"):
            keep_pause(self._state, self._governor.user)
        if verb != "status":
            moment = self._sensors.moment()
            self._look(self.readings, moment)
        return self.status()

    def _set_limits(self, values: object) -> None:
        if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
            raise BadInputError("limits: a name and a text for each")
        write_limits(self._settings, with_values(read_limits(self._settings), values))
        for name in values:
            self._overrides.pop(str(name).lower().replace("_", "-"), None)
        self._read_settings()

    def _read_settings(self) -> None:
        """The owner's file, when it has changed. One that cannot be used counts for nothing, and is named."""
        try:
            about = self._settings.stat()
            # A file that was put in its place within one tick of the disk's clock is another one by its number.
            seen: tuple[int, int, int] | None = (about.st_mtime_ns, about.st_size, about.st_ino)
        except OSError:
            seen = None
        if seen == self._settings_seen and self._read_once:
            return
        self._settings_seen, self._read_once = seen, True
        try:
            limits = with_values(read_limits(self._settings), self._overrides)
            self._line.set_quota(limits.quota_bytes, self._state)
        except BadInputError as error:
            self.complaint = str(error)
            self._log.error("limits cannot be used; those from before hold", detail=self.complaint)
            return
        self.complaint = ""
        self._governor.limits = limits

    @property
    def limits(self) -> OwnerLimits:
        return self._governor.limits

    # ---- what is kept --------------------------------------------------------------------------------------------

    def _kept_tally(self) -> Tally:
        path = self._state / TALLY_FILE
        try:
            return Tally.from_json(path.read_bytes())
        except FileNotFoundError:
            return Tally()
        except (OSError, ValueError) as error:
            self._log.warning("the record of what you gave cannot be read", detail=str(error))
            with suppress(OSError):
                path.rename(path.with_suffix(".damaged"))
            return Tally()

    def save(self) -> None:
        write_whole(self._state, TALLY_FILE, self.tally.to_json())
        self._keep_thanks()

    def _keep_thanks(self) -> None:
        try:
            self._thanks.save()
        except OSError as error:
            self._log.warning("cannot be kept", file="thanks.json", reason=error.strerror)

    # ---- what is shown -------------------------------------------------------------------------------------------

    def _day(self) -> str:
        return datetime.fromtimestamp(self._moment.unix_s).strftime("%Y-%m-%d")

    def _count(self, passed_s: float, moment: Moment) -> None:
        facts = self._life.facts() if self._life is not None else {}
        if self._life is None or facts.get("coordinator"):
            self._coordinator_at_s = moment.now_s
        self._take_news(facts.get("news"), facts.get("thanks", ()))
        self._take_devices(facts.get("devices", ()))
        given = self.tally.visit
        working = self.decision.works and bool(facts.get("busy"))  # waiting for work is not work
        self.tally.count(facts.get("totals", ()), passed_s if working else 0.0, self._day())
        if self.tally.visit.tokens > given.tokens:
            self._worked_at_s = moment.now_s
        moved = self._line.moved_bytes
        if passed_s:
            rate = (moved - self._moved_bytes) / passed_s
            self.bytes_per_s += (1 - math.exp(-passed_s / 5.0)) * (rate - self.bytes_per_s)
        self._moved_bytes = moved
        if moment.now_s >= self._saved_s + SAVE_S:
            self._saved_s = moment.now_s
            self.save()

    def _take_news(self, news: News | None, thanks: Sequence[bytes | None]) -> None:
        if news is None or news is self.news:
            return
        self.news, self._news_at = news, self._moment
        update = update_words(news.build, BUILD)
        if update and update != self.update:
            self._log.info("update", detail=update)
        self.update = update
        before = self._thanks.complaint
        self._thanks.take(thanks)
        self._keep_thanks()
        if self._thanks.complaint and self._thanks.complaint != before:
            self._log.warning("thanks refused", detail=self._thanks.complaint)

    def _take_devices(self, said: Sequence[Hello | None]) -> None:
        """Devices say what they are: their own heat and power count, also while they are paused."""
        devices = {**self._devices, **{place: device for place, device in enumerate(said) if device is not None}}
        if devices == self._devices:
            return
        self._devices = devices
        places = range(max(devices) + 1)
        gpus = tuple(devices[place].gpu if place in devices else "" for place in places)
        self._sensors.device_is(any(device.is_accelerator for device in devices.values()), gpus)
        self._governor.gpu = self._sensors.gpu

    def news_as_of(self) -> str:
        """When the run was last heard of, by the owner's clock; nothing while it is heard of now."""
        if self._news_at is None:
            return ""
        linked = self._life is not None and bool(self._life.facts().get("coordinator"))
        # Whoever leaves was told the newest a moment before its links ended: its last word is of now.
        if (linked or self._ending) and self._moment.now_s - self._news_at.now_s <= NEWS_OLD_S:
            return ""
        return clock_words(self._news_at.unix_s, self._moment.unix_s)

    def why(self) -> tuple[str, str]:
        """(reason, sentence) why it does not work, or empty words: the owner's limits, or the run itself."""
        if not self.decision.works:
            return self.decision.reason, self.sentence()
        facts = self._life.facts() if self._life is not None else {}
        gone_s = self._moment.now_s - self._coordinator_at_s
        # training goes on without the coordinator
        works = bool(facts.get("busy")) or self._moment.now_s - self._worked_at_s <= PAUSE_IN_WORK_S
        if self._life is not None and gone_s > COORDINATOR_GONE_S and not works:
            return "coordinator", f"no link to the coordinator for {gone_s:.0f} s; trying again"
        waiting_for = facts.get("waiting_for", "")
        if facts.get("stage", -1) < 0:
            return "no_work", f"waiting for {waiting_for or 'a place in the run'}"
        if waiting_for and not works:
            return "no_work", f"waiting for {waiting_for}"
        return "", ""

    def sentence(self) -> str:
        until = self.decision.until_unix_s
        if until is None:
            return self.decision.sentence
        return until_words(self.decision, clock_words(until, self._moment.unix_s))

    def _show(self, passed_s: float) -> None:
        """The metrics. Within a life the machine's own state is shown; a pause is shown here."""
        reason, _ = self.why()
        if reason != self._reason_shown:
            if self._reason_shown:
                for metrics in self._metrics:
                    metrics.resumed(self._reason_shown)
            self._reason_shown = reason
        now = self.readings
        for place, metrics in enumerate(self._metrics):
            if reason:
                metrics.held_back(reason, passed_s, paused=not self.decision.works)
            heat_c, power_w = now.temperature_c, now.power_w
            if place < len(now.each_device):
                heat_c, power_w = now.each_device[place]
            metrics.show_device(heat_c, self.limits.temperature_c, power_w)

    def status(self) -> dict[str, Any]:
        """Everything that a screen may show."""
        facts = self._life.facts() if self._life is not None else {}
        reason, sentence = self.why()
        state = "working" if not reason else ("waiting" if reason in ("no_work", "coordinator") else "paused")
        if state == "paused" and self._life is not None:
            state = "finishing" if not self.decision.at_once else "paused"
        if self._ending:
            state, sentence = "leaving", FINISHED if self._ending == "finished" else LEAVING
        limits, now = self.limits, self.readings
        return {
            "run": self._run_name(),
            "state": state,
            "begun": True,
            "ending": self._ending,
            "reason": reason,
            "sentence": sentence or ("computing" if state == "working" else ""),
            "until_unix_s": self.decision.until_unix_s,
            "holds": [list(pair) for pair in self.decision.holds],
            "complaint": self.complaint,
            "stage": facts.get("stage", -1),
            "stages": facts.get("stages", 0),
            "cards": facts.get("cards", []),
            "device": {
                "name": labels_in_words([device.label for _, device in sorted(self._devices.items())])
                or "not started yet",
                "free": self._life is None,
                "temperature_c": now.temperature_c,
                "temperature_limit_c": limits.temperature_c,
                "power_w": now.power_w,
                "power_limit_w": limits.power_w,
                "memory_bytes": now.own_memory_bytes,
                "memory_limit_bytes": limits.memory_bytes,
                "share": self.decision.share,
            },
            "line": {
                "bytes_per_s": self.bytes_per_s,
                "up_limit_bytes_per_s": self.decision.up_bytes_per_s,
                "down_limit_bytes_per_s": self.decision.down_bytes_per_s,
                "moved_bytes": self._line.moved_bytes,
                "quota_bytes": limits.quota_bytes,
                "quota_left_bytes": self._line.remaining_bytes,
                "paths": facts.get("paths", {}),
            },
            "visit": as_dict(self.tally.visit),
            "today": as_dict(self.tally.today(self._day())),
            "ever": as_dict(self.tally.ever),
            "signed": {
                "visit": None if self._thanks.visit is None else as_dict(self._thanks.visit),
                "ever": None if self._thanks.ever is None else as_dict(self._thanks.ever),
            },
            "news": None if self.news is None else shown_news(self.news, self.news_as_of()),
            "thanks": self.thanks(),
            "update": self.update,
            "limits": shown(limits),
            "name": limits.name,
            "pid": os.getpid(),
            "unix_s": time.time(),
        }

    def thanks(self) -> str:
        """What is said when it ends."""
        visit = self.tally.visit
        text = f"Thank you. This visit: {in_words(visit) if visit.tasks else 'no task yet'}."
        if self.tally.ever != self.tally.visit:
            text += f" In all: {in_words(self.tally.ever)}."
        if self.news is not None and self.news.hour_ratio > 0:
            text += f" {part_in_words(self.news.hour_ratio, self.news.step, self.news.step_tasks, self.news_as_of())}"
        return text


def labels_in_words(labels: Sequence[str]) -> str:
    """Devices' names in one line; how many where several are called the same."""
    counted = Counter(labels)
    return " and ".join(label if count == 1 else f"{count} times {label}" for label, count in counted.items())


def shown_news(news: News, as_of: str) -> dict[str, Any]:
    """For screens, which show its words as text. `as_of`: when that was, where it is not now."""
    return {
        "as_of": as_of,
        "step": news.step,
        "curve": [list(point) for point in news.curve],
        "sample": news.sample,
        "sample_step": news.sample_step,
        "hour_ratio": news.hour_ratio,
        "step_tasks": news.step_tasks,
        "validated_step": news.validated_step,
        "validation_loss": news.validation_loss,
    }
