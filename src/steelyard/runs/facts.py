# ruff: noqa: RUF012  pydantic gives each model its own copy of a default
"""What stands beside a run's rounds: the facts that it notes of itself, and the record that closes it.

`RunFacts` is the one form in which facts are written and read. docs/reference/chain.md defines the closing record: what
stands beside the rounds, hashed after the last head, so that the end of a run is known. The writer writes it anew with
all that it covers, in the same transaction; a server that has a key signs it. Whoever kept its hash can tell whether
anything of the run was changed, left out or added.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints

from steelyard.base import files
from steelyard.base.documents import Document
from steelyard.base.errors import UserError, brief
from steelyard.data.findings import Finding
from steelyard.proof.signing import VERSION, SigningKey, closing_statement, field, fields, fingerprint
from steelyard.runs.schema import declared

RUN = "federation_run"
"""Under this name a run across machines notes what its nodes know it by."""

Seed = Annotated[str, StringConstraints(pattern=r"^\d{1,19}$")]
"""A seed, as JSON names it."""


class BestRound(Document):
    """The best round of a rule, and the score by which rows chose it (more is better), as checkpoints hold them."""

    round: int = Field(ge=1)
    score: float = Field(allow_inf_nan=False)


class Promise(Document):
    """What a run promised to its clients, and what it has spent."""

    model: Literal["central", "local", "records"]
    delta: float
    budget: float | None
    accountant: str
    clip: float
    noise: dict[str, float]
    epsilon: dict[str, float]
    clients: dict[str, dict[str, float]] = {}
    """Of records: ε of each client's samples, by rule."""
    together: float
    neighbours: str
    charges: int
    ended: dict[str, int]
    notes: list[str]


class RunFacts(Document):
    """What a run's database says of the run itself; what was not noted is as its default.

    Write some with `Store.note(RunFacts(status="finished"))`: only those that are given are written. Read them as
    `History.facts`.
    """

    status: str = "unknown"
    """running, finished or stopped."""
    stopped: str = ""
    """Why it stopped."""
    seeds: list[int] = []
    rounds: int | None = None
    """How many are planned."""
    part: str | None = None
    """Which part of a comparison it is, as 3/8."""
    in_memory: bool = False
    """Whether its data were handed over from Python."""
    writer: str | None = None
    """The process that writes it."""
    tracked_as: str | None = None
    experiment_text: str | None = None
    """Its experiment file as it was written."""
    code_files: dict[str, str] = {}
    """Checksums of its code, by file."""
    data: dict[Seed, dict[str, str]] = {}
    """Fingerprints of its data, part by part."""
    preparations: dict[Seed, str] = {}
    """What rows went through before a model saw them, as JSON (`data.preparation.Preparation`)."""
    arrays: dict[str, list[str | int]] = {}
    """Of a model whose network only its app knows, in order: each array's type and shape by its name."""
    accepted: list[str] = []
    """What of its experiment, code and data was no longer as it began, and was accepted."""
    differed: list[str] = []
    """How its folder was no longer as it was written when it went on all the same (`resume --accept-changes`)."""
    findings: list[Finding] = []
    """What `steelyard check` finds in its data, and what of it was accepted."""
    drift: dict[str, dict[str, float]] = {}
    """By site and column: how differently a column is spread than at the other sites (population stability index)."""
    clients: str = ""
    """Where its clients are: local, flower, or recorded."""
    engine_choice: str = ""
    notes: str = ""
    engine_notes: str = ""
    measure: str = "accuracy"
    """What a client's score is."""
    measured_by: dict[str, str] = {}
    """Who measures each criterion."""
    trust: dict[str, dict[str, str]] = {}
    """How far each criterion of each rule can be trusted."""
    personal: list[str] = []
    """Rules whose clients keep models of their own."""
    report_rows: dict[Seed, int] = {}
    tested: dict[Seed, Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]] = {}
    """How many of how many clients are tested, where a sample is."""
    flaws: dict[Seed, dict[str, list[str]]] = {}
    labels: dict[Seed, dict[str, list[int]]] = {}
    """Training rows of each class, by client."""
    privacy: Promise | None = None
    federation_run: str | None = None
    """How the nodes of a federation know it."""
    salt: str | None = None
    """What hides clients' digests, where a ledger is kept."""
    withdrawn_from: dict[str, str | int] | None = None
    """The run that it repeats without a client."""
    withdrawals: list[dict[str, str]] = []
    """The runs that repeat it without a client."""
    others: dict[str, str] = {}
    """Versions, devices and what else clients say of how they compute: shown, and compared as text."""

    @classmethod
    def read(cls, texts: Mapping[str, str]) -> Self:
        """Read facts as the database holds them; a `ValueError` says which is not of its type."""
        given: dict[str, Any] = {name: _value(name, text) for name, text in texts.items() if name in cls.model_fields}
        given["others"] = {name: text for name, text in texts.items() if name not in cls.model_fields}
        return cls.model_validate(given, strict=True)

    def also(self, later: RunFacts) -> Self:
        """Return these facts and those that are given in `later`, which hold where both say something."""
        given = {name: getattr(later, name) for name in later.model_fields_set}
        return self.model_copy(update=given | {"others": {**self.others, **later.others}})

    @property
    def has_model(self) -> bool:
        """Whether `steelyard model` takes one of it: data were at hand, or nodes told what rows go through."""
        return bool(self.preparations or self.data)

    @property
    def finding_lines(self) -> list[str]:
        """What the check of its data found, and what of it was accepted, a sentence each."""
        return [
            f"{finding.level}{', accepted' if finding.accepted else ''}: {finding.sentence} ({finding.name})"
            for finding in self.findings
        ]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of what computed, by name."""
        return {
            name.removeprefix("version_"): text for name, text in self.others.items() if name.startswith("version_")
        }

    def texts(self) -> dict[str, str]:
        """Return the facts that were given as the database holds them: texts as they are, all else as JSON."""
        given = self.model_dump(exclude_unset=True, exclude={"others"})
        found = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
        return {name: text for name, text in found.items() if given[name] is not None} | self.others


def fact(db: sqlite3.Connection, key: str) -> str | None:
    """Return what a run notes under a name, as its text; None where it notes nothing. For those who read few facts."""
    row = db.execute("SELECT value FROM info WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


_TEXTS: tuple[object, ...] = (str, str | None)


def _value(name: str, text: str) -> Any:
    if RunFacts.model_fields[name].annotation in _TEXTS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} holds no JSON ({error})") from None


OUTSIDE = ("tracked_as", "withdrawals", "writer")
"""Facts that are noted after the end: by a tracker, and by runs that repeat this one; and who writes it now."""
_LAST = "SELECT round, head FROM chain WHERE head IS NOT NULL ORDER BY round DESC LIMIT 1"
_CHECKPOINTS = "SELECT round, head, checksum, size FROM checkpoints ORDER BY round"
_FILES = "SELECT file, states, size, checksum FROM checkpoints ORDER BY round"
_ENDED = "SELECT f.name, e.round, e.reason FROM ended e JOIN federations f ON f.id = e.federation WHERE e.round <= ?"
_NEWEST = "SELECT COALESCE(MAX(round), -1) FROM {} WHERE typeof(round) = 'integer'"
_NO_ROUND = "typeof(round) != 'integer' OR round < 0"
_NO_RULE = "federation NOT IN (SELECT id FROM federations)"
_LACKS = (
    "SELECT name FROM federations f LEFT JOIN rounds r ON r.federation = f.id AND r.round <= ? "
    "LEFT JOIN digests d ON d.federation = f.id AND d.round = r.round "
    "GROUP BY f.id HAVING COUNT(d.round) != IFNULL(MAX(r.round), 0) + 1 LIMIT 1"
)


def last_head(db: sqlite3.Connection) -> tuple[int, str]:
    """Return the last head of a run and its round; -1 and "" before the first checkpoint."""
    row = db.execute(_LAST).fetchone()
    return (-1, "") if row is None else (int(row[0]), str(row[1]))


def facts_hash(db: sqlite3.Connection) -> str:
    """Return the SHA-256 of a run's facts; large runs note much of each client, so a writer asks once."""
    found = hashlib.sha256()
    for key, value in db.execute("SELECT key, value FROM info ORDER BY key"):
        if key not in OUTSIDE:
            found.update(field("fact", key) + field("value", value))
    return found.hexdigest()


def closing_hash(db: sqlite3.Connection, facts: str | None = None) -> str:
    """Return the SHA-256 of the record that closes a run as it stands now, given its `facts_hash` where it is known."""
    last, head = last_head(db)
    parts = [fields(closing=VERSION, round=last, head=head)]
    for round, after, sha256, size in db.execute(_CHECKPOINTS).fetchall():
        parts.append(fields(checkpoint=round, head=after, checksum=sha256, bytes=size))
    for name, round, reason in db.execute(f"{_ENDED} ORDER BY f.name", (last,)).fetchall():
        parts.append(fields(ended=name, round=round, reason=reason))
    parts.append(field("facts", facts or facts_hash(db)))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def write_closing(db: sqlite3.Connection, signer: SigningKey | None, facts: str | None = None) -> None:
    """Write the closing record of a run as it stands now, signed where there is a key; call it in a transaction."""
    found, (last, _) = closing_hash(db, facts), last_head(db)
    if signer is None and written_closing(db) == (last, found):
        return  # as it was, and its signature holds
    signed = signed_by(db, signer, closing_statement(fact(db, RUN) or "", found))
    db.execute("DELETE FROM closing")
    db.execute("INSERT INTO closing VALUES (?, ?, ?, ?)", (last, found, *signed))


def signed_by(db: sqlite3.Connection, signer: SigningKey | None, statement: bytes) -> tuple[str | None, bytes | None]:
    """Return the fingerprint of the server's key, which the run then holds, and its signature; None without a key."""
    if signer is None:
        return None, None
    key = fingerprint(signer.line)
    db.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (key, signer.line))
    return key, signer.sign(statement)


def written_closing(db: sqlite3.Connection) -> tuple[int, str]:
    """Return the round and the hash that a run was closed with; -1 and "" where that is missing."""
    rows = db.execute("SELECT round, hash FROM closing").fetchall()
    return (int(rows[0][0]), str(rows[0][1])) if len(rows) == 1 else (-1, "")


def closing_problem(db: sqlite3.Connection) -> str:
    """Say how a run differs from the record that closes it; empty where it does not."""
    last, _ = last_head(db)
    if wrong := _stray_row(db) or _missing_row(db, last) or _differed(db):
        return wrong
    closed, written = written_closing(db)
    if not written:
        return "its closing record is missing" if newest_round(db) >= 0 else ""
    if closed != last:
        return f"its closing record is of round {closed}, and its last head of round {last}"
    if written != closing_hash(db):
        return "its facts, its checkpoints or how its rules ended are not as its closing record says"
    newest = newest_round(db)
    if newest > last and finished(db):
        return f"round {newest} stands after its end, which is round {last}"
    return ""


def _stray_row(db: sqlite3.Connection) -> str:
    """Name a table with a row of no round or of no rule: no head is of such a row, so that nothing else finds it."""
    for name, columns in declared().items():
        if "round" not in columns or name == "closing":
            continue
        wrong = f"{_NO_ROUND} OR {_NO_RULE}" if "federation" in columns else _NO_ROUND
        if db.execute(f"SELECT 1 FROM {name} WHERE {wrong} LIMIT 1").fetchone():
            return f"the table {name} has a row of a round or of a rule that the run never had"
    return ""


def _missing_row(db: sqlite3.Connection, last: int) -> str:
    """Name a rule that lacks a round, or the digest of its model, up to the last head."""
    found = db.execute(_LACKS, (last,)).fetchone() if last >= 0 else None
    return "" if found is None else f"rounds of {found[0]}, or digests of their models, are missing"


def _differed(db: sqlite3.Connection) -> str:
    """Return what a resume accepted of a folder that was no longer as it was written."""
    try:
        return str(next(iter(json.loads(fact(db, "differed") or "[]")), ""))
    except (ValueError, TypeError, RecursionError):
        return "its facts cannot be read"


def newest_round(db: sqlite3.Connection) -> int:
    """Return the newest round that any table of a run has rows of; -1 where there is none."""
    tables = (name for name, columns in declared().items() if "round" in columns)
    return max(int(db.execute(_NEWEST.format(name)).fetchone()[0]) for name in tables)


def finished(db: sqlite3.Connection) -> bool:
    """Whether a run says that it is at its end; else rounds may follow its last checkpoint."""
    return fact(db, "status") == "finished"


def checksum(content: bytes, states: str) -> str:
    """Return the SHA-256 of a checkpoint's file and its states together."""
    return hashlib.sha256(content + b"\0" + states.encode()).hexdigest()


def read_content(path: Path, longest: int | None = None) -> bytes:
    """Return the bytes of a checkpoint's file; one that cannot be read, or is longer, is named in the error."""
    try:
        if not any(files.read_bytes(path, longest, first=8)):
            raise ValueError("it begins with no length")  # as do gigabytes of nothing, which nobody should wait for
        return files.read_bytes(path, longest)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: not a readable checkpoint: {reason}") from error


def check_name(folder: Path, name: object) -> None:
    """Refuse a name that no run gives to a checkpoint: it comes from a file or database that anybody may have made."""
    if not isinstance(name, str) or not files.CHECKPOINT_NAME.fullmatch(name):
        raise UserError(f"{folder}: {brief(name)} is no name of a checkpoint; allowed: as the run wrote it")


def read_checkpoint(folder: Path, file: str, states: str, size: int, wanted: str, *, strict: bool = True) -> bytes:
    """Return the bytes of a checkpoint's file in a run's folder; with `strict` only those that were written."""
    path = folder / files.CHECKPOINTS / file
    check_name(path.parent, file)
    content = read_content(path, size if strict else None)
    if strict and checksum(content, states) != wanted:
        raise UserError(f"{path}: not the checkpoint that was written: its checksum differs")
    return content


def file_problem(db: sqlite3.Connection, folder: Path) -> str:
    """Say which checkpoint's file is not the one that was written; empty where all are."""
    try:
        for file, states, size, wanted in db.execute(_FILES).fetchall():
            read_checkpoint(folder, file, str(states), size, wanted)
    except UserError as error:
        return str(error)
    return ""
