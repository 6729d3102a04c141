"""The coordinator's record: what it has promised, in tables that survive power cuts (`database` says where).

A record is acknowledged after its commit has reached the disk (state-and-trust 4.5). All methods block; the daemon
calls them in a thread, one at a time.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from coordinator.live.generations import first_generation
from coordinator.live.history import first_step_after
from coordinator.live.records import (
    TAIL_STEPS,
    Banned,
    Credit,
    DataRow,
    GoBackRefused,
    GoBackWish,
    HistoryEnded,
    InviteClosed,
    InviteSpent,
    MemberRow,
    Named,
    PlanRow,
    Record,
    StepRow,
    StoredState,
    Unbanned,
)
from coordinator.process.curve import LOSS_MAX, Curve, Piece
from coordinator.process.database import Database, SqliteDatabase, StateBrokenError
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import CURVE_MAX
from protocol.drive.durable import replace_durably
from protocol.messages import Share, ValidationLoss
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.trust.membership import RUN_ID_BYTES, JoinRole
from protocol.trust.voided import VoidRow

RUN_FILE = "run"
"""Beside the database: the run's id in hex, by which its members know it."""
EVENTS_MAX = 100_000
"""Events kept in the database: weeks of a large run, some 20 MB."""
MEMBERS_MAX = 100_000
"""Memberships remembered, 10 MB: of 200 members that renew twice an hour, those of ten days (each lives an hour)."""
TRIM_AFTER = 10_000
"""Events and memberships after which those above the two numbers go, so that the tables hold a tenth more at most.
16,384 members write so many in 18 minutes (80 MB a day if none went), 200 in a day. Takes a hundredth of a second."""
_NO_COLUMNS = ("shares", "worked_s", "task_tokens", "validations")
_STEP_FIELDS = tuple(name for name in StepRow.__struct_fields__ if name not in _NO_COLUMNS)
_CREDIT_FIELDS = Credit.__struct_fields__
_ADD_CREDIT = (
    "INSERT INTO credits (node, tasks, tokens, working_s, since_s, until_s, audited, first_step)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (node) DO UPDATE SET tasks = credits.tasks + excluded.tasks,"
    " tokens = credits.tokens + excluded.tokens, working_s = credits.working_s + excluded.working_s,"
    " until_s = excluded.until_s, audited = credits.audited + excluded.audited, first_step ="
    " CASE WHEN credits.first_step < excluded.first_step THEN credits.first_step ELSE excluded.first_step END"
)


class Event(msgspec.Struct, frozen=True):
    """A line of the log that is kept for people; written with the next records, acknowledged to nobody."""

    wall_s: float
    level: str
    event: str
    fields: dict[str, Any]


class StoredInvite(msgspec.Struct, frozen=True):
    """An invite that this coordinator gave out."""

    nonce: bytes
    role: JoinRole
    uses: int
    not_after: int
    signed: bytes
    spent: int
    """Different nodes that have used it."""
    closed: bool = False
    """By the operator: nobody joins by it any more."""


class Store:
    """An open record, locked against a second coordinator until `close` or the end of the process."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        database: Database | None = None,
        issuer: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens a new generation, durably.

        Args:
            folder: of this coordinator's key and links, and of the SQLite file if there is no other database.
            database: open, with the run's lock; closed with the store.
            issuer: the coordinator's public key, which a database that others may open holds them to.
            clock: seconds since 1970.

        Raises:
            StateLockedError: another process has it.
            StateBrokenError: it cannot be used, or was written by a newer version.
            BadInputError: it belongs to a run with another configuration, which servers have joined, or of another key.
        """
        self.folder = folder
        self.adopted: tuple[str, ...] = ()
        """What this start has changed in the configuration of a run that nobody knew yet."""
        self._curve: Curve | None = None
        """None until somebody asks, and when old steps have changed."""
        self._untrimmed = 0
        """Events and memberships written since old ones were forgotten."""
        self._db: Database = SqliteDatabase(folder) if database is None else database
        try:
            if self._db.is_shared:
                self._check_issuer(issuer)
            self.run_id, self.generation = self._open_run(config, clock())
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Closes the database and gives the lock back."""
        self._db.close()

    def _check_issuer(self, issuer: bytes) -> None:
        """All members know the run by one key: whoever stands by must have it, too."""
        with self._db.transaction():
            row = self._db.execute("SELECT public_key FROM issuer").fetchone()
            if row is None:
                self._db.execute("INSERT INTO issuer VALUES (1, ?)", (issuer,))
            elif bytes(row[0]) != issuer:
                raise BadInputError(
                    f"{self.folder}: the run in {self._db.name} belongs to a coordinator with another key: copy the"
                    " file `identity` from that one's state folder, and keep it as secret"
                )

    def _open_run(self, config: RunConfig, wall_s: float) -> tuple[bytes, int]:
        with self._db.transaction():
            row = self._db.execute("SELECT run_id, config, generation FROM run").fetchone()
            kept = self._kept_run_id()
            again = row is not None or kept is not None
            if row is None:
                run_id, generation = kept or secrets.token_bytes(RUN_ID_BYTES), 0
                text = msgspec.json.encode(config).decode()
                self._db.execute("INSERT INTO run VALUES (1, ?, ?, 0)", (run_id, text))
            else:
                run_id, generation = row[0], row[2]
                self._compare(row[1], config)
                if self.adopted:
                    self._db.execute("UPDATE run SET config = ?", (msgspec.json.encode(config).decode(),))
            (planned,) = self._db.execute("SELECT COALESCE(MAX(generation), 0) FROM plans").fetchone()
            generation = first_generation(max(generation, planned), again, wall_s)
            self._db.execute("UPDATE run SET generation = ?", (generation,))
            self._trim()
        self._keep_run_id(run_id)
        return run_id, generation

    def _trim(self) -> None:
        """Forgets old events and memberships; within a transaction."""
        self._db.execute("DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (EVENTS_MAX,))
        self._db.execute("DELETE FROM members WHERE serial <= (SELECT MAX(serial) FROM members) - ?", (MEMBERS_MAX,))
        self._untrimmed = 0

    def _kept_run_id(self) -> bytes | None:
        """Of the run whose database is gone: its members know no other, and its servers still have its plan."""
        try:
            run_id = bytes.fromhex((self.folder / RUN_FILE).read_text().strip())
        except (OSError, ValueError):
            return None
        return run_id if len(run_id) == RUN_ID_BYTES else None

    def _keep_run_id(self, run_id: bytes) -> None:
        """Beside the database, for the day when that is lost; a folder that takes no file loses only that."""
        with suppress(OSError):
            if self._kept_run_id() != run_id:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_durably(self.folder / RUN_FILE, f"{run_id.hex()}\n".encode())

    def _compare(self, text: str, config: RunConfig) -> None:
        """A run keeps its configuration: nodes that compute by different ones would not train the same model.

        Before the first server is a member nobody has been told it (a volunteer's welcome waits for the vocabulary,
        which a server finds; and memberships are durable before any welcome): until then it may still change. What it
        says of the data may be corrected until somebody has read them: a path may be wrong at a server alone.
        """
        try:
            before = msgspec.json.decode(text, type=RunConfig)
        except msgspec.DecodeError as error:
            raise StateBrokenError(
                f"{self._db.name}: the run in it was started by another version of barnraise: {error}"
            ) from error
        if before.description != config.description:  # words to people: nothing is computed by them
            self._db.execute("UPDATE run SET config = ?", (msgspec.json.encode(config).decode(),))
            before = msgspec.structs.replace(before, description=config.description)
        differences = tuple(_differences(before, config))
        about_data = all(each.startswith(("data.", "validation.source ")) for each in differences)
        if differences and (not self._begun() or (about_data and self._unread())):
            self.adopted = differences
        elif differences:
            raise BadInputError(
                f"{self.folder}: this state folder belongs to a run with another configuration:"
                f" {'; '.join(differences)}. Name another folder with --state to start another run"
            )

    def _begun(self) -> bool:
        """Whether a server has ever been a member; old memberships go in time, what they led to stays."""
        (begun,) = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM members WHERE role = 'server') OR EXISTS (SELECT 1 FROM plans)"
            " OR EXISTS (SELECT 1 FROM data) OR EXISTS (SELECT 1 FROM steps)"
        ).fetchone()
        return bool(begun)

    def _unread(self) -> bool:
        """Whether no server has found the run's data, so nothing was computed."""
        (known,) = self._db.execute("SELECT EXISTS (SELECT 1 FROM data) OR EXISTS (SELECT 1 FROM steps)").fetchone()
        return not known

    # ---- reading -----------------------------------------------------------------------------------------------

    def load(self) -> StoredState:
        """Everything that the machine needs to go on."""
        plan = self._db.execute("SELECT plan, sentence FROM plans ORDER BY generation DESC LIMIT 1").fetchone()
        rollbacks, lost = self._db.execute(
            "SELECT COALESCE(SUM(goes_back), 0), COALESCE(SUM(lost_steps), 0) FROM plans"
        ).fetchone()
        changed_at = self._db.execute(
            "SELECT changes, MIN(step) FROM steps WHERE changes > 0 AND thrown_away = 0 GROUP BY changes"
            " ORDER BY changes"
        ).fetchall()
        data = self._db.execute("SELECT vocabulary, data_hash, token_count FROM data").fetchone()
        (tokens,) = self._db.execute("SELECT COALESCE(SUM(tokens), 0) FROM steps WHERE thrown_away = 0").fetchone()
        spent = self._db.execute("SELECT nonce, node, step FROM invites_spent ORDER BY rowid").fetchall()
        banned = self._db.execute("SELECT node, reason, number, wall_s, is_kin FROM bans WHERE lifted = 0").fetchall()
        (ban_number,) = self._db.execute(
            "SELECT COALESCE(MAX(CASE WHEN number > lifted THEN number ELSE lifted END), 0) FROM bans"
        ).fetchone()
        closed = self._db.execute("SELECT nonce FROM invites WHERE closed = 1 ORDER BY rowid").fetchall()
        names = self._db.execute("SELECT node, name FROM names ORDER BY rowid").fetchall()
        wish = self._db.execute("SELECT wish FROM go_back_wish").fetchone()
        (serial,) = self._db.execute("SELECT COALESCE(MAX(serial), 0) FROM members").fetchone()
        (ended,) = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM history_ended WHERE ledger_generation ="
            " (SELECT ledger_generation FROM plans ORDER BY generation DESC LIMIT 1))"
        ).fetchone()
        credits = self._db.execute(f"SELECT {', '.join(_CREDIT_FIELDS)} FROM credits").fetchall()  # noqa: S608
        steps = self._select_steps("WHERE thrown_away = 0 ORDER BY step DESC LIMIT ?", (TAIL_STEPS,))
        thrown = self._select_steps(
            "WHERE thrown_away = 1 AND ledger_generation = (SELECT MAX(ledger_generation) FROM steps AS other"
            " WHERE other.step = steps.step) ORDER BY step DESC LIMIT ?",
            (TAIL_STEPS,),
        )
        generations = self._db.execute("SELECT generation FROM plans ORDER BY generation").fetchall()
        return StoredState(
            generations=tuple(int(generation) for (generation,) in generations),
            plan=None if plan is None else msgspec.json.decode(plan[0], type=Plan),
            plan_sentence="" if plan is None else plan[1],
            rollback_count=int(rollbacks),  # sums are decimals in PostgreSQL
            lost_steps=int(lost),
            data=None if data is None else DataRow(vocabulary=data[0], data_hash=data[1], token_count=data[2]),
            steps=tuple(reversed(steps)),
            thrown=tuple(reversed(thrown)),
            changed_at=tuple((int(count), int(step)) for count, step in changed_at),
            tokens=int(tokens),
            ended=bool(ended),
            spent=tuple(InviteSpent(nonce=nonce, node=NodeId(node), step=step) for nonce, node, step in spent),
            banned=tuple(
                Banned(node=NodeId(node), reason=reason, number=number, wall_s=wall_s, is_kin=bool(kin))
                for node, reason, number, wall_s, kin in banned
            ),
            ban_number=ban_number,
            closed_invites=tuple(nonce for (nonce,) in closed),
            names=tuple(Named(node=NodeId(node), name=name) for node, name in names),
            wish=None if wish is None else msgspec.json.decode(wish[0], type=GoBackWish),
            next_serial=serial + 1,
            credits=tuple(Credit(**dict(zip(_CREDIT_FIELDS, row, strict=True))) for row in credits),
            validations=tuple(self.validations(TAIL_STEPS)),
            curve=self._loss_so_far(),
        )

    def _loss_so_far(self) -> tuple[tuple[int, float], ...]:
        """(first step, mean loss) of even pieces, but the first step's own loss at its place: a mean of more and more
        steps would tell those who lend a computer another beginning each time."""
        means = [(first, mean) for first, mean, *_ in Curve(CURVE_MAX).read(self._db) if mean is not None]
        first = self._db.execute(
            "SELECT step, loss FROM steps WHERE thrown_away = 0 AND ABS(loss) < ? ORDER BY step LIMIT 1", (LOSS_MAX,)
        ).fetchone()
        return tuple(means) if first is None else ((int(first[0]), float(first[1])), *means[1:])

    def steps_from(self, first: int, count_max: int) -> list[StepRow]:
        """Closed steps that count, from `first` on, oldest first."""
        return self._select_steps("WHERE thrown_away = 0 AND step >= ? ORDER BY step LIMIT ?", (first, count_max))

    def segments(self) -> tuple[tuple[int, int], ...]:
        """(first step, ledger generation) of the steps that count, rising."""
        rows = self._db.execute(
            "SELECT MIN(step), ledger_generation FROM steps WHERE thrown_away = 0 GROUP BY ledger_generation ORDER BY 1"
        ).fetchall()
        return tuple((int(first), int(generation)) for first, generation in rows)

    def curve(self, points: int) -> list[Piece]:
        """At most `points` even pieces of the history: first step, mean, smallest and largest loss, tokens a second.

        Losses that are not finite are left out; a piece without any has None. The first time, and after going back to
        a checkpoint, all steps are read: of 100,000 that takes 0.25 s of one core of a 2-core virtual machine. From
        then on only the new ones are: five more steps take 0.7 ms.
        """
        if self._curve is None or self._curve.points != points:
            self._curve = Curve(points)
        return self._curve.read(self._db)

    def _select_steps(self, rest: str, values: tuple[int, ...]) -> list[StepRow]:
        columns = ", ".join(_STEP_FIELDS)
        rows = self._db.execute(f"SELECT {columns} FROM steps {rest}", values)  # noqa: S608
        found = [
            msgspec.convert(dict(zip(_STEP_FIELDS, row, strict=True)), StepRow, strict=False) for row in rows.fetchall()
        ]
        told: dict[tuple[int, int], list[ValidationLoss]] = {}
        if found:
            between = min(row.step for row in found), max(row.step for row in found)
            for step, generation, *values in self._db.execute(
                "SELECT step, ledger_generation, version, loss, tokens FROM validations WHERE step BETWEEN ? AND ?"
                " ORDER BY version",
                between,
            ).fetchall():
                told.setdefault((step, generation), []).append(_validation(*values))
        return [
            msgspec.structs.replace(row, validations=tuple(told.get((row.step, row.ledger_generation), ())))
            for row in found
        ]

    def validation_points(self, count_max: int) -> list[tuple[int, float | None]]:
        """(version, loss) of the newest ones that count; None where the loss is not finite."""
        return [(one.version, one.loss if math.isfinite(one.loss) else None) for one in self.validations(count_max)]

    def validations(self, count_max: int) -> list[ValidationLoss]:
        """The newest ones that count, oldest first."""
        rows = self._db.execute(
            "SELECT version, validations.loss, validations.tokens FROM validations JOIN steps"
            " ON steps.step = validations.step AND steps.ledger_generation = validations.ledger_generation"
            " WHERE steps.thrown_away = 0 ORDER BY version DESC LIMIT ?",
            (count_max,),
        ).fetchall()
        return [_validation(*row) for row in reversed(rows)]

    def voided(self) -> list[VoidRow]:
        """Whose work was undone, the first first."""
        rows = self._db.execute(
            "SELECT nodes, reason, first_step, restore_step, lost_steps, wall_s FROM voided ORDER BY generation"
        ).fetchall()
        return [
            VoidRow(
                nodes=tuple(NodeId(node) for node in json.loads(nodes)), reason=reason, first_step=int(first),
                restore_step=int(restore), lost_steps=int(lost), at_unix_s=int(wall_s),
            )
            for nodes, reason, first, restore, lost, wall_s in rows
        ]  # fmt: skip

    def invites(self) -> list[StoredInvite]:
        """Invites given out, oldest first."""
        rows = self._db.execute(
            "SELECT nonce, role, uses, not_after, signed,"
            " (SELECT COUNT(*) FROM invites_spent WHERE invites_spent.nonce = invites.nonce), closed != 0"
            " FROM invites ORDER BY rowid"
        ).fetchall()
        return [StoredInvite(*row) for row in rows]

    # ---- writing -----------------------------------------------------------------------------------------------

    def add_invite(self, invite: StoredInvite) -> None:
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO invites (nonce, role, uses, not_after, signed, closed) VALUES (?, ?, ?, ?, ?, ?)",
                (invite.nonce, invite.role, invite.uses, invite.not_after, invite.signed, int(invite.closed)),
            )

    def write(self, items: Sequence[Record | Event]) -> None:
        """All of them in this order, in one transaction. Raises `StateBrokenError`; then none is written."""
        with self._db.transaction():
            for item in items:
                self._write_one(item)
            self._untrimmed += sum(isinstance(item, Event | MemberRow) for item in items)
            if self._untrimmed >= TRIM_AFTER:
                self._trim()

    def _write_one(self, item: Record | Event) -> None:
        match item:
            case StepRow():
                marks = ", ".join("?" * len(_STEP_FIELDS))
                values = [_number(getattr(item, name)) for name in _STEP_FIELDS]
                self._db.execute(f"INSERT INTO steps ({', '.join(_STEP_FIELDS)}) VALUES ({marks})", values)  # noqa: S608
                self._db.execute_many(
                    "INSERT INTO validations (version, step, ledger_generation, loss, tokens) VALUES (?, ?, ?, ?, ?)",
                    [
                        (v.version, item.step, item.ledger_generation, _number(v.loss), v.tokens)
                        for v in item.validations
                    ],
                )
                self._db.execute_many(_ADD_CREDIT, [_given(share, item) for share in item.shares])
            case PlanRow():
                self._write_plan(item)
            case HistoryEnded():
                self._db.execute(
                    "INSERT INTO history_ended VALUES (?, ?)", (item.ledger_generation, item.first_missing)
                )
            case MemberRow():
                self._db.execute(
                    "INSERT INTO members VALUES (?, ?, ?, ?)", (item.serial, item.node, item.public_key, item.role)
                )
            case InviteSpent():
                self._db.execute(
                    "INSERT INTO invites_spent (nonce, node, step) VALUES (?, ?, ?)", (item.nonce, item.node, item.step)
                )
            case Banned():
                self._db.execute(
                    "INSERT INTO bans (node, reason, number, wall_s, lifted, is_kin) VALUES (?, ?, ?, ?, 0, ?)"
                    " ON CONFLICT (node) DO UPDATE SET reason = excluded.reason, number = excluded.number,"
                    " wall_s = excluded.wall_s, lifted = 0, is_kin = excluded.is_kin",
                    (item.node, item.reason, item.number, item.wall_s, int(item.is_kin)),
                )
            case GoBackWish():
                self._db.execute("DELETE FROM go_back_wish")
                self._db.execute(
                    "INSERT INTO go_back_wish (id, wish) VALUES (1, ?)", (msgspec.json.encode(item).decode(),)
                )
            case GoBackRefused():
                self._db.execute("DELETE FROM go_back_wish")
            case Unbanned():
                self._db.execute("UPDATE bans SET lifted = ? WHERE node = ?", (item.number, item.node))
            case Named():
                self._db.execute("DELETE FROM names WHERE node = ?", (item.node,))
                if item.name:
                    self._db.execute("INSERT INTO names (node, name) VALUES (?, ?)", (item.node, item.name))
            case InviteClosed():
                self._db.execute("UPDATE invites SET closed = 1 WHERE nonce = ?", (item.nonce,))
            case DataRow():
                self._db.execute(
                    "INSERT INTO data VALUES (1, ?, ?, ?)", (item.vocabulary, item.data_hash, item.token_count)
                )
            case Event():
                self._db.execute(
                    "INSERT INTO events (wall_s, level, event, fields) VALUES (?, ?, ?, ?)",
                    (item.wall_s, item.level, item.event, json.dumps(item.fields, default=str)),
                )
            case _:
                raise AssertionError(f"no table for {item!r}")

    def _write_plan(self, row: PlanRow) -> None:
        plan = row.plan
        self._db.execute(
            "INSERT INTO plans VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                plan.generation, plan.ledger_generation, plan.restore_step, int(row.goes_back), row.lost_steps,
                row.sentence, msgspec.json.encode(plan).decode(),
            ),
        )  # fmt: skip
        if row.by_wish:
            self._db.execute("DELETE FROM go_back_wish")
        if row.voided is not None:
            voided = row.voided
            self._db.execute(
                "INSERT INTO voided VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    plan.generation, json.dumps(voided.nodes), voided.reason, voided.first_step, plan.restore_step,
                    row.lost_steps, voided.wall_s,
                ),
            )  # fmt: skip
        if row.goes_back:
            first = first_step_after(plan.restore_step)
            self._db.execute("UPDATE invites_spent SET step = ? WHERE step > ?", (first, first))
            self._curve = None
            self._db.execute("UPDATE steps SET thrown_away = 1 WHERE step >= ?", (first,))
            # A checkpoint that could not be read the last time may be ahead of what counts: its steps count again.
            self._db.execute(
                "UPDATE steps SET thrown_away = 0 WHERE step < ?"
                " AND ledger_generation = (SELECT MAX(ledger_generation) FROM steps AS other"
                " WHERE other.step = steps.step)"
                " AND NOT EXISTS (SELECT 1 FROM steps AS other WHERE other.step = steps.step AND thrown_away = 0)",
                (first,),
            )


def _validation(version: int, loss: float, tokens: int) -> ValidationLoss:
    return ValidationLoss(version=int(version), loss=float(loss), tokens=int(tokens))


def _given(share: Share, row: StepRow) -> tuple[Any, ...]:
    """What a member gave to a step, for `_ADD_CREDIT`."""
    tokens = share.tasks * row.task_tokens
    return share.node, share.tasks, tokens, row.worked_s, row.wall_s, row.wall_s, share.audited, row.step


def _number(value: Any) -> Any:
    """SQLite has no NaN (it would store nothing): a step whose loss is not a number is kept as infinitely bad. Truth is
    a whole number in both databases."""
    if isinstance(value, bool):
        return int(value)
    return math.inf if isinstance(value, float) and math.isnan(value) else value


def _differences(before: msgspec.Struct, now: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """`model.layers was 4, is 8` for each key that differs."""
    for name in before.__struct_fields__:
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(old, msgspec.Struct):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} was {json.dumps(old)}, is {json.dumps(new)}"
