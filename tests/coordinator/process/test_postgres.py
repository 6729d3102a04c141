"""The coordinator's record in a real PostgreSQL: the same as in a file, and one pen for two coordinators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psycopg
import pytest

from coordinator.live.records import (
    Banned,
    DataRow,
    GoBackWish,
    InviteClosed,
    InviteSpent,
    MemberRow,
    Record,
    Unbanned,
    Voiding,
)
from coordinator.process.database import PostgresDatabase, StateBrokenError, StateLockedError
from coordinator.process.store import Event, Store, StoredInvite
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.messages import Share
from tests.coordinator.process.test_store import CONFIG, plan_row, step_row, write_for_weeks
from tests.integration.postgres import Cluster, postgres, why_not

KEY = b"k" * 32
VOIDING = Voiding(nodes=(NodeId("a"), NodeId("b")), reason="lies", first_step=2, wall_s=1.5)
WALL_S = 1e9
"""What the clock says at every start."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        print(f"\n\n!!! THE RECORD IN POSTGRESQL WAS NOT TESTED: {reason}\n", file=sys.__stderr__)
        pytest.skip(reason)
    with postgres() as cluster:
        yield cluster


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    """A database of which nothing is left for the next test."""
    yield cluster.url
    with psycopg.connect(cluster.url, autocommit=True) as db:
        db.execute(f'DROP SCHEMA IF EXISTS "barnraise {CONFIG.name}" CASCADE')


def opened(folder: Path, url: str, key: bytes = KEY) -> Store:
    return Store(folder, CONFIG, PostgresDatabase(url, CONFIG.name), key, clock=lambda: WALL_S)


def test_it_holds_what_a_file_holds(tmp_path: Path, url: str) -> None:
    """Every kind of record, one list after the other, and each start: both say the same about all of it."""
    stores = [Store(tmp_path / "file", CONFIG), opened(tmp_path, url)]
    a, b = NodeId("a"), NodeId("b")
    shares = (Share(node=a, tasks=3), Share(node=b, tasks=2**31))
    writes: list[list[Record | Event]] = [
        [MemberRow(node=a, public_key=KEY, role="server", serial=41), InviteSpent(nonce=b"n" * 16, node=a)],
        [plan_row(1, 1), DataRow(vocabulary=259, data_hash="d" * 64, token_count=2**40)],
        [msgspec.structs.replace(step_row(step), shares=shares, task_tokens=256, worked_s=0.5) for step in range(6)],
        [Event(wall_s=1.0, level="info", event="e", fields={"a": b"1"}), InviteClosed(nonce=b"m" * 16)],
        [Banned(node=a, reason="garbage", number=3, wall_s=2.5), Banned(node=b, reason="noise", number=4)],
        [Unbanned(node=b, number=5), Banned(node=a, reason="again", number=6)],
        [plan_row(2, 2, restore_step=3, lost=2), step_row(4, 2)],
        [Banned(node=b, reason="came with a", number=7, is_kin=True)],
        [GoBackWish(step=3, cause="why", voiding=VOIDING), plan_row(3, 3, restore_step=4, lost=1)],
        [GoBackWish(step=2, cause="again")],
        [msgspec.structs.replace(plan_row(4, 4, restore_step=2, lost=1), by_wish=True, voided=VOIDING)],
    ]
    for nonce, uses in ((b"m" * 16, 1), (b"n" * 16, 5)):
        for store in stores:
            store.add_invite(StoredInvite(nonce, "volunteer", uses, 2**33, b"signed", spent=0))
    for records in writes:
        for store in stores:
            store.write(records)
        file, shared = stores
        assert shared.load() == file.load()
        assert shared.curve(3) == file.curve(3)
        assert shared.steps_from(0, 100) == file.steps_from(0, 100)
        assert shared.invites() == file.invites()
        assert shared.voided() == file.voided()
    assert len(stores[1].voided()) == 1 and stores[1].load().wish is None
    for store in stores:
        store.close()
    again = [Store(tmp_path / "file", CONFIG, clock=lambda: WALL_S), opened(tmp_path, url)]
    assert again[1].load() == again[0].load() and again[1].generation == again[0].generation
    assert again[1].run_id == stores[1].run_id
    for store in again:
        store.close()


def test_it_forgets_what_a_file_forgets(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old events and memberships, while the coordinator runs."""
    stores = [Store(tmp_path / "file", CONFIG), opened(tmp_path, url)]
    of_file, shared = (write_for_weeks(store, monkeypatch) for store in stores)
    assert shared == of_file
    for store in stores:
        store.close()


def test_what_was_not_written_whole_was_not_written(tmp_path: Path, url: str) -> None:
    """A record that the tables refuse takes those before it along, and the store goes on."""
    store = opened(tmp_path, url)
    store.write([step_row(0)])
    with pytest.raises(StateBrokenError, match="steps_pkey"):
        store.write([step_row(1), step_row(0)])
    assert [row.step for row in store.load().steps] == [0]
    store.write([step_row(1)])
    assert [row.step for row in store.load().steps] == [0, 1]
    store.close()


def test_a_second_coordinator_gets_the_pen_only_when_the_first_has_lost_it(
    tmp_path: Path, url: str, cluster: Cluster
) -> None:
    """By the lock; and a first one whose session ended, say because its computer slept, can write nothing more."""
    first = opened(tmp_path, url)
    with pytest.raises(StateLockedError, match="another coordinator has the run stored"):
        opened(tmp_path, url)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory'")
    second = opened(tmp_path, url)
    assert second.generation == int(1000 * WALL_S) > first.generation
    with pytest.raises(StateBrokenError, match=r"PostgreSQL postgres at 127\.0\.0\.1"):
        first.write([step_row(0)])
    second.write([step_row(0)])
    first.close()
    second.close()


def test_another_key_is_refused(tmp_path: Path, url: str) -> None:
    """Members know the run by its key: the sentence says which file is missing. Other runs are not concerned."""
    opened(tmp_path, url).close()
    with pytest.raises(BadInputError, match="copy the file `identity`"):
        opened(tmp_path, url, b"x" * 32)
    opened(tmp_path, url).close()


def test_what_is_no_database_is_said(tmp_path: Path, url: str) -> None:
    """Nobody there, or no address: one sentence, without the password."""
    with pytest.raises(StateBrokenError, match=r"PostgreSQL postgres at 127\.0\.0\.1") as refused:
        PostgresDatabase("postgresql://barnraise:secret@127.0.0.1:1/postgres", "stored")
    assert "secret" not in str(refused.value)
    with pytest.raises(BadInputError, match="expected postgresql://"):
        PostgresDatabase("carrier pigeon", "stored")
