"""A volunteer's own daemon with one thing wrong in it: `python -m tests.integration.bad_volunteer DEED join LINK …`.

Everything else is production: the handshake, the links, the messages, the pings. So it is what a broken computer, a
poor line or a member who means harm looks like to the servers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

from node.compute.lanes import DevicePerformer
from node.machine.jobs import Backward, Forward, RouteEnd
from node.volunteer.volunteer import VolunteerMachine
from protocol.cli import main
from protocol.messages import Lease

HONEST_JOBS = 20
"""It works as it should for a moment, so that nobody takes it for somebody who has only just come."""
SLOW_S = 3.0


def hangs() -> None:
    """Its device never ends a job again: the process lives, answers pings, and keeps its leases."""
    _before_each_job(lambda: time.sleep(10**6))


def dawdles() -> None:
    """Every job takes seconds."""
    _before_each_job(lambda: time.sleep(SLOW_S))


def gives_back() -> None:
    """It asks for work, is sent the tensors, and returns every lease."""

    def on_lease(self: Any, issuer: Any, lease: Lease, now: float) -> None:
        self._given[issuer] = max(0, self._given[issuer] - 1)
        self._out.drop(lease.tensors)
        self._words.give_back(issuer, lease.tasks, "too many leases")

    VolunteerMachine._on_lease = on_lease  # type: ignore[method-assign]


def huge() -> None:
    """Its gradients are finite and absurd."""
    _change_gradient(lambda total: total * 0 + 1e200)


def steers() -> None:
    """Its gradients are a thousand times too large: the global norm is all its own, and everybody else is clipped."""
    _change_gradient(lambda total: total * 1000.0)


def _before_each_job(wait: Callable[[], None]) -> None:
    original, done = DevicePerformer.perform, [0]

    def perform(self: Any, job: Any, buffers: Any) -> Any:
        if isinstance(job, Forward | Backward | RouteEnd):
            done[0] += 1
            if done[0] > HONEST_JOBS:
                wait()
        return original(self, job, buffers)

    DevicePerformer.perform = perform  # type: ignore[method-assign]


def _change_gradient(change: Callable[[Any], Any]) -> None:
    from node.compute.worker import StageWorker

    original, done = StageWorker.take_gradient, [0]

    def take_gradient(self: Any, into: Hashable) -> Any:
        done[0] += 1
        total = original(self, into)
        return change(total) if done[0] > 3 else total

    StageWorker.take_gradient = take_gradient  # type: ignore[method-assign]


DEEDS: dict[str, Callable[[], None]] = {
    "hangs": hangs,
    "dawdles": dawdles,
    "gives_back": gives_back,
    "huge": huge,
    "steers": steers,
}

if __name__ == "__main__":
    DEEDS[sys.argv.pop(1)]()
    main()
