"""A volunteer's device in a process of its own: when it ends, the device's memory is free, whatever it was doing.

    daemon ── DeviceLane ══ standard input: jobs with their bytes ══▶ this process: DevicePerformer on the device
                         ◀═ standard output: outcomes with theirs ══

It has no key, no socket and no file of the node. It ends when its input closes, and on Linux with its parent; and when
the device does nothing more for it, as after a driver's reset: the next process finds it well again. Frames are those
of `node.process.device_frames`.

    python -m node.compute.device_process THREADS LOW|NORMAL DEVICE [CAP_BYTES]
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

from protocol.base.loading import keep_what_is_loaded, loading

with loading():
    from node.compute.device_performer import DevicePerformer
    from node.compute.devices.choice import DeviceChoice
    from node.compute.devices.device import open_device, passed_over
from node.platform.priority import end_with_parent, stand_back
from node.process.device_frames import DEVICE_IS_LOST, Hello, SetShare, read_job, write_frame, write_outcome

SWITCH_S = 5e-4
"""Threads take turns in Python ten times as often as usual: the one that reads the next job needs a moment of each."""
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
    # A library that is loaded while the next job is read must not meet the pipe: on Windows it waits for the reader.
    incoming = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand among the frames
    sys.setswitchinterval(SWITCH_S)
    performer = DevicePerformer(threads, choice, cap_bytes)
    device = open_device(choice)
    keep_what_is_loaded()
    passed = passed_over() if choice.kind == "auto" else ""
    label = f"{device.label} ({passed})" if passed else device.label
    write_frame(outgoing, Hello(os.getpid(), label, device.is_accelerator, device.gpu))
    work(performer, incoming, outgoing)


def work(performer: DevicePerformer, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Job by job until the input ends; rests after each so that the device works only its share of the time.

    What waits is read, and what was made is written, while the device works: a version's parameters and a sum of 1.1 B
    in eight stages are 80 to 150 MB, a tenth of a second through the pipe. (Of tasks a volunteer sends one at a time.)
    """
    items: queue.Queue[Any] = queue.Queue(1)
    outcomes: queue.Queue[Any] = queue.Queue(1)
    threading.Thread(target=_read, args=(incoming, items), name="jobs", daemon=True).start()
    writer = threading.Thread(target=_write, args=(outgoing, outcomes), name="outcomes", daemon=True)
    writer.start()
    share = 1.0
    while (item := items.get()) is not None:
        if isinstance(item, Exception):
            outcomes.put(None)
            writer.join()
            raise item
        if isinstance(item, SetShare):
            share = item.share
            continue
        if isinstance(item, Hello):
            continue
        job, buffers = item
        outcome: Any = performer.perform(job, buffers)
        outcomes.put(outcome)
        if performer.is_lost:
            outcomes.put(None)
            writer.join()
            os._exit(DEVICE_IS_LOST)  # without torch's farewell to a device that answers nothing
        if share < 1.0:
            time.sleep(min(REST_MAX_S, outcome.seconds * (1.0 - share) / share))
    outcomes.put(None)
    writer.join()


def _read(incoming: BinaryIO, items: queue.Queue[Any]) -> None:
    """Frames until the input ends, or makes no sense: then the error, which `work` raises."""
    item: Any = ...
    while item is not None and not isinstance(item, Exception):
        try:
            item = read_job(incoming)
        except Exception as error:
            item = error
        items.put(item)


def _write(outgoing: BinaryIO, outcomes: queue.Queue[Any]) -> None:
    """Outcomes until there are no more. Once nobody reads them they go nowhere: the input ends, too, then."""
    try:
        while (outcome := outcomes.get()) is not None:
            write_outcome(outgoing, outcome)
    except OSError:
        while outcomes.get() is not None:
            pass
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the daemon begins another one, where this one would wait for a writer for ever


if __name__ == "__main__":
    main(sys.argv[1:])
