"""What a run loses while its coordinator is away: `python -m tests.benchmarks.away [--minutes 10]`.

The processes of `tests.benchmarks.kills`: a coordinator, a front and a back server and four paced volunteers. Once
every `RESTART_S` a server and, half of that later, a volunteer is killed and started again, each in its turn: for half
of so many minutes with the coordinator there, for all of them with the coordinator killed at their beginning and
started again at their end, then for the other half with it. A computer that becomes faster or slower meanwhile does so
to both alike, and the coordinator is away in one piece. Steps are seen to close in the servers' own metrics.

Printed of both: steps, the median of what a step takes, and the longest time without one, which is the worst restart.
Steps often close in pairs, since two are open at once: those that are seen at one look share its time. 1 where the
coordinator's absence makes steps slower: the median by more than a tenth, the longest by more than a quarter, or fewer
steps by more than a tenth; or where the coordinator, back again, has not heard of every step.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from protocol.drive.process import free_port
from tests.benchmarks.kills import PACE_S, RUN, VOLUNTEERS, Run
from tests.integration.bad_device import PACE
from tests.integration.swarm import Swarm, eventually
from tests.integration.test_audits import BadChildren

RESTART_S = 60.0
LOOK_S = 0.1
MEDIAN_MORE_MAX, LONGEST_MORE_MAX, FEWER_MAX = 0.1, 0.25, 0.1
STEP = re.compile(r"^barnraise_server_step{[^}]*} (\S+)$", re.MULTILINE)


@dataclass
class Closings:
    """When steps closed, by the monotonic clock."""

    seconds: float
    at: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Steps that were seen at each of these moments."""
    first: int = 0
    last: int = 0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.at)]

    @property
    def step_times_s(self) -> list[float]:
        """What each step took."""
        counted = zip(self.gaps, self.counts[1:], strict=True)
        return [gap / count for gap, count in counted for _ in range(count)]

    @property
    def steps(self) -> int:
        return self.last - self.first


class Arm:
    """The closings of one arm, which may have been watched in several pieces."""

    def __init__(self, *pieces: Closings) -> None:
        self.seconds = sum(piece.seconds for piece in pieces)
        self.steps = sum(piece.steps for piece in pieces)
        self.gaps = sorted((gap for piece in pieces for gap in piece.gaps), reverse=True)
        """The times without a step, the longest first."""
        self.step_s = statistics.median(time_s for piece in pieces for time_s in piece.step_times_s)
        """The median over steps of the time that each took."""
        self.pieces = pieces

    def __str__(self) -> str:
        each = f" ({' and '.join(str(piece.steps) for piece in self.pieces)})" if len(self.pieces) > 1 else ""
        return (
            f"{self.steps} steps{each} in {self.seconds:.0f} s, median {self.step_s:.2f} s, longest without one"
            f" {', '.join(f'{gap:.2f}' for gap in self.gaps[:5])} s"
        )


def newest(swarm: Swarm) -> int:
    """The newest step that any server shows; -1 when none answers."""
    found = [-1]
    for server in swarm.servers:
        with suppress(OSError):
            found += [int(float(value)) for value in STEP.findall(server.metrics())]
    return max(found)


def heard(swarm: Swarm) -> int:
    """The newest step that the coordinator has heard of; -1 until it answers."""
    with suppress(OSError):
        return swarm.step()
    return -1


def watch(run: Run, minutes: float) -> Closings:
    """So many minutes with restarts."""
    swarm, begin = run.swarm, time.monotonic()
    first = newest(swarm)
    closings = Closings(60.0 * minutes, first=first, last=first)
    due = [(RESTART_S / 4, "server"), (3 * RESTART_S / 4, "volunteer")]
    while (now := time.monotonic()) - begin < closings.seconds:
        step = newest(swarm)
        if step > closings.last:
            closings.at.append(now)
            closings.counts.append(step - closings.last)
            closings.last = step
        at, who = due[0]
        if now - begin >= at:
            run.kill(who)
            due = [*due[1:], (at + RESTART_S, who)]
        time.sleep(LOOK_S)
    return closings


def whats_wrong(there: Arm, away: Arm) -> list[str]:
    """What became slower, in words."""
    wrong = []
    for what, before, after, most in (
        ("median", there.step_s, away.step_s, MEDIAN_MORE_MAX),
        ("longest", there.gaps[0], away.gaps[0], LONGEST_MORE_MAX),
    ):
        if after > before * (1 + most):
            wrong.append(f"the {what} time is {after:.2f} s without the coordinator, {before:.2f} s with it")
    if away.steps < there.steps * (1 - FEWER_MAX):
        wrong.append(f"{away.steps} steps without the coordinator, {there.steps} with it")
    return wrong


def main() -> int:
    """Measures and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    os.environ[PACE] = str(PACE_S)
    ports = ("--listen", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{free_port()}")  # where it comes back, too
    with (
        tempfile.TemporaryDirectory(prefix="away-") as name,
        Swarm(Path(name), RUN, server_count=2, coordinator=ports) as swarm,
        BadChildren() as members,
    ):
        run = Run(swarm, members, Path(name))
        run.settle()
        before = watch(run, minutes / 2)
        run.settle()
        swarm.kill(swarm.coordinator)
        without = watch(run, minutes)
        swarm.again(swarm.coordinator)
        eventually(lambda: heard(swarm) >= without.last and run.whole(), "the coordinator to hear of all steps")
        run.settle()
        after = watch(run, minutes / 2)
        run.settle()
        there, away = Arm(before, after), Arm(without)
        print(f"coordinator there: {there}")
        print(f"coordinator away:  {away}")
        status = swarm.status()
        wrong = whats_wrong(there, away)
        if status["run"]["lost_steps"]:
            wrong.append(f"{status['run']['lost_steps']} steps are lost")
        found = "; ".join(wrong) or "no step slower"
        print(f"back again: step {status['run']['step']}, all {VOLUNTEERS} volunteers; {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
