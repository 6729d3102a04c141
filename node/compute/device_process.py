"""A volunteer's device in a process of its own: when it ends, the device's memory is free, whatever it was doing.

    daemon ── DeviceLane ══ standard input: jobs with their bytes ══▶ this process: DevicePerformer on the device
                         ◀═ standard output: outcomes with theirs ══

It has no key, no socket and no file of the node. It ends when its input closes, and on Linux with its parent. Frames
are those of `node.process.device_frames`.

    python -m node.compute.device_process THREADS LOW|NORMAL DEVICE [CAP_BYTES]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, BinaryIO

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import open_device
from node.compute.lanes import DevicePerformer
from node.platform.priority import end_with_parent, stand_back
from node.process.device_frames import Hello, SetShare, read_job, write_frame, write_outcome

REST_MAX_S = 5.0
"""One rest between two jobs is no longer: a share of 1 % of a long job would look like a hang."""


def main(arguments: list[str]) -> None:
    threads, priority, choice = int(arguments[0]), arguments[1], DeviceChoice.parse(arguments[2])
    cap_bytes = int(arguments[3]) if len(arguments) > 3 else None
    end_with_parent()
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Ctrl-C is for the daemon, which lets this process finish
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if priority == "LOW":
        stand_back(device=True)
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand among the frames
    performer = DevicePerformer(threads, choice, cap_bytes)
    device = open_device(choice)
    write_frame(outgoing, Hello(os.getpid(), device.label, device.is_accelerator, device.gpu))
    work(performer, incoming, outgoing)


def work(performer: DevicePerformer, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Job by job until the input ends; rests after each so that the device works only its share of the time."""
    share = 1.0
    while (item := read_job(incoming)) is not None:
        if isinstance(item, SetShare):
            share = item.share
            continue
        if isinstance(item, Hello):
            continue
        job, buffers = item
        outcome: Any = performer.perform(job, buffers)
        write_outcome(outgoing, outcome)
        if share < 1.0:
            time.sleep(min(REST_MAX_S, outcome.seconds * (1.0 - share) / share))


if __name__ == "__main__":
    main(sys.argv[1:])
