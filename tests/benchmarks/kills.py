"""What kills cost a run of real processes: `python -m tests.benchmarks.kills [--rounds 4] [--seconds 120]`.

A coordinator, a front and a back server, and four volunteers, whose devices take `PACE_S` longer over each job: as
devices that are slower than this processor and leave it free. There is one stage, so that all four do the same work and
nobody is moved meanwhile. Whoever is killed is started again at once, as a service manager does it. All arms take turns
in one run, in another order each round; a turn begins when everybody is there and steps close.

* `undisturbed`: nobody is killed.
* `volunteer 60`, `volunteer 15`: a volunteer is killed once in so many seconds, each in its turn.
* `server 60`: a server is killed once a minute, each in its turn, the decider too.
* `one away`: a volunteer is killed, and comes back when the turn is over.
* `one hangs`: a volunteer's device stands still as long (SIGSTOP of its process); the volunteer itself is as lively as
  before. Also: seconds until the page says of it that it does not bring its work back.

A row for each turn goes into `kills.jsonl` beside this file, and a round that was cut off is gone on with: `--rounds`
counts those of this commit that are there already. At the end the tokens a second of each arm, over those of the arm
that it is held against in the same rounds; 1 where a bound is missed. `--report` only reads the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from node.demo.processes import Children
from protocol.drive.keyfile import load_or_create_identity
from tests.benchmarks.attacks import start
from tests.integration.bad_device import PACE
from tests.integration.swarm import Daemon, Swarm, eventually
from tests.integration.test_audits import BadChildren

ROWS = Path(__file__).with_suffix(".jsonl")
PACE_S = 0.25
VOLUNTEERS = 4
LEASE_S = 10.0
FIRST_KILL_S = 5.0
LOOK_S = 0.25
ARMS = ("undisturbed", "volunteer 60", "volunteer 15", "server 60", "one away", "one hangs")
BOUNDS = (
    ("volunteer 60", "undisturbed", 0.05),
    ("volunteer 15", "undisturbed", 0.15),
    ("server 60", "undisturbed", 0.15),
    ("one hangs", "one away", 0.10),
)
"""(arm, what it is held against, the share of tokens a second that it may cost)."""
NAMED_S_MAX = 3 * LEASE_S
NAMING = ("did not bring back in time", "has not come to an end")
RUN = f"""
name = "killed"
steps = 1000000
[model]
layers = 2
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "builtin:grammar"
[batch]
microbatches = 8
[stages]
count = 1
collocated = "when_empty"
[audit]
rate = 0.0
first = 0
[limits]
lease_s = {LEASE_S}
[checkpoint]
every_steps = 0
"""


class Run:
    """The processes, and what is done to them in a turn."""

    def __init__(self, swarm: Swarm, members: Children, folder: Path) -> None:
        self.swarm = swarm
        self._members = members
        link = str(swarm.links["volunteer"])
        names = [f"volunteer-{number}" for number in range(VOLUNTEERS)]
        self.volunteers: list[Daemon] = [start(members, folder, name, "paced", "join", link) for name in names]
        self._turn = 0
        eventually(self.whole, "everybody")

    def whole(self) -> bool:
        """Whether everybody takes part."""
        status = self.swarm.status()
        there = [member for member in status["members"] if member["role"] == "volunteer" and member["stage"] >= 0]
        return len(there) == VOLUNTEERS and not status["away"] and status["run"]["state"] == "training"

    def settle(self) -> None:
        """Until everybody is there and three more steps are closed."""
        eventually(self.whole, "everybody")
        step = self.swarm.step()
        eventually(lambda: self.swarm.step() >= step + 3, "steps")

    def turn(self, arm: str, seconds: float) -> dict[str, Any]:
        """One turn of an arm; afterwards everybody is there again, or comes."""
        self.settle()
        who, _, every = arm.partition(" ")
        kill_at, killed, named_s = FIRST_KILL_S, 0, -1.0
        hung: list[int] = []
        status = self.swarm.status()
        tokens, steps, began = status["run"]["tokens"], status["run"]["step"], time.monotonic()
        if who == "one":
            self._turn += 1
            chosen = self._turn % VOLUNTEERS
            if every == "away":
                self._members.kill(self.volunteers[chosen].child)
            else:
                hung = [each.pid for each in psutil.Process(self.volunteers[chosen].child.pid).children(recursive=True)]
                for pid in hung:
                    os.kill(pid, signal.SIGSTOP)
                node = self._node(chosen)
        while (now_s := time.monotonic() - began) < seconds:
            if who in ("volunteer", "server") and now_s >= kill_at:
                self.kill(who)
                killed += 1
                kill_at += float(every)
            if hung and named_s < 0 and names(self.swarm.status(), node):
                named_s = now_s
            time.sleep(LOOK_S)
        status, took_s = self.swarm.status(), time.monotonic() - began
        for pid in hung:
            with suppress(ProcessLookupError):  # its volunteer may have given it up
                os.kill(pid, signal.SIGCONT)
        if arm == "one away":
            self._again(chosen)
        return {
            "arm": arm,
            "seconds": round(took_s, 2),
            "tokens": status["run"]["tokens"] - tokens,
            "steps": status["run"]["step"] - steps,
            "killed": killed,
            "named_s": round(named_s, 1),
            "lost_steps": status["run"]["lost_steps"],
        }

    def _node(self, chosen: int) -> str:
        return load_or_create_identity(self.volunteers[chosen].child.folder / "identity").node

    def kill(self, who: str) -> None:
        """The next one, which is started again at once."""
        self._turn += 1
        if who == "volunteer":
            chosen = self._turn % VOLUNTEERS
            self._members.kill(self.volunteers[chosen].child)
            self._again(chosen)
        else:
            server: Daemon = self.swarm.servers[self._turn % len(self.swarm.servers)]
            self.swarm.kill(server)
            self.swarm.again(server)

    def _again(self, chosen: int) -> None:
        daemon = self.volunteers[chosen]
        if not daemon.child.running:
            daemon.child = self._members.again(daemon.child)


def names(status: dict[str, Any], node: str) -> bool:
    """Whether the page says that this volunteer does not do its work."""
    own = [member["waiting_for"] for member in status["members"] if member["id"] == node]
    return node[:8] in status["run"]["waiting_for"] or any(word in said for said in own for word in NAMING)


def rows_of(commit: str) -> list[dict[str, Any]]:
    if not ROWS.exists():
        return []
    return [row for row in map(json.loads, ROWS.read_text().splitlines()) if row["commit"] == commit]


def measure(rounds: int, seconds: float, commit: str) -> None:
    """Turns that are not there yet, each written when it is over."""
    there = rows_of(commit)
    os.environ[PACE] = str(PACE_S)
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as name,
        Swarm(Path(name), RUN, server_count=2) as swarm,
        BadChildren() as members,
    ):
        run = Run(swarm, members, Path(name))
        for number in range(rounds):
            shift = number % len(ARMS)
            for arm in (*ARMS[shift:], *ARMS[:shift]):
                if any(row["round"] == number and row["arm"] == arm for row in there):
                    continue
                row = {"commit": commit, "round": number, **run.turn(arm, seconds)}
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


def speed(rows: Sequence[dict[str, Any]], arm: str, rounds: set[int]) -> float:
    of_arm = [row for row in rows if row["arm"] == arm and row["round"] in rounds]
    return float(sum(row["tokens"] for row in of_arm) / sum(row["seconds"] for row in of_arm))


def report(rows: Sequence[dict[str, Any]]) -> int:
    """Prints what each arm costs; 1 where a bound is missed."""
    missed = 0
    for arm, against, bound in BOUNDS:
        both = set.intersection(*({row["round"] for row in rows if row["arm"] == each} for each in (arm, against)))
        if not both:
            continue
        found, held = speed(rows, arm, both), speed(rows, against, both)
        cost = 1.0 - found / held
        missed += cost > bound
        print(
            f"{arm:13} {found:7.1f} tokens/s, {against} {held:7.1f}: costs {cost:6.1%} (bound {bound:.0%}), "
            f"{len(both)} rounds{'   MISSED' if cost > bound else ''}"
        )
    named = [row["named_s"] for row in rows if row["arm"] == "one hangs"]
    late = [each for each in named if not 0 <= each <= NAMED_S_MAX]
    missed += bool(late)
    print(f"who hangs is named after {named} s (bound {NAMED_S_MAX:g} s){'   MISSED' if late else ''}")
    return 1 if missed else 0


def main() -> int:
    """Measures what is missing, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a turn")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    commit = git.stdout.strip()
    if not options.report:
        measure(options.rounds, options.seconds, commit)
    return report(rows_of(commit))


if __name__ == "__main__":
    sys.exit(main())
