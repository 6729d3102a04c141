"""What `barnraise join` needs can be imported where a system lacks what only POSIX has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import POSIX_NAMES, POSIX_ONLY

ROOT = Path(__file__).parents[3]
JOIN_NEEDS = (
    "node.commands.members",
    "node.commands.netcheck",
    "node.process.daemon",
    "node.visit.enquiry",
    "node.platform.pairs",
)
"""What a volunteer's process imports, now or when it first links."""

HIDE = """
import builtins, os, signal, socket, sys, types
import aiortc, aioquic.quic.connection, click, platformdirs, structlog
import hypercorn.trio, prometheus_client, psutil, rich.live, starlette.applications, torch, trio

hidden, names = set(sys.argv[1].split()), sys.argv[2].split()
for place in (socket, os, signal):
    for name in [*names, "SIGHUP"]:
        if hasattr(place, name):
            delattr(place, name)
free = builtins.__import__
asked = []

def guarded(name, globals=None, *rest):
    importer = str((globals or {}).get("__name__", ""))
    if name.split(".")[0] in hidden and importer.split(".")[0] in ("node", "protocol", "coordinator"):
        asked.append((importer, name))
        raise ImportError(f"{importer} asks for {name}, which this system lacks")
    return free(name, globals, *rest)

builtins.__import__ = guarded
if "protocol.drive.file_lock" not in sys.argv[3:]:
    # The one module that asks which system this is shall see the other one.
    sys.modules["msvcrt"], sys.platform, real = types.ModuleType("msvcrt"), "win32", sys.platform
    import protocol.drive.file_lock
    sys.platform = real
for module in sys.argv[3:]:
    free(module)
assert not asked, asked
print(len([name for name in sys.modules if name.split(".")[0] == "node"]))
"""


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that imports these with everything hidden."""
    command = [sys.executable, "-c", HIDE, " ".join(sorted(POSIX_ONLY)), " ".join(sorted(POSIX_NAMES)), *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_join_needs_nothing_that_only_posix_has() -> None:
    """fcntl, pwd, termios, AF_UNIX, pass_fds, SIGHUP are hidden from our modules; everything imports all the same."""
    done = run(*JOIN_NEEDS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.mark.slow
def test_the_hiding_hides() -> None:
    """A module of ours that asks for fcntl is caught, or the test above says nothing."""
    done = run("protocol.drive.file_lock")
    assert done.returncode == 1
    assert "protocol.drive.file_lock asks for fcntl" in done.stderr
