"""Everything that a run folder holds and that must not depend on whether the run was interrupted."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from steelyard.proof.signing import SigningKey
from steelyard.runs.chain import Records
from steelyard.runs.facts import write_closing
from steelyard.runs.history import History

QUERIES = {
    "federations": "SELECT name, rule, seed, settings FROM federations ORDER BY name",
    "rounds": (
        "SELECT f.name, r.round, accuracy, priority, tried, tests, cohort, answered, kept_old, zero_criteria, "
        "zero_scores, loss, server_accuracy, server_macro_f1, server_metrics, simulated "  # all but seconds
        "FROM rounds r JOIN federations f ON f.id = r.federation ORDER BY f.name, r.round"
    ),
    "failures": (
        "SELECT f.name, l.round, c.name, reason FROM failures l "
        "JOIN federations f ON f.id = l.federation JOIN clients c ON c.id = l.client ORDER BY f.name, l.round, c.name"
    ),
    "digests": (
        "SELECT f.name, d.round, model, updates FROM digests d JOIN federations f ON f.id = d.federation "
        "ORDER BY f.name, d.round"
    ),
    "chain": "SELECT round, head FROM chain ORDER BY round",
    "samples": (
        "SELECT f.name, s.round, hits, count FROM samples s JOIN federations f ON f.id = s.federation "
        "ORDER BY f.name, s.round"
    ),
}

UPDATES = (
    "SELECT f.name, u.round, clients, samples, bytes, loss, score, weight, raw, normalised FROM updates u "
    "JOIN federations f ON f.id = u.federation ORDER BY f.name, u.round"
)
EVALUATIONS = (
    "SELECT f.name, e.round, clients, samples, score, loss, metrics, figures FROM evaluations e "
    "JOIN federations f ON f.id = e.federation ORDER BY f.name, e.round"
)


def change(folder: Path, statement: str, *values: object) -> None:
    """Change rows of a run's database, as whoever tampers with it does; the statement must meet some."""
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        assert connection.execute(statement, values).rowcount > 0
    connection.close()


def query(folder: Path, text: str) -> list[tuple[Any, ...]]:
    """Ask a run's database."""
    connection = sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


def rows(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of a run by table, with names in place of numbers and without the seconds."""
    names = dict(query(folder, "SELECT id, name FROM clients"))
    packed = {
        table: [
            (*row[:2], [names[key] for key in np.frombuffer(row[2], "<i4")], *row[3:]) for row in query(folder, text)
        ]
        for table, text in (("updates", UPDATES), ("evaluations", EVALUATIONS))
    }
    return {**{table: query(folder, text) for table, text in QUERIES.items()}, **packed}


def chain_again(folder: Path, signer: SigningKey | None = None) -> None:
    """Compute the heads of a run and what closes it again after its rows were changed by hand.

    Without a signer signatures stay as they are; the closing record has none then.
    """
    ((last,),) = query(folder, "SELECT MAX(round) FROM chain WHERE head IS NOT NULL")
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        Records(connection).extend(-1, last, signer)
        connection.execute("UPDATE checkpoints SET head = (SELECT head FROM chain c WHERE c.round = checkpoints.round)")
    connection.close()
    closed_again(folder, signer)


def closed_again(folder: Path, signer: SigningKey | None = None) -> None:
    """Close a run again after what stands beside its rounds was changed by hand."""
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        connection.execute("DELETE FROM closing")
        write_closing(connection, signer)
    connection.close()


def change_fact(folder: Path, key: str, value: str) -> None:
    """Let a run say something else of itself, as if it had been written so."""
    connection = sqlite3.connect(folder / "run.sqlite")
    with connection:
        connection.execute("INSERT OR REPLACE INTO info VALUES (?, ?)", (key, value))
    connection.close()
    closed_again(folder)


def models(folder: Path) -> dict[str, torch.Tensor]:
    """Return the models that a run's last checkpoint holds, by federation."""
    return {name: state.parameters for name, state in History(folder).last_checkpoint()[0].items()}


def last_round(folder: Path) -> int:
    """Return the last round that has rows."""
    return int(query(folder, "SELECT MAX(round) FROM rounds")[0][0])


def checkpoint(folder: Path) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]]:
    """Return (round, states as JSON, tensors) of a run's last checkpoint."""
    (round, file, states), *_ = query(folder, "SELECT round, file, states FROM checkpoints ORDER BY round DESC")
    return int(round), json.loads(states), load_file(folder / "checkpoints" / file)


def assert_same_bits(found: Path, expected: Path) -> None:
    """Hold one run folder against another: every row, every state, every bit of every model."""
    ours, theirs = rows(found), rows(expected)
    for table in ours:
        assert ours[table] == theirs[table], f"{table} differ"
    (round, states, tensors), (wanted_round, wanted_states, wanted) = checkpoint(found), checkpoint(expected)
    assert round == wanted_round
    assert states == wanted_states
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert [path.name for path in (found / "checkpoints").iterdir()] == [f"round-{round:06d}.safetensors"]
    assert query(found, "SELECT value FROM info WHERE key = 'status'") == [("finished",)]
    assert query(found, "SELECT COUNT(*) FROM checkpoints") == [(1,)]
    # At rest a run is one database file.
    assert sorted(path.name for path in found.glob("run.sqlite*")) == ["run.sqlite"]
