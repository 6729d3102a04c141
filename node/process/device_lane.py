"""The daemon's end of the device's process: a lane as `node.compute.lane.Lane` is, that can be ended within a moment.

Jobs go down its standard input and outcomes come back, in order. `kill` ends it in the middle of whatever it does, and
with it goes all of the device's memory that it had. When it ends by itself (out of memory, a driver's crash) every job
that was not answered fails, `lost` is told, and `start` makes a new one.
"""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from node.process.device_frames import DEVICE_IS_LOST, Hello, SetShare, read_job, read_outcome, write_frame, write_job
from node.process.device_start import DeviceOptions, DeviceStart
from node.process.store import Buffer

CLOSE_S = 10.0
"""How long the process may take to end its last job before the daemon ends without it."""
DIE_S = 2.0
"""A killed process is gone within milliseconds. One that hangs in a driver call, or that comes last on a computer with
more to do than it can, takes longer: the daemon, which nothing else can be asked of meanwhile, goes on without it."""
Delivered = Callable[[Any, Any, list[Buffer]], None]


class DeviceLane:
    """One process and the two threads that talk to it.

    Args:
        deliver: called in a thread with (job, `Done` or the reason of the process's end, buffers), job by job.
        lost: called in a thread when the process has ended without being told to; with a sentence.
    """

    def __init__(self, options: DeviceOptions, deliver: Delivered, lost: Callable[[str], None]) -> None:
        self._arguments = options.arguments()
        self.hello: Hello | None = None
        """What the device is, once its process has looked."""
        self._deliver = deliver
        self._lost = lost
        self._share = 1.0
        self._over = False
        """It was told to end: nobody wants to hear of it."""
        self._ending = threading.Lock()
        """Whoever ends the lane ends the process that it has then: none may begin beside that."""
        self._start()

    def _start(self) -> None:
        self._process = DeviceStart.take(self._arguments)
        self._queue: queue.SimpleQueue[tuple[Any, Mapping[int, Buffer]] | SetShare | None] = queue.SimpleQueue()
        self._unanswered: deque[Any] = deque()
        if self._share < 1.0:
            self._queue.put(SetShare(self._share))
        here = (self._process, self._queue, self._unanswered)
        threading.Thread(target=self._write, args=here, name="device-jobs", daemon=True).start()
        self._reader = threading.Thread(target=self._read, args=here, name="device-outcomes", daemon=True)
        self._reader.start()

    def start_again(self) -> bool:
        """After `lost`: a fresh process that knows nothing. False: the lane was told to end meanwhile, and nothing may
        have the device any more."""
        with self._ending:
            if not self._over:
                self._start()
            return not self._over

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
        with self._ending:
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
        with self._ending:
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
        except Exception as error:  # a frame of a gigabyte may find no memory: whoever waits for it must hear so
            reason = f"its words cannot be read: {str(error) or type(error).__name__}"
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
    if code == DEVICE_IS_LOST:
        return "the device's driver failed; what it said stands with the job before"
    return f"the device's process ended with status {code}"
