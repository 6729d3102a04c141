"""What a node asks the computer it runs on: one interface, by whose readings the owner's limits are kept.

`sensors_here` gives the sensors of this system; tests and rehearsals name a file instead (`BARNRAISE_SENSORS`), from
which every reading is taken. A reading that a system does not have is None and holds nothing back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from node.owner.governor import Moment, Readings, cut_name
from node.platform import gpu
from node.platform.games import is_game
from protocol.base.errors import BadInputError

FAKE_VARIABLE = "BARNRAISE_SENSORS"
YOUNG_S = 3.0
"""A process may change its name so soon after it began (a shell that becomes the game)."""
SLOW_S = 5.0
"""Disk use, battery and network are asked this often; programs, idle time and heat at every look."""


class Desktop(Protocol):
    """What each system knows in its own way."""

    def idle_s(self) -> float | None:
        """Seconds since keyboard or mouse were used."""

    def full_screen(self) -> int | None:
        """The process whose window fills the screen, where the system tells."""

    def metered(self) -> bool | None:
        """Whether the network is paid by volume."""


class Sensors(Protocol):
    """See the module."""

    gpu: bool
    """Whether the device that works is a GPU."""

    def device_is(self, accelerator: bool, gpus: Sequence[str]) -> None:
        """What computes, as the devices' processes have found: whose heat and power count. `gpus`: how NVIDIA's driver
        calls each of them; empty: it is none of that driver's."""

    def read(self) -> Readings:
        """All of them now; takes some milliseconds, so in a thread."""

    def moment(self) -> Moment:
        """What time it is."""

    def describe(self) -> dict[str, str]:
        """Sensor by sensor, what this computer has: for `barnraise doctor`."""


def sensors_here(state: Path, own_pids: Callable[[], list[int]]) -> Sensors:
    """The sensors of this computer, or the file that stands in for them.

    Args:
        own_pids: our processes, which are nobody's game and no other program.
    """
    fake = os.environ.get(FAKE_VARIABLE)
    if fake:
        return FileSensors(Path(fake))
    return SystemSensors(state, own_pids)


def desktop_here() -> Desktop:
    """The system's own part, imported only there."""
    if sys.platform == "win32":
        from node.platform.windows import WindowsDesktop

        return WindowsDesktop()
    if sys.platform == "darwin":
        from node.platform.macos import MacDesktop

        return MacDesktop()
    from node.platform.linux import LinuxDesktop

    return LinuxDesktop()


def clock_s() -> float:
    """A clock that never goes back and goes on while the computer sleeps, where the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def moment_at(now_s: float, unix_s: float) -> Moment:
    local = datetime.fromtimestamp(unix_s)
    return Moment(now_s, unix_s, (local.weekday() * 24 + local.hour) * 60 + local.minute)


class SystemSensors:
    """Readings by psutil, NVML and the desktop."""

    def __init__(self, state: Path, own_pids: Callable[[], list[int]]) -> None:
        self.gpu = False
        self._gpus: tuple[str, ...] = ()
        self._state = state
        self._own_pids = own_pids
        self._desktop = desktop_here()
        self._names: dict[int, tuple[str, bool, float]] = {}
        """Name, whether it is a game by where it lies, and when it was first seen, by process."""
        self._slow_at_s = float("-inf")
        self._slow = Readings()
        self._own_cpu: dict[int, float] = {}
        self._cpu_at_s = 0.0
        psutil.cpu_percent()

    def moment(self) -> Moment:
        return moment_at(clock_s(), time.time())

    def device_is(self, accelerator: bool, gpus: Sequence[str]) -> None:
        self.gpu, self._gpus = accelerator, tuple(gpus)

    def read(self) -> Readings:
        now_s = clock_s()
        own = self._own_pids()
        self._look_at_processes(now_s)
        if now_s >= self._slow_at_s + SLOW_S:
            self._slow_at_s = now_s
            self._slow = self._read_slow(own, now_s)
        games = [name for pid, (name, game, _) in self._names.items() if game and pid not in own]
        filling = self._desktop.full_screen()
        if filling in self._names and filling not in own:
            games.append(self._names[filling][0])
        each = [gpu.read(name) for name in self._gpus]
        heat = gpu.worst([reading for reading in each if reading is not None])
        games += [self._names[pid][0] for pid in gpu.foreign_pids(own) if pid in self._names]
        return Readings(
            idle_s=self._desktop.idle_s(),
            programs=tuple(sorted({name for name, _, _ in self._names.values()})),
            games=tuple(dict.fromkeys(games)),
            other_cpu_ratio=self._slow.other_cpu_ratio,
            on_battery=self._slow.on_battery,
            metered=self._slow.metered,
            temperature_c=heat.temperature_c if heat is not None else None if self.gpu else _processor_c(),
            power_w=heat.power_w if heat is not None else None,
            each_device=tuple(
                (None, None) if reading is None else (reading.temperature_c, reading.power_w) for reading in each
            )
            if len(each) > 1
            else (),
            memory_free_bytes=float(psutil.virtual_memory().available),
            own_memory_bytes=_resident_bytes(own),
            disk_free_bytes=self._slow.disk_free_bytes,
            own_disk_bytes=self._slow.own_disk_bytes,
        )

    def _look_at_processes(self, now_s: float) -> None:
        """Names of processes that are new or young; the others are remembered. A look costs a listing of numbers."""
        pids = psutil.pids()
        present = dict.fromkeys(pids)
        for pid in [pid for pid in self._names if pid not in present]:
            del self._names[pid]
        for pid in pids:
            known = self._names.get(pid)
            if known is not None and now_s > known[2] + YOUNG_S:
                continue
            try:
                process = psutil.Process(pid)
                name, path = process.name(), _path_of(process)
            except (psutil.Error, OSError):
                continue
            self._names[pid] = (cut_name(name), is_game(path, name), now_s if known is None else known[2])

    def _read_slow(self, own: list[int], now_s: float) -> Readings:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        try:
            there = next(folder for folder in (self._state, *self._state.parents) if folder.exists())
            free_bytes = float(psutil.disk_usage(str(there)).free)
        except (OSError, StopIteration):
            free_bytes = None
        return Readings(
            other_cpu_ratio=self._others(own, now_s),
            on_battery=None if battery is None or battery.power_plugged is None else not battery.power_plugged,
            metered=self._desktop.metered(),
            disk_free_bytes=free_bytes,
            own_disk_bytes=_folder_bytes(self._state),
        )

    def _others(self, own: list[int], now_s: float) -> float | None:
        """The part of all processors that others kept busy since the last look."""
        all_ratio = float(psutil.cpu_percent()) / 100
        used: dict[int, float] = {}
        for pid in own:
            try:
                times = psutil.Process(pid).cpu_times()
                used[pid] = times.user + times.system
            except psutil.Error:
                continue
        passed_s, self._cpu_at_s = now_s - self._cpu_at_s, now_s
        before, self._own_cpu = self._own_cpu, used
        if passed_s <= 0 or not before:
            return None
        ours_s = sum(max(0.0, seconds - before.get(pid, seconds)) for pid, seconds in used.items())
        return max(0.0, all_ratio - float(ours_s) / passed_s / (psutil.cpu_count() or 1))

    def describe(self) -> dict[str, str]:
        """For `barnraise doctor`: each sensor with what it says, or that this computer has none."""
        time.sleep(0.2)
        self._slow_at_s = float("-inf")
        return describe_readings(self.read())


def describe_readings(now: Readings) -> dict[str, str]:
    """Every sensor in a few words."""

    def says(value: object, text: str) -> str:
        return "this computer has no such sensor" if value is None else text

    return {
        "idle": says(now.idle_s, f"keyboard and mouse unused for {now.idle_s or 0:.0f} s"),
        "programs": f"{len(now.programs)} names" + (f", games: {', '.join(now.games)}" if now.games else ""),
        "battery": says(now.on_battery, "on battery" if now.on_battery else "plugged in"),
        "network": says(now.metered, "metered" if now.metered else "not metered"),
        "temperature": says(now.temperature_c, f"{now.temperature_c or 0:.0f} C"),
        "power": says(now.power_w, f"{now.power_w or 0:.0f} W"),
        "memory": says(now.memory_free_bytes, f"{(now.memory_free_bytes or 0) / 1e9:.1f} GB free"),
        "disk": says(now.disk_free_bytes, f"{(now.disk_free_bytes or 0) / 1e9:.1f} GB free"),
    }


def _path_of(process: psutil.Process) -> str:
    try:
        return str(process.exe())
    except (psutil.Error, OSError):
        return ""


def _processor_c() -> float | None:
    """The hottest sensor of the processor; a virtual machine has none."""
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    found = psutil.sensors_temperatures()
    heats: list[Any] = [
        entry.current for name in ("coretemp", "k10temp", "cpu_thermal", "acpitz") for entry in found.get(name, ())
    ]
    return max((float(heat) for heat in heats), default=None)


def _resident_bytes(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total


def _folder_bytes(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # it went away meanwhile
            continue
    return float(total)


class FileSensors:
    """All readings from a JSON file that may change at any time: for tests, and for trying limits out.

    Beside the fields of `Readings` it may hold `clock_offset_s` (the wall clock and the steady one are ahead by that),
    `wall_offset_s` (only the wall clock is) and `gpu`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.gpu = bool(self._values().get("gpu", False))

    def _values(self) -> dict[str, object]:
        try:
            values = json.loads(self._path.read_text())
            if not isinstance(values, dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as error:
            raise BadInputError(f"{FAKE_VARIABLE}={self._path}: {error}") from None
        return values

    def device_is(self, accelerator: bool, gpus: Sequence[str]) -> None:
        """The file says what heat there is, and of what."""
        self.gpu = bool(self._values().get("gpu", accelerator))

    def read(self) -> Readings:
        try:
            values = self._values()
        except BadInputError:  # it is being written
            values = self._values()
        fields = {name: values[name] for name in Readings.__dataclass_fields__ if name in values}
        return msgspec.convert(fields, Readings)

    def moment(self) -> Moment:
        values = self._values()
        both_s, wall_s = (float(str(values.get(name, 0.0))) for name in ("clock_offset_s", "wall_offset_s"))
        return moment_at(clock_s() + both_s, time.time() + both_s + wall_s)

    def describe(self) -> dict[str, str]:
        return {**describe_readings(self.read()), "source": f"{self._path} ({FAKE_VARIABLE})"}
