"""What every test needs that makes network namespaces: to know that it can, and to be the only one."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_S = 900.0
PROBE_S = 20.0


def why_not(programs: Sequence[str], probe: Sequence[str], lacking: str) -> str:
    """Why there can be no namespaces of the kind that a test needs, or an empty string.

    `probe`: a command that must succeed; NAME in it stands for a namespace that is there meanwhile. `lacking`: the
    words for the case that it does not.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (./deploy/test-deps installs them)"
    name = f"br-probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=PROBE_S)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.decode().strip()}"
    try:
        command = [name if word == "NAME" else word for word in probe]
        tried = subprocess.run(command, capture_output=True, timeout=PROBE_S)
        return f"{lacking}: {tried.stderr.decode().strip()}" if tried.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=PROBE_S)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds a lock that all processes of this machine see: the namespaces of a kind have fixed names."""
    with path.open("w") as lock:
        deadline = time.monotonic() + LOCK_S
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            assert time.monotonic() < deadline, f"somebody else holds {path}"
            time.sleep(0.5)
        yield
