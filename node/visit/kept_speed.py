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


class KeptSpeed(msgspec.Struct, frozen=True):
    """One measurement, and what it holds for."""

    terms_hash: str
    """Of the run's terms, hex: another model has another speed."""
    device: str
    threads: int
    tokens_per_s: float


def keep_speed(state: Path, terms_hash: str, choice: DeviceChoice, threads: int, tokens_per_s: float) -> None:
    """In the state folder; a disk that is full costs the figure, and nothing else."""
    write_whole(state, FILE, msgspec.json.encode(KeptSpeed(terms_hash, str(choice), threads, tokens_per_s)))


def kept_speed(state: Path, terms_hashes: Sequence[str], choice: DeviceChoice, threads: int) -> float:
    """Tokens a second; 0 where none were measured for these very terms, device and threads."""
    try:
        kept = msgspec.json.decode((state / FILE).read_bytes(), type=KeptSpeed)
    except (OSError, msgspec.MsgspecError):
        return 0.0
    same = kept.terms_hash in terms_hashes and (kept.device, kept.threads) == (str(choice), threads)
    return kept.tokens_per_s if same else 0.0
