"""What people write for rates, sizes, times and hours, and how it is written back. Wrong words get one sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass

from protocol.base.errors import BadInputError

OFF = "off"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60

_RATES = {"mbit/s": 1e6 / 8, "mbps": 1e6 / 8, "kbit/s": 1e3 / 8, "gbit/s": 1e9 / 8}
_SIZES = {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30}
_TIMES = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)\s*(\S*)")


def _amount(key: str, text: str, units: dict[str, float], what: str, example: str) -> float:
    """A number with a unit, in base units. `what`: how the sentence calls it."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise BadInputError(f"{key}: {text!r} is no {what}; write it as {example}")
    if float(found[1]) <= 0:
        raise BadInputError(f"{key}: {text!r} must be more than nothing; write it as {example}")
    return float(found[1]) * units[found[2].lower()]


def is_off(text: str) -> bool:
    """Whether it means no limit. A plain 0 does not: its owner may want nothing sent, and would have sent all."""
    return text.strip().lower() in (OFF, "none", "no")


RATE_MIN_BYTES_PER_S = 1e6 / 8
"""Slower than this a record of 64 KiB takes longer than half a second, and links would time out in each other's way."""


def rate(key: str, text: str) -> float | None:
    """Bytes a second, or None for off."""
    if is_off(text):
        return None
    bytes_per_s = _amount(key, text, _RATES, "rate", "20 Mbit/s, or off")
    if bytes_per_s < RATE_MIN_BYTES_PER_S:
        raise BadInputError(f"{key}: {text!r} is too slow to keep a link alive; at least 1 Mbit/s, or pause instead")
    return bytes_per_s


def size(key: str, text: str) -> float | None:
    """Bytes, or None for off."""
    return None if is_off(text) else _amount(key, text, _SIZES, "size", "3 GB, or off")


def duration(key: str, text: str) -> float:
    """Seconds."""
    return _amount(key, text, _TIMES, "time", "30 min or 2 h")


def duration_or_off(key: str, text: str) -> float | None:
    """Seconds, or None for off."""
    return None if is_off(text) else _amount(key, text, _TIMES, "time", "3 min, or off")


def ratio(key: str, text: str) -> float:
    """A share from above 0 to 1."""
    share = _amount(key, text, {"%": 0.01}, "share", "80 %")
    if share > 1:
        raise BadInputError(f"{key}: {text!r} is more than all of it; 100 % is the most")
    return share


def ratio_or_off(key: str, text: str) -> float | None:
    return None if is_off(text) else ratio(key, text)


def temperature(key: str, text: str) -> float | None:
    """Degrees Celsius, or None for off."""
    if is_off(text):
        return None
    degrees = _amount(key, text, {"c": 1.0, "°c": 1.0}, "temperature", "80 C, or off")
    if not 30 <= degrees <= 110:
        raise BadInputError(f"{key}: {text!r} is no temperature that a device works at; 30 C to 110 C")
    return degrees


def watts(key: str, text: str) -> float | None:
    return None if is_off(text) else _amount(key, text, {"w": 1.0}, "power", "150 W, or off")


def switch(key: str, text: str) -> bool:
    """pause or work: whether it works on."""
    words = {"work": True, "pause": False}
    if text.strip().lower() not in words:
        raise BadInputError(f"{key}: {text!r} is neither `pause` nor `work`")
    return words[text.strip().lower()]


# ---- hours ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hours:
    """Times of the week in which something holds. `text` is how the owner wrote it; no spans: always."""

    text: str = "always"
    spans: tuple[tuple[int, int], ...] = ()
    """Minutes of the week, Monday 00:00 being 0: from, until (exclusive), in order, none over the week's end."""

    def __contains__(self, minute_of_week: int) -> bool:
        return not self.spans or any(first <= minute_of_week < end for first, end in self.spans)

    def next_after(self, minute_of_week: int) -> int:
        """Minutes until it begins again; 0 while it holds."""
        if minute_of_week in self:
            return 0
        week = 7 * DAY_MIN
        return min((first - minute_of_week) % week for first, _ in self.spans)


def hours(key: str, text: str) -> Hours:
    """`always`, or parts like `22:00-24:00`, `mon-fri 08:00-17:00`, `sat,sun 00:00-24:00`, `22:00-07:00 overnight`,
    with semicolons or commas in between."""
    cleaned = " ".join(text.split()).lower()
    if cleaned in ("always", OFF):
        return Hours()
    spans: list[tuple[int, int]] = []
    days: list[int] | None = None
    pending: list[int] = []
    for part in re.split(r"\s*[,;]\s*", cleaned):
        found = re.fullmatch(r"(?:([a-z]{3})(?:-([a-z]{3}))?)?\s*(?:(\S+:\S*-\S+))?\s*(overnight)?", part)
        if not part or found is None:
            raise BadInputError(f"{key}: {part!r} is no time; write it as mon-fri 08:00-17:00, or always")
        first_day, last_day, clock, over = found.groups()
        if first_day is not None:
            pending += _days(key, first_day, last_day)
        if clock is None:
            continue
        if pending or days is None:
            days, pending = pending or list(range(7)), []
        begin, end = _span(key, clock, over is not None)
        for day in days:
            spans += _within_week(day * DAY_MIN + begin, day * DAY_MIN + end)
    if pending or not spans:
        raise BadInputError(f"{key}: {text!r} names days without a time; write it as mon-fri 08:00-17:00")
    return Hours(cleaned, tuple(sorted(spans)))


def _days(key: str, first: str, last: str | None) -> list[int]:
    for day in (first, last or first):
        if day not in DAYS:
            raise BadInputError(f"{key}: {day!r} is no day; days are {', '.join(DAYS)}")
    begin, end = DAYS.index(first), DAYS.index(last or first)
    if end < begin:
        until, since = ("" if first == "sun" else "-sun"), ("" if last == "mon" else f"-{last}")
        raise BadInputError(f"{key}: {first}-{last} ends before it starts; write {first}{until},mon{since}")
    return list(range(begin, end + 1))


def _span(key: str, clock: str, overnight: bool) -> tuple[int, int]:
    begin, _, end = clock.partition("-")
    if not begin or "-" in end:
        raise BadInputError(f"{key}: {clock!r} is not a time until another; write it as 05:00-08:00, at most 24:00")
    first, last = _minute(key, begin), _minute(key, end)
    if overnight:
        if last > first:
            raise BadInputError(f"{key}: {clock} lies within one day; leave `overnight` out")
        return first, last + DAY_MIN
    if last < first:
        raise BadInputError(f"{key}: {clock} ends before it starts; write `{clock} overnight` if it goes over midnight")
    if last == first:
        raise BadInputError(f"{key}: {clock} is no time at all; for a whole day write 00:00-24:00")
    return first, last


def _minute(key: str, text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})", text)
    if found is None or int(found[2]) > 59 or int(found[1]) * 60 + int(found[2]) > DAY_MIN:
        raise BadInputError(f"{key}: {text!r} is no time of day; write it as 07:30, at most 24:00")
    return int(found[1]) * 60 + int(found[2])


def _within_week(first: int, end: int) -> list[tuple[int, int]]:
    """A span cut where the week ends: Sunday night goes on into Monday."""
    week = 7 * DAY_MIN
    return [(first, end)] if end <= week else [(first, week), (0, end - week)]


# ---- and back ------------------------------------------------------------------------------------------------------


def show_rate(bytes_per_s: float | None) -> str:
    return OFF if bytes_per_s is None else f"{bytes_per_s * 8e-6:g} Mbit/s"


def show_size(byte_count: float | None) -> str:
    """To the byte, as it is written into the file that is read again: never 1e-06 GB."""
    return OFF if byte_count is None else f"{f'{byte_count * 1e-9:.9f}'.rstrip('0').rstrip('.')} GB"


def show_duration(seconds: float | None) -> str:
    if seconds is None:
        return OFF
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:g} {name}"
    return f"{seconds:g} s"


def show_ratio(share: float | None) -> str:
    return OFF if share is None else f"{100 * share:g} %"
