"""Real faults on real processes: `python -m tests.soak [--minutes 20] [--faults 25] [--findings FILE] [--table]`.

Run after run, each of a coordinator, five servers and three volunteers, until the minutes are over. In each, fault
after fault is drawn by the seed: a kind, and a process of a role that it can meet. The run must go on after each, its
status must name who holds it up meanwhile, no closed step may be done again where each shard has a buddy (in half of
the runs), and at its end its weights must be those of one process, bit by bit, and the audit of the ledgers must find
no sample lost or doubled. Ends with 1 where something was found that nobody has explained: beside `found` in the
findings' line a person may write `explained`, with the reason.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from coordinator.live.slots import COPIED_SHARE
from tests.soak.faults import KINDS, Kind
from tests.soak.findings import Findings
from tests.soak.fleet import PLACE_KEPT_S, Fleet, Process
from tests.soak.ground import Ground, enter
from tests.soak.judge import (
    BACK_S,
    LOOK_S,
    NAMED_S,
    WHOLE_S,
    Watch,
    close,
    named,
    place_name,
    settle,
)

FINDINGS = Path(__file__).parent / "findings.jsonl"


def strike(fleet: Fleet, kind: Kind, process: Process, role: str, rng: random.Random) -> dict[str, Any]:
    """One fault from begin to end, and what came of it."""
    status = fleet.status()
    assert status is not None, "a coordinator that answered does not answer any more"
    place = place_name(process, status)
    watch, exits = Watch.of(status), len(fleet.exits)
    lasts_s = rng.uniform(*kind.lasts_s)
    kind.begin(fleet, process, rng)
    while time.monotonic() - watch.begun < lasts_s:
        watch.look(fleet.status())
        time.sleep(LOOK_S)
    kind.end(fleet, process)
    ended = mute_until = time.monotonic()
    while True:
        fleet.look_after()
        heard = fleet.status()
        closed = watch.look(heard)
        now = time.monotonic()
        mute_until = now if heard is None else mute_until  # a busy computer takes minutes to start a process
        back_s = now - ended
        if closed or now - mute_until > BACK_S or back_s > WHOLE_S:
            break
        time.sleep(LOOK_S)
    newest = watch.newest or status
    found = [] if closed else [f"no step within {back_s:.0f} s after it: {newest['run']['waiting_for']}"]
    if reason := settle(fleet):
        found.append(reason)
    newest = fleet.status() or newest
    rollbacks = newest["run"]["rollbacks"] - watch.rollbacks
    lost_steps = newest["run"]["lost_steps"] - watch.lost_steps
    kept_s = PLACE_KEPT_S * COPIED_SHARE if fleet.keeps_copies else PLACE_KEPT_S
    if rollbacks and not kind.free and watch.stood_s < kept_s:  # else a spare took the place, as it should
        found.append(f"the run went back {rollbacks} times, {lost_steps} steps done again")
    elif lost_steps and fleet.keeps_copies:
        found.append(f"{lost_steps} steps done again though each shard has a buddy")
    was_named = named(watch, process, place)
    if watch.stood_s - watch.mute_s > NAMED_S and role != "coordinator" and not was_named:
        found.append("nobody was named")
    ended_alone = fleet.exits[exits:]
    if ended_alone and kind.name != "full disk":  # whoever has no room says so and ends; it is started again
        found += ended_alone
    return {
        "fault": kind.name, "role": role, "process": process.name, "lasted_s": round(lasts_s, 1),
        "stood_s": round(watch.stood_s, 1), "back_s": round(back_s, 1), "rollbacks": rollbacks,
        "lost_steps": lost_steps, "named": was_named, "said": sorted(watch.sentences)[:4], "exits": ended_alone,
        "found": "; ".join(found),
    }  # fmt: skip


def one_run(findings: Findings, number: int, seed: int, faults: int, ends_at: float, inside: bool, keep: bool) -> None:
    """Until so many faults, or until it is time to end it."""
    rng = random.Random(f"{seed} {number}")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    collocated, delay = rng.choice(["when_empty", "always"]), rng.choice([0, 1])
    buddy = rng.choice(["auto", "always"])
    kinds = [kind for kind in KINDS if inside or not kind.needs_ground]
    head = {"run": number, "seed": seed, "collocated": collocated, "delay": delay, "buddy": buddy}
    struck, failure = 0, ""
    with Fleet(Ground(folder, inside), rng.randint(1, 10**6), collocated, delay, buddy) as fleet:
        try:
            if reason := settle(fleet):
                raise AssertionError(f"before any fault: {reason}")
            while struck < faults and time.monotonic() < ends_at:
                status = fleet.status()
                if status is None:
                    raise AssertionError("the coordinator does not answer between two faults")
                kind = rng.choice(kinds)
                role = rng.choice(kind.roles)
                hit = [process for process in fleet.processes if fleet.place_of(process, status) == role]
                if not hit:
                    continue
                struck += 1
                found = {**head, "number": struck, **strike(fleet, kind, rng.choice(hit), role, rng)}
                findings.add(found)
                _say(found)
                if found["found"].startswith("no step within") or "not whole" in found["found"]:
                    break
            end = {**head, "faults": struck, **close(fleet)}
        except AssertionError as error:
            failure = str(error)
            end = {**head, "faults": struck, "weights": "unknown", "samples_lost": 0, "samples_doubled": 0,
                   "found": failure}  # fmt: skip
        findings.add(end)
        print(end, flush=True)
        if end["found"] and keep:
            shutil.copytree(folder, Path(f"soak-{number}"), ignore=shutil.ignore_patterns("fill"))
    shutil.rmtree(folder, ignore_errors=True)


def _say(found: dict[str, Any]) -> None:
    print(
        f"{found['number']:3} {found['fault']} of {found['role']} ({found['process']}) for {found['lasted_s']} s: stood"
        f" {found['stood_s']} s, next step after {found['back_s']} s, {found['lost_steps']} steps again;"
        f" {found['said'][:1]} {found['found'] and 'FOUND: ' + found['found']}",
        flush=True,
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no fault after this")
    parser.add_argument("--faults", type=int, default=25, help="of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=Path, default=FINDINGS, help="where to go on, and to write")
    parser.add_argument("--table", action="store_true", help="only print what was found so far")
    parser.add_argument("--keep", action="store_true", help="copy a run with findings here, as soak-NUMBER")
    options = parser.parse_args(words)
    findings = Findings(options.findings)
    if not options.table:
        inside = enter(words)
        ends_at = time.monotonic() + 60.0 * options.minutes
        while time.monotonic() < ends_at:
            one_run(findings, findings.next_run, options.seed, options.faults, ends_at, inside, options.keep)
    print(findings.table())
    for line in findings.unexplained:
        print(f"unexplained: run {line['run']}, {line.get('fault', 'its end')}: {line['found']}")
    return 1 if findings.unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
