"""Tables of the coordinator's database, as numbered migrations: what stands here is never edited, only added to.

`PRAGMA user_version` is the number of migrations that a file has had; each runs in one transaction.
"""

from __future__ import annotations

import re

MIGRATIONS: tuple[str, ...] = (
    """
    -- The run itself: one row.
    CREATE TABLE run (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        run_id BLOB NOT NULL,
        config TEXT NOT NULL,            -- JSON; a start with another configuration is refused
        generation INTEGER NOT NULL      -- newest opened by a start; plans may have gone beyond
    );
    -- Every plan that ever was in force.
    CREATE TABLE plans (
        generation INTEGER PRIMARY KEY,
        ledger_generation INTEGER NOT NULL,
        restore_step INTEGER NOT NULL,
        goes_back INTEGER NOT NULL,
        lost_steps INTEGER NOT NULL,
        sentence TEXT NOT NULL,
        plan TEXT NOT NULL               -- JSON
    );
    CREATE TABLE members (
        serial INTEGER PRIMARY KEY,
        node TEXT NOT NULL,
        public_key BLOB NOT NULL,
        role TEXT NOT NULL
    );
    CREATE TABLE invites (
        nonce BLOB PRIMARY KEY,
        role TEXT NOT NULL,
        uses INTEGER NOT NULL,
        not_after INTEGER NOT NULL,      -- seconds since 1970
        signed BLOB NOT NULL
    );
    CREATE TABLE invites_spent (
        nonce BLOB NOT NULL,
        node TEXT NOT NULL,
        PRIMARY KEY (nonce, node)
    );
    CREATE TABLE bans (
        node TEXT PRIMARY KEY,
        reason TEXT NOT NULL
    );
    -- What stage 0 found in the data: one row.
    CREATE TABLE data (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        vocabulary INTEGER NOT NULL,
        data_hash TEXT NOT NULL,
        token_count INTEGER NOT NULL
    );
    -- Closed steps. Going back to a checkpoint marks the steps after it; they come again under new ledgers.
    CREATE TABLE steps (
        step INTEGER NOT NULL,
        ledger_generation INTEGER NOT NULL,
        loss REAL NOT NULL,
        tokens INTEGER NOT NULL,
        gradient_norm REAL NOT NULL,
        clip_factor REAL NOT NULL,
        skipped INTEGER NOT NULL,
        learning_rate REAL NOT NULL,
        duration_s REAL NOT NULL,
        wall_s REAL NOT NULL,
        thrown_away INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (step, ledger_generation)
    );
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        wall_s REAL NOT NULL,
        level TEXT NOT NULL,
        event TEXT NOT NULL,
        fields TEXT NOT NULL             -- JSON
    );
    """,
    """
    -- A ban has a number in the list that is told to everybody; a lifted one keeps its row, so that numbers grow.
    ALTER TABLE bans ADD COLUMN number INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE bans ADD COLUMN wall_s REAL NOT NULL DEFAULT 0;
    ALTER TABLE bans ADD COLUMN lifted INTEGER NOT NULL DEFAULT 0;   -- number of the list without it; 0: in force
    UPDATE bans SET number = rowid, wall_s = CAST(strftime('%s', 'now') AS REAL);
    ALTER TABLE invites ADD COLUMN closed INTEGER NOT NULL DEFAULT 0;
    """,
    """
    -- The reports up to the run's last step are lost with the disk that had them; the last checkpoint has the steps.
    CREATE TABLE history_ended (
        ledger_generation INTEGER PRIMARY KEY,
        first_missing INTEGER NOT NULL
    );
    """,
    """
    -- What members have given, by the ledgers' count: grows with each step in the step's own transaction.
    CREATE TABLE credits (
        node TEXT PRIMARY KEY,
        tasks INTEGER NOT NULL,
        tokens INTEGER NOT NULL,
        working_s REAL NOT NULL,
        since_s REAL NOT NULL,           -- seconds since 1970, as all times here
        until_s REAL NOT NULL
    );
    """,
    """
    -- How many of the operator's changes, which are in the plan, were in force.
    ALTER TABLE steps ADD COLUMN changes INTEGER NOT NULL DEFAULT 0;
    """,
    """
    -- Losses on text that was kept aside, each told with a step, and thrown away with it.
    CREATE TABLE validations (
        version INTEGER NOT NULL,
        step INTEGER NOT NULL,
        ledger_generation INTEGER NOT NULL,
        loss REAL NOT NULL,
        tokens INTEGER NOT NULL,
        PRIMARY KEY (version, step, ledger_generation)
    );
    """,
    """
    -- How much of what a member gave audits have found right, and since which step it gives.
    ALTER TABLE credits ADD COLUMN audited INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE credits ADD COLUMN first_step INTEGER NOT NULL DEFAULT -1;
    """,
    """
    -- What the operator calls nodes.
    CREATE TABLE names (
        node TEXT PRIMARY KEY,
        name TEXT NOT NULL
    );
    """,
    """
    -- Whose work was undone, with all that was made of it, by the plan that went back.
    CREATE TABLE voided (
        generation INTEGER PRIMARY KEY,
        nodes TEXT NOT NULL,             -- JSON
        reason TEXT NOT NULL,
        first_step INTEGER NOT NULL,
        restore_step INTEGER NOT NULL,
        lost_steps INTEGER NOT NULL,
        wall_s REAL NOT NULL
    );
    -- The first step that whoever came by it could have had a part in.
    ALTER TABLE invites_spent ADD COLUMN step INTEGER NOT NULL DEFAULT -1;
    """,
    """
    -- Where the operator wants the run to go back to, until it has or cannot: no row or one.
    CREATE TABLE go_back_wish (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        wish TEXT NOT NULL               -- JSON
    );
    -- 1: banned for whom it came with, not for what it gave.
    ALTER TABLE bans ADD COLUMN is_kin INTEGER NOT NULL DEFAULT 0;
    """,
)


_POSTGRES_WORDS = (
    (r"INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bBLOB\b", "BYTEA"),
    (r"CAST\(strftime\('%s', 'now'\) AS REAL\)", "EXTRACT(EPOCH FROM now())"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    # What SQLite gives every row by itself, and what some queries order by.
    (
        r"(CREATE TABLE (\w+) \((?:[^;])*\);)",
        r"\1 ALTER TABLE \2 ADD COLUMN rowid BIGINT GENERATED BY DEFAULT AS IDENTITY;",
    ),
)


def for_postgres(migration: str) -> str:
    """The same tables in PostgreSQL's words, so that there is one list of migrations and not two that drift apart.

    Every table has its own `rowid` behind the columns that it was made with: an INSERT names its columns wherever
    later ones may follow.
    """
    text = re.sub(r"--.*", "", migration)
    for pattern, words in _POSTGRES_WORDS:
        text = re.sub(pattern, words, text)
    return text
