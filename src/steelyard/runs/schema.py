"""The tables of a run's database. A round is written in one transaction, so a reader sees whole rounds only."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from steelyard.base.settings import Section

VERSION = 11

SCHEMA = """
CREATE TABLE IF NOT EXISTS info (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS federations (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
    rule TEXT NOT NULL, seed INTEGER NOT NULL, settings TEXT NOT NULL,
    algorithm TEXT NOT NULL      -- its name; its parameters are in the settings
);
CREATE TABLE IF NOT EXISTS clients (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS rounds (
    federation INTEGER NOT NULL REFERENCES federations(id),
    round INTEGER NOT NULL,
    accuracy REAL,               -- over all clients' test samples; NULL where the round was not evaluated
    priority TEXT,               -- the order that the round kept
    tried TEXT NOT NULL,         -- JSON: [[order, accuracy], ...], the order the round started with first
    tests INTEGER NOT NULL,      -- testing rounds: extra tests beyond the one every round has
    cohort INTEGER NOT NULL,     -- clients asked
    answered INTEGER NOT NULL,   -- clients whose update was weighed
    kept_old INTEGER NOT NULL,   -- 1: the old model was kept, nothing could be weighed
    zero_criteria TEXT NOT NULL, -- JSON: criteria that were 0 for the whole cohort (everyone got 1/n)
    zero_scores INTEGER NOT NULL,-- 1: all scores were 0, weights are uniform for that reason
    loss TEXT NOT NULL,          -- JSON: the loss the clients used
    server_accuracy REAL, server_macro_f1 REAL,
    server_metrics TEXT,         -- JSON: f1 per class, or mape, mae, rmse, on the server's test set
    seconds REAL NOT NULL,
    simulated REAL,              -- seconds that the round took on the devices' clock; NULL without one
    epsilon REAL,                -- what the rounds so far have told about any one client; NULL without such a promise
    cpu REAL, gpu REAL,          -- seconds of this process's processors and of a GPU held; a round's are shared evenly
    up REAL, down REAL,          -- bytes of all answers, and sent to all that were asked; NULL: unknown
    PRIMARY KEY (federation, round)
) WITHOUT ROWID;
-- What single clients did stands as one row per round, a column of numbers in each field (runs/columns.py): a row per
-- client would make a long run slow to read. NULL: none of them is known.
CREATE TABLE IF NOT EXISTS updates (
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    clients BLOB NOT NULL,                           -- numbers of the clients, int32
    samples BLOB NOT NULL,                           -- int64
    bytes BLOB, loss BLOB NOT NULL, score BLOB, weight BLOB, -- float64, NaN for unknown
    raw BLOB, normalised BLOB,                       -- float64 [clients, criteria of the rule]
    listening BLOB,                                  -- float64 [clients, clients]: how each weighed all for itself
    PRIMARY KEY (federation, round)
);
CREATE TABLE IF NOT EXISTS failures (                -- clients that were asked and left out, and why
    federation INTEGER NOT NULL, round INTEGER NOT NULL, client INTEGER NOT NULL REFERENCES clients(id),
    reason TEXT NOT NULL, PRIMARY KEY (federation, round, client)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS untested (                -- clients that gave no usable test of the round's model, and why
    federation INTEGER NOT NULL, round INTEGER NOT NULL, client INTEGER NOT NULL REFERENCES clients(id),
    reason TEXT NOT NULL, PRIMARY KEY (federation, round, client)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluations (
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    clients BLOB NOT NULL, samples BLOB NOT NULL,    -- int32, int64
    score BLOB NOT NULL, loss BLOB NOT NULL,         -- float64, NaN for unknown
    metrics TEXT NOT NULL, figures BLOB,             -- JSON: names of further metrics; float64 [metrics, clients]
    PRIMARY KEY (federation, round)
);
CREATE TABLE IF NOT EXISTS samples (
    federation INTEGER NOT NULL, round INTEGER NOT NULL, hits BLOB NOT NULL, -- packed bits, clients in order
    count INTEGER NOT NULL, PRIMARY KEY (federation, round)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (                   -- federations that ended early because a model exploded, and why
    federation INTEGER PRIMARY KEY REFERENCES federations(id),
    round INTEGER NOT NULL,      -- the round that gave no sound model; the one before is the last there is
    reason TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS contributions (           -- what each client added to the model; source run is in the chain
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    measure TEXT NOT NULL, method TEXT NOT NULL,
    source TEXT NOT NULL,                            -- run, kept, rounded, replay or retrained: what it was made from
    clients BLOB NOT NULL, added BLOB NOT NULL,      -- int32; float64 [clients, 1 + groups of test rows]
    error BLOB NOT NULL, sizes BLOB NOT NULL,        -- float64: of drawing coalitions; int64: rows of each group
    before REAL NOT NULL, after REAL NOT NULL,       -- the measure of the model before and after the round
    PRIMARY KEY (federation, round, measure, method, source)
) WITHOUT ROWID;
-- The chain of rounds (runs/chain.py, docs/reference/chain.md); digests and heads are written with checkpoints.
CREATE TABLE IF NOT EXISTS digests (
    federation INTEGER NOT NULL, round INTEGER NOT NULL,
    model TEXT NOT NULL,         -- SHA-256 of the model that the round ended with
    task TEXT,                   -- SHA-256 of what clients were asked; NULL: nobody was
    updates BLOB,                -- salted SHA-256 of each client's update, 32 bytes each; NULL: none was taken
    salts BLOB,                  -- the salts, 16 bytes each; NULL: nodes keep them
    marks BLOB,                  -- by which a change is found in its client's row (runs/chain.py), 8 bytes each
    PRIMARY KEY (federation, round)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signatures (              -- of nodes, each over all digests of its clients in a round
    federation INTEGER NOT NULL, round INTEGER NOT NULL, key TEXT NOT NULL,
    clients BLOB NOT NULL,       -- numbers of the clients that the statement names, int32
    others BLOB,                 -- digests of those of them that are not among the round's updates; NULL: none
    before TEXT,                 -- digest of the node's statement before; NULL: it knew of none
    signature BLOB NOT NULL, PRIMARY KEY (federation, round, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY,        -- fingerprint
    line TEXT NOT NULL           -- the public key, as one line of OpenSSH
);
CREATE TABLE IF NOT EXISTS chain (
    round INTEGER PRIMARY KEY,
    ledger_bytes INTEGER,        -- how long the privacy ledger was when the round was written; NULL: there is none
    ledger TEXT,                 -- SHA-256 of these bytes
    kept TEXT,                   -- SHA-256 of the file of kept updates; NULL: none were kept
    head TEXT,                   -- SHA-256 of the round's record; NULL until a checkpoint follows
    key TEXT, signature BLOB     -- of the server, over the head; NULL: it has no key
);
CREATE TABLE IF NOT EXISTS checkpoints (
    round INTEGER PRIMARY KEY, file TEXT NOT NULL, states TEXT NOT NULL,
    size INTEGER NOT NULL,       -- bytes of the file
    checksum TEXT NOT NULL,      -- SHA-256 of the file and the states
    head TEXT NOT NULL           -- of the chain, after this round
);
CREATE TABLE IF NOT EXISTS closing (                 -- the record that closes the chain (runs/facts.py); one row
    round INTEGER PRIMARY KEY,   -- of the last head; -1 before the first
    hash TEXT NOT NULL,          -- SHA-256 of the record
    key TEXT, signature BLOB     -- of the server, over the hash; NULL: it has no key
);
"""


_KINDS: Mapping[str, tuple[type, str]] = {
    "INTEGER": (int, "whole number from 0 on"),
    "REAL": (float, "number"),
    "TEXT": (str, "text"),
    "BLOB": (bytes, "column of numbers"),
}
_COLUMNS = (
    'SELECT m.name, c.name, c.type, c."notnull", c.pk FROM sqlite_master m JOIN pragma_table_info(m.name) c '
    "WHERE m.type = 'table'"
)


@dataclass(frozen=True)
class Column:
    kind: type
    words: str
    may_lack: bool


@cache
def declared() -> Mapping[str, Mapping[str, Column]]:
    """Return the columns of each table that statements make, by name, in their order."""
    found: dict[str, dict[str, Column]] = {}
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(SCHEMA)
        for table, name, kind, needed, key in model.execute(_COLUMNS):
            found.setdefault(table, {})[name] = Column(*_KINDS[kind], not (needed or key))
    return found


WRITE: Mapping[str, str] = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"
    for table, columns in declared().items()
}
"""By table, the statement that writes a whole row, in place of the one that is there."""


class StoreSettings(Section):
    """[store]: where the run folder is made and how often a checkpoint is written."""

    folder: Path = Path("runs")
    """Folder in which a run's own folder is made, unless --out names that folder itself."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Write a checkpoint each k rounds; a killed run repeats at most k rounds when resumed, to the same bits."""
    keep: Literal["models", "updates"] = "models"
    """models: the newest models, to go on from; updates: also what each client sent in each round and the model that
    came of it, so that what it added can be found later without training again, and `steelyard verify` computes every
    model again. How much room that takes is said before the run."""
    keep_as: Literal["float32", "bfloat16"] = "float32"
    """How kept updates are written; bfloat16 takes half the room and rounds them, so that values become approximate."""
    clients_every: int = Field(default=1, ge=1)
    """Write what single clients sent and weighed each k rounds, and in the last; for runs of many short rounds."""
    digests: Literal["cheap", "every"] = "cheap"
    """Digests of single updates in the chain of a simulation. cheap: where they take little beside training; every: all
    of them, which can take half as long as training again. Across machines all are taken."""
