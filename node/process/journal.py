"""A server's journal: the records of `node.machine.records`, in order, in one SQLite file that survives a power cut.

* WAL and `synchronous=FULL`: a batch is durable when its transaction returns (one fsync for all that waited).
* A tensor lies in rows of at most `CHUNK_BYTES`, each with a CRC-32, so a flipped bit is found and named.
* One process at a time: the state folder is locked as long as the journal is open.

Format, for readers without this code (`node.audit`): table `records(number, step, kind, body, crc)`, where body is the
msgpack map of the record's fields; table `chunks(record, tensor, chunk, data, crc)`; table `meta(name, value)`.

`Forget(step)` drops what only recovery needed: stored contributions with their tensors, commits, and snapshots of
steps below. The ledger's own records (accepted, sealed, decided, done) stay for `KEPT_STEPS` steps more: they
are small, and they are what an audit counts samples by.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec
import trio

from node.machine.records import (
    RECORDS,
    CheckpointWritten,
    ContributionAccepted,
    ContributionStored,
    Record,
    SnapshotWritten,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from node.process.store import Buffer, TensorStore
from protocol.base.errors import BadInputError
from protocol.base.ids import TensorRef
from protocol.base.machine import Persisted
from protocol.drive.durable import DISK_TROUBLE, NO_ROOM
from protocol.drive.file_lock import OPEN_FLAGS, try_lock

FULL_BYTES = 64 << 10
"""With less left on a disk, a failed write is for want of room."""
JOURNAL_FILE = "journal.sqlite"
LOCK_FILE = "lock"
CHUNK_BYTES = 4 * 2**20
"""A row's most bytes: SQLite copies a row whole, and refuses one of a gigabyte."""
SCHEMA_VERSION = 1
SNAPSHOT_PATTERN = "snapshot-*"
"""Names of snapshot files beside the journal; one that no record names is left over from a crash, and removed."""

KEPT_STEPS = 10_000
"""A ledger's small records are kept for so many steps behind what recovery needs: for the audit, and for a coordinator
that was restored from a backup, which is told again what it has lost (a day, at nine seconds a step). A step of eight
contributions takes 3.4 kB, so these are 34 MB, and a restart reads them in a second or two."""
STEPS_OPEN_MAX = 8
"""Open steps, and those that somebody may still ask about: two at most with a delayed update."""
_FORGOTTEN: tuple[type[Record], ...] = (ContributionStored, StepCommitted, SnapshotWritten)
_KEPT_A_WHILE: tuple[type[Record], ...] = (ContributionAccepted, StepSealed, StepDecided, StepDone, CheckpointWritten)
_decode = msgspec.msgpack.Decoder(Union[RECORDS]).decode  # noqa: UP007

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL
);
CREATE INDEX records_by_kind ON records (kind, step);
CREATE TABLE chunks (
    record INTEGER NOT NULL, tensor INTEGER NOT NULL, chunk INTEGER NOT NULL, data BLOB NOT NULL, crc INTEGER NOT NULL
);
CREATE INDEX chunks_by_record ON chunks (record, tensor, chunk);
"""


class JournalError(Exception):
    """The journal cannot be used; the process stops with this sentence.

    Args:
        reason: `corrupt`, `full`, `locked`, `version` or `disk`.
        detail: the sentence, naming the file.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Append:
    """A record to be written, with the bytes of its tensors in the order of `tensors_of(record)`."""

    record: Record
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """What only recovery needs of steps below `step` may go."""

    step: int


def tensors_of(record: Record) -> tuple[TensorRef, ...]:
    """The tensors that a record carries with it."""
    return record.tensors if isinstance(record, ContributionStored) else ()


class Journal:
    """The file, opened for writing by one process. Its methods may be called from any thread, one at a time.

    Args:
        folder: the state folder; made if it is missing.
        on_sync: called with the seconds of each commit (for the metrics).
    Raises:
        BadInputError: there can be no such folder, or nothing may be written there.
        JournalError: the folder is locked by another process, its disk is full or fails, or the file is not a sound
            journal.
    """

    def __init__(self, folder: Path, on_sync: Callable[[float], None] = lambda seconds: None) -> None:
        self.folder = folder
        self.path = folder / JOURNAL_FILE
        self._on_sync = on_sync
        self._one_at_a_time = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(folder / LOCK_FILE)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise _full(folder) from error
            if error.errno in DISK_TROUBLE:
                raise JournalError("disk", f"{folder}: {error.strerror}") from error
            raise BadInputError(f"{folder}: cannot be used as state folder: {error.strerror}") from error
        try:
            with _named(self.path):
                self._connection = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Closes the file and frees the folder."""
        self._connection.close()
        os.close(self._lock)

    @property
    def byte_count(self) -> int:
        """Bytes on disk: the file and its write-ahead log."""
        files = (self.path, Path(f"{self.path}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def meta(self, name: str) -> bytes | None:
        """A value that was set once for the whole journal, or None."""
        with self._one_at_a_time, _named(self.path):
            row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def set_meta(self, name: str, value: bytes) -> None:
        """Sets a value for the whole journal, durably."""
        with self._one_at_a_time, _named(self.path):
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def commit(self, batch: Sequence[Append | Forget]) -> None:
        """Makes a batch durable, all of it or nothing, in its order."""
        stale: list[str] = []
        start = time.monotonic()
        with self._one_at_a_time, _named(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for item in batch:
                    if isinstance(item, Append):
                        self._append(item)
                    else:
                        stale += self._forget(item.step)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        self._on_sync(time.monotonic() - start)
        for name in stale:  # only now: the record must be gone before its file
            (self.folder / name).unlink(missing_ok=True)

    def read(self, store: TensorStore) -> list[Record]:
        """All records in order. Their tensors get keys of `store`, and are read from disk when somebody asks.

        A snapshot whose file is gone is left out: it is none. So are acceptances and seals of steps long closed, which
        are there for the audit.

        Raises:
            JournalError: a record's bytes are not those that were written.
        """
        records: list[Record] = []
        snapshots: list[str] = []
        with self._one_at_a_time, _named(self.path):
            execute = self._connection.execute
            # A ledger goes on with steps that are not closed; of those before the oldest commit it needs nothing.
            (oldest,) = execute("SELECT min(step) FROM records WHERE kind = 'StepCommitted'").fetchone()
            rows = execute(
                "SELECT number, kind, body, crc FROM records"
                " WHERE kind NOT IN ('ContributionAccepted', 'StepSealed') OR step >= ? ORDER BY number",
                (-1 if oldest is None else oldest - STEPS_OPEN_MAX,),
            ).fetchall()
        for number, kind, body, crc in rows:
            where = f"{self.path}: record {number} ({kind})"
            if zlib.crc32(body) != crc:
                raise JournalError("corrupt", f"{where} is damaged: its checksum does not fit")
            try:
                record: Record = _decode(body)
            except (msgspec.MsgspecError, ValueError) as error:
                raise JournalError("corrupt", f"{where} cannot be read: {error}") from error
            if isinstance(record, ContributionStored):
                record = msgspec.structs.replace(record, tensors=self._lazy(store, number, record.tensors))
            elif isinstance(record, SnapshotWritten):
                if not (self.folder / record.file).is_file():
                    continue
                snapshots.append(record.file)
            records.append(record)
        for file in self.folder.glob(SNAPSHOT_PATTERN):
            if file.name not in snapshots:
                file.unlink()
        return records

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version != SCHEMA_VERSION:
                raise JournalError("version", f"{self.path}: format {version}; this build reads {SCHEMA_VERSION}")
            else:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if verdict != "ok":
                    raise JournalError("corrupt", f"{self.path} is damaged: {verdict}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _append(self, item: Append) -> None:
        body = msgspec.msgpack.encode(item.record)
        cursor = self._connection.execute(
            "INSERT INTO records (step, kind, body, crc) VALUES (?, ?, ?, ?)",
            (item.record.step, type(item.record).__name__, body, zlib.crc32(body)),
        )
        for index, buffer in enumerate(item.buffers):
            view = memoryview(buffer).cast("B")
            for chunk, start in enumerate(range(0, max(1, len(view)), CHUNK_BYTES)):
                data = view[start : start + CHUNK_BYTES]
                self._connection.execute(
                    "INSERT INTO chunks VALUES (?, ?, ?, ?, ?)",
                    (cursor.lastrowid, index, chunk, data, zlib.crc32(data)),
                )

    def _forget(self, step: int) -> list[str]:
        """Deletes, and names the snapshot files without a record. The newest snapshot always stays."""
        chosen = f"kind IN ({', '.join('?' * len(_FORGOTTEN))}) AND step < ?"
        values: tuple[Any, ...] = (*(kind.__name__ for kind in _FORGOTTEN), step)
        newest = "SELECT max(number) FROM records WHERE kind = 'SnapshotWritten'"
        chosen += f" AND number IS NOT ({newest})"
        execute = self._connection.execute
        snapshots = execute(f"SELECT body FROM records WHERE {chosen} AND kind = 'SnapshotWritten'", values).fetchall()  # noqa: S608
        execute(f"DELETE FROM chunks WHERE record IN (SELECT number FROM records WHERE {chosen})", values)  # noqa: S608
        execute(f"DELETE FROM records WHERE {chosen}", values)  # noqa: S608
        if step > KEPT_STEPS:
            kinds = ", ".join(f"'{kind.__name__}'" for kind in _KEPT_A_WHILE)
            execute(f"DELETE FROM records WHERE kind IN ({kinds}) AND step < ?", (step - KEPT_STEPS,))  # noqa: S608
            execute("INSERT OR REPLACE INTO meta VALUES ('forgotten', ?)", (str(step - KEPT_STEPS).encode(),))
        self._forget_older_standings()
        kept = {_decode(body).file for (body,) in execute("SELECT body FROM records WHERE kind = 'SnapshotWritten'")}
        return [file for (body,) in snapshots if (file := _decode(body).file) not in kept]

    def _forget_older_standings(self) -> None:
        """Of each member only the newest counts: some hundred have been written since the last time, of 300 bytes."""
        execute = self._connection.execute
        rows = execute("SELECT number, body FROM records WHERE kind = 'AuditStanding' ORDER BY number").fetchall()
        newest = {_decode(body).node: number for number, body in rows}
        stale = [(number,) for number, body in rows if newest[_decode(body).node] != number]
        self._connection.executemany("DELETE FROM records WHERE number = ?", stale)

    def _lazy(self, store: TensorStore, number: int, refs: tuple[TensorRef, ...]) -> tuple[TensorRef, ...]:
        return tuple(
            store.add_lazy(lambda index=index: self._load(number, index), ref.shape, ref.form, ref.byte_count)  # type: ignore[misc]
            for index, ref in enumerate(refs)
        )

    def _load(self, number: int, index: int) -> bytes:
        """The bytes of one tensor, through a connection of its own: the writer may be busy in its thread."""
        with _named(self.path):
            reader = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
            try:
                rows = reader.execute(
                    "SELECT data, crc FROM chunks WHERE record = ? AND tensor = ? ORDER BY chunk", (number, index)
                ).fetchall()
            finally:
                reader.close()
        if not rows or any(zlib.crc32(data) != crc for data, crc in rows):
            state = "damaged: its checksum does not fit" if rows else "missing"
            raise JournalError("corrupt", f"{self.path}: tensor {index} of record {number} is {state}")
        return b"".join(data for data, _ in rows)


def open_journal(folder: Path) -> Journal:
    """For a command that only looks. Raises `BadInputError` when the folder is another process's, or cannot be used."""
    try:
        return Journal(folder)
    except JournalError as error:
        raise BadInputError(
            f"{error}; name another with --state" if error.reason == "locked" else str(error)
        ) from error


class JournalWriter:
    """The journal under trio: whatever waits goes into one transaction, in a thread (group commit).

    Args:
        deliver: takes the `Persisted` of each record, in order, once its transaction is durable.
    """

    def __init__(self, journal: Journal, deliver: Callable[[Persisted], None]) -> None:
        self._journal = journal
        self._deliver = deliver
        self._waiting: list[tuple[int | None, Append | Forget]] = []
        self._wake = trio.Event()

    def append(self, record_number: int, record: Record, buffers: tuple[Buffer, ...]) -> None:
        """Queues a record; `buffers` must never change from here on."""
        self._waiting.append((record_number, Append(record, buffers)))
        self._wake.set()

    def forget(self, step: int) -> None:
        """Queues a `Forget`, behind what was queued before."""
        self._waiting.append((None, Forget(step)))
        self._wake.set()

    async def run(self) -> None:
        """Writes until cancelled. Raises `JournalError` when the disk is full or broken: nothing may go on then."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            batch, self._waiting = self._waiting, []
            await trio.to_thread.run_sync(self._journal.commit, [item for _, item in batch])
            for record_number, _ in batch:
                if record_number is not None:
                    self._deliver(Persisted(record_number))


def _lock(path: Path) -> int:
    """An exclusive lock that ends with the process, however it ends."""
    handle = os.open(path, OPEN_FLAGS, 0o600)
    if not try_lock(handle):
        holder = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise JournalError("locked", f"{path.parent} is in use by another process (id {holder})")
    try:
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
    except BaseException:
        os.close(handle)
        raise
    return handle


def _full(path: Path) -> JournalError:
    sentence = f"{path}: no space left on the disk; free some and start the same command again"
    return JournalError("full", f"{sentence}: what was written before is whole")


class _named:  # noqa: N801 - reads as a statement
    """Turns SQLite's and the system's errors into a `JournalError` that names the file and the reason."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.DatabaseError):
            code = (error.sqlite_errorcode or 0) & 0xFF
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(self._path)):
                raise _full(self._path) from error
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise JournalError("corrupt", f"{self._path} is damaged: {error}") from error
            raise JournalError("disk", f"{self._path}: {error}") from error


def _is_full(path: Path) -> bool:
    """SQLite calls it an input/output error when there is no room for its index of the log (32 KiB)."""
    try:
        return shutil.disk_usage(path.parent).free < FULL_BYTES
    except OSError:
        return False
