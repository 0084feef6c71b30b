"""Who counts most right now: the largest weights of the last round that was stored."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import UserError
from steelyard.runs.schema import connect

SHOWN = 3


@dataclass(frozen=True)
class Heaviest:
    """The clients with the largest weights in one round of the main rule."""

    round: int
    clients: tuple[tuple[str, float], ...]
    """(client, weight), the largest first."""
    cohort: int
    """Clients that were weighed."""


def heaviest(folder: Path, shown: int = SHOWN) -> Heaviest | None:
    """Return who counts most in the last stored round of the main rule; None before any client was weighed."""
    connection = connect(folder, write=False)
    try:
        row = connection.execute(
            "SELECT federation, max(round) FROM updates WHERE federation = (SELECT min(id) FROM federations)"
        ).fetchone()
        rows = connection.execute(
            "SELECT c.name, u.weight FROM updates u JOIN clients c ON c.id = u.client "
            "WHERE u.federation = ? AND u.round = ? AND u.weight IS NOT NULL ORDER BY u.weight DESC, c.name",
            row,
        ).fetchall()
    except sqlite3.DatabaseError as error:
        raise UserError(f"{folder}: the run's database cannot be read: {error}") from error
    finally:
        connection.close()
    if not rows:
        return None
    return Heaviest(int(row[1]), tuple((str(name), float(weight)) for name, weight in rows[:shown]), len(rows))
