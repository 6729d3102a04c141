"""Counts samples from what the servers wrote on their disks: `python -m node.audit STATE-FOLDER…`.

A second opinion on "no sample is lost or counted twice". It opens the journals read-only, knows their format (see
`node.process.journal`) and the course that the run's configuration asks for, as its operator has laid it out, and
nothing of the machines: no import of them, no shared arithmetic. For every stage and step of the history that
counts (after going back to a checkpoint: the newer one) it asks that

* the stage's ledger sealed the step once, and the contributions of that seal, as accepted, cover every visit once;
* the loss of every microbatch is covered once, in the stage where its route ends;
* the decider decided the step once, on the samples that follow those of the step before, and closed it once.

A missing record makes the step's samples lost, a second one makes them doubled. Where a folder was rolled back or
deleted there is no record at all of steps that a later checkpoint has: those are named as not on record, and are no
loss, since the run began again from that checkpoint.
"""

from __future__ import annotations

import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protocol.run.batches import Batches
from protocol.run.changes import RunChange, laid_out_at
from protocol.run.course import Course, course_of
from protocol.run.run import RunConfig

_KINDS = ("ShardStarted", "ContributionAccepted", "StepSealed", "StepDecided", "StepDone")


@dataclass(frozen=True)
class Finding:
    """What is wrong with one step of one stage."""

    stage: int
    step: int
    samples_lost: int
    samples_doubled: int
    sentence: str


@dataclass
class Audit:
    """The verdict on a run: on the steps from `first_step` to `steps` - 1.

    The first step is 0 unless all journals that remain begin at a checkpoint, or one of them has been shortened: what
    was before is nobody's record.
    """

    first_step: int
    steps: int
    stages: int
    findings: list[Finding] = field(default_factory=list)
    vouched: int = 0
    """Steps below this one are in a checkpoint that a later ledger generation began from."""
    unrecorded: dict[int, list[int]] = field(default_factory=dict)
    """Stage -> steps of which its journals have no record at all, and which such a checkpoint has."""
    losses: dict[int, float] = field(default_factory=dict)
    """Mean nats per token of each decided step, as its decision says."""

    @property
    def samples_lost(self) -> int:
        return sum(finding.samples_lost for finding in self.findings)

    @property
    def samples_doubled(self) -> int:
        return sum(finding.samples_doubled for finding in self.findings)

    @property
    def clean(self) -> bool:
        return not self.findings


class AuditError(Exception):
    """The folders do not hold what an audit needs; the sentence says what is missing."""


@dataclass
class _Journal:
    """The ledger's records of one server."""

    stages: dict[int, int]
    """Ledger generation -> the stage that this server was of: another layout gives it another."""
    changes: tuple[RunChange, ...]
    """By the newest plan that it went by."""
    starts: dict[int, int]
    """Ledger generation -> first step of its history."""
    config: dict[str, Any]
    rows: list[tuple[str, dict[str, Any]]]
    forgotten: int
    """Steps below this one were taken out of the journal, which keeps what a restart needs and some thousands more."""


def audit(folders: Sequence[Path], steps: int | None = None) -> Audit:
    """Looks at the steps below `steps`, or at all that any decider closed.

    Raises:
        AuditError: a folder has no journal, or the folders belong to different runs or leave out a stage.
    """
    journals = [journal for folder in folders if (journal := _read(folder)) is not None]
    if not journals:
        raise AuditError("no server has started its shard yet")
    config = journals[0].config
    if any(journal.config != config for journal in journals):
        raise AuditError("the folders belong to different runs")
    starts: dict[int, int] = {}
    for journal in journals:
        starts.update(journal.starts)
    counted = [
        (journal.stages.get(body["ledger_generation"], -1), kind, body)
        for journal in journals
        for kind, body in journal.rows
    ]
    counted = [(s, k, b) for s, k, b in counted if b["ledger_generation"] == _generation_of(b["step"], starts)]
    if steps is None:
        steps = 1 + max((body["step"] for _, kind, body in counted if kind == "StepDone"), default=-1)
    run = msgspec.convert(config, RunConfig)
    changes = max((journal.changes for journal in journals), key=len)
    layouts = [laid_out_at(run, changes, step) for step in range(steps)] or [run]
    batches = Batches.of(run, changes)
    count = max(layout.stages.count for layout in layouts)
    missing = sorted(set(range(count)) - {stage for journal in journals for stage in journal.stages.values()})
    if missing:
        raise AuditError(f"no journal of stage {', '.join(map(str, missing))} among the folders")
    first_step = max(min(starts.values()), *(journal.forgotten for journal in journals))
    verdict = Audit(first_step, steps, count, vouched=max(starts.values()))
    for stage in range(count):
        _audit_stage(verdict, stage, layouts, batches, [(kind, body) for s, kind, body in counted if s == stage])
    _audit_decisions(verdict, batches, [(kind, body) for _, kind, body in counted])
    return verdict


def _audit_stage(
    verdict: Audit,
    stage: int,
    layouts: Sequence[RunConfig],
    batches: Batches,
    rows: list[tuple[str, dict[str, Any]]],
) -> None:
    courses: dict[RunConfig, Course] = {}
    accepted: dict[tuple[Any, ...], list[list[Any]]] = {}
    sealed: dict[int, list[list[Any]]] = {}
    for kind, body in rows:
        if kind == "ContributionAccepted":
            accepted.setdefault((body["step"], *body["contribution"]), []).extend(body["tasks"])
        elif kind == "StepSealed":
            sealed.setdefault(body["step"], []).extend(body["contributions"])
    recorded = {*sealed, *(key[0] for key in accepted)}
    for step in range(verdict.first_step, verdict.steps):
        run = layouts[step]
        if stage >= run.stages.count:
            continue
        course = courses.setdefault(run, course_of(run))
        if step < verdict.vouched and step not in recorded:
            verdict.unrecorded.setdefault(stage, []).append(step)
            continue
        wanted = _visits(course, batches.count(step), stage, step)
        covered: Counter[tuple[str, int, int]] = Counter()
        strange = 0
        for contribution in sealed.get(step, []):
            for task_step, microbatch, position, op, *_ in accepted.get((step, *contribution), []):
                if task_step == step and (op, microbatch, position) in wanted:
                    covered[op, microbatch, position] += 1
                else:
                    strange += 1
        lost = len({microbatch for op, microbatch, position in wanted if covered[op, microbatch, position] == 0})
        doubled = len({microbatch for op, microbatch, position in wanted if covered[op, microbatch, position] > 1})
        unsealed = step not in sealed
        if lost or doubled or strange or unsealed:
            why = "its step was never sealed" if unsealed else "by the contributions of its seal"
            sentence = f"{lost} microbatches without a gradient, {doubled} with more than one, {strange} foreign: {why}"
            samples = run.batch.samples
            verdict.findings.append(Finding(stage, step, lost * samples, (doubled + strange) * samples, sentence))


def _visits(course: Course, microbatches: int, stage: int, step: int) -> set[tuple[str, int, int]]:
    """(op, microbatch, position) of all that a step must cover in a stage."""
    wanted = set()
    for microbatch in range(microbatches):
        stages = course.stages_of(course.route(step, microbatch))
        wanted |= {("B", microbatch, position) for position, visited in enumerate(stages) if visited == stage}
        if stages[-1] == stage:
            wanted.add(("L", microbatch, len(stages)))
    return wanted


def _audit_decisions(verdict: Audit, batches: Batches, rows: list[tuple[str, dict[str, Any]]]) -> None:
    cursors: dict[int, list[tuple[int, int]]] = {}
    done: Counter[int] = Counter()
    for kind, body in rows:
        if kind == "StepDecided":
            cursors.setdefault(body["step"], []).append(tuple(body["data_cursor"]))
            verdict.losses[body["step"]] = body["loss"]
        elif kind == "StepDone":
            done[body["step"]] += 1
    for step in range(verdict.first_step, verdict.steps):
        if step < verdict.vouched and step not in cursors and not done[step]:
            continue  # as the ledger of stage 0, which is the decider
        wanted = range(*batches.samples(step))
        step_samples = len(wanted)
        trained: Counter[int] = Counter()
        for first, end in cursors.get(step, []):
            trained.update(range(first, min(end, first + 4 * step_samples)))
        lost = sum(trained[sample] == 0 for sample in wanted)
        doubled = sum(trained.values()) - sum(trained[sample] > 0 for sample in wanted)
        if lost or doubled:
            sentence = f"data cursor {cursors.get(step, 'missing')} is not samples {wanted.start} to {wanted.stop}"
            verdict.findings.append(Finding(0, step, lost, doubled, sentence))
        if done[step] != 1 and (done[step] or step >= verdict.vouched):  # a checkpoint proves that its steps closed
            lost, doubled = (step_samples, 0) if done[step] == 0 else (0, step_samples)
            verdict.findings.append(Finding(0, step, lost, doubled, f"closed {done[step]} times"))


def _generation_of(step: int, starts: dict[int, int]) -> int:
    """The ledger generation whose history of `step` counts: the newest that began at or before it."""
    return max((generation for generation, first in starts.items() if first <= step), default=-1)


def _read(folder: Path) -> _Journal | None:
    """One server's ledger records; None when it has not started a shard."""
    path = folder / "journal.sqlite"
    if not path.is_file():
        raise AuditError(f"{path}: no such journal")
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        marks = ", ".join("?" * len(_KINDS))
        rows = connection.execute(f"SELECT kind, body FROM records WHERE kind IN ({marks}) ORDER BY number", _KINDS)  # noqa: S608
        records = [(kind, msgspec.msgpack.decode(body)) for kind, body in rows]
        config = connection.execute("SELECT value FROM meta WHERE name = 'config'").fetchone()
        plan = connection.execute("SELECT value FROM meta WHERE name = 'plan'").fetchone()
        forgotten = connection.execute("SELECT value FROM meta WHERE name = 'forgotten'").fetchone()
    except sqlite3.DatabaseError as error:
        raise AuditError(f"{path}: {error}") from error
    finally:
        connection.close()
    started = [body for kind, body in records if kind == "ShardStarted"]
    if not started or config is None:
        return None
    kept = msgspec.msgpack.decode(plan[0])["plan"]["changes"] if plan is not None else []
    return _Journal(
        stages={body["ledger_generation"]: body["stage"] for body in started},
        changes=tuple(msgspec.convert(change, RunChange) for change in kept),
        starts={body["ledger_generation"]: max(0, body["checkpoint_step"]) for body in started},
        config=msgspec.msgpack.decode(config[0]),
        rows=[(kind, body) for kind, body in records if kind != "ShardStarted"],
        forgotten=0 if forgotten is None else int(forgotten[0]),
    )


def main(arguments: Iterable[str]) -> int:
    """Prints the verdict; exit code 1 when something is wrong with the samples, 2 with the folders."""
    try:
        verdict = audit([Path(argument) for argument in arguments])
    except AuditError as error:
        print(error, file=sys.stderr)
        return 2
    for finding in verdict.findings[:20]:
        print(f"step {finding.step} stage {finding.stage}: {finding.sentence}")
    for stage, missing in sorted(verdict.unrecorded.items()):
        print(
            f"stage {stage}: {len(missing)} steps from {missing[0]} to {missing[-1]} are in no journal;"
            f" a checkpoint after step {verdict.vouched - 1} has them"
        )
    print(
        f"steps {verdict.first_step} to {verdict.steps - 1}, {verdict.stages} stages: "
        f"{verdict.samples_lost} samples lost, {verdict.samples_doubled} doubled"
    )
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
