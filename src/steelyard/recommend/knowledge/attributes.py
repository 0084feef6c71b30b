"""Plain attributes of items as features: genres of MovieLens' movies.dat or u.item, RecBole's .item, any CSV or TSV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steelyard.base.errors import UserError, brief, listed
from steelyard.data.tables import read_cells
from steelyard.recommend.interactions import Codes
from steelyard.recommend.knowledge.table import FeatureTable, from_columns
from steelyard.recommend.reading import KNOWN

if TYPE_CHECKING:
    import pandas as pd

EXPECTED = "an item and its attributes on each line: movies.dat, u.item, .item, CSV or TSV"
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
"""The genres whose marks are the last 19 columns of MovieLens 100K's u.item, in their order."""
_UNIQUE = ("title", "name", "url", "description", "image")
"""Columns that are one of a kind for each item; they count only if they are asked for."""


@dataclass(frozen=True)
class Column:
    """One attribute: its name, the index of its column, and what stands between several values of a cell."""

    name: str
    index: int
    between: str | None = "|"
    """None: blanks, as in RecBole's token_seq."""


def read_attributes(path: Path, columns: Mapping[str, str | int] | None = None) -> FeatureTable:
    """Read attributes as features of one hop; the values of a cell are separated by `|`.

    `columns` maps the name of an attribute to its column (a header's name, or a number from 1), and `item` to the
    item's. Without it, all columns of a header but titles and the like count, and what MovieLens is known to have.
    """
    cells = read_cells(path, EXPECTED)
    if _is_u_item(cells) and not columns:
        return _marked(cells)
    header = [str(cell) for cell in cells.iloc[0].tolist()]
    plain = [cell.split(":")[0].strip().lower() for cell in header]
    headed = any(name in KNOWN["item"] for name in plain) or (bool(columns) and _names_all(columns or {}, plain))
    rows = cells.iloc[1:] if headed else cells
    item, chosen = _chosen(path, columns or {}, header if headed else [], cells.shape[1])
    owners = rows[item].to_numpy(dtype=object)
    # Empty cells say nothing, but an item must have an id.
    if (owners == "").any():
        line = int(np.flatnonzero(owners == "")[0]) + (2 if headed else 1)
        raise UserError(f"{path}: line {line}: no item id; expected {EXPECTED}")
    found = [_pairs(owners, rows[column.index], column.between) for column in chosen]
    chain: Codes = np.repeat(np.arange(len(chosen)), [len(values) for _, values in found])
    return from_columns(
        np.concatenate([items for items, _ in found]),
        chain,
        [(column.name,) for column in chosen],
        np.concatenate([values for _, values in found]),
    )


def _names_all(columns: Mapping[str, str | int], plain: list[str]) -> bool:
    named = [str(column).lower() for column in columns.values() if not str(column).isdigit()]
    return bool(named) and all(name in plain for name in named)


def _is_u_item(cells: pd.DataFrame) -> bool:
    return cells.shape[1] == 5 + len(GENRES) and bool(cells.iloc[:, 5:].isin(["0", "1"]).all(axis=None))


def _marked(cells: pd.DataFrame) -> FeatureTable:
    rows, genres = np.nonzero(cells.iloc[:, 5:].to_numpy(dtype=object) == "1")
    values = np.array(GENRES, dtype=object)[genres]
    return from_columns(
        cells[0].to_numpy(dtype=object)[rows], np.zeros(len(rows), dtype=np.int64), [("genre",)], values
    )


def _pairs(owners: np.ndarray, cells: Any, between: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return item and value of every value in a column."""
    parts = cells.str.split(between).explode()
    counts = cells.str.split(between).str.len().to_numpy(dtype=np.int64)
    values = parts.fillna("").str.strip().to_numpy(dtype=object)
    items = np.repeat(owners, np.maximum(counts, 1))
    filled = values != ""
    return items[filled], values[filled]


def _chosen(
    path: Path, columns: Mapping[str, str | int], header: list[str], width: int
) -> tuple[int, tuple[Column, ...]]:
    """Return the column of the item and those of the attributes."""
    plain = [cell.split(":")[0].strip() for cell in header]
    lower = [name.lower() for name in plain]
    item = next((i for i, name in enumerate(lower) if name in KNOWN["item"]), 0)
    if columns:
        found = {name: _index(path, name, column, lower, width) for name, column in columns.items()}
        item = found.pop("item", item)
        chosen = [Column(name, index, _between(header, index)) for name, index in found.items()]
    elif header:
        chosen = [Column(plain[i], i, _between(header, i)) for i in range(width) if i != item and _filled(header[i])]
    elif width == 2:
        chosen = [Column("attribute", 1)]
    elif width == 3 and ".dat" in path.suffixes:
        chosen = [Column("genre", 2)]
    else:
        raise UserError(f"{path}: {width} columns without a header; allowed: columns = {{genre = 3}} to say which")
    if not chosen:
        raise UserError(f"{path}: no column of attributes; {f'its header has: {listed(plain)}' if plain else EXPECTED}")
    return item, tuple(chosen)


def _filled(cell: str) -> bool:
    name, _, kind = cell.lower().partition(":")
    return not kind.startswith("float") and not any(word in name for word in _UNIQUE)


def _between(header: list[str], index: int) -> str | None:
    return None if header and header[index].endswith(":token_seq") else "|"


def _index(path: Path, name: str, column: str | int, header: list[str], width: int) -> int:
    if isinstance(column, str) and column.isascii() and column.isdigit() and len(column) < 9:
        column = int(column)
    if isinstance(column, str) and column.lower() in header:
        return header.index(column.lower())
    if isinstance(column, int) and 1 <= column <= width:
        return column - 1
    known = f"its header has: {listed(header)}" if header else f"allowed: a number from 1 to {width}"
    raise UserError(f"{path}: no column {brief(str(column))} for {name}; {known}")
