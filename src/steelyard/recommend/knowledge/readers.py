"""Readers of graphs, features and links in delimited files; `rdf` reads graphs in RDF, `attributes` plain attributes.

Triples as TSV: subject, predicate and object on each line. RecBole: `.kg` holds head, relation and tail, `.link` the
entity of each item. KGFlex's ids: `item_features` (item, predicate id, object id) and `predicate_mapping` (chain, id,
hops). LinkedDatasets' `map.tsv`: an item's id, then the ids of its features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steelyard.base.errors import UserError, brief, listed
from steelyard.data.tables import read_cells, read_text
from steelyard.recommend.interactions import numbered
from steelyard.recommend.knowledge.graph import Triples
from steelyard.recommend.knowledge.table import FeatureTable, from_columns
from steelyard.recommend.reading import KNOWN

if TYPE_CHECKING:
    import pandas as pd

TRIPLES = "subject, predicate and object on each line, separated by tabs"
KG = "a RecBole .kg file: head_id:token, relation_id:token and tail_id:token in its first line"
IDS = "item, predicate id and object id on each line, separated by tabs (KGFlex's item_features)"
MAPPING = "predicate chain, predicate id and hops on each line, separated by tabs (KGFlex's predicate_mapping)"
MAP = "an item id and its feature ids on each line, separated by tabs (map.tsv of LinkedDatasets)"
LINKS = "an item and its entity on each line (first and last column), as in mappingLinkedData.tsv or a .link file"
_SUBJECTS = frozenset({"subject", "head", "s", "h"})
_KG_COLUMNS = ("head_id", "relation_id", "tail_id")
_MOST_HOPS = 9


def read_triples(path: Path) -> Triples:
    """Read a table of triples, such as the edge lists that go with many data sets; .gz is unpacked."""
    cells = read_cells(path, TRIPLES, "\t", columns=3)
    skip = 1 if str(cells.iloc[0, 0]).lower() in _SUBJECTS else 0
    cells = cells.iloc[skip:]
    no_empty(path, cells, TRIPLES, 1 + skip)
    subjects, predicates, objects = ([bare(text) for text in cells[column].tolist()] for column in range(3))
    return Triples(subjects, predicates, objects)


def read_kg(path: Path) -> Triples:
    """Read a `.kg` file; its first line says which column is which."""
    cells = read_cells(path, KG, "\t")
    header = [str(cell).split(":")[0] for cell in cells.iloc[0].tolist()]
    if sorted(set(header) & set(_KG_COLUMNS)) != sorted(_KG_COLUMNS) or len(set(header)) != len(header):
        raise UserError(f"{path}: line 1 names {listed(header)}; expected {KG}")
    cells = cells.iloc[1:]
    no_empty(path, cells, KG, 2)
    return Triples(*(cells[header.index(name)].tolist() for name in _KG_COLUMNS))


def link_file(path: Path) -> Path | None:
    """Return the `.link` file that lies beside a `.kg` file, plain or packed; None if there is none."""
    stem = path.name.removesuffix(".gz").removesuffix(".kg")
    candidates = [path.with_name(f"{stem}.link{suffix}") for suffix in ("", ".gz")]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read_map(path: Path) -> FeatureTable:
    """Read a map file: features of one hop that have numbers for names; lines of the same item are joined."""
    lines = [line.split("\t") for line in read_text(path, MAP).splitlines()]
    for number, cells in enumerate(lines, 1):
        if not cells[0].strip() and len(cells) > 1:
            raise UserError(f"{path}: line {number}: begins with {brief(cells[1])} after no item; expected {MAP}")
    pairs = [(cells[0].strip(), cell.strip()) for cells in lines for cell in cells[1:] if cell.strip()]
    if not pairs:
        raise UserError(f"{path}: no item has a feature; expected {MAP}")
    item, feature = zip(*pairs, strict=True)
    return from_columns(list(item), np.zeros(len(item), dtype=np.int64), [("feature",)], list(feature))


def read_ids(path: Path, predicates: Path) -> FeatureTable:
    """Read both files; objects keep their ids unless a table of names is given beside."""
    chains = read_mapping(predicates)
    cells = read_cells(path, IDS, "\t", columns=3)
    no_empty(path, cells, IDS)
    ids = list(chains)
    chain = numbered(cells[1].to_numpy(dtype=object), ids)
    if (chain < 0).any():
        line = int(np.flatnonzero(chain < 0)[0])
        got = brief(str(cells.iloc[line, 1]))
        raise UserError(f"{path}: line {line + 1}: predicate {got} is not in {predicates}; allowed: its ids")
    return from_columns(cells[0].to_numpy(dtype=object), chain, list(chains.values()), cells[2].to_numpy(dtype=object))


def read_mapping(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the predicate chain of each predicate id; `~` joins the hops."""
    cells = read_cells(path, MAPPING, "\t", columns=3)
    no_empty(path, cells, MAPPING)
    found: dict[str, tuple[str, ...]] = {}
    for line, (text, name, hops) in enumerate(cells.itertuples(index=False), 1):
        chain = tuple(bare(step) for step in str(text).split("~"))
        if hops != str(len(chain)) or len(chain) > _MOST_HOPS or not all(chain):
            got = f"hops is {brief(str(hops))} for a chain of {len(chain)}"
            raise UserError(f"{path}: line {line}: {got}; expected {MAPPING}")
        if name in found:
            raise UserError(f"{path}: line {line}: id {brief(str(name))} stands there twice; allowed: each id once")
        found[str(name)] = chain
    return found


def read_links(path: Path) -> tuple[list[str], list[str]]:
    """Return the items and entities of a table; columns between the two, such as a title, are passed over.

    An item may have several entities and an entity several items.
    """
    return read_pairs(path, LINKS, frozenset(KNOWN["item"]))


def same_items(path: Path, others: Path) -> dict[str, list[str]]:
    """Return for each item of another data set the items that are the same entity.

    `path` links the items, `others` those of the other data set; use it to read what is known of the latter.
    """
    of_entity: dict[str, list[str]] = {}
    for item, entity in zip(*read_links(path), strict=True):
        of_entity.setdefault(entity, []).append(item)
    found: dict[str, dict[str, None]] = {}
    for other, entity in zip(*read_links(others), strict=True):
        found.setdefault(other, {}).update(dict.fromkeys(of_entity.get(entity, ())))
    return {other: list(items) for other, items in found.items()}


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
