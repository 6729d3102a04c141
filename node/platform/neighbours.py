"""Other daemons of Barnraise on this computer, each with a card: none is the other's game."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from node.platform.places import noted_folders, noted_pid

WORDS = ("barnraise", "protocol.cli")
"""One of them stands in the command line of every daemon."""


def is_neighbours(pid: int) -> bool:
    """Whether the process is a daemon of Barnraise here, or was started by one."""
    daemons = {found for folder in noted_folders() if (found := noted_pid(folder)) is not None}
    try:
        line = [psutil.Process(pid)]
        line += line[0].parents()
    except (psutil.Error, OSError):
        return False
    return any(process.pid in daemons and _is_daemon(process) for process in line)


def folders_of(word: str) -> list[Path]:
    """State folders of the daemons here whose command line has this word: the file of a service's link, say."""
    found = []
    for folder in noted_folders():
        pid = noted_pid(folder)
        with suppress(psutil.Error, OSError):
            if pid is not None and word in psutil.Process(pid).cmdline():
                found.append(folder)
    return found


def _is_daemon(process: psutil.Process) -> bool:
    """The note of a daemon that could not clean up stays, and a game may have been given its number since."""
    try:
        words = " ".join(process.cmdline()).lower()
    except (psutil.Error, OSError):
        return False
    return any(word in words for word in WORDS)
