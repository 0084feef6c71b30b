"""Which entity of the graph an item is: a table of item and entity, or RecBole's `.link`."""

from __future__ import annotations

from pathlib import Path

from steelyard.recommend.knowledge.tables import read_pairs
from steelyard.recommend.reading import KNOWN

EXPECTED = "an item and its entity on each line (first and last column), as in mappingLinkedData.tsv or a .link file"


def read_links(path: Path) -> tuple[list[str], list[str]]:
    """Return the items and entities of a table; columns between the two, such as a title, are passed over.

    An item may have several entities and an entity several items.
    """
    return read_pairs(path, EXPECTED, frozenset(KNOWN["item"]))
