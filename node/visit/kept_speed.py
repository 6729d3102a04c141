"""How fast this computer was when its owner last saw it measured: for starts at which nobody is there to be asked.

A measurement takes the whole device for some seconds, which only somebody who has just asked for it should get: one
that the system starts at logon says to the run what was measured then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from node.compute.devices.choice import DeviceChoice
from node.process.pauses import write_whole

FILE = "speed.json"


class KeptSpeeds(msgspec.Struct, frozen=True):
    """One measurement, and what it holds for."""

    terms_hash: str
    """Of the run's terms, hex: another model has another speed."""
    devices: tuple[str, ...]
    threads: int
    tokens_per_s: tuple[float, ...]
    """Of each device."""


def keep_speeds(
    state: Path, terms_hash: str, choices: Sequence[DeviceChoice], threads: int, tokens_per_s: Sequence[float]
) -> None:
    """In the state folder; a disk that is full costs the figures, and nothing else."""
    kept = KeptSpeeds(terms_hash, tuple(map(str, choices)), threads, tuple(tokens_per_s))
    write_whole(state, FILE, msgspec.json.encode(kept))


def kept_speeds(
    state: Path, terms_hashes: Sequence[str], choices: Sequence[DeviceChoice], threads: int
) -> tuple[float, ...]:
    """Tokens a second of each device; 0 where none were measured for these very terms, devices and threads."""
    devices = tuple(map(str, choices))
    nothing = (0.0,) * len(devices)
    try:
        kept = msgspec.json.decode((state / FILE).read_bytes(), type=KeptSpeeds)
    except (OSError, msgspec.MsgspecError):
        return nothing
    same = kept.terms_hash in terms_hashes and (kept.devices, kept.threads) == (devices, threads)
    return kept.tokens_per_s if same and len(kept.tokens_per_s) == len(devices) else nothing
