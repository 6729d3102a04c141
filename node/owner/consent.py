"""The owner's yes, kept for each run, and how it is taken back.

A program without a terminal cannot ask: it starts only with `--yes` or where a yes was kept. What was agreed to is
kept with it, so that a run whose terms have changed asks again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocol.base.errors import BadInputError
from protocol.drive.durable import replace_durably

FILE = "consents.json"


class Consent(msgspec.Struct, frozen=True):
    """One run that the owner said yes to."""

    run: str
    """Its name."""
    since_unix_s: float
    config_hash: str
    """Of the configuration and the operator's words that were shown, hex: others have to be asked about."""


def read_consents(folder: Path) -> dict[str, Consent]:
    """By run id (hex). Raises `BadInputError` when the file is damaged: a yes is never guessed."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Consent])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInputError(f"{path}: cannot be used: {error}; remove it to be asked anew") from None


def keep_consent(folder: Path, run_id: str, consent: Consent) -> None:
    _write(folder, {**read_consents(folder), run_id: consent})


def withdraw_consent(folder: Path, run_id: str) -> bool:
    """Returns whether there was one."""
    consents = read_consents(folder)
    if consents.pop(run_id, None) is None:
        return False
    _write(folder, consents)
    return True


def _write(folder: Path, consents: dict[str, Consent]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_durably(folder / FILE, msgspec.json.format(msgspec.json.encode(consents), indent=1))
    except OSError as error:
        raise BadInputError(f"{folder / FILE}: cannot be written: {error.strerror or error}") from None
