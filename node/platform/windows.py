"""Windows: idle time, the full screen, by user32 and shell32, and where errors go. Unverified: nobody has run this on
Windows yet."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_D3D_FULL_SCREEN = 3
_BUSY = 2
_STANDARD_ERROR = -12


class _LastInput(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint), ("time_ms", ctypes.c_uint))


def _libraries() -> Any:
    assert sys.platform == "win32"
    return getattr(ctypes, "windll")  # noqa: B009 - exists there only


def hand_on_errors() -> None:
    """What children of a process without a console write to their standard error goes where its own goes."""
    if sys.platform == "win32":
        import msvcrt

        _libraries().kernel32.SetStdHandle(_STANDARD_ERROR, msvcrt.get_osfhandle(2))


class WindowsDesktop:
    """See `node.platform.sensors.Desktop`."""

    def idle_s(self) -> float | None:
        info = _LastInput(ctypes.sizeof(_LastInput), 0)
        windll = _libraries()
        if not windll.user32.GetLastInputInfo(ctypes.byref(info)):
            return None
        # Both count milliseconds since the start in 32 bits, so the difference is right after 49 days too.
        return float((windll.kernel32.GetTickCount() - info.time_ms) & 0xFFFFFFFF) / 1000.0

    def full_screen(self) -> int | None:
        """The foreground window's process, while the shell says that it fills the screen."""
        windll, state = _libraries(), ctypes.c_int(0)
        if windll.shell32.SHQueryUserNotificationState(ctypes.byref(state)) != 0:
            return None
        if state.value not in (_D3D_FULL_SCREEN, _BUSY):
            return None
        pid = ctypes.c_ulong(0)
        windll.user32.GetWindowThreadProcessId(windll.user32.GetForegroundWindow(), ctypes.byref(pid))
        return pid.value or None

    def metered(self) -> bool | None:
        """Windows tells this only through WinRT."""
        return None
