"""What a run's database holds of its clients' contributions: read as arrays, and added after the run has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.base.errors import UserError
from steelyard.rounds.contributions import RoundValues
from steelyard.runs.columns import KEYS, WHOLE, unpack
from steelyard.runs.opening import reading, unreadable
from steelyard.runs.typed import known

_COLUMNS = (
    "federation", "round", "measure", "method", "source", "clients", "added", "error", "sizes", "before", "after",
)  # fmt: skip
RETRAINED = "retrained"
"""The source of values for which coalitions were trained."""
SOURCES: Mapping[str, str] = {
    "run": "measured while the run went",
    "kept": "from the updates that the run kept",
    "replay": "from a replay of the run, to the same models",
    "rounded": "from kept updates rounded to bfloat16: approximate",
    RETRAINED: "from models trained again for every coalition",
}
"""What values can be made from, the best first; the database holds the word, readers are shown the sentence."""


@dataclass(frozen=True, eq=False)
class StoredValues:
    """The values of one round of one federation as the database holds them."""

    rule: str
    seed: int
    round: int
    source: str
    found: RoundValues


def read_values(folder: Path) -> list[StoredValues]:
    """Return all values that a run's folder holds, by federation and round; none where nothing was measured."""
    with reading(folder) as connection:
        rows = connection.rows("contributions", _COLUMNS, "ORDER BY federation, round")
        federations = connection.federations()
        names: dict[int, str] = dict(connection.rows("clients", ("id", "name")))
        return [_stored(folder, row, federations, names) for row in rows]


def _stored(
    folder: Path, row: tuple[object, ...], federations: Mapping[int, tuple[str, int]], names: Mapping[int, str]
) -> StoredValues:
    key, round, measure, method, source, clients, added, error, sizes, before, after = row
    assert isinstance(key, int)
    assert isinstance(round, int)
    assert isinstance(clients, bytes)
    assert isinstance(added, bytes)
    assert isinstance(error, bytes)
    assert isinstance(sizes, bytes)
    assert isinstance(before, float)
    assert isinstance(after, float)
    count, groups = len(clients) // 4, len(sizes) // 8
    try:
        keys = unpack([clients], [count], KEYS).tolist()
        values = np.nan_to_num(unpack([added], [count], width=1 + groups))
        errors, rows = unpack([error], [count]), unpack([sizes], [groups], WHOLE)
        if not rows.sum():
            raise ValueError("no test rows")
    except ValueError as problem:
        raise unreadable(folder, f"contributions of round {round}: {problem}") from problem
    found = RoundValues(
        *(str(measure), str(method), tuple(known(names, key, "client") for key in keys)),
        *(values, errors, rows, before, after),
    )
    return StoredValues(*known(federations, key, "federation"), round, str(source), found)


def add_values(folder: Path, values: Mapping[tuple[str, int], Sequence[RoundValues]], source: str) -> str:
    """Write values, by name of the federation and round, into the folder of a run; say why where that is not possible.

    A run that another process writes, or one on a medium that cannot be written, stays as it is.
    """
    # For speed of start: readers of values need no torch.
    from steelyard.runs.store import Store

    try:
        store = Store(folder)
    except UserError as error:
        return str(error)
    with closing(store):
        store.value(values, source)
    return ""
