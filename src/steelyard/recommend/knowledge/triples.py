"""Triples from a table: subject, predicate and object on each line, separated by tabs, with or without a header."""

from __future__ import annotations

from pathlib import Path

from steelyard.data.delimited import read_cells
from steelyard.errors import UserError
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.tables import bare, no_empty

EXPECTED = "subject, predicate and object on each line, separated by tabs"
_HEADER = frozenset({"subject", "head", "s", "h"})


def read_triples(path: Path) -> Triples:
    """Read a table of triples, such as the edge lists that go with many data sets; .gz is unpacked."""
    cells = read_cells(path, EXPECTED, "\t")
    if cells.shape[1] != 3:
        raise UserError(f"{path}: {cells.shape[1]} columns; expected {EXPECTED}")
    skip = 1 if str(cells.iloc[0, 0]).lower() in _HEADER else 0
    cells = cells.iloc[skip:]
    no_empty(path, cells, EXPECTED, 1 + skip)
    subjects, predicates, objects = ([bare(text) for text in cells[column].tolist()] for column in range(3))
    return Triples(subjects, predicates, objects)
