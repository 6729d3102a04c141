"""Counts how often a server has crashed in the same way without having closed a version in between.

A crash is a bug, or a disk that gives back what nobody wrote. Whoever looks after the process starts it again, and
mostly that is all it takes. If it comes back at once the state is given up, and the run goes to its last checkpoint;
if not even that helps the process stays down, with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import trio

from node.machine.jobs import SHARD_JOBS
from node.process.journal import Journal, JournalError
from node.process.store import StoreFullError
from protocol.base.errors import BadInputError, ProtocolError

GIVE_UP_AFTER = 3
"""Equal crashes in a row after which the state on the disk is no longer taken for what it was."""
CRASHES_MAX = 5
"""After so many the process is not started any more."""
_REASON_CHARACTERS = 200
_ARITHMETIC = frozenset(job.__name__ for job in SHARD_JOBS)
_ORDINARY = (BadInputError, ProtocolError, JournalError, StoreFullError, KeyboardInterrupt, SystemExit, trio.Cancelled)
"""Ends that have a sentence of their own."""


class _Crash(msgspec.Struct, frozen=True):
    reason: str
    count: int


class Crashes:
    """Of the server with this journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        kept = journal.meta("crash")
        self._last = _Crash("", 0) if not kept else msgspec.msgpack.decode(kept, type=_Crash)

    def check(self, folder: Path) -> None:
        """Raises `BadInputError` when a further start would end like those before."""
        if self._last.count >= CRASHES_MAX:
            raise BadInputError(
                f"{folder}: this server has crashed {self._last.count} times in a row in the same way"
                f" ({self._last.reason}); please report this, and give it an empty folder with --state"
            )

    @property
    def gives_up(self) -> str:
        """Why this start must not go by what is on the disk, or nothing."""
        if self._last.count < GIVE_UP_AFTER:
            return ""
        return f"{self._last.count} crashes in a row: {self._last.reason}"

    @property
    def are_known(self) -> bool:
        """Whether there is anything to forget."""
        return self._last.count > 0

    def forget(self) -> None:
        """It works again."""
        if self.are_known:
            self._last = _Crash("", 0)
            self._journal.set_meta("crash", b"")

    @contextmanager
    def counted(self, is_ordinary: Callable[[BaseException], bool] = lambda error: False) -> Iterator[None]:
        """Notes how the body ends, if it crashes; what `is_ordinary` knows is no crash."""
        try:
            yield
        except BaseException as error:
            first = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, _ORDINARY) and not is_ordinary(first):
                self.note(f"{type(first).__name__}: {first}")
            raise

    def ended(self, reason: str) -> None:
        """It has ended itself. Because it cannot do its arithmetic: that is a crash like others."""
        if reason.removeprefix("failed: ").partition(":")[0] in _ARITHMETIC:
            self.note(reason)

    def note(self, reason: str) -> None:
        """It has crashed."""
        reason = reason[:_REASON_CHARACTERS]
        count = self._last.count + 1 if reason == self._last.reason else 1
        self._journal.set_meta("crash", msgspec.msgpack.encode(_Crash(reason, count)))
