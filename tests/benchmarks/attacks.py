"""What each attack of a stranger costs an honest run of real processes, and who was out for it.

    python -m tests.benchmarks.attacks [--again] [--seconds 20] [NAME ...]

One run of two stages (a front and a back server each) that train by four honest volunteers, who take a fixed time for
each job, as devices do that leave this processor free. An attack is an ordinary volunteer with one thing wrong in it
(`tests/integration/bad_volunteer.py`, `bad_device.py`), or somebody who speaks the protocol by hand (`raids.py`). Its
seconds lie between as many without it, before and after: the share is its honest steps per second through theirs.

Rows go into `attacks.jsonl` beside this file, one as soon as it is measured, and the table is `ATTACKS.md`. A row that
stands there is not measured again, unless `--again` or its name asks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from node.demo.processes import Children
from protocol.drive.keyfile import load_or_create_identity
from tests.benchmarks import raids
from tests.benchmarks.raids import Play, Raid
from tests.integration.attacker import Papers, attack, join
from tests.integration.bad_deeds import PLAIN_FORMS, Target
from tests.integration.bad_device import PACE
from tests.integration.swarm import Daemon, Swarm, eventually
from tests.integration.test_audits import BadChildren
from tests.integration.test_bans import StubbornChildren, order

ROWS = Path(__file__).with_name("attacks.jsonl")
TABLE = Path(__file__).with_name("ATTACKS.md")
PACE_S = 0.1
HONEST = 4
BEGIN_S = 30.0
"""At first servers compute, too, and are faster than volunteers who take their time: no measure for what comes then."""
SETTLE_S = 3.0
"""After an attack, before honest seconds count again."""
GOAL, STALL_S = 0.9, 10.0
RUN = """
name = "attacked"
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
microbatches = 4
[stages]
count = 2
[checkpoint]
every_steps = 0
"""


@dataclass(frozen=True)
class Attack:
    """A row: what is done, what it did before (strangers.md, section 1), and how it is done."""

    words: str
    before: str
    deed: str = ""
    """Of a volunteer."""
    play: Play | None = None
    """By hand."""
    ban: bool = False
    """The operator bans it, and it does not listen."""
    restart: bool = False
    """A server is killed and started again in the middle, with and without the attack."""


ATTACKS = {
    "1 overflow": Attack("gradients of 1e200", "every step skipped, then all servers exit for good", "overflows"),
    "1 absurd": Attack("gradients of 1e9", "optimizer blinded", "huge"),
    "2 results": Attack(
        "results of steps that nobody leased to it", "38 of 38 accepted", play=raids.results_without_a_lease
    ),
    "2 lies": Attack("gradients that point uphill, of the usual size", "not found", "flips"),
    "3 replay": Attack(
        "one id in all its contributions; a server restarts",
        "the run waits for that server", "reuses_ids",
        restart=True,
    ),
    "4 slots": Attack("Ready with 64 slots, and with -1", "200 leases at once", play=raids.slots_of_nobody),
    "4 hoards": Attack("takes leases and computes nothing", "5.7 steps/s to 2 steps in 12 s", "hoards"),
    "4 hangs": Attack("its device hangs with leases held", "as hoarding", "hangs"),
    "4 flaps": Attack(
        "breaks its links whenever it has summed something", "not tried", "flaps"
    ),
    "4 huge back": Attack("input gradients of 1e37", "honest members cut off, the run stuck", "sends_back_huge"),
    "4 table": Attack(
        "4,096 contributions of 16 identities", "honest parts refused", play=raids.sums_without_a_lease
    ),
    "5 losses": Attack("claims losses of 1.7e308", "13 of 13 steps skipped", "claims_losses"),
    "5 steers": Attack("gradients a thousand times too large", "clip factor 4e-6, loss 3.0 to 5.8", "steers"),
    "6 banned": Attack("is banned, and goes on", "10 contributions counted, 9 more by dialling again", ban=True),
    "6 identities": Attack("new identities in a loop", "600 in 5.5 s", play=raids.many_identities),
    "8 memory": Attack("64 tensors begun and never ended", "248 MiB on one link", play=raids.tensors_without_end),
    "9 half open": Attack("300 silent calls a second", "no handshake of 150 ms ended", play=raids.half_open_calls),
    "9 first messages": Attack(
        "300 first messages a second", "0.66 ms of the coordinator each", play=raids.first_messages
    ),
    "9 stun": Attack("300 STUN questions a second", "130 a second starved everybody", play=raids.questions_by_udp),
    "9 scrapers": Attack("200 silent callers of /metrics", "a thread for each, for ever", play=raids.silent_scrapers),
    "9 descriptors": Attack("a thousand links of members", "all 1,024 descriptors", play=raids.descriptors),
    "10 terminal": Attack("a name that steers a terminal", "shown by status", play=raids.words_for_a_terminal),
    "10 parameters": Attack(
        "parameters asked for in a loop, and not read", "answers 308 times the question",
        play=raids.parameters_over_and_over,
    ),
    "10 boasts": Attack("claims 1e12 tokens/s", "volunteers sent to the wrong stage", "boasts"),
    "10 gives back": Attack("takes leases and gives them back", "9.0 to 3.6 steps/s", "gives_back"),
}  # fmt: skip


class Watch:
    """Steps as they close, by this process' clock."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._over = threading.Event()
        self.seen: list[tuple[float, int]] = []
        self.losses: dict[int, float] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            status = self._swarm.status()
            self.seen.append((time.monotonic(), status["run"]["step"]))
            self.losses.update({row["step"]: row["loss"] for row in status["losses"]})

    @property
    def step(self) -> int:
        return self.seen[-1][1] if self.seen else -1

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Steps per second, the longest time without one, and the mean loss, in seconds of `time.monotonic`."""
        seen = [(at, step) for at, step in self.seen if begin <= at <= end]
        news = [seen[0][0], *(at for (_, old), (at, new) in pairwise(seen) if new > old), end]
        losses = [self.losses[step] for step in range(seen[0][1] + 1, seen[-1][1] + 1) if step in self.losses]
        return {
            "steps_per_s": (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]),
            "longest_gap_s": max(later - sooner for sooner, later in pairwise(news)),
            "loss": fmean(losses) if losses else float("nan"),
        }


class Bed:
    """The run, its honest volunteers, and members that attack by hand."""

    def __init__(self, folder: Path, swarm: Swarm, honest: Children, seconds: float) -> None:
        self.folder, self.swarm, self.seconds = folder, swarm, seconds
        link = str(swarm.links["volunteer"])
        self.honest = [start(honest, folder, f"honest-{number}", "paced", "join", link) for number in range(HONEST)]
        eventually(lambda: len(volunteers(swarm)) == HONEST and swarm.step() > 20, "the honest volunteers")
        self.member: Papers = attack(join, swarm.link("volunteer"), 101)
        self.watch = Watch(swarm)

    def targets(self) -> dict[str, Target]:
        swarm, plan = self.swarm, self.member.plan
        assert plan is not None
        issuer = load_or_create_identity(swarm.state / "identity")
        at = {"coordinator": (swarm.link("server").addresses[0], swarm.link("server").coordinator, swarm.coordinator)}
        for index, stage in enumerate(plan.stages):
            for server in stage.servers:
                daemon = swarm.at(int(server.addresses[0].rpartition(":")[2]))
                at[f"{server.role} {index}"] = (server.addresses[0], server.node, daemon)
        return {
            name: Target(daemon, address, node, self.member, self.member, issuer, 0)
            for name, (address, node, daemon) in at.items()
        }

    def quiet(self, restart: bool = False) -> dict[str, float]:
        """As many seconds without anybody bad; `restart`: a server is killed and started again in their middle, too."""
        time.sleep(SETTLE_S)
        begin = time.monotonic()
        if restart:
            time.sleep(self.seconds / 2)
            self.restart_server()
        time.sleep(max(0.0, begin + self.seconds - time.monotonic()))
        return self.watch.between(begin, time.monotonic())

    def restart_server(self) -> None:
        self.swarm.kill(self.swarm.servers[-1])
        self.swarm.again(self.swarm.servers[-1])


def start(children: Children, folder: Path, name: str, *words: str) -> Daemon:
    home = folder / name
    arguments = [*words, "--yes", "--always", "--no-benchmark", "--no-punch", "--state", str(home)]
    child = children.start(name, home, [*arguments, "--metrics", "off"])
    return Daemon(child, "")


def volunteers(swarm: Swarm) -> list[str]:
    return [str(member["id"]) for member in swarm.status()["members"] if member["role"] == "volunteer"]


def run_attack(bed: Bed, name: str, what: Attack) -> dict[str, Any]:
    """One attack of as many seconds, and what became of it."""
    swarm = bed.swarm
    before = {daemon.name: (daemon.log_length(), daemon.rejected()) for daemon in swarm.daemons}
    row: dict[str, Any] = {}
    if what.play is not None:
        begin = time.monotonic()
        raid = Raid(
            swarm.link("volunteer"), bed.targets(), swarm.servers[0].metrics_url.split("/")[2], lambda: bed.watch.step,
            lambda: time.monotonic() - begin > bed.seconds,
        )  # fmt: skip
        attack(what.play, raid)
        row |= {"strikes": raid.strikes, "out_after_s": fmean(raid.out_after_s) if raid.out_after_s else None}
        row |= {"honest_call_s": max(raid.calls_s) if raid.calls_s else None, "honest_calls_failed": raid.honest_failed}
        end, bad = time.monotonic(), bed.member.identity.node
    else:
        with StubbornChildren() if what.ban else BadChildren() as children:
            known = set(volunteers(swarm))
            deed = () if what.ban else (what.deed,)
            child = start(children, bed.folder, f"bad-{name.replace(' ', '-')}", *deed, "join", order(swarm, "invite"))
            found = eventually(lambda: [one for one in volunteers(swarm) if one not in known], "the attacker")
            bad, begin = found[0], time.monotonic()
            if what.ban:
                time.sleep(bed.seconds / 4)
                order(swarm, "ban", bad[:16])
                begin = time.monotonic()
            if what.restart:
                time.sleep(bed.seconds / 2)
                bed.restart_server()
            time.sleep(max(0.0, begin + bed.seconds - time.monotonic()))
            end = time.monotonic()
            row["ended_by_itself"] = not child.child.running
    row |= bed.watch.between(begin, end) | {"blamed": blamed(bed, before, bad, begin)}
    refused: dict[str, float] = {}
    for daemon in swarm.daemons:
        old = before[daemon.name][1]
        for reason, count in daemon.rejected().items():
            if count > old[reason] and not (what.restart and count < old[reason]):
                refused[reason] = refused.get(reason, 0) + count - old[reason]
    alive = all(daemon.child.running for daemon in (*swarm.daemons, *bed.honest))
    wrong = [
        line
        for daemon in swarm.daemons
        for line in daemon.log(before[daemon.name][0])
        if line.get("event") == "node banned" and not str(bad).startswith(str(line.get("node", "?"))[:16])
    ]
    return row | {"refused": refused, "all_live": alive, "others_banned": len(wrong)}


def blamed(bed: Bed, before: dict[str, tuple[int, Any]], bad: str, begin: float) -> list[dict[str, Any]]:
    """What the daemons say of the attacker, each kind of word once: since when in seconds of the attack."""
    now, monotonic = time.time(), time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for daemon in bed.swarm.daemons:
        for line in daemon.log(before[daemon.name][0]):
            who = str(line.get("worker") or line.get("node") or line.get("peer") or "")
            word = str(line.get("event"))
            if who and str(bad).startswith(who[:16]) and word in WORDS:
                after = stamp(line, now) - (now - (monotonic - begin))
                said = {"word": word, "after_s": max(0.0, round(after, 2)), "reason": str(line.get("reason", ""))[:120]}
                if word not in found or after < found[word]["after_s"]:
                    found[word] = said
    return sorted(found.values(), key=lambda said: said["after_s"])


WORDS = ("node banned", "worker left out", "worker gets less", "hang up", "peer refused", "doubted", "blamed")


def stamp(line: dict[str, Any], now: float) -> float:
    """When a line was written, seconds of `time.time`."""
    return datetime.fromisoformat(str(line.get("timestamp"))).timestamp() if "timestamp" in line else now


def write_table(rows: dict[str, dict[str, Any]]) -> None:
    lines = [
        "# What attacks cost an honest run",
        "",
        "`python -m tests.benchmarks.attacks` on real processes; before: at the review of strangers.md, section 1.",
        f"The share is steps/s with the attack through steps/s around it; the goal is {GOAL:.0%}, and no stall of"
        f" {STALL_S:.0f} s. Who takes leases and does nothing costs one time-out after the other until it is left out, "
        "which is the same number of seconds however long a run is watched.",
        "",
        "| attack | before | seconds | steps/s without, with | share | longest wait (s) | loss without, with |"
        " who, and when |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, what in ATTACKS.items():
        row = rows.get(name)
        if row is None:
            lines.append(f"| {what.words} | {what.before} | not measured | | | | | |")
            continue
        steps = f"{row['without']['steps_per_s']:.2f}, {row['steps_per_s']:.2f}"
        losses = f"{row['without']['loss']:.3f}, {row['loss']:.3f}"
        lines.append(
            f"| {what.words} | {what.before} | {row['seconds']:.0f} | {steps} | {row['share']:.0%} "
            f"| {row['longest_gap_s']:.1f} | {losses} | {outcome(row)} |"
        )
    TABLE.write_text("\n".join(lines) + "\n")


def outcome(row: dict[str, Any]) -> str:
    """Who was out for it, in words."""
    parts = [f"{one['word']} after {one['after_s']:.1f} s" for one in row["blamed"][:2]]
    if row.get("strikes"):
        refused = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(row["refused"].items()))
        parts.append(f"{row['strikes']} strikes" + (f", refused: {refused}" if refused else ""))
    if row.get("out_after_s"):
        parts.append(f"link closed after {row['out_after_s']:.2f} s")
    if row.get("honest_call_s"):
        parts.append(f"an honest call took {row['honest_call_s']:.2f} s at most, {row['honest_calls_failed']} failed")
    return "; ".join(parts) or "nobody"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(words)
    unknown = [name for name in options.names if name not in ATTACKS]
    if unknown:
        parser.error(f"no attack is called {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    rows = {}
    if ROWS.exists():
        rows = {row["attack"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    todo = options.names or [name for name in ATTACKS if options.again or name not in rows]
    os.environ[PACE] = str(PACE_S)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as name, Swarm(Path(name), RUN + PLAIN_FORMS) as swarm, BadChildren() as honest:
        bed = Bed(Path(name), swarm, honest, options.seconds)
        time.sleep(BEGIN_S)
        calm = bed.quiet()
        for name in todo:
            restart = ATTACKS[name].restart
            before = bed.quiet(restart) if restart else calm
            row = run_attack(bed, name, ATTACKS[name])
            swarm.moves_on()
            after = bed.quiet(restart)
            without = {key: (before[key] + after[key]) / 2 for key in before}
            calm = bed.quiet() if restart else after
            share = row["steps_per_s"] / without["steps_per_s"]
            rows[name] = {"attack": name, "commit": commit, "seconds": options.seconds, "share": share} | row
            rows[name]["without"] = without
            ROWS.write_text("".join(json.dumps(rows[each]) + "\n" for each in ATTACKS if each in rows))
            write_table(rows)
            good = share >= GOAL and row["longest_gap_s"] < STALL_S and row["all_live"] and not row["others_banned"]
            print(f"{'ok ' if good else 'BAD'} {name}: {share:.0%}, {outcome(row)}", flush=True)
        bed.watch.close()


if __name__ == "__main__":
    main(sys.argv[1:])
