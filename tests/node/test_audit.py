"""The audit: clean on a true history, and any one record gone or repeated is seen."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from node.audit import AuditError, audit, main
from node.machine.records import ContributionAccepted, Record, ShardStarted, StepDecided, StepDone, StepSealed
from node.process.journal import Append, Journal
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.run.run import BatchSection, RunConfig

CONFIG = RunConfig(batch=BatchSection(microbatches=4, samples=3))
STEPS = 3
LEDGER_KINDS = ("ContributionAccepted", "StepSealed", "StepDecided", "StepDone")


def history(stage: int, generation: int, steps: range, restored: int = -1) -> list[Record]:
    """What the ledger of a stage writes while it closes `steps`."""
    records: list[Record] = [
        ShardStarted(
            ledger_generation=generation,
            step=0,
            stage=stage,
            shard=0,
            shard_count=2,
            checkpoint_step=restored,
            config_hash=CONFIG.config_hash(),
        )
    ]
    for step in steps:
        contributions = []
        for number in range(2):
            contribution = ContributionId(NodeId(f"volunteer{stage}"), generation, step * 2 + number)
            contributions.append(contribution)
            tasks = [TaskId(step, microbatch, stage, "B") for microbatch in (2 * number, 2 * number + 1)]
            if stage == 1:
                tasks += [TaskId(step, microbatch, 2, "L") for microbatch in (2 * number, 2 * number + 1)]
            records.append(
                ContributionAccepted(
                    ledger_generation=generation, step=step, contribution=contribution, tasks=tuple(tasks), losses=()
                )
            )
        if stage == 0:
            cursor = (step * 12, step * 12 + 12)
            decided = StepDecided(
                ledger_generation=generation,
                step=step,
                loss=1.0,
                gradient_norm=1.0,
                clip_factor=1.0,
                skipped=False,
                data_cursor=cursor,
            )
            records.append(decided)
        sealed = StepSealed(
            ledger_generation=generation,
            step=step,
            clip_factor=1.0,
            skipped=False,
            contributions=tuple(contributions),
        )
        records.append(sealed)
        if stage == 0:
            records.append(StepDone(ledger_generation=generation, step=step))
    return records


def write(folder: Path, *histories: Sequence[Record]) -> Path:
    """A server's state folder with these records."""
    journal = Journal(folder)
    journal.set_meta("config", msgspec.msgpack.encode(CONFIG))
    for records in histories:
        journal.commit([Append(record) for record in records])
    journal.close()
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Both stages' ledgers after three steps, and a server that has not started."""
    empty = Journal(tmp_path / "idle")
    empty.close()
    ledgers = [write(tmp_path / f"stage{stage}", history(stage, 1, range(STEPS))) for stage in range(2)]
    return [*ledgers, tmp_path / "idle"]


def test_a_true_history_is_clean(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Every sample of every step and stage once: nothing lost, nothing doubled, exit code 0."""
    verdict = audit(folders)
    assert verdict.clean and verdict.steps == STEPS and verdict.stages == 2
    assert main(map(str, folders)) == 0
    assert capsys.readouterr().out == "steps 0 to 2, 2 stages: 0 samples lost, 0 doubled\n"


def test_a_deciders_folder_that_was_deleted_or_rolled_back_is_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run went on from checkpoint 2: what the folder had of the steps before is not on record, and not lost."""
    whole = write(tmp_path / "one", history(1, 1, range(3)), history(1, 5, range(2, 4), restored=2))
    deleted = write(tmp_path / "new", history(0, 5, range(2, 4), restored=2))
    verdict = audit([deleted, whole])
    assert verdict.clean and verdict.unrecorded == {0: [0, 1]}
    rolled_back = write(tmp_path / "old", history(0, 1, range(1)), history(0, 5, range(2, 4), restored=2))
    verdict = audit([rolled_back, whole])
    assert verdict.clean and verdict.unrecorded == {0: [1]}
    assert main(map(str, [rolled_back, whole])) == 0
    assert (
        "stage 0: 1 steps from 1 to 1 are in no journal; a checkpoint after step 1 has them" in capsys.readouterr().out
    )
    gap = write(tmp_path / "gap", history(0, 5, range(3, 4), restored=2))
    assert not audit([gap, whole]).clean  # step 2 came after the checkpoint: that is a loss


def ledger_rows(folder: Path) -> list[tuple[int, str]]:
    """Number and kind of the records that an audit counts."""
    database = sqlite3.connect(folder / "journal.sqlite")
    rows = database.execute("SELECT number, kind FROM records WHERE kind != 'ShardStarted' ORDER BY number").fetchall()
    database.close()
    return rows


def change(folder: Path, statement: str, number: int) -> None:
    """Tampers with one record."""
    database = sqlite3.connect(folder / "journal.sqlite")
    assert database.execute(statement, (number,)).rowcount == 1
    database.commit()
    database.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_each_single_record_counts(folders: list[Path], stage: int) -> None:
    """Delete any one ledger record: samples are lost. Repeat any one: samples are doubled. Put back: clean."""
    rows = ledger_rows(folders[stage])
    assert {kind for _, kind in rows} == set(LEDGER_KINDS[: 4 if stage == 0 else 2])
    for number, kind in rows:
        repeat = (
            "INSERT INTO records (step, kind, body, crc) SELECT step, kind, body, crc FROM records WHERE number = ?"
        )
        change(folders[stage], repeat, number)
        verdict = audit(folders, STEPS)
        assert verdict.samples_doubled > 0 and verdict.samples_lost == 0, f"repeated {kind} {number}"
        change(folders[stage], "DELETE FROM records WHERE number = (SELECT max(number) FROM records) AND ?", 1)

        change(folders[stage], "UPDATE records SET kind = 'gone' WHERE number = ?", number)
        verdict = audit(folders, STEPS)
        assert verdict.samples_lost > 0 and verdict.samples_doubled == 0, f"deleted {kind} {number}"
        assert main(map(str, folders)) == (0 if (kind, number) == rows[-1][::-1] and kind == "StepDone" else 1)
        change(folders[stage], f"UPDATE records SET kind = '{kind}' WHERE number = ?", number)
    assert audit(folders).clean


def test_after_going_back_only_the_newer_history_counts(tmp_path: Path) -> None:
    """Steps from the checkpoint on are counted in the new generation; what the old one made of them is void."""
    folders = [
        write(tmp_path / f"stage{stage}", history(stage, 1, range(3)), history(stage, 4, range(2, 5), restored=2))
        for stage in range(2)
    ]
    verdict = audit(folders)
    assert verdict.clean and verdict.steps == 5
    change(folders[1], "DELETE FROM records WHERE number = ?", ledger_rows(folders[1])[-1][0])
    assert audit(folders).samples_lost == 12


def test_what_no_remaining_journal_tells_of_is_not_judged(tmp_path: Path) -> None:
    """Fresh servers that began at a checkpoint: the verdict says from which step on it holds."""
    folders = [write(tmp_path / f"stage{stage}", history(stage, 4, range(2, 5), restored=2)) for stage in range(2)]
    verdict = audit(folders)
    assert verdict.clean and (verdict.first_step, verdict.steps) == (2, 5)


def test_a_gap_or_an_overlap_of_the_data_is_seen(tmp_path: Path) -> None:
    """A step whose cursor does not follow the one before loses and doubles samples, though all records are there."""
    records = history(0, 1, range(2))
    shifted = [
        msgspec.structs.replace(record, data_cursor=(11, 23)) if record.step == 1 else record
        for record in records
        if isinstance(record, StepDecided)
    ]
    others = [record for record in records if not isinstance(record, StepDecided)]
    folders = [write(tmp_path / "a", others, shifted), write(tmp_path / "b", history(1, 1, range(2)))]
    verdict = audit(folders)
    assert (verdict.samples_lost, verdict.samples_doubled) == (1, 1)
    assert "(11, 23)" in verdict.findings[0].sentence


def test_folders_that_cannot_be_audited_are_named(folders: list[Path], tmp_path: Path) -> None:
    """A missing stage or journal is an error with a sentence and exit code 2, never a clean verdict."""
    with pytest.raises(AuditError, match="no journal of stage 1"):
        audit(folders[:1])
    with pytest.raises(AuditError, match="no such journal"):
        audit([tmp_path / "nowhere"])
    assert main([str(tmp_path / "nowhere")]) == 2
