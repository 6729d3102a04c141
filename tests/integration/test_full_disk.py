"""A state folder on a disk without room: a volunteer ends with one sentence or pauses by name, and nothing that was
there is lost; a server ends so that its unit begins it again.

The disk is a file system in memory of some megabytes, in a mount namespace of the process's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, JoinRole, sign_statement

PATIENCE_S = 120.0
MOUNT = 'mount -t tmpfs -o size=1m none "$1" && mkdir "$1/state" && echo kept > "$1/state/mine"'
FILL = 'head -c $(($2 * 1024)) /dev/zero > "$1/hold"; cat /dev/zero > "$1/fill" 2> /dev/null; rm "$1/hold"'
LOOK = 'trap "" INT; shift 2; "$@"; code=$?; cat "$home/state/mine"; exit $code'
SCRIPT = f"home=$1; {MOUNT} && {{ {FILL}; {LOOK}; }}"
BEGIN = '"$@" > "$home/out" 2>&1 & server=$!; while [ ! -s "$home/state/metrics.json" ]; do sleep 0.1; done'
"""Its caller ends it where the file does not come."""
CUT = 'kill -9 $server; wait $server 2> /dev/null; rm "$home/out"; cat /dev/zero > "$home/fill" 2> /dev/null'
AGAIN = f'home=$1; shift; mount -t tmpfs -o size=4m none "$home" && {{ {BEGIN}; {CUT}; exec "$@"; }}'


def link(role: JoinRole = "volunteer") -> str:
    """A sound link to a coordinator that nobody runs."""
    issuer = Identity(bytes(32))
    invite = Invite(
        issuer=issuer.public_key, run_id=bytes(16), role=role, uses=1, not_after=int(time.time()) + 3600,
        nonce=bytes(16),
    )  # fmt: skip
    return str(JoinLink(("127.0.0.1:9",), sign_statement(invite, issuer)))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Where the small disk will be; skips where this machine allows no mounts."""
    tried = shutil.which("unshare") and subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k none "$0"', str(tmp_path)], capture_output=True
    )
    if not tried or tried.returncode:
        pytest.skip("this machine allows no mount in a namespace, so NO disk was filled here")
    return tmp_path


def join(disk: Path, free_kb: int) -> subprocess.Popen[str]:
    """`barnraise join` with so much room in its state folder."""
    command = [sys.executable, "-m", "protocol.cli", "join", link(), "--yes", "--no-benchmark", "--no-page", "--always"]
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", SCRIPT, "sh", str(disk), str(free_kb), *command, "--state", str(disk / "state")],
        env={**os.environ, "BARNRAISE_CONFIG": str(disk / "config"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("free_kb", [0, 16, 64])
def test_no_room_for_the_journal_ends_it_with_a_sentence(disk: Path, free_kb: int) -> None:
    """At once, with an exit code that is no success; what lay in the folder is still there."""
    with join(disk, free_kb) as child:
        said, _ = child.communicate(timeout=PATIENCE_S)
    *lines, kept = said.strip().splitlines()
    assert child.returncode in (1, 2) and kept == "kept", said
    assert "Traceback" not in said and "no space left on" in lines[-1].lower(), said


@pytest.mark.slow
def test_little_room_holds_it_back_by_name(disk: Path) -> None:
    """There is room for its journal and no more: it does not work, says that it is for want of disk, and ends well."""
    with join(disk, 512) as child:
        assert child.stdout is not None
        killer = threading.Timer(PATIENCE_S, lambda: os.killpg(child.pid, signal.SIGKILL))
        killer.start()
        try:
            held = next(line for line in _events(child.stdout) if line["event"] == "holding back")
            assert held["reason"] == "disk"
            os.killpg(child.pid, signal.SIGINT)
            *events, last = child.stdout.read().strip().splitlines()
        finally:
            killer.cancel()
    assert child.returncode == 0 and last == "kept", events
    assert [json.loads(line)["event"] for line in events][-2:] == ["thanks", "ended"]


@pytest.mark.slow
def test_a_server_on_a_disk_that_became_full_does_not_end_as_one_that_was_called_wrongly(disk: Path) -> None:
    """It was killed, and its disk is full when it begins again: with 2 its unit would never try once there is room."""
    command = [
        sys.executable,
        "-m",
        "protocol.cli",
        "server",
        link("server"),
        "--listen",
        "127.0.0.1:0",
        "--no-compute",
    ]
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", AGAIN, "sh", str(disk), *command, "--state", str(disk / "state")],
        env={**os.environ, "BARNRAISE_CONFIG": str(disk / "config"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as child:  # fmt: skip
        try:
            said, _ = child.communicate(timeout=PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 1, said
    assert "Traceback" not in said and "no space left on" in said.strip().splitlines()[-1].lower(), said


def _events(lines: IO[str]) -> Iterator[dict[str, str]]:
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)
