"""Everything that a run folder holds and that must not depend on whether the run was interrupted."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

QUERIES = {
    "federations": "SELECT name, rule, seed, settings FROM federations ORDER BY name",
    "rounds": (
        "SELECT f.name, r.round, accuracy, priority, tried, tests, cohort, answered, kept_old, zero_criteria, "
        "zero_scores, loss, server_accuracy, server_macro_f1, server_metrics "  # all but seconds
        "FROM rounds r JOIN federations f ON f.id = r.federation ORDER BY f.name, r.round"
    ),
    "updates": (
        "SELECT f.name, u.round, c.name, samples, loss, raw, normalised, score, weight, bytes, failure FROM updates u "
        "JOIN federations f ON f.id = u.federation JOIN clients c ON c.id = u.client ORDER BY f.name, u.round, c.name"
    ),
    "evaluations": (
        "SELECT f.name, e.round, c.name, samples, score, loss, metrics FROM evaluations e "
        "JOIN federations f ON f.id = e.federation JOIN clients c ON c.id = e.client ORDER BY f.name, e.round, c.name"
    ),
    "samples": (
        "SELECT f.name, s.round, hits, count FROM samples s JOIN federations f ON f.id = s.federation "
        "ORDER BY f.name, s.round"
    ),
}


def query(folder: Path, text: str) -> list[tuple[Any, ...]]:
    """Ask a run's database."""
    connection = sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


def rows(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of a run by table, with names in place of numbers and without the seconds."""
    return {table: query(folder, text) for table, text in QUERIES.items()}


def last_round(folder: Path) -> int:
    """Return the last round that has rows."""
    return int(query(folder, "SELECT MAX(round) FROM rounds")[0][0])


def checkpoint(folder: Path) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]]:
    """Return (round, states as JSON, tensors) of a run's one checkpoint."""
    ((round, file, states),) = query(folder, "SELECT round, file, states FROM checkpoints")
    return int(round), json.loads(states), load_file(folder / "checkpoints" / file)


def assert_same_bits(found: Path, expected: Path) -> None:
    """Hold one run folder against another: every row, every state, every bit of every model."""
    ours, theirs = rows(found), rows(expected)
    for table in QUERIES:
        assert ours[table] == theirs[table], f"{table} differ"
    (round, states, tensors), (wanted_round, wanted_states, wanted) = checkpoint(found), checkpoint(expected)
    assert round == wanted_round
    assert states == wanted_states
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert [path.name for path in (found / "checkpoints").iterdir()] == [f"round-{round:06d}.safetensors"]
    assert query(found, "SELECT value FROM info WHERE key = 'status'") == [("finished",)]
