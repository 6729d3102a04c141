"""Where an owner's files lie: settings for all runs, and who runs now."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from platformdirs import user_config_path

CONFIG_VARIABLE = "BARNRAISE_CONFIG"
CONTROL_FILE = "control.json"
PROCESS_FILE = "process.json"
"""In the state folder of a server or an auditor, which has no door for an owner."""
FURTHER = "device-"
"""How the folders of further devices are called, before their numbers."""


def settings_folder() -> Path:
    """limits.toml and consents.json."""
    given = os.environ.get(CONFIG_VARIABLE)
    return Path(given) if given else user_config_path("barnraise")


def limits_file() -> Path:
    return settings_folder() / "limits.toml"


def note_running(folder: Path) -> Path:
    """Writes down that a daemon works from this state folder, so that commands without `--state` find it. Notes of
    those that were killed, and will not clean up any more, go."""
    place = settings_folder() / "running"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in place.glob("*"):
        with suppress(OSError):
            pid = noted_pid(Path(old.read_text()))
            if pid is None or not psutil.pid_exists(pid):
                old.unlink()
    whole = str(folder.absolute())
    note = place / hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
    note.write_text(whole)
    return note


def note_process(folder: Path) -> Callable[[], None]:
    """Writes down that this process works from that state folder: a lent card beside it takes it for no game. Returns
    what takes that back. A home without room costs the note, and nothing else."""
    file, note = folder / PROCESS_FILE, None
    with suppress(OSError):
        file.write_text(json.dumps({"pid": os.getpid()}))
        note = note_running(folder)

    def forget() -> None:
        for path in (file, note):
            if path is not None:
                with suppress(OSError):
                    path.unlink()

    return forget


def noted_pid(folder: Path) -> int | None:
    """The process that has noted itself in a state folder; it may have been killed since."""
    for name in (CONTROL_FILE, PROCESS_FILE):
        with suppress(OSError, ValueError, KeyError, TypeError):  # it has ended, or begins at this moment
            return int(json.loads((folder / name).read_text())["pid"])
    return None


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
