"""RecBole's knowledge graphs: `.kg` holds head, relation and tail, `.link` the entity of each item."""

from __future__ import annotations

from pathlib import Path

from steelyard.data.delimited import read_cells
from steelyard.errors import UserError, listed
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.tables import no_empty

COLUMNS = ("head_id", "relation_id", "tail_id")
EXPECTED = "a RecBole .kg file: head_id:token, relation_id:token and tail_id:token in its first line"


def read_kg(path: Path) -> Triples:
    """Read a `.kg` file; its first line says which column is which."""
    cells = read_cells(path, EXPECTED, "\t")
    header = [str(cell).split(":")[0] for cell in cells.iloc[0].tolist()]
    if sorted(set(header) & set(COLUMNS)) != sorted(COLUMNS) or len(set(header)) != len(header):
        raise UserError(f"{path}: line 1 names {listed(header)}; expected {EXPECTED}")
    cells = cells.iloc[1:]
    no_empty(path, cells, EXPECTED, 2)
    return Triples(*(cells[header.index(name)].tolist() for name in COLUMNS))


def beside(path: Path) -> Path | None:
    """Return the `.link` file that lies beside a `.kg` file, plain or packed; None if there is none."""
    stem = path.name.removesuffix(".gz").removesuffix(".kg")
    candidates = [path.with_name(f"{stem}.link{suffix}") for suffix in ("", ".gz")]
    return next((candidate for candidate in candidates if candidate.is_file()), None)
