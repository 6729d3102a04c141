"""What tickets, signatures and audits cost a run in tokens per second, measured in one run of real processes.

    python -m tests.benchmarks.costs_of_trust [--seconds 600] [--turn-steps 4]

A small model in two stages of a front and a back server each, trained by four volunteers that take a fixed time more
for each job, as devices do that leave this processor free; how busy the processor was stands in the row. Two machines
of the operator, as fast as the volunteers, audit one contribution in twenty.

*Audits*: nobody comes or goes. Ledgers draw audits in the steps of some turns only (with, without, without, with;
`timed.py`), and a contribution that is not drawn is nobody's business: no server keeps, no auditor fetches anything for
it. So steps of a turn with audits have all that audits do to a run (draws, tensors kept and sent, parameters for
auditors, seals that wait), the others nothing of it, and both the same seconds of the same processes: what a busy
computer does in a minute is in both. Of each turn that follows one of the other kind the first step does not count,
since audits of the step before may still run. A step's time is from the close of the one before to its own, by the
ledgers' own clock. Four turns are a round; the cost is that of all rounds together, and its interval is drawn from
rounds with replacement (bootstrap). What audits cost beside that is the auditors' own compute.

One step is open at a time (`batch.delay = 0`). With two, as runs have by default, they close in couples, 0.2 and 2.5 s
after one another, and a turn's time says little; and a seal that waits for an audit holds nobody up as long as the next
step has work. So what is measured here is rather more than what audits cost by default: each wait counts whole.

*Tickets and signatures* cannot be switched off: servers and the coordinator count the seconds that they spend on them
(`timed.py`), and whoever spends the largest share of its time counts, as if each second of it were one of the run's.

A row a run goes into `costs_of_trust.jsonl` beside this file; the table of all rows is `COSTS_OF_TRUST.md`. Ends with 1
if the upper end of the interval, with tickets and signatures, is above the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from node.demo.processes import Children
from protocol.drive.process import free_port
from tests.benchmarks.attacks import start, volunteers
from tests.benchmarks.timed import CLOSED, FILE, TURN, in_turn
from tests.integration.bad_device import PACE
from tests.integration.swarm import Daemon, Swarm, eventually
from tests.integration.test_audits import BadChildren, audited
from tests.integration.test_bans import order

ROWS = Path(__file__).with_name("costs_of_trust.jsonl")
TABLE = Path(__file__).with_name("COSTS_OF_TRUST.md")
BOUND = 0.03
PACE_S = 0.1
VOLUNTEERS, AUDITORS = 4, 2
STEP_JOBS = 24
"""Of eight microbatches: a forward and a backward in stage 0, a route's end in stage 1."""
RESAMPLES = 10_000
AFTER_CHANGE = 1
"""Steps that do not count after audits begin or end."""
RUN = """
name = "trusted"
steps = 1000000
[model]
layers = 2
hidden = 64
feed_forward = 176
context = 64
[batch]
delay = 0
[stages]
count = 2
collocated = "never"
[checkpoint]
every_steps = 20
[audit]
rate = 0.05
first = 0
"""
_TASKS = re.compile(r'^barnraise_node_microbatches_total\{.*operation="(?:forward|backward)".*\} (\S+)$', re.MULTILINE)


class TimedChildren(Children):
    """Ordinary daemons that count what trust costs them, and draw audits by turns."""

    module = "tests.benchmarks.timed"


def start_auditor(members: Children, folder: Path, name: str, link: str) -> Daemon:
    """As fast as the volunteers: an audit takes as long as what it checks."""
    home, port = folder / name, free_port()
    words = ["paced", "audit", link, "--no-punch", "--state", str(home), "--metrics", f"127.0.0.1:{port}"]
    return Daemon(members.start(name, home, words), f"http://127.0.0.1:{port}/metrics")


def tasks_of(daemon: Daemon) -> float:
    return sum(map(float, _TASKS.findall(daemon.metrics())))


def closed(server: Daemon) -> dict[int, tuple[float, float]]:
    """By step: when a ledger closed it (seconds of `time.monotonic`), and how long its seal had waited for audits."""
    path = server.child.folder / CLOSED
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {int(step): (float(at), float(waited)) for step, at, waited in rows}


def rounds_of(step_s: Sequence[float], first: int, turn_steps: int) -> list[tuple[float, float]]:
    """Seconds a step without audits and with them, of each round of four turns; `step_s`: of each step from `first`."""
    rounds = []
    for begin in range(0, len(step_s) - 4 * turn_steps + 1, 4 * turn_steps):
        taken: dict[bool, list[float]] = {False: [], True: []}
        for number in range(begin, begin + 4 * turn_steps):
            kind = in_turn(first + number, turn_steps)
            if kind == in_turn(first + number - AFTER_CHANGE, turn_steps):
                taken[kind].append(step_s[number])
        rounds.append((statistics.fmean(taken[False]), statistics.fmean(taken[True])))
    return rounds


def of_audits(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The share of steps per second that audits cost, over all rounds, and the 95 % interval of it by the bootstrap."""

    def cost(chosen: Sequence[Sequence[float]]) -> float:
        return 1 - sum(without for without, _ in chosen) / sum(beside for _, beside in chosen)

    draw = random.Random(1)
    costs = sorted(cost(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return cost(rounds), costs[RESAMPLES // 40], costs[-1 - RESAMPLES // 40]


def shares(swarm: Swarm) -> dict[str, dict[str, float]]:
    """By daemon: the share of its time that went into each kind, and calls a second."""
    found = {}
    for daemon in swarm.daemons:
        said = json.loads((daemon.child.folder / FILE).read_text())
        seconds = said.pop("seconds")
        found[daemon.name] = {kind: spent / seconds for kind, (spent, _) in said.items()}
        found[daemon.name] |= {f"{kind}_per_s": calls / seconds for kind, (_, calls) in said.items()}
    return found


def measure(seconds: float, turn_steps: int) -> dict[str, Any]:
    os.environ[PACE], os.environ[TURN] = str(PACE_S), str(turn_steps)
    with (
        tempfile.TemporaryDirectory(prefix="trust-") as name,
        Swarm(Path(name), RUN, children=TimedChildren) as swarm,
        BadChildren() as members,
    ):
        folder, link = Path(name), str(swarm.links["volunteer"])
        for number in range(VOLUNTEERS):
            start(members, folder, f"volunteer-{number}", "paced", "join", link)
        eventually(lambda: len(volunteers(swarm)) == VOLUNTEERS and swarm.step() > 20, "the volunteers")
        papers = order(swarm, "invite", "--role", "auditor", "--uses", str(AUDITORS), "--links",
                       str(swarm.state / "links.json"))  # fmt: skip
        auditors = [start_auditor(members, folder, f"auditor-{number}", papers) for number in range(AUDITORS)]
        eventually(lambda: audited(swarm).get("passed", 0) >= 4, "audits")
        cycle = 4 * turn_steps
        first = (swarm.step() // cycle + 1) * cycle
        eventually(lambda: swarm.step() >= first, "the first turn")
        begin, tasks, times = time.monotonic(), sum(map(tasks_of, auditors)), psutil.cpu_times()
        while (left := begin + seconds - time.monotonic()) > 0:
            time.sleep(min(60.0, left))
            print(f"step {swarm.step()}: {swarm.step() - first + 1} steps, {audited(swarm)}", flush=True)
        tasks, worked = sum(map(tasks_of, auditors)) - tasks, psutil.cpu_times()
        end = swarm.step() + 1
        end -= (end - first) % cycle
        by_server = [closed(server) for server in swarm.servers]
        at = {step: max(of[step][0] for of in by_server if step in of) for step in range(first - 1, end)}
        audits_steps = [step for step in range(first, end) if in_turn(step, turn_steps)]
        audits_s = sum(at[step] - at[step - 1] for step in audits_steps)
        step_s = [at[step] - at[step - 1] for step in range(first, end)]
        reasons = Counter(line["reason"] for server in swarm.servers for line in server.log()
                          if line.get("outcome") == "missed")  # fmt: skip
        return {
            "rounds": rounds_of(step_s, first, turn_steps),
            "step_s": [round(seconds, 4) for seconds in step_s],
            "missed": reasons,
            "waits": max(sum(of[step][1] for step in audits_steps if step in of) for of in by_server) / audits_s,
            "busy": 1 - (worked.idle - times.idle) / (sum(worked) - sum(times)),
            "shares": shares(swarm),
            "audits": audited(swarm),
            "recomputed": tasks / (len(audits_steps) * STEP_JOBS),
            "steps": end - first,
            "banned": sum(line.get("event") == "node banned" for line in swarm.coordinator.log()),
        }


def most(row: dict[str, Any], *kinds: str) -> float:
    """Of all daemons the largest share of time for these kinds together."""
    return float(max(sum(of[kind] for kind in kinds) for of in row["shares"].values()))


def at_most(row: dict[str, Any]) -> float:
    """All three together, with the upper end of the interval of what audits cost."""
    return max(0.0, of_audits(row["rounds"])[2]) + most(row, "tickets", "signatures")


def write_table(rows: list[dict[str, Any]]) -> None:
    lines = [
        "# What trust costs in tokens per second",
        "",
        "`python -m tests.benchmarks.costs_of_trust`, a row a run. Shares of the run's time; audits: of steps per"
        " second, 5 % of all contributions, by turns with them and without (all rounds, 95 % interval)."
        f" The bound for all three together is {BOUND:.0%}, beside the auditors' own compute. A server's own time is"
        " part of it. Seals waited: of the time of steps with audits, in the stage that waited more.",
        "",
        "| commit | turns | rounds | steps/s without audits | with | audits | tickets | signatures"
        " | together, at most | seals waited | a ledger's time for audits | of the volunteers' work auditors did again"
        " | audits passed | missed | blamed | processor busy |",
        "| --- " * 16 + "|",
    ]
    for row in rows:
        cost, low, high = of_audits(row["rounds"])
        without, beside = (len(row["rounds"]) / sum(turn[which] for turn in row["rounds"]) for which in (0, 1))
        waits, busy = ("" if row[what] is None else f"{row[what]:.1%}" for what in ("waits", "busy"))
        audits = [f"{row['audits'].get(outcome, 0.0):.0f}" for outcome in ("passed", "missed", "blamed")]
        lines.append(
            f"| {row['commit']} | {row['turns']} | {len(row['rounds'])} | {without:.3f} | {beside:.3f} "
            f"| {cost:.1%} ({low:.1%} to {high:.1%}) | {most(row, 'tickets'):.3%} | {most(row, 'signatures'):.3%} "
            f"| {at_most(row):.2%} | {waits} | {most(row, 'audits'):.3%} | {row['recomputed']:.1%} "
            f"| {' | '.join(audits)} | {busy} |"
        )
    TABLE.write_text("\n".join(lines) + "\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--turn-steps", type=int, default=4)
    options = parser.parse_args(words)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    row = {"commit": commit, "turns": f"{options.turn_steps} steps"} | measure(options.seconds, options.turn_steps)
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    write_table([json.loads(line) for line in ROWS.read_text().splitlines()])
    print(TABLE.read_text().splitlines()[-1])
    return int(at_most(row) > BOUND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
