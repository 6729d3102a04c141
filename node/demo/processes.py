"""The demo's children: ordinary `barnraise` commands, each with a state folder and a log; ended whatever happens."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

GRACE_S = 15.0
"""How long children may take to end when asked, before they are killed."""
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 2000


@dataclass(slots=True)
class Child:
    """One process. `name` is its folder's and what people read."""

    name: str
    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes] = field(repr=False)
    within_count: int = 0
    """Words of the command before ours."""
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        """The end of what it wrote: for the message when it failed."""
        with self.log_path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    @property
    def log_path(self) -> Path:
        return self.folder / "log"


class Children:
    """All processes of a demo. Use as a context: at its end none of them is left."""

    module = "protocol.cli"
    """What `python -m` runs."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._children)
        for child in self._children:
            child.log.close()

    @property
    def running(self) -> list[Child]:
        return [child for child in self._children if child.running]

    def start(self, name: str, folder: Path, arguments: Iterable[str], within: Sequence[str] = ()) -> Child:
        """Starts `barnraise ARGUMENTS`. Its output goes to the file `log` in its folder.

        `within`: a command that runs the command, such as `ip netns exec NAME`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log").open("ab")
        command = [*within, sys.executable, "-m", self.module, *arguments]
        # A session of its own: Ctrl-C in the terminal is for the demo, which then ends its children in order.
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        child = Child(name, command, folder, process, log, len(within))
        self._children.append(child)
        return child

    def again(self, child: Child) -> Child:
        """Starts the same command on the same state, after the process has ended."""
        assert not child.running
        child.log.close()
        self._children.remove(child)
        within, ours = child.command[: child.within_count], child.command[child.within_count :]
        return self.start(child.name, child.folder, ours[3:], within)

    def kill(self, child: Child) -> None:
        """SIGKILL: no last word, no clean-up."""
        child.process.kill()
        child.process.wait()

    def end(self, children: Iterable[Child]) -> None:
        """Asks them to end, waits, and kills those that do not."""
        waiting = [child for child in children if child.running]
        for child in waiting:
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for child in waiting:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(child)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """In the child, before it becomes the command: even if the demo itself is killed, nothing is left behind."""
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
