"""The journal: what it promised is there after a kill, and what is damaged is named."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import trio

from node.machine.records import (
    ContributionAccepted,
    ContributionStored,
    Record,
    SnapshotWritten,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from node.process.journal import CHUNK_BYTES, KEPT_STEPS, Append, Forget, Journal, JournalError, JournalWriter
from node.process.store import TensorStore
from protocol.base.errors import BadInputError
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.base.machine import Persisted

CONTRIBUTION = ContributionId(NodeId("a" * 52), 7, 1)


def stored(step: int, byte_count: int = 8, key: int = 5) -> ContributionStored:
    """A contribution's record with one tensor of so many bytes."""
    ref = TensorRef(key, (byte_count // 4,), "fp32", byte_count)
    tasks = (TaskId(step, 0, 0, "B"),)
    return ContributionStored(
        ledger_generation=1, step=step, contribution=CONTRIBUTION, version=step, tasks=tasks, losses=(), tensors=(ref,)
    )


def every_kind(step: int) -> list[Record]:
    """One record of each kind that a step leaves, without tensors."""
    return [
        ContributionAccepted(ledger_generation=1, step=step, contribution=CONTRIBUTION, tasks=(), losses=()),
        StepSealed(ledger_generation=1, step=step, contributions=(CONTRIBUTION,), clip_factor=1.0, skipped=False),
        StepDecided(
            ledger_generation=1,
            step=step,
            loss=1.0,
            gradient_norm=1.0,
            data_cursor=(0, 4),
            clip_factor=1.0,
            skipped=False,
        ),
        StepDone(ledger_generation=1, step=step),
        StepCommitted(
            ledger_generation=1, step=step, contributions=(CONTRIBUTION,), digest=b"d", clip_factor=1.0, skipped=False
        ),
    ]


def test_a_snapshot_without_its_file_is_none(tmp_path: Path) -> None:
    """Somebody deleted it: the record would send a restart into a crash, so it does not count."""
    journal = Journal(tmp_path)
    for version in (2, 4):
        (tmp_path / f"snapshot-{version}").write_bytes(b"weights")
        file = f"snapshot-{version}"
        journal.commit([Append(SnapshotWritten(ledger_generation=1, step=version, file=file, digest=b"d"))])
    (tmp_path / "snapshot-4").unlink()
    assert [record.step for record in journal.read(TensorStore(count(1)))] == [2]
    journal.close()


def test_records_and_tensors_come_back_in_order(tmp_path: Path) -> None:
    """What a batch held is read back equal, tensors over chunk borders and an empty one included."""
    large = os.urandom(CHUNK_BYTES * 2 + 12)
    journal = Journal(tmp_path)
    journal.commit([Append(record) for record in every_kind(3)])
    journal.commit([Append(stored(4, len(large)), (large,)), Append(stored(5, 0), (b"",))])
    journal.close()

    store = TensorStore()
    journal = Journal(tmp_path)
    records = journal.read(store)
    assert records[:5] == every_kind(3)
    first, second = records[5], records[6]
    assert isinstance(first, ContributionStored) and isinstance(second, ContributionStored)
    assert store.byte_count == 0, "tensors are read only when asked for"
    assert store.get(first.tensors[0].key) == large
    assert store.get(second.tensors[0].key) == b""
    journal.close()


def test_forget_keeps_the_ledger_and_drops_what_recovery_needed(tmp_path: Path) -> None:
    """Below the step: tensors, commits, snapshots with their files go; the ledger's records stay."""
    journal = Journal(tmp_path)
    for step in range(4):
        name = f"snapshot-{step}.safetensors"
        (tmp_path / name).write_bytes(b"x")
        snapshot = SnapshotWritten(ledger_generation=1, step=step, file=name, digest=b"d")
        journal.commit([*map(Append, every_kind(step)), Append(stored(step), (b"12345678",)), Append(snapshot)])
    journal.commit([Forget(2)])
    kinds = [(type(record).__name__, record.step) for record in journal.read(TensorStore())]
    for step in range(4):
        for kind in ("ContributionAccepted", "StepSealed", "StepDecided", "StepDone"):
            assert kinds.count((kind, step)) == 1
        for kind in ("ContributionStored", "StepCommitted", "SnapshotWritten"):
            assert kinds.count((kind, step)) == (1 if step >= 2 else 0)
    assert sorted(file.name for file in tmp_path.glob("snapshot-*")) == [f"snapshot-{n}.safetensors" for n in (2, 3)]
    assert journal._connection.execute("SELECT count(*) FROM chunks").fetchone() == (2,)
    journal.close()


def test_what_a_ledger_wrote_is_kept_for_a_while_only(tmp_path: Path) -> None:
    """A journal does not grow for ever: steps far behind leave no record, and the audit is told from where on it has
    them."""
    journal = Journal(tmp_path)
    for step in (0, 1, 2, KEPT_STEPS + 1):
        journal.commit([*map(Append, every_kind(step))])
    journal.commit([Forget(KEPT_STEPS + 2)])
    steps = {record.step for record in journal.read(TensorStore())}
    assert steps == {2, KEPT_STEPS + 1} and journal.meta("forgotten") == b"2"
    journal.close()


def test_the_newest_snapshot_is_never_forgotten(tmp_path: Path) -> None:
    """Even a Forget beyond it leaves the last snapshot and its file; a file without a record is removed at start."""
    journal = Journal(tmp_path)
    (tmp_path / "snapshot-1.safetensors").write_bytes(b"x")
    (tmp_path / "snapshot-9.safetensors").write_bytes(b"left over from a crash")
    snapshot = SnapshotWritten(ledger_generation=1, step=1, file="snapshot-1.safetensors", digest=b"d")
    journal.commit([Append(snapshot), Forget(100)])
    assert journal.read(TensorStore()) == [snapshot]
    assert [file.name for file in tmp_path.glob("snapshot-*")] == ["snapshot-1.safetensors"]
    journal.close()


def test_a_second_process_is_fenced_off(tmp_path: Path) -> None:
    """Two processes never share a state folder; the refusal names the holder."""
    journal = Journal(tmp_path)
    code = f"from pathlib import Path; from node.process.journal import Journal; Journal(Path({str(tmp_path)!r}))"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert second.returncode == 1
    assert f"in use by another process (id {os.getpid()})" in second.stderr
    journal.close()
    Journal(tmp_path).close()


WRITER = """
import os, sys
from pathlib import Path
from node.process.journal import Append, Journal
from tests_journal import stored
journal = Journal(Path(sys.argv[1]))
step = 0
while True:
    batch = [Append(stored(step + i, 200_000), (bytes([(step + i) % 256]) * 200_000,)) for i in range(3)]
    journal.commit(batch)
    step += 3
    print(step, flush=True)
"""


@pytest.mark.parametrize("commits", [1, 4, 9])
def test_kill_in_mid_write_loses_nothing_that_was_promised(tmp_path: Path, commits: int) -> None:
    """After SIGKILL at any moment: every acknowledged record is there, in order, and batches are whole."""
    state = tmp_path / "state"
    script = tmp_path / "writer.py"
    (tmp_path / "tests_journal.py").write_text(Path(__file__).read_text())
    script.write_text(WRITER)
    child = subprocess.Popen(
        [sys.executable, str(script), str(state)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert child.stdout is not None
    promised = 0
    for _ in range(commits):
        promised = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    promised = max([promised, *(int(line) for line in child.stdout.read().split())])
    child.wait()
    child.stdout.close()

    store = TensorStore()
    journal = Journal(state)
    records = journal.read(store)
    assert len(records) >= promised and len(records) % 3 == 0
    for step, record in enumerate(records):
        assert isinstance(record, ContributionStored) and record.step == step
        assert store.get(record.tensors[0].key) == bytes([step % 256]) * 200_000
    journal.close()


def test_a_torn_write_ahead_log_keeps_what_came_before(tmp_path: Path) -> None:
    """Half a transaction at the end of the log (a power cut) is ignored; the journal goes on after it."""
    state, copy = tmp_path / "state", tmp_path / "copy"
    journal = Journal(state)
    journal.commit([Append(stored(0), (b"12345678",))])
    length = (state / "journal.sqlite-wal").stat().st_size
    journal.commit([Append(stored(1), (b"12345678",))])
    copy.mkdir()
    for file in state.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    journal.close()
    with (copy / "journal.sqlite-wal").open("r+b") as log:
        log.truncate(length + 1000)
    (copy / "journal.sqlite-shm").unlink()
    journal = Journal(copy)
    assert [record.step for record in journal.read(TensorStore())] == [0]
    journal.commit([Append(stored(1), (b"12345678",))])
    assert [record.step for record in journal.read(TensorStore())] == [0, 1]
    journal.close()


def test_damage_is_named(tmp_path: Path) -> None:
    """A flipped bit in a record, in a tensor, and a file that is no database: each error names file and place."""
    journal = Journal(tmp_path)
    journal.commit([Append(stored(0), (b"12345678",)), Append(every_kind(0)[0])])
    journal.close()
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.execute("UPDATE chunks SET data = ?", (b"12345679",))
    database.commit()
    store = TensorStore()
    journal = Journal(tmp_path)
    record = journal.read(store)[0]
    assert isinstance(record, ContributionStored)
    with pytest.raises(JournalError, match=r"journal\.sqlite: tensor 0 of record 1 is damaged"):
        store.get(record.tensors[0].key)
    database.execute("UPDATE records SET body = ? WHERE number = 2", (b"\x80",))
    database.commit()
    database.close()
    with pytest.raises(JournalError, match=r"record 2 \(ContributionAccepted\) is damaged"):
        journal.read(TensorStore())
    journal.close()
    (tmp_path / "journal.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(JournalError, match=r"journal\.sqlite is damaged") as caught:
        Journal(tmp_path)
    assert caught.value.reason == "corrupt"


def test_a_full_disk_is_named_and_changes_nothing(tmp_path: Path) -> None:
    """When no page can be added the batch fails whole, with the reason `full`, and the journal stays readable."""
    journal = Journal(tmp_path)
    journal.commit([Append(stored(0), (b"12345678",))])
    journal._connection.execute("PRAGMA max_page_count = 20")
    with pytest.raises(JournalError, match="no space left") as caught:
        journal.commit([Append(every_kind(1)[0]), Append(stored(1, 400_000), (bytes(400_000),))])
    assert caught.value.reason == "full"
    assert [record.step for record in journal.read(TensorStore())] == [0]
    journal.close()


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "disk")])
def test_a_disk_that_takes_no_lock_is_not_a_wrong_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    """A server's unit begins it again until there is room, but not one whose folder was named wrongly."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(JournalError, match=str(tmp_path)) as told:
        Journal(tmp_path)
    assert told.value.reason == reason
    monkeypatch.undo()
    Journal(tmp_path).close()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    """No start will change that."""
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="cannot be used as state folder: Not a directory"):
        Journal(tmp_path / "file" / "state")


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A journal of a later build is left alone."""
    Journal(tmp_path).close()
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(JournalError, match="format 99"):
        Journal(tmp_path)


@pytest.mark.trio
async def test_records_that_wait_share_one_commit(tmp_path: Path) -> None:
    """Many records submitted at once become one transaction, and each is acknowledged in order after it."""
    syncs: list[float] = []
    acknowledged: list[Persisted] = []
    journal = Journal(tmp_path, on_sync=syncs.append)
    writer = JournalWriter(journal, acknowledged.append)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for number in range(50):
                writer.append(number, stored(number), (b"12345678",))
            writer.forget(10)
            assert acknowledged == []
            nursery.start_soon(writer.run)
            while len(acknowledged) < 50:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
    assert acknowledged == [Persisted(number) for number in range(50)]
    assert len(syncs) == 1
    assert len(journal.read(TensorStore())) == 40
    journal.close()
