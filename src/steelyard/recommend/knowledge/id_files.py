"""KGFlex's id files: `item_features` (item, predicate id, object id) and `predicate_mapping` (chain, id, hops)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from steelyard.data.delimited import read_cells
from steelyard.errors import UserError, brief
from steelyard.recommend.interactions import numbered
from steelyard.recommend.knowledge.table import FeatureTable, from_columns
from steelyard.recommend.knowledge.tables import bare, no_empty

EXPECTED = "item, predicate id and object id on each line, separated by tabs (KGFlex's item_features)"
EXPECTED_NAMES = "predicate chain, predicate id and hops on each line, separated by tabs (KGFlex's predicate_mapping)"
JOIN = "~"
MOST_HOPS = 9


def read_ids(path: Path, predicates: Path) -> FeatureTable:
    """Read both files; objects keep their ids unless a table of names is given beside."""
    chains = read_mapping(predicates)
    cells = read_cells(path, EXPECTED, "\t")
    if cells.shape[1] != 3:
        raise UserError(f"{path}: {cells.shape[1]} columns; expected {EXPECTED}")
    no_empty(path, cells, EXPECTED)
    ids = list(chains)
    chain = numbered(cells[1].to_numpy(dtype=object), ids)
    if (chain < 0).any():
        line = int(np.flatnonzero(chain < 0)[0])
        got = brief(str(cells.iloc[line, 1]))
        raise UserError(f"{path}: line {line + 1}: predicate {got} is not in {predicates}; allowed: its ids")
    return from_columns(cells[0].to_numpy(dtype=object), chain, list(chains.values()), cells[2].to_numpy(dtype=object))


def read_mapping(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the predicate chain of each predicate id; `~` joins the hops."""
    cells = read_cells(path, EXPECTED_NAMES, "\t")
    if cells.shape[1] != 3:
        raise UserError(f"{path}: {cells.shape[1]} columns; expected {EXPECTED_NAMES}")
    no_empty(path, cells, EXPECTED_NAMES)
    found: dict[str, tuple[str, ...]] = {}
    for line, (text, name, hops) in enumerate(cells.itertuples(index=False), 1):
        chain = tuple(bare(step) for step in str(text).split(JOIN))
        if hops != str(len(chain)) or len(chain) > MOST_HOPS or not all(chain):
            got = f"hops is {brief(str(hops))} for a chain of {len(chain)}"
            raise UserError(f"{path}: line {line}: {got}; expected {EXPECTED_NAMES}")
        if name in found:
            raise UserError(f"{path}: line {line}: id {brief(str(name))} stands there twice; allowed: each id once")
        found[str(name)] = chain
    return found
