"""What the readers of graphs and features ask of a table of text: no empty cells, pairs of ids, names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steelyard.data.delimited import read_cells
from steelyard.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


def no_empty(path: Path, cells: pd.DataFrame, expected: str, first_line: int = 1) -> None:
    """Refuse a table in which a cell is empty, with the line of the first one."""
    empty = (cells == "").any(axis=1).to_numpy()
    if empty.any():
        line = int(np.flatnonzero(empty)[0])
        raise UserError(f"{path}: line {line + first_line}: an empty cell; expected {expected}")


def read_pairs(path: Path, expected: str, header: frozenset[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Return the first and the last column of a table: item and entity, id and label.

    The first line is a header if it names its first column as one of `header`, or `name:type` as RecBole does.
    """
    cells = read_cells(path, expected)
    if cells.shape[1] < 2:
        raise UserError(f"{path}: {cells.shape[1]} column; expected {expected}")
    head = str(cells.iloc[0, 0])
    skip = 1 if head.endswith(":token") or head.lower() in header else 0
    cells = cells.iloc[skip:, [0, -1]]
    no_empty(path, cells, expected, 1 + skip)
    return cells.iloc[:, 0].tolist(), [bare(text) for text in cells.iloc[:, 1].tolist()]


def bare(text: str) -> str:
    """Return an IRI without the angle brackets that some files put around it."""
    return text[1:-1] if text.startswith("<") and text.endswith(">") else text


def read_labels(path: Path) -> Mapping[str, str]:
    """Return the names of entities: a table whose first column is an id and whose last is its name."""
    ids, names = read_pairs(path, "a table of an id and its name on each line")
    return dict(zip(map(bare, ids), names, strict=True))
