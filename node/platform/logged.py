"""The command with its words in a file, for a system that starts it without a console:

pythonw -m node.platform.logged LOG join LINK …

Windows' scheduler redirects nothing, and a shell that does shows a window for as long as the daemon lives, and reads
quotes in a way of its own.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

LOG_BYTES_MAX = 16 << 20
"""A log that is longer at a start goes on in a new file; the one before is kept."""


def log_to(path: Path) -> None:
    """From here on everything that is said goes to the end of this file, also what children say."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # there is none yet, or somebody reads the old one
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_suffix(".old"))
    # Line by line: whoever looks for a fault reads it while the daemon lives. Without a console there are no streams.
    sys.stdout = sys.stderr = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - for as long as this process lives
    for descriptor in (1, 2):
        with suppress(OSError):
            os.dup2(sys.stdout.fileno(), descriptor)
    if sys.platform == "win32":
        from node.platform.windows import hand_on_errors

        hand_on_errors()


if __name__ == "__main__":
    log_to(Path(sys.argv[1]))
    from protocol.cli import main

    main(sys.argv[2:], prog_name="barnraise")
