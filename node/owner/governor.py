"""Decides whether this computer works now, and if not, for which one reason. Pure: readings and times in.

    sensors ──Readings──▶ Governor ──Decision(works, reason, sentence, at_once, share, rates)──▶ daemon, screens
    owner ───pause, resume, finish──▶

Several things may hold it back at once; the first of `ORDER` is named, and all are listed. What comes and goes has
hysteresis: a device cools by 5 degrees, a game must be gone for three seconds, before work begins again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from node.owner.limits import GAMES, NOT_A_GAME, OwnerLimits
from node.owner.units import show_duration, show_size

ORDER = (
    "user", "program", "user_active", "battery", "metered", "temperature", "power", "memory", "disk", "quota",
    "schedule",
)  # fmt: skip
"""Which reason is named when several hold: the owner's own word first, then what can be ended soonest."""
AT_ONCE = frozenset({"user", "program", "user_active", "battery", "metered", "temperature", "power", "memory"})
"""For these the device is given back within a second; for the others what was begun is finished first."""
COOL_BY_C = 5.0
PROGRAM_GONE_S = 3.0
"""A game that restarts itself, or shows its launcher for a moment, is not gone."""
BUSY_MEAN_S = 10.0
"""A compiler that runs for a second is no reason to stop, one that runs for ten is."""
POWER_MEAN_S = 5.0
POWER_SHARE_MIN = 0.1
POWER_REST_S = 60.0
"""A device that is over the limit though it works a tenth of the time rests for so long."""
SHORT_REST_S = 30.0
"""After memory or disk ran short: what others took may come back in pieces."""
MEMORY_FREE_MIN_BYTES = 256e6
"""With less left on the whole computer, others would be pushed out to the disk."""
DISK_FREE_MIN_BYTES = 1e9
"""With less left, other programs of the owner begin to fail."""
SLEPT_S = 30.0
"""A gap between two looks that is longer than this is no busy machine: it slept, or was stopped."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What the sensors say; None where this system has no such sensor, which holds nothing back."""

    idle_s: float | None = None
    programs: tuple[str, ...] = ()
    """Names of running programs, lower case, without `.exe`."""
    games: tuple[str, ...] = ()
    """Those that fill the screen or use the GPU, ours left out."""
    other_cpu_ratio: float | None = None
    on_battery: bool | None = None
    metered: bool | None = None
    temperature_c: float | None = None
    """Of the device that works; of several, the hottest."""
    power_w: float | None = None
    """Of several devices, that of the one which draws most: limits are for each."""
    each_device: tuple[tuple[float | None, float | None], ...] = ()
    """(temperature, power) of each of several devices; nothing where there is one."""
    memory_free_bytes: float | None = None
    own_memory_bytes: float | None = None
    disk_free_bytes: float | None = None
    own_disk_bytes: float | None = None
    quota_has_room: bool | None = None
    """Whether this month's quota lets work begin, and go on; None without a quota."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, as all clocks show it."""

    now_s: float
    """Of a clock that never goes back and counts sleep."""
    unix_s: float
    minute_of_week: int
    """By the owner's clock on the wall; Monday 00:00 is 0."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What holds now."""

    works: bool
    reason: str = ""
    """One of `ORDER`; empty while it works."""
    sentence: str = ""
    """The reason in words."""
    at_once: bool = False
    until_unix_s: float | None = None
    """When it ends by itself, where that is known."""
    holds: tuple[tuple[str, str], ...] = ()
    """All reasons that hold now, each with its sentence."""
    share: float = 1.0
    """The part of the time in which the device may work."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class UserPause:
    """The owner said so. It is kept on the disk: a restart does not start to work by itself."""

    until_unix_s: float | None = None
    until_now_s: float | None = None
    """The same by the clock that never goes back: a wall clock that is set back must not stretch it."""
    finish: bool = False
    """What was begun is finished first."""


class Governor:
    """See the module. `gpu`: whether the device is one, for which share counts."""

    def __init__(self, limits: OwnerLimits, gpu: bool = False, user: UserPause | None = None) -> None:
        self.limits = limits
        self.user = user
        self.gpu = gpu
        self._since: dict[str, float] = {}
        """Reasons that hold, and since when."""
        self._rest_until: dict[str, float] = {}
        self._program = ""
        """What runs, in words."""
        self._program_seen_s = float("-inf")
        self._busy: float | None = None
        self._power: float | None = None
        self._power_share = 1.0
        self._looked_s: float | None = None
        self.slept_s = 0.0
        """How long the computer slept before the last look, when it did."""

    # ---- the owner's orders --------------------------------------------------------------------------------------

    def pause(self, moment: Moment, for_s: float | None = None, finish: bool = False) -> None:
        """Until the owner resumes, or for a time."""
        if for_s is None:
            self.user = UserPause(finish=finish)
        else:
            self.user = UserPause(moment.unix_s + for_s, moment.now_s + for_s, finish)

    def resume(self) -> None:
        self.user = None

    # ---- a look --------------------------------------------------------------------------------------------------

    def look(self, readings: Readings, moment: Moment) -> Decision:
        """What holds after these readings."""
        gap_s = 0.0 if self._looked_s is None else max(0.0, moment.now_s - self._looked_s)
        self.slept_s = gap_s if gap_s > SLEPT_S else 0.0
        self._looked_s = moment.now_s
        found = self._found(readings, moment, gap_s)
        for reason in [reason for reason in self._since if reason not in found]:
            del self._since[reason]
        for reason in found:
            self._since.setdefault(reason, moment.now_s)
        holds = tuple((reason, found[reason]) for reason in ORDER if reason in found)
        up, down = self.limits.rates(moment.minute_of_week)
        works = Decision(True, share=self._share(readings, gap_s), up_bytes_per_s=up, down_bytes_per_s=down)
        if not holds:
            return works
        reason, sentence = holds[0]
        at_once = reason in AT_ONCE and not (reason == "user" and self.user is not None and self.user.finish)
        return replace(
            works,
            works=False,
            reason=reason,
            sentence=sentence,
            at_once=at_once,
            until_unix_s=self._until(reason, moment),
            holds=holds,
        )

    def _found(self, now: Readings, moment: Moment, gap_s: float) -> dict[str, str]:
        limits = self.limits
        found: dict[str, str] = {}
        if self._user_holds(moment):
            found["user"] = "by you"
        self._look_for_programs(now, moment)
        if moment.now_s < self._program_seen_s + PROGRAM_GONE_S:
            found["program"] = self._program
        if limits.idle_s is not None and now.idle_s is not None and now.idle_s < limits.idle_s:
            after = show_duration(limits.idle_s)
            found["user_active"] = f"you are using the computer; it works when nobody has for {after}"
        elif self._others_are_busy(now, gap_s):
            found["user_active"] = f"other programs use {100 * (self._busy or 0.0):.0f} % of the processor"
        if now.on_battery and not limits.on_battery:
            found["battery"] = "on battery"
        if now.metered and not limits.on_metered:
            found["metered"] = "on a metered network"
        self._look_at_heat(now, found)
        self._look_at_power(now, moment, gap_s, found)
        self._look_at_room(now, moment, found)
        if now.quota_has_room is False:
            found["quota"] = "this month's transfer quota is used up"
        if moment.minute_of_week not in limits.hours:
            found["schedule"] = f"outside your hours ({limits.hours.text})"
        return found

    def _user_holds(self, moment: Moment) -> bool:
        user = self.user
        if user is None:
            return False
        over = user.until_unix_s is not None and moment.unix_s >= user.until_unix_s
        over = over or (user.until_now_s is not None and moment.now_s >= user.until_now_s)
        if over:
            self.user = None
        return not over

    def _look_for_programs(self, now: Readings, moment: Moment) -> None:
        wanted = self.limits.while_not
        running = {cut_name(name): name for name in now.programs}
        found = [f"{name} is running" for name in wanted if cut_name(name) in running]
        if GAMES in wanted:
            spared = {cut_name(name.removeprefix(NOT_A_GAME)) for name in wanted if name.startswith(NOT_A_GAME)}
            found += [
                f"{name} is running, which counts as a game" for name in now.games if cut_name(name) not in spared
            ]
        if found:
            self._program, self._program_seen_s = found[0], moment.now_s
        elif self._program and not wanted:
            self._program_seen_s = float("-inf")

    def _others_are_busy(self, now: Readings, gap_s: float) -> bool:
        limit = self.limits.other_cpu_ratio
        if limit is None or now.other_cpu_ratio is None:
            self._busy = None
            return False
        self._busy = _mean(self._busy, now.other_cpu_ratio, gap_s, BUSY_MEAN_S)
        return self._busy > (limit if "user_active" not in self._since else 0.7 * limit)

    def _look_at_heat(self, now: Readings, found: dict[str, str]) -> None:
        limit, heat = self.limits.temperature_c, now.temperature_c
        if limit is None or heat is None:
            return
        cool = limit - COOL_BY_C
        if heat >= limit or ("temperature" in self._since and heat > cool):
            found["temperature"] = f"{'GPU' if self.gpu else 'processor'} at {heat:.0f} C, cooling to {cool:.0f}"

    def _look_at_power(self, now: Readings, moment: Moment, gap_s: float, found: dict[str, str]) -> None:
        limit = self.limits.power_w
        if limit is None or now.power_w is None:
            self._power, self._power_share = None, 1.0
            return
        self._power = _mean(self._power, now.power_w, gap_s, POWER_MEAN_S)
        if self._power > limit:
            if self._power_share <= POWER_SHARE_MIN and "power" not in self._rest_until:
                self._rest_until["power"] = moment.now_s + POWER_REST_S
            self._power_share = max(POWER_SHARE_MIN, self._power_share * (1 - 0.1 * min(gap_s, 1.0)))
        elif self._power < 0.9 * limit:
            self._power_share = min(1.0, self._power_share * (1 + 0.05 * min(gap_s, 1.0)))
        if self._rests("power", moment):
            found["power"] = f"GPU at {self._power:.0f} W, your limit is {limit:g} W"

    def _look_at_room(self, now: Readings, moment: Moment, found: dict[str, str]) -> None:
        limits = self.limits
        for reason, used, cap, free, least, word in (
            ("memory", now.own_memory_bytes, limits.memory_bytes, now.memory_free_bytes, MEMORY_FREE_MIN_BYTES,
             "memory"),
            ("disk", now.own_disk_bytes, limits.disk_bytes, now.disk_free_bytes, DISK_FREE_MIN_BYTES, "disk"),
        ):  # fmt: skip
            over = cap is not None and used is not None and used > cap
            short = free is not None and free < least
            if over or short:
                self._rest_until[reason] = moment.now_s + SHORT_REST_S
            if not self._rests(reason, moment):
                continue
            if over:
                found[reason] = f"{show_size(round(used or 0, -7))} of {word} used, your limit is {show_size(cap)}"
            else:
                found[reason] = f"the computer has {show_size(round(free or 0, -7))} of {word} left"

    def _rests(self, reason: str, moment: Moment) -> bool:
        if moment.now_s >= self._rest_until.get(reason, float("-inf")):
            self._rest_until.pop(reason, None)
            return False
        return True

    def _share(self, now: Readings, gap_s: float) -> float:
        share = self.limits.gpu_ratio if self.gpu else self.limits.cpu_ratio
        return share * self._power_share

    def _until(self, reason: str, moment: Moment) -> float | None:
        if reason == "user" and self.user is not None:
            return self.user.until_unix_s
        if reason == "schedule":
            return moment.unix_s + 60.0 * self.limits.hours.next_after(moment.minute_of_week)
        return None

    def check(self) -> None:
        assert POWER_SHARE_MIN <= self._power_share <= 1.0
        assert all(reason in ORDER for reason in self._since)


def cut_name(name: str) -> str:
    """A program's name as systems tell it: without `.exe`, lower case, and Linux keeps 15 letters."""
    return name.lower().removesuffix(".exe")[:15]


def _mean(before: float | None, value: float, gap_s: float, over_s: float) -> float:
    """An exponential mean that does not depend on how often one looks."""
    if before is None:
        return value
    weight = min(1.0, gap_s / over_s)
    return before + weight * (value - before)


def until_words(decision: Decision, clock: str) -> str:
    """The sentence with its end, where that is known. `clock`: the end as HH:MM by the owner's clock."""
    if decision.until_unix_s is None or not clock:
        return decision.sentence
    return f"{decision.sentence} until {clock}"
