"""Readers of features, attributes, graphs and links in delimited files; `rdf` reads graphs in RDF.

Triples as TSV: subject, predicate and object on each line. KGFlex: `item_features` (item, predicate id, object id)
and `predicate_mapping` (chain, id, hops). LinkedDatasets' `map.tsv`: an item's id, then the ids of its features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError, brief, listed
from steelyard.data.tables import read_cells, read_text
from steelyard.recommend.interactions import KNOWN, Codes, column_at, item_column, numbered
from steelyard.recommend.knowledge.graph import Texts, Triples

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Which item has which features, before any filter; ids are text and items may be ones that no data set has."""

    item: Texts
    """The item of each pair."""
    feature: Codes
    """The feature of each pair, as an index into `chains` and `objects`."""
    chains: Sequence[tuple[str, ...]]
    """The predicate chain of each feature."""
    objects: Sequence[str]
    """The object of each feature."""

    def __len__(self) -> int:
        return len(self.feature)


def from_columns(item: Texts, chain: Codes, chains: Sequence[tuple[str, ...]], value: Texts) -> FeatureTable:
    """Number the features of three columns: item, chain (as an index into `chains`) and object."""
    # For speed of start: much of the package reads no tables.
    import pandas as pd

    codes, objects = pd.factorize(np.asarray(value, dtype=object), sort=True)
    packed = np.asarray(chain, dtype=np.int64) * max(len(objects), 1) + codes
    distinct, feature = np.unique(packed, return_inverse=True)
    width = max(len(objects), 1)
    return FeatureTable(
        item=item,
        feature=np.asarray(feature, dtype=np.int64).reshape(-1),
        chains=[chains[index] for index in (distinct // width).tolist()],
        objects=[str(objects[index]) for index in (distinct % width).tolist()],
    )


def renamed(table: FeatureTable, names: Mapping[str, Sequence[str]]) -> FeatureTable:
    """Return the pairs of a table with its items under the names given: none, one or several for each."""
    items = [names.get(str(item), ()) for item in table.item]
    times = np.array([len(each) for each in items], dtype=np.int64)
    fresh = np.array([name for each in items for name in each], dtype=object)
    return replace(table, item=fresh, feature=np.repeat(table.feature, times))


def joined(tables: Sequence[FeatureTable]) -> FeatureTable:
    """Join several tables; a feature that two of them name by the same chain and object is one."""
    features = [pair for table in tables for pair in zip(table.chains, table.objects, strict=True)]
    numbers: dict[tuple[tuple[str, ...], str], int] = {}
    code: NDArray[np.int64] = np.array([numbers.setdefault(pair, len(numbers)) for pair in features], dtype=np.int64)
    starts = np.cumsum([0, *(len(table.chains) for table in tables)])
    shifted = [code[start : start + len(t.chains)][t.feature] for t, start in zip(tables, starts, strict=False)]
    return FeatureTable(
        item=np.concatenate([np.asarray(table.item, dtype=object) for table in tables]),
        feature=np.concatenate(shifted),
        chains=[chain for chain, _ in numbers],
        objects=[value for _, value in numbers],
    )


# Plain attributes of items: genres of MovieLens' movies.dat or u.item, any CSV or TSV.


EXPECTED = "an item and its attributes on each line: movies.dat, u.item, CSV or TSV"
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
"""The genres whose marks are the last 19 columns of MovieLens 100K's u.item, in their order."""
_UNIQUE = ("title", "name", "url", "description", "image")
"""Columns that are one of a kind for each item; they count only if they are asked for."""


@dataclass(frozen=True)
class Column:
    """One attribute: its name, and the index of its column."""

    name: str
    index: int


def read_attributes(path: Path, columns: Mapping[str, str | int] | None = None) -> FeatureTable:
    """Read attributes as features of one hop; the values of a cell are separated by `|`.

    `columns` maps the name of an attribute to its column (a header's name, or a number from 1), and `item` to the
    item's. Without it, all columns of a header but titles and the like count, and what MovieLens is known to have.
    """
    cells = read_cells(path, EXPECTED)
    if _is_u_item(cells) and not columns:
        return _marked(cells)
    header = [str(cell) for cell in cells.iloc[0].tolist()]
    plain = [cell.lower() for cell in header]
    headed = any(name in KNOWN["item"] for name in plain) or (bool(columns) and _names_all(columns or {}, plain))
    rows = cells.iloc[1:] if headed else cells
    item, chosen = _chosen(path, columns or {}, header if headed else [], cells.shape[1])
    owners = rows[item].to_numpy(dtype=object)
    # Empty cells say nothing, but an item must have an id.
    if (owners == "").any():
        line = int(np.flatnonzero(owners == "")[0]) + (2 if headed else 1)
        raise UserError(f"{path}: line {line}: no item id; expected {EXPECTED}")
    found = [_pairs(owners, rows[column.index]) for column in chosen]
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


def _pairs(owners: np.ndarray, cells: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return item and value of every value in a column."""
    parts = cells.str.split("|")
    values = parts.explode().str.strip().to_numpy(dtype=object)
    items = np.repeat(owners, parts.str.len().to_numpy(dtype=np.int64))
    filled = values != ""
    return items[filled], values[filled]


def _chosen(
    path: Path, columns: Mapping[str, str | int], header: list[str], width: int
) -> tuple[int, tuple[Column, ...]]:
    """Return the column of the item and those of the attributes."""
    lower = [name.lower() for name in header]
    item = item_column(lower)
    if columns:
        found = {name: column_at(path, name, column, lower, width) for name, column in columns.items()}
        item = found.pop("item", item)
        chosen = [Column(name, index) for name, index in found.items()]
    elif header:
        chosen = [
            Column(name, i)
            for i, name in enumerate(header)
            if i != item and not any(word in name.lower() for word in _UNIQUE)
        ]
    elif width == 2:
        chosen = [Column("attribute", 1)]
    elif width == 3 and ".dat" in path.suffixes:
        chosen = [Column("genre", 2)]
    else:
        raise UserError(f"{path}: {width} columns without a header; allowed: columns = {{genre = 3}} to say which")
    if not chosen:
        raise UserError(
            f"{path}: no column of attributes; {f'its header has: {listed(header)}' if header else EXPECTED}"
        )
    return item, tuple(chosen)


# Graphs, features and links in delimited files.


TRIPLES = "subject, predicate and object on each line, separated by tabs"
IDS = "item, predicate id and object id on each line, separated by tabs (KGFlex's item_features)"
MAPPING = "predicate chain, predicate id and hops on each line, separated by tabs (KGFlex's predicate_mapping)"
MAP = "an item id and its feature ids on each line, separated by tabs (map.tsv of LinkedDatasets)"
LINKS = "an item and its entity on each line (first and last column), as in mappingLinkedData.tsv"
_SUBJECTS = frozenset({"subject", "head", "s", "h"})
_MOST_HOPS = 9


def read_triples(path: Path) -> Triples:
    """Read a table of triples, such as the edge lists that go with many data sets; .gz is unpacked."""
    cells = read_cells(path, TRIPLES, "\t", columns=3)
    cells, first = _below(cells, _SUBJECTS)
    no_empty(path, cells, TRIPLES, first)
    subjects, predicates, objects = ([bare(text) for text in cells[column].tolist()] for column in range(3))
    return Triples(subjects, predicates, objects)


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
    return read_pairs(path, LINKS, KNOWN["item"])


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


def _below(cells: pd.DataFrame, header: Collection[str]) -> tuple[pd.DataFrame, int]:
    """Return the rows below a header, which names its first column as one of `header`, and the line of the first."""
    return (cells.iloc[1:], 2) if str(cells.iloc[0, 0]).lower() in header else (cells, 1)


def no_empty(path: Path, cells: pd.DataFrame, expected: str, first_line: int = 1) -> None:
    """Refuse a table in which a cell is empty, with the line of the first one."""
    empty = (cells == "").any(axis=1).to_numpy()
    if empty.any():
        line = int(np.flatnonzero(empty)[0])
        raise UserError(f"{path}: line {line + first_line}: an empty cell; expected {expected}")


def read_pairs(path: Path, expected: str, header: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the first and the last column of a table: item and entity, id and label.

    The first line is a header if it names its first column as one of `header`.
    """
    cells = read_cells(path, expected)
    if cells.shape[1] < 2:
        raise UserError(f"{path}: {cells.shape[1]} column; expected {expected}")
    cells, first = _below(cells.iloc[:, [0, -1]], header)
    no_empty(path, cells, expected, first)
    return cells.iloc[:, 0].tolist(), [bare(text) for text in cells.iloc[:, 1].tolist()]


def bare(text: str) -> str:
    """Return an IRI without the angle brackets that some files put around it."""
    return text[1:-1] if text.startswith("<") and text.endswith(">") else text


def read_labels(path: Path) -> Mapping[str, str]:
    """Return the names of entities: a table whose first column is an id and whose last is its name."""
    ids, names = read_pairs(path, "a table of an id and its name on each line")
    return dict(zip(map(bare, ids), names, strict=True))
