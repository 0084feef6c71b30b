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


def joined(path: Path, others: Path) -> dict[str, list[str]]:
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
