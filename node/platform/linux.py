"""Linux: idle time by the session manager and the terminals, metered networks by NetworkManager, over D-Bus.

Where a service does not answer (a server without a desktop) its reading is None, and it is not asked again for a while.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from jeepney import DBusAddress, new_method_call
from jeepney.io.blocking import open_dbus_connection

ASK_AGAIN_S = 60.0
ANSWER_S = 0.2
"""The whole look must end in half a second."""
EVERY_S = 2.0
"""Idle time changes slowly where it is long, and a key stroke shows at the terminals at once."""


class LinuxDesktop:
    """See `node.platform.sensors.Desktop`."""

    def __init__(self, terminals: tuple[Path, ...] = (Path("/dev/pts"), Path("/dev")), bus: str = "SYSTEM") -> None:
        self._terminals = terminals
        self._bus = bus
        self._connection: Any = None
        self._ask_at_s = 0.0
        self._session: tuple[float, float | None] = (float("-inf"), None)

    def idle_s(self) -> float | None:
        known = [idle for idle in (self._terminal_idle_s(), self._session_idle_s()) if idle is not None]
        return min(known, default=None)

    def full_screen(self) -> int | None:
        """Neither X11 nor Wayland tells this in the same way: games are found by GPU use and by their folder."""
        return None

    def metered(self) -> bool | None:
        """NetworkManager: 1 yes, 3 guessed yes, 2 and 4 no, 0 unknown."""
        name = "org.freedesktop.NetworkManager"
        value = self._property("/org/freedesktop/NetworkManager", name, name, "Metered")
        return None if value in (None, 0) else value in (1, 3)

    def _terminal_idle_s(self) -> float | None:
        """As `w` shows it: when somebody last typed at a terminal of this user."""
        latest: float | None = None
        for folder, pattern in zip(self._terminals, ("[0-9]*", "tty[0-9]*"), strict=False):
            for path in folder.glob(pattern):
                try:
                    about = path.stat()
                except OSError:
                    continue
                if about.st_uid == os.getuid():
                    latest = max(latest or 0.0, about.st_atime)
        return None if latest is None else max(0.0, time.time() - latest)

    def _session_idle_s(self) -> float | None:
        """The session manager's word, which desktops set after a while without input."""
        now_s = time.monotonic()
        if now_s < self._session[0] + EVERY_S:
            return self._session[1]
        login, manager = "org.freedesktop.login1", "org.freedesktop.login1.Manager"
        idle = self._property("/org/freedesktop/login1", login, manager, "IdleHint")
        since_us = self._property("/org/freedesktop/login1", login, manager, "IdleSinceHint") if idle else 0
        idle_s = None if idle is None else (max(0.0, time.time() - since_us / 1e6) if idle else 0.0)
        if idle is False and not os.environ.get("XDG_SESSION_ID") and not _has_seat():
            idle_s = None  # nobody sits here, so nobody sets the hint
        self._session = (now_s, idle_s)
        return idle_s

    def _property(self, path: str, name: str, interface: str, wanted: str) -> Any:
        now_s = time.monotonic()
        if now_s < self._ask_at_s:
            return None
        try:
            if self._connection is None:
                self._connection = open_dbus_connection(bus=self._bus)
            address = DBusAddress(path, name, "org.freedesktop.DBus.Properties")
            call = new_method_call(address, "Get", "ss", (interface, wanted))
            reply = self._connection.send_and_get_reply(call, timeout=ANSWER_S)
            if reply.header.message_type.name == "error":
                return None
            return reply.body[0][1]
        except Exception:  # no bus, no service, a service that hangs: a computer without it is lent as well
            self._connection, self._ask_at_s = None, now_s + ASK_AGAIN_S
            return None


def _has_seat() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
