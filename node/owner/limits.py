"""The owner's limits: what may be used, when, and how fast. One table says each key's words, meaning and checks.

They hold for every run on this computer and lie in one file that people may edit, `limits.toml`; `barnraise limits
set KEY VALUE` and the page write it. A value that cannot be is refused with a sentence that names its key.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from node.owner import units
from node.owner.units import Hours
from protocol.base.errors import BadInputError
from protocol.base.printable import is_printable
from protocol.drive.durable import replace_durably

GAMES = "@games"
"""The list of programs that lie where game stores put games, use the GPU beside us, or fill the screen (on a desktop:
nearly always games)."""
NOT_A_GAME = "-"
"""Before a name: this program is none of @games, whatever it does."""
GAMES_MEAN = (
    "@games: any that lies in a game store's folder, uses the GPU or, on Windows, fills the screen; -NAME: is none"
)
PROGRAM_LISTS = (GAMES,)
PROGRAMS_MAX = 64
NAME_MAX = 40


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """All of them. The defaults are for a computer that somebody sits at."""

    idle_s: float | None = 180.0
    while_not: tuple[str, ...] = (GAMES,)
    other_cpu_ratio: float | None = None
    hours: Hours = field(default_factory=Hours)
    on_battery: bool = False
    on_metered: bool = False
    cpu_ratio: float = 1.0
    gpu_ratio: float = 1.0
    gpu_memory_bytes: float | None = None
    memory_bytes: float | None = None
    disk_bytes: float | None = None
    temperature_c: float | None = 83.0
    power_w: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    other_hours: Hours | None = None
    other_up_bytes_per_s: float | None = None
    other_down_bytes_per_s: float | None = None
    quota_bytes: float | None = None
    low_priority: bool = True
    name: str = ""

    def rates(self, minute_of_week: int) -> tuple[float | None, float | None]:
        """(up, down) in bytes a second at this time of the week; None: no limit."""
        if self.other_hours is not None and minute_of_week in self.other_hours:
            return self.other_up_bytes_per_s, self.other_down_bytes_per_s
        return self.up_bytes_per_s, self.down_bytes_per_s

    def describe(self) -> str:
        """One line before the question: what it will keep to."""
        parts = []
        if self.idle_s is not None:
            parts.append("only when you are not using the computer")
        if self.while_not:
            parts.append(f"not while {_spoken(self.while_not)} runs")
        if self.other_cpu_ratio is not None:
            parts.append(f"not while others use over {100 * self.other_cpu_ratio:g} % of the processor")
        if self.on_battery:
            parts.append("also on battery")
        if self.on_metered:
            parts.append("also on a metered network")
        if self.hours.spans:
            parts.append(f"in your hours ({self.hours.text})")
        if self.gpu_ratio < 1:
            parts.append(f"at most {100 * self.gpu_ratio:g} % of a GPU's time")
        if self.cpu_ratio < 1:
            parts.append(f"at most {100 * self.cpu_ratio:g} % of the processors' time")
        if self.temperature_c is not None:
            parts.append(f"below {self.temperature_c:g} C")
        if self.power_w is not None:
            parts.append(f"at most {self.power_w:g} W")
        caps = (("GPU memory", self.gpu_memory_bytes), ("memory", self.memory_bytes), ("disk", self.disk_bytes))
        parts += [f"at most {units.show_size(cap)} of {what}" for what, cap in caps if cap is not None]
        up, down = self.up_bytes_per_s, self.down_bytes_per_s
        parts.append("no limit up" if up is None else f"{units.show_rate(up)} up")
        if down is not None:
            parts.append(f"{units.show_rate(down)} down")
        if self.other_hours is not None:
            parts.append(f"other rates in other-hours ({self.other_hours.text})")
        parts.append("no monthly quota" if self.quota_bytes is None else f"{self.quota_bytes / 1e9:g} GB a month")
        return ", ".join(parts)


def _spoken(names: tuple[str, ...]) -> str:
    spared = [name.removeprefix(NOT_A_GAME) for name in names if name.startswith(NOT_A_GAME)]
    game = f"a game (but for {', '.join(spared)})" if spared else "a game"
    return " or ".join(game if name == GAMES else name for name in names if not name.startswith(NOT_A_GAME))


def _programs(key: str, text: str) -> tuple[str, ...]:
    if units.is_off(text):
        return ()
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if len(names) > PROGRAMS_MAX:
        raise BadInputError(f"{key}: more than {PROGRAMS_MAX} programs")
    for name in names:
        if name.startswith("@") and name not in PROGRAM_LISTS:
            near = difflib.get_close_matches(name, PROGRAM_LISTS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(PROGRAM_LISTS)}"
            raise BadInputError(f"{key}: there is no list of programs {name!r} ({hint})")
        if not name or any(letter in name for letter in '/\\"') or not name.isprintable():
            raise BadInputError(f"{key}: {name!r} is no program's name; write names with commas, or off")
        if name.startswith(NOT_A_GAME):
            _check_spared(key, name, names)
    return names


def _check_spared(key: str, name: str, names: tuple[str, ...]) -> None:
    if GAMES not in names:
        raise BadInputError(f"{key}: {name!r} leaves a program out of {GAMES}, which is not in this list")
    spared = name.removeprefix(NOT_A_GAME)
    if not spared or spared in names:
        raise BadInputError(
            f"{key}: {name!r} leaves {'a program that the list also names' if spared else 'nothing'} out"
        )


def _public_name(key: str, text: str) -> str:
    cleaned = " ".join(text.split())
    if units.is_off(cleaned):
        return ""
    if len(cleaned) > NAME_MAX or not is_printable(cleaned):
        raise BadInputError(f"{key}: at most {NAME_MAX} letters that can be printed")
    return cleaned


def _priority(key: str, text: str) -> bool:
    if text.strip().lower() not in ("low", "normal"):
        raise BadInputError(f"{key}: {text!r} is neither `low` nor `normal`")
    return text.strip().lower() == "low"


@dataclass(frozen=True, slots=True)
class Key:
    """One limit: how people call it, where it lies, what it means."""

    name: str
    field: str
    parse: Callable[[str, str], Any]
    show: Callable[[Any], str]
    meaning: str
    example: str


def _switch(works: bool) -> str:
    return "work" if works else "pause"


def _celsius(degrees: float | None) -> str:
    return units.OFF if degrees is None else f"{degrees:g} C"


def _power(power_w: float | None) -> str:
    return units.OFF if power_w is None else f"{power_w:g} W"


def _hours(value: Hours | None) -> str:
    return "always" if value is None else value.text


def _other_hours(value: Hours | None) -> str:
    return units.OFF if value is None else value.text


def _parse_other_hours(key: str, text: str) -> Hours | None:
    return None if units.is_off(text) else units.hours(key, text)


KEYS = (
    Key("idle", "idle_s", units.duration_or_off, units.show_duration,
        "Work only when keyboard and mouse were not used for this long; off: always.", "3 min"),
    Key("while-not", "while_not", _programs, lambda names: ",".join(names) or units.OFF,
        f"Pause while one of these programs runs; {GAMES_MEAN}.", "@games,steam,-wallpaper64"),
    Key("other-cpu", "other_cpu_ratio", units.ratio_or_off, units.show_ratio,
        "Pause while other programs keep more than this share of the processor busy.", "25 %"),
    Key("hours", "hours", units.hours, _hours,
        "Work only then.", "mon-fri 18:00-24:00; sat,sun 00:00-24:00"),
    Key("battery", "on_battery", units.switch, _switch, "On battery: pause or work.", "pause"),
    Key("metered", "on_metered", units.switch, _switch, "On a network that is paid by volume: pause or work.", "pause"),
    Key("cpu", "cpu_ratio", units.ratio, units.show_ratio,
        "Share of the time in which the lent processor threads work.", "50 %"),
    Key("gpu", "gpu_ratio", units.ratio, units.show_ratio, "Share of the time in which the GPU works.", "80 %"),
    Key("gpu-memory", "gpu_memory_bytes", units.size, units.show_size, "The most memory of a GPU to use.", "6 GB"),
    Key("memory", "memory_bytes", units.size, units.show_size, "The most memory to use; above it, pause.", "4 GB"),
    Key("disk", "disk_bytes", units.size, units.show_size, "The most disk to use; above it, pause.", "10 GB"),
    Key("temperature", "temperature_c", units.temperature, _celsius,
        "Pause when the device is hotter, until it has cooled by 5 C.", "80 C"),
    Key("power", "power_w", units.watts, _power,
        "The GPU works less while its mean power is above; where that is not enough, pause.", "150 W"),
    Key("up", "up_bytes_per_s", units.rate, units.show_rate, "The most that is sent.", "5 Mbit/s"),
    Key("down", "down_bytes_per_s", units.rate, units.show_rate, "The most that is received.", "20 Mbit/s"),
    Key("other-hours", "other_hours", _parse_other_hours, _other_hours,
        "Then other-up and other-down hold in place of up and down.", "mon-fri 08:00-17:00"),
    Key("other-up", "other_up_bytes_per_s", units.rate, units.show_rate, "Sent in the other hours.", "1 Mbit/s"),
    Key("other-down", "other_down_bytes_per_s", units.rate, units.show_rate, "Received then.", "4 Mbit/s"),
    Key("quota", "quota_bytes", units.size, units.show_size,
        "The most to move in a calendar month, both ways together.", "200 GB"),
    Key("priority", "low_priority", _priority, lambda low: "low" if low else "normal",
        "low: others come first on the processor.", "low"),
    Key("name", "name", _public_name, lambda name: name or units.OFF,
        "A public name under which the run may thank you; off: none.", "Ada"),
)  # fmt: skip
_BY_NAME = {key.name: key for key in KEYS}


def key_named(name: str) -> Key:
    """The key; raises `BadInputError` with what was probably meant."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in _BY_NAME:
        near = difflib.get_close_matches(wanted, _BY_NAME, 1)
        hint = f"did you mean {near[0]}?" if near else f"limits are {', '.join(_BY_NAME)}"
        raise BadInputError(f"limits: there is no {name!r} ({hint})")
    return _BY_NAME[wanted]


def with_value(limits: OwnerLimits, name: str, text: str) -> OwnerLimits:
    """The limits with one changed. Raises `BadInputError`."""
    key = key_named(name)
    change: dict[str, Any] = {key.field: key.parse(key.name, text)}
    return replace(limits, **change)


def with_values(limits: OwnerLimits, texts: Mapping[str, str]) -> OwnerLimits:
    for name, text in texts.items():
        limits = with_value(limits, name, text)
    return limits


def shown(limits: OwnerLimits) -> dict[str, str]:
    """Every key with its value as people write it."""
    return {key.name: key.show(getattr(limits, key.field)) for key in KEYS}


def read_limits(path: Path) -> OwnerLimits:
    """The limits of the file; the defaults where there is none. Raises `BadInputError` that names file and key.

    An empty file is what a power cut may leave of one: it does not say that its owner limits nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return OwnerLimits()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from None
    if not text.strip("\0 \t\r\n"):
        raise BadInputError(f"{path}: is empty, so your limits are lost; remove it for the defaults, and set them anew")
    try:
        values = tomllib.loads(text)
        return with_values(OwnerLimits(), {name: _as_text(name, value) for name, value in values.items()})
    except (tomllib.TOMLDecodeError, BadInputError) as error:
        raise BadInputError(f"{path}: {error}") from None


def _as_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadInputError(f'{name}: write the value with its unit, in quotes, as in {name} = "off"')
    return value


def write_limits(path: Path, limits: OwnerLimits) -> None:
    """The whole file, each key with its meaning, replaced at once. Raises `BadInputError`."""
    lines = ["# What Barnraise may use of this computer. `barnraise limits` shows and changes it too.", ""]
    for key in KEYS:
        value = json.dumps(key.show(getattr(limits, key.field)), ensure_ascii=False)
        lines += [f"# {key.meaning} For example {key.example!r}.", f"{key.name} = {value}", ""]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, "\n".join(lines).encode())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be written: {error.strerror or error}") from None
