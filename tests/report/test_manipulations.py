"""A table of manipulations of finished runs, by three kinds of people, and what each look at the folder says of them.

careless: edits, and computes nothing again. forger: computes checksums, chain and closing record again, and strips the
signatures that no longer hold; he has no key. server: does the same, and signs with its own key.

Looks: V `verify`, H `verify --head` with the final hash that was kept elsewhere, K `verify --keys`, R `resume`,
T `table` and `report`, D the verdict of `record`. The table names the looks that do NOT find a manipulation; for each
kind of person and each set of looks docs/reference/verifying.md has the sentence that allows it.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tests.experiment.test_private_runs import described
from tests.report.test_record import rewrite
from tests.runs.contents import chain_again, change_fact, closed_again, query
from tests.runs.signed_runs import signed_run

from steelyard.base import files
from steelyard.base.errors import UserError
from steelyard.experiment.resuming import changed_experiment, changed_since
from steelyard.experiment.running import resume, run
from steelyard.proof.signing import SigningKey, model_digest
from steelyard.report.record import record
from steelyard.report.verification import verify
from steelyard.runs.facts import checksum
from steelyard.runs.history import History
from steelyard.runs.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verifying.md"
LAST_FILE = "checkpoints/round-000003.safetensors"
UNSIGNED = "key = NULL, signature = NULL"
COST = "The cost of a round (seconds, bytes), who writes the run, withdrawals and trackers are not covered."
LATE = "Values that were found out after the run are not covered either."
UNUSED = "Nothing looks at what no figure comes from:"
ALLOWED: dict[tuple[str, str], str] = {
    ("careless", "T"): "Signatures are looked at by `verify`, `resume` and `record`, not by `table` and `report`",
    ("careless", "RT"): "in a statement than its node signed, and kept updates by `verify` and `record` alone",
    ("careless", "VHRTD"): "Only `--keys` asks for a signature that is missing.",
    ("forger", "VRTD"): "Whoever computes the chain and the closing record again passes every look but `--head` and "
    "`--keys`.",
    ("server", "VKRTD"): "Whoever has the server's key passes every look but `--head`, as far as no node signed what "
    "was changed.",
    ("server", "VHKRTD"): "What it makes again as it was is no change: heads, marks, its signatures. Nor is what "
    "stands more in a statement than its node signed.",
}
"""By who did it and the looks that find nothing at most: the sentence of the page that allows it; the narrowest counts.
What no look looks at has its sentence by name (`sentence`)."""


Edit = str | tuple[str, ...] | Callable[[Path], object]
"""SQL to run, or a function of the folder."""


class Case(NamedTuple):
    """A manipulation, and the looks that do not find it, by who did it."""

    edit: Edit
    careless: str
    forger: str
    server: str


def swapped(table: str, column: str) -> str:
    """Give a the number of b and b that of a, in round 2."""
    value = f"CAST(substr({column}, length({column}) / 2 + 1) || substr({column}, 1, length({column}) / 2) AS BLOB)"
    return f"UPDATE {table} SET {column} = {value} WHERE round = 2"


def fact(name: str, value: str) -> str:
    return f"INSERT OR REPLACE INTO info VALUES ('{name}', '{value}')"


def of_round(column: str, value: str) -> str:
    return f"UPDATE rounds SET {column} = {value} WHERE round = 2"


def file(name: str, change: Callable[[bytes], bytes] | None) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))

    return edit


def copied_round(to: int, *, chained: bool) -> Edit:
    """A round that never was, with 99.9 %, after the last one."""

    def edit(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
            for table in ("rounds", "updates", "evaluations", "digests", *(("chain",) if chained else ())):
                db.execute(f"CREATE TEMP TABLE copy AS SELECT * FROM {table} WHERE round = 3")
                db.execute(f"UPDATE copy SET round = {to}")
                db.execute(f"INSERT INTO {table} SELECT * FROM copy")
                db.execute("DROP TABLE copy")
            db.execute(f"UPDATE rounds SET accuracy = 0.999 WHERE round = {to}")

    return edit


def without(text: str) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(text.encode(), b"")


def a_file(name: str) -> Callable[[Path], object]:
    """A file that the run did not write."""
    return lambda folder: ((folder / name).parent.mkdir(exist_ok=True), (folder / name).write_text("99.9 %"))


def kept(change: Callable[[dict[str, torch.Tensor]], object], about: dict[str, Any] | None = None) -> Edit:
    """Change the tensors, or what is said, of the updates that were kept of round 2."""
    return lambda folder: rewrite(folder, 2, change, about)


def half_kept(tensors: dict[str, torch.Tensor]) -> None:
    """A model half of which stayed as it was before."""
    tensors["after/DS>LD"][0] = 1.0


def another_name(folder: Path) -> None:
    edited(folder, "UPDATE checkpoints SET file = 'round-000009.safetensors'")
    (folder / LAST_FILE).rename(folder / "checkpoints" / "round-000009.safetensors")


def cut(table: str, *columns: str) -> str:
    """Take what was of a out of round 2."""
    parts = (f"{column} = substr({column}, length({column}) / 2 + 1)" for column in columns)
    return f"UPDATE {table} SET {', '.join(parts)} WHERE round = 2"


OF_A = "DELETE FROM signatures WHERE round = 2 AND before IS NOT NULL"
DROPPED = (
    cut("updates", "clients", "samples", "bytes", "loss", "score", "raw", "normalised"),
    "UPDATE updates SET weight = X'000000000000F03F' WHERE round = 2",
    cut("digests", "updates", "salts"), OF_A, "UPDATE rounds SET answered = 1, cohort = 2 WHERE round = 2",
)  # fmt: skip
"""A server that leaves a out of round 2 as if it had never been asked."""
FAILED = "INSERT INTO failures SELECT 1, 2, id, 'late' FROM clients WHERE name = 'a'"
NAN = "CAST(X'000000000000F87F' || substr(raw, 9) AS BLOB)"
OTHER_RULE = "INSERT INTO federations SELECT 2, 'other', 'other', 0, settings, algorithm FROM federations"
LATER = (
    "INSERT INTO contributions SELECT federation, round, measure, method, 'kept', clients, added, error, sizes, "
    "before, 99 FROM contributions"
)
STRANGE = (
    "INSERT INTO signatures SELECT federation, round, 'SHA256:x', clients, others, before, signature FROM signatures "
    "WHERE round = 2 AND before IS NULL"
)
NAMES = ("status", "stopped", "notes", "engine_notes", "measure", "measured_by", "trust", "report_rows", "rounds")
VALUES = ("", "none", "none", "none", "f1", "{}", "{}", "{}", "3")
STATES = "UPDATE checkpoints SET states = replace(states, '0.5', '0.75')"
LAST = "WHERE round = (SELECT MAX(round) FROM chain)"
MISSED: dict[tuple[str, str, str], dict[str, Edit]] = {
    # What only the final hash shows and, of a forger, signatures.
    ("", "VRTD", "VKRTD"): {
        **{f"fact {name}": fact(name, value) for name, value in zip(NAMES, VALUES, strict=True)},
        "server accuracy": of_round("server_accuracy", "0.99"),
        "server metrics": of_round("server_metrics", "'{\"mae\": 0.1}'"),
        "epsilon of a round": of_round("epsilon", "0.05"),
        "orders tried": of_round("tried", "'[]'"),
        "tests": of_round("tests", "7"),
        "cohort": of_round("cohort", "9"),
        "loss": of_round("loss", "'{}'"),
        "simulated time": of_round("simulated", "0.5"),
        "scores": swapped("updates", "score"),
        "normalised criteria": swapped("updates", "normalised"),
        "samples": swapped("updates", "samples"),
        "local losses": swapped("updates", "loss"),
        "figures of clients": swapped("evaluations", "figures"),
        "right and wrong": "UPDATE samples SET hits = X'F0'",
        "an end": "INSERT INTO ended VALUES (1, 3, 'exploded')",
        "a reason": "UPDATE failures SET reason = 'late' WHERE round = 2",
        "a failure": "DELETE FROM failures WHERE round = 2",
        "an untested client": "DELETE FROM untested WHERE round = 2",
        "what a client added": "UPDATE contributions SET after = 0.99 WHERE round = 2",
        "digest of a model": "UPDATE digests SET model = upper(model) WHERE round = 2",
        "salts": swapped("digests", "salts"),
        "seed": "UPDATE federations SET seed = 5",
        "name of the rule": "UPDATE federations SET rule = 'LD'",
        "algorithm": "UPDATE federations SET algorithm = 'fedadam'",
        "states of a checkpoint": STATES,
        "a node that failed": (*DROPPED, FAILED),
        "a run that goes on": fact("status", "running"),
        "what was accepted": fact("accepted", '["training.epochs"]'),
        "an invented fact": fact("award", "best of all"),
        "who was tested": swapped("evaluations", "clients"),
        "where a value came from": "UPDATE contributions SET source = 'kept'",
        "no values": "DELETE FROM contributions",
    },
    # What contradicts the rest of the folder, as `verify` and `record` compute it.
    ("", "RT", "RT"): {
        "accuracy": of_round("accuracy", "0.99"),
        "every accuracy": "UPDATE rounds SET accuracy = 0.99",
        "order": of_round("priority", "'LD>DS'"),
        "answered": of_round("answered", "9"),
        "kept old": of_round("kept_old", "1"),
        "weights": swapped("updates", "weight"),
        "criteria": swapped("updates", "raw"),
        "scores of clients": swapped("evaluations", "score"),
        "tested samples": swapped("evaluations", "samples"),
        "settings of the rule": "UPDATE federations SET settings = replace(settings, 'LD', 'MD')",
        "a model that did not change": (
            "UPDATE rounds SET kept_old = 1 WHERE round = 2",
            "UPDATE updates SET weight = zeroblob(16) WHERE round = 2",
        ),
        "a criterion that nobody knows": (
            f"UPDATE updates SET raw = {NAN} WHERE round = 2",
            swapped("updates", "weight"),
        ),
        "criteria that nobody knows": "UPDATE updates SET raw = NULL, normalised = NULL WHERE round = 2",
        "weights that nobody knows": "UPDATE updates SET weight = NULL WHERE round = 2",
        "a weight below 0": "UPDATE updates SET weight = X'000000000000E0BF000000000000F83F' WHERE round = 2",
        "samples below 0": "UPDATE updates SET samples = CAST(zeroblob(7) || X'80' || zeroblob(8) AS BLOB)",
        "scores of one client": "UPDATE updates SET score = substr(score, 1, 8) WHERE round = 2",
        "no tests": "DELETE FROM evaluations",
    },
    # What no look looks at; a forger is found by the signatures that he strips.
    ("VHKRTD", "VRTD", "VHKRTD"): {
        "cost": "UPDATE rounds SET seconds = 0.001",
        "writer": fact("writer", "{}"),
        "withdrawals": fact("withdrawals", "[]"),
        "where it is tracked": fact("tracked_as", "{}"),
        "a value found out later": LATER,
        "a name that nothing uses": "INSERT INTO clients VALUES (99, 'z')",
        "a number that SQLite keeps": "PRAGMA user_version = 7",
        "another name of a checkpoint": another_name,
        "a checkpoint more": a_file("checkpoints/round-000009.safetensors"),
        "a report": a_file("report.html"),
        "comments in the experiment": file("experiment.toml", lambda content: content + b"# the best of all\n"),
    },
    # What a node signed.
    ("", "VRTD", "T"): {
        "who sent": swapped("updates", "clients"),
        "task": "UPDATE digests SET task = upper(task) WHERE round = 2",
        "digests of updates": swapped("digests", "updates"),
        "name of a client": "UPDATE clients SET name = 'z' WHERE name = 'a'",
        "a statement before": "UPDATE signatures SET before = NULL WHERE round = 2",
        "names that changed places": tuple(
            f"UPDATE clients SET name = '{new}' WHERE name = '{old}'"
            for old, new in (("a", "x"), ("b", "a"), ("x", "b"))
        ),
        "a statement of a stranger": STRANGE,
    },
    ("", "T", "T"): {
        "digest of the last model": f"UPDATE digests SET model = upper(model) {LAST}",
        "bytes of a checkpoint": file(LAST_FILE, lambda content: content[:-1] + b"\1"),
        "a longer checkpoint": file(LAST_FILE, lambda content: content + b"\0"),
    },
    # What is computed again.
    ("", "VRTD", "VHKRTD"): {
        "head of a checkpoint": "UPDATE checkpoints SET head = upper(head)",
        "size of a checkpoint": "UPDATE checkpoints SET size = size + 1",
        "no closing record": "DELETE FROM closing",
        "another hash": "UPDATE closing SET hash = upper(hash)",
        "two closing records": "INSERT INTO closing SELECT 1, hash, key, signature FROM closing",
        "a record that closes an earlier round": "UPDATE closing SET round = 2",
        "no word of kept updates": "UPDATE chain SET kept = NULL WHERE round = 2",
    },
    # What no run ever is.
    ("", "", ""): {
        "no checkpoint": "DELETE FROM checkpoints",
        "no file of a checkpoint": file(LAST_FILE, None),
        "a round that never was": copied_round(4, chained=False),
        "one on top of the chain": copied_round(4, chained=True),
        "a round far away": copied_round(900, chained=False),
        "a round of no number": "UPDATE rounds SET round = 'x' WHERE round = 3",
        "a round between": "UPDATE rounds SET round = 2.5 WHERE round = 3",
        "a round before the first": "UPDATE rounds SET round = -7 WHERE round = 3",
        "rows of no rule": "UPDATE failures SET federation = 99 WHERE round = 2",
        "a gap": "DELETE FROM rounds WHERE round = 2",
        "no link": "DELETE FROM chain WHERE round = 2",
        "no chain": "DELETE FROM chain",
        "the experiment": file("experiment.toml", without('source = "digits"\n')),
        "no digests of a round": "DELETE FROM digests WHERE round = 1",
        "no digests": "DELETE FROM digests",
        "no rounds": "DELETE FROM rounds",
        "one rule more": OTHER_RULE,
        "rounds of one rule more": (OTHER_RULE, "UPDATE rounds SET federation = 2 WHERE round = 3"),
        "no rule": "DELETE FROM federations",
        "a fact in bytes": "UPDATE info SET value = CAST(value AS BLOB) WHERE key = 'status'",
        "a fact without a name": "INSERT INTO info VALUES (NULL, 'best of all')",
        "a promise": fact("privacy", "{}"),
        "a view": "CREATE VIEW better AS SELECT 1",
        "a trigger": "CREATE TRIGGER better AFTER INSERT ON rounds BEGIN DELETE FROM clients; END",
        "a table more": "CREATE TABLE better (accuracy REAL)",
        "another schema": fact("schema", "9"),
        "no heads": "UPDATE chain SET head = NULL",
        "how far a ledger had come": "UPDATE chain SET ledger_bytes = 5, ledger = '00' WHERE round = 1",
        "a ledger": a_file("privacy.jsonl"),
        "code": a_file("code/better.py"),
    },
    ("VHRTD", "VRTD", "VHKRTD"): {
        "no signature of a head": f"UPDATE chain SET {UNSIGNED} WHERE round = 2",
        "no signature of any head": f"UPDATE chain SET {UNSIGNED}",
        "no signature of the end": f"UPDATE closing SET {UNSIGNED}",
    },
    ("T", "VRTD", "VHKRTD"): {
        "a signature of a head": "UPDATE chain SET signature = zeroblob(96) WHERE round = 1",
    },
    ("", "VRTD", "VRTD"): {
        "no statement of a node": "DELETE FROM signatures WHERE round = 2",
        "no statements": "DELETE FROM signatures",
        "no statements of one": "DELETE FROM signatures WHERE before IS NULL AND round > 1",
        "a node that was never asked": DROPPED,
        "no node at all": ("DELETE FROM signatures", "DELETE FROM info WHERE key = 'federation_run'"),
    },
    ("T", "VRTD", "T"): {
        "a signature of a node": "UPDATE signatures SET signature = zeroblob(96) WHERE round = 2",
        "no keys": "DELETE FROM keys",
        "another key": "UPDATE keys SET line = (SELECT line FROM keys ORDER BY key DESC LIMIT 1)",
        "a key more": "INSERT INTO keys VALUES ('SHA256:x', 'ecdsa x')",
    },
    ("", "RT", "T"): {
        "no updates in a round": "DELETE FROM updates WHERE round = 2",
        "no updates": "DELETE FROM updates",
    },
    ("RT", "VRTD", "VHKRTD"): {
        "a client twice in a statement": "UPDATE signatures SET clients = CAST(clients || clients AS BLOB)",
        "a digest more in a statement": "UPDATE signatures SET others = zeroblob(32) WHERE round = 2",
        "no marks": "UPDATE digests SET marks = NULL",
    },
    # What `verify` and `record` alone look at.
    ("RT", "RT", "RT"): {
        "a kept update": kept(lambda tensors: tensors["models/DS>LD"][0].mul_(2)),
        "a kept model": kept(lambda tensors: tensors["after/DS>LD"].mul_(2)),
        "half a kept model": kept(half_kept, {"frozen": [[0, 1]]}),
        "no kept model": kept(lambda tensors: tensors.pop("after/DS>LD")),
        "no kept update": kept(lambda tensors: tensors.pop("models/DS>LD"), None),
        "no file of kept updates": file("updates/round-000002.safetensors", None),
        "a file of kept updates more": a_file("updates/round-000009.safetensors"),
    },
    ("RT", "VRTD", "VKRTD"): {
        "what is said of kept updates": kept(lambda tensors: None, {"samples": [9, 9]}),
    },
}
"""By the looks that do not find them, of a careless person, a forger and a server: manipulations."""
CASES = {what: Case(edit, *missed) for missed, edits in MISSED.items() for what, edit in edits.items()}
KINDS = ("careless", "forger", "server")
COSTS = ("cost", "writer", "withdrawals", "where it is tracked")
LOOKS = "VHKRTD"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return signed_run(folder / "run", folder / "keys")


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keeping")
    return signed_run(folder / "run", folder / "keys", keep=True)


def refused(look: Callable[[], object]) -> bool:
    """Whether a look finds something: it says so, or ends in an error of one line, as `resume` does."""
    try:
        return bool(look())
    except UserError as error:
        return "\n" not in str(error)


def goes_on(folder: Path) -> None:
    """As `steelyard resume` does with a run at its end, and with one that is not."""
    if History(folder).facts.status == "finished":
        resume(folder)
    changed_experiment(folder, History(folder).facts, accept=False)
    with closing(Store(folder)) as store:
        store.resume()


def look_at(folder: Path, keys: Path, kept: str) -> str:
    """Return the looks that find nothing. `resume` comes last: it may forget what it goes on without."""
    seen: dict[str, Callable[[], object]] = {
        "V": lambda: verify(folder).code,
        "H": lambda: verify(folder, head=kept).code,
        "K": lambda: verify(folder, keys).code,
        "T": lambda: History(folder).chain.problem or changed_since(folder, History(folder).facts),
        "D": lambda: record(folder)["verified"]["verdict"] != "intact",
        "R": lambda: goes_on(folder),
    }
    return "".join(name for name in LOOKS if not refused(seen[name]))


def edited(folder: Path, edit: Edit) -> None:
    if callable(edit):
        edit(folder)
        return
    with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        for statement in (edit,) if isinstance(edit, str) else edit:
            assert db.execute(statement).rowcount


def covered_up(folder: Path, key: SigningKey | None) -> None:
    """Compute checksums, heads and the closing record again; without a key, strip what would not hold any more."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        for round, name, states in db.execute("SELECT round, file, states FROM checkpoints").fetchall():
            path = folder / "checkpoints" / name
            if path.is_file():
                content = path.read_bytes()
                row = (len(content), checksum(content, states), round)
                db.execute("UPDATE checkpoints SET size = ?, checksum = ? WHERE round = ?", row)
        for round, name in [(int(path.stem[6:]), path) for path in (folder / files.UPDATES).glob("*")]:
            db.execute("UPDATE chain SET kept = ? WHERE round = ?", (sha256(name.read_bytes()).hexdigest(), round))
            model = load_file(name).get("after/DS>LD") if name.stat().st_size > 99 else None
            if model is not None:
                db.execute("UPDATE digests SET model = ? WHERE round = ?", (model_digest(model), round))
        if key is None:
            for table in ("chain", "closing"):
                db.execute(f"UPDATE {table} SET {UNSIGNED}")
            db.execute("DELETE FROM signatures")
            db.execute("DELETE FROM keys")
    if query(folder, "SELECT 1 FROM chain WHERE head IS NOT NULL"):
        chain_again(folder, key)


def every_case() -> Iterator[Any]:
    """Every third case by one kind of person in the default suite, in turn; all by all three where slow tests run."""
    for number, what in enumerate(CASES):
        for at, kind in enumerate(KINDS):
            slow = () if number % (3 * len(KINDS)) == 3 * at else pytest.mark.slow
            yield pytest.param(what, kind, marks=slow, id=f"{what}-{kind}")


def sentence(what: str, kind: str, missed: str) -> str:
    """Return the sentence of the page by which these looks may find nothing."""
    if CASES[what].careless == "VHKRTD" and kind != "forger":
        beside = {"a value found out later": LATE, **dict.fromkeys(COSTS, COST)}
        return beside.get(what, UNUSED)
    fitting = [looks for who, looks in ALLOWED if who == kind and set(missed) <= set(looks)]
    return ALLOWED[kind, min(fitting, key=len)]


@pytest.mark.parametrize(("what", "kind"), list(every_case()))
def test_what_each_look_finds(whole: Path, keeping: Path, tmp_path: Path, what: str, kind: str) -> None:
    of = keeping if " kept " in f"{what} " else whole
    folder, keys = Path(shutil.copytree(of, tmp_path / "run")), of.parent / "keys"
    kept = History(of).chain.closing
    edited(folder, CASES[what].edit)
    if kind != "careless":
        covered_up(folder, SigningKey.read(keys / "server") if kind == "server" else None)
    missed = look_at(folder, keys, kept)
    assert sorted(missed) == sorted(getattr(CASES[what], kind)), f"{kind}: {what}"
    assert not missed or sentence(what, kind, missed) in PAGE.read_text()


def changes(folder: Path) -> list[str]:
    return [finding.line() for finding in verify(folder).found.changed]


def test_what_was_promised_is_added_up_again_from_the_ledger(tmp_path: Path) -> None:
    folder = run(described(), out=tmp_path / "run")
    assert (changes(folder), "ε" in verify(folder).found.checked) == ([], True)
    promise = json.loads(History(folder).info["privacy"])
    (name,) = promise["epsilon"]
    for field, value in (("epsilon", {name: 0.05}), ("together", 0.05), ("delta", 0.01)):
        change_fact(folder, "privacy", json.dumps({**promise, field: value}))
        assert any(line.startswith("ε ") for line in changes(folder)), field
        assert record(folder)["verified"]["verdict"] == "MODIFIED"
    change_fact(folder, "privacy", json.dumps(promise))
    (folder / files.LEDGER).unlink()
    assert any("privacy.jsonl is gone" in line for line in changes(folder))


def test_what_was_accepted_at_a_resume_stays_to_be_seen(whole: Path, tmp_path: Path) -> None:
    """Whoever has our own commands close a changed run again hides nothing, however often."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    for edit in (fact("notes", "none"), STATES):
        edited(folder, edit)
        with closing(Store(folder)) as store:
            store.resume(accept=True)
            store.finish()
        found = verify(folder)
        assert (found.code, "closing record" in "\n".join(changes(folder))) == (1, True), found.lines()
        assert "accepted when it continued" in found.found.checked
        assert "closing record" in History(folder).chain.problem
    assert refused(lambda: goes_on(folder))


def test_an_older_copy_is_shown_by_the_final_hash_alone(whole: Path, tmp_path: Path) -> None:
    """A genuine copy of the folder from before is whole; who kept the hash of the later one sees that it is older."""
    older = signed_run(tmp_path / "older", tmp_path / "keys", rounds=2)
    assert verify(older, tmp_path / "keys").code == 0
    found = verify(older, head=History(whole).chain.closing)
    assert found.code == 1
    assert "A folder that is replaced by an older genuine copy" in PAGE.read_text()


def test_a_run_that_goes_on_is_held_to_the_head_of_a_round(whole: Path) -> None:
    heads = dict(query(whole, "SELECT round, head FROM chain"))
    for round, head in heads.items():
        found = verify(whole, prefix=head)
        assert (found.code, found.found.checked["--prefix"].startswith(f"rounds 0 to {round}")) == (0, True)
    assert [verify(whole, head=heads[round]).code for round in (2, 3)] == [1, 1]  # a head is not the end


def test_rounds_after_the_end_that_was_kept_are_found_in_a_run_that_stopped(whole: Path, tmp_path: Path) -> None:
    """Rounds may follow the last checkpoint of a run that did not finish; the record does not show them."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    edited(folder, fact("status", "stopped"))
    closed_again(folder, SigningKey.read(whole.parent / "keys" / "server"))
    kept, before = History(folder).chain.closing, record(folder)
    copied_round(4, chained=False)(folder)
    assert verify(folder).found.checked["rounds after the last checkpoint"].startswith("up to 4,")
    assert [verify(folder, head=kept).code, verify(folder, whole.parent / "keys").code] == [1, 2]
    after = record(folder)
    assert (after["rounds"], after["result"]) == (before["rounds"], before["result"]) == (3, before["result"])


def test_the_table_is_large_enough() -> None:
    assert len(CASES) * len(KINDS) >= 120
