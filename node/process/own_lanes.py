"""Lanes in this very process, where it computes itself: a server's and an auditor's. Loads torch, which takes seconds
and some 300 MB, so a volunteer's daemon, whose device has a process of its own, never imports this."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from node.compute.device_performer import DevicePerformer
from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import find_device as find_device
from node.compute.devices.device import why_no_accelerator
from node.compute.evidence import FOLDER
from node.compute.lane import Lane, Outcome
from node.compute.lanes import ServerPerformer
from node.compute.store_lane import Door, StorePerformer
from node.compute.sum_lane import SumPerformer
from node.data.allowed import Allowed
from protocol.trust.seals import Sealer

Deliver = Callable[[Outcome], None]

SIDE_BY_SIDE_MAX = 8
"""Threads that share a fold or an update: one of these moves 29 bytes a parameter, and memory of home computers some 40
GB a second, which eight cores ask for."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of a container: microseconds of a processor, or `max`, in so many microseconds (Linux, Control Group v2)."""


def usable_cores() -> int:
    """Cores that this process may use, where the system says; else all of them. A part of one counts as one."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def server_lanes(folder: Path, allowed: Allowed, sealer: Sealer) -> dict[str, Callable[[Deliver], Lane]]:
    """By name, the lanes of what a server computes for its shard, of sums that the next stage waits for, and of what it
    brings to an object store; `folder`: its state."""
    door = Door()
    performer = partial(ServerPerformer, folder, 1, allowed, sealer, door, min(SIDE_BY_SIDE_MAX, usable_cores()))
    return {
        "server": lambda deliver: Lane("server", performer, deliver),
        "sums": lambda deliver: Lane("sums", SumPerformer, deliver),
        "store": lambda deliver: Lane("store", lambda: StorePerformer(folder, allowed, door), deliver),
    }


def device_lane(
    threads: int, choice: DeviceChoice, evidence_of: tuple[Path, Sealer] | None
) -> Callable[[Deliver], Lane]:
    """The lane of the stage's tasks; says in the log what computes.

    Args:
        evidence_of: an auditor's state folder, and who signs what it finds.
    """
    structlog.get_logger("node").info("computes on", device=str(find_device(choice)), detail=why_no_accelerator())
    evidence = None if evidence_of is None else (evidence_of[0] / FOLDER, evidence_of[1])
    performer = partial(DevicePerformer, threads, choice, evidence=evidence)
    return lambda deliver: Lane("device", performer, deliver)
