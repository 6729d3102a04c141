"""Where an owner's files lie: settings for all runs, and who runs now."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from platformdirs import user_config_path

CONFIG_VARIABLE = "BARNRAISE_CONFIG"
CONTROL_FILE = "control.json"


def settings_folder() -> Path:
    """limits.toml and consents.json."""
    given = os.environ.get(CONFIG_VARIABLE)
    return Path(given) if given else user_config_path("barnraise")


def limits_file() -> Path:
    return settings_folder() / "limits.toml"


def note_running(folder: Path) -> Path:
    """Writes down that a daemon works from this state folder, so that commands without `--state` find it."""
    place = settings_folder() / "running"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = str(folder.absolute())
    note = place / hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
    note.write_text(whole)
    return note


def noted_folders() -> list[Path]:
    """State folders of daemons that run here, or ran and could not clean up."""
    place = settings_folder() / "running"
    return sorted(Path(note.read_text()) for note in place.glob("*")) if place.is_dir() else []
