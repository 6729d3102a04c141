"""What tickets, signatures and audits cost a run in tokens per second, measured in one run of real processes.

    python -m tests.benchmarks.costs_of_trust [--pairs 9] [--seconds 15]

A small model in two stages of a front and a back server, trained by four volunteers that take a fixed time more for
each job, as devices do that leave this processor free. Two machines of the operator audit one contribution in twenty.
They come and go by turns (without auditors nothing is drawn): steps per second beside them, through steps per second
without them, is what audits cost beside the auditors' own compute, which is on processors that nobody else wants here.
Tickets and signatures cannot be switched off: servers and the coordinator count the seconds that they spend on them
(`timed.py`), and whoever spends the largest share of its time counts, as if each second of it were one of the run's.

A row a run goes into `costs_of_trust.jsonl` beside this file; the table of all rows is `COSTS_OF_TRUST.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from node.demo.processes import Children
from tests.benchmarks.attacks import Watch, start, volunteers
from tests.benchmarks.timed import FILE
from tests.integration.bad_device import PACE
from tests.integration.swarm import Daemon, Swarm, eventually
from tests.integration.test_audits import BadChildren, audited
from tests.integration.test_bans import order

ROWS = Path(__file__).with_name("costs_of_trust.jsonl")
TABLE = Path(__file__).with_name("COSTS_OF_TRUST.md")
BOUND = 0.03
PACE_S = 0.05
VOLUNTEERS, AUDITORS = 4, 2
STEP_JOBS = 24
"""Of eight microbatches: a forward and a backward in stage 0, a route's end in stage 1."""
SETTLE_S = 6.0
"""After auditors have come or gone, before seconds count."""
RUN = """
name = "trusted"
steps = 1000000
[model]
layers = 2
hidden = 64
feed_forward = 176
context = 64
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
    """Ordinary daemons that count what trust costs them."""

    module = "tests.benchmarks.timed"


def arm(watch: Watch, seconds: float) -> float:
    """Steps per second from one step's end to another's."""
    time.sleep(SETTLE_S)
    begin = time.monotonic()
    time.sleep(seconds)
    seen = [(at, step) for at, step in list(watch.seen) if at >= begin]
    ends = [later for sooner, later in pairwise(seen) if later[1] > sooner[1]]
    return (ends[-1][1] - ends[0][1]) / (ends[-1][0] - ends[0][0])


def tasks_of(daemon: Daemon) -> float:
    return sum(map(float, _TASKS.findall(daemon.metrics())))


def shares(swarm: Swarm) -> dict[str, dict[str, float]]:
    """By daemon: the share of its time that went into each kind, and calls a second."""
    found = {}
    for daemon in swarm.daemons:
        said = json.loads((daemon.child.folder / FILE).read_text())
        seconds = said.pop("seconds")
        found[daemon.name] = {kind: spent / seconds for kind, (spent, _) in said.items()}
        found[daemon.name] |= {f"{kind}_per_s": calls / seconds for kind, (_, calls) in said.items()}
    return found


def measure(pairs: int, seconds: float) -> dict[str, Any]:
    os.environ[PACE] = str(PACE_S)
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
        auditors = [swarm.node(f"auditor-{number}", "audit", papers, "--no-punch") for number in range(AUDITORS)]
        watch = Watch(swarm)
        without, beside = [], []
        recomputed, steps = 0.0, 0
        for number in range(pairs):
            first = watch.step
            if number:
                for auditor in auditors:
                    swarm.again(auditor)
            passed = audited(swarm).get("passed", 0)
            eventually(lambda passed=passed: audited(swarm).get("passed", 0) >= passed + 4, "audits")  # type: ignore[misc]
            beside.append(arm(watch, seconds))
            recomputed, steps = recomputed + sum(map(tasks_of, auditors)), steps + watch.step - first
            for auditor in auditors:
                swarm.stop(auditor)
            without.append(arm(watch, seconds))
            print(f"pair {number + 1}: {without[-1]:.3f} steps/s without auditors, {beside[-1]:.3f} beside", flush=True)
        watch.close()
        return {
            "without": without,
            "beside": beside,
            "shares": shares(swarm),
            "audits": audited(swarm),
            "recomputed": recomputed / (steps * STEP_JOBS),
            "steps": swarm.step(),
            "banned": sum(line.get("event") == "node banned" for line in swarm.coordinator.log()),
        }


def of_audits(row: dict[str, Any]) -> tuple[float, float, float]:
    """The share of steps per second that audits cost: the pairs' median, and a 95 % interval of it by their order; a
    pair that something else has disturbed does not widen that."""
    costs = sorted(1 - beside / without for without, beside in zip(row["without"], row["beside"], strict=True))
    count, outside, left_out = len(costs), 0.0, 0
    while left_out < count // 2:
        outside += math.comb(count, left_out) / 2 ** (count - 1)
        if outside > 0.05:
            break
        left_out += 1
    low, high = (costs[left_out - 1], costs[-left_out]) if left_out else (-math.inf, math.inf)
    return statistics.median(costs), low, high


def most(row: dict[str, Any], *kinds: str) -> float:
    """Of all daemons the largest share of time for these kinds together."""
    return float(max(sum(of[kind] for kind in kinds) for of in row["shares"].values()))


def write_table(rows: list[dict[str, Any]]) -> None:
    lines = [
        "# What trust costs in tokens per second",
        "",
        "`python -m tests.benchmarks.costs_of_trust`, a row a run. Shares of the run's time; audits: of steps per"
        " second, 5 % of all contributions, by arms that take turns (median of pairs, 95 % interval). The bound for all"
        f" three together is {BOUND:.0%}, beside the auditors' own compute. A server's own time is part of it.",
        "",
        "| commit | steps/s without auditors | beside | audits | tickets | signatures | together"
        " | a ledger's time for audits | of the volunteers' work auditors did again | audits passed | blamed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cost, low, high = of_audits(row)
        together = max(0.0, cost) + most(row, "tickets", "signatures")
        lines.append(
            f"| {row['commit']} | {statistics.fmean(row['without']):.3f} | {statistics.fmean(row['beside']):.3f} "
            f"| {cost:.1%} ({low:.1%} to {high:.1%}) | {most(row, 'tickets'):.3%} | {most(row, 'signatures'):.3%} "
            f"| {together:.2%} | {most(row, 'audits'):.3%} | {row['recomputed']:.1%} "
            f"| {row['audits'].get('passed', 0):.0f} | {row['audits'].get('blamed', 0):.0f} |"
        )
    TABLE.write_text("\n".join(lines) + "\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args(words)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    row = {"commit": commit, "seconds": options.seconds, **measure(options.pairs, options.seconds)}
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    write_table([json.loads(line) for line in ROWS.read_text().splitlines()])
    print(TABLE.read_text().splitlines()[-1])
    return int(max(0.0, of_audits(row)[0]) + most(row, "tickets", "signatures") > BOUND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
