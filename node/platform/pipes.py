"""Pipes between processes of ours."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import IO

PIPE_BYTES = 1 << 20
"""Linux gives a pipe no more to who is not root."""


def widen(pipe: IO[bytes] | None) -> None:
    """Lets a pipe hold as much as one write of ours, where the system can: who reads it beside a thread that is busy
    in Python waits for a turn after each piece (of 64 KB: 300 ms for a microbatch of 4 MB, of 1 MB: 25)."""
    if sys.platform == "linux" and pipe is not None:
        import fcntl

        with suppress(OSError):  # the user's pipes may hold no more in all
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
