"""How fast this computer was when its owner last saw it measured: for starts at which nobody is there to be asked.

A measurement takes the whole device for some seconds, which only somebody who has just asked for it should get: one
that the system starts at logon says to the run what was measured then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from node.compute.devices.choice import DeviceChoice
from node.process.pauses import write_whole

FILE = "speed.json"


class KeptSpeeds(msgspec.Struct, frozen=True):
    """One measurement, and what it holds for."""

    terms_hash: str
    """Of the run's terms, hex: another model has another speed."""
    threads: int
    speeds: dict[str, float] = {}
    """Tokens a second, by device."""
    device: str = ""
    tokens_per_s: float = 0.0
    """The same as builds wrote it that knew one device."""


def keep_speeds(
    state: Path, terms_hash: str, choices: Sequence[DeviceChoice], threads: int, tokens_per_s: Sequence[float]
) -> None:
    """In the state folder; a disk that is full costs the figures, and nothing else."""
    speeds = {str(choice): speed for choice, speed in zip(choices, tokens_per_s, strict=True)}
    write_whole(state, FILE, msgspec.json.encode(KeptSpeeds(terms_hash, threads, speeds)))


def kept_speeds(
    state: Path, terms_hashes: Sequence[str], choices: Sequence[DeviceChoice], threads: int
) -> tuple[float, ...]:
    """Tokens a second of each device; 0 where it was not measured for these very terms and threads."""
    speeds: dict[str, float] = {}
    with suppress(OSError, msgspec.MsgspecError):
        kept = msgspec.json.decode((state / FILE).read_bytes(), type=KeptSpeeds)
        if kept.terms_hash in terms_hashes and kept.threads == threads:
            speeds = {kept.device: kept.tokens_per_s, **kept.speeds}
    return tuple(speeds.get(str(choice), 0.0) for choice in choices)
