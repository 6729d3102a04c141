"""The state folder with real files: nothing acknowledged is lost, nobody shares it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from coordinator.live.records import (
    Banned,
    Credit,
    DataRow,
    HistoryEnded,
    InviteSpent,
    MemberRow,
    Named,
    PlanRow,
    Record,
    StepRow,
    StoredState,
)
from coordinator.process import store as store_module
from coordinator.process.database import DATABASE, SqliteDatabase, StateBrokenError, StateLockedError
from coordinator.process.schema import MIGRATIONS
from coordinator.process.store import Event, Store, StoredInvite
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.messages import Share, ValidationLoss
from protocol.run.changes import RunChange
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import DataSection, ModelSection, RunConfig

CONFIG = RunConfig(name="stored")


def plan_row(generation: int, ledger_generation: int, *, restore_step: int = -1, lost: int | None = None) -> PlanRow:
    servers = (ServerPlan(NodeId("a"), "front", ("h:1",)), ServerPlan(NodeId("b"), "back", ("h:2",)))
    plan = Plan(generation, ledger_generation, restore_step, (StagePlan(servers),), line(10, 1))
    return PlanRow(plan=plan, sentence="why", goes_back=lost is not None, lost_steps=lost or 0)


def step_row(step: int, ledger_generation: int = 1) -> StepRow:
    return StepRow(
        ledger_generation=ledger_generation, step=step, loss=5.5 - step / 8, tokens=2048, gradient_norm=0.25,
        clip_factor=1.0, skipped=step == 1, learning_rate=1e-3, duration_s=0.5, wall_s=1e9 + step,
    )  # fmt: skip


def reopened(store: Store) -> Store:
    """By the next process, whose clock stands before all that was told."""
    store.close()
    return Store(store.folder, CONFIG, clock=lambda: 0.0)


def test_a_new_folder_is_an_empty_run(tmp_path: Path) -> None:
    """A run id of its own, generation 1, nothing stored; only the owner may read it."""
    store = Store(tmp_path / "deep" / "state", CONFIG)
    assert store.generation == 1 and len(store.run_id) == 16
    assert store.load() == StoredState()
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.folder / DATABASE).stat().st_mode) == 0o600
    store.close()


def test_everything_comes_back_after_a_restart(tmp_path: Path) -> None:
    """The same run id, the next generation, and every record."""
    store = Store(tmp_path, CONFIG)
    run_id = store.run_id
    row = plan_row(1, 1)
    data = DataRow(vocabulary=259, data_hash="d" * 64, token_count=7)
    spent = InviteSpent(nonce=b"n" * 16, node=NodeId("a"))
    ban = Banned(node=NodeId("x"), reason="garbage")
    steps = [step_row(0), step_row(1)]
    member = MemberRow(node=NodeId("a"), public_key=b"k" * 32, role="server", serial=41)
    store.write([member, spent, row, data, *steps, ban, Event(wall_s=1.0, level="info", event="e", fields={"a": b"1"})])
    store = reopened(store)
    assert (store.run_id, store.generation) == (run_id, 2)
    assert store.load() == StoredState(
        plan=row.plan,
        generations=(1,),
        plan_sentence="why",
        data=data,
        steps=tuple(steps),
        tokens=4096,
        spent=(spent,),
        banned=(ban,),
        next_serial=42,
        curve=((0, 5.5), (1, 5.375)),
    )
    store.close()


def test_every_start_opens_a_generation_above_all_plans(tmp_path: Path) -> None:
    """Also when a process issued several, when it issued none, and when the clock was set back."""
    store = Store(tmp_path, CONFIG)
    store.write([plan_row(1, 1), plan_row(2, 1), plan_row(9, 9)])
    store = reopened(store)
    assert store.generation == 10
    store = reopened(store)
    assert store.generation == 11
    store.close()


@pytest.mark.parametrize("lost", [False, True])
def test_an_older_database_opens_no_generation_that_a_newer_one_has_used(tmp_path: Path, lost: bool) -> None:
    """Nor one below: who has heard of the newer plans would refuse it. The same if the database is gone altogether."""
    store = Store(tmp_path / "state", CONFIG, clock=lambda: 1e9)
    store.write([plan_row(1, 1)])
    store.close()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    store = Store(tmp_path / "state", CONFIG, clock=lambda: 1e9 + 60.0)
    told = [store.generation, store.generation + 1, store.generation + 2]
    store.write([plan_row(generation, 1) for generation in told])
    store.close()
    if lost:
        for file in (tmp_path / "copy").glob(f"{DATABASE}*"):
            file.unlink()
    old = Store(tmp_path / "copy", CONFIG, clock=lambda: 1e9 + 61.0)
    assert old.run_id == store.run_id and old.generation > max(told)
    old.close()


def test_going_back_throws_steps_away_but_keeps_them_on_record(tmp_path: Path) -> None:
    """Steps after the checkpoint do not count any more, are reported again, and both rows stay in the file."""
    store = Store(tmp_path, CONFIG)
    store.write([plan_row(1, 1), *(step_row(step) for step in range(5))])
    store.write([plan_row(2, 2, restore_step=3, lost=2)])
    state = store.load()
    assert [row.step for row in state.steps] == [0, 1, 2]
    assert (state.tokens, state.rollback_count, state.lost_steps) == (3 * 2048, 1, 2)
    store.write([step_row(3, ledger_generation=2)])
    assert [(row.step, row.ledger_generation) for row in store.steps_from(2, 10)] == [(2, 1), (3, 2)]
    store.close()
    with sqlite3.connect(tmp_path / DATABASE) as db:
        assert db.execute("SELECT COUNT(*) FROM steps").fetchone() == (6,)
    db.close()


def test_the_steps_at_which_changes_began_come_back(tmp_path: Path) -> None:
    """The first step that counts for each number of changes; steps that were thrown away tell nothing."""
    store = Store(tmp_path, CONFIG)
    change = RunChange("optimizer.learning_rate", "0.5")
    first = plan_row(1, 1)
    changed = msgspec.structs.replace(first, plan=msgspec.structs.replace(first.plan, changes=(change,), paused=True))
    counts = [0, 1, 1, 2, 2]
    rows = [msgspec.structs.replace(step_row(step), changes=count) for step, count in enumerate(counts)]
    store.write([changed, *rows])
    state = reopened(store).load()
    assert state.changed_at == ((1, 1), (2, 3)) and [row.changes for row in state.steps] == counts
    assert state.plan is not None and state.plan.changes == (change,) and state.plan.paused
    store = Store(tmp_path / "other", CONFIG)
    store.write([changed, *rows, plan_row(2, 2, restore_step=3, lost=2)])
    assert reopened(store).load().changed_at == ((1, 1),)


def test_steps_of_a_checkpoint_that_became_readable_count_again(tmp_path: Path) -> None:
    """Back to the seed, one step, then ahead to a checkpoint of the first ledgers: the newest row of each counts."""
    store = Store(tmp_path, CONFIG)
    store.write([plan_row(1, 1), *(step_row(step) for step in range(5)), plan_row(2, 2, lost=5)])
    store.write([step_row(0, ledger_generation=2)])
    assert [(row.step, row.ledger_generation) for row in store.load().thrown] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    store.write([plan_row(3, 3, restore_step=3, lost=0)])
    state = store.load()
    assert [(row.step, row.ledger_generation) for row in state.steps] == [(0, 2), (1, 1), (2, 1)]
    assert [(row.step, row.ledger_generation) for row in state.thrown] == [(3, 1), (4, 1)]
    assert state.tokens == 3 * 2048
    store.close()


def test_a_history_that_ended_without_its_last_reports_stays_so_under_its_ledgers(tmp_path: Path) -> None:
    """A start finds it; a run that went back once more has reports to wait for again."""
    store = Store(tmp_path, CONFIG)
    store.write([plan_row(1, 1), step_row(0), plan_row(2, 2, restore_step=5, lost=0)])
    assert not store.load().ended
    store.write([HistoryEnded(ledger_generation=2, first_missing=1)])
    store = reopened(store)
    assert store.load().ended
    store.write([plan_row(3, 3, restore_step=2, lost=0)])
    assert not store.load().ended
    store.close()


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A record that cannot be written takes the others of its batch with it, and says in which file."""
    store = Store(tmp_path, CONFIG)
    store.write([step_row(0)])
    with pytest.raises(StateBrokenError, match=DATABASE):
        store.write([step_row(1), step_row(0)])
    assert [row.step for row in store.load().steps] == [0]
    store.close()


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    """While the first lives; then the folder is free again."""
    store = Store(tmp_path, CONFIG)
    with pytest.raises(StateLockedError, match="another coordinator is running"):
        Store(tmp_path, CONFIG)
    store.close()
    Store(tmp_path, CONFIG).close()


def test_another_configuration_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    """And the lock is free again afterwards."""
    store = Store(tmp_path, CONFIG)
    store.write([MemberRow(serial=1, node=NodeId("a"), public_key=b"k", role="server")])
    store.close()
    other = RunConfig(name="stored", steps=7, model=ModelSection(layers=8))
    with pytest.raises(BadInputError, match=r"steps was 600, is 7; model.layers was 4, is 8"):
        Store(tmp_path, other)
    Store(tmp_path, CONFIG).close()


@pytest.mark.parametrize("row", [plan_row(2, 2), DataRow(vocabulary=9, data_hash="h", token_count=99), step_row(0)])
def test_a_configuration_that_has_been_worked_by_stays(row: Record, tmp_path: Path) -> None:
    """Even when the memberships of those who did have been forgotten."""
    store = Store(tmp_path, CONFIG)
    store.write([row])
    store.close()
    with pytest.raises(BadInputError, match="steps was 600, is 7"):
        Store(tmp_path, RunConfig(name="stored", steps=7))


def test_a_configuration_that_nobody_was_told_may_change(tmp_path: Path) -> None:
    """A look at the links, then a change of mind: the same run, with the new numbers, and from now on these. A
    volunteer that waits has been told nothing yet."""
    store = Store(tmp_path, CONFIG)
    store.write([MemberRow(serial=1, node=NodeId("v"), public_key=b"k", role="volunteer")])
    run_id = store.run_id
    assert store.adopted == ()
    store.close()
    other = RunConfig(name="stored", steps=7, model=ModelSection(layers=8))
    store = Store(tmp_path, other)
    assert store.adopted == ("steps was 600, is 7", "model.layers was 4, is 8") and store.run_id == run_id
    store.write([MemberRow(serial=2, node=NodeId("s"), public_key=b"k", role="server")])
    store.close()
    store = Store(tmp_path, other)
    assert store.adopted == ()
    store.close()
    with pytest.raises(BadInputError, match="steps was 7, is 600"):
        Store(tmp_path, CONFIG)


def test_where_the_data_lie_may_be_corrected_until_somebody_has_read_them(tmp_path: Path) -> None:
    """A path that is wrong at the servers alone is found when they are members and have a plan. Nothing else may change
    with it."""
    store = Store(tmp_path, CONFIG)
    store.write([MemberRow(serial=1, node=NodeId("s"), public_key=b"k", role="server"), plan_row(2, 2)])
    store.close()
    corrected = msgspec.structs.replace(CONFIG, data=DataSection(source="/data/book.txt"))
    with pytest.raises(BadInputError, match=r"steps was 600, is 7; data\.source was"):
        Store(tmp_path, msgspec.structs.replace(corrected, steps=7))
    store = Store(tmp_path, corrected)
    assert store.adopted == ('data.source was "builtin:python", is "/data/book.txt"',)
    store.write([DataRow(vocabulary=9, data_hash="h", token_count=99)])
    store.close()
    with pytest.raises(BadInputError, match=r"data.source was \"/data/book.txt\""):
        Store(tmp_path, CONFIG)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """An older program never touches a newer file."""
    Store(tmp_path, CONFIG).close()
    with sqlite3.connect(tmp_path / DATABASE) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StateBrokenError, match="newer version"):
        Store(tmp_path, CONFIG)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    """Garbage where the database should be, and a folder where none can be."""
    (tmp_path / DATABASE).write_bytes(b"garbage" * 1000)
    with pytest.raises(StateBrokenError, match=DATABASE):
        Store(tmp_path, CONFIG)
    (tmp_path / "file").write_text("")
    with pytest.raises(StateBrokenError, match="cannot be used as state folder"):
        Store(tmp_path / "file", CONFIG)


def test_invites_are_kept_with_their_uses(tmp_path: Path) -> None:
    """Links stay the same across restarts, and how often each was used is known."""
    store = Store(tmp_path, CONFIG)
    invite = StoredInvite(nonce=b"n" * 16, role="server", uses=4, not_after=2**31, signed=b"s", spent=0)
    store.add_invite(invite)
    store.write([InviteSpent(nonce=b"n" * 16, node=NodeId("a"))])
    store = reopened(store)
    (found,) = store.invites()
    assert (found.nonce, found.role, found.uses, found.signed, found.spent) == (b"n" * 16, "server", 4, b"s", 1)
    store.close()


WRITER = """
import sys
from pathlib import Path
from coordinator.process.store import Store
from tests.coordinator.process.test_store import CONFIG, step_row
store = Store(Path(sys.argv[1]), CONFIG)
step = 0
while True:
    store.write([step_row(step)])
    print(step, flush=True)
    step += 1
"""


def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """A process that writes without pause is killed: every step that it had said was stored is there, in order."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    said = -1
    while said < 30:
        said = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    said = max([said, *(int(line) for line in process.stdout.read().splitlines())])
    process.wait()
    process.stdout.close()
    store = Store(tmp_path, CONFIG)
    steps = [row.step for row in store.load().steps]
    assert steps == list(range(len(steps))) and len(steps) > said
    store.close()


def test_a_step_whose_loss_is_no_number_is_kept(tmp_path: Path) -> None:
    """SQLite takes NaN for nothing, which ended the coordinator, and again with each start: it is infinity there."""
    store = Store(tmp_path, CONFIG)
    row = msgspec.structs.replace(step_row(0), loss=math.nan, gradient_norm=math.nan, skipped=True)
    store.write([row])
    (kept,) = store.load().steps
    assert (kept.loss, kept.gradient_norm, kept.skipped) == (math.inf, math.inf, True)
    store.close()


def test_credit_grows_with_its_step_and_stays(tmp_path: Path) -> None:
    """In one transaction with the step; going back behind the step takes nothing from those who computed it."""
    store = Store(tmp_path, CONFIG)
    a, b = NodeId("a"), NodeId("b")
    for step, shares in enumerate(((Share(a, 2), Share(b, 1)), (Share(a, 3, 4),))):
        store.write([msgspec.structs.replace(step_row(step), shares=shares, worked_s=1.5, task_tokens=256)])
    store.write([plan_row(1, 1), plan_row(2, 2, restore_step=0, lost=2)])
    store = reopened(store)
    assert {credit.node: credit for credit in store.load().credits} == {
        a: Credit(node=a, tasks=5, tokens=1280, working_s=3.0, since_s=1e9, until_s=1e9 + 1, audited=4, first_step=0),
        b: Credit(node=b, tasks=1, tokens=256, working_s=1.5, since_s=1e9, until_s=1e9, first_step=0),
    }
    store.close()


def test_the_operators_words_may_change_while_the_run_runs(tmp_path: Path) -> None:
    """Nothing is computed by them, so a run that servers have joined takes them, and still no other change."""
    store = Store(tmp_path, CONFIG)
    store.write([MemberRow(node=NodeId("a"), public_key=b"k" * 32, role="server", serial=1)])
    store.close()
    told = msgspec.structs.replace(CONFIG, description="for a school")
    assert told.config_hash() == CONFIG.config_hash() and told.terms_hashes() != CONFIG.terms_hashes()
    Store(tmp_path, told).close()
    with pytest.raises(BadInputError, match="seed"):
        Store(tmp_path, msgspec.structs.replace(told, seed=2))
    Store(tmp_path, told).close()


def test_validations_are_kept_and_thrown_away_with_their_steps(tmp_path: Path) -> None:
    """Also one that is not a number; what is computed again after going back to a checkpoint counts alone."""
    store = Store(tmp_path, CONFIG)

    def told(version: int, generation: int, loss: float) -> StepRow:
        found = ValidationLoss(version=version, loss=loss, tokens=64)
        return msgspec.structs.replace(step_row(version + 1, generation), validations=(found,))

    store.write([plan_row(1, 1), told(0, 1, 5.5), told(2, 1, 5.25), told(4, 1, math.nan)])
    store = reopened(store)
    assert [(one.version, one.loss) for one in store.load().validations] == [(0, 5.5), (2, 5.25), (4, math.inf)]
    store.write([plan_row(2, 2, restore_step=2, lost=3), told(2, 2, 5.0)])
    store = reopened(store)
    assert [(one.version, one.loss) for one in store.load().validations] == [(0, 5.5), (2, 5.0)]
    assert [row.validations[0].loss for row in store.load().thrown] == [math.inf]
    assert [row.validations[0].version for row in store.steps_from(0, 10)] == [0, 2]
    store.close()


def write_for_weeks(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The events and serials that are left, when a few are kept and looked at now and then, without a new start."""
    for name, count in (("EVENTS_MAX", 20), ("MEMBERS_MAX", 30), ("TRIM_AFTER", 10)):
        monkeypatch.setattr(store_module, name, count)
    for serial in range(100):
        member = MemberRow(node=NodeId("a"), public_key=b"k", role="volunteer", serial=serial)
        store.write([Event(wall_s=float(serial), level="info", event="e", fields={}), member])
    events = store._db.execute("SELECT wall_s FROM events ORDER BY number").fetchall()
    members = store._db.execute("SELECT serial FROM members ORDER BY serial").fetchall()
    return [int(event) for (event,) in events], [int(serial) for (serial,) in members]


def test_old_events_and_memberships_go_while_the_coordinator_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not started anew for a year does not fill its disk; the newest stay, and no serial is used again."""
    store = Store(tmp_path, CONFIG)
    events, serials = write_for_weeks(store, monkeypatch)
    assert events[-20:] == list(range(80, 100)) and len(events) <= 20 + 10
    assert serials[-30:] == list(range(70, 100)) and len(serials) <= 30 + 10
    store = reopened(store)
    assert store.load().next_serial == 100
    store.close()


def test_what_the_operator_calls_nodes_is_kept(tmp_path: Path) -> None:
    """The newest name of each counts; an empty one is none."""
    store = Store(tmp_path, CONFIG)
    a, b = NodeId("a"), NodeId("b")
    store.write([Named(node=a, name="anna"), Named(node=b, name="rack 7"), Named(node=a, name="Anna's")])
    store = reopened(store)
    assert store.load().names == (Named(node=b, name="rack 7"), Named(node=a, name="Anna's"))
    store.write([Named(node=b, name="")])
    store = reopened(store)
    assert store.load().names == (Named(node=a, name="Anna's"),)
    store.close()


def test_what_sqlite_has_rolled_back_by_itself_is_said_in_its_own_words(tmp_path: Path) -> None:
    """A full disk, that is; the operator read that there was nothing to roll back."""
    database = SqliteDatabase(tmp_path)

    def fails() -> None:
        with database.transaction():
            database.execute("ROLLBACK")  # as SQLite does by itself
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fails()
    database.close()
