"""Where the coordinator's record is kept: a SQLite file, or PostgreSQL for two coordinators of which one stands by.

Both are one connection, used by one thread at a time, that holds the run's lock for as long as it lives. With
PostgreSQL the lock is an advisory lock of the very session that writes: whoever has lost the session has lost lock and
pen together, so an old coordinator that wakes up can write nothing.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from coordinator.process.schema import MIGRATIONS, for_postgres
from protocol.base.errors import BadInputError
from protocol.drive.file_lock import OPEN_FLAGS, try_lock

DATABASE = "coordinator.sqlite3"
LOCK = "lock"
LOCK_SPACE = 0x6261726E
"""The first half of the advisory lock's number (`barn`); the second is of the run's name."""
CONNECT_S = 10
STATEMENT_S = 30
"""The longest statement is one fsync of 1,024 rows, or one look over a million steps (2.5 s on two cores)."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 4, 2, 3
"""A coordinator's computer that loses power says no goodbye: both ends know after 4 + 2 * 3 = 10 s, so that one that
looks for the lock every second has it within 15 s."""


class StateLockedError(Exception):
    """Another coordinator has the run."""


class StateBrokenError(Exception):
    """The record cannot be read or written: nothing may be promised any more."""


class Rows(Protocol):
    """What a statement gives."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """One connection, which has the run's lock."""

    name: str
    """For people; without a password."""
    is_shared: bool
    """Whether coordinators of other computers may open it."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        """Runs one statement, with `?` for each value. Raises `StateBrokenError`."""
        ...

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """The same statement for each of the rows. Raises `StateBrokenError`."""
        ...

    def transaction(self) -> Any:
        """A context: all or nothing, and durable at its end. Raises `StateBrokenError`."""
        ...

    def close(self) -> None:
        """Ends the connection and gives the lock back."""
        ...


# ---- SQLite --------------------------------------------------------------------------------------------------------


class SqliteDatabase:
    """A file in the state folder: WAL with `synchronous=FULL`, so that a commit has reached the disk when it returns
    (state-and-trust 4.5)."""

    is_shared = False

    def __init__(self, folder: Path) -> None:
        """Creates or opens the file and brings its tables up to date.

        Raises:
            StateLockedError: another process has the folder.
            StateBrokenError: it cannot be used, or was written by a newer version.
        """
        self.name = str(folder / DATABASE)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, OPEN_FLAGS, 0o600)
        except OSError as error:
            raise StateBrokenError(f"{folder}: cannot be used as state folder: {error.strerror}") from error
        if not try_lock(self._lock):
            os.close(self._lock)
            raise StateLockedError(
                f"{folder}: another coordinator is running with this state folder; one run has one coordinator"
            )
        try:
            self._db = self._connect()
            self._migrate()
        except BaseException:
            os.close(self._lock)
            raise

    def _connect(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            # Transactions are written out below; one thread at a time is the daemon's promise.
            db = sqlite3.connect(self.name, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
        except (OSError, sqlite3.Error) as error:
            raise StateBrokenError(f"{self.name}: {error}") from error
        return db

    def _migrate(self) -> None:
        (version,) = self.execute("PRAGMA user_version").fetchone()
        _check_version(self.name, version, len(MIGRATIONS))
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            with self._guard():
                self._db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateBrokenError(f"{self.name}: {error}") from error

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        with self._guard():
            return self._db.execute(statement, tuple(values))

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._guard():
            self._db.executemany(statement, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk rolls back by itself, and that is what is to be said
                self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)


# ---- PostgreSQL ----------------------------------------------------------------------------------------------------


class PostgresDatabase:
    """A schema of its own, named like the run, in a PostgreSQL database; many runs may share one."""

    is_shared = True

    def __init__(self, url: str, run: str) -> None:
        """Connects, takes the run's lock and brings its tables up to date. `run`: the run's name.

        Raises:
            BadInputError: the address is none, or psycopg is not installed.
            StateLockedError: another coordinator has the run.
            StateBrokenError: no connection, or tables of a newer version.
        """
        try:
            import psycopg
            from psycopg import sql
        except ImportError as error:
            raise BadInputError(
                f"--store: PostgreSQL needs the extra: pip install 'barnraise[postgres]' ({error})"
            ) from error
        self._error = psycopg.Error
        self.name = _shown(psycopg, url)
        settings = {
            "statement_timeout": f"{STATEMENT_S}s",
            "idle_in_transaction_session_timeout": f"{STATEMENT_S}s",
            "tcp_keepalives_idle": str(KEEPALIVE_IDLE_S),
            "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_S),
            "tcp_keepalives_count": str(KEEPALIVE_COUNT),
            "synchronous_commit": "on",
        }
        try:
            self._db = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=CONNECT_S,
                keepalives_idle=KEEPALIVE_IDLE_S,
                keepalives_interval=KEEPALIVE_INTERVAL_S,
                keepalives_count=KEEPALIVE_COUNT,
                tcp_user_timeout=1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_COUNT),
                options=" ".join(f"-c {name}={value}" for name, value in settings.items()),
                client_encoding="utf8",  # a cluster made in the C locale would give bytes for text
                application_name=f"barnraise coordinator {run}",
            )
        except psycopg.Error as error:
            raise StateBrokenError(f"{self.name}: {_one_line(error)}") from error
        try:
            key = zlib.crc32(run.encode()) - 2**31
            if not self.execute("SELECT pg_try_advisory_lock(?, ?)", (LOCK_SPACE, key)).fetchone()[0]:
                raise StateLockedError(f"{self.name}: another coordinator has the run {run}; --standby waits for it")
            schema = sql.Identifier(f"barnraise {run}")
            with self._guard():
                self._db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(schema))
                self._db.execute(sql.SQL("SET search_path TO {}").format(schema))
            self._migrate()
        except BaseException:
            self._db.close()
            raise

    def _migrate(self) -> None:
        self.execute("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        self.execute(
            "CREATE TABLE IF NOT EXISTS issuer (id BIGINT PRIMARY KEY CHECK (id = 1), public_key BYTEA NOT NULL)"
        )
        row = self.execute("SELECT MAX(version) FROM schema_version").fetchone()
        version = row[0] or 0
        _check_version(self.name, version, len(MIGRATIONS))
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            with self.transaction():
                self.execute(for_postgres(script))
                self.execute("INSERT INTO schema_version VALUES (?)", (number,))

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise StateBrokenError(f"{self.name}: {_one_line(error)}") from error

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        with self._guard():
            # Without values nothing is a mark, and several statements may stand in one string.
            return self._db.execute(statement.replace("?", "%s"), values) if values else self._db.execute(statement)

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._guard(), self._db.cursor() as cursor:  # all on their way at once: not a round trip for each
            cursor.executemany(statement.replace("?", "%s"), rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._guard(), self._db.transaction():
            yield

    def close(self) -> None:
        self._db.close()


def _check_version(name: str, version: int, known: int) -> None:
    if version > known:
        raise StateBrokenError(
            f"{name}: written by a newer version of barnraise (schema {version}, this one knows {known})"
        )


def _shown(psycopg: Any, url: str) -> str:
    """The address as people may see it. Raises `BadInputError`."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error as error:
        raise BadInputError(f"--store: expected postgresql://USER@HOST/DATABASE: {_one_line(error)}") from None
    return f"PostgreSQL {parts.get('dbname', '')} at {parts.get('host', 'this computer')}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
