"""Whether a lent computer works, and the one reason why not: every reason on and off, with its hysteresis."""

from __future__ import annotations

import random
from typing import Any

import pytest

from node.owner.governor import AT_ONCE, ORDER, Decision, Governor, Moment, Readings
from node.owner.limits import OwnerLimits, with_values
from node.process.metrics import SUSPENDED_REASONS

MONDAY_NOON = 12 * 60


class Clock:
    """A governor, and time that passes."""

    def __init__(self, gpu: bool = False, **limits: str) -> None:
        texts = {name.replace("_", "-"): text for name, text in limits.items()}
        self.governor = Governor(with_values(OwnerLimits(), texts), gpu)
        self.now_s = 1000.0
        self.minute = MONDAY_NOON

    @property
    def moment(self) -> Moment:
        return Moment(self.now_s, 1e9 + self.now_s, self.minute)

    def look(self, after_s: float = 0.5, **readings: Any) -> Decision:
        self.now_s += after_s
        decision = self.governor.look(Readings(**readings), self.moment)
        self.governor.check()
        return decision

    def settle(self, seconds: float, **readings: Any) -> Decision:
        decision = self.look(**readings)
        for _ in range(int(seconds * 2)):
            decision = self.look(**readings)
        return decision


CASES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any], str]] = {
    "program": ({}, {"games": ("cyberpunk",)}, {}, "cyberpunk is running, which counts as a game"),
    "user_active": ({}, {"idle_s": 5.0}, {"idle_s": 300.0}, "you are using the computer"),
    "battery": ({}, {"on_battery": True}, {"on_battery": False}, "on battery"),
    "metered": ({}, {"metered": True}, {"metered": False}, "on a metered network"),
    "temperature": (
        {"temperature": "80 C"}, {"temperature_c": 84.0}, {"temperature_c": 70.0}, "GPU at 84 C, cooling to 75",
    ),
    "power": ({"power": "100 W"}, {"power_w": 300.0}, {"power_w": 20.0}, "GPU at 300 W, your limit is 100 W"),
    "memory": (
        {"memory": "4 GB"}, {"own_memory_bytes": 5e9}, {"own_memory_bytes": 1e9},
        "5 GB of memory used, your limit is 4 GB",
    ),
    "disk": ({}, {"disk_free_bytes": 0.5e9}, {"disk_free_bytes": 50e9}, "the computer has 0.5 GB of disk left"),
    "quota": ({"quota": "9 GB"}, {"quota_has_room": False}, {"quota_has_room": True}, "this month's transfer quota"),
}  # fmt: skip


@pytest.mark.parametrize("reason", CASES)
def test_every_reason_comes_and_goes(reason: str) -> None:
    """It holds the computer back with its name and a sentence, and lets it go when its cause is gone."""
    limits, on, off, sentence = CASES[reason]
    clock = Clock(gpu=True, **limits)
    assert clock.look(**off).works
    held = clock.settle(60, **on)
    assert not held.works and held.reason == reason and held.sentence.startswith(sentence)
    assert held.at_once == (reason in AT_ONCE)
    assert clock.settle(120, **off).works


def test_every_reason_is_tried_and_has_its_metric() -> None:
    """No pause without a name that Prometheus knows."""
    assert {*CASES, "user", "schedule"} == set(ORDER)
    assert set(ORDER) <= set(SUSPENDED_REASONS)


def test_hours_say_when_it_goes_on() -> None:
    """Outside of them it pauses, finishing what it has, and knows until when."""
    clock = Clock(hours="mon-fri 18:00-24:00")
    held = clock.look()
    assert (held.reason, held.at_once) == ("schedule", False)
    assert held.until_unix_s == 1e9 + clock.now_s + 6 * 3600
    clock.minute = 18 * 60
    assert clock.look().works


def test_a_pause_of_the_owner_ends_by_itself_and_by_either_clock() -> None:
    """For ten minutes; a wall clock that is set back by a day does not stretch it; one that runs ahead ends it."""
    clock = Clock()
    clock.governor.pause(clock.moment, 600.0)
    held = clock.look()
    assert (held.reason, held.at_once) == ("user", True) and held.until_unix_s == 1e9 + 1000.0 + 600.0
    assert not clock.look(599.0).works
    assert clock.look(2.0).works
    clock.governor.pause(clock.moment, 600.0)
    set_back = Moment(clock.now_s + 601, clock.moment.unix_s - 86400, MONDAY_NOON)
    assert clock.governor.look(Readings(), set_back).works
    clock.governor.pause(clock.moment, 600.0)
    set_ahead = Moment(clock.now_s + 1, clock.moment.unix_s + 3600, MONDAY_NOON)
    assert clock.governor.look(Readings(), set_ahead).works


def test_finish_is_a_pause_that_lets_the_work_end() -> None:
    """The same reason, but not at once; resume ends it."""
    clock = Clock()
    clock.governor.pause(clock.moment, finish=True)
    held = clock.look()
    assert (held.reason, held.at_once) == ("user", False)
    clock.governor.resume()
    assert clock.look().works


def test_heat_has_hysteresis() -> None:
    """From the limit on it cools by five degrees before it works again; below the limit it never stops."""
    clock = Clock(temperature="80 C")
    assert clock.look(temperature_c=79.9).works
    assert not clock.look(temperature_c=80.0).works
    assert not clock.look(temperature_c=75.1).works
    assert clock.look(temperature_c=75.0).works
    assert clock.look(temperature_c=79.0).works


def test_a_game_must_be_gone_for_three_seconds() -> None:
    """One that restarts itself does not get a device in between that is taken away again."""
    clock = Clock()
    assert not clock.look(games=("game",)).works
    assert not clock.look(2.0).works
    assert clock.look(1.5).works


def test_programs_are_known_by_name_on_every_system() -> None:
    """With `.exe`, in capitals, cut to the fifteen letters that Linux keeps; another program is none of it."""
    clock = Clock(while_not="Steam,averyverylongprogramname")
    assert clock.look(programs=("steam",)).sentence == "steam is running"
    assert clock.look(10, programs=("steamwebhelper", "bash")).works
    assert clock.look(programs=("averyverylongpr",)).reason == "program"
    assert clock.look(10, games=("cyberpunk",)).works, "the list of games was not asked for"


def test_a_program_that_the_owner_says_is_no_game_holds_nothing_back() -> None:
    """By its name alone: another game does, also beside it."""
    clock = Clock(while_not="@games,-Wallpaper64.exe,-averyverylongprogramname")
    assert clock.look(games=("wallpaper64", "averyverylongpr")).works
    assert clock.look(games=("wallpaper64", "doom")).sentence == "doom is running, which counts as a game"


def test_other_programs_count_only_when_they_are_busy_for_a_while() -> None:
    """A compiler of a second is no reason; one that goes on is; then it must be clearly less."""
    clock = Clock(other_cpu="25 %")
    assert clock.look(other_cpu_ratio=0.0).works
    assert clock.look(1.0, other_cpu_ratio=0.9).works
    held = clock.settle(20, other_cpu_ratio=0.9)
    assert held.reason == "user_active" and "other programs use" in held.sentence
    assert not clock.settle(1, other_cpu_ratio=0.2).works
    assert clock.settle(40, other_cpu_ratio=0.1).works


def test_power_is_first_met_by_working_less() -> None:
    """A card that draws in proportion to its share of work settles near the limit without a pause."""
    clock = Clock(gpu=True, power="100 W")
    share, worst = 1.0, Decision(True)
    for _ in range(400):
        worst = clock.look(power_w=20.0 + 180.0 * share)
        assert worst.works
        share = worst.share
    assert 85 <= 20 + 180 * share <= 101


def test_shares_and_rates_go_along() -> None:
    """GPU or processor share, and by the clock the other rates."""
    clock = Clock(cpu="50 %", up="10 Mbit/s", other_hours="mon 12:30-13:00", other_up="2 Mbit/s", other_down="4 Mbit/s")
    now = clock.look()
    assert (now.share, now.up_bytes_per_s, now.down_bytes_per_s) == (0.5, 10e6 / 8, None)
    clock.minute = MONDAY_NOON + 30
    now = clock.look()
    assert (now.up_bytes_per_s, now.down_bytes_per_s) == (2e6 / 8, 4e6 / 8)


def test_a_computer_without_sensors_works() -> None:
    """None holds nothing back, whatever is limited."""
    clock = Clock(temperature="40 C", power="10 W", other_cpu="1 %", memory="1 MB", disk="1 MB")
    assert clock.look().works


def test_sleep_is_noticed() -> None:
    """An hour between two looks is sleep; half a second is none."""
    clock = Clock()
    clock.look()
    clock.look(0.5)
    assert clock.governor.slept_s == 0
    clock.look(3600.0)
    assert clock.governor.slept_s == 3600.0


@pytest.mark.parametrize("seed", range(30))
def test_any_weather_has_one_reason_and_ends(seed: int) -> None:
    """Random limits and readings: it works, or one reason is named that is among those that hold; when all causes are
    gone it works within three minutes."""
    rng = random.Random(seed)
    clock = Clock(gpu=rng.random() < 0.5)
    for name, (limits, _, _, _) in CASES.items():
        if rng.random() < 0.5:
            clock.governor.limits = with_values(clock.governor.limits, limits)
        assert name in ORDER
    for _ in range(300):
        readings: dict[str, Any] = {}
        for _, on, off, _ in rng.sample(list(CASES.values()), 3):
            readings.update(on if rng.random() < 0.3 else off)
        decision = clock.look(rng.choice((0.3, 1.0, 40.0)), **readings)
        assert decision.works == (not decision.reason) == (not decision.holds)
        if not decision.works:
            assert (decision.reason, decision.sentence) == decision.holds[0]
    calm = {name: value for _, _, off, _ in CASES.values() for name, value in off.items()}
    assert clock.settle(180, **calm).works
