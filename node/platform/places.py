"""Where an owner's files lie: settings for all runs, and who runs now."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from platformdirs import user_config_path

CONFIG_VARIABLE = "BARNRAISE_CONFIG"
CONTROL_FILE = "control.json"
FURTHER = "device-"
"""How the folders of further devices are called, before their numbers."""


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


def device_folder(state: Path, place: int) -> Path:
    """The state folder of the device at `place` among those that an owner chose: each is a member of the run. The first
    one's is `state` itself, where all that belongs to the computer lies, too."""
    return state if place == 0 else state / f"{FURTHER}{place + 1}"


def device_folders(state: Path) -> list[Path]:
    """Of all devices that have worked with this state folder."""
    further = [path for path in state.glob(f"{FURTHER}*") if path.name.removeprefix(FURTHER).isdigit()]
    return [state, *sorted(further, key=lambda path: int(path.name.removeprefix(FURTHER)))]
