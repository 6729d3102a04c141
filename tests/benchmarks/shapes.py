"""Every shape of plan with real processes and kills, against one process: the same weights, bit for bit?

    python -m tests.benchmarks.shapes [--again] [NAME ...]

Each shape is one run of `barnraise demo --steps 60 --chaos 5 --seed 1` (coordinator, servers and volunteers as
processes of their own; every five steps a volunteer that holds work is killed) and one of `demo --reference`. What came
out is written into `SHAPES.md` beside this file after each shape, so an interrupted run goes on where it stopped: a
shape whose row stands there is not run again, unless `--again` or its name asks for it.

All of it combines. Two things have no part in each other where they meet: a sample in segments goes backward segment by
segment, so `compute.split_backward` splits nothing of it (`node/README.md`), and audits compute whole samples again, so
segments are refused without `audit.rate = 0`. "All together but segments" has what these leave out.

Several minutes a shape on two busy cores. `tests/integration` holds the same in small.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("SHAPES.md")
STEPS, CHAOS, SEED = 60, 5, 1
HEAD = """# Shapes that ran

`python -m tests.benchmarks.shapes`: `barnraise demo --steps 60 --chaos 5 --seed 1` against `--reference`, real
processes on one machine. A digest is the beginning of the SHA-256 of the exported weights.

| shape | keys | kills | re-issued | lost | doubled | weights | reference | equal |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Shape:
    """A run, as arguments of `barnraise demo`."""

    keys: tuple[str, ...]
    volunteers: int = 3
    servers: int | None = None

    def arguments(self) -> list[str]:
        servers = [] if self.servers is None else ["--servers", str(self.servers)]
        return ["--volunteers", str(self.volunteers), *servers, *self.run()]

    def run(self) -> list[str]:
        """What `--reference` has to know, too."""
        return [word for key in self.keys for word in ("--set", key)]


SHAPES = {
    "split backward": Shape(("stages.count=3", "compute.split_backward=true")),
    "one of four stages skipped": Shape(("stages.count=4", "routes.skip=0.25"), volunteers=5),
    "two of six skipped, swaps": Shape(
        ("stages.count=6", "stages.back_servers=0", "routes.skip=0.34", "routes.swaps=2"), volunteers=7
    ),
    "interleaved, two chunks": Shape(("stages.count=2", "stages.chunks=2", "stages.placement=interleaved")),
    "V": Shape(("stages.count=2", "stages.chunks=2", "stages.placement=v")),
    "unequal stages from the planner": Shape(("stages.count=3", "stages.cut=planned"), servers=7),
    "three segments": Shape(("stages.count=3", "batch.segments=3", "audit.rate=0")),
    "V, the planner's order": Shape(
        ("stages.count=2", "stages.chunks=2", "stages.placement=v", "stages.order=tuned"), servers=5
    ),
    "all together but segments, audited": Shape(
        (
            "stages.count=4", "stages.back_servers=0", "stages.chunks=2", "stages.placement=v", "stages.cut=planned",
            "stages.order=tuned", "stages.collocated=always", "routes.skip=0.25", "routes.swaps=1",
            "compute.split_backward=true",
        ),
        volunteers=6,
    ),
    "all together": Shape(
        (
            "stages.count=4", "stages.back_servers=0", "stages.chunks=2", "stages.placement=v", "stages.cut=planned",
            "routes.skip=0.25", "routes.swaps=1", "compute.split_backward=true", "batch.segments=3",
            "audit.rate=0",
        ),
        volunteers=6,
    ),
}  # fmt: skip


def demo(folder: Path, name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs it; returns its summary with the digest of its weights."""
    summary = folder / f"{name}.json"
    command = [sys.executable, "-m", "protocol.cli", "demo", "--plain", "--steps", str(STEPS), "--seed", str(SEED)]
    command += ["--summary", str(summary), "--out", str(folder / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: ended with {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    found: dict[str, Any] = json.loads(summary.read_text())
    weights = Path(found["model"]) / "model.safetensors"
    return {**found, "digest": hashlib.sha256(weights.read_bytes()).hexdigest()[:16]}


def compare(name: str, shape: Shape) -> str:
    """Both runs of a shape; its row of the table."""
    with tempfile.TemporaryDirectory(prefix="shapes-") as folder:
        found = demo(Path(folder), "demo", [*shape.arguments(), "--chaos", str(CHAOS)])
        settled = list(shape.keys)
        if "stages.cut=planned" in settled:
            settled[settled.index("stages.cut=planned")] = f"stages.cut={found['cut']}"
        expected = demo(Path(folder), "reference", [*Shape(tuple(settled)).run(), "--reference"])
    equal = "yes" if found["digest"] == expected["digest"] else "NO"
    counts = [found[key] for key in ("kills", "reissued", "samples_lost", "samples_doubled")]
    keys = ", ".join(f"`{key}`" for key in settled)
    return f"| {name} | {keys} | {' | '.join(map(str, counts))} | {found['digest']} | {expected['digest']} | {equal} |"


def rows() -> dict[str, str]:
    """Of the table as it stands, by shape."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    found = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    return {name: line for name, line in found.items() if name in SHAPES}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *SHAPES], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also shapes that stand in the table")
    options = parser.parse_args(arguments)
    for name in options.names or SHAPES:
        if options.names or options.again or name not in rows():
            row = compare(name, SHAPES[name])
            table = {**rows(), name: row}
            TABLE.write_text(HEAD + "".join(f"{table[each]}\n" for each in SHAPES if each in table))
            print(row, flush=True)
    return 0 if all(row.endswith(" yes |") for row in rows().values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
