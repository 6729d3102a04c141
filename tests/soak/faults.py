"""The kinds of faults, each with the roles that it can meet, how long it lasts, how it begins and how it ends."""

from __future__ import annotations

import random
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.soak.fleet import Fleet, Process

NODES = ("decider", "front", "back", "spare", "volunteer")
SERVERS = ("decider", "front", "back", "spare")
PLACED = ("decider", "front", "back")
EVERYBODY = ("coordinator", *NODES)
GONE_S = (30.0, 40.0)
"""Longer than a place is kept for a server that is gone: a spare takes it."""
JOURNAL_LOG = "journal.sqlite-wal"
WAL_HEADER, FRAME_HEADER = 32, 24
"""Bytes, in the format of SQLite."""


@dataclass(frozen=True)
class Kind:
    """`begin` and `end` do it to one process; `free`: steps may be done again after it, for state is lost or a place
    is given away."""

    name: str
    roles: tuple[str, ...]
    lasts_s: tuple[float, float]
    begin: Callable[[Fleet, Process, random.Random], None]
    end: Callable[[Fleet, Process], None]
    free: bool = False
    needs_ground: bool = False


def _kill(fleet: Fleet, process: Process, rng: random.Random) -> None:
    fleet.kill(process)


def _again(fleet: Fleet, process: Process) -> None:
    fleet.again(process)


def _stop(fleet: Fleet, process: Process, rng: random.Random) -> None:
    fleet.signal(process, signal.SIGSTOP)


def _continue(fleet: Fleet, process: Process) -> None:
    fleet.signal(process, signal.SIGCONT)


def _hang(lane: str) -> Callable[[Fleet, Process, random.Random], None]:
    def begin(fleet: Fleet, process: Process, rng: random.Random) -> None:
        process.bent.with_suffix(f".{lane}").touch()

    return begin


def _device_stops(fleet: Fleet, process: Process, rng: random.Random) -> None:
    """The daemon lives and answers; what computes for it does nothing any more."""
    for pid in process.pids()[1:]:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).suspend()


def _operator_ends_it(fleet: Fleet, process: Process) -> None:
    """What hangs in a system call cannot be asked to end."""
    fleet.kill(process)
    for lane in ("lane", "disk"):
        process.bent.with_suffix(f".{lane}").unlink(missing_ok=True)
    fleet.again(process)


def _cut_tail(fleet: Fleet, process: Process, rng: random.Random) -> None:
    fleet.kill(process)
    cut_log(process.home / JOURNAL_LOG, rng)


def _torn_tail(fleet: Fleet, process: Process, rng: random.Random) -> None:
    fleet.kill(process)
    tear_log(process.home / JOURNAL_LOG, rng)


def cut_log(wal: Path, rng: random.Random) -> None:
    """The last pages of a log are gone, the first of them in its middle: a disk had acknowledged what it did not
    have."""
    if ends := frame_ends(wal):
        last = len(ends) - 1 - min(rng.randint(0, 3), len(ends) - 1)
        start = ends[last - 1] if last else WAL_HEADER
        with wal.open("r+b") as file:
            file.truncate(rng.randint(start + 1, ends[last] - 1))


def tear_log(wal: Path, rng: random.Random) -> None:
    """Killed in the middle of a write that nobody was promised: behind the last whole page lies part of another."""
    if ends := frame_ends(wal):
        with wal.open("r+b") as file:
            file.seek(WAL_HEADER)
            frame = file.read(ends[0] - WAL_HEADER)
            file.seek(ends[-1])
            file.write(frame[: rng.randint(1, len(frame) - 1)])
            file.truncate()


def frame_ends(wal: Path) -> list[int]:
    """Where each page ends in a write-ahead log of SQLite, of those that count since it was begun anew."""
    data = wal.read_bytes() if wal.exists() else b""
    if len(data) < WAL_HEADER:
        return []
    page, salt = struct.unpack(">I", data[8:12])[0], data[16:24]
    size = FRAME_HEADER + page
    ends = []
    for start in range(WAL_HEADER, len(data) - size + 1, size):
        if data[start + 8 : start + 16] != salt:
            break
        ends.append(start + size)
    return ends


def _fill(folder: Callable[[Fleet, Process], Path]) -> Callable[[Fleet, Process, random.Random], None]:
    def begin(fleet: Fleet, process: Process, rng: random.Random) -> None:
        with suppress(OSError), (folder(fleet, process) / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        with suppress(OSError), (folder(fleet, process) / "fill").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 8))

    return begin


def _empty(folder: Callable[[Fleet, Process], Path]) -> Callable[[Fleet, Process], None]:
    def end(fleet: Fleet, process: Process) -> None:
        (folder(fleet, process) / "fill").unlink(missing_ok=True)

    return end


def _home(fleet: Fleet, process: Process) -> Path:
    return process.home


def _shared(fleet: Fleet, process: Process) -> Path:
    return fleet.checkpoints


def _cut_off(fleet: Fleet, process: Process, rng: random.Random) -> None:
    fleet.ground.cut(process.name)


def _joined(fleet: Fleet, process: Process) -> None:
    fleet.ground.join(process.name)


def _clock_jumps(fleet: Fleet, process: Process, rng: random.Random) -> None:
    process.bent.with_suffix(".clock").touch()


def _clock_back(fleet: Fleet, process: Process) -> None:
    process.bent.with_suffix(".clock").unlink(missing_ok=True)


KINDS = (
    Kind("kill", EVERYBODY, (0.1, 8.0), _kill, _again),
    Kind("kill, gone for long", ("coordinator", *PLACED), GONE_S, _kill, _again, free=True),
    Kind("stop", EVERYBODY, (1.0, 15.0), _stop, _continue),
    Kind("hang of the lane", PLACED, GONE_S, _hang("lane"), _operator_ends_it, free=True),
    Kind("hang of the disk", PLACED, GONE_S, _hang("disk"), _operator_ends_it, free=True),
    Kind("hang of the device", ("volunteer",), (5.0, 25.0), _device_stops, _continue),
    Kind("cut tail", PLACED, (0.1, 3.0), _cut_tail, _again, free=True),
    Kind("torn tail", PLACED, (0.1, 3.0), _torn_tail, _again),
    Kind("full disk", EVERYBODY, (2.0, 10.0), _fill(_home), _empty(_home), needs_ground=True),
    Kind("full checkpoints", ("spare",), (5.0, 15.0), _fill(_shared), _empty(_shared), needs_ground=True),
    Kind("partition", EVERYBODY, (2.0, 15.0), _cut_off, _joined, needs_ground=True),
    Kind("clock jump", EVERYBODY, (2.0, 15.0), _clock_jumps, _clock_back),
)
"""A clock jumps by 200 s, of the 300 s by which clocks may differ, and back again."""
