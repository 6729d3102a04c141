"""macOS: idle time out of the I/O registry. Unverified: nobody has run this on a Mac yet."""

from __future__ import annotations

import re
import subprocess
import time

EVERY_S = 2.0
ANSWER_S = 2.0


class MacDesktop:
    """See `node.platform.sensors.Desktop`."""

    def __init__(self) -> None:
        self._known: tuple[float, float | None] = (float("-inf"), None)

    def idle_s(self) -> float | None:
        now_s = time.monotonic()
        if now_s >= self._known[0] + EVERY_S:
            self._known = (now_s, self._ask())
        return self._known[1]

    def _ask(self) -> float | None:
        command = ["/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            return None
        return idle_in(text)

    def full_screen(self) -> int | None:
        """macOS tells this only to programs that may record the screen."""
        return None

    def metered(self) -> bool | None:
        """Not told to programs outside of its own framework."""
        return None


def idle_in(text: str) -> float | None:
    """Seconds, out of what ioreg prints in nanoseconds."""
    found = re.search(r'"HIDIdleTime" = ([0-9]+)', text)
    return None if found is None else int(found[1]) / 1e9
