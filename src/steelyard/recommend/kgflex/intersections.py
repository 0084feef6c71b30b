"""F_u ∩ F_i of many users and items at once, ragged: for each pair the entries of the selection that it meets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steelyard.recommend.interactions import Codes
from steelyard.recommend.kgflex.selection import Selection
from steelyard.recommend.knowledge.features import ItemFeatures
from steelyard.recommend.sampling import Items, stretches


@dataclass(frozen=True, eq=False)
class Intersections:
    """The meeting features of pairs in CSR form: pair j has entries[starts[j] : starts[j + 1]], ascending."""

    starts: Codes
    entries: Items
    """Positions in the block's part of the selection: 0 is the first entry of its first user."""
    rows: Items
    """For each entry, the position of its user in the block."""


class Block:
    """Some users whose features are looked up together; a table of users × features says where each one's lie."""

    def __init__(self, selection: Selection, users: Codes, features: ItemFeatures) -> None:
        self.users, self.sizes = users, selection.sizes[users]
        self.own = stretches(selection.starts[users], self.sizes)
        """The entries of the selection that are these users', in their order."""
        self.owners = np.repeat(np.arange(len(users), dtype=np.int32), self.sizes)
        self._width = features.features
        self._index, self._items = features.matrix.indices, features.matrix.indptr.astype(np.int64)
        self._counts = features.per_item()
        self._where = np.full(len(users) * self._width, -1, dtype=np.int32)
        cells = self.owners.astype(np.int64) * self._width + selection.features[self.own]
        self._where[cells] = np.arange(len(self.own), dtype=np.int32)

    def meet(self, rows: Codes, items: Items) -> Intersections:
        """Return F_u ∩ F_i of pairs, each of a user by her position in the block and an item."""
        counts = self._counts[items]
        pair = np.repeat(np.arange(len(items), dtype=np.int32), counts)
        found = self._where[np.repeat(rows * self._width, counts) + self._index[stretches(self._items[items], counts)]]
        met = np.flatnonzero(found >= 0)
        pair = pair[met]
        starts = np.concatenate([[0], np.cumsum(np.bincount(pair, minlength=len(items)))])
        return Intersections(starts, found[met], rows.astype(np.int32)[pair])
