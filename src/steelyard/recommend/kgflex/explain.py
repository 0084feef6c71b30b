"""Why an item is in a user's list, and whether her list keeps what drives her choices (thesis §6.6.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.recommend.interactions import Codes, Flags
from steelyard.recommend.kgflex.model import Knowledge, feature_weights
from steelyard.recommend.kgflex.selection import Selection, select
from steelyard.recommend.knowledge.features import Csr
from steelyard.recommend.ranking import Floats
from steelyard.recommend.sampling import Histories
from steelyard.recommend.settings import KgflexSettings
from steelyard.recommend.sparse import Floats32


@dataclass(frozen=True)
class Reason:
    """One feature of a score: r̂_ui is the sum of all reasons' parts."""

    feature: int
    gain: float
    """k_uf: how much the feature tells the user's items from others."""
    personal: float
    """p^u_f · g_f: what the feature means to her."""
    common: float
    """b_f: what it means to everybody."""
    part: float
    """k_uf (p^u_f · g_f + b_f)"""
    share: float
    """The part over the sum of all parts' sizes: negative where the feature speaks against the item."""


def reasons(table: Floats32, views: Floats32, knowledge: Knowledge, user: int, item: int) -> list[Reason]:
    """Return the features that made r̂_ui, those that say most first; empty where user and item share none."""
    selection = knowledge.selection
    mine = selection.entries(user)
    met = np.flatnonzero(np.isin(selection.features[mine], knowledge.items.of(item))) + mine.start
    parts = feature_weights(table, views, selection, met).astype(np.float64)
    rows = table[selection.features[met]].astype(np.float64)
    personal = np.einsum("ef,ef->e", views[met].astype(np.float64), rows[:, :-1])
    whole = float(np.abs(parts).sum()) or 1.0
    order = np.argsort(-np.abs(parts), kind="stable")
    return [
        Reason(
            feature=int(selection.features[met[at]]),
            gain=float(selection.weights[met[at]]),
            personal=float(personal[at]),
            common=float(rows[at, -1]),
            part=float(parts[at]),
            share=float(parts[at]) / whole,
        )
        for at in order.tolist()
    ]


def ranks(selection: Selection) -> Codes:
    """Return the rank of each entry among its user's, the most informative feature first, from 0."""
    order = np.lexsort((-selection.weights, selection.owners))
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.arange(len(order)) - np.repeat(selection.starts[:-1], selection.sizes)
    return found


def shown(knowledge: Knowledge, lists: Codes) -> Flags:
    """Return for each entry of the selection whether an item of its user's list has the feature."""
    return _among(
        knowledge.selection, _listed(lists, knowledge.items.items) @ knowledge.items.matrix.astype(np.float32)
    )


def informative_again(knowledge: Knowledge, after: Selection) -> Flags:
    """Return for each entry of the selection whether its user's list, taken as her items, would select it too."""
    return _among(knowledge.selection, after.matrix())


def after_lists(
    knowledge: Knowledge, lists: Codes, names: Sequence[str], seed: int, settings: KgflexSettings
) -> Selection:
    """Return the features that would be selected if each user's list were her items: the cloud after recommendation."""
    listed = _listed(lists, knowledge.items.items).tocsr()
    listed.sort_indices()
    histories = Histories(
        names=tuple(names),
        catalogue=knowledge.items.items,
        starts=listed.indptr.astype(np.int64),
        items=listed.indices.astype(np.int32),
        fakes=np.zeros(len(lists), dtype=np.int64),
    )
    return select(histories, knowledge.items, seed, settings.limits, settings.others, settings.criterion)


def kept(selection: Selection, flags: Flags, top: int | None = None) -> Floats:
    """Return for each user the share of her `top` most informative features that are flagged; nan where she has none.

    Use it with `shown` or `informative_again`; the thesis' Table 6.2 has the quartiles over users.
    """
    counted = np.ones(len(flags), dtype=np.bool_) if top is None else ranks(selection) < top
    whole = np.bincount(selection.owners[counted], minlength=selection.users)
    part = np.bincount(selection.owners[counted & flags], minlength=selection.users)
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def cloud(selection: Selection) -> Floats:
    """Return the prominence of each feature: its information gain summed over all users (Figure 6.4)."""
    return np.bincount(selection.features, selection.weights, selection.total).astype(np.float64)


def _listed(lists: Codes, items: int) -> Csr:
    """Return [users, items] with a one for each item of a list."""
    from scipy import sparse  # For speed of start.

    row, rank = np.nonzero(lists >= 0)
    ones = np.ones(len(row), dtype=np.float32)
    return sparse.coo_array((ones, (row, lists[row, rank])), shape=(len(lists), items)).tocsr()


def _among(selection: Selection, marks: Csr) -> Flags:
    """Return for each entry of the selection whether `marks` has something at its user and feature."""
    width = selection.total
    row = np.repeat(np.arange(marks.shape[0], dtype=np.int64), np.diff(marks.indptr))
    keys = np.sort(row * width + marks.indices)
    wanted = selection.owners * width + selection.features
    index = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    return keys[index] == wanted if len(keys) else np.zeros(len(wanted), dtype=np.bool_)
