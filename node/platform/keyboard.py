"""What was typed before a question was there to be answered."""

from __future__ import annotations

import sys


def forget_typed() -> None:
    """Drops what the terminal holds of keys pressed before now; where there is no terminal, nothing is lost."""
    if not sys.stdin.isatty():
        return
    if sys.platform == "win32":  # unverified
        import msvcrt

        while msvcrt.kbhit():
            msvcrt.getwch()
    else:
        import termios

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
