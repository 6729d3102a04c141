"""How the device's process is started, also before its lane is there.

It loads torch for seconds, and its daemon everything else: who is about to have a lane says so (`load_ahead`), and both
load side by side. So nothing is imported here that takes time itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from node.compute.devices.choice import DeviceChoice
from node.platform.pipes import widen


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What the device's process is started with."""

    threads: int = 1
    choice: DeviceChoice = field(default_factory=DeviceChoice)
    low_priority: bool = True
    cap_bytes: float | None = None
    """The most of the device's memory that it may take."""

    def arguments(self) -> list[str]:
        cap = [] if self.cap_bytes is None else [str(int(self.cap_bytes))]
        return [str(self.threads), "LOW" if self.low_priority else "NORMAL", str(self.choice), *cap]


class DeviceStart:
    """Starts processes; some of them may wait for their lanes."""

    module: ClassVar[str] = "node.compute.device_process"
    """What is started; tests start one that lies."""
    ahead: ClassVar[list[tuple[list[str], subprocess.Popen[bytes]]]] = []
    """Processes that wait, and what they were started with."""

    @classmethod
    def open(cls, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", cls.module, *arguments]
        # Ctrl-C in the terminal is for the daemon alone, also while this process still loads torch.
        apart: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **apart)  # noqa: S603 - our own
        for end in (made.stdin, made.stdout):
            widen(end)
        return made

    @classmethod
    def load_ahead(cls, options: DeviceOptions) -> None:
        """Starts the process of a lane that will be made soon. It ends with this one, whatever comes of that."""
        cls.ahead.append((options.arguments(), cls.open(options.arguments())))

    @classmethod
    def forget_ahead(cls) -> None:
        """Ends all that wait: their lanes are not to be made yet, and nothing may run here meanwhile."""
        waiting, cls.ahead = cls.ahead, []
        for _, process in waiting:
            process.kill()
        for _, process in waiting:
            process.communicate()

    @classmethod
    def take(cls, arguments: list[str]) -> subprocess.Popen[bytes]:
        """One that waits, if it was started with these words and lives; else a new one, and none waits any more: what
        was foreseen has not come."""
        for waiting in cls.ahead:
            if waiting[0] == arguments and waiting[1].poll() is None:
                cls.ahead.remove(waiting)
                return waiting[1]
        cls.forget_ahead()
        return cls.open(arguments)
