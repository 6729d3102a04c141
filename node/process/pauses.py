"""The owner's own pause on the disk: a restart does not start to work by itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec
import structlog

from node.owner.governor import UserPause
from protocol.base.errors import BadInputError
from protocol.drive.durable import replace_durably

FILE = "owner.json"
PAUSE_S_MAX = 366 * 86400.0


def pause_seconds(for_s: object) -> float | None:
    """How long a pause shall last, None: until it is taken back. Raises `BadInputError`."""
    if for_s is None:
        return None
    if not (isinstance(for_s, int | float) and 0 < for_s < PAUSE_S_MAX):
        raise BadInputError("pause: the time must be more than nothing and less than a year")
    return float(for_s)


def clock_words(unix_s: float, now_unix_s: float) -> str:
    """A time by the owner's clock, with its day where that is not today."""
    when, today = datetime.fromtimestamp(unix_s), datetime.fromtimestamp(now_unix_s)
    return f"{when:%H:%M}" if when.date() == today.date() else f"{when:%a %H:%M}"


def kept_pause(state: Path) -> UserPause | None:
    """What was kept in this state folder; one that cannot be read is none."""
    try:
        return msgspec.json.decode((state / FILE).read_bytes(), type=UserPause | None)
    except (OSError, msgspec.MsgspecError):
        return None


def keep_pause(state: Path, pause: UserPause | None) -> None:
    """Whole or not at all."""
    if pause is not None:
        pause = replace(pause, until_now_s=None)  # that clock begins anew with the computer
    write_whole(state, FILE, msgspec.json.encode(pause))


def write_whole(state: Path, name: str, data: bytes) -> None:
    """Of what the owner's side keeps beside the journal. A full disk costs the count of a minute, and nothing else."""
    try:
        replace_durably(state / name, data)
    except OSError as error:
        structlog.get_logger("owner").warning("cannot be kept", file=name, reason=error.strerror)
