"""How a lent computer's processes stand back behind the owner's."""

from __future__ import annotations

import sys
from contextlib import suppress

import psutil

DAEMON_NICE = 5
"""It must still hear within a second that a game has begun."""
DEVICE_NICE = 19


def stand_back(device: bool = False) -> None:
    """This process comes after others: on the processor and, where the system can, on the disk."""
    process = psutil.Process()
    with suppress(psutil.Error, OSError):
        if sys.platform == "win32":
            process.nice(psutil.IDLE_PRIORITY_CLASS if device else psutil.BELOW_NORMAL_PRIORITY_CLASS)
            return
        process.nice(max(process.nice(), DEVICE_NICE if device else DAEMON_NICE))
        if sys.platform == "linux" and device:
            process.ionice(psutil.IOPRIO_CLASS_IDLE)


def end_with_parent() -> None:
    """Linux ends this process when its parent dies, however that dies; elsewhere its input closes."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
