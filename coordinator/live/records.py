"""Durable records of the coordinator: what must survive a crash for the run to go on as it was.

The machine writes them with `Persist` and acts on them only after `Persisted`; `coordinator.process.store` keeps them
in SQLite and gives them back as one `StoredState` when the coordinator starts again.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from protocol.base.ids import NodeId
from protocol.messages import Share, ValidationLoss
from protocol.run.plan import Plan


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The base of all records."""


class Voiding(msgspec.Struct, frozen=True, kw_only=True):
    """Members whose work is undone, with all that others have made of it."""

    nodes: tuple[NodeId, ...]
    reason: str
    first_step: int
    """The first step that any of them could have had a part in."""
    wall_s: float
    """Seconds since 1970 by the coordinator's clock."""


class PlanRow(Record, frozen=True, kw_only=True):
    """A plan is in force from here on. Durable before any node hears of it, so a generation is never used twice."""

    plan: Plan
    sentence: str
    """Why it looks as it does, for people."""
    goes_back: bool
    """Whether its ledgers begin anew from a checkpoint or the seed, after others had begun."""
    lost_steps: int
    """Closed steps that this throws away."""
    voided: Voiding | None = None
    """Whose work it undoes, where that is why."""
    by_wish: bool = False
    """The operator wished that the run goes back, and with this plan it does."""


class GoBackWish(Record, frozen=True, kw_only=True):
    """What the operator wants, until the run has gone back or cannot: a crash in between must not end it, since whose
    work is undone is banned by then and what it gave would stay."""

    step: int
    """-1: the beginning."""
    cause: str
    voiding: Voiding | None = None
    """Whose work is undone: what the operator has changed meanwhile stays changed, from the same steps on."""
    change_count: int = -1
    """Changes of the run that had been ordered before it: later ones are meant for what comes after. -1: all."""


class GoBackRefused(Record, frozen=True, kw_only=True):
    """The wish came to nothing: a checkpoint is gone."""


class MemberRow(Record, frozen=True, kw_only=True):
    """A node was given a membership with this serial."""

    node: NodeId
    public_key: bytes
    role: str
    serial: int


class InviteSpent(Record, frozen=True, kw_only=True):
    """A node used an invite; a second Join of the same node with it is free."""

    nonce: bytes
    node: NodeId
    step: int = -1
    """The first that was not closed yet, by what the coordinator knew: it had no part in any before. -1: not known."""


class Banned(Record, frozen=True, kw_only=True):
    """A node is refused from here on."""

    node: NodeId
    reason: str
    number: int = 0
    """Of the list of bans that first names it."""
    wall_s: float = 0.0
    """Seconds since 1970 by the coordinator's clock."""
    is_kin: bool = False
    """Only because of whom it came with: nobody has found anything wrong in what it gave itself."""


class Unbanned(Record, frozen=True, kw_only=True):
    """A ban is lifted."""

    node: NodeId
    number: int
    """Of the list of bans that no longer names it."""


class Named(Record, frozen=True, kw_only=True):
    """What the operator calls a node; empty: nothing any more."""

    node: NodeId
    name: str


class InviteClosed(Record, frozen=True, kw_only=True):
    """Nobody joins by this invite from here on."""

    nonce: bytes


class DataRow(Record, frozen=True, kw_only=True):
    """What the first server of stage 0 found in the data; all others must find the same."""

    vocabulary: int
    data_hash: str
    token_count: int


class StepRow(Record, frozen=True, kw_only=True):
    """A closed step as the decider reported it. After going back, a step has one row for each ledger generation."""

    ledger_generation: int
    step: int
    loss: float
    tokens: int
    gradient_norm: float
    clip_factor: float
    skipped: bool
    learning_rate: float
    duration_s: float
    wall_s: float
    """Seconds since 1970 by the coordinator's clock when the report came; only shown, never compared."""
    shares: tuple[Share, ...] = ()
    """Who computed it. Kept as sums over all steps, not with the step."""
    worked_s: float = 0.0
    """What the step adds to the working time of each of them."""
    task_tokens: int = 0
    """Tokens of one task."""
    changes: int = 0
    """How many of the operator's changes were in force."""
    validations: tuple[ValidationLoss, ...] = ()
    """Of the version that it ran on; with the last step of the last one, too. In a table of their own."""


class HistoryEnded(Record, frozen=True, kw_only=True):
    """The run went back to its last checkpoint, and no server has the reports that are missing up to it: what became
    of those steps is in the checkpoint and nowhere else. The run is finished without them."""

    ledger_generation: int
    first_missing: int
    """The first step whose report is lost; the others follow up to the run's last."""


RECORDS: tuple[type[Record], ...] = (
    HistoryEnded, PlanRow, GoBackWish, GoBackRefused, MemberRow, InviteSpent, InviteClosed, Banned, Unbanned, Named,
    DataRow, StepRow,
)  # fmt: skip


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """What one member has given, by the ledgers' count."""

    node: NodeId
    tasks: int = 0
    tokens: int = 0
    working_s: float = 0.0
    since_s: float = 0.0
    """Seconds since 1970."""
    until_s: float = 0.0
    audited: int = 0
    """Tasks of those that audits have found right."""
    first_step: int = -1
    """The earliest step that it gave to, also one that the run has gone back behind; -1: not known."""

    def plus(self, share: Share, step: int, task_tokens: int, worked_s: float, wall_s: float) -> Credit:
        tasks = share.tasks
        return Credit(
            node=self.node,
            tasks=self.tasks + tasks,
            audited=self.audited + share.audited,
            first_step=step if self.tasks == 0 else min(step, self.first_step),
            tokens=self.tokens + tasks * task_tokens,
            working_s=self.working_s + worked_s,
            since_s=self.since_s,
            until_s=wall_s,
        )


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything that a coordinator knows when it starts; empty for a new run."""

    plan: Plan | None = None
    plan_sentence: str = ""
    generations: tuple[int, ...] = ()
    """Of all plans that were ever in force by this database."""
    rollback_count: int = 0
    lost_steps: int = 0
    """Closed steps thrown away by all rollbacks together."""
    data: DataRow | None = None
    steps: tuple[StepRow, ...] = ()
    """The newest closed steps that count, oldest first (at most `TAIL_STEPS`); those before a checkpoint that the run
    went back to are of earlier ledgers."""
    thrown: tuple[StepRow, ...] = ()
    """The newest rows of steps whose newest row was thrown away, oldest step first (at most `TAIL_STEPS`)."""
    changed_at: tuple[tuple[int, int], ...] = ()
    """(changes in force, the first step that counts and had so many), for each number above 0."""
    tokens: int = 0
    """Tokens of the present history: every step counted once, thrown-away ones not."""
    ended: bool = False
    """Whether a `HistoryEnded` was written under the present plan's ledgers."""
    spent: tuple[InviteSpent, ...] = ()
    banned: tuple[Banned, ...] = ()
    ban_number: int = 0
    """Of the newest change of the bans."""
    closed_invites: tuple[bytes, ...] = ()
    """Nonces."""
    names: tuple[Named, ...] = ()
    """What the operator calls nodes."""
    wish: GoBackWish | None = None
    """To go back, which nothing has come of yet."""
    next_serial: int = 1
    """Above every membership serial ever given."""
    credits: tuple[Credit, ...] = ()
    """Of everybody who ever computed."""
    curve: tuple[tuple[int, float], ...] = ()
    """(first step, mean loss) of pieces of the whole history that counts; the first is the first step's own."""
    validations: tuple[ValidationLoss, ...] = ()
    """The newest that count, oldest first (at most `TAIL_STEPS`)."""


TAIL_STEPS = 512
"""Rows kept in memory for the status page; the rest is in the database."""
