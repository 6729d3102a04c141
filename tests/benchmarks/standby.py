"""How long a run is without a coordinator when one of two dies: `python -m tests.benchmarks.standby [--kills 20]`.

Real processes: PostgreSQL on loopback, two coordinators with the same key of which one stands by, and four servers that
train. Whoever has the run is killed, time after time; what counts is the time until the other one answers, has all
servers back and has heard of a new step. At the end the record is read: no step missing or doubled, no generation used
twice. Ends with 1 where it is not so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg

from node.demo.processes import Child, Children
from protocol.drive.process import free_port
from tests.integration.postgres import Cluster, postgres, why_not
from tests.integration.swarm import RUN, eventually, fetch

NAME = "stands-by"
TAKEOVER_S = 15.0
"""What the run promises."""


@dataclass
class Found:
    """What a series of kills came to."""

    takeovers_s: list[float]
    """From each kill to the first step that the other coordinator heard of."""
    generations: list[int]
    """Of the coordinators, start by start."""
    steps: list[int]
    """Closed steps on record, in order; those that count."""
    lost_steps: int

    @property
    def failure(self) -> str:
        """What is wrong with it; empty when nothing is."""
        if sorted(set(self.generations)) != self.generations:
            return f"generations {self.generations}: not each start above the one before"
        if self.steps != list(range(len(self.steps))) or self.lost_steps:
            return f"{len(self.steps)} steps on record, {self.lost_steps} lost: {self.steps[:3]} to {self.steps[-3:]}"
        return ""


class Pair:
    """The two coordinators; the first one begins."""

    def __init__(self, folder: Path, cluster: Cluster, children: Children) -> None:
        self._children = children
        toml = folder / "RUN.toml"
        toml.write_text(RUN.replace('name = "attacked"', f'name = "{NAME}"'))
        ports = [free_port(), free_port()]
        self.homes = [folder / "first", folder / "second"]
        announced = [word for port in ports for word in ("--announce", f"127.0.0.1:{port}")]
        self._commands = [
            ["coordinator", str(toml), "--state", str(home), "--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0",
             "--metrics", "off", "--store", cluster.url, *announced]
            for home, port in zip(self.homes, ports, strict=True)
        ]  # fmt: skip
        self.children: list[Child | None] = [None, None]
        self.begin(0, standby=False)
        self.links = eventually(lambda: self._links(0), "the first coordinator's links")
        self.homes[1].mkdir(mode=0o700)
        shutil.copy2(self.homes[0] / "identity", self.homes[1])
        self.begin(1)

    def begin(self, which: int, *, standby: bool = True) -> None:
        (self.homes[which] / "links.json").unlink(missing_ok=True)
        command = [*self._commands[which], *(["--standby"] if standby else [])]
        self.children[which] = self._children.start(self.homes[which].name, self.homes[which], command)

    def kill(self, which: int) -> None:
        child = self.children[which]
        assert child is not None and child.running, "it has ended by itself"
        self._children.kill(child)

    def _links(self, which: int) -> dict[str, str] | None:
        child = self.children[which]
        assert child is not None and child.running, child and child.log_tail()
        path = self.homes[which] / "links.json"
        links: dict[str, str] | None = json.loads(path.read_text()) if path.exists() else None
        return links

    def step(self, which: int) -> int:
        """Newest step that this one has heard of; -1 while it stands by or has heard of none."""
        links = self._links(which)
        if links is None:
            return -1
        try:
            step: int = json.loads(fetch(links["http"] + "/api/status"))["run"]["step"]
        except OSError:
            return -1
        return step


def takeovers(kills: int) -> Found:
    """Kills whoever has the run, `kills` times."""
    with tempfile.TemporaryDirectory() as name, postgres() as cluster, Children() as children:
        folder = Path(name)
        pair = Pair(folder, cluster, children)
        for number in range(4):
            home = folder / f"server-{number}"
            options = ["--state", str(home), "--metrics", "off", "--listen", "127.0.0.1:0"]
            children.start(f"server-{number}", home, ["server", pair.links["server"], *options])
        eventually(lambda: pair.step(0) >= 0, "the first step")
        seconds, generations = [], [_generation(cluster)]
        holder = 0
        for _ in range(kills):
            other = 1 - holder
            eventually(partial(_stands_by, pair, other), "the other one to stand by")
            before = pair.step(holder)
            began = time.monotonic()
            pair.kill(holder)
            eventually(partial(_has_more, pair, other, before), "a step at the other coordinator")
            seconds.append(time.monotonic() - began)
            generations.append(_generation(cluster))
            pair.begin(holder)
            holder = other
        with psycopg.connect(cluster.url) as db:
            db.execute(f'SET search_path TO "barnraise {NAME}"')
            steps = [row[0] for row in db.execute("SELECT step FROM steps WHERE thrown_away = 0 ORDER BY rowid")]
            row = db.execute("SELECT COALESCE(SUM(lost_steps), 0) FROM plans").fetchone()
        assert row is not None
        return Found(seconds, generations, steps, int(row[0]))


def _stands_by(pair: Pair, which: int) -> bool:
    child = pair.children[which]
    assert child is not None and child.running, child and child.log_tail()
    return "standing by" in child.log_tail()


def _has_more(pair: Pair, which: int, before: int) -> bool:
    return pair.step(which) > before


def _generation(cluster: Cluster) -> int:
    with psycopg.connect(cluster.url) as db:
        row = db.execute(f'SELECT generation FROM "barnraise {NAME}".run').fetchone()
    assert row is not None
    return int(row[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        sys.exit(reason)
    found = takeovers(arguments.kills)
    seconds = sorted(found.takeovers_s)
    print(
        f"{len(seconds)} takeovers: median {statistics.median(seconds):.1f} s, longest {seconds[-1]:.1f} s (promised:"
        f" {TAKEOVER_S:g}); {len(found.steps)} steps on record, {found.lost_steps} lost; generations"
        f" {found.generations[0]} to {found.generations[-1]}, each once: {not found.failure}"
    )
    sys.exit(found.failure or seconds[-1] > TAKEOVER_S)


if __name__ == "__main__":
    main()
