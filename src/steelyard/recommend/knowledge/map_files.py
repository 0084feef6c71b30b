"""LinkedDatasets' `map.tsv`: an item's id, then the ids of its features, on each line."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from steelyard.data.delimited import read_text
from steelyard.errors import UserError, brief
from steelyard.recommend.knowledge.table import FeatureTable, from_columns

EXPECTED = "an item id and its feature ids on each line, separated by tabs (map.tsv of LinkedDatasets)"
CHAIN = ("feature",)


def read_map(path: Path) -> FeatureTable:
    """Read a map file: features of one hop that have numbers for names; lines of the same item are joined."""
    lines = [line.split("\t") for line in read_text(path, EXPECTED).splitlines()]
    for number, cells in enumerate(lines, 1):
        if not cells[0].strip() and len(cells) > 1:
            raise UserError(f"{path}: line {number}: begins with {brief(cells[1])} after no item; expected {EXPECTED}")
    pairs = [(cells[0].strip(), cell.strip()) for cells in lines for cell in cells[1:] if cell.strip()]
    if not pairs:
        raise UserError(f"{path}: no item has a feature; expected {EXPECTED}")
    item, feature = zip(*pairs, strict=True)
    return from_columns(list(item), np.zeros(len(item), dtype=np.int64), [CHAIN], list(feature))
