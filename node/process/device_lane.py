"""The daemon's end of the device's process: a lane as `node.compute.lane.Lane` is, that can be ended within a moment.

Jobs go down its standard input and outcomes come back, in order. `kill` ends it in the middle of whatever it does, and
with it goes all of the device's memory that it had. When it ends by itself (out of memory, a driver's crash) every job
that was not answered fails, `lost` is told, and `start` makes a new one.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from node.compute.devices.choice import DeviceChoice
from node.platform.pipes import widen
from node.process.device_frames import Hello, SetShare, read_job, read_outcome, write_frame, write_job
from node.process.store import Buffer

CLOSE_S = 10.0
"""How long the process may take to end its last job before the daemon ends without it."""
DIE_S = 2.0
"""A killed process is gone within milliseconds. One that hangs in a driver call, or that comes last on a computer with
more to do than it can, takes longer: the daemon, which nothing else can be asked of meanwhile, goes on without it."""
Delivered = Callable[[Any, Any, list[Buffer]], None]


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


class DeviceLane:
    """One process and the two threads that talk to it.

    It loads torch for seconds, and its daemon everything else: who is about to have a lane may say so (`load_ahead`),
    and both load side by side.

    Args:
        deliver: called in a thread with (job, `Done` or the reason of the process's end, buffers), job by job.
        lost: called in a thread when the process has ended without being told to; with a sentence.
    """

    module = "node.compute.device_process"
    """What is started; tests start one that lies."""
    _ahead: ClassVar[tuple[list[str], subprocess.Popen[bytes]] | None] = None
    """A process that waits for its lane, and what it was started with."""

    def __init__(self, options: DeviceOptions, deliver: Delivered, lost: Callable[[str], None]) -> None:
        self._arguments = options.arguments()
        self.hello: Hello | None = None
        """What the device is, once its process has looked."""
        self._deliver = deliver
        self._lost = lost
        self._share = 1.0
        self._over = False
        """It was told to end: nobody wants to hear of it."""
        self._start()

    @classmethod
    def _open(cls, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", cls.module, *arguments]
        # Ctrl-C in the terminal is for the daemon alone, also while this process still loads torch.
        apart: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **apart)  # noqa: S603 - our own
        for end in (made.stdin, made.stdout):
            widen(end)
        return made

    @classmethod
    def load_ahead(cls, options: DeviceOptions) -> None:
        """Starts the process of the lane that will be made next. It ends with this one, whatever comes of that."""
        cls.forget_ahead()
        DeviceLane._ahead = options.arguments(), cls._open(options.arguments())

    @classmethod
    def forget_ahead(cls) -> None:
        """Ends it: its lane is not to be made yet, and nothing may run here meanwhile."""
        if DeviceLane._ahead is not None:
            (_, process), DeviceLane._ahead = DeviceLane._ahead, None
            process.kill()
            process.communicate()

    def _start(self) -> None:
        ahead = DeviceLane._ahead
        if ahead is not None and ahead[0] == self._arguments and ahead[1].poll() is None:
            self._process, DeviceLane._ahead = ahead[1], None
        else:
            self.forget_ahead()
            self._process = self._open(self._arguments)
        self._queue: queue.SimpleQueue[tuple[Any, Mapping[int, Buffer]] | SetShare | None] = queue.SimpleQueue()
        self._unanswered: deque[Any] = deque()
        if self._share < 1.0:
            self._queue.put(SetShare(self._share))
        here = (self._process, self._queue, self._unanswered)
        threading.Thread(target=self._write, args=here, name="device-jobs", daemon=True).start()
        self._reader = threading.Thread(target=self._read, args=here, name="device-outcomes", daemon=True)
        self._reader.start()

    def start_again(self) -> None:
        """After `lost`: a fresh process that knows nothing."""
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def waiting(self) -> int:
        """Jobs that were not answered, but for the one that runs."""
        return max(0, len(self._unanswered) - 1)

    def submit(self, job: Any, buffers: Mapping[int, Buffer]) -> None:
        """Queues a job with the bytes of its references, which must not change."""
        self._unanswered.append(job)
        self._queue.put((job, buffers))

    def set_share(self, share: float) -> None:
        """The device works so much of the time from its next job on."""
        if share != self._share:
            self._share = share
            self._queue.put(SetShare(share))

    def kill(self) -> float | None:
        """Ends it now, whatever it does; returns after how many seconds it was gone, or None: the system still has to
        take it down. What it had to do is forgotten."""
        began_s = time.monotonic()
        self._over = True
        self._process.kill()
        try:
            self._process.wait(DIE_S)
        except subprocess.TimeoutExpired:
            threading.Thread(target=self._process.wait, name="device-ends", daemon=True).start()
            return None
        finally:
            self._queue.put(None)
        return time.monotonic() - began_s

    def close(self) -> None:
        """Waits (a while) until the job that runs has ended."""
        if self._over:
            return
        self._over = True
        self._queue.put(None)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _write(self, process: Any, jobs: Any, unanswered: deque[Any]) -> None:
        try:
            while (item := jobs.get()) is not None and not self._over:
                if isinstance(item, SetShare):
                    write_frame(process.stdin, item)
                else:
                    write_job(process.stdin, *item)
        except (OSError, ValueError):
            pass  # it has ended; the other thread says so
        finally:
            with suppress(OSError):
                process.stdin.close()

    def _read(self, process: Any, jobs: Any, unanswered: deque[Any]) -> None:
        try:
            hello = read_job(process.stdout)
            if isinstance(hello, Hello):
                self.hello = hello
            while isinstance(hello, Hello):
                # The oldest job that is not answered; where there is none yet, its frame cannot come either.
                done = read_outcome(process.stdout, lambda: unanswered[0])
                if done is None:
                    break
                self._deliver(unanswered.popleft(), done[0], done[1])
        except (OSError, ValueError) as error:
            reason = f"its words cannot be read: {error}"
            process.kill()  # it lives, and whatever it says now belongs to nothing
        else:
            reason = ""
        process.stdout.close()
        if self._over:
            return
        code = process.wait()
        jobs.put(None)
        sentence = reason or ended_with(code)
        for job in list(unanswered):
            self._deliver(job, sentence, [])
        self._lost(sentence)


def ended_with(code: int) -> str:
    """An exit status in words."""
    if code == -9:
        return "the device's process was killed (out of memory?)"
    return f"the device's process ended with status {code}"
