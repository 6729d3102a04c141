"""What a long run leaves in a journal, and what a restart from it takes: `python -m tests.benchmarks.long_run`.

A made-up journal of the decider's server, the one that grows most: so many steps of eight contributions, with a
snapshot every twenty as the machine orders them. Then, in a fresh process, the restart: the file is opened and checked,
its records are read, and the machines of the server start from them. One line a length; `--steps` names others.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from node.machine.outbox import Outbox
from node.machine.records import (
    ContributionAccepted,
    Record,
    ShardStarted,
    SnapshotWritten,
    StageKeyKnown,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from node.process.journal import Append, Forget, Journal
from node.process.store import TensorStore
from node.server.recovery import oldest_needed
from node.server.server import ServerMachine
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.messages import Share
from tests.node.setting import make_config, make_plan

CONTRIBUTIONS = 8
SNAPSHOT_STEPS = 20
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
NODES = [NodeId(f"{number:052d}") for number in range(CONTRIBUTIONS)]


def of_step(step: int) -> list[Record]:
    """What stage 0's first server writes of a step, but for the gradients, which are gone with the next snapshot."""
    contributions = tuple(ContributionId(node, 7, step % 1000) for node in NODES)
    said = {"ledger_generation": 1, "step": step}
    accepted = [
        ContributionAccepted(
            **said, contribution=contribution, tasks=(TaskId(step, number, 0, "B"),), losses=()
        )
        for number, contribution in enumerate(contributions)
    ]  # fmt: skip
    ends = {"clip_factor": 1.0, "skipped": False}
    return [
        *accepted,
        StepDecided(**said, **ends, loss=2.5, gradient_norm=1.0, data_cursor=(16 * step, 16 * step + 16)),  # type: ignore[arg-type]
        StepSealed(**said, **ends, contributions=contributions),  # type: ignore[arg-type]
        StepCommitted(**said, **ends, contributions=contributions, digest=b"d" * 32),  # type: ignore[arg-type]
        StepDone(**said, shares=tuple(Share(node, 1) for node in NODES)),  # type: ignore[arg-type]
    ]


def make(folder: Path, steps: int) -> None:
    """The journal after so many steps. It is written without waiting for the disk: that is not what is measured."""
    config = make_config(steps=10**9, microbatches=CONTRIBUTIONS)
    journal = Journal(folder)
    journal._connection.execute("PRAGMA synchronous = OFF")
    start = ShardStarted(
        ledger_generation=1, step=0, stage=0, shard=0, shard_count=2, checkpoint_step=-1,
        config_hash=config.config_hash(),
    )  # fmt: skip
    journal.commit([Append(StageKeyKnown(ledger_generation=1, step=0, key=b"k" * 32)), Append(start)])
    for first in range(0, steps, SNAPSHOT_STEPS):
        last = min(steps, first + SNAPSHOT_STEPS)
        batch: list[Append | Forget] = [Append(record) for step in range(first, last) for record in of_step(step)]
        file = f"snapshot-{last:08d}.safetensors"
        (folder / file).touch()
        batch.append(Append(SnapshotWritten(ledger_generation=1, step=last, file=file, digest=b"d" * 32)))
        batch.append(Forget(max(0, oldest_needed(last, 1) - SNAPSHOT_STEPS)))
        journal.commit(batch)
    journal.close()


def restart(folder: Path) -> None:
    """Prints what a restart takes, as a process of its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    journal = Journal(folder)
    records = journal.read(TensorStore())
    plan = make_plan()
    out = Outbox(plan.decider, count(1))
    server = ServerMachine(
        plan.decider,
        make_config(steps=10**9, microbatches=CONTRIBUTIONS),
        259,
        plan,
        out,
        records,
        NodeId("c"),
        b"k" * 32,
    )
    server.start(0.0)
    seconds = time.monotonic() - begun
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{journal.byte_count / 1e6:8.1f} MB  {len(records):8,} records  {seconds:6.2f} s  +{memory:6.1f} MiB")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--restart", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.restart is not None:
        restart(options.restart)
        return
    for steps in options.steps:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            make(Path(folder), steps)
            made_s = time.monotonic() - begun
            command = [sys.executable, "-m", "tests.benchmarks.long_run", "--restart", folder]
            said = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ}).stdout
            print(f"{steps:9,} steps (made in {made_s:5.0f} s): restart {said.rstrip()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
