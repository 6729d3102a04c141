"""Whether audits ever blame somebody honest: real tasks, computed twice with torch, and judged as in a run.

    python -m tests.benchmarks.blame [--tasks 100000] [--other-tasks 10000] [--python OTHER/bin/python] [NAME ...]

A process of its own (`honest_work.py`) trains a small LLaMA in three stages by the jobs that servers and volunteers do,
and hands over what a stage's servers would keep: what went into each task, what came out, the sums. Here the production
auditor (`node.volunteer.auditor`) computes all of it again on its device and compares, and the production ledger
(`node.server.audits`) rules: passed, or a second opinion, a strike, a ban, a lean over a hundred audits. Both stand
beside eight members that never err, so a member of another kind is the odd one out.

*Within a class* both compute alike, in each form of the wire. *Across classes* the worker computes otherwise: with two
threads, in another order and grouping, with graphs that keep inputs only, with the plain instructions of the processor,
in bf16 where the auditor has fp32 (as far apart as two cards that round elsewhere), or with another version of torch
(`--python`: an interpreter that has one, and this project's other packages).

At the end of each part one contribution is false (another task's sum): if that is not found, nothing is counted.
Counts go into `blame.jsonl` beside this file, a line for each part of some 3,000 tasks, and the table is `BLAME.md`.
A row that has its number of tasks is not measured again; an interrupted one goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from node.compute.device_performer import DevicePerformer
from node.compute.lane import input_refs
from node.machine import jobs
from node.machine.outbox import Outbox
from node.machine.records import AuditStanding
from node.process.store import Buffer
from node.server.audits import Audits, Ruling
from node.volunteer.auditor import Auditor
from protocol.base.ids import NodeId, TaskId
from protocol.base.machine import Compute, Computed, Send, ShareTensor
from protocol.messages import Audit, Audited, AuditReport, FetchAudited, Stored
from protocol.run.audits import Claim
from protocol.run.run import AuditSection
from tests.benchmarks.honest_work import FORMS, STAGES, Contributed, Step, plan_of, read, run_of
from tests.node.compute.test_seals import SERVERS, sealer

ROWS = Path(__file__).with_name("blame.jsonl")
TABLE = Path(__file__).with_name("BLAME.md")
PART_TASKS = 3000
MEMBERS = tuple(NodeId(f"member-{number}") for number in range(4))
NATIVES = tuple(NodeId(f"native-{number}") for number in range(8))
"""Known to have no lean at all."""
AUDITORS = (NodeId("auditor-0"), NodeId("auditor-1"))
AUDIT = AuditSection(first=10**9)
"""All is audited; the tolerance is the one that runs have."""
BINS_PER_DECADE = 10
PLAIN = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}


@dataclass(frozen=True)
class Row:
    """A worker: the run's form of the wire, and in what it computes otherwise than the auditor."""

    form: str
    words: str
    ways: tuple[str, ...] = ()
    """Of `honest_work.py`."""
    environment: dict[str, str] = field(default_factory=dict)
    other_torch: bool = False

    @property
    def across(self) -> bool:
        return bool(self.ways or self.environment or self.other_torch)


SAME = {f"same, {form}": Row(form, "the same") for form in FORMS}
ACROSS = {
    "2 threads": Row("plain", "two threads, the auditor one", ("--threads", "2")),
    "regrouped": Row("plain", "backwards anew and in halves, tasks in the opposite order", ("--regroup",)),
    "inputs only": Row("plain", "graphs that keep inputs only", ("--light",)),
    "plain instructions": Row("plain", "SSE, the auditor all the processor has", environment=PLAIN),
    "plain instructions, default": Row("default", "SSE, the auditor all the processor has", environment=PLAIN),
    "plain instructions, bf16": Row("bf16", "SSE, the auditor all the processor has", environment=PLAIN),
    "bf16": Row("plain", "bf16, the auditor fp32", ("--bf16",)),
    "bf16, default": Row("default", "bf16, the auditor fp32", ("--bf16",)),
    "other torch": Row("plain", "another torch", other_torch=True),
    "other torch, default": Row("default", "another torch", other_torch=True),
    "other torch, bf16": Row("bf16", "another torch", other_torch=True),
}
ALL = SAME | ACROSS


class Court:
    """A device that audits, the auditor's machine for each stage, and the ledgers of the stages."""

    def __init__(self, form: str, seed: int, folder: Path) -> None:
        self.config = run_of(form, seed)
        self.plan = plan_of()
        self._keys = count(1 << 40)  # far from those of the worker's tensors
        self._buffers: dict[int, Buffer] = {}
        self._benches: list[tuple[DevicePerformer, Auditor, Outbox]] = []
        self._ledgers: list[Audits] = []
        self.version = -1
        self.values: list[tuple[Claim, float]] = []
        """Of each claim of the newest contribution: by how much it differs."""
        for stage in range(len(STAGES)):
            server = self.plan.stages[stage].servers[0].node
            device = DevicePerformer(evidence=(folder / str(stage), sealer(SERVERS[0])))
            out = Outbox(AUDITORS[0], self._keys)
            auditor = Auditor(self.config, out, lambda version: None, lambda version: True, lambda: None)
            auditor.reset(self.plan, (server,))
            self._benches.append((device, auditor, out))
            ledger = Audits(AUDIT, lambda: bytes(32), lambda node, server=server: node == server, 60.0)  # type: ignore[misc]
            for name in AUDITORS:
                ledger.auditor_here(name)
            for native in NATIVES:
                ledger.recall(
                    AuditStanding(
                        ledger_generation=1, step=0, node=native, passed=100, judged=100, strikes=(), owed=False,
                        lean_count=0, lean_sums=(), lean_squares=0.0, lean_windows=0, leaned=False,
                    )
                )  # fmt: skip
            self._ledgers.append(ledger)

    def set_up(self, vocabulary: int) -> None:
        for stage, (device, _, _) in enumerate(self._benches):
            self._do(device, jobs.SetUpDevice(self.config, vocabulary, self.plan, stage))

    def begin(self, step: Step) -> None:
        """The weights of the step's version."""
        self._buffers = dict(step.buffers)
        for stage, (device, _, _) in enumerate(self._benches):
            shards, grids = (step.parameters[stage],), tuple(step.grids[stage : stage + 1])
            self._do(device, jobs.LoadParameters(step.version, shards, grids))
            if self.version not in (-1, step.version):
                self._do(device, jobs.DropParameters(self.version))
        self.version = step.version

    def judge(self, made: Contributed) -> Ruling:
        """Draws it and lets auditors compute it until the ledger has ruled."""
        ledger = self._ledgers[made.stage]
        stored = Stored(
            ledger_generation=1, contribution=made.contribution, step=made.step, version=self.version,
            tasks=made.tasks, losses=made.losses, shard=0,
        )  # fmt: skip
        assert ledger.draw(stored), "all is audited"
        while True:
            (unit,) = ledger.give(0.0)
            assert unit.busy is not None
            report = self._recompute(made, len(unit.auditors))
            ruling = ledger.report(unit.busy, report, 0.0)
            assert ruling is not None
            if ruling.outcome != "again":
                return ruling

    def _recompute(self, made: Contributed, attempt: int) -> AuditReport:
        """What `node.volunteer.auditor` makes of it; messages are answered and jobs done at once."""
        device, auditor, out = self._benches[made.stage]
        server = self.plan.stages[made.stage].servers[0].node
        self.values = []
        order = Audit(
            ledger_generation=1, contribution=made.contribution, step=made.step, version=self.version,
            tasks=made.tasks, losses=made.losses, auditor=AUDITORS[0], attempt=attempt, directions=bytes(range(8)),
        )  # fmt: skip
        auditor.on_audit(server, order)
        while effects := out.take_effects():
            for effect in effects:
                match effect:
                    case Send(message=AuditReport() as report):
                        auditor.on_over(made.contribution)
                        out.take_effects()
                        return report
                    case Send(message=FetchAudited() as wanted):
                        auditor.on_audited(server, _answer(made, wanted.task))
                    case Compute(job=job):
                        result = self._do(device, job)
                        if isinstance(job, jobs.Compare):
                            claim: Claim = made.claim_of(job.claimed[0])
                            self.values.append((claim, result))
                        auditor.computed(job, result)
                    case ShareTensor(key, copy):
                        self._buffers[copy] = self._buffers[key]
                    case _:
                        pass
        raise AssertionError("an audit stands still")

    def _do(self, device: DevicePerformer, job: Any) -> Any:
        outcome = device.perform(job, {ref.key: self._buffers[ref.key] for ref in input_refs(job)})
        assert isinstance(outcome.fact, Computed), outcome.fact
        for ref, buffer in outcome.tensors:
            self._buffers[ref.key] = buffer
        return outcome.fact.result


def _answer(made: Contributed, task: TaskId | None) -> Audited:
    kept = next(kept for kept in made.kept if kept.task == task)
    return Audited(
        ledger_generation=1, contribution=made.contribution, task=task, kept=kept.kinds, brought_by=kept.brought_by,
        tensors=kept.tensors,
    )  # fmt: skip


def part(row: Row, python: str, seed: int) -> dict[str, Any]:
    """About `PART_TASKS` tasks of one worker, and one contribution that is false.

    Raises:
        AssertionError: that one was not found.
    """
    command = [python, "-m", "tests.benchmarks.honest_work", row.form, str(PART_TASKS), str(seed), *row.ways]
    command += ["--members", ",".join(MEMBERS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **row.environment}
    found: Counter[str] = Counter()
    bins: dict[str, Counter[int]] = {}
    largest: dict[str, float] = {}
    last: Contributed | None = None
    with (
        tempfile.TemporaryDirectory(prefix="blame-") as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker,
    ):
        assert worker.stdout is not None
        hello, steps = read(worker.stdout)
        court = Court(row.form, seed, Path(folder))
        court.set_up(hello.vocabulary)
        for step in steps:
            court.begin(step)
            for made in step.contributions:
                ruling = court.judge(made)
                found["tasks"] += made.task_count
                found["contributions"] += 1
                found[ruling.outcome] += 1
                found["blamed"] += len(ruling.blames)
                found["out"] += sum(blame.out for blame in ruling.blames)
                for claim, value in court.values:
                    bins.setdefault(claim, Counter())[_bin(value)] += 1
                    largest[claim] = max(largest.get(claim, 0.0), value)
            last = step.contributions[-1]
            false = last.false_one(step.contributions[-1 - len(STAGES)])
        if worker.wait() or last is None:
            raise SystemExit(f"{' '.join(command)}: ended with {worker.returncode}")
        assert court.judge(false).outcome == "blamed", "a false sum was not found"
    return {
        "torch": [str(torch.__version__), hello.torch],
        "seed": seed,
        **found,
        "largest": largest,
        "bins": {claim: dict(sorted(counts.items())) for claim, counts in bins.items()},
    }


EQUAL = -1000
"""The bin of differences that are none."""


def _bin(value: float) -> int:
    """The upper edge of bin n is 10 ** (n / BINS_PER_DECADE)."""
    return EQUAL if value == 0.0 else math.ceil(BINS_PER_DECADE * math.log10(value))


def quantile(bins: dict[str, int], share: float) -> float:
    """The upper edge of the bin in which the quantile lies, of a row's counts by bin."""
    left = share * sum(bins.values())
    for number, counted in sorted((int(number), counted) for number, counted in bins.items()):
        left -= counted
        if left <= 0:
            return 0.0 if number == EQUAL else 10 ** (number / BINS_PER_DECADE)
    return math.nan


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of a row's parts together."""
    counts: Counter[str] = Counter()
    bins: dict[str, Counter[str]] = {}
    largest: dict[str, float] = {}
    for each in parts:
        counts.update({name: value for name, value in each.items() if isinstance(value, int) and name != "seed"})
        for claim, found in each["bins"].items():
            bins.setdefault(claim, Counter()).update(found)
            largest[claim] = max(largest.get(claim, 0.0), each["largest"][claim])
    torches = sorted({tuple(each["torch"]) for each in parts})
    return {**counts, "bins": bins, "largest": largest, "torch": torches}


def rows() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in ROWS.read_text().splitlines() if ROWS.exists() else ():
        each = json.loads(line)
        found.setdefault(each["row"], []).append(each)
    return found


HEAD = f"""# Whether audits blame somebody honest

`python -m tests.benchmarks.blame`: tasks of a small LLaMA in three stages, computed by an honest worker and once more
by the production auditor, ruled by the production ledger; tolerance {AUDIT.tolerance}. Of the differences of each kind
of claim (relative, L2) the 99.9 % quantile and, in brackets, the largest; 0: equal in every bit. A member is *out* by
{AUDIT.tolerance * 10:g} at once, by three strikes, or by a lean in two windows of a hundred audits.

| run's forms | worker | tasks | audits | blamed | out | outputs | input gradients | sums of gradients | torch |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def write_table(found: dict[str, list[dict[str, Any]]]) -> None:
    lines, totals = [], {False: Counter[str](), True: Counter[str]()}
    for name, row in ALL.items():
        if name not in found:
            lines.append(f"| {row.form} | {row.words} | not measured | | | | | | | |\n")
            continue
        whole = merged(found[name])
        totals[row.across].update({key: whole.get(key, 0) for key in ("tasks", "contributions", "blamed", "out")})
        cells = [
            f"{quantile(whole['bins'][claim], 0.999):.1g} ({whole['largest'][claim]:.1g})"
            if claim in whole["bins"]
            else ""
            for claim in ("output", "input_gradient", "gradient")
        ]
        versions = "; ".join(" beside ".join(dict.fromkeys(pair)) for pair in whole["torch"])
        counts = [whole.get(key, 0) for key in ("tasks", "contributions", "blamed", "out")]
        middle = " | ".join(f"{each:,}" for each in counts)
        lines.append(f"| {row.form} | {row.words} | {middle} | {' | '.join(cells)} | {versions} |\n")
    words = []
    for across, total in totals.items():
        if not total["tasks"]:
            continue
        which = "Across classes" if across else "Within one class"
        # With none among n the rate is below 3 / n, 95 times in a hundred.
        bound = "" if total["blamed"] else f": below {3 / total['tasks']:.0e} of them, at 95 %"
        words.append(
            f"{which}: {total['blamed']:,} blamed and {total['out']:,} out of {total['tasks']:,} tasks{bound}."
        )
    forms = [f"`{name}`: {', '.join(keys) or 'as runs have it'}." for name, keys in FORMS.items()]
    TABLE.write_text(HEAD + "".join(lines) + "\n" + "\n".join((*words, "", "Forms: " + " ".join(forms))) + "\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *ALL], metavar="NAME")
    parser.add_argument("--tasks", type=int, default=100_000, help="within one class, over all forms")
    parser.add_argument("--other-tasks", type=int, default=10_000, help="in each row across classes")
    parser.add_argument("--python", default="", help="an interpreter with another torch")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    names = [name for name in options.names or ALL if options.python or not ALL[name].other_torch]
    wanted: dict[str, int] = {
        name: options.other_tasks if ALL[name].across else -(-options.tasks // len(SAME)) for name in names
    }

    def left(name: str) -> float:
        """Of a row's tasks, the share that is not done."""
        done: int = sum(each["tasks"] for each in rows().get(name, ()))
        return 1.0 - done / wanted[name]

    # By turns, so that whoever stops it has something of each row.
    while names and left(name := max(names, key=left)) > 0.0:
        row = ALL[name]
        made = part(row, options.python if row.other_torch else sys.executable, 1 + len(rows().get(name, ())))
        with ROWS.open("a") as file:
            file.write(json.dumps({"row": name, **made}) + "\n")
        write_table(rows())
        print(f"{name}: {1.0 - left(name):.0%} of {wanted[name]:,}, blamed {made.get('blamed', 0)}", flush=True)
    write_table(rows())
    whole = {name: merged(found) for name, found in rows().items()}
    within = [each for name, each in whole.items() if not ALL[name].across]
    return int(any(each.get("blamed", 0) for each in within))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
